"""`primitives.evaluate`: the daemon's evaluation of an environment in Python."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.errors import ConfigError, EnvironmentFailedError
from mlx_parallm.faces.primitives import (
    InferenceModule,
    RolloutConfig,
    SimpleTextEnvironment,
    evaluate,
)
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import estimate
from mlx_parallm.types import Trajectory

ROLLOUTS = RolloutConfig(max_tokens=4, prompt_format="chat")


class Sums(BaseEnvironment):
    """Held out are sums with 7."""

    def reset(self, index: int = 0, split: str = "train") -> State:
        second = 7 if split == "heldout" else index % 6
        return State(f"Sum: {index % 10}+{second}", metadata={"answer": str(index % 10 + second)})

    def update_state(self, state: State, response: str) -> State:
        state = super().update_state(state, response)
        state.done = True
        return state


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [
        float(completion.strip() == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


class Right:
    def compute_rewards(
        self, trajectories: list[Trajectory], method: str = "absolute"
    ) -> list[float]:
        return right(
            [t.response for t in trajectories], [t.metadata["answer"] for t in trajectories]
        )


@pytest.fixture(scope="module")
def inference() -> Iterator[InferenceModule]:
    with InferenceModule("builtin:tiny") as module:
        yield module


def test_held_out_problems_are_answered_and_counted(inference: InferenceModule) -> None:
    prompts = [[{"role": "user", "content": f"Sum: {index}+7"}] for index in range(10)]
    greedy = inference.generate(prompts, max_new_tokens=4, temperature=0.0)
    correct = right(list(greedy), [str(index + 7) for index in range(10)])
    found = evaluate(Sums(inference), Right(), problems=50, samples=4, rollouts=ROLLOUTS)
    assert [problem.prompt for problem in found.problems] == [
        f"Sum: {index}+7" for index in range(10)
    ]
    numbers, expected = found.numbers(), estimate(correct)
    ends = [numbers[f"accuracy{end}"] for end in ("", "_low", "_high")]
    assert ends == [expected.mean, expected.low, expected.high] and ends[1] < ends[2]
    each = [sum(answer.solved for answer in problem.sampled) / 4 for problem in found.problems]
    assert numbers["pass@1"] == pytest.approx(sum(each) / 10)
    assert {"pass@4_low", "sampled_reward", "truncated", "errors"} <= set(numbers)
    again = evaluate(Sums(), right, problems=50, samples=4, rollouts=ROLLOUTS, inference=inference)
    assert again.numbers() == numbers


def test_a_notebook_has_a_running_loop(inference: InferenceModule) -> None:
    async def cell() -> float:
        return evaluate(Sums(inference), right, problems=2, rollouts=ROLLOUTS).numbers()["problems"]

    assert asyncio.run(cell()) == 2


def broken(completions: list[str], **columns: Any) -> list[float]:
    raise KeyError("key")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"problems": 0}, "problems = 0: expected at least 1"),
        ({"sample": 4}, "no setting 'sample': choose of greedy, samples, temperature, top_p"),
        ({"greedy": False}, "neither greedy answers nor samples"),
        ({"samples": -1}, "samples: Input should be greater"),
        ({"environment": Sums()}, "the environment has no InferenceModule: pass inference="),
    ],
)
def test_what_is_wrong_is_said(
    inference: InferenceModule, arguments: dict[str, Any], match: str
) -> None:
    given: dict[str, Any] = {
        "environment": Sums(inference),
        "reward": right,
        "problems": 2,
    } | arguments
    with pytest.raises(ConfigError, match=match):
        evaluate(**given)


def test_a_reward_that_raises_is_no_accuracy_of_0(inference: InferenceModule) -> None:
    with pytest.raises(EnvironmentFailedError, match=r"broken: .*KeyError"):
        evaluate(Sums(inference), broken, problems=2, rollouts=ROLLOUTS)


def test_problems_that_are_trained_on_are_told(
    inference: InferenceModule, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = SimpleTextEnvironment(inference, prompts=["Sort: dbca", "Sort: ba"])
    found = evaluate(
        environment, lambda completions: [1.0] * len(completions), problems=9, rollouts=ROLLOUTS
    )
    assert found.numbers()["accuracy"] == 1 and len(found.problems) == 2

"""Environments of a user's against the real engine, through the InferenceModule that they generate with."""

import random
import re

import pytest

from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.types import RolloutGroup
from tests.environments.test_with_engine import agrees


class Watched:
    """The engine's client; keeps what the engine was asked and what it answered."""

    def __init__(self, client):
        self._client, self.seen = client, {}

    @property
    def max_model_len(self):
        return self._client.max_model_len

    async def generate(self, request):
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests):
        outputs = await self._client.generate_many(requests)
        self.seen |= {request.request_id: (request, output) for request, output in zip(requests, outputs, strict=True)}
        return outputs


class Calculator(BaseEnvironment):
    """The model writes; every turn of it is answered by a tool, in text, until it has had enough turns."""

    def reset(self, seed=0):
        rng = random.Random(seed)
        return State(prompt=f"Sum: {rng.randrange(90)}+{rng.randrange(9)}\n", metadata={"turns": rng.randrange(1, 6)})

    def build_prompt(self, state):
        return state.prompt + "".join(f"{turn['response']}\nTool: {len(turn['response'])}\n" for turn in state.history)

    def is_terminal(self, state):
        return state.step_count >= state.metadata["turns"]


class CalculatorItself(Calculator):
    """The same in a step of its own, which asks another model in between."""

    def __init__(self, inference, other):
        super().__init__(inference)
        self.other = other

    def step(self, state):
        said = self.inference.generate([self.build_prompt(state)], max_new_tokens=6)[0]
        assert isinstance(self.other.generate(["Sort: dcba"], max_new_tokens=4)[0], str)
        state.add_turn("", said)
        return state


@pytest.fixture
def engines(tiny_engine, tiny_tokenizer):
    """What is trained, watched, and another module over the same engine."""
    watched = Watched(tiny_engine.client)
    modules = [InferenceModule.over(client, tiny_tokenizer) for client in (watched, tiny_engine.client)]
    yield watched, *modules
    for module in modules:
        module.close()


@pytest.mark.parametrize("kind", [Calculator, CalculatorItself])
def test_the_sequence_is_what_the_engine_saw_and_the_mask_what_it_sampled(tiny_engine, tiny_tokenizer, engines, kind):
    watched, inference, other = engines
    environment = kind(inference) if kind is Calculator else kind(inference, other)
    config = RolloutConfig(num_parallel=32, group_size=2, max_tokens=6, temperature=1.0, max_token_length=256)
    with RolloutManager(environment, config) as manager:
        trajectories = manager.collect_rollouts(12)
    assert [t.error for t in trajectories] == [None] * 12
    assert len({t.step_count for t in trajectories}) > 2
    for number, trajectory in enumerate(trajectories):
        rollout, member = trajectory.rollout, number % 2
        assert rollout.earlier == ()
        position, given = 0, []
        for turn in range(trajectory.step_count):
            together = kind is Calculator and turn == 0
            name = trajectory.group_id if together else f"{trajectory.group_id}/{member}/{turn}"
            request, output = watched.seen[name]
            completion = output.completions[member if together else 0]
            asked, sampled = request.prompt_token_ids, completion.token_ids
            assert asked == rollout.tokens[: len(asked)]
            given += [0] * (len(asked) - position) + [1] * len(sampled)
            position = len(asked) + len(sampled)
            assert sampled == rollout.tokens[len(asked) : position]
            assert completion.logprobs == rollout.logprobs[len(asked) : position]
            assert trajectory.history[turn].response == completion.text
        assert (list(rollout.mask), position) == (given, len(rollout.tokens))
        text = tiny_tokenizer.decode(rollout.tokens, skip_special_tokens=False)
        assert len(re.findall(r"Tool: \d+\n", text)) >= trajectory.step_count - 1
    agrees(tiny_engine.client, tiny_tokenizer, RolloutGroup("g", "e", tuple(t.rollout for t in trajectories[:4])))


def test_the_demonstration_and_the_example_run(capsys):
    from examples import custom_environment
    from mlx_parallm.primitives import environment

    environment.main()
    shown = capsys.readouterr().out
    assert "asked 'Sum: 47+38', it said" in shown
    assert "12 trajectories, 2.0 steps each" in shown
    custom_environment.main()
    assert "turns on average" in capsys.readouterr().out
    reset = custom_environment.Retry(highest=9).reset
    train, heldout = ({str(reset(seed, split)) for seed in range(200)} for split in ("train", "heldout"))
    assert train.isdisjoint(heldout) and heldout

"""A BaseEnvironment as the source of an [[environments]] entry: its tasks, its rewards, what is
refused."""

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.state import HELDOUT_FIRST, State, StateSource
from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.functions import RewardFunctions
from tests.environments.scripted_client import ScriptedClient
from tests.environments.test_state_episodes import Counting, played, source


def test_tasks_are_functions_of_what_reset_takes():
    class Drawn(Counting):
        def reset(self, seed, split):
            return State(prompt=f"{split} {seed}")

    class Plain(Counting):
        count = 0

        def reset(self):
            self.count += 1
            return State(prompt=f"number {self.count}")

    indexed, drawn = source(Counting()), source(Drawn())
    assert [indexed.task(index).state.prompt for index in (2, 0, 2)] == [
        "Say 2:",
        "Say 0:",
        "Say 2:",
    ]
    assert indexed.task(1, "heldout").state.prompt == f"Say {HELDOUT_FIRST + 1}:"
    assert indexed.task(2).answer == "2"
    assert drawn.task(1) == drawn.task(1)
    assert drawn.task(1).key != drawn.task(2).key
    other = StateSource(drawn.config, Drawn, seed=5)
    assert other.task(1).state != drawn.task(1).state
    # the same for every seed of a run
    assert other.task(1, "heldout").state == drawn.task(1, "heldout").state
    assert (indexed.in_order, drawn.in_order) == (False, False)
    in_order = StateSource(drawn.config, Plain, seed=0)
    assert in_order.in_order
    assert in_order.task(0).state.prompt == "number 1"
    assert in_order.task(0, "heldout").state.prompt == "number 1"  # uses up none of the training's
    assert in_order.task(0).state.prompt == "number 2"


OWN = """
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.state import BaseEnvironment, State

class Good(BaseEnvironment):
    def __init__(self, inference=None, start=0, seed=None):
        super().__init__(inference)
        self.start, self.seed = start, seed

    def reset(self, index=0):
        return State(prompt=f"Say {self.start + index}", metadata={"answer": str(index), "seed": self.seed})

class NoReset(BaseEnvironment):
    pass

class Required(Good):
    def reset(self, difficulty):
        return State(prompt="x")

class AsyncReset(Good):
    async def reset(self):
        return State(prompt="x")

class AsyncUpdate(Good):
    async def update_state(self, state, response):
        return state

class Short(Good):
    def update_state(self, state):
        return state

class Scores(EnvironmentSource):
    def task(self, index, split="train"):
        raise NotImplementedError

def length(completions, answer, trajectories, **kwargs):
    return [len(text) + int(right) + t.step_count for text, right, t in zip(completions, answer, trajectories)]
"""


def from_file(tmp_path, name, **fields):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    fields = {"rewards": (f"python:{path}:length",)} | fields
    config = EnvironmentConfig(kind=f"python:{path}:{name}", name="own", **fields)
    [built] = build_sources([config], seed=4)
    return built


async def test_a_class_of_the_users_is_played_and_scored(tmp_path, tokenizer):
    built = from_file(tmp_path, "Good", options={"start": 5})
    assert built.task(2).messages == ({"role": "user", "content": "Say 7"},)
    assert built.task(2).state.metadata["seed"] == 4  # the run's, as the constructor takes one
    built.template.is_terminal = lambda state: state.step_count == 1
    client = ScriptedClient(tokenizer, lambda request, choice: "x" * (choice + 1))
    result = await played(tokenizer, client, built, task=2, size=2)
    assert result.failure is None
    assert [rollout.reward for rollout in result.group.rollouts] == [1 + 2 + 1, 2 + 2 + 1]
    assert [t.rollout.reward for t in result.trajectories] == [4.0, 5.0]


class ByLength(RewardFunctions):
    """The reward of its source: a number."""

    def __init__(self, value):
        self.value = value

    def for_row(self, prompt, columns, progress):
        return lambda responses: [{"reward": float(self.value)} for _ in responses]


async def test_an_environments_attributes_are_its_authors(tokenizer):
    """Two sources play one environment, which uses every name that a source has."""
    names = [name for name in dir(source(Counting())) if not name.startswith("_")]
    own = {name: name for name in names if not hasattr(Counting, name)}
    assert {"config", "seed", "name", "tools", "rewards", "task", "play", "heldout"} <= set(own)
    environment = Counting()
    vars(environment).update(own)
    both = [source(environment, ByLength(length), max_tokens=length) for length in (7, 9)]
    client = ScriptedClient(tokenizer, lambda *_: "x")
    results = [await played(tokenizer, client, each, task=1, size=1) for each in both]
    assert [result.trajectories[0].rollout.reward for result in results] == [7.0, 9.0]
    assert [request.params.max_tokens for request in client.requests] == [7, 9]
    assert vars(environment) == {"inference": None} | own


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("NoReset", {}, r"NoReset does not define reset\(\)"),
        (
            "Required",
            {},
            r"Required.reset takes \(self, difficulty\), but it is called with \(self\)",
        ),
        ("AsyncReset", {}, "AsyncReset.reset is async"),
        ("AsyncUpdate", {}, "AsyncUpdate.update_state is async"),
        (
            "Short",
            {},
            r"Short.update_state takes \(self, state\), but it is called with \(self, state, response\)",
        ),
        ("Good", {"rewards": ()}, "an environment does not score itself: it needs rewards"),
        ("Good", {"options": {"stat": 1}}, r"but it is called with \(stat=…, seed=…\)"),
        ("Scores", {}, "scores its tasks itself: rewards has no effect"),
    ],
)
def test_a_class_that_cannot_work_is_refused(tmp_path, name, fields, message):
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path, name, **fields)


def test_kinds_are_known_by_name():
    [built] = build_sources(
        [
            EnvironmentConfig(
                kind="simple_text",
                name="x",
                options={"prompts": ["A", "B"]},
                rewards=("builtin:json",),
            )
        ],
        seed=0,
    )
    assert [built.task(index).messages[0]["content"] for index in range(3)] == ["A", "B", "A"]
    with pytest.raises(ConfigError, match="comes over HTTP"):
        build_sources([EnvironmentConfig(kind="verifiers", name="x")], seed=0)
    with pytest.raises(ConfigError, match="'conversation'"):
        build_sources([EnvironmentConfig(kind="conversations", name="x")], seed=0)


def test_rewards_are_handed_the_engine():
    class Asking(RewardFunctions):
        def __init__(self):
            self.given = []

        def attach(self, inference):
            self.given.append(inference)

    rewards, engine, own = Asking(), object(), object()
    built = source(Counting(), rewards)
    built.attach(engine)
    assert (built.template.inference, rewards.given) == (engine, [engine])
    built.attach(other := object())
    assert built.template.inference is other
    built = source(Counting(own))
    built.attach(engine)
    assert built.template.inference is own

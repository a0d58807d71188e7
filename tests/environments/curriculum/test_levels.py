"""Levels of difficulty of one environment."""

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.errors import ConfigError
from tests.environments.scripted_client import ScriptedClient


class Digits(BaseEnvironment):
    """Two turns; `digits` says how hard it is."""

    def __init__(self, inference=None, digits=1, base=10):
        super().__init__(inference)
        self.digits, self.base = digits, base

    def reset(self, index=0):
        return State(prompt=f"{self.digits} of {self.base}: {index}", metadata={"turns": 0})

    def update_state(self, state, response):
        state = super().update_state(state, response)
        state.metadata["digits"] = self.digits  # the level that plays is the one that asked
        state.done = state.step_count == 2
        return state


class InOrder(Digits):
    def reset(self):
        return State(prompt="next")


def by_digits(trajectories, **_columns):
    digits = [each.metadata["digits"] for each in trajectories]
    return [[1.0, float(n % 2), 0.0, 0.0][digit - 1] for n, digit in enumerate(digits)]


def entry(**keys):
    keys = {"kind": f"python:{__name__}:Digits", "options": {"base": 7}, **keys}
    return EnvironmentConfig(rewards=[f"python:{__name__}:by_digits"], group_size=4, **keys)


LEVELS = [{"digits": digits} for digits in (1, 2, 3, 4)]


def test_groups_take_the_level_that_teaches(managed, tokenizer, tmp_path):
    made = lambda: build_sources([entry(levels=LEVELS)], seed=0)  # noqa: E731
    [source] = made()
    source.draws.keep(tmp_path)
    client = ScriptedClient(tokenizer, lambda *_: "1")
    manager, inbox = managed(client, sources=[source], num_parallel=8)
    manager.request_groups(60)
    inbox.wait(groups=60)
    manager.stop()
    assert not inbox.failures
    rewards = [{each.reward for each in group.rollouts} for group in inbox.groups]
    assert sum(len(each) == 2 for each in rewards) > 30  # one level of four
    assert {0.0} in rewards and {1.0} in rewards
    [again] = made()
    again.draws.keep(tmp_path)
    assert again.draws.kinds() == source.draws.kinds()
    assert again.draws.kinds().learnable == 1

    tasks = [source.task(index) for index in range(8)]
    assert [task.messages[0]["content"] for task in tasks] == [
        f"{digits} of 7: {index}" for index in (0, 1) for digits in (1, 2, 3, 4)
    ]
    heldout = [task.messages[0]["content"][0] for task in source.heldout(8)]
    assert heldout == list("12341234")


def test_reasoning_gym_has_levels():
    pytest.importorskip("reasoning_gym")
    levels = [{"min_terms": terms, "max_terms": terms} for terms in (2, 6)]
    [source] = build_sources(
        [EnvironmentConfig(kind="reasoning_gym", name="chain_sum", levels=levels)], seed=0
    )
    signs = [
        sum(source.task(k).messages[0]["content"].count(sign) for sign in "+-") for k in (0, 1)
    ]
    assert signs[0] < signs[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"levels": LEVELS[:1]}, "levels has one level"),
        ({"kind": "dataset", "data": "rows.jsonl", "options": {}, "levels": LEVELS}, "no levels"),
        ({"levels": [*LEVELS, {"digit": 2}]}, r"levels\[4\].*digit"),
        ({"kind": f"python:{__name__}:InOrder", "levels": LEVELS}, "follow from `index` or `seed`"),
        ({"adaptive": {"floor": 0.5}}, "or levels"),
        ({"kind": "tasks", "name": "sum", "levels": LEVELS}, "takes no options"),
    ],
)
def test_levels_that_cannot_be(keys, message):
    keys = {"rewards": ()} | keys if keys.get("kind") == "tasks" else keys
    with pytest.raises((ConfigError, ValueError), match=message):
        if keys.get("kind") == "tasks":
            build_sources([EnvironmentConfig(**keys)], seed=0)
        else:
            build_sources([entry(**keys)], seed=0)

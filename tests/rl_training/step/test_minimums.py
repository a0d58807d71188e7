"""Places of a batch that are kept for environments with a minimum share, and numbers of each; over the real store."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.rl_training.publish.versions import VersionSteps
from mlx_parallm.rl_training.rollout_buffer import Minimum, RolloutBuffer
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import RolloutGroup
from tests.rl_training.rollouts import make_group
from tests.rl_training.test_rollout_buffer import add, make_buffer


def of(environment: str, group_id: str, rewards: list[float], **values: Any) -> RolloutGroup:
    return replace(make_group(group_id, rewards, **values), environment=environment)


def collected(buffer: RolloutBuffer, step: int = 1) -> TrainBatch:
    """`collect` until there is a batch, at most fifty times."""
    batches = (buffer.collect(step, timeout_s=0) for _ in range(50))
    return next(batch for batch in batches if batch is not None)


def test_places_of_an_environment_that_stops_delivering_go_to_the_others(store: RolloutStore) -> None:
    minimums = {"b": Minimum(4, 4)}
    buffer = make_buffer(store, request_groups=lambda n: None, minimums=lambda: minimums)
    add(store, *[of("a", f"a{i}", [0, 1]) for i in range(6)])
    assert buffer.collect(1, timeout_s=0) is None
    minimums.clear()
    batch = buffer.collect(1, timeout_s=0)
    assert batch is not None
    assert len(batch.sequences) == 8
    minimums["b"] = Minimum(4, 4)
    assert buffer.collect(2, timeout_s=0) is None
    add(store, of("b", "b0", [0, 1, 1, 0]))
    assert [group.environment for group in collected(buffer, 2).groups] == ["a", "a", "b"]


def test_a_minimum_is_lifted_when_its_groups_teach_nothing(store: RolloutStore) -> None:
    asked: list[int] = []

    def ask(n: int) -> None:
        start = sum(asked)
        add(store, *[of("a", f"p{i}", [0, 1], index=i) for i in range(start, start + n)])
        asked.append(n)

    buffer = make_buffer(store, request_groups=ask, minimums=lambda: {"h": Minimum(4, 2)}, max_empty_rounds=3)
    add(store, *[of("h", f"h{i}", [1, 1]) for i in range(2)])
    buffer.request(1)
    assert [buffer.collect(1, timeout_s=0) for _ in range(6)] == [None] * 6, "it delivers: its places are kept"
    assert len(asked) == 1, "nobody can ask for its groups"
    add(store, of("h", "h2", [1, 1]))
    healths: list[str | None] = []
    while (batch := buffer.collect(1, timeout_s=0)) is None:
        healths.append(buffer.health())
    assert {group.environment for group in batch.groups} == {"a"}
    assert not batch.gave_up
    assert healths[-1] is not None
    assert healths[-1].startswith("step 1 is made without the minimum share of h")


@pytest.mark.parametrize("sampling", ["uniform", "priority"])
def test_a_minimum_holds_however_groups_are_chosen(store: RolloutStore, sampling: str) -> None:
    buffer = make_buffer(store, buffer_sampling=sampling, minimums=lambda: {"b": Minimum(4, 2)})
    add(store, *[of("a", f"a{i}", [0, 9]) for i in range(9)], *[of("b", f"b{i}", [0, 1]) for i in range(2)])
    assert sorted(group.environment for group in collected(buffer).groups) == ["a", "a", "b", "b"]


def test_numbers_of_each_environment(store: RolloutStore) -> None:
    versions = VersionSteps()
    versions.record(1, 1)
    versions.record(2, 2)
    buffer = make_buffer(store, versions, max_staleness=1, rollout_batch_size=6)
    add(store, of("a", "old", [0, 1], version=0), of("a", "a0", [0, 1], version=1), of("a", "a1", [1, 1], version=2))
    add(store, of("b", "b0", [0, 3], version=2), of("a", "a2", [0, 1], version=2))
    numbers = collected(buffer, 3).statistics.environments
    assert numbers["a"] == {
        "groups": 3, "reward_mean": pytest.approx(4 / 6), "trained_groups": 2, "trained_sequences": 4,
        "staleness": 0.5, "dropped_stale": 1,
    }  # fmt: skip
    assert numbers["b"] == {
        "groups": 1, "reward_mean": 1.5, "trained_groups": 1, "trained_sequences": 2, "staleness": 0, "dropped_stale": 0
    }  # fmt: skip

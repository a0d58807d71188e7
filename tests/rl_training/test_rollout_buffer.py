"""Which groups a step takes, and what becomes of the others; over the real store."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.faces.library.algorithms import CollectedGroups
from mlx_parallm.losses.advantages import PLAIN, Shaping, group_advantages, token_advantages
from mlx_parallm.rl_training.options import configured_shaping, make_algorithm
from mlx_parallm.rl_training.rollout_buffer import (
    NO_VARIANCE,
    TOO_OLD,
    Minimum,
    RolloutBuffer,
)
from mlx_parallm.rl_training.step.algorithms import shaping_of
from mlx_parallm.rl_training.step.batch import TrainBatch, quantile
from mlx_parallm.rollout_store.checks import OTHER_MODEL, TOO_LARGE
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.versions import VersionSteps
from mlx_parallm.types import RolloutGroup
from tests.rl_training.making import make_config
from tests.rl_training.rollouts import make_group, make_rollout


class Player:
    """An in-process source: every group asked for is in the store at once. `rewards(index)` of
    the index-th group."""

    def __init__(
        self, store: RolloutStore, rewards: Callable[[int], list[float]], version: int = 0
    ) -> None:
        self.store, self.rewards, self.version = store, rewards, version
        self.asked: list[int] = []
        self.next = 0

    def __call__(self, n: int) -> None:
        self.asked.append(n)
        for _ in range(n):
            group = make_group(
                f"g{self.next}", self.rewards(self.next), index=self.next, version=self.version
            )
            self.store.add(group, source="test")
            self.next += 1


def make_buffer(
    store: RolloutStore, versions: VersionSteps | None = None, **values: Any
) -> RolloutBuffer:
    """`values`: keys of [rl_training], `rollout_batch_size`, and arguments of RolloutBuffer."""
    names = (
        "group_sizes",
        "request_groups",
        "minimums",
        "is_mismatched",
        "shaping",
        "pairs",
        "singles",
    )
    options = {"group_sizes": [2]} | {name: values.pop(name) for name in names if name in values}
    estimate = values.pop("estimate", group_advantages)
    config = RLTrainingConfig()
    atropos = config.atropos.model_copy(
        update={"rollout_batch_size": values.pop("rollout_batch_size", 8)}
    )
    config = config.model_copy(update={"atropos": atropos, **values})
    return RolloutBuffer(store, versions or VersionSteps(), estimate, config, **options)


def add(store: RolloutStore, *groups: RolloutGroup) -> None:
    for group in groups:
        store.add(group, source="http")


def test_first_come_first_served_whole_groups(store: RolloutStore) -> None:
    add(store, *[make_group(f"g{i}", [0, 1]) for i in range(6)])
    buffer = make_buffer(store)
    batch = buffer.collect(1, timeout_s=0)
    assert batch.group_ids == ("g0", "g1", "g2", "g3")
    assert len(batch.sequences) == 8
    assert batch.sequences[0].advantages == pytest.approx((-1,) * 5)
    assert store.counts().taken == 4
    assert buffer.collect(2, timeout_s=0) is None
    store.restore(0)
    assert store.counts().waiting == 6


def test_groups_without_variance_are_dropped_counted_and_replaced(store: RolloutStore) -> None:
    player = Player(store, lambda i: [1, 1] if i % 3 == 0 else [0, 1])
    buffer = make_buffer(store, request_groups=player)
    buffer.request(1)
    assert player.asked == [4]
    batch = buffer.collect(1, timeout_s=1)
    assert player.asked == [4, 4]  # g0 and g3 say nothing; at this rate 2 more need 4
    assert batch.group_ids == ("g1", "g2", "g4", "g5")
    assert store.drop_reasons() == {NO_VARIANCE: 2}
    statistics = batch.statistics
    assert (statistics.groups, statistics.sequences) == (6, 12)
    assert statistics.groups_without_variance == pytest.approx(2 / 6)
    assert statistics.reward_mean == pytest.approx((2 * 2 + 4) / 12)
    assert statistics.reward_by_environment == {"test": statistics.reward_mean}


def test_statistics_begin_anew_with_each_step(store: RolloutStore) -> None:
    add(
        store,
        *[make_group(f"g{i}", [0, 1] if i < 4 else [0, 3], stop_reason="length") for i in range(8)],
    )
    buffer = make_buffer(store)
    assert buffer.collect(1, timeout_s=0).statistics.reward_mean == pytest.approx(0.5)
    second = buffer.collect(2, timeout_s=0).statistics
    assert (second.reward_mean, second.reward_std) == (1.5, 1.5)
    assert (second.reward_p25, second.reward_p75) == (0, 3)
    assert [quantile([1, 5, 2, 8], share) for share in (0, 0.25, 0.5, 1)] == [1, 1.75, 3.5, 8]
    assert quantile([7], 0.25) == 7
    assert second.truncated_fraction == 1.0
    assert second.completion_tokens_mean == 2


def test_groups_that_are_too_old_are_dropped(store: RolloutStore) -> None:
    """Versions 1 and 2 were published after steps 1 and 2. In step 3, version 0 is 2 steps old,
    version 1 is 1."""
    versions = VersionSteps()
    versions.record(1, 1)
    versions.record(2, 2)
    mixed = make_group("mixed", [0, 1], version=2)
    # one sampled token of version 0
    oldest = replace(mixed.rollouts[0], policy_versions=(0, 0, 0, 0, 2))
    add(
        store,
        make_group("old", [0, 1], version=0),
        replace(mixed, rollouts=(oldest, mixed.rollouts[1])),
        make_group("last", [0, 1], version=1),
        make_group("lost", [0, 1], version=9),  # by weights that a kill -9 lost
        make_group("unknown", [0, 1], version=-1),
    )
    buffer = make_buffer(store, versions, max_staleness=1)
    add(store, *[make_group(f"new{i}", [0, 1], version=2) for i in range(2)])
    batch = buffer.collect(3, timeout_s=0)
    assert batch.group_ids == ("last", "unknown", "new0", "new1")
    assert store.drop_reasons() == {TOO_OLD: 3}
    assert batch.statistics.dropped_stale == 3
    assert (batch.statistics.staleness, batch.statistics.staleness_max) == (0.25, 1)
    fresh = [sequence.fresh for sequence in batch.sequences]
    assert not fresh[0]
    assert fresh[-1]
    assert not fresh[2], "what waited before the process started may be of lost weights"


def test_tokens_that_were_given_do_not_make_a_group_old(store: RolloutStore) -> None:
    versions = VersionSteps()
    versions.record(5, 5)
    group = make_group("g", [0, 1], version=5)
    rollouts = tuple(replace(r, policy_versions=(0, 0, 0, 5, 5)) for r in group.rollouts)
    add(store, replace(group, rollouts=rollouts))
    assert (
        make_buffer(store, versions, max_staleness=0, rollout_batch_size=2).collect(6, timeout_s=0)
        is not None
    )


@pytest.mark.parametrize("read_under", [4, -1])
def test_a_sequence_is_fresh_only_if_its_prompt_was_read_by_the_same_weights(
    store: RolloutStore, read_under: int
) -> None:
    """Keys and values of older weights in the cache move the log-probabilities of what is
    sampled later."""
    versions = VersionSteps()
    versions.record(4, 4)
    versions.record(5, 5)
    buffer = make_buffer(store, versions, rollout_batch_size=2)
    group = make_group("g", [0, 1], version=5)
    straddling = replace(group.rollouts[0], policy_versions=(read_under,) * 3 + (5, 5))
    add(store, replace(group, rollouts=(straddling, group.rollouts[1])))
    batch = buffer.collect(6, timeout_s=0)
    assert batch is not None
    assert [sequence.fresh for sequence in batch.sequences] == [False, True]


def test_a_request_counts_what_waits_and_what_is_on_its_way(store: RolloutStore) -> None:
    asked: list[int] = []
    versions = VersionSteps()
    add(store, make_group("waits", [0, 1]))
    buffer = make_buffer(store, versions, request_groups=asked.append, max_staleness=0)
    buffer.request(1)
    buffer.request(1)
    assert asked == [3]
    versions.record(1, 1)
    buffer.request(2)  # what waits is too old for step 2
    assert asked == [3, 1]


def test_what_a_former_process_left_is_not_an_answer_to_a_request(store: RolloutStore) -> None:
    store.add(make_group("left", [0, 1], index=0), source="test")
    asked: list[int] = []
    buffer = make_buffer(store, request_groups=asked.append)
    buffer.request(1)
    assert asked == [3]
    add(store, *[make_group(f"g{i}", [0, 1], index=i) for i in range(1, 3)])
    assert buffer.collect(1, timeout_s=0) is None
    assert asked == [3], "one is still on its way"


@pytest.mark.parametrize("useful", [0, 1])
def test_a_step_is_given_up_after_refills_without_one_trainable_group(
    store: RolloutStore, useful: int
) -> None:
    player = Player(store, lambda i: [0, 1] if i < useful else [1, 1])
    buffer = make_buffer(store, request_groups=player, max_empty_rounds=3, max_oversampling=0.0)
    batch = requested(buffer)
    assert len(batch.sequences) == 2 * useful
    assert "3 refills in a row" in batch.gave_up and "troubleshooting.md#too-easy" in batch.gave_up
    assert player.asked == [4, 4, 8, 16], "each refill at most doubles what was sampled"
    assert batch.statistics.groups == player.next


@pytest.mark.parametrize(("bound", "asked"), [(1.0, [4]), (2.5, [4, 4, 2]), (4.0, [4, 4, 8])])
def test_what_a_step_samples_is_bounded(
    store: RolloutStore, bound: float, asked: list[int]
) -> None:
    """One group of ten is useful: a step of 4 groups would sample 40."""
    player = Player(store, lambda i: [0, 1] if i % 10 == 0 else [0, 0] if i % 10 < 3 else [1, 1])
    batch = requested(make_buffer(store, request_groups=player, max_oversampling=bound))
    assert player.asked == asked
    useful = -(-sum(asked) // 10)
    assert len(batch.sequences) == 2 * useful
    assert (
        f"max_oversampling = {bound:g} ends the step {8 - 2 * useful} sequences short"
        in batch.gave_up
    )
    wrong = {1.0: 2, 2.5: 2, 4.0: 4}[bound]
    lost = sum(asked) - useful
    assert (
        f"of {lost} groups with one reward for all answers {lost - wrong} were all right and"
        f" {wrong} all wrong"
    ) in (batch.gave_up)
    assert batch.statistics.dropped_without_variance == lost


def test_a_refill_is_sized_by_the_share_of_useful_groups(store: RolloutStore) -> None:
    """3 of 12 were useful: 9 more need 36, of which the bound leaves 4 · 12 - 12."""
    player = Player(store, lambda i: [0, 1] if i % 4 == 0 else [1, 1])
    batch = requested(
        make_buffer(store, request_groups=player, rollout_batch_size=24, max_oversampling=100.0)
    )
    assert player.asked == [12, 12, 24]
    assert len(batch.sequences) == 24 and not batch.gave_up


def test_a_step_does_not_eat_the_groups_of_later_ones_beyond_its_bound(store: RolloutStore) -> None:
    """With max_staleness = 4 five steps' groups are on their way: one step used to go through
    all of them."""
    buffer = make_buffer(
        store, request_groups=lambda n: None, max_staleness=4, max_oversampling=2.0
    )
    buffer.request(1, 5)
    for i in range(12):
        store.add(make_group(f"g{i}", [1, 1], index=i), source="test")
    batch = buffer.collect(1, timeout_s=0)
    assert batch is not None and not batch.sequences and "all right" in batch.gave_up
    assert store.drop_reasons() == {NO_VARIANCE: 8}
    assert store.counts().waiting == 4


def test_groups_without_variance_are_kept_where_nothing_replaces_them(store: RolloutStore) -> None:
    """As TRL does: they have the advantage 0, and count in the normalizers of the loss."""
    player = Player(store, lambda i: [1, 1] if i % 2 else [0, 1])
    batch = requested(make_buffer(store, request_groups=player, dynamic_sampling=False))
    assert player.asked == [4]
    assert [sequence.advantages[0] for sequence in batch.sequences] == pytest.approx(
        [-1, 1, 0, 0] * 2
    )
    assert not batch.gave_up and not store.drop_reasons()
    statistics = batch.statistics
    assert (statistics.groups_without_variance, statistics.dropped_without_variance) == (0.5, 0)
    assert statistics.environments["test"]["trained_groups"] == 4
    again = make_buffer(store, dynamic_sampling=False)
    store.restore(0)
    assert [s.advantages for s in again.resume(1, batch.group_ids).sequences] == [
        s.advantages for s in batch.sequences
    ]


def test_uniform_sampling_follows_the_seed(store: RolloutStore) -> None:
    groups = [make_group(f"g{i}", [0, 1]) for i in range(20)]
    add(store, *groups)

    def chosen(seed: int) -> tuple[str, ...]:
        ids = (
            make_buffer(store, buffer_sampling="uniform", seed=seed)
            .collect(1, timeout_s=0)
            .group_ids
        )
        store.restore(0)
        return ids

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert chosen(1) != ("g0", "g1", "g2", "g3")


def test_priority_takes_the_largest_advantages(store: RolloutStore) -> None:
    add(store, *[make_group(f"g{i}", [0, i]) for i in (1, 5, 2, 4, 3, 0)])
    mean = partial(group_advantages, kind="mean")
    buffer = make_buffer(
        store, estimate=mean, rollout_batch_size=6, buffer_sampling="priority", group_sizes=[]
    )
    assert buffer.collect(1, timeout_s=0).group_ids == ("g5", "g4", "g3")
    assert store.drop_reasons() == {NO_VARIANCE: 1}


class Rollouts(tuple[Any, ...]):
    """Counts how often somebody asks for its length."""

    asked = 0

    def __len__(self) -> int:
        type(self).asked += 1
        return super().__len__()


@pytest.mark.parametrize("sampling", ["uniform", "priority"])
def test_the_work_of_a_choice_is_a_multiple_of_what_there_is_to_choose_from(sampling: str) -> None:
    """It was quadratic: for each group the sequences of all groups before it were counted."""

    def lengths_asked(count: int) -> int:
        groups = [make_group(f"g{i}", [0, 1], index=i) for i in range(count)]
        groups = [replace(group, rollouts=Rollouts(group.rollouts)) for group in groups]
        store = CollectedGroups(lambda n: groups)
        buffer = make_buffer(
            store,
            buffer_sampling=sampling,
            rollout_batch_size=2 * count,
            request_groups=store.request,
        )
        buffer.request(1)
        Rollouts.asked = 0
        assert len(buffer.collect(1, timeout_s=0).groups) == count
        return Rollouts.asked

    assert lengths_asked(64) < 5 * lengths_asked(16)


def test_advantages_of_a_group_that_waits_are_computed_once() -> None:
    groups, computed = [make_group(f"g{i}", [0, 1], index=i) for i in range(6)], list[object]()
    store = CollectedGroups(lambda n: [groups.pop(0)])  # one after another

    def estimate(rewards: Sequence[float]) -> tuple[float, ...]:
        computed.append(rewards)
        return (-1.0, 1.0)

    options: dict[str, Any] = {
        "buffer_sampling": "uniform",
        "estimate": estimate,
        "request_groups": store.request,
    }
    buffer = make_buffer(store, rollout_batch_size=12, **options)
    buffer.request(1)
    while buffer.collect(1, timeout_s=0) is None:
        pass
    assert len(computed) == 6


def test_deterministic_mode_waits_for_all_and_goes_by_index(store: RolloutStore) -> None:
    buffer = make_buffer(
        store, request_groups=lambda n: None, deterministic=True, rollout_batch_size=4
    )
    buffer.request(1)
    store.add(make_group("b", [0, 1], index=1), source="test")
    add(store, make_group("extern", [0, 1]))
    assert buffer.collect(1, timeout_s=0) is None
    store.add(make_group("a", [0, 1], index=0), source="test")
    assert buffer.collect(1, timeout_s=0).group_ids == ("a", "b")


def test_an_interrupted_step_gets_its_groups_back(store: RolloutStore) -> None:
    add(store, *[make_group(f"g{i}", [0, 1]) for i in range(8)])
    first = make_buffer(store).collect(1, timeout_s=0)
    store.restore(0)
    again = make_buffer(store)
    batch = again.resume(1, first.group_ids[::-1])
    assert batch.group_ids == first.group_ids[::-1]
    assert sorted(s.advantages for s in batch.sequences) == sorted(
        s.advantages for s in first.sequences
    )
    assert again.collect(2, timeout_s=0).group_ids == ("g4", "g5", "g6", "g7")


def test_what_is_reset_is_forgotten_although_it_was_read(store: RolloutStore) -> None:
    """`/atropos/reset_data` drops groups in the store that the buffer holds already, some of
    them chosen."""
    buffer = make_buffer(store)
    add(store, make_group("chosen", [0, 1]), make_group("too large", [0, 1, 0, 1, 0, 1, 1]))
    assert buffer.collect(1, timeout_s=0) is None
    assert store.drop_waiting("http", 0, "reset") == 2
    add(store, *[make_group(f"new{i}", [0, 2]) for i in range(4)])
    batch = buffer.collect(1, timeout_s=0)
    assert batch.group_ids == ("new0", "new1", "new2", "new3")
    assert (batch.statistics.groups, batch.statistics.reward_mean) == (4, 1.0), (
        "those dropped are not counted"
    )
    assert store.drop_reasons() == {"reset": 2}


@pytest.mark.parametrize("sampling", ["fifo", "uniform"])
def test_groups_of_another_model_are_dropped_counted_and_replaced(
    store: RolloutStore, sampling: str
) -> None:
    """Asked once of each that is about to enter a batch, and of none that was played here (it
    has an index)."""
    asked: list[str] = []

    def is_mismatched(group: RolloutGroup) -> bool:
        asked.append(group.group_id)
        return group.group_id.startswith("foreign")

    foreign = [make_group(f"foreign{i}", [0, 1]) for i in range(3)]
    add(
        store,
        *foreign,
        make_group("constant", [1, 1]),
        *[make_group(f"g{i}", [0, 1]) for i in range(2)],
    )
    buffer = make_buffer(store, is_mismatched=is_mismatched, sampling=sampling)
    assert buffer.collect(1, timeout_s=0) is None
    add(
        store, make_group("g2", [0, 1]), *[make_group(f"own{i}", [0, 1], index=i) for i in range(2)]
    )
    while (batch := buffer.collect(1, timeout_s=0)) is None:
        assert str(buffer.health()).startswith(
            "another model's groups: 3 dropped while step 1 waited for its batch; their"
            " log-probabilities are far from"
        )
        add(store, make_group(f"late{len(asked)}", [0, 1]))
    assert not [group_id for group_id in batch.group_ids if group_id.startswith("foreign")]
    assert store.drop_reasons() == {
        OTHER_MODEL: len([a for a in asked if a.startswith("foreign")]),
        NO_VARIANCE: 1,
    }
    assert batch.statistics.dropped_misfit == store.drop_reasons()[OTHER_MODEL]
    assert len(asked) == len(set(asked))
    assert not [group_id for group_id in asked if group_id.startswith(("own", "constant"))]


def test_segments_of_an_episode_share_its_advantage_and_count_as_one_sequence(
    store: RolloutStore,
) -> None:
    """Rewards 1 and 0: advantages 1 and -1. The first episode has two segments, so three
    sequences are trained on."""
    versions = VersionSteps()
    versions.record(1, 1)
    group = make_group("g", [1, 0], version=1)
    earlier = make_rollout((7,), prompt=(4,), version=0)
    group = replace(
        group, rollouts=(replace(group.rollouts[0], earlier=(earlier,)), group.rollouts[1])
    )
    buffer = make_buffer(store, versions, rollout_batch_size=2, max_staleness=1)
    add(store, group)
    batch = buffer.collect(2, timeout_s=0)
    assert [sequence.rollout.tokens for sequence in batch.sequences] == [
        (4, 7),
        (1, 2, 3, 5, 6),
        (1, 2, 3, 5, 6),
    ]
    assert [sequence.advantages for sequence in batch.sequences] == [
        pytest.approx((1.0,) * 2),
        pytest.approx((1.0,) * 5),
        pytest.approx((-1.0,) * 5),
    ]
    assert [sequence.fresh for sequence in batch.sequences] == [False, True, True]
    statistics = batch.statistics
    assert (statistics.sequences, statistics.extra_segments, statistics.staleness_max) == (2, 1, 1)
    assert statistics.completion_tokens_mean == (3 + 2) / 2


def test_groups_without_logprobs_are_counted_and_left_out_of_what_needs_them(
    store: RolloutStore,
) -> None:
    unknown = tuple(replace(rollout, logprobs=None) for rollout in make_group("x", [0, 1]).rollouts)
    buffer = make_buffer(store, rollout_batch_size=4)
    add(
        store,
        make_group("g", [0, 1], logprob=-0.25),
        replace(make_group("x", [0, 1]), rollouts=unknown),
    )
    batch = buffer.collect(1, timeout_s=0)
    assert batch.statistics.groups_without_logprobs == 1
    assert batch.statistics.rollout_entropy == 0.25
    assert [sequence.fresh for sequence in batch.sequences] == [True, True, False, False]


def of(environment: str, group_id: str, rewards: list[float], **values: Any) -> RolloutGroup:
    return replace(make_group(group_id, rewards, **values), environment=environment)


def collected(buffer: RolloutBuffer, step: int = 1) -> TrainBatch:
    """`collect` until there is a batch, at most fifty times."""
    batches = (buffer.collect(step, timeout_s=0) for _ in range(50))
    return next(batch for batch in batches if batch is not None)


def requested(buffer: RolloutBuffer, step: int = 1) -> TrainBatch:
    buffer.request(step)
    return collected(buffer, step)


def test_places_of_an_environment_that_stops_delivering_go_to_the_others(
    store: RolloutStore,
) -> None:
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

    buffer = make_buffer(
        store, request_groups=ask, minimums=lambda: {"h": Minimum(4, 2)}, max_empty_rounds=3
    )
    add(store, *[of("h", f"h{i}", [1, 1]) for i in range(2)])
    buffer.request(1)
    assert [buffer.collect(1, timeout_s=0) for _ in range(6)] == [None] * 6, (
        "it delivers: its places are kept"
    )
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
    add(
        store,
        *[of("a", f"a{i}", [0, 9]) for i in range(9)],
        *[of("b", f"b{i}", [0, 1]) for i in range(2)],
    )
    assert sorted(group.environment for group in collected(buffer).groups) == ["a", "a", "b", "b"]


def test_numbers_of_each_environment(store: RolloutStore) -> None:
    versions = VersionSteps()
    versions.record(1, 1)
    versions.record(2, 2)
    buffer = make_buffer(store, versions, max_staleness=1, rollout_batch_size=6)
    add(
        store,
        of("a", "old", [0, 1], version=0),
        of("a", "a0", [0, 1], version=1),
        of("a", "a1", [1, 1], version=2),
    )
    add(store, of("b", "b0", [0, 3], version=2), of("a", "a2", [0, 1], version=2))
    numbers = collected(buffer, 3).statistics.environments
    assert numbers["a"] == {
        "groups": 3, "reward_mean": pytest.approx(4 / 6), "reward_max": 1, "trained_groups": 2, "trained_sequences": 4,
        "staleness": 0.5, "dropped_stale": 1,
    }  # fmt: skip
    assert numbers["b"] == {
        "groups": 1, "reward_mean": 1.5, "reward_max": 3, "trained_groups": 1, "trained_sequences": 2,
            "staleness": 0, "dropped_stale": 0,
    }  # fmt: skip


def mean_only(rewards: Any) -> tuple[float, ...] | None:
    return group_advantages(rewards, "mean")


def group_of(group_id: str, *rollouts: Any) -> RolloutGroup:
    return RolloutGroup(group_id, "test", tuple(rollouts), index=None)


def buffer_of(store: RolloutStore, shaping: Shaping, size: int = 4) -> RolloutBuffer:
    return make_buffer(
        store, estimate=mean_only, rollout_batch_size=size, shaping=shaping, group_sizes=[]
    )


def test_what_is_configured() -> None:
    def made(**values: Any) -> Shaping:
        config = make_config(**values)
        return shaping_of(make_algorithm(config), configured_shaping(config))

    assert made() == PLAIN
    everything = made(
        overlong_buffer=4, overlong_length=20, mask_truncated=True, algorithm="reinforce_pp"
    )
    assert everything == Shaping(20, 4, mask_truncated=True, leave_out_marked=True)
    assert made(kl_beta=0.1, kl_in="reward").leave_out_marked, "it makes another advantage of 0"


def test_advantages_are_made_of_rewards_that_lost_by_length() -> None:
    """L_max 8, buffer 4: lengths 4, 6, 8 lose 0, 0.5, 1 → rewards 1, 0.5, 0 → mean 0.5."""
    group = group_of("g", *(make_rollout((5,) * length, reward=1.0) for length in (4, 6, 8)))
    assert token_advantages(group, mean_only) is None
    rows = token_advantages(group, mean_only, replace(PLAIN, overlong_length=8, overlong_buffer=4))
    assert [row[-1] for row in rows] == pytest.approx([0.5, 0.0, -0.5])


def test_the_length_of_an_episode_is_that_of_all_its_segments() -> None:
    last = replace(make_rollout((5,) * 3, reward=1.0), earlier=(make_rollout((6,) * 3),))
    assert replace(PLAIN, overlong_length=8, overlong_buffer=4).rewards([last]) == [0.5]


def test_reported_is_the_environments_reward(store: RolloutStore) -> None:
    store.add(
        group_of("g", *(make_rollout((5,) * length, reward=1.0) for length in (4, 4, 8, 8))),
        source="http",
    )
    batch = buffer_of(store, replace(PLAIN, overlong_length=8, overlong_buffer=4)).collect(
        1, timeout_s=0
    )
    assert batch.statistics.reward_mean == 1.0
    assert [s.advantages[-1] for s in batch.sequences] == pytest.approx([0.5, 0.5, -0.5, -0.5])


def test_no_token_of_a_cut_answer_is_trained_on_and_it_counts_in_the_means(
    store: RolloutStore,
) -> None:
    """Rewards 1, 0, 0 (cut), 0 → mean 0.25. All five sequences are in the batch, so that it has
    as many updates and the loss's mean as many parts as without a cut (TRL); those of the cut
    episode have no trained token, after a resume too."""
    rollouts = [make_rollout(reward=reward, stop_reason="stop") for reward in (1.0, 0.0, 0.0, 0.0)]
    rollouts[2] = replace(rollouts[2], stop_reason="length", earlier=(make_rollout(),))
    store.add(group_of("g", *rollouts), source="http")
    buffer = buffer_of(store, replace(PLAIN, mask_truncated=True))
    batch = buffer.collect(1, timeout_s=0)
    assert [s.advantages[-1] for s in batch.sequences if s.trained] == pytest.approx(
        [0.75, -0.25, -0.25]
    )
    assert [s.trained > 0 for s in batch.sequences] == [True, True, False, False, True]
    assert batch.sequences[3].rollout.tokens == rollouts[2].tokens
    assert batch.statistics.truncated_fraction == 0.25
    again = buffer_of(store, replace(PLAIN, mask_truncated=True)).resume(1, ["g"])
    assert [(s.rollout, s.advantages) for s in again.sequences] == [
        (s.rollout, s.advantages) for s in batch.sequences
    ]
    assert len(buffer_of(store, PLAIN).resume(1, ["g"]).sequences) == 5


def test_a_group_that_was_cut_throughout_is_dropped(store: RolloutStore) -> None:
    store.add(
        group_of("g", *(make_rollout(reward=r, stop_reason="length") for r in (0.0, 1.0))),
        source="http",
    )
    assert (
        buffer_of(store, replace(PLAIN, mask_truncated=True), size=2).collect(1, timeout_s=0)
        is None
    )
    assert store.drop_reasons() == {NO_VARIANCE: 1}


def test_marked_ones_are_left_out_where_an_advantage_of_0_teaches(store: RolloutStore) -> None:
    rollouts = [make_rollout(reward=reward) for reward in (1.0, 0.0)] + [
        make_rollout(zero_advantage=True)
    ] * 2
    store.add(group_of("g", *rollouts), source="http")
    batch = buffer_of(store, replace(PLAIN, leave_out_marked=True)).collect(1, timeout_s=0)
    assert [s.advantages[-1] for s in batch.sequences if s.trained] == pytest.approx([0.75, -0.25])
    assert [s.trained > 0 for s in batch.sequences] == [True, True, False, False]
    assert len(buffer_of(store, PLAIN).resume(1, ["g"]).sequences) == 4


@pytest.mark.parametrize(
    "rewards", [[1e308, 1e308, 0, 0], [1e308, -1e308, 0, 0], [1e200, -1e200, 1, 0]]
)
def test_a_stored_group_that_would_overflow_is_dropped_with_the_reason(
    store: RolloutStore, rewards: list[float]
) -> None:
    """An older version took it: it waits in the store, and must not end the resume."""
    add(store, make_group("large", rewards), make_group("good", [0, 1, 0, 1]))
    silent = tuple(make_rollout(logprob=-1e308, reward=1.0) for _ in range(4))
    add(store, replace(make_group("logprobs", [1, 1, 1, 1]), rollouts=silent))
    batch = make_buffer(store, rollout_batch_size=4, group_sizes=[]).collect(1, timeout_s=0)
    assert batch is not None and batch.group_ids == ("good",)
    assert store.drop_reasons() == {TOO_LARGE: 2}
    assert batch.statistics.reward_mean == 0.5


@pytest.mark.parametrize(("over_batch", "share"), [(None, 1.0), ("std_batch", 0.968152)])
def test_turns_have_advantages_of_their_own(
    store: RolloutStore, over_batch: Any, share: float
) -> None:
    """Two turns in two segments, to go [3, 2] and [1, 1]: above the means 1 and 0.5. A group
    without rewards of its turns is counted. Over the step they are divided by 1.032796 + 1e-4, the
    std of 3, 2, 1, 1 and of the other group's rewards 1, 0."""
    first = make_rollout((7,), prompt=(4,), reward=0.0)
    later = make_rollout(reward=3.0, earlier=(first,), turn_rewards=(1.0, 2.0))
    other = make_rollout(reward=1.0, turn_rewards=(0.0, 1.0), turn_lengths=(1, 1))
    store.add(group_of("turns", later, other), source="http")
    store.add(make_group("episode", [1, 0]), source="http")
    estimate = partial(group_advantages, kind="mean")
    buffer = make_buffer(
        store,
        rollout_batch_size=4,
        estimate=estimate,
        shaping=replace(PLAIN, turn_gamma=1.0, over_batch=over_batch),
    )
    batch = buffer.collect(1, timeout_s=0)
    expected = [(1,) * 2, (0.5,) * 5, (-1, -1, -1, -1, -0.5), (0.5,) * 5, (-0.5,) * 5]
    assert [sequence.advantages for sequence in batch.sequences] == [
        pytest.approx([share * value for value in row], abs=1e-6) for row in expected
    ]
    assert batch.statistics.sequences_with_episode_credit == 2


def test_turns_of_equal_episodes_are_divided_by_their_own_spread(store: RolloutStore) -> None:
    """To go [1, 0] and [1, 1]: the second turns are ±0.5, and the std of 1, 0, 1, 1 is 0.5. That
    of the episodes' rewards, 1 and 1, is 0, by which they came out as ±5000."""
    early = make_rollout(reward=1.0, turn_rewards=(1.0, 0.0), turn_lengths=(1, 1))
    late = make_rollout(reward=1.0, turn_rewards=(0.0, 1.0), turn_lengths=(1, 1))
    store.add(group_of("turns", early, late), source="http")
    buffer = make_buffer(
        store,
        rollout_batch_size=2,
        estimate=partial(group_advantages, kind="mean"),
        shaping=replace(PLAIN, turn_gamma=1.0, over_batch="std_batch"),
    )
    batch = buffer.collect(1, timeout_s=0)
    found = [sequence.advantages for sequence in batch.sequences]
    assert found == [
        pytest.approx((0, 0, 0, 0, -0.9998), abs=1e-6),
        pytest.approx((0, 0, 0, 0, 0.9998), abs=1e-6),
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("std_batch", [0.288658, -0.288658, 0.865976, -0.865976]),
        ("batch", [-0.288658, -0.865976, 1.443292, -0.288658]),
    ],
)
def test_advantages_are_over_the_step(
    store: RolloutStore, kind: str, expected: list[float]
) -> None:
    """Of its groups alone, and the same when an interrupted step is continued."""
    config = make_config(advantage=kind, batch=4)
    algorithm, shaping = make_algorithm(config), configured_shaping(config)
    for number, rewards in enumerate(([1.0, 0.0], [4.0, 1.0], [900.0, 0.0])):
        store.add(make_group(f"g{number}", rewards), source="test")
    buffer = RolloutBuffer(
        store, VersionSteps(), algorithm.advantages, config, shaping=shaping_of(algorithm, shaping)
    )
    batch = buffer.collect(1, timeout_s=0)
    assert batch is not None
    for each in (batch, buffer.resume(1, batch.group_ids)):
        assert [s.advantages[-1] for s in each.sequences] == pytest.approx(expected, abs=1e-5)

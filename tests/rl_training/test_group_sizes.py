"""Groups of several sizes, and what a step that lacks some says: sizes that do not fit, or rewards
that do not differ."""

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.rollout_buffer import fillable_up_to
from mlx_parallm.rollout_store.store import RolloutStore
from tests.rl_training.rollouts import make_group
from tests.rl_training.test_rollout_buffer import Player, add, make_buffer, requested


def test_mixed_sizes_fill_a_batch_exactly(store: RolloutStore) -> None:
    add(
        store, make_group("a", [0, 1, 2]), make_group("b", [0, 1, 2, 3]), make_group("c", [0, 1, 2])
    )
    buffer = make_buffer(store, rollout_batch_size=7, group_sizes=[3, 4])
    assert buffer.collect(1, timeout_s=0).group_ids == ("a", "b")
    add(store, make_group("d", [0, 1, 2]), make_group("e", [0, 1, 2, 3]))
    assert buffer.collect(2, timeout_s=0).group_ids == ("c", "e"), (
        "3 + 3 leaves 1, which no group fills"
    )


def test_a_batch_size_that_no_mix_reaches_is_an_error_at_start(store: RolloutStore) -> None:
    with pytest.raises(ConfigError, match="rollout_batch_size"):
        make_buffer(store, rollout_batch_size=10, group_sizes=[8, 4, 8])
    sums = fillable_up_to(19, {6, 4, 9})
    assert [number for number, fits in enumerate(sums) if not fits] == [1, 2, 3, 5, 7, 11]


def test_sizes_from_outside_that_never_fit_end_in_a_smaller_batch(store: RolloutStore) -> None:
    add(store, *[make_group(f"g{i}", [0, 1, 2]) for i in range(12)])
    buffer = make_buffer(store, rollout_batch_size=8, group_sizes=[2])
    batch = buffer.collect(1, timeout_s=0)
    assert len(batch.sequences) == 6
    assert "last 2 places" in batch.gave_up


def test_groups_that_wait_for_the_next_step_are_no_mix_of_sizes(store: RolloutStore) -> None:
    """One of nine groups was useful, and twelve more wait: what is missing are rewards that differ,
    and no size is wrong."""
    buffer = make_buffer(
        store, request_groups=lambda n: None, max_staleness=4, max_oversampling=2.0
    )
    buffer.request(1, 5)
    for i in range(21):
        store.add(make_group(f"g{i}", [0, 1] if i == 0 else [1, 1], index=i), source="test")
    batch = buffer.collect(1, timeout_s=0)
    assert batch is not None and len(batch.sequences) == 2
    assert "no mix" not in batch.gave_up and "all right" in batch.gave_up


@pytest.mark.parametrize("sampling", ["fifo", "uniform", "priority"])
def test_groups_over_http_that_earn_one_reward_are_named_while_a_step_waits(
    store: RolloutStore, sampling: str
) -> None:
    """Nothing can be requested there: the step waited, and the health line found nothing."""
    add(store, *[make_group(f"g{i}", [0, 1] if i == 0 else [1, 1]) for i in range(26)])
    buffer = make_buffer(store, group_sizes=[], buffer_sampling=sampling)
    assert buffer.collect(1, timeout_s=0) is None
    said = str(buffer.health())
    assert "no variance while step 1 waited" in said and "25 were all right" in said
    add(store, *[make_group(f"h{i}", [0, 1]) for i in range(3)])
    assert buffer.collect(1, timeout_s=0) is not None
    assert buffer.collect(2, timeout_s=0) is None and buffer.health() is None


@pytest.mark.parametrize("sampling", ["fifo", "uniform", "priority"])
@pytest.mark.parametrize("varied", [True, False])
def test_sizes_over_http_are_not_blamed_for_what_other_environments_bring(
    store: RolloutStore, varied: bool, sampling: str
) -> None:
    """Groups of three fill 12 of 16 places, two of two the rest: they were not asked for, and where
    they earned one reward each, sizes were wrong."""
    add(store, *[make_group(f"h{i}", [0, 0, 1]) for i in range(26)])
    player = Player(store, lambda i: [0, 1] if varied else [1, 1])
    options = {"request_groups": player, "rollout_batch_size": 16, "buffer_sampling": sampling}
    batch = requested(make_buffer(store, **options))
    assert len(batch.sequences) == (16 if varied else 12)
    assert "no mix" not in batch.gave_up
    assert ("were all right" in batch.gave_up) == (not varied)

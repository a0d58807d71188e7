"""The version table and the numbers: nothing of a timeline that was left counts as fresh, no
number is used twice."""

from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.versions import VersionNumbers, VersionSteps


def five_steps() -> VersionSteps:
    versions = VersionSteps()
    for step in range(1, 6):
        versions.record(step, step)
    return versions


def test_staleness_counts_steps_and_takes_the_oldest_token() -> None:
    versions = five_steps()
    assert versions.staleness((5, 5), 6) == 0
    assert versions.staleness((5, 3), 6) == 2
    assert versions.staleness((), 6) == 0
    assert versions.staleness((-1,), 6) == 0, "unknown to its sender"


def test_a_version_that_the_table_does_not_know_is_as_stale_as_can_be() -> None:
    versions = VersionSteps()
    versions.record(1, 1)
    versions.record(9, 2)  # 2 to 8 were given out on a timeline that was left
    assert versions.staleness((9,), 3) == 0
    assert min(versions.staleness((lost,), 3) for lost in (2, 8, 10)) > 10**9


def test_going_back_keeps_distances_and_leaves_the_rest() -> None:
    """5 steps were made; version 6 serves what version 3 had. In step 6, version 2 is one step
    away from it."""
    versions = five_steps()
    at_three = VersionSteps()
    for step in range(1, 4):
        at_three.record(step, step)
    versions.go_back(at_three.state(), 3, version=6, steps=5)
    assert versions.newest == (6, 5)
    assert [versions.staleness((version,), 6) for version in (6, 3, 2, 1, 0)] == [0, 0, 1, 2, 3]
    assert min(versions.staleness((left,), 6) for left in (4, 5)) > 10**9
    assert VersionSteps.restored(versions.state()).state() == versions.state()


def test_going_back_to_weights_without_a_version_leaves_everything() -> None:
    versions = five_steps()
    versions.go_back([], 3, version=6, steps=5)
    assert versions.state() == [[6, 5]]
    assert min(versions.staleness((left,), 6) for left in range(6)) > 10**9


def test_numbers_rise_by_one_and_a_process_after_a_kill_begins_above_them(
    store: RolloutStore,
) -> None:
    first = VersionNumbers(store)
    for served in range(3):
        assert first.reserve(served) == served + 1
        first.used()
    resumed = VersionNumbers(store)  # from a checkpoint of version 1
    assert resumed.reserve(1) == 4
    resumed.used()
    assert resumed.reserve(4) == 5


def test_a_number_whose_publish_had_no_lock_is_used_by_the_next(store: RolloutStore) -> None:
    numbers = VersionNumbers(store)
    assert [numbers.reserve(0), numbers.reserve(0)] == [1, 1]
    numbers.used()
    assert numbers.reserve(1) == 2
    assert VersionNumbers(store).reserve(1) == 3, "whether 2 was served is not known"


def test_the_same_bits_get_their_old_number_back(store: RolloutStore) -> None:
    first = VersionNumbers(store)
    for served, digest in enumerate(["a", "b", "c"]):
        assert first.reserve(served, digest) == served + 1
        first.used()
    again = VersionNumbers(store)
    assert again.reserve(1, "b") == 2
    again.used()
    assert again.reserve(2, "other") == 4
    again.used()
    assert VersionNumbers(store).reserve(2, "c") == 3, "the timeline on which 3 was c"


def test_without_notes_numbers_are_counted() -> None:
    numbers = VersionNumbers()
    assert [numbers.reserve(served) for served in (0, 1, 7)] == [1, 2, 8]

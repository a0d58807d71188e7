"""What is kept, what is given back to the disk, and databases of older formats."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from random import Random

import pytest
from structlog.testing import capture_logs

from mlx_parallm.errors import StoreError
from mlx_parallm.rollout_store.database import SPARE_PAGES
from mlx_parallm.rollout_store.store import RolloutStore, StoreCounts
from mlx_parallm.system import files
from mlx_parallm.system.log import configure_logging
from tests.altered import Altered
from tests.rollout_store.groups import make_group, make_rollout
from tests.waiting import until

LARGE = 40_000  # bytes of a group's noise, which does not compress


def add_steps(store: RolloutStore, steps: int, *, groups: int = 2, noise: int = 0) -> None:
    """`groups` groups for each step: `3-0` is the first that step 3 took, the last of a step is
    dropped."""
    for step in range(1, steps + 1):
        names = [f"{step}-{number}" for number in range(groups)]
        for name in names:
            store.add(make_group(name, metadata={"noise": os.urandom(noise).hex()}), source="test")
        store.take(names[:-1], step)
        store.drop(names[-1:], step, "no variance")


def kept(store: RolloutStore) -> list[str]:
    with store.database.reading() as connection:
        rows = connection.execute(
            "SELECT group_id FROM groups JOIN payloads USING (sequence) ORDER BY sequence"
        )
        return [group_id for (group_id,) in rows]


def test_steps_behind_the_bound_lose_their_tokens_and_keep_their_rows(store):
    add_steps(store, 4)
    store.add(make_group("waits"), source="test")
    before = store.counts()
    assert store.prune(3, always_up_to_step=2, max_bytes=0) == 4
    assert kept(store) == ["3-0", "3-1", "4-0", "4-1", "waits"]
    assert store.counts() == before == StoreCounts(waiting=1, taken=4, dropped=4, rejected=0)
    assert store.drop_reasons() == {"no variance": 4}
    assert store.add(make_group("1-0"), source="test") is False, "a pruned group is still known"
    with pytest.raises(StoreError, match="'1-0'"):
        store.groups(["4-0", "1-0"])
    assert store.prune(3, always_up_to_step=2, max_bytes=0) == 0


def test_what_a_checkpoint_may_bring_back_is_kept_whatever_the_size(store):
    add_steps(store, 4, noise=LARGE)
    store.prune(2, always_up_to_step=9, max_bytes=1)
    assert kept(store) == ["3-0", "3-1", "4-0", "4-1"]
    assert store.restore(2) == 4
    assert [group.group_id for group in store.waiting()] == ["3-0", "3-1", "4-0", "4-1"]


def test_above_its_size_the_oldest_steps_go_and_only_as_many_as_needed(store):
    add_steps(store, 10, noise=LARGE)
    whole = store.database.size_bytes(used=True)
    store.prune(10, always_up_to_step=-1, max_bytes=whole - 3 * LARGE)
    assert [name.split("-")[0] for name in kept(store)[:2]] == ["2", "3"]
    assert store.database.size_bytes(used=True) <= whole - 3 * LARGE


def test_the_file_itself_becomes_smaller(store):
    add_steps(store, 20, noise=10 * LARGE)
    whole = store.size_bytes()
    assert whole > 400 * LARGE
    while store.prune(20, always_up_to_step=20, max_bytes=0):
        pass
    with store.database.reading() as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = (store.path).stat().st_size
    assert size == store.size_bytes() < (SPARE_PAGES + 200) * 4096 < whole / 2


def test_a_long_prune_stops_in_time_and_the_next_goes_on(store):
    add_steps(store, 15, groups=10)
    pruned = [store.prune(15, always_up_to_step=15, max_bytes=0, seconds=0) for _ in range(4)]
    assert pruned == [64, 64, 22, 0], "one slice at a time"


def test_a_restore_further_back_than_what_is_kept_leaves_the_pruned_and_says_so(store):
    add_steps(store, 3)
    store.prune(2, always_up_to_step=1, max_bytes=0)
    configure_logging(level="warning")
    with capture_logs() as logs:
        assert store.restore(0) == 4
    assert [(entry["event"], entry["groups"]) for entry in logs] == [
        ("rollouts of later steps are pruned: they are not trained on again", 2)
    ]
    assert store.counts() == StoreCounts(waiting=4, taken=1, dropped=1, rejected=0)


def test_policy_versions_lie_beside_the_group(store):
    store.add(
        make_group("a", rollouts=(make_rollout(version=3), make_rollout(version=7))),
        source="test",
    )
    with store.database.reading() as connection:
        assert connection.execute("SELECT first_version, last_version FROM groups").fetchone() == (
            3,
            7,
        )


# ---------------------------------------------------------------------- one commit for many


def test_groups_that_come_during_a_commit_share_the_next_one(store, monkeypatch):
    """The first one is held in its transaction until nine others stand in line."""
    commits, real = [], store._transaction

    def counted(*args):
        commits.append(args)
        if len(commits) == 1:
            until(lambda: len(store._arrivals) == 9)
        return real(*args)

    monkeypatch.setattr(store, "_transaction", counted)
    with ThreadPoolExecutor(10) as pool:
        added = list(pool.map(lambda n: store.add(make_group(f"g{n % 9}"), source="t"), range(10)))
    assert len(commits) == 2
    assert sorted(added) == [False] + [True] * 9, "one id came twice"
    assert len(store.waiting()) == 9


def test_all_that_share_a_commit_learn_that_it_failed(store):
    with ThreadPoolExecutor(4) as pool:
        with store._changed:
            adding = [
                pool.submit(store.add, make_group(f"g{number}"), source="t") for number in range(4)
            ]
            until(lambda: len(store._arrivals) == 4)
            pages = store.database.connection.execute("PRAGMA page_count").fetchone()[0]
            store.database.connection.execute(f"PRAGMA max_page_count = {pages}")
            large = make_group("x", metadata={"n": os.urandom(50_000).hex()})
            store._arrivals.append(type(store._arrivals[0])(large, "t"))
        for each in adding:
            with pytest.raises(StoreError, match="full"):
                each.result(30)
    assert store.known_ids() == set()


# ---------------------------------------------------------------------- free space


def test_below_the_reserve_no_group_is_accepted(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path / "rollouts.sqlite", min_free_bytes=10**9)
    free = 2 * 10**9
    monkeypatch.setattr(files, "free_bytes", lambda directory: free)
    assert store.add(make_group("a"), source="t")
    free = 10**9 - 1
    with pytest.raises(StoreError, match=r"1\.00 GB .*min_free_gb"):
        store.add(make_group("b"), source="t")
    assert store.known_ids() == {"a"}
    store.take(["a"], 1)  # what is there can still be trained on
    free = 10**9
    assert store.add(make_group("b"), source="t")
    store.close()


def test_the_reserve_by_default_is_a_share_of_a_small_disk(tmp_path, monkeypatch):
    def disk_of(size_gb: float):
        blocks = round(size_gb * 10**9 / 4096)
        status = os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255))
        monkeypatch.setattr(files, "os", Altered(os, statvfs=lambda path: status))

    disk_of(500)
    assert files.reserve_bytes(tmp_path, None) == 10**9
    assert files.reserve_bytes(tmp_path, 2.5) == 2_500_000_000
    assert files.reserve_bytes(tmp_path, 0.0) == 0
    disk_of(2)
    assert files.reserve_bytes(tmp_path, None) == pytest.approx(10**8, rel=1e-3)
    assert files.shortage(tmp_path, 0) is None


# ---------------------------------------------------------------------- files of other times and
# places


def test_reading_only_sees_everything_and_changes_nothing(store):
    for name in "abc":
        store.add(make_group(name), source="environments")
    store.take(["a"], 3)
    store.close()
    before = store.path.read_bytes()
    reader = RolloutStore(store.path, read_only=True)
    assert reader.counts() == StoreCounts(waiting=2, taken=1, dropped=0, rejected=0)
    assert reader.groups(["a"]) == [make_group("a")]
    assert [group.group_id for group in reader.waiting()] == ["b", "c"]
    with pytest.raises(StoreError, match="readonly"):
        reader.take(["c"], 5)
    reader.close()
    assert store.path.read_bytes() == before


def test_reading_only_beside_a_writer(store):
    store.add(make_group("a"), source="t")
    reader = RolloutStore(store.path, read_only=True)
    assert reader.known_ids() == {"a"}
    store.add(make_group("b"), source="t")
    assert reader.known_ids() == {"a", "b"}
    reader.close()
    with pytest.raises(StoreError, match="cannot be opened"):
        RolloutStore(store.path.with_name("none.sqlite"), read_only=True)
    assert not store.path.with_name("none.sqlite").exists()


def test_reading_what_nobody_writes_leaves_no_file_behind(tmp_path):
    """Also beside the reader: a run that continues meanwhile is seen, while it writes and after it
    has ended again."""
    path = tmp_path / "r.sqlite"
    with closing(RolloutStore(path)) as store:
        store.add(make_group("a"), source="t")
    with closing(RolloutStore(path, read_only=True)) as reader:
        assert reader.known_ids() == {"a"}
    assert [file.name for file in tmp_path.iterdir()] == ["r.sqlite"]

    with closing(RolloutStore(path, read_only=True)) as reader:
        assert reader.known_ids() == {"a"}
        with closing(RolloutStore(path)) as store:
            store.add(make_group("b"), source="t")
        assert reader.known_ids() == {"a", "b"}
        with closing(RolloutStore(path)) as store:
            store.add(make_group("c"), source="t")
            assert reader.known_ids() == {"a", "b", "c"}


def test_commits_are_synchronised_with_the_drive(store):
    settings = {"journal_mode": "wal", "synchronous": 2, "fullfsync": 1, "checkpoint_fullfsync": 1}
    for name, value in settings.items():
        assert store.database.connection.execute(f"PRAGMA {name}").fetchone() == (value,), name


# ---------------------------------------------------------------------- the accounts


@pytest.mark.parametrize("seed", range(3))
def test_every_accepted_group_is_accounted_for_whatever_happens(tmp_path, seed):
    """Groups come, steps take and drop them, checkpoints are made and resumed from (after a
    kill, an older one too), and all is pruned that may be: in the end each group was consumed
    once in the timeline that counts."""
    random, path = Random(seed), tmp_path / "r.sqlite"
    store, accepted, step = RolloutStore(path), 0, 0
    consumed: dict[str, int] = {}  # of this timeline
    checkpoints = [0]
    for _ in range(60):
        for _ in range(random.randrange(4)):
            assert store.add(make_group(f"g{accepted}"), source="t")
            accepted += 1
        event = random.random()
        if event < 0.7:
            step += 1
            names = [group.group_id for group in store.waiting(3)]
            store.take(names[:2], step)
            store.drop(names[2:], step, "too old")
            assert not consumed.keys() & names, "consumed twice"
            consumed |= dict.fromkeys(names, step)
        elif event < 0.85:
            checkpoints = [*checkpoints, step][-2:]
            store.prune(checkpoints[0], always_up_to_step=step, max_bytes=0)
        else:  # kill -9: another connection, the first is not closed
            store = RolloutStore(path)
            step = random.choice(checkpoints)
            checkpoints = [kept for kept in checkpoints if kept <= step]
            later = {name for name, when in consumed.items() if when > step}
            assert store.restore(step) == len(later)
            consumed = {name: when for name, when in consumed.items() if name not in later}
        counts = store.counts()
        assert counts.waiting + counts.taken + counts.dropped == accepted
        assert counts.taken + counts.dropped == len(consumed)
    left = store.waiting()
    assert {group.group_id for group in left} | consumed.keys() == {
        f"g{number}" for number in range(accepted)
    }
    assert left == [make_group(group.group_id) for group in left]


def test_forgotten_groups_may_come_again(store: RolloutStore) -> None:
    for name in ("a", "b", "c"):
        store.add(make_group(name), source="test")
    store.take(["a"], 1)
    store.database.forget(["a", "b", "never there"])
    assert store.known_ids() == {"c"}
    assert [group.group_id for group in store.waiting()] == ["c"]
    assert store.add(make_group("a"), source="test")
    assert store.waiting_ids() == {"a", "c"}

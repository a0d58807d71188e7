import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_parallm.errors import RolloutRejectedError, StoreError
from mlx_parallm.rollout_store.store import KEPT_REJECTS, RolloutStore, StoreCounts, WaitingSource
from tests.rollout_store.groups import make_group, make_rollout
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def ids(groups) -> list[str]:
    return [group.group_id for group in groups]


def fill(store: RolloutStore, *names: str) -> None:
    for name in names:
        assert store.add(make_group(name), source="test")


def test_what_was_added_waits_oldest_first_and_equal(store):
    fill(store, "b", "a", "c")
    assert store.waiting() == [make_group("b"), make_group("a"), make_group("c")]
    assert ids(store.waiting(2)) == ["b", "a"]
    assert ids(store.waiting(1, exclude={"b"})) == ["a"]
    assert store.waiting_sequences() == 6
    assert store.counts() == StoreCounts(waiting=3, taken=0, dropped=0, rejected=0)


def test_a_known_id_is_not_added_again(store):
    fill(store, "a")
    other = make_group("a", rollouts=(make_rollout(5.0),))
    assert store.add(other, source="test") is False
    store.take(["a"], 1)
    assert store.add(other, source="test") is False
    assert store.groups(["a"]) == [make_group("a")]


def test_taken_and_dropped_groups_no_longer_wait(store):
    fill(store, "a", "b", "c", "d")
    store.take(["a", "c"], step=1)
    store.drop(["b"], step=1, reason="no variance")
    assert ids(store.waiting()) == ["d"]
    assert store.counts() == StoreCounts(waiting=1, taken=2, dropped=1, rejected=0)
    assert store.drop_reasons() == {"no variance": 1}
    assert ids(store.groups(["c", "b"])) == ["c", "b"]


def test_restore_undoes_what_came_after_the_checkpoint_in_the_old_order(store):
    fill(store, "a", "b", "c", "d", "e")
    store.take(["a"], step=1)
    store.take(["b"], step=2)
    store.drop(["c"], step=3, reason="stale")
    store.take(["d"], step=3)
    assert store.restore(consumed_up_to_step=1) == 3
    assert ids(store.waiting()) == ["b", "c", "d", "e"]
    assert store.restore(consumed_up_to_step=0) == 1
    assert ids(store.waiting()) == ["a", "b", "c", "d", "e"]


def test_marking_an_unknown_group_marks_nothing(store):
    fill(store, "a")
    with pytest.raises(StoreError, match="no group 'ghost'"):
        store.take(["a", "ghost"], step=1)
    assert ids(store.waiting()) == ["a"]
    with pytest.raises(StoreError, match="no group 'ghost'"):
        store.groups(["ghost"])


def test_everything_is_there_after_reopening(tmp_path):
    path = tmp_path / "rollouts.sqlite"
    first = RolloutStore(path)
    fill(first, "a", "b")
    first.take(["a"], step=4)
    first.reject({"tokens": [1]}, source="env", reason="no scores")
    first.remember("note", {"k": [1, 2]})
    first.close()
    assert not path.with_name("rollouts.sqlite-wal").exists()
    second = RolloutStore(path)
    assert ids(second.waiting()) == ["b"]
    assert second.restore(3) == 1
    assert second.rejects()[0].payload == {"tokens": [1]}
    assert second.recall("note") == {"k": [1, 2]}
    assert second.recall("other") is None
    second.close()


def test_known_ids_by_prefix(store):
    fill(store, "local-1", "local-2", "sha256:%_")
    store.take(["local-1"], 1)
    assert store.known_ids("local-") == {"local-1", "local-2"}
    assert store.known_ids("sha256:%") == {"sha256:%_"}
    assert len(store.known_ids()) == 3


def test_waiting_by_source_counts_groups_and_sequences(store):
    store.add(make_group("a", size=2), source="x")
    store.add(make_group("b", size=5), source="x")
    store.add(make_group("c", size=3), source="y")
    store.add(make_group("d", size=3), source="y")
    store.take(["d"], 1)
    assert store.waiting_by_source() == {"x": WaitingSource(2, 7, 5), "y": WaitingSource(1, 3, 3)}
    assert store.drop_waiting("x", 2, "reset") == 2
    assert list(store.waiting_by_source()) == ["y"]
    assert store.drop_reasons() == {"reset": 2}


def test_quarantine_keeps_reasons_for_long_and_payloads_for_a_while(store):
    for number in range(KEPT_REJECTS + 2):
        store.reject({"n": number}, source="env", reason=f"reason {number}")
    store.reject(make_group("g"), source="env", reason="a group")
    rejects = store.rejects(limit=KEPT_REJECTS + 3)
    assert rejects[0].payload["group_id"] == "g"
    assert rejects[1].payload == {"n": KEPT_REJECTS + 1}
    assert [reject.payload for reject in rejects[-3:]] == [None, None, None]
    assert rejects[-1].reason == "reason 0"
    assert store.counts().rejected == KEPT_REJECTS + 3
    store.reject(os.urandom(2 << 20).hex(), source="env", reason="huge")
    assert store.rejects(1)[0].payload is None


def test_of_a_flood_of_rejects_the_newest_are_remembered_and_all_are_counted(store, monkeypatch):
    monkeypatch.setattr("mlx_parallm.rollout_store.store.KEPT_REASONS", 5)
    for number in range(8):
        store.reject(None, source="env", reason=f"reason {number}")
    assert [reject.reason for reject in store.rejects()] == [
        f"reason {number}" for number in (7, 6, 5, 4, 3)
    ]
    assert store.counts().rejected == 8


def test_several_groups_are_stored_together_or_not_at_all(store):
    fill(store, "a")
    assert store.add_all([make_group("a"), make_group("b")], source="test") == [False, True]
    with pytest.raises(RolloutRejectedError, match="half a character"):
        store.add_all([make_group("c"), make_group("\ud800")], source="test")
    store.min_free_bytes = 1 << 60
    with pytest.raises(StoreError, match="no group is accepted"):
        store.add_all([make_group("d"), make_group("e")], source="test")
    assert ids(store.waiting()) == ["a", "b"]


def test_waiting_for_groups_ends_with_the_add_that_suffices(store):
    """The store is starved while someone waits for more than there is."""
    fill(store, "a")
    assert store.wait_for_groups(0.0) is True
    assert store.wait_for_groups(0.01, at_least=3) is False
    assert not store.starved()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait_for_groups, 60.0, at_least=3)
        until(store.starved)
        fill(store, "b")
        assert store.starved()
        fill(store, "c")
        assert not store.starved()
        assert waiting.result(30) is True


@pytest.mark.parametrize("end", ["wake", "close"])
def test_wake_and_close_end_a_wait(store, end):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait_for_groups, 60.0)
        until(store.starved)
        getattr(store, end)()
        assert waiting.result(30) is False


def test_a_closed_store_says_so(store):
    store.close()
    store.close()
    for call in (lambda: store.add(make_group(), source="test"), store.counts):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_threads_add_and_take_at_once(store):
    def add(worker: int) -> None:
        for number in range(20):
            store.add(make_group(f"{worker}-{number}"), source=f"w{worker}")

    taken: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        adding = pool.map(add, range(4))
        while len(taken) < 80:
            assert store.wait_for_groups(30.0)
            batch = ids(store.waiting(8))
            store.take(batch, step=1)
            taken += batch
        list(adding)
    assert len(set(taken)) == 80
    assert store.counts() == StoreCounts(waiting=0, taken=80, dropped=0, rejected=0)


def test_a_full_database_refuses_and_keeps_what_it_has(store):
    fill(store, "a")
    pages = store.database.connection.execute("PRAGMA page_count").fetchone()[0]
    store.database.connection.execute(f"PRAGMA max_page_count = {pages}")
    large = make_group("large", metadata={"noise": os.urandom(50_000).hex()})
    with pytest.raises(StoreError, match=r"rollouts\.sqlite.*full"):
        store.add(large, source="test")
    assert store.known_ids() == {"a"}
    store.database.connection.execute("PRAGMA max_page_count = 100000")
    assert store.add(large, source="test") is True


def test_a_database_that_another_process_holds_is_a_clear_error(tmp_path):
    store = RolloutStore(tmp_path / "r.sqlite", lock_timeout_s=0.05)
    fill(store, "a")
    other = sqlite3.connect(tmp_path / "r.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"locked.*another process"):
        store.add(make_group("b"), source="test")
    other.execute("COMMIT")
    other.close()
    assert store.add(make_group("b"), source="test")
    store.close()


@pytest.mark.parametrize(("schema", "words"), [(99, "a newer"), (1, "an older")])
def test_what_is_no_database_or_another_versions_is_refused(tmp_path, schema, words):
    (tmp_path / "text.sqlite").write_text(
        "not a database, but long enough to look like a header of one" * 3
    )
    with pytest.raises(StoreError, match="not a database"):
        RolloutStore(tmp_path / "text.sqlite")
    RolloutStore(tmp_path / "new.sqlite").close()
    connection = sqlite3.connect(tmp_path / "new.sqlite")
    connection.execute(f"PRAGMA user_version = {schema}")
    connection.close()
    with pytest.raises(StoreError, match=f"schema {schema} is {words}"):
        RolloutStore(tmp_path / "new.sqlite")
    connection = sqlite3.connect(tmp_path / "other.sqlite")
    connection.execute("CREATE TABLE notes (text)")
    connection.close()
    with pytest.raises(StoreError, match="other tables"):
        RolloutStore(tmp_path / "other.sqlite")  # its groups were lost without a word
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be opened"):
        RolloutStore(tmp_path / "file" / "rollouts.sqlite")


def test_a_damaged_payload_is_a_store_error(store):
    fill(store, "a")
    store.database.connection.execute("UPDATE payloads SET payload = x'00'")
    with pytest.raises(StoreError, match="damaged"):
        store.waiting()


WRITER = """
import sys
from pathlib import Path
from mlx_parallm.errors import RolloutRejectedError, StoreError
from mlx_parallm.rollout_store.store import RolloutStore
from tests.rollout_store.groups import make_group

store = RolloutStore(Path(sys.argv[1]))
if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
number = 0
while True:
    group = make_group(f"g{number}", metadata={"noise": "x" * 50, "n": list(range(number % 7 * 400))})
    try:
        store.add(group, source="writer")
    except StoreError as error:
        print("FULL", error, flush=True)
        break
    print(group.group_id, flush=True)
    number += 1
"""


def start_writer(path: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(path), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("acknowledged", [1, 7, 40])
def test_every_acknowledged_group_survives_kill_9(tmp_path, acknowledged):
    path = tmp_path / "rollouts.sqlite"
    with start_writer(path) as writer:
        seen = [writer.stdout.readline().strip() for _ in range(acknowledged)]
        writer.send_signal(signal.SIGKILL)
        seen += writer.stdout.read().split()  # acknowledged before the signal came
    assert writer.returncode == -signal.SIGKILL
    store = RolloutStore(path)
    assert set(seen) <= store.known_ids()
    assert len(store.waiting()) == len(store.known_ids()) <= len(seen) + 1
    assert store.add(make_group("after"), source="test")
    store.close()


def test_a_full_disk_refuses_the_group_and_loses_none_that_was_accepted(tmp_path):
    """The kernel refuses to let the files grow (RLIMIT_FSIZE), as on a full disk."""
    path = tmp_path / "rollouts.sqlite"
    with start_writer(path, "300000") as writer:
        lines = writer.stdout.read().splitlines()
    assert writer.returncode == 0
    assert lines[-1].startswith("FULL") and "is the disk full?" in lines[-1]
    accepted = set(lines[:-1])
    assert len(accepted) > 5
    store = RolloutStore(path)
    assert store.known_ids() == accepted
    assert len(store.waiting()) == len(accepted)
    store.close()

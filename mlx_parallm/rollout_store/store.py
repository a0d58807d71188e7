"""The durable queue of scored groups: one SQLite file a run, `rollouts.sqlite`.

Who writes: `environments.RolloutManager` (in process), the `/atropos` routes through `queue.py`, and
`rl_training.atropos_client`. Who reads: `rl_training.rollout_buffer`, which marks what it consumes. A group is on the
disk (WAL, synchronous=FULL) before `add` returns, so an acknowledgement after it is a promise.

A group is `waiting`, then `taken` by a step or `dropped` with a reason; what may not be trained on lies in `rejects`.
The checkpoint is the truth about what was consumed: `restore(step)` puts every group that a later step took or dropped
back to waiting. Payloads of consumed groups stay (replay, inspection); `size_bytes` tells what they cost.

One connection, one lock: SQLite has a single writer anyway, and a commit takes about a millisecond.
"""

import contextlib
import dataclasses
import json
import sqlite3
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.errors import StoreError
from mlx_parallm.rollout_store.payload import decode_group, encode_group
from mlx_parallm.types import RolloutGroup

SCHEMA_VERSION = 1
KEPT_REJECTS = 200  # newest rejects whose payload is kept; an environment gone wrong must not fill the disk
MAX_REJECT_BYTES = 1 << 20  # compressed; a larger reject keeps its reason only

_SCHEMA = """
CREATE TABLE groups (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL,
    environment TEXT NOT NULL,
    rollouts INTEGER NOT NULL,
    received REAL NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'taken', 'dropped')),
    step INTEGER,
    reason TEXT,
    payload BLOB NOT NULL
);
CREATE INDEX groups_by_state ON groups (state, sequence);
CREATE TABLE rejects (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    source TEXT NOT NULL,
    reason TEXT NOT NULL,
    received REAL NOT NULL,
    payload BLOB
);
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Groups by state."""

    waiting: int
    taken: int
    dropped: int
    rejected: int


@dataclass(frozen=True, slots=True)
class WaitingSource:
    """What one source has waiting: groups, their sequences, and the size of the largest group."""

    groups: int
    sequences: int
    largest: int


@dataclass(frozen=True, slots=True)
class Reject:
    """One entry of the quarantine. `payload` is None when it was too large or is too old to be kept."""

    source: str
    reason: str
    received: float  # Unix time
    payload: Any


class RolloutStore:
    """Scored groups on disk; every method may be called from any thread. Raises StoreError and nothing of sqlite3's."""

    def __init__(self, path: Path, *, lock_timeout_s: float = 5.0) -> None:
        """Opens or makes the database. Raises StoreError: not a database, a newer schema, locked, not writable."""
        self.path = path
        self._changed = threading.Condition()
        self._wakes = 0
        self._wanted: list[int] = []  # `at_least` of every thread that is in `wait_for_groups`
        self._connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # autocommit: every transaction below is explicit; the condition's lock serialises the threads
            self._connection = sqlite3.connect(
                path, timeout=lock_timeout_s, isolation_level=None, check_same_thread=False
            )
            self._prepare(self._connection)
        except (sqlite3.Error, OSError) as error:
            self._discard_connection()
            raise self._explained("opened", error) from error
        except StoreError:
            self._discard_connection()
            raise

    def add(self, group: RolloutGroup, *, source: str) -> bool:
        """Stores a checked group; on the disk when this returns. False: a group of that id is known already."""
        payload = encode_group(group)
        with self._transaction("written") as connection:
            cursor = connection.execute(
                "INSERT INTO groups (group_id, source, environment, rollouts, received, payload)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (group_id) DO NOTHING",
                (group.group_id, source, group.environment, len(group.rollouts), time.time(), payload),
            )
            return cursor.rowcount == 1

    def reject(self, payload: Any, *, source: str, reason: str) -> None:
        """Puts what may not be trained on into quarantine: JSON values, a RolloutGroup, or anything with a repr."""
        kept: bytes | None = zlib.compress(json.dumps(payload, default=_as_json).encode(), 1)
        if kept is not None and len(kept) > MAX_REJECT_BYTES:
            kept = None
        with self._transaction("written") as connection:
            cursor = connection.execute(
                "INSERT INTO rejects (source, reason, received, payload) VALUES (?, ?, ?, ?)",
                (source, reason, time.time(), kept),
            )
            oldest_kept = (cursor.lastrowid or 0) - KEPT_REJECTS
            connection.execute("UPDATE rejects SET payload = NULL WHERE id = ?", (oldest_kept,))

    def take(self, group_ids: Collection[str], step: int) -> None:
        """Marks groups as consumed by `step`. Raises StoreError, with nothing marked, when one is unknown."""
        self._mark(group_ids, "taken", step, None)

    def drop(self, group_ids: Collection[str], step: int, reason: str) -> None:
        """Marks groups as consumed by `step` without training, and why (no variance, too stale, …)."""
        self._mark(group_ids, "dropped", step, reason)

    def drop_waiting(self, source_prefix: str, step: int, reason: str) -> int:
        """Drops every waiting group of the sources that begin so; returns how many."""
        with self._transaction("written") as connection:
            return connection.execute(
                "UPDATE groups SET state = 'dropped', step = ?, reason = ?"
                " WHERE state = 'waiting' AND substr(source, 1, ?) = ?",
                (step, reason, len(source_prefix), source_prefix),
            ).rowcount

    def restore(self, consumed_up_to_step: int, *, keep_drops_of: int | None = None) -> int:
        """Puts groups that steps after the checkpoint's took or dropped back to waiting; returns how many.

        What step `keep_drops_of` (one that the checkpoint holds half-done, statistics included) dropped stays dropped.
        """
        with self._transaction("written") as connection:
            return connection.execute(
                "UPDATE groups SET state = 'waiting', step = NULL, reason = NULL WHERE state != 'waiting' AND step > ?"
                " AND NOT (state = 'dropped' AND step = ?)",
                (consumed_up_to_step, -1 if keep_drops_of is None else keep_drops_of),
            ).rowcount

    def waiting(self, limit: int | None = None, *, exclude: Collection[str] = ()) -> list[RolloutGroup]:
        """Waiting groups, oldest first, without those whose id the caller holds already (`exclude`)."""
        with self._reading() as connection:
            rows = connection.execute("SELECT sequence, group_id FROM groups WHERE state = 'waiting' ORDER BY sequence")
            wanted = [sequence for sequence, group_id in rows if group_id not in exclude][:limit]
            payloads = [self._payload(connection, "sequence", sequence) for sequence in wanted]
        return [self._decoded(payload) for payload in payloads]

    def waiting_ids(self) -> set[str]:
        """Ids of all groups that wait."""
        with self._reading() as connection:
            rows = connection.execute("SELECT group_id FROM groups WHERE state = 'waiting'")
            return {group_id for (group_id,) in rows}

    def groups(self, group_ids: Iterable[str]) -> list[RolloutGroup]:
        """These groups whatever their state, in the order asked for. Raises StoreError when one is unknown."""
        with self._reading() as connection:
            payloads = [self._payload(connection, "group_id", group_id) for group_id in group_ids]
        return [self._decoded(payload) for payload in payloads]

    def known_ids(self, prefix: str = "") -> set[str]:
        """Ids of all groups, whatever their state, that begin with `prefix`."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT group_id FROM groups WHERE substr(group_id, 1, ?) = ?", (len(prefix), prefix)
            )
            return {group_id for (group_id,) in rows}

    def wait_for_groups(self, timeout_s: float, *, at_least: int = 1) -> bool:
        """Blocks until `at_least` groups wait (True); False when the time is up, or after `wake` or `close`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            wakes = self._wakes
            self._wanted.append(at_least)
            try:
                while self._connection is not None:
                    if self._waiting_groups() >= at_least:
                        return True
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or wakes != self._wakes:
                        return False
                    self._changed.wait(remaining)
                return False
            finally:
                self._wanted.remove(at_least)

    def starved(self) -> bool:
        """True while a thread waits for more groups than there are: what lies here does not serve the trainer."""
        with self._changed:
            return bool(self._wanted) and self._waiting_groups() < max(self._wanted)

    def _waiting_groups(self) -> int:
        with self._reading() as connection:
            (count,) = connection.execute("SELECT COUNT(*) FROM groups WHERE state = 'waiting'").fetchone()
        return count

    def wake(self) -> None:
        """Makes every thread in `wait_for_groups` return now (a shutdown is under way)."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def counts(self) -> StoreCounts:
        """Groups in each state."""
        with self._reading() as connection:
            groups = dict(connection.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
            (rejected,) = connection.execute("SELECT COUNT(*) FROM rejects").fetchone()
        return StoreCounts(groups.get("waiting", 0), groups.get("taken", 0), groups.get("dropped", 0), rejected)

    def waiting_sequences(self) -> int:
        """Sequences of all waiting groups."""
        with self._reading() as connection:
            (total,) = connection.execute("SELECT TOTAL(rollouts) FROM groups WHERE state = 'waiting'").fetchone()
        return int(total)

    def waiting_by_source(self) -> dict[str, WaitingSource]:
        """What waits, for each source that has something waiting."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT source, COUNT(*), SUM(rollouts), MAX(rollouts) FROM groups"
                " WHERE state = 'waiting' GROUP BY source"
            ).fetchall()
        return {source: WaitingSource(*numbers) for source, *numbers in rows}

    def last_received(self) -> float | None:
        """Unix time at which the newest group came, accepted or not; None: none ever came."""
        with self._reading() as connection:
            (newest,) = connection.execute(
                "SELECT MAX(received) FROM (SELECT received FROM groups UNION ALL SELECT received FROM rejects)"
            ).fetchone()
        return newest

    def drop_reasons(self) -> dict[str, int]:
        """How many groups were dropped, for each reason."""
        with self._reading() as connection:
            rows = connection.execute("SELECT reason, COUNT(*) FROM groups WHERE state = 'dropped' GROUP BY reason")
            return dict(rows.fetchall())

    def rejects(self, limit: int = 20) -> list[Reject]:
        """The newest entries of the quarantine, newest first."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT source, reason, received, payload FROM rejects ORDER BY id DESC LIMIT ?", (limit,)
            ).fetchall()
        return [
            Reject(source, reason, received, None if payload is None else json.loads(zlib.decompress(payload)))
            for source, reason, received, payload in rows
        ]

    def size_bytes(self) -> int:
        """Bytes of the database file, without its write-ahead log."""
        with self._reading() as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        return pages * page_size

    def remember(self, key: str, value: Any) -> None:
        """Keeps a small JSON value across restarts (the environments that registered)."""
        with self._transaction("written") as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, json.dumps(value)))

    def recall(self, key: str) -> Any:
        """The value of `remember`, or None."""
        with self._reading() as connection:
            row = connection.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def close(self) -> None:
        """Folds the log into the file and wakes who waits. Idempotent; later calls raise StoreError."""
        with self._changed:
            self._discard_connection()
            self._changed.notify_all()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            statements = f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            connection.executescript(statements)
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{self.path}: schema {version} is a newer mlx_parallm's; this one reads up to {SCHEMA_VERSION}"
            )

    def _mark(self, group_ids: Collection[str], state: str, step: int, reason: str | None) -> None:
        with self._transaction("written") as connection:
            for group_id in group_ids:
                cursor = connection.execute(
                    "UPDATE groups SET state = ?, step = ?, reason = ? WHERE group_id = ?",
                    (state, step, reason, group_id),
                )
                if cursor.rowcount != 1:
                    raise StoreError(f"{self.path}: no group {group_id!r} to mark as {state}")

    def _payload(self, connection: sqlite3.Connection, column: str, value: int | str) -> bytes:
        row = connection.execute(f"SELECT payload FROM groups WHERE {column} = ?", (value,)).fetchone()
        if row is None:
            raise StoreError(f"{self.path}: no group {value!r}")
        return row[0]

    def _decoded(self, payload: bytes) -> RolloutGroup:
        try:
            return decode_group(payload)
        except (ValueError, KeyError, zlib.error) as error:
            raise StoreError(f"{self.path}: a stored group is damaged: {error}") from error

    @contextlib.contextmanager
    def _transaction(self, doing: str) -> Iterator[sqlite3.Connection]:
        """All or nothing; who waits is told after the commit."""
        with self._reading(doing) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:  # something failed; a full disk may have rolled back already
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
            self._changed.notify_all()

    @contextlib.contextmanager
    def _reading(self, doing: str = "read") -> Iterator[sqlite3.Connection]:
        with self._changed:
            if self._connection is None:
                raise StoreError(f"{self.path}: the rollout database is closed")
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise self._explained(doing, error) from error

    def _discard_connection(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):  # a full disk: the log stays beside the file and loses nothing
                self._connection.close()
        self._connection = None

    def _explained(self, doing: str, error: Exception) -> StoreError:
        text = str(error)
        advice = ""
        if "full" in text or "disk I/O" in text:
            advice = " (is the disk full? free some space: the group was not accepted and may be sent again)"
        elif "locked" in text:
            advice = " (another process holds it: is a second daemon using this run directory?)"
        elif "not a database" in text:
            advice = " (move the file away to start a new one)"
        return StoreError(f"{self.path}: the rollout database cannot be {doing}: {text}{advice}")


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return repr(value)

"""The durable queue of scored groups and the accounting of them: one SQLite file a run,
`rollouts.sqlite`.

Who writes: `environments.RolloutManager` (in process), the `/atropos` routes through `queue.py`,
and `faces.atropos.client`. Who reads: `rl_training.rollout_buffer`, which marks the groups that it
consumes. A group is on the disk (`database.py` says how) before `add` returns, so an
acknowledgement after it is a promise.

A group is `waiting`, then `taken` by a step or `dropped` with a reason. Groups that cannot be
trained on is in `rejects`. The checkpoint decides which groups were consumed: `restore(step)` puts
every group that a later step took or dropped back to waiting. `prune` deletes payloads (the
tokens) of groups that no checkpoint can need; their rows stay.
"""

import json
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_parallm.errors import RolloutRejectedError, StoreError
from mlx_parallm.rollout_store.checks import OTHER_MODEL
from mlx_parallm.rollout_store.database import Database
from mlx_parallm.rollout_store.payload import decode_group, encode_group, encode_reject
from mlx_parallm.system.files import shortage
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import RolloutGroup

# newest rejects whose payload is kept; an environment gone wrong must not fill the disk
KEPT_REJECTS = 200
KEPT_REASONS = 100_000  # newest rejects that are remembered at all; older ones are only counted
MAX_NAME_BYTES = 2048  # id, environment and source of a group: their rows are never deleted
MAX_REASON = 1000  # characters; it may quote the sender
PRUNED_AT_ONCE = 64  # payloads deleted under one lock, for which senders of groups wait

SHOWN_CANDIDATES = 5
PRUNED = "the tokens were pruned (rollouts.keep, rollouts.max_gb)"
_STATE = "CASE WHEN state = 'dropped' AND reason = '{}' THEN 'quarantined' ELSE state END".format(
    OTHER_MODEL.replace("'", "''")
)
_RECORD = (
    f"sequence, group_id, environment, source, {_STATE}, step, reason,"
    " received, first_version, last_version"
)
"""A `GroupRecord` without its group, behind its place in the order of arrival."""

log = get_logger("rollouts")


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Groups by state."""

    waiting: int
    taken: int
    dropped: int
    rejected: int


@dataclass(frozen=True, slots=True)
class WaitingSource:
    """Counts of one source's waiting groups: groups, sequences, and the size of the largest one."""

    groups: int
    sequences: int
    largest: int


@dataclass(frozen=True, slots=True)
class Reject:
    """One entry of the quarantine. `payload` is None when it was too large or is too old to be
    kept."""

    source: str
    reason: str
    received: float  # Unix time
    payload: Any


@dataclass(frozen=True, slots=True)
class AccountLine:
    """Groups of one environment, source and state whose oldest token is of one policy version
    (None: not known)."""

    environment: str
    source: str
    state: str  # waiting, taken, dropped or quarantined
    version: int | None
    groups: int
    sequences: int
    pruned: int  # groups without tokens any more
    received_first: float  # Unix time
    received_last: float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A row with its group. The group is None if its tokens are pruned or damaged, and `lost`
    says which. Versions are None in runs of older formats."""

    group_id: str
    environment: str
    source: str
    state: str
    step: int | None  # the step that took or dropped the group
    reason: str | None
    received: float  # Unix time
    first_version: int | None
    last_version: int | None
    group: RolloutGroup | None = None
    lost: str | None = None


class _Arrival:
    """A group on its way to the disk. The thread with the lock writes all groups so far, in
    one commit."""

    def __init__(self, group: RolloutGroup, source: str) -> None:
        # here, where only its own sender is told: in the commit it would take all others down with
        # it
        try:
            names = len(f"{group.group_id}{group.environment}{source}".encode())
        except UnicodeEncodeError as error:
            raise RolloutRejectedError(
                "the group's id or environment holds half a character"
            ) from error
        if names > MAX_NAME_BYTES:
            raise RolloutRejectedError(
                f"the group's id and environment have {names} bytes, more than {MAX_NAME_BYTES}"
            )
        versions = group.sampled_versions
        payload = encode_group(group)
        self.row = (
            group.group_id,
            source,
            group.environment,
            len(group.rollouts),
            time.time(),
            min(versions, default=None),
            max(versions, default=None),
            len(payload),
        )
        self.payload = payload
        self.is_new: bool | None = None  # None: not on the disk
        self.fault = "the group was not written"
        self.tried = False


class RolloutStore:
    """Scored groups on disk; every method may be called from any thread. Raises StoreError and
    nothing of sqlite3's."""

    def __init__(
        self,
        path: Path,
        *,
        lock_timeout_s: float = 5.0,
        min_free_bytes: int = 0,
        read_only: bool = False,
    ) -> None:
        """Opens or makes the database; one of an older schema is brought up to date.

        Args:
            min_free_bytes: `add` refuses groups while less is free on the disk
                (`disk.reserve_bytes`).
            read_only: another process may be using it; it must be there, and only reading methods
                work.

        Raises StoreError: not a database, a newer schema, locked, not writable.
        """
        self.path = path
        self.min_free_bytes = min_free_bytes
        self.database = Database(path, lock_timeout_s=lock_timeout_s, read_only=read_only)
        self._changed = self.database.changed
        self._transaction, self._reading = self.database.transaction, self.database.reading
        self._arrivals: deque[_Arrival] = deque()
        self._wakes = 0
        self._wanted: list[int] = []  # `at_least` of every thread that is in `wait_for_groups`

    def add(self, group: RolloutGroup, *, source: str) -> bool:
        """Stores a checked group; on the disk when this returns. False: a group of that id is known
        already.

        Groups that come while another is being written share one commit. Raises StoreError: not
        kept, send it again.
        """
        return self.add_all([group], source=source)[0]

    def add_all(self, groups: Sequence[RolloutGroup], *, source: str) -> list[bool]:
        """Store several groups as `add` does one: all of them are on the disk, or none."""
        arrivals = [_Arrival(group, source) for group in groups]
        self._arrivals.extend(arrivals)  # at once: who writes finds all or none
        with self._changed:
            if not all(arrival.tried for arrival in arrivals):
                self._write_arrivals()
        for arrival in arrivals:
            if arrival.is_new is None:
                raise StoreError(arrival.fault)
        return [bool(arrival.is_new) for arrival in arrivals]

    def _write_arrivals(self) -> None:
        arrivals = [self._arrivals.popleft() for _ in range(len(self._arrivals))]
        for arrival in arrivals:
            arrival.tried = True
        try:
            self._check_room()
            with self._transaction() as connection:
                new = [_insert(connection, arrival) for arrival in arrivals]
        except StoreError as error:
            for arrival in arrivals:
                arrival.fault = str(error)
            return
        for arrival, is_new in zip(arrivals, new, strict=True):
            arrival.is_new = is_new

    def _check_room(self) -> None:
        if fault := shortage(self.path.parent, self.min_free_bytes):
            raise StoreError(f"{self.path}: no group is accepted: {fault}; it may be sent again")

    def reject(self, payload: Any, *, source: str, reason: str) -> None:
        """Keep unusable groups in quarantine: JSON values, a RolloutGroup, or
        anything with a repr."""
        kept = encode_reject(payload)
        in_words = reason[:MAX_REASON].encode(errors="backslashreplace").decode()
        with self._transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO rejects (source, reason, received, payload) VALUES (?, ?, ?, ?)",
                (source[:MAX_REASON], in_words, time.time(), kept),
            )
            newest = cursor.lastrowid or 0
            connection.execute(
                "UPDATE rejects SET payload = NULL WHERE id = ?", (newest - KEPT_REJECTS,)
            )
            connection.execute("DELETE FROM rejects WHERE id = ?", (newest - KEPT_REASONS,))

    def take(self, group_ids: Collection[str], step: int) -> None:
        """Marks groups as consumed by `step`. Raises StoreError, with nothing marked, when one
        is unknown."""
        with self._transaction() as connection:
            for group_id in group_ids:
                if not _mark(connection, group_id, "taken", step, None):
                    raise StoreError(f"{self.path}: no group {group_id!r} to mark as taken")

    def drop(self, group_ids: Collection[str], step: int, reason: str) -> None:
        """Marks groups as consumed by `step` without training, and why (no variance, too stale,
        …). One that is unknown is left out: there is nothing to mark."""
        with self._transaction() as connection:
            for group_id in group_ids:
                _mark(connection, group_id, "dropped", step, reason)

    def drop_waiting(self, source_prefix: str, step: int, reason: str) -> int:
        """Drops every waiting group of the sources that begin so; returns how many."""
        with self._transaction() as connection:
            return connection.execute(
                "UPDATE groups SET state = 'dropped', step = ?, reason = ?"
                " WHERE state = 'waiting' AND substr(source, 1, ?) = ?",
                (step, reason, len(source_prefix), source_prefix),
            ).rowcount

    def restore(self, consumed_up_to_step: int, *, keep_drops_of: int | None = None) -> int:
        """Lets groups wait again that steps after the checkpoint took or dropped; returns how many.

        Two kinds stay as they are: groups that step `keep_drops_of` dropped (the checkpoint holds
        that step half-done, with its statistics), and groups that are pruned, which logs a warning
        since no checkpoint should need them.
        """
        consumed = "state != 'waiting' AND step > ? AND NOT (state = 'dropped' AND step = ?)"
        values = (consumed_up_to_step, -1 if keep_drops_of is None else keep_drops_of)
        with self._transaction() as connection:
            restored = connection.execute(
                f"UPDATE groups SET state = 'waiting', step = NULL, reason = NULL WHERE {consumed}"
                " AND bytes IS NOT NULL",
                values,
            ).rowcount
            (gone,) = connection.execute(
                f"SELECT COUNT(*) FROM groups WHERE {consumed}", values
            ).fetchone()
        if gone:
            log.warning(
                "rollouts of later steps are pruned: they are not trained on again", groups=gone
            )
        return restored

    def prune(
        self, up_to_step: int, *, always_up_to_step: int, max_bytes: int, seconds: float = 1.0
    ) -> int:
        """Deletes payloads of consumed groups, oldest step first, and shrinks the file; returns how
        many.

        Args:
            up_to_step: the last step that no checkpoint can bring back.
            always_up_to_step: steps that are pruned whatever the size of the file.
            max_bytes: later steps are pruned only while the file's content is larger; 0 = no bound.
            seconds: about how long this may take, one slice at least; the next call continues.
        """
        deadline = time.monotonic() + seconds
        excess = self.database.size_bytes(used=True) - max_bytes if max_bytes else 0
        doomed: list[int] = []
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT sequence, step, bytes FROM groups INDEXED BY consumed_payloads WHERE bytes"
                " IS NOT NULL AND state != 'waiting' AND step <= ? ORDER BY step, sequence",
                (up_to_step,),
            )
            for sequence, step, size in rows:
                if step > always_up_to_step and excess <= 0:
                    break
                doomed.append(sequence)
                excess -= size
        pruned = 0
        while pruned < len(doomed) and (not pruned or time.monotonic() < deadline):
            chunk = [(sequence,) for sequence in doomed[pruned : pruned + PRUNED_AT_ONCE]]
            with self._transaction() as connection:
                connection.executemany("DELETE FROM payloads WHERE sequence = ?", chunk)
                connection.executemany("UPDATE groups SET bytes = NULL WHERE sequence = ?", chunk)
            pruned += len(chunk)
        while time.monotonic() < deadline and self.database.give_back():
            pass
        return pruned

    def waiting(
        self, limit: int | None = None, *, exclude: Collection[str] = ()
    ) -> list[RolloutGroup]:
        """Waiting groups, oldest first, without those whose id the caller holds already
        (`exclude`)."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT sequence, group_id FROM groups WHERE state = 'waiting' ORDER BY sequence"
            )
            wanted = [sequence for sequence, group_id in rows if group_id not in exclude][:limit]
            payloads = [
                connection.execute(
                    "SELECT payload FROM payloads WHERE sequence = ?", (sequence,)
                ).fetchone()[0]
                for sequence in wanted
            ]
        return [self._decoded(payload) for payload in payloads]

    def waiting_ids(self) -> set[str]:
        """Ids of all groups that wait."""
        with self._reading() as connection:
            rows = connection.execute("SELECT group_id FROM groups WHERE state = 'waiting'")
            return {group_id for (group_id,) in rows}

    def groups(self, group_ids: Iterable[str]) -> list[RolloutGroup]:
        """Return these groups in this order, whatever their state. Raises StoreError: one is
        unknown or pruned."""
        payloads = []
        with self._reading() as connection:
            for group_id in group_ids:
                row = connection.execute(
                    (
                        "SELECT payload FROM groups LEFT JOIN payloads USING"
                        " (sequence) WHERE group_id = ?"
                    ),
                    (group_id,),
                ).fetchone()
                if row is None or row[0] is None:
                    fault = (
                        f"the tokens of group {group_id!r} are pruned"
                        if row
                        else f"no group {group_id!r}"
                    )
                    raise StoreError(f"{self.path}: {fault}")
                payloads.append(row[0])
        return [self._decoded(payload) for payload in payloads]

    def known_ids(self, prefix: str = "") -> set[str]:
        """Ids of all groups, whatever their state, that begin with `prefix`."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT group_id FROM groups WHERE substr(group_id, 1, ?) = ?",
                (len(prefix), prefix),
            )
            return {group_id for (group_id,) in rows}

    def wait_for_groups(self, timeout_s: float, *, at_least: int = 1) -> bool:
        """Blocks until `at_least` groups wait (True); False when the time is up, or after `wake`
        or `close`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            wakes = self._wakes
            self._wanted.append(at_least)
            try:
                while self.database.connection is not None:
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
        """True while a thread waits for more groups than wait here: those that are here do not
        add up to its batch."""
        with self._changed:
            return bool(self._wanted) and self._waiting_groups() < max(self._wanted)

    def _waiting_groups(self) -> int:
        with self._reading() as connection:
            (count,) = connection.execute(
                "SELECT COUNT(*) FROM groups WHERE state = 'waiting'"
            ).fetchone()
        return count

    def wake(self) -> None:
        """Makes every thread in `wait_for_groups` return now (a shutdown is under way)."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def counts(self) -> StoreCounts:
        """Groups in each state."""
        with self._reading() as connection:
            groups = dict(
                connection.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall()
            )
            (rejected,) = connection.execute("SELECT COALESCE(MAX(id), 0) FROM rejects").fetchone()
        return StoreCounts(
            groups.get("waiting", 0), groups.get("taken", 0), groups.get("dropped", 0), rejected
        )

    def waiting_sequences(self) -> int:
        """Sequences of all waiting groups."""
        with self._reading() as connection:
            (total,) = connection.execute(
                "SELECT TOTAL(rollouts) FROM groups WHERE state = 'waiting'"
            ).fetchone()
        return int(total)

    def waiting_by_source(self) -> dict[str, WaitingSource]:
        """Count the waiting groups of each source that has any."""
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
                "SELECT MAX(received) FROM (SELECT received FROM groups UNION ALL SELECT"
                " received FROM rejects)"
            ).fetchone()
        return newest

    def drop_reasons(self) -> dict[str, int]:
        """How many groups were dropped, for each reason."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT reason, COUNT(*) FROM groups WHERE state = 'dropped' GROUP BY reason"
            )
            return dict(rows.fetchall())

    def rejects(self, limit: int = 20) -> list[Reject]:
        """The newest entries of the quarantine, newest first."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT source, reason, received, payload FROM rejects ORDER BY id DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return [
            Reject(
                source,
                reason,
                received,
                None if payload is None else json.loads(zlib.decompress(payload)),
            )
            for source, reason, received, payload in rows
        ]

    def accounts(self) -> list[AccountLine]:
        """Count every group of the run, ordered by environment, source, state and version."""
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT environment, source, {_STATE}, first_version, COUNT(*), SUM(rollouts),"
                " SUM(bytes IS NULL),"
                " MIN(received), MAX(received) FROM groups GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"
            ).fetchall()
        return [AccountLine(*row) for row in rows]

    def reject_reasons(self) -> dict[tuple[str, str], int]:
        """(source, reason) → how many, the most frequent first."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT source, reason, COUNT(*) FROM rejects GROUP BY 1, 2"
                " ORDER BY 3 DESC, MAX(id) DESC"
            ).fetchall()
        return {(source, reason): count for source, reason, count in rows}

    def taken_by(self, step: int) -> list[str]:
        """Ids of the groups that a step was trained on, in the order in which they came."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT group_id FROM groups WHERE state = 'taken' AND step = ? ORDER BY sequence",
                (step,),
            ).fetchall()
        return [group_id for (group_id,) in rows]

    def find(self, group_id: str) -> GroupRecord:
        """The group of that id, or the only one whose id begins so. Raises StoreError: none, or
        several."""
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT {_RECORD} FROM groups WHERE substr(group_id, 1, ?) = ?"
                " ORDER BY group_id != ?, sequence LIMIT ?",
                (len(group_id), group_id, group_id, SHOWN_CANDIDATES + 1),
            ).fetchall()
        if not rows:
            raise StoreError(f"no group {group_id!r} in {self.path}")
        if rows[0][1] != group_id and len(rows) > 1:
            some = ", ".join(row[1] for row in rows[:SHOWN_CANDIDATES])
            raise StoreError(
                f"several groups begin with {group_id!r}: {some}"
                + ", …" * (len(rows) > SHOWN_CANDIDATES)
            )
        return self._record(*rows[0])

    def records(
        self,
        *,
        environment: str | None = None,
        state: str | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
        older_than: str | None = None,
    ) -> Iterator[GroupRecord]:
        """Yield the groups, the newest first. The database is not held between two of them.

        Args:
            state: waiting, taken, dropped or quarantined.
            first_step, last_step: of the step that took or dropped a group; one that waits has
                none.
            older_than: the id of a group: only those that came before it.
        """
        conditions = {
            "environment = ?": environment,
            f"{_STATE} = ?": state,
            "step >= ?": first_step,
        }
        conditions["sequence < (SELECT sequence FROM groups WHERE group_id = ?)"] = older_than
        wanted = {
            sql: value
            for sql, value in {**conditions, "step <= ?": last_step}.items()
            if value is not None
        }
        with self._reading() as connection:
            rows = connection.execute(
                (
                    f"SELECT {_RECORD} FROM groups WHERE {' AND '.join([*wanted, 'TRUE'])} ORDER"
                    " BY sequence DESC"
                ),
                tuple(wanted.values()),
            ).fetchall()
        for row in rows:
            yield self._record(*row)

    def _record(self, sequence: int, *values: Any) -> GroupRecord:
        with self._reading() as connection:
            row = connection.execute(
                "SELECT payload FROM payloads WHERE sequence = ?", (sequence,)
            ).fetchone()
        record = GroupRecord(*values)
        if row is None:
            return replace(record, lost=PRUNED)
        try:
            return replace(record, group=self._decoded(row[0]))
        except StoreError as error:
            return replace(record, lost=str(error))

    def size_bytes(self) -> int:
        """Bytes of the database file, without its write-ahead log."""
        return self.database.size_bytes()

    def remember(self, key: str, value: Any) -> None:
        """Keeps a small JSON value across restarts (the environments that registered)."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, json.dumps(value))
            )

    def recall(self, key: str) -> Any:
        """The value of `remember`, or None."""
        with self._reading() as connection:
            row = connection.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def close(self) -> None:
        """Folds the log into the file and wakes who waits. Idempotent; later calls raise
        StoreError."""
        self.database.close()

    def _decoded(self, payload: bytes) -> RolloutGroup:
        try:
            return decode_group(payload)
        except (ValueError, KeyError, zlib.error) as error:
            raise StoreError(f"{self.path}: a stored group is damaged: {error}") from error


def _mark(
    connection: sqlite3.Connection, group_id: str, state: str, step: int, reason: str | None
) -> bool:
    """False: there is no such group."""
    values = (state, step, reason, group_id)
    sql = "UPDATE groups SET state = ?, step = ?, reason = ? WHERE group_id = ?"
    return connection.execute(sql, values).rowcount == 1


def _insert(connection: sqlite3.Connection, arrival: _Arrival) -> bool:
    cursor = connection.execute(
        "INSERT INTO groups (group_id, source, environment, rollouts, received, first_version,"
        " last_version, bytes)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (group_id) DO NOTHING",
        arrival.row,
    )
    if cursor.rowcount != 1:
        return False
    connection.execute("INSERT INTO payloads VALUES (?, ?)", (cursor.lastrowid, arrival.payload))
    return True

"""Experiences and open decisions on the disk: what was acknowledged survives kill -9 and a power
cut. No MLX.

One thread writes. It takes everything that waits and commits it together, so that many clients at
once cost about as much as one. An experience leaves the file when a checkpoint has learned from it
(`consumed`).
"""

import queue
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from sqlite3 import Connection
from threading import Thread
from typing import Any

import numpy as np

from mlx_parallm.errors import RefusedError, StoreError
from mlx_parallm.rollout_store.database import Database, Schema
from mlx_parallm.systems.prompt_policy.experience import Experience

LOCK_TIMEOUT_S = 5.0
EXPERIENCES = Schema(
    "experience",
    1,
    """
CREATE TABLE experiences (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    episode_id TEXT,
    state BLOB NOT NULL,
    action INTEGER NOT NULL,
    reward REAL NOT NULL,
    next_state BLOB NOT NULL,
    done INTEGER NOT NULL,
    log_prob REAL NOT NULL,
    value REAL NOT NULL,
    allowed BLOB
);
CREATE TABLE decisions (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    created REAL NOT NULL,
    state BLOB NOT NULL,
    action INTEGER NOT NULL,
    next_state BLOB NOT NULL,
    log_prob REAL NOT NULL,
    value REAL NOT NULL,
    allowed BLOB
);
""",
)
_COLUMNS = "episode_id, state, action, reward, next_state, done, log_prob, value, allowed"
_DECISION = "state, action, next_state, log_prob, value, allowed"
Write = Callable[[Connection], Any]


@dataclass(frozen=True)
class Decision:
    """A mutation that waits for its reward; fields as of `Experience`."""

    id: str
    state: np.ndarray
    action: int
    next_state: np.ndarray
    log_prob: float
    value: float
    allowed: np.ndarray | None


class ExperienceStore:
    """Any thread. Each write returns a Future that is done once it is on the disk.

    Args:
        added: is called with each experience that was committed, in their order, by the writing
            thread.

    Raises StoreError: the file cannot be opened, or holds embeddings of another size or other
    mutations.
    """

    def __init__(
        self,
        path: Path,
        dimensions: int,
        actions: int,
        *,
        open_decisions: int,
        added: Callable[[Experience], None],
    ) -> None:
        self._database = Database(
            path, lock_timeout_s=LOCK_TIMEOUT_S, read_only=False, schema=EXPERIENCES
        )
        self._dimensions, self._open_decisions, self._added = dimensions, open_decisions, added
        self._waiting: queue.SimpleQueue[tuple[Write, Future[Any]] | None] = queue.SimpleQueue()
        try:
            self._check_size(actions)
            self.id = self._identity()
        except StoreError:
            self._database.close()
            raise
        self._thread = Thread(target=self._main, name="experiences", daemon=True)
        self._thread.start()

    def _identity(self) -> str:
        """Return this file's own id; sequence numbers of another file say nothing here."""
        with self._database.transaction() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS identity (id TEXT NOT NULL)")
            row = connection.execute("SELECT id FROM identity").fetchone()
            if row is None:
                row = (uuid.uuid4().hex,)
                connection.execute("INSERT INTO identity VALUES (?)", row)
        return str(row[0])

    def unused(self) -> list[Experience]:
        """Return what no checkpoint has learned from, oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(
                f"SELECT sequence, {_COLUMNS} FROM experiences ORDER BY sequence"
            ).fetchall()
        return [_experience(row) for row in rows]

    def add(self, experience: Experience) -> "Future[Experience]":
        """Keep an experience; the result has its sequence number."""
        return self._submit(lambda connection: _insert(connection, experience))

    def add_decision(self, decision: Decision) -> "Future[None]":
        """Keep a decision; the oldest open ones above the limit go."""

        def write(connection: Connection) -> None:
            connection.execute(
                f"INSERT INTO decisions (id, created, {_DECISION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    decision.id,
                    time.time(),
                    _blob(decision.state),
                    decision.action,
                    _blob(decision.next_state),
                    decision.log_prob,
                    decision.value,
                    None if decision.allowed is None else decision.allowed.tobytes(),
                ),
            )
            newest = connection.execute("SELECT MAX(sequence) FROM decisions").fetchone()[0]
            connection.execute(
                "DELETE FROM decisions WHERE sequence <= ?", (newest - self._open_decisions,)
            )

        return self._submit(write)

    def reward(
        self,
        decision_id: str,
        reward: float,
        episode_id: str | None = None,
        next_state: np.ndarray | None = None,
    ) -> "Future[Experience]":
        """Make an experience of an open decision; without `next_state` its episode has ended.
        The Future raises RefusedError (404)."""

        def write(connection: Connection) -> Experience:
            row = connection.execute(
                f"SELECT {_DECISION} FROM decisions WHERE id = ?", (decision_id,)
            ).fetchone()
            if row is None:
                raise RefusedError(
                    f"there is no open mutation {decision_id!r}: it has its reward already, or"
                    f" {self._open_decisions} newer ones wait for theirs",
                    404,
                    param="id",
                )
            connection.execute("DELETE FROM decisions WHERE id = ?", (decision_id,))
            state, action, same, log_prob, value, allowed = row
            ended = next_state is None
            after = _vector(same) if next_state is None else next_state
            return _insert(
                connection,
                Experience(
                    _vector(state),
                    action,
                    reward,
                    after,
                    ended,
                    log_prob,
                    value,
                    _flags(allowed),
                    episode_id,
                ),
            )

        return self._submit(write)

    def consumed(self, through: int) -> "Future[None]":
        """Forget the experiences up to this sequence number: the newest checkpoint has learned
        from them."""

        def write(connection: Connection) -> None:
            connection.execute("DELETE FROM experiences WHERE sequence <= ?", (through,))

        return self._submit(write)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._waiting.put(None)
        self._thread.join()
        self._database.close()

    def _submit(self, write: Write) -> "Future[Any]":
        outcome: Future[Any] = Future()
        self._waiting.put((write, outcome))
        return outcome

    def _main(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            ended = False
            while not self._waiting.empty():
                entry = self._waiting.get()
                if entry is None:
                    ended = True
                    break
                batch.append(entry)
            self._commit([entry for entry in batch if entry[1].set_running_or_notify_cancel()])
            if ended:
                break

    def _commit(self, batch: Sequence[tuple[Write, "Future[Any]"]]) -> None:
        results: list[Any] = []
        try:
            with self._database.transaction() as connection:
                for write, _ in batch:
                    try:
                        results.append(write(connection))
                    except RefusedError as error:
                        results.append(error)
        except StoreError as error:
            results = [error] * len(batch)
        for (_, outcome), result in zip(batch, results, strict=True):
            if isinstance(result, StoreError | RefusedError):
                outcome.set_exception(result)
                continue
            if isinstance(result, Experience):
                self._added(result)
            outcome.set_result(result)

    def _check_size(self, actions: int) -> None:
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT LENGTH(state) FROM experiences UNION ALL SELECT LENGTH(state) FROM"
                " decisions LIMIT 1"
            ).fetchone()
            highest = connection.execute(
                "SELECT MAX(action) FROM (SELECT action FROM experiences UNION ALL SELECT"
                " action FROM decisions)"
            ).fetchone()[0]
            [sizes] = connection.execute(
                "SELECT GROUP_CONCAT(DISTINCT LENGTH(allowed)) FROM"
                " (SELECT allowed FROM experiences UNION ALL SELECT allowed FROM decisions)"
            ).fetchall()
        if (highest or 0) >= actions or sizes[0] not in (None, str(actions)):
            raise StoreError(
                f"{self._database.path} holds experiences of other mutations than the {actions} of"
                " the policy: choose"
                " another prompt_policy.checkpoint_dir"
            )
        if row is not None and row[0] != 4 * self._dimensions:
            raise StoreError(
                f"{self._database.path} holds embeddings of {row[0] // 4} numbers, but the policy"
                f" reads {self._dimensions}: choose another prompt_policy.checkpoint_dir"
            )


def _insert(connection: Connection, experience: Experience) -> Experience:
    e = experience
    allowed = None if e.allowed is None else e.allowed.tobytes()
    cursor = connection.execute(
        f"INSERT INTO experiences ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            e.episode_id,
            _blob(e.state),
            e.action,
            e.reward,
            _blob(e.next_state),
            e.done,
            e.log_prob,
            e.value,
            allowed,
        ),
    )
    assert cursor.lastrowid is not None
    return replace(experience, sequence=cursor.lastrowid)


def _experience(row: tuple[Any, ...]) -> Experience:
    sequence, episode_id, state, action, reward, next_state, done, log_prob, value, allowed = row
    return Experience(
        _vector(state),
        action,
        reward,
        _vector(next_state),
        bool(done),
        log_prob,
        value,
        _flags(allowed),
        episode_id,
        sequence,
    )


def _blob(vector: np.ndarray) -> bytes:
    return vector.astype("<f4").tobytes()


def _vector(blob: bytes) -> np.ndarray:
    return np.frombuffer(blob, "<f4").astype(np.float32)


def _flags(blob: bytes | None) -> np.ndarray | None:
    return None if blob is None else np.frombuffer(blob, bool)

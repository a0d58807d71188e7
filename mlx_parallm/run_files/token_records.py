"""`tokens.sqlite`: the trainer's numbers for each token of the groups that samples.jsonl shows. No
MLX.

A row is one segment of one answer. Its columns are little-endian float32 [T], NaN for tokens
that were not trained on, and for numbers that were not computed; the names are those of
`verifiers/v1/graph.py:MessageNode` (0.4.0). Nothing needs this
file: a failure here costs one warning and never the run.
"""

import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from mlx_parallm.errors import StoreError
from mlx_parallm.rollout_store.database import pragma, reading_uri

TOKENS_FILE = "tokens.sqlite"
COLUMNS = (
    "logprobs",
    "trainer_logprobs",
    "reference_logprobs",
    "entropies",
    "advantages",
    "teacher_logprobs",
)
_TABLE = f"""
CREATE TABLE IF NOT EXISTS tokens (
    group_id TEXT, number INTEGER, segment INTEGER, step INTEGER, mask BLOB, {" BLOB, ".join(COLUMNS)} BLOB,
    PRIMARY KEY (group_id, number, segment)
);
CREATE INDEX IF NOT EXISTS tokens_step ON tokens (step);
"""
PAGE = 4096
_OPEN = f"""
PRAGMA page_size = {PAGE}; PRAGMA journal_mode = WAL; PRAGMA journal_size_limit = {256 * PAGE};
PRAGMA synchronous = OFF;
"""
EMPTY_BYTES = 8 * PAGE
"""Bytes of a file without rows, and a little more."""


class TokenFile:
    """Writes the tokens of a step, on the trainer's thread: a few milliseconds.

    Args:
        step: the one that a resumed run continues from; rows of later steps are removed.
        most_bytes: of the file; the oldest steps make room for a new one.
    """

    def __init__(self, run: Path, *, step: int = 0, most_bytes: int = sys.maxsize) -> None:
        self._path, self._step, self._most = run / TOKENS_FILE, step, most_bytes
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def write(self, rows: Sequence[tuple[object, ...]]) -> None:
        """Write the rows of a step: (group, number, segment, step, mask, *COLUMNS). Raises
        sqlite3.Error, StoreError: nothing is written."""
        connection = self._open() if self._connection is None else self._connection
        marks = ", ".join("?" * (5 + len(COLUMNS)))
        self._make_room(connection, sum(map(_bytes_of, rows)))
        connection.execute("BEGIN")
        try:
            connection.executemany(f"INSERT OR REPLACE INTO tokens VALUES ({marks})", rows)
            connection.execute("COMMIT")
        except sqlite3.Error:  # a full disk: the next step may find room again
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _open(self) -> sqlite3.Connection:
        """Open the file for this run; a failure leaves nothing open, so that the next step tries
        again."""
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            connection.executescript(_OPEN + _TABLE)
            connection.execute("DELETE FROM tokens WHERE step > ?", (self._step,))
            # had a larger bound
            if pragma(connection, "page_count") * pragma(connection, "page_size") > self._most:
                self._make_room(connection, 0)
                connection.execute("VACUUM")
        except (sqlite3.Error, StoreError):
            connection.close()
            raise
        self._connection = connection
        return connection

    def _make_room(self, connection: sqlite3.Connection, wanted: int) -> None:
        """Remove the oldest steps until `wanted` bytes fit. Raises StoreError: they never will."""
        if wanted + EMPTY_BYTES > self._most:
            raise StoreError(
                f"the tokens of one step need {wanted} bytes, and"
                f" logging.tokens_gb allows {self._most}"
            )
        while _used_bytes(connection) + wanted > self._most:
            ((oldest,),) = connection.execute("SELECT min(step) FROM tokens")
            if oldest is None:
                return
            connection.execute("DELETE FROM tokens WHERE step = ?", (oldest,))


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages = pragma(connection, "page_count") - pragma(connection, "freelist_count")
    return pages * pragma(connection, "page_size")


def _bytes_of(row: Sequence[object]) -> int:
    """The bytes of a row in the file, at most: whole pages of its columns, one for what leads to
    them."""
    return (sum(len(part) for part in row if isinstance(part, bytes)) // PAGE + 2) * PAGE


def read_tokens(run: Path, group_id: str, number: int, segment: int) -> Mapping[str, np.ndarray]:
    """Return the columns of one segment, [T] float32 by name; empty if the run has not kept
    it."""
    path = run / TOKENS_FILE
    if not path.is_file():
        return {}
    with closing(sqlite3.connect(reading_uri(path), uri=True)) as connection:
        try:
            row = connection.execute(
                (
                    f"SELECT {', '.join(COLUMNS)} FROM tokens WHERE group_id = ? AND number = ?"
                    " AND segment = ?"
                ),
                (group_id, number, segment),
            ).fetchone()
        except sqlite3.Error:  # being made, or damaged: the page does without
            return {}
    return (
        {}
        if row is None
        else {name: np.frombuffer(part, "<f4") for name, part in zip(COLUMNS, row, strict=True)}
    )

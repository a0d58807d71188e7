"""`tokens.sqlite`: what the trainer knew of each token, of the groups that samples.jsonl shows. No
MLX.

A row is one segment of one answer. Its columns are little-endian float32 [T], NaN where a token was
not trained on and where a number was not computed; the names are those of
`verifiers/v1/graph.py:MessageNode` (0.4.0). Nothing needs this
file: a failure here costs one warning (`RunEvents.emit`) and never the run.
"""

import sqlite3
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlx_parallm.errors import StoreError
from mlx_parallm.rl_training.events import RunEvents, SamplesWritten, StepFinished
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rollout_store.database import pragma, reading_uri

if TYPE_CHECKING:  # it imports MLX
    from mlx_parallm.rl_training.step.prepare import StepTokens

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
"""Of a file without rows, and a little more."""


class TokenLog:
    """Writes the tokens of a step after its samples, on the trainer's thread: a few milliseconds.

    Args:
        step: the one that a resumed run continues from; rows of later steps are removed.
        most_bytes: of the file; the oldest steps make room for a new one.
    """

    def __init__(self, run: Path, *, step: int = 0, most_bytes: int = sys.maxsize) -> None:
        self._path, self._step, self._most = run / TOKENS_FILE, step, most_bytes
        self._connection: sqlite3.Connection | None = None
        self._batch: TrainBatch | None = None
        self._tokens: StepTokens | None = None

    def subscribe(self, events: RunEvents) -> None:
        """Call it before the samples subscribe: it keeps the step that they are taken from."""
        events.subscribe(StepFinished, self._keep)
        events.subscribe(
            SamplesWritten,
            lambda event: self._write_shown({sample.group_id for sample in event.samples}),
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _keep(self, event: StepFinished) -> None:
        self._batch, self._tokens = event.batch, event.tokens

    def _write_shown(self, group_ids: Collection[str]) -> None:
        if self._batch is not None and self._tokens is not None:
            self.write(self._batch, self._tokens, group_ids)

    def write(self, batch: TrainBatch, tokens: "StepTokens", group_ids: Collection[str]) -> None:
        """Write these groups of a step. Raises sqlite3.Error, StoreError: nothing is written."""
        connection = self._open() if self._connection is None else self._connection
        rows = rows_of(batch, tokens, group_ids)
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


def rows_of(
    batch: TrainBatch, tokens: "StepTokens", group_ids: Collection[str]
) -> list[tuple[object, ...]]:
    """Return a row for each segment of these groups that was trained on."""
    places = {
        id(segment): (group.group_id, number, place)
        for group in batch.groups
        if group.group_id in group_ids
        for number, rollout in enumerate(group.rollouts)
        for place, segment in enumerate(rollout.segments)
    }
    ends = np.cumsum([sequence.trained for sequence in batch.sequences])
    rows: list[tuple[object, ...]] = []
    for sequence, end in zip(batch.sequences, ends, strict=True):
        if (place := places.get(id(sequence.rollout))) is None:
            continue
        mask = np.array(sequence.rollout.mask, bool)
        trained = np.array(sequence.rollout.trained_mask, bool)
        trained[:1] = False  # the first token has nothing before it
        columns = []
        for name in COLUMNS:
            column = np.full(len(mask), np.nan, "<f4")
            if name in tokens.columns:
                column[trained] = tokens.columns[name][end - sequence.trained : end]
            columns.append(column.tobytes())
        rows.append((*place, batch.step, mask.astype(np.uint8).tobytes(), *columns))
    return rows


def read_tokens(run: Path, group_id: str, number: int, segment: int) -> Mapping[str, np.ndarray]:
    """Return the columns of one segment, [T] float32 by name; empty where the run has not kept
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

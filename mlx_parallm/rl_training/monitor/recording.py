"""Subscribers that write a step's records into the run's files: its tokens and its spans.

A failure here costs one warning (`RunEvents.emit`) and never the run.
"""

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlx_parallm.rl_training.events import RunEvents, SamplesWritten, SpanEnded, StepFinished
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.run_files.spans import SpanLog
from mlx_parallm.run_files.token_records import COLUMNS, TokenFile

if TYPE_CHECKING:  # it imports MLX
    from mlx_parallm.rl_training.step.prepare import StepTokens


def record_spans(events: RunEvents, spans: SpanLog) -> None:
    """Write each timed part of a step, and the versions that sampled its tokens."""
    events.subscribe(
        SpanEnded, lambda event: spans.ended(event.name, event.step, (event.began, event.ended))
    )
    events.subscribe(
        StepFinished,
        lambda event: spans.finish(event.batch.step, (s.rollout for s in event.batch.sequences)),
    )


class TokenLog:
    """Writes the tokens of those groups of a step that its samples show.

    Args: as `TokenFile`.
    """

    def __init__(self, run: Path, *, step: int = 0, most_bytes: int = sys.maxsize) -> None:
        self._file = TokenFile(run, step=step, most_bytes=most_bytes)
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
        self._file.close()

    def _keep(self, event: StepFinished) -> None:
        self._batch, self._tokens = event.batch, event.tokens

    def _write_shown(self, group_ids: Collection[str]) -> None:
        if self._batch is not None and self._tokens is not None:
            self.write(self._batch, self._tokens, group_ids)

    def write(self, batch: TrainBatch, tokens: "StepTokens", group_ids: Collection[str]) -> None:
        """Write these groups of a step. Raises sqlite3.Error, StoreError: nothing is written."""
        self._file.write(rows_of(batch, tokens, group_ids))


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

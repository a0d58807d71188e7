"""Images of the sequences that a step learns from: their features, computed once by the frozen
tower, as rows that the trained tree's embedding reads (models/images/embedding.py).

A sequence names its images (`Rollout.images`). `admit` gives the ids of their features to the
tokens that stand for them, so collating, sharing of prompts and the loss see tokens as always.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_parallm.errors import ConfigError
from mlx_parallm.models.images.embedding import ImageTable
from mlx_parallm.models.images.encoder import ImageParts
from mlx_parallm.models.images.positions import Grid, image_positions
from mlx_parallm.models.images.spans import image_numbers
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.types import Rollout


class StepImages:
    """
    Args:
        parts: of the base.
        table: of the trained tree. From here on it has the features of the newest sequences.
    """

    def __init__(self, parts: ImageParts, table: ImageTable) -> None:
        self.encoded = 0  # images, since the start
        self._parts, self._table = parts, table
        self._places: dict[str, tuple[int, int]] = {}  # name → first row of the table, rows
        self._grids: dict[int, Grid] = {}  # first row of the table → grid

    def begin_step(self) -> None:
        """Forget the features of earlier steps where they take more than
        `encoder.cache_bytes`."""
        features = self._table.features
        if features is not None and features.nbytes > self._parts.encoder.cache_bytes:
            self._table.features, self._places, self._grids = None, {}, {}

    def admit(self, sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Return the sequences with ids of features in the places of image tokens that were not
        sampled. Sequences that were admitted stay as they are.

        Raises ConfigError: another number of such tokens than its images have features;
        RequestError: an image is not there any more.
        """
        names = dict.fromkeys(name for each in sequences for name in each.rollout.images)
        if not names:
            return sequences
        self._encode([name for name in names if name not in self._places])
        return [
            replace(each, rollout=self._admitted(each.rollout)) if each.rollout.images else each
            for each in sequences
        ]

    def wants_rows(self, sequences: Iterable[TrainSequence]) -> bool:
        """Whether tokens of admitted sequences have positions beside their places, or see later
        ones: such rows are computed as they are."""
        first = self._table.vocabulary
        table = self._table
        return (table.rope is not None or table.spans is not None) and any(
            max(each.rollout.tokens, default=0) >= first for each in sequences
        )

    def seen(self, inputs: np.ndarray) -> AbstractContextManager[None]:
        """Let a forward over rows [B, T] of admitted sequences have their images' positions, and
        see them whole."""
        table, features = self._table, inputs - self._table.vocabulary
        if (table.rope is None and table.spans is None) or not (features >= 0).any():
            return nullcontext()
        positions = numbers = None
        if table.rope is not None:
            rows = []
            for ids in features.tolist():
                starts = [
                    (at, self._grids[each]) for at, each in enumerate(ids) if each in self._grids
                ]
                rows.append(image_positions(len(ids), starts)[0])
            positions = mx.array(np.stack(rows, axis=1))
        if table.spans is not None:
            firsts = [first for first, _ in self._places.values()]
            numbers = image_numbers(features >= 0, np.isin(features, firsts))
        return table.at(positions, ids=mx.array(inputs), numbers=numbers)

    def _encode(self, names: Iterable[str]) -> None:
        rows = 0 if self._table.features is None else len(self._table.features)
        parts = [] if self._table.features is None else [self._table.features]
        for name in names:
            image = self._parts.reader.stored(name)
            parts.append(self._parts.encoder.encode(image))
            mx.eval(parts[-1])
            self.encoded += 1
            self._places[name] = (rows, image.tokens)
            if image.grid is not None:
                self._grids[rows] = image.grid
            rows += image.tokens
        self._table.features = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        mx.eval(self._table.features)

    def _admitted(self, rollout: Rollout) -> Rollout:
        token, first = self._parts.encoder.token_id, self._table.vocabulary
        ids = [
            first + start + index
            for start, count in map(self._places.__getitem__, rollout.images)
            for index in range(count)
        ]
        tokens = list(rollout.tokens)
        places = [
            place
            for place, (each, sampled) in enumerate(zip(tokens, rollout.mask, strict=True))
            if each == token and not sampled
        ]
        if len(places) != len(ids):
            raise ConfigError(
                f"a sequence has {len(places)} image tokens, and its {len(rollout.images)} images"
                f" have {len(ids)} features"
            )
        for place, number in zip(places, ids, strict=True):
            tokens[place] = number
        return replace(rollout, tokens=tuple(tokens), images=())

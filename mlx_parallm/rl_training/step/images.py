"""Images of the sequences that a step learns from, as rows that the trained tree's embedding reads
(models/images/embedding.py).

A sequence names its images (`Rollout.images`). `admit` gives the ids of their features to the
tokens that stand for them, so collating, sharing of prompts and the loss see tokens as always.

Where the part that sees is frozen, its features are computed once, before the step's first forward,
and kept for later steps. Where it is trained (`ImageEncoder.trained`), they are those of the
weights that are in the tree when a forward begins: the policy's, or the reference's. The passes
over the language part then find the gradient by the features, as by a parameter (`gradient`), and
`pull_back` takes it through the tower, once an image for each mini-batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.errors import ConfigError
from mlx_parallm.models.images.embedding import FeatureGradient, ImageTable
from mlx_parallm.models.images.encoder import ImageParts, of_part
from mlx_parallm.models.images.positions import Grid, image_positions
from mlx_parallm.models.parameters import ParameterSlots
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.types import Rollout


class StepImages:
    """
    Args:
        parts: the encoder over the trained tree, and the reader.
        table: of the trained tree. From here on it has the features of the newest sequences.
        slots: of the trained tree.
    """

    def __init__(self, parts: ImageParts, table: ImageTable, slots: ParameterSlots) -> None:
        self.encoded = 0  # images, since the start
        self._parts, self._table, self._slots = parts, table, slots
        self._places: dict[str, tuple[int, int]] = {}  # name → first row of the table, rows
        self._grids: dict[int, Grid] = {}  # first row of the table → grid
        modules = parts.encoder.modules
        # of the trained weights that make features
        self._trained = [i for i, name in enumerate(slots.names) if of_part(name, modules)]
        self._computed: dict[str, mx.array] = {}  # features by `_weights`, where they are trained
        self._weights: list[mx.array] = []
        self._seen: set[str] = set()  # images of forwards since `begin_gradients`
        if self._trained:
            table.features = self._zeros(1)

    @property
    def gradient(self) -> FeatureGradient | None:
        """Return what a gradient by the features needs; None: what makes them is frozen."""
        if not self._trained:
            return None
        return FeatureGradient(self._table, [*self._parts.encoder.modules])

    def begin_step(self) -> None:
        """Forget the features of earlier steps where they take more than `encoder.cache_bytes`, or
        are trained."""
        features = self._table.features
        if self._trained:
            self._table.features, self._places, self._grids = self._zeros(1), {}, {}
            self._computed = {}
        elif features is not None and features.nbytes > self._parts.encoder.cache_bytes:
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
        self._place([name for name in names if name not in self._places])
        return [
            replace(each, rollout=self._admitted(each.rollout)) if each.rollout.images else each
            for each in sequences
        ]

    def has_positions(self, sequences: Iterable[TrainSequence]) -> bool:
        """Whether tokens of admitted sequences have positions beside their places: such rows are
        computed as they are."""
        first = self._table.vocabulary
        return self._table.rope is not None and any(
            max(each.rollout.tokens, default=0) >= first for each in sequences
        )

    def seen(self, inputs: np.ndarray) -> AbstractContextManager[None]:
        """Let a forward over rows [B, T] of admitted sequences have their images' positions, and
        features that are trained."""
        if self._trained:
            self._compute(inputs)
        if self._table.rope is None or not (inputs >= self._table.vocabulary).any():
            return nullcontext()
        rows = []
        for ids in (inputs - self._table.vocabulary).tolist():
            starts = [(at, self._grids[each]) for at, each in enumerate(ids) if each in self._grids]
            rows.append(image_positions(len(ids), starts)[0])
        return self._table.at(mx.array(np.stack(rows, axis=1)), ids=mx.array(inputs))

    def _place(self, names: Iterable[str]) -> None:
        """Give images their rows of the table, and frozen features to the rows."""
        features = self._table.features if self._places else None
        rows, parts = sum(count for _, count in self._places.values()), [features]
        for name in names:
            image = self._parts.reader.stored(name)
            if not self._trained:
                parts.append(self._parts.encoder.encode(image))
                mx.eval(parts[-1])
                self.encoded += 1
            self._places[name] = (rows, image.tokens)
            if image.grid is not None:
                self._grids[rows] = image.grid
            rows += image.tokens
        if not self._trained:
            self._table.features = mx.concatenate([part for part in parts if part is not None])
            mx.eval(self._table.features)

    def _compute(self, inputs: np.ndarray) -> None:
        """Let the table have the features of the images in these rows, by the weights that are in
        the tree now."""
        weights = [
            array
            for module in self._parts.encoder.modules.values()
            for _, array in tree_flatten(module.parameters())
        ]
        same = len(weights) == len(self._weights)
        if not same or any(a is not b for a, b in zip(weights, self._weights, strict=True)):
            self._computed, self._weights = {}, weights
        used = np.unique(inputs[inputs >= self._table.vocabulary]) - self._table.vocabulary
        rows = []
        for name, (first, count) in self._places.items():
            if ((used >= first) & (used < first + count)).any():
                self._seen.add(name)
                if name not in self._computed:
                    image = self._parts.reader.stored(name)
                    self._computed[name] = self._parts.encoder.encode(image)
                    mx.eval(self._computed[name])
                    self.encoded += 1
            features = self._computed.get(name)
            rows.append(self._zeros(count) if features is None else features)
        self._table.features = mx.concatenate(rows) if rows else self._zeros(1)
        mx.eval(self._table.features)

    def _zeros(self, rows: int) -> mx.array:
        return mx.zeros((rows, (1 + self._table.levels) * self._table.width))

    def begin_gradients(self) -> None:
        """Let `pull_back` be about the forwards from here on."""
        self._seen = set()

    def pull_back(self, slopes: mx.array) -> Iterator[tuple[int, mx.array]]:
        """Yield slots and gradients, float32, of what makes features, one image after the other;
        not evaluated. `slopes`: by the rows of the table, of the forwards since
        `begin_gradients`."""
        trained = self._trained
        for name in sorted(self._seen):
            first, count = self._places[name]
            image = self._parts.reader.stored(name)

            def features(*arrays: mx.array, image: Any = image) -> list[mx.array]:
                with self._slots.bound(arrays, trained):
                    return [self._parts.encoder.encode(image)]

            cotangent = slopes[first : first + count].astype(self._computed[name].dtype)
            new = mx.vjp(features, self._slots.read(trained), [cotangent])[1]
            yield from zip(trained, (array.astype(mx.float32) for array in new), strict=True)

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

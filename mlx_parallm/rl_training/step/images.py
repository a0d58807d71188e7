"""Images of the sequences that a step learns from, as rows that the trained tree's embedding reads
(models/images/embedding.py).

A sequence names its images (`Rollout.images`). `admit` gives the ids of their features to the
tokens that stand for them, so collating, sharing of prompts and the loss see tokens as always.

If the part that sees is frozen, its features are computed once, before the step's first forward,
and kept for later steps. If it is trained (`ImageEncoder.trained`), they are those of the
weights that are in the tree when a forward begins: the policy's, or the reference's. The passes
over the language part then find the gradient by the features, as by a parameter (`gradient`), and
`pull_back` takes it through the tower, once an image for each mini-batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.errors import ConfigError
from mlx_parallm.models.images.embedding import ImageTable, admit_images
from mlx_parallm.models.images.encoder import ImageParts, TowerOutputs, same_arrays
from mlx_parallm.models.images.positions import Grid, image_positions
from mlx_parallm.models.images.spans import image_numbers
from mlx_parallm.models.parameters import FeatureGradient, ParameterSlots, of_part
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.companion import StepCompanion
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.types import PromptImage, Rollout


class NoImages(StepCompanion):
    """Refuses sequences with images: the model that is trained reads none."""

    name = "images"

    def admit(self, sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Raises ConfigError."""
        if any(each.rollout.images for each in sequences):
            raise ConfigError("sequences have images, and the model that is trained reads none")
        return sequences


class StepImages(StepCompanion):
    """
    Args:
        parts: the encoder over the trained tree, and the reader.
        table: of the trained tree. It has the features of a forward's images, while it is `seen`.
        slots: of the trained tree.
        between_blocks: as in `BlockwiseModel`; called after each pass through the tower.
    """

    name = "images"

    def __init__(
        self,
        parts: ImageParts,
        table: ImageTable,
        slots: ParameterSlots,
        between_blocks: Callable[[], None] = lambda: None,
    ) -> None:
        self.encoded = 0  # images, since the start
        self._parts, self._table, self._slots = parts, table, slots
        self._places: dict[str, tuple[int, int]] = {}  # name → first id from the vocabulary on, ids
        self._grids: dict[int, Grid] = {}  # first id from the vocabulary on → grid
        modules = parts.encoder.modules
        # trained weights that make features, the last blocks' first: so a gradient that is
        # evaluated after another takes one block
        seeing = [i for i, name in enumerate(slots.names) if of_part(name, modules)]
        self._trained = sorted(seeing, key=lambda i: _block(slots.names[i]), reverse=True)
        self._between_blocks = between_blocks
        self._features: dict[str, mx.array] = {}  # by `_weights`, if they are trained
        self._weights: list[mx.array] = []
        self._outputs = TowerOutputs(parts.encoder)
        self._shown: list[str] = []  # images of the newest forward, as the table has them
        self._slopes: dict[str, mx.array] = {}  # by features, of forwards since `begin_gradients`
        self._show_nothing()

    @property
    def gradient(self) -> FeatureGradient | None:
        """Image features that need a gradient; None: the tower is not trained."""
        if not self._trained:
            return None
        table = self._table
        return FeatureGradient(table.held, [*self._parts.encoder.modules], table.levels)

    def make_room(self) -> None:
        """Forget the features of earlier steps if they take more than `encoder.cache_bytes`, or
        are trained."""
        held = sum(features.nbytes for features in self._features.values())
        if self._trained or held > self._parts.encoder.cache_bytes:
            self._places, self._grids, self._features = {}, {}, {}

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

    def wants_rows(self, sequences: Iterable[TrainSequence]) -> bool:
        """Whether tokens of admitted sequences have positions beside their places, or see later
        ones: such rows are computed as they are."""
        first = self._table.vocabulary
        table = self._table
        return (table.rope is not None or table.spans is not None) and any(
            max(each.rollout.tokens, default=0) >= first for each in sequences
        )

    @contextmanager
    def seen(self, inputs: np.ndarray) -> Iterator[None]:
        """Let a forward over rows [B, T] of admitted sequences have the features of their images
        and the images' positions, and see them whole."""
        self._show(inputs)
        try:
            with self._placed(inputs):
                yield
        finally:
            self._show_nothing()

    def _placed(self, inputs: np.ndarray) -> AbstractContextManager[None]:
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

    def _place(self, names: Iterable[str]) -> None:
        """Give images ids of their own, and frozen features their values."""
        ids = sum(count for _, count in self._places.values())
        for name in names:
            image = self._parts.reader.stored(name)
            if not self._trained:
                self._encode(name)
            self._places[name] = (ids, image.tokens)
            if image.grid is not None:
                self._grids[ids] = image.grid
            ids += image.tokens

    def _show(self, inputs: np.ndarray) -> None:
        """Let the table have the features of the images in these rows and no others: trained ones
        are those of the weights that are in the tree now."""
        table = self._table
        if self._trained:
            self._forget_other_weights()
        used = np.unique(inputs[inputs >= table.vocabulary]) - table.vocabulary
        if not len(used):
            return
        names, places = zip(*self._places.items(), strict=True)
        firsts = [first for first, _ in places]
        images = np.unique(np.searchsorted(firsts, used, side="right") - 1)
        rows = np.zeros(sum(count for _, count in places), np.int32)
        parts, shown = [], 0
        for index in images.tolist():
            self._shown.append(name := names[index])
            first, count = places[index]
            if name not in self._features:
                self._encode(name)
            parts.append(self._features[name])
            rows[first : first + count] = np.arange(shown, shown + count)
            shown += count
        table.features = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        table.rows = mx.array(rows)
        mx.eval(table.features)

    def _show_nothing(self) -> None:
        table = self._table
        # a gradient by features needs some
        table.features = mx.zeros((1, (1 + table.levels) * table.width)) if self._trained else None
        table.rows, self._shown = None, []

    def _forget_other_weights(self) -> None:
        weights = [
            array
            for module in self._parts.encoder.modules.values()
            for _, array in tree_flatten(module.parameters())
        ]
        if not same_arrays(weights, self._weights):
            self._features, self._weights = {}, weights

    def _encode(self, name: str) -> None:
        image = self._parts.reader.stored(name)
        self._features[name] = self._parts.encoder.encode(image, self._outputs.of(image))
        mx.eval(self._features[name])
        self._between_blocks()
        self.encoded += 1

    def begin_gradients(self) -> None:
        """Let `pull_back` be about the forwards from here on."""
        self._slopes = {}

    def add_slopes(self, slopes: mx.array | None) -> None:
        """Note the gradient by the table's rows, of the forward that is seen now."""
        if slopes is None:
            return
        start = 0
        for name in self._shown:
            stop = start + self._places[name][1]
            new, before = slopes[start:stop], self._slopes.get(name)
            self._slopes[name] = new if before is None else before + new
            start = stop
        mx.eval(self._slopes)

    def pull_back(self) -> Iterator[tuple[int, mx.array]]:
        """Yield slots and gradients, float32, of what makes features, one image after the other;
        not evaluated. Blocks come from the last to the first: evaluating each gradient alone
        leaves a turn to the engine after each block."""
        trained = self._trained
        for name in sorted(self._slopes):
            image = self._parts.reader.stored(name)
            output = self._outputs.of(image)

            def features(
                *arrays: mx.array, image: PromptImage = image, output: mx.array | None = output
            ) -> list[mx.array]:
                with self._slots.bound(arrays, trained):
                    return [self._parts.encoder.encode(image, output)]

            cotangent = self._slopes.pop(name).astype(self._features[name].dtype)
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


def step_images(
    parts: ImageParts | None,
    tree: nn.Module,
    slots: ParameterSlots,
    between_blocks: Callable[[], None] = lambda: None,
) -> StepImages | None:
    """Return what gives images of sequences to a tree of a loaded model, whose trained arrays are
    in `slots`; None: the model reads none. `parts`: the loaded model's. `between_blocks`: as in
    `Trainer`."""
    if parts is None:
        return None
    encoder = parts.encoder.over(tree)
    table = admit_images(
        tree, encoder.rope_axes, encoder.levels, bidirectional=encoder.bidirectional
    )
    return StepImages(replace(parts, encoder=encoder), table, slots, between_blocks)


def images_of(policy: TrainedPolicy, between_blocks: Callable[[], None]) -> StepCompanion:
    """Return the companion that gives a policy its images, or refuses them."""
    images = step_images(policy.image_parts, policy.model, policy.slots, between_blocks)
    return NoImages() if images is None else images


def _block(name: str) -> int:
    """Return the number of the block that an array is in; -1: it is in none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)

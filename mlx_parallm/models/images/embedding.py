"""Images as further words of the vocabulary: token ids from the embedding's size on are rows of a
table of features.

    features [N, D] of a forward's images → ImageTable.using(features, ids)
    ids, vocabulary + i where feature i stands → the model's own forward

Whatever calls the model (a prefill, a score, a block of a training step, any layout of rows) passes
ids and knows nothing of images. The layers stay the modules that they were, of subclasses: paths,
parameters and a tied head do not change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.images.positions import RopePositions, admit_positions
from mlx_parallm.models.images.spans import ImageSpans, admit_spans

EMBEDDING = "embed_tokens"
FEATURES = "features"


class ImageTable:
    """The features that the next forward's ids mean. One for each tree of modules; one thread.

    Attributes:
        vocabulary: the first id that means a feature.
        width: D of an embedding.
        rows: [N'] int32, the row of `features` that the id vocabulary + i means; None: row i.
        held: `features` under this name, if a training binds them as a parameter.
        rope: holds positions of images; None: their tokens have places like others.
        spans: holds which image a token is of; None: tokens of images see as those of texts do.
        levels: blocks that add further features (`admit_images`).
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        self.vocabulary, self.width = vocabulary, width
        self.rows: mx.array | None = None
        self.held: dict[str, mx.array | None] = {FEATURES: None}
        self.rope: RopePositions | None = None
        self.spans: ImageSpans | None = None
        self.levels = 0
        self._shown: mx.array | None = None  # ids [B, L] of a forward with features

    @property
    def features(self) -> mx.array | None:
        """[N, (1 + levels) · D]; None: there are no images."""
        return self.held[FEATURES]

    @features.setter
    def features(self, features: mx.array | None) -> None:
        self.held[FEATURES] = features

    @contextmanager
    def using(
        self,
        features: mx.array | None,
        ids: mx.array,
        positions: mx.array | None = None,
        numbers: np.ndarray | None = None,
    ) -> Iterator[None]:
        """Build a forward over ids [B, L] of which some mean these features; None: none does.
        `positions` [3, B, L] of all tokens, for `rope`; `numbers` [B, L] of their images, for
        `spans`."""
        self.features = features
        try:
            with self.at(positions, ids=ids, numbers=numbers):
                yield
        finally:
            self.features = None

    @contextmanager
    def at(
        self,
        positions: mx.array | None,
        shift: mx.array | None = None,
        *,
        ids: mx.array | None = None,
        numbers: np.ndarray | None = None,
    ) -> Iterator[None]:
        """Build forwards over the tokens `ids` [B, L] at these positions, of these images, or a
        decode step of rows with these shifts [B]."""
        if self.rope is not None:
            self.rope.use(positions, shift)
        if self.spans is not None:
            self.spans.use(numbers)
        self._shown = ids if self.levels and self.features is not None else None
        try:
            yield
        finally:
            self._shown = None
            if self.rope is not None:
                self.rope.use(None)
            if self.spans is not None:
                self.spans.use(None)

    def of_ids(self, ids: mx.array, features: mx.array) -> mx.array:
        """Return the rows of some columns of `features` that ids mean; for a text's, any."""
        places = mx.where(ids < self.vocabulary, 0, ids - self.vocabulary)
        return features[places if self.rows is None else self.rows[places]]

    def with_level(self, level: int, hidden: mx.array) -> mx.array:
        """Return what leaves a block, with the features that are added there."""
        ids, features = self._shown, self.features
        if ids is None or features is None:
            return hidden
        is_text = ids < self.vocabulary
        start = (1 + level) * self.width
        columns = features[:, start : start + self.width]
        rows = self.of_ids(ids, columns).astype(hidden.dtype)
        return hidden + mx.where(is_text[..., None], mx.zeros_like(rows), rows)


class _ReadsImages:
    """Mixed into an embedding's class."""

    _images: ImageTable

    def __call__(self, ids: mx.array) -> mx.array:
        embed: Any = super().__call__  # type: ignore[misc]
        features, size = self._images.features, self._images.vocabulary
        if features is None:
            embedded: mx.array = embed(ids)
            return embedded
        is_text = ids < size
        text = embed(mx.where(is_text, ids, 0))
        rows = self._images.of_ids(ids, features)
        shown = rows[..., : text.shape[-1]].astype(text.dtype)
        return mx.where(is_text[..., None], text, shown)


class _AddsFeatures:
    """Mixed into a block's class, whose own signature its `__call__` keeps."""

    _images: ImageTable
    _level: int


def _adding(kind: Any) -> Any:
    """Return a block's class whose output has the features of a level added."""

    @wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        return self._images.with_level(self._level, kind.__call__(self, *args, **kwargs))

    return type(f"{kind.__name__}WithFeatures", (_AddsFeatures, kind), {"__call__": call})


def admit_images(
    model: nn.Module,
    rope_axes: np.ndarray | None = None,
    levels: int = 0,
    *,
    bidirectional: bool = False,
) -> ImageTable:
    """Let the model's embedding read images, in place, and its ropes take their positions; returns
    its table, the same one at each call. Raises ModelError: it is not known which layers these are.

    Args:
        rope_axes: which of an image token's three positions turns each frequency of a rope; None:
            it has one.
        levels: so many blocks, from the first on, add their own features to what leaves them
            (DeepStack: Meng et al. 2024, arXiv:2406.04334); a feature's row has them all.
        bidirectional: tokens of an image see each other in both directions.
    """
    layers = [
        module
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == EMBEDDING and hasattr(module, "as_linear")
    ]
    if len(layers) != 1:
        raise ModelError(
            f"images cannot be read: the model has {len(layers)} layers named {EMBEDDING}, not one"
        )
    [layer] = layers
    if not isinstance(layer, _ReadsImages):
        kind, width = type(layer), layer(mx.array([0])).shape[-1]
        layer.__class__ = type(f"{kind.__name__}WithImages", (_ReadsImages, kind), {})
        layer._images = ImageTable(layer.weight.shape[0], width)
    table: ImageTable = layer._images
    if rope_axes is not None:
        table.rope = admit_positions(model, rope_axes)
    table.spans = admit_spans(model) if bidirectional else None
    table.levels = levels
    for level, block in enumerate(model.layers[:levels] if levels else ()):
        if not isinstance(block, _AddsFeatures):
            block.__class__ = _adding(type(block))
        block._images, block._level = table, level
    return table

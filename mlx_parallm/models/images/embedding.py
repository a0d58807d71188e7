"""Images as further words of the vocabulary: token ids from the embedding's size on are rows of a
table of features.

    features [N, D] of a forward's images → ImageTable.using(features)
    ids, vocabulary + i where feature i stands → the model's own forward

Whatever calls the model (a prefill, a score, a block of a training step, any layout of rows) passes
ids and knows nothing of images. The layer stays the module that it was, of a subclass: paths,
parameters and a tied head do not change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.images.positions import RopePositions, admit_positions

EMBEDDING = "embed_tokens"


class ImageTable:
    """The features that the next forward's ids mean. One for each tree of modules; one thread."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.features: mx.array | None = None
        self.rope: RopePositions | None = None  # None: an image's tokens have places like others

    @contextmanager
    def using(self, features: mx.array | None, positions: mx.array | None = None) -> Iterator[None]:
        """Build forwards over these features [N, D]; None: there is no image in them. `positions`
        [3, B, L] of all tokens, for `rope`."""
        self.features = features
        try:
            with self.at(positions):
                yield
        finally:
            self.features = None

    @contextmanager
    def at(self, positions: mx.array | None, shift: mx.array | None = None) -> Iterator[None]:
        """Build forwards over tokens at these positions, or a decode step of rows with these
        shifts [B]."""
        if self.rope is None:
            yield
            return
        self.rope.use(positions, shift)
        try:
            yield
        finally:
            self.rope.use(None)


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
        shown = features[mx.where(is_text, 0, ids - size)].astype(text.dtype)
        return mx.where(is_text[..., None], text, shown)


def admit_images(model: nn.Module, rope_axes: np.ndarray | None = None) -> ImageTable:
    """Let the model's embedding read images, in place, and its ropes take their positions; returns
    its table, the same one at each call. Raises ModelError: it is not known which layers these are.

    Args:
        rope_axes: which of an image token's three positions turns each frequency of a rope; None:
            it has one.
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
        kind: Any = type(layer)
        layer.__class__ = type(f"{kind.__name__}WithImages", (_ReadsImages, kind), {})
        layer._images = ImageTable(layer.weight.shape[0])
    table: ImageTable = layer._images
    if rope_axes is not None:
        table.rope = admit_positions(model, rope_axes)
    return table

"""Images whose tokens see each other in both directions (Gemma 3): in every layer, those with a
sliding window too, a token of an image sees all later tokens of the same image beside what it would
see as text.

So a forward must have an image whole: no chunk of a prompt ends inside one.
"""

from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError

TEXT = -1


def image_numbers(of_images: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return which image each token is of, counted in its row, [B, L] int32; TEXT: of none.

    Args:
        of_images: [B, L] bool.
        begins: [B, L] bool: first tokens of images. One behind a text begins an image anyway.

    Worked: tokens t a a t b b c c of which the first a, b and c begin: -1 0 0 -1 1 1 2 2.
    """
    behind_text = np.pad(~of_images, ((0, 0), (1, 0)), constant_values=True)[:, :-1]
    first = of_images & (begins | behind_text)
    numbers: np.ndarray = np.where(of_images, np.cumsum(first, axis=1) - 1, TEXT)
    return numbers.astype(np.int32)


class ImageSpans:
    """Which image each token of the next forward is of. One for each tree of modules; one
    thread."""

    def __init__(self) -> None:
        self._later: mx.array | None = None  # [B, 1, L, L] bool: later tokens of the same image

    def use(self, numbers: np.ndarray | None) -> None:
        """Build forwards over tokens of these images (`image_numbers`); None: over texts."""
        self._later = None
        if numbers is None or (numbers == TEXT).all():
            return
        same = (numbers[:, :, None] == numbers[:, None]) & (numbers != TEXT)[:, :, None]
        self._later = mx.array(np.triu(same, 1)[:, None])
        mx.eval(self._later)

    def seen(self, mask: Any, hidden: mx.array, cache: Any) -> Any:
        """Return a layer's mask for `hidden` [B, L, D] with the later tokens of images. Raises
        ValueError: the layer has a mask that is neither causal nor of booleans."""
        length = hidden.shape[1]
        if self._later is None or length == 1:
            return mask
        before = 0 if cache is None else cache.offset
        if isinstance(mask, str) and mask == "causal" and isinstance(before, int):
            mask = mx.tri(length, before + length, before, dtype=mx.bool_)
        if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
            raise ValueError("images see both ways, and a layer has no mask of booleans")
        return mask | mx.pad(self._later, [(0, 0)] * 3 + [(mask.shape[-1] - length, 0)])


class _SeesImages:
    """Mixed into an attention layer's class."""

    _spans: ImageSpans


def _seeing(kind: Any) -> Any:
    @wraps(kind.__call__)
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        output: mx.array = kind.__call__(self, x, self._spans.seen(mask, x, cache), cache)
        return output

    return type(f"{kind.__name__}WithImages", (_SeesImages, kind), {"__call__": call})


def admit_spans(model: nn.Module) -> ImageSpans:
    """Let the model's attention see images both ways, in place; returns what holds them. Raises
    ModelError: it has blocks without attention."""
    spans = ImageSpans()
    blocks: Any = model.layers
    for index, block in enumerate(blocks):
        if not hasattr(block, "self_attn"):
            raise ModelError(f"images cannot be read: block {index} has no self_attn")
        layer = block.self_attn
        if not isinstance(layer, _SeesImages):
            layer.__class__ = _seeing(type(layer))
        object.__setattr__(layer, "_spans", spans)
    return spans

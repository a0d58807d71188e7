"""Exact attention in parts: each part's softmax is left undivided, and the parts are added with the
right weights.

Of scores s over a part's positions and values v a `Partial` holds m = max s, l = Σ exp(s - m) and o
= Σ exp(s - m) · v, the online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867). For two
parts, with m = max(m₁, m₂):

    o = o₁ · exp(m₁ - m) + o₂ · exp(m₂ - m), l alike, and the attention is o / l.

Scores are in units of log 2, so that exp is 2^x: the factor of the products is scale · log₂ e.

Scores, maxima and sums are float32 whatever the type of keys and values; weights are rounded to
that of the values.
"""

from functools import partial
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

from mlx_parallm.models.ops import exp2_minus, row_maxima

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
NOTHING = -1e30  # the maximum of a part without positions
LEAST = 1e-30  # the total of a row that sees a position is 1 at least


class Product(Protocol):
    """Keys or values that are not an array: they multiply themselves."""

    @property
    def dtype(self) -> mx.Dtype: ...

    def product(self, x: mx.array) -> mx.array:
        """x [..., rows, D] times keys [..., D, T], or x [..., rows, T] times values [..., T,
        Dv]."""


Factor = mx.array | Product


class Partial(NamedTuple):
    """float32. `weighted` [..., rows, Dv], `top` and `total` [..., rows, 1]."""

    weighted: mx.array
    top: mx.array
    total: mx.array


def attend_partly(
    queries: mx.array, keys_t: Factor, values: Factor, mask: mx.array | None, factor: float = 1.0
) -> Partial:
    """Attention over some positions.

    Args:
        queries: [..., rows, D].
        keys_t: [..., D, T], or quantised keys.
        values: [..., T, Dv], or quantised.
        mask: True where a position is seen, to be broadcast to [..., rows, T]. A row that sees none
            gets zeros.
        factor: of the products.
    """
    # a score of 50 rounded to bfloat16 is wrong by 0.1, a weight then by 10 %
    if isinstance(keys_t, mx.array):
        scores = (queries.astype(mx.float32) * factor) @ keys_t.astype(mx.float32)
    else:
        scores = keys_t.product(queries).astype(mx.float32) * factor
    if mask is not None:
        scores = mx.where(mask, scores, NOTHING)
    top = row_maxima(scores)
    weights = exp2_minus(scores, top)
    if mask is not None:
        weights = mx.where(mask, weights, 0.0)
    # MLX adds the numbers of many rows one by one; a product with ones is 8 times as fast, and more
    # exact.
    total = (
        weights @ mx.ones((weights.shape[-1], 1))
        if weights.shape[-2] > 1
        else weights.sum(axis=-1, keepdims=True)
    )
    if values.dtype == mx.float32:
        return Partial(_times(weights, values), top, total)
    # Undivided, the product with values would leave the range of float16, which ends at 65,504.
    weighted = (
        _times((weights / mx.maximum(total, LEAST)).astype(values.dtype), values).astype(mx.float32)
        * total
    )
    return Partial(weighted, top, total)


def _times(weights: mx.array, values: Factor) -> mx.array:
    return weights @ values if isinstance(values, mx.array) else values.product(weights)


def join(parts: list[Partial]) -> Partial:
    """Parts of different rows, one after the other along the first axis."""
    if len(parts) == 1:
        return parts[0]
    return Partial(*(mx.concatenate(list(arrays), axis=0) for arrays in zip(*parts, strict=True)))


def merge(first: Partial, second: Partial) -> Partial:
    """Combine the attention of the same rows over two sets of positions."""
    return Partial(*cast("tuple[mx.array, mx.array, mx.array]", _merge(*first, *second)))


@partial(mx.compile, shapeless=True)  # the shapes are those of the rows: any number
def _merge(
    first: mx.array,
    first_top: mx.array,
    first_total: mx.array,
    second: mx.array,
    second_top: mx.array,
    total: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    top = mx.maximum(first_top, second_top)
    a, b = mx.exp((first_top - top) * LN_2), mx.exp((second_top - top) * LN_2)
    return first * a + second * b, top, first_total * a + total * b


def finish(part: Partial) -> mx.array:
    return part.weighted / mx.maximum(part.total, LEAST)

"""A model's head a piece at a time: scores of rows, and their gradients.

The logits are a model's largest array: [scored tokens, vocabulary]. Where they would be large the
head goes in pieces of the scored tokens (`head_rows`), and the gradient of a wide one in pieces of
the vocabulary (`cut_wide_heads`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.heads.float32_head import float32_head, plain_class
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.logprobs import token_logprobs_and_entropy
from mlx_parallm.models.ops import UNPACKED
from mlx_parallm.system.device.traits import fails_on_wide_products

WHOLE_HEAD = 1 << 22  # whole heads up to this size are one product: 16 MiB of float32
HEAD_PIECE = 1 << 20  # otherwise the logits of one piece …
# … and the least number of scored tokens in one, for the speed of the product
FEWEST_HEAD_ROWS = 32
WIDE = 1 << 17  # tokens of a vocabulary: from there its pieces are added up in the gradient …
VOCABULARY_PIECE = 1 << 16  # … so many tokens each
UNPACKED_HEAD = 2  # times as many where each piece unpacks the head's weights …
TRAINED_HEAD = 4  # … and where each adds to their gradient
WHOLE_COPIES, PIECE_COPIES = 10, 11
"""float32 arrays of [tokens, vocabulary] that the head's backward pass holds at its peak: of all
tokens in one graph with the last block, or of one piece of them."""
UNPACKED_AHEAD = 12
"""Slices of unpacked 4-bit weights that MLX holds on a CPU: those in work, and those of
operations that wait."""
FLOAT = 4

Head = Callable[[mx.array], mx.array]
"""Rows [n, D] → logits [n, V]."""
Scores = tuple[mx.array, ...]
"""(logprobs [N], entropy [N], what `TokenBatch.measure` adds, with a value head values [N])
float32."""


def head_rows(count: int, vocabulary: int, *, times: int = 1) -> int:
    """How many of `count` scored tokens one evaluation of the head takes. `times`:
    UNPACKED_HEAD, TRAINED_HEAD or 1."""
    if count * vocabulary <= WHOLE_HEAD:
        return max(count, 1)
    return max(FEWEST_HEAD_ROWS, HEAD_PIECE // vocabulary) * times


def peak_bytes(
    count: int, vocabulary: int, hidden: int, *, trained: bool, unpacks: bool
) -> tuple[int, bool]:
    """Return the bytes at the peak of the backward pass of `count` scored tokens, and whether one
    evaluation takes all of them.

    Args:
        trained: the head's own weights are.
        unpacks: they are quantised, and unpacked for each product.
    """
    times = TRAINED_HEAD if trained else UNPACKED_HEAD if unpacks else 1
    rows = head_rows(count, vocabulary, times=times)
    whole = rows >= count
    numbers = (WHOLE_COPIES if whole else PIECE_COPIES) * rows * vocabulary
    if unpacks:
        numbers += min(UNPACKED_AHEAD * UNPACKED, vocabulary * hidden)
    return numbers * FLOAT, whole


def token_scores(logits: mx.array, batch: TokenBatch, chunk: slice) -> Scores:
    """Score logits [n, V]; `chunk`: which of the scored tokens they are for."""
    temperature = (
        batch.temperature if isinstance(batch.temperature, float) else batch.temperature[chunk]
    )
    scores = token_logprobs_and_entropy(
        logits, batch.targets[chunk], temperature, entropy_slope=batch.entropy_slope
    )
    return scores if batch.measure is None else (*scores, *batch.measure(logits, batch, chunk))


def scores_and_directions(head: Head, rows: mx.array, batch: TokenBatch, chunk: slice) -> mx.array:
    """[n, D + 2] of rows [n, D]: the slope of each token's log-probability by its row;
    log-probability, entropy.

    A loss that sees only log-probabilities reaches a row through one number, its slope by that
    token's, so one pass over the logits gives scores and gradient: they need not be made again once
    the slopes are known. One array, so that a piece is finished before the next begins.
    """
    count = rows.shape[0]
    (logprobs, entropy), (directions,) = mx.vjp(
        lambda rows: list(token_scores(head(rows), batch, chunk)),
        [rows],
        [mx.ones((count,)), mx.zeros((count,))],
    )
    return mx.concatenate(
        [directions.astype(mx.float32), logprobs[:, None], entropy[:, None]], axis=1
    )


def split_pieces(pieces: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """[N, D + 2] of `scores_and_directions` → directions [N, D], log-probabilities [N],
    entropies [N]."""
    return pieces[:, :-2], pieces[:, -2], pieces[:, -1]


def scores_in_pieces(
    head: Head, rows: mx.array, batch: TokenBatch, chunks: Sequence[slice]
) -> Scores:
    """(logprobs, entropy) of rows [N, D] in a graph that is differentiated as a whole, a piece
    of the logits at a time. The entropy has no slope."""

    @mx.custom_function
    def scored(rows: mx.array) -> mx.array:
        return mx.concatenate(
            [scores_and_directions(head, rows[chunk], batch, chunk) for chunk in chunks]
        )

    @scored.vjp
    def slopes(rows: mx.array, cotangent: mx.array, pieces: mx.array) -> mx.array:
        directions, _, _ = split_pieces(pieces)
        return (cotangent[:, -2:-1] * directions).astype(rows.dtype)

    _, logprobs, entropy = split_pieces(cast(mx.array, scored(rows)))
    return logprobs, entropy


class _WideLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        y = cast(mx.array, _wide_product(x, self.weight))
        return y + self["bias"] if "bias" in self else y


class _WideEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return cast(mx.array, _wide_product(x, self.weight))


class _WideQuantizedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        y = _wide_quantized_product(x, self)
        return y + self["bias"] if "bias" in self else y


class _WideQuantizedEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return _wide_quantized_product(x, self)


_WIDE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _WideLinear,
    nn.Embedding: _WideEmbedding,
    nn.QuantizedLinear: _WideQuantizedLinear,
    nn.QuantizedEmbedding: _WideQuantizedEmbedding,
}


def cut_wide_heads(model: nn.Module) -> int:
    """Change, in place, what multiplies by `WIDE` tokens and more, so that the gradient by its
    input is added up over pieces of the vocabulary; returns how many were changed.

    On Metal a product whose inner dimension is Gemma's vocabulary ends in an "Internal Error"
    (ml-explore/mlx#1363). Values and gradients stay the same. A CPU has no such fault, and copies
    the pieces, which a GPU reads in place: there nothing is changed.
    """
    if not fails_on_wide_products():
        return 0
    modules = [
        module
        for module in model.modules()
        if plain_class(module) in _WIDE and module.weight.shape[0] >= WIDE
    ]
    for module in modules:  # the same object: whatever holds it sees the change
        kind = plain_class(module)
        wide: Any = _WIDE[kind]
        module.__class__ = wide if type(module) is kind else float32_head(wide)
    return len(modules)


def _pieces(vocabulary: int) -> list[slice]:
    return [
        slice(start, min(start + VOCABULARY_PIECE, vocabulary))
        for start in range(0, vocabulary, VOCABULARY_PIECE)
    ]


def _summed(parts: Iterable[mx.array], x: mx.array) -> mx.array:
    """The sum in float32, in the shape and dtype of x."""
    total = sum(part.astype(mx.float32) for part in parts)
    return cast(mx.array, total).reshape(x.shape).astype(x.dtype)


@mx.custom_function
def _wide_product(x: mx.array, weight: mx.array) -> mx.array:
    """x [..., in] · Wᵀ → [..., V]."""
    return x @ weight.T


@_wide_product.vjp
def _wide_slopes(
    primals: tuple[mx.array, mx.array], slope: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    x, weight = primals
    rows = slope.reshape(-1, slope.shape[-1])
    by_input = _summed((rows[:, p] @ weight[p] for p in _pieces(len(weight))), x)
    return by_input, (rows.T @ x.reshape(-1, x.shape[-1])).astype(weight.dtype)


def _wide_quantized_product(x: mx.array, layer: Any) -> mx.array:
    """Multiply by quantised weights, which have no gradient."""

    def multiply(x: mx.array, piece: slice, *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x,
            layer.weight[piece],
            layer.scales[piece],
            layer.biases[piece] if layer.get("biases") is not None else None,
            transpose=transpose,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return multiply(x, slice(None), transpose=True)

    @product.vjp
    def slopes(x: mx.array, slope: mx.array, _: mx.array) -> mx.array:
        rows, pieces = slope.reshape(-1, slope.shape[-1]), _pieces(slope.shape[-1])
        return _summed((multiply(rows[:, p], p, transpose=False) for p in pieces), x)

    return cast(mx.array, product(x))

"""What is scored in a micro-batch, and how many of its tokens go through the head at a time.

The logits are a model's largest array: [scored tokens, vocabulary]. Where they would be large they are made in pieces:
once, where neither the head is trained nor the loss looks at the entropy (`scores_and_directions`), else a second time
for the gradient (`BlockwiseModel._learn_rows_twice`); docs/benchmarks/memory.md has memory and times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_parallm.models.logprobs import token_logprobs_and_entropy
from mlx_parallm.models.packing import Compact

WHOLE_HEAD = 1 << 22  # logits that are made at once where that is all of them: 16 MiB of float32
HEAD_PIECE = 1 << 20  # logits of one piece of the head where it is not …
FEWEST_HEAD_ROWS = 32  # … and the least number of scored tokens in one, for the speed of the product
COSTLY = 4  # times as many where a piece costs a pass over the head's weights: to unpack them, or for their gradient

Head = Callable[[mx.array], mx.array]
"""Rows [n, D] → logits [n, V]."""
Scores = tuple[mx.array, ...]
"""(logprobs [N], entropy [N], with a value head values [N]) float32."""


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded tokens, and what is scored in them. `compact`: the same with less padding, or each prompt once."""

    inputs: mx.array  # [B, T] int32
    positions: mx.array  # [N] int32, indices into the flattened [B · T]: where the scored token is predicted
    targets: mx.array  # [N] int32, the scored tokens
    temperature: float | mx.array = 1.0  # or [N] float32
    compact: Compact | None = None
    entropy_slope: bool = True  # False: the loss does not depend on the entropy


def head_rows(count: int, vocabulary: int, *, costly: bool = False) -> int:
    """How many of `count` scored tokens one evaluation of the head takes."""
    if count * vocabulary <= WHOLE_HEAD:
        return max(count, 1)
    return max(FEWEST_HEAD_ROWS, HEAD_PIECE // vocabulary) * (COSTLY if costly else 1)


def token_scores(logits: mx.array, batch: TokenBatch, chunk: slice) -> Scores:
    """Of logits [n, V]; `chunk`: which of the scored tokens they are for."""
    temperature = batch.temperature if isinstance(batch.temperature, float) else batch.temperature[chunk]
    return token_logprobs_and_entropy(logits, batch.targets[chunk], temperature, entropy_slope=batch.entropy_slope)


def scores_and_directions(head: Head, rows: mx.array, batch: TokenBatch, chunk: slice) -> mx.array:
    """[n, D + 2] of rows [n, D]: the slope of each token's log-probability by its row; log-probability, entropy.

    A loss that sees only log-probabilities reaches a row through one number, its slope by that token's, so one pass
    over the logits gives scores and gradient: they need not be made again once the slopes are known. One array, so that
    a piece is finished before the next begins.
    """
    count = rows.shape[0]
    (logprobs, entropy), (directions,) = mx.vjp(
        lambda rows: list(token_scores(head(rows), batch, chunk)), [rows], [mx.ones((count,)), mx.zeros((count,))]
    )
    return mx.concatenate([directions.astype(mx.float32), logprobs[:, None], entropy[:, None]], axis=1)


def split_pieces(pieces: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """[N, D + 2] of `scores_and_directions` → directions [N, D], log-probabilities [N], entropies [N]."""
    return pieces[:, :-2], pieces[:, -2], pieces[:, -1]


def scores_in_pieces(head: Head, rows: mx.array, batch: TokenBatch, chunks: Sequence[slice]) -> Scores:
    """(logprobs, entropy) of rows [N, D] in a graph that is differentiated as a whole, a piece of the logits at a
    time. The entropy has no slope."""

    @mx.custom_function
    def scored(rows: mx.array) -> mx.array:
        return mx.concatenate([scores_and_directions(head, rows[chunk], batch, chunk) for chunk in chunks])

    @scored.vjp
    def slopes(rows: mx.array, cotangent: mx.array, pieces: mx.array) -> mx.array:
        directions, _, _ = split_pieces(pieces)
        return (cotangent[:, -2:-1] * directions).astype(rows.dtype)

    _, logprobs, entropy = split_pieces(cast(mx.array, scored(rows)))
    return logprobs, entropy

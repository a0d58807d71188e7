"""What is scored in a micro-batch, and how many of its tokens go through the head at a time.

The logits are a model's largest array: [scored tokens, vocabulary]. Where they would be large they are made in pieces,
which costs a second product with the head's weights (`BlockwiseModel._backward_chunked`); docs/benchmarks/memory.md has
the memory and the time of both.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.models.logprobs import token_logprobs_and_entropy
from mlx_parallm.models.packing import SharedRows

WHOLE_HEAD = 1 << 22  # logits that are made at once where that is all of them: 16 MiB of float32
HEAD_PIECE = 1 << 20  # logits of one piece of the head where it is not …
FEWEST_HEAD_ROWS = 32  # … and the least number of scored tokens in one, for the speed of the product
COSTLY = 4  # times as many where a piece costs a pass over the head's weights: to unpack them, or for their gradient

Scores = tuple[mx.array, ...]
"""(logprobs [N], entropy [N], with a value head values [N]) float32."""


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded tokens, and what is scored in them. `shared`: the same tokens with each prompt once."""

    inputs: mx.array  # [B, T] int32
    positions: mx.array  # [N] int32, indices into the flattened [B · T]: where the scored token is predicted
    targets: mx.array  # [N] int32, the scored tokens
    temperature: float | mx.array = 1.0  # or [N] float32
    shared: SharedRows | None = None


def head_rows(count: int, vocabulary: int, *, costly: bool = False) -> int:
    """How many of `count` scored tokens one evaluation of the head takes."""
    if count * vocabulary <= WHOLE_HEAD:
        return max(count, 1)
    return max(FEWEST_HEAD_ROWS, HEAD_PIECE // vocabulary) * (COSTLY if costly else 1)


def token_scores(logits: mx.array, batch: TokenBatch, chunk: slice) -> Scores:
    """Of logits [n, V]; `chunk`: which of the scored tokens they are for."""
    temperature = batch.temperature if isinstance(batch.temperature, float) else batch.temperature[chunk]
    return token_logprobs_and_entropy(logits, batch.targets[chunk], temperature)

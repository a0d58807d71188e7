"""What a loss reads and what it returns. Losses are pure functions `LossInputs → LossOutputs`; a trainer builds the
inputs of one micro-batch, adds up the outputs of a mini-batch, and knows nothing else about the algorithm.

Everything a loss returns is *additive over micro-batches*: sums over this micro-batch's tokens divided by counts of the
whole mini-batch. So the loss, its gradient and its metrics do not depend on how a mini-batch was cut or padded.
"""

from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

Aggregation = Literal["token", "sequence"]


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Values where `mask` is false are padding or given tokens: any number, inf and NaN included.

    `logprobs` is the trainer's, now; `rollout_logprobs` the behaviour policy's, when sampled; `ref_logprobs` the
    reference's. All at the rollout's sampling temperature.
    """

    logprobs: mx.array  # [B, T] float32, differentiated
    rollout_logprobs: mx.array  # [B, T] float32
    advantages: mx.array  # [B, T] float32
    mask: mx.array  # [B, T] bool, true = sampled by the policy
    token_normalizer: float  # true entries of mask in the whole mini-batch
    sequence_normalizer: float  # sequences in the whole mini-batch
    ref_logprobs: mx.array | None = None  # [B, T] float32
    entropy: mx.array | None = None  # [B, T] float32, nats


@dataclass(frozen=True)
class LossOutputs:
    """`loss` is minimised. `metrics`: name → scalar, each a share of the mini-batch's mean."""

    loss: mx.array
    metrics: dict[str, mx.array] = field(default_factory=dict)


def masked(values: mx.array, mask: mx.array) -> mx.array:
    """`values` where `mask` is true, else 0. Selects, never multiplies: 0 · inf is NaN, forward and backward."""
    return mx.where(mask, values, 0.0)


def aggregate(values: mx.array, inputs: LossInputs, aggregation: Aggregation = "token") -> mx.array:
    """This micro-batch's share of the mini-batch mean of per-token `values` [B, T].

    "token": Σ values / tokens of the mini-batch (DAPO, arXiv:2503.14476). "sequence": the mean over sequences of each
    sequence's token mean (GRPO, arXiv:2402.03300); a sequence without a true mask entry counts as 0.

    Example: values [[1, 2], [6, -]] have the token mean 3 and the sequence mean (1.5 + 6) / 2 = 3.75.
    """
    chosen = masked(values, inputs.mask)
    if aggregation == "token":
        return chosen.sum() / inputs.token_normalizer
    lengths = mx.maximum(inputs.mask.sum(axis=-1), 1)
    return (chosen.sum(axis=-1) / lengths).sum() / inputs.sequence_normalizer

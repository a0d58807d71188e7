"""Inputs and outputs of a loss. Losses are pure functions `LossInputs → LossOutputs`; a
trainer builds the inputs of one micro-batch, adds up the outputs of a mini-batch, and knows nothing
else about the algorithm.

Everything a loss returns is *additive over micro-batches*: sums over this micro-batch's tokens
divided by counts of the whole mini-batch. So the loss, its gradient and its metrics do not depend
on how a mini-batch was cut or padded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import mlx.core as mx

Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]
Number = float | mx.array


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Values where `mask` is false are padding or given tokens: any number, inf
    and NaN included.

    Numbers are floats for a user's own loss. The losses here may get arrays [] in their place,
    which a compiled step
    reads (`models.ops.as_data`): they must not look at their values.

    `logprobs` is the trainer's, now; `rollout_logprobs` the behaviour policy's, when sampled;
    `ref_logprobs` the reference's. All at the rollout's sampling temperature.
    """

    logprobs: mx.array  # [B, T] float32, differentiated
    rollout_logprobs: mx.array | None  # [B, T] float32; None: not known
    advantages: mx.array  # [B, T] float32
    mask: mx.array  # [B, T] bool, true = sampled by the policy
    token_normalizer: Number  # true entries of mask in the whole mini-batch
    sequence_normalizer: Number  # sequences in the whole mini-batch
    ref_logprobs: mx.array | None = None  # [B, T] float32
    entropy: mx.array | None = None  # [B, T] float32, nats
    # [B, T] float32, denominator of the ratio; None: rollout_logprobs
    old_logprobs: mx.array | None = None
    # [B, T] float32, sampler correction: multiplies the policy loss
    weights: mx.array | None = None
    # [B, T] float32, 1: of the top entropies, over which policy loss and entropy are; None: all are
    counted: mx.array | None = None
    counted_normalizer: Number | None = None  # entries of counted in the whole mini-batch
    selected: mx.array | None = None  # [B, T] float32, 1: chosen by `losses.selection`
    values: mx.array | None = None  # [B, T] float32, differentiated
    old_values: mx.array | None = None  # [B, T] float32, before the step's first update
    returns: mx.array | None = None  # [B, T] float32
    # [B, T] float32, from another distribution, nats; differentiated
    divergence: mx.array | None = None
    # [B, T] float32, -log Σ p² over the vocabulary, nats (Rényi's of order 2)
    collision_entropy: mx.array | None = None
    max_length: Number | None = None  # L of the aggregation "constant"
    # today's weight of the KL to the reference in the loss; without one the float 0
    kl_beta: Number = 0.0
    # today's weight of the entropy bonus, where it adapts; None: the loss's own
    entropy_weight: Number | None = None
    # sizes of the batch, as far as its source knows them
    constants: Mapping[str, Number] = field(default_factory=dict)
    # [B] float32 each: numbers of rows that depend on all rows of the step, before its first update
    row_constants: Mapping[str, mx.array] = field(default_factory=dict)

    @property
    def ratio_logprobs(self) -> mx.array:
        """[B, T], denominator of the ratio: `old_logprobs`, else `rollout_logprobs`; 0 where
        `mask` is false.

        Raises ValueError if there are none: against itself a policy has the ratio 1, and no clip
        ever acts.
        """
        old = self.rollout_logprobs if self.old_logprobs is None else self.old_logprobs
        if old is None:
            raise ValueError(
                "a ratio needs rollout_logprobs or old_logprobs: the"
                " policy against itself is always 1"
            )
        return masked(old, self.mask)


@dataclass(frozen=True)
class LossOutputs:
    """`loss` is minimised. `metrics`: name → scalar, each a share of the mini-batch's mean."""

    loss: mx.array
    metrics: dict[str, mx.array] = field(default_factory=dict)


def masked(values: mx.array, mask: mx.array) -> mx.array:
    """`values` where `mask` is true, else 0. Selects, never multiplies: 0 · inf is NaN, forward
    and backward."""
    return mx.where(mask, values, 0.0)


def aggregate(values: mx.array, inputs: LossInputs, aggregation: Aggregation = "token") -> mx.array:
    """Return this micro-batch's share of the mini-batch mean of per-token `values` [B, T].

    "token": Σ values / tokens of the mini-batch (DAPO, arXiv:2503.14476). "sequence": the mean over
    sequences of each sequence's token mean (GRPO, arXiv:2402.03300); a sequence without a true mask
    entry counts as 0.

    "sequence_sum": the mean over sequences of each one's sum (the policy gradient as it is
    derived). "constant": the same, divided by `max_length`, one length for all (Dr. GRPO,
    arXiv:2503.20783); ValueError without it.

    Example: values [[1, 2], [6, -]] have the token mean 3, the sequence mean (1.5 + 6) / 2 = 3.75,
    the sequence sum (3 + 6) / 2 = 4.5, and with max_length 4 the constant mean 4.5 / 4 = 1.125.
    """
    chosen = masked(values, inputs.mask)
    if aggregation == "token":
        return chosen.sum(axis=-1).sum() / inputs.token_normalizer
    if aggregation == "sequence_sum":
        return chosen.sum(axis=-1).sum() / inputs.sequence_normalizer
    if aggregation == "constant":
        if inputs.max_length is None:
            raise ValueError('the aggregation "constant" needs max_length')
        return chosen.sum(axis=-1).sum() / (inputs.sequence_normalizer * inputs.max_length)
    if aggregation != "sequence":
        raise ValueError(f"{aggregation!r} is not one of {get_args(Aggregation)}")
    lengths = mx.maximum(inputs.mask.sum(axis=-1), 1)
    return (chosen.sum(axis=-1) / lengths).sum() / inputs.sequence_normalizer

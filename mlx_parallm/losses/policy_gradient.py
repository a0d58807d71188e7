"""Policy-gradient losses. `ratio` = exp(logprobs - rollout_logprobs): the policy now against the policy that sampled,
so that staleness, several updates per batch and the sampler's own rounding are corrected by one number."""

from typing import Literal

import mlx.core as mx

from mlx_parallm.losses.kl import KL_ESTIMATORS, LOG_RATIO_LIMIT
from mlx_parallm.losses.types import Aggregation, LossInputs, LossOutputs, aggregate, masked


def clipped_surrogate(
    inputs: LossInputs, *, clip_low: float, clip_high: float, aggregation: Aggregation = "token"
) -> LossOutputs:
    """PPO's clipped surrogate: -min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A) per token.

    Schulman et al. 2017 (arXiv:1707.06347); clip_high > clip_low is DAPO's clip-higher (arXiv:2503.14476). For A > 0
    the gradient ends above 1 + clip_high, for A < 0 below 1 - clip_low; on the other side it stays, as the way back.

    Worked, clip 0.2 / 0.28: ratio 1.5, A = 1 → -min(1.5, 1.28) = -1.28 (clipped); ratio 0.5, A = -1 →
    -min(-0.5, -0.8) = 0.8 (clipped); ratio 2, A = -1 → -min(-2, -1.28) = 2 (not clipped).

    Metrics: policy_loss; ratio_mean; clip_fraction, the share of tokens whose gradient is clipped away.
    """
    log_ratio = masked(inputs.logprobs, inputs.mask) - masked(inputs.rollout_logprobs, inputs.mask)
    ratio = mx.exp(mx.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    advantages = masked(inputs.advantages, inputs.mask)
    clipped = mx.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = aggregate(-mx.minimum(ratio * advantages, clipped * advantages), inputs, aggregation)
    binds = ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))
    metrics = {
        "policy_loss": loss,
        "ratio_mean": aggregate(ratio, inputs),
        "clip_fraction": aggregate(binds.astype(mx.float32), inputs),
    }
    return LossOutputs(loss, metrics)


def grpo_loss(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    kl_beta: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    entropy_weight: float = 0.0,
    aggregation: Aggregation = "token",
) -> LossOutputs:
    """GRPO (arXiv:2402.03300): clipped surrogate + kl_beta · KL(policy || reference) - entropy_weight · entropy.

    The group enters through the advantages alone. Metrics: those of `clipped_surrogate`, and `kl` and `entropy` (token
    means) where `ref_logprobs` and `entropy` are given. Raises ValueError when a weighted term's input is missing.
    """
    surrogate = clipped_surrogate(inputs, clip_low=clip_low, clip_high=clip_high, aggregation=aggregation)
    loss, metrics = surrogate.loss, dict(surrogate.metrics)
    if inputs.ref_logprobs is not None:
        logprobs = masked(inputs.logprobs, inputs.mask)
        kl = KL_ESTIMATORS[kl_estimator](logprobs, masked(inputs.ref_logprobs, inputs.mask))
        metrics["kl"] = aggregate(kl, inputs)
        loss = loss + kl_beta * aggregate(kl, inputs, aggregation)
    elif kl_beta:
        raise ValueError("kl_beta > 0 needs ref_logprobs")
    if inputs.entropy is not None:
        metrics["entropy"] = aggregate(inputs.entropy, inputs)
        if entropy_weight:
            loss = loss - entropy_weight * aggregate(inputs.entropy, inputs, aggregation)
    elif entropy_weight:
        raise ValueError("entropy_weight > 0 needs entropy")
    return LossOutputs(loss, metrics)

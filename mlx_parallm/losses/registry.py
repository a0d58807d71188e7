"""`LOSSES`: the policy losses by name, and `policy_loss`, which makes one number of what they say of each token.

Ratio level, aggregation, KL, entropy and sampler correction are options of all of them. A new loss is a function in
`policy_gradient`, a line here, and its settings in `config.algorithm.LOSS_SETTINGS`.
"""

from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx

from mlx_parallm.losses import policy_gradient
from mlx_parallm.losses.kl import KL_ESTIMATORS
from mlx_parallm.losses.policy_gradient import RatioLevel, Terms, TokenLoss
from mlx_parallm.losses.types import Aggregation, LossInputs, LossOutputs, aggregate, masked

LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "clip": policy_gradient.clip,
    "dual_clip": policy_gradient.dual_clip,
    "two_sided": policy_gradient.two_sided,
    "cispo": policy_gradient.cispo,
    "sapo": policy_gradient.sapo,
    "dppo": policy_gradient.dppo,
    "reinforce": policy_gradient.reinforce,
    "importance_sampling": policy_gradient.importance_sampling,
}


def policy_loss(
    inputs: LossInputs,
    loss: str = "clip",
    *,
    ratio_level: RatioLevel = "token",
    aggregation: Aggregation = "token",
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3",
    entropy_weight: float = 0.0,
    **settings: Any,
) -> LossOutputs:
    """aggregate(weights · LOSSES[loss] + kl_beta · KL(policy || reference) - entropy_weight · entropy).

    `weights` (sampler correction) multiply the policy loss alone, as in TRL; `settings` are the loss's own. The group
    enters through the advantages alone.

    Metrics: policy_loss; ratio_mean where there is a ratio; clip_fraction, the share of tokens at which the loss's
    bound acts, where it has one; `kl` and `entropy` (token means) where `ref_logprobs` and `entropy` are given. Raises
    ValueError when the input of a weighted term is missing.
    """
    terms = Terms(inputs, ratio_level)
    token = LOSSES[loss](terms, **settings)
    values = token.values if inputs.weights is None else token.values * masked(inputs.weights, inputs.mask)
    metrics = {"policy_loss": aggregate(values, inputs, aggregation)}
    if inputs.old_logprobs is not None or inputs.rollout_logprobs is not None:
        metrics["ratio_mean"] = aggregate(terms.ratio, inputs)
    if token.clipped is not None:
        metrics["clip_fraction"] = aggregate(token.clipped.astype(mx.float32), inputs)
    if token.penalty is not None:
        values = values + token.penalty
    if inputs.ref_logprobs is not None:
        kl = KL_ESTIMATORS[kl_estimator](terms.logprobs, masked(inputs.ref_logprobs, inputs.mask))
        metrics["kl"] = aggregate(kl, inputs)
        if inputs.kl_beta:
            values = values + inputs.kl_beta * kl
    elif inputs.kl_beta:
        raise ValueError("kl_beta > 0 needs ref_logprobs")
    if inputs.entropy is not None:
        metrics["entropy"] = aggregate(inputs.entropy, inputs)
        if entropy_weight:
            values = values - entropy_weight * masked(inputs.entropy, inputs.mask)
    elif entropy_weight:
        raise ValueError("entropy_weight > 0 needs entropy")
    return LossOutputs(aggregate(values, inputs, aggregation), metrics)

"""Policy losses: one number a token, and `policy_loss`, which makes one number of them.

The ratio is exp(logprobs - old_logprobs): the policy now against the one that the tokens are from.
If the trainer has not scored the step's tokens itself, that is the sampler's own
`rollout_logprobs`, so that staleness, several updates a batch and the sampler's rounding are
corrected by one number.

Each loss is a function of `Terms` and of its own settings, keys of [rl_training]. Ratio level,
aggregation, KL, entropy and sampler correction are options of all of them. A new loss is a function
here, a line in `LOSSES`, and a class with its settings in `config/algorithm.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import mlx.core as mx

from mlx_parallm.losses.kl import LOG_RATIO_LIMIT, token_kl, token_ratio
from mlx_parallm.losses.types import Aggregation, LossInputs, LossOutputs, aggregate, masked

SEQUENCE_LOG_RATIO_LIMIT = 10.0  # as in verl
# VESPO's bounds of a sequence's log-ratio, as the authors' and TRL's: log 1e-8 and 20
VESPO_LOG_WEIGHT = -18.420681, 20.0
VESPO_LEAST_LAMBDA = 1e-4  # TRL's: without a decay a large weight is infinite

RatioLevel = Literal["token", "sequence", "sequence_token"]
CLIP_METRICS: dict[RatioLevel, tuple[str, ...]] = {
    "token": ("clip_fraction",),
    "sequence": ("clip_fraction", "sequence_clip_fraction"),
    "sequence_token": ("clip_fraction", "sequence_clip_fraction"),
}
KLEstimatorName = Literal["k1", "abs", "k2", "k3", "k3_ratio"]


@dataclass(frozen=True)
class LossOptions:
    """The token loss, and how `policy_loss` makes one number of it.
    `step.algorithms.loss_options` builds it."""

    token_loss: "TokenLossFunction"
    ratio_level: RatioLevel
    aggregation: Aggregation
    kl_estimator: KLEstimatorName
    entropy_weight: float
    entropy_aggregation: Aggregation
    off_policy_mask: float | None = None


@dataclass(frozen=True)
class Terms:
    """The arrays that a token loss reads: [B, T] float32, and finite if the mask is false."""

    inputs: LossInputs
    ratio_level: RatioLevel = "token"

    @cached_property
    def logprobs(self) -> mx.array:
        return masked(self.inputs.logprobs, self.inputs.mask)

    @cached_property
    def advantages(self) -> mx.array:
        return masked(self.inputs.advantages, self.inputs.mask)

    @cached_property
    def old_logprobs(self) -> mx.array:
        return self.inputs.ratio_logprobs

    @cached_property
    def selected(self) -> mx.array:
        """[B, T] bool: the tokens that the loss treats in its own way."""
        selected = self.inputs.selected
        if selected is None:
            return mx.zeros(self.inputs.mask.shape, mx.bool_)
        return masked(selected, self.inputs.mask) > 0

    @cached_property
    def log_ratio(self) -> mx.array:
        """Each token's own: logprobs - old_logprobs."""
        return self.logprobs - self.old_logprobs

    def sequence_mean(self, values: mx.array) -> mx.array:
        """Return the mean of `values` [B, T] over each sequence's tokens, [B, 1]."""
        lengths = mx.maximum(self.inputs.mask.sum(axis=-1, keepdims=True), 1)
        return masked(values, self.inputs.mask).sum(axis=-1, keepdims=True) / lengths

    @cached_property
    def ratio(self) -> mx.array:
        """ "token": exp(logprobs - old_logprobs), its logarithm kept within ±20.

        "sequence" (GSPO, arXiv:2507.18071): the geometric mean s of a sequence's ratios, the same
        at all its tokens, log s within ±10. "sequence_token" (GSPO-token): equal in value, but each
        token has its own gradient, s · ∇logprobs; so the gradient is equal too if a sequence has
        one advantage, and right if it has several.

        Worked: ratios 2 and 0.5 of one sequence → "token" [2, 0.5]; "sequence" exp((ln 2 - ln 2) /
        2) = 1: [1, 1].
        """
        level = self.ratio_level
        if level == "token":
            return token_ratio(self.logprobs, self.old_logprobs)
        mean = self.sequence_mean(self.log_ratio)
        sequence = mx.exp(mx.clip(mean, -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT))
        if level == "sequence":
            return mx.broadcast_to(sequence, self.log_ratio.shape)
        return mx.stop_gradient(sequence) * mx.exp(self.logprobs - mx.stop_gradient(self.logprobs))


@dataclass(frozen=True)
class TokenLoss:
    """`values` [B, T], minimised. `penalty` [B, T] is added to them, but is not multiplied by a
    sampler correction.

    `clipped` [B, T] bool: True where a bound on the ratio stops the gradient; None: the loss
    bounds no ratio. It is the metric `clip_fraction`, which the health line reads as distance from
    the policy that sampled, so a bound of another kind stays out of it."""

    values: mx.array
    clipped: mx.array | None = None
    penalty: mx.array | None = None


TokenLossFunction = Callable[[Terms], TokenLoss]


def clip(terms: Terms, *, clip_ratio: float, clip_ratio_high: float) -> TokenLoss:
    """PPO's clipped surrogate: -min(ratio · A, clip(ratio, 1 - clip_ratio, 1 + clip_ratio_high) ·
    A).

    Schulman et al. 2017 (arXiv:1707.06347); clip_ratio_high > clip_ratio is DAPO's clip-higher
    (arXiv:2503.14476). For A > 0 the gradient ends above 1 + clip_ratio_high, for A < 0 below 1 -
    clip_ratio; on the other side it stays, as the way back.

    Worked, clip 0.2 / 0.28: ratio 1.5, A = 1 → -min(1.5, 1.28) = -1.28 (clipped); ratio 0.5, A = -1
    → -min(-0.5, -0.8) = 0.8 (clipped); ratio 2, A = -1 → -min(-2, -1.28) = 2 (not clipped).
    """
    return TokenLoss(*_surrogate(terms, *_bounds(clip_ratio, clip_ratio_high)))


def dual_clip(
    terms: Terms, *, clip_ratio: float, clip_ratio_high: float, dual_clip: float
) -> TokenLoss:
    """`clip`, and for A < 0 never more than -dual_clip · A: a bad token made far likelier no longer
    rules the step.

    Ye et al. 2019 (arXiv:1912.09729), verl's default with c = 3. Worked, clip 0.2 / 0.2, c = 3:
    ratio 5, A = -1 → min(3, 5) = 3 (clipped); ratio 2, A = -1 → 2 (not clipped).
    """
    values, clipped = _surrogate(terms, *_bounds(clip_ratio, clip_ratio_high))
    ceiling = -dual_clip * terms.advantages
    above = (terms.advantages < 0) & (values > ceiling)
    return TokenLoss(mx.where(above, ceiling, values), clipped | above)


def two_sided(
    terms: Terms, *, clip_ratio: float, clip_ratio_high: float, ratio_delta: float
) -> TokenLoss:
    """-min(min(ratio, ratio_delta) · A, clip(ratio) · A): `clip` with a bound for A < 0 too.

    INTELLECT-2 (arXiv:2505.07291); TRL's `delta`. ratio_delta has to be above 1 + clip_ratio_high.
    Worked, clip 0.2 / 0.2, delta 4: ratio 5, A = -1 → -min(-4, -1.2) = 4 (clipped); ratio 2, A = -1
    → 2.
    """
    low, high = _bounds(clip_ratio, clip_ratio_high)
    values, clipped = _surrogate(terms, low, min(high, ratio_delta))
    highest = max(high, ratio_delta)
    above = (terms.advantages < 0) & (terms.ratio > highest)
    return TokenLoss(mx.where(above, -highest * terms.advantages, values), clipped | above)


def cispo(terms: Terms, *, clip_ratio: float, clip_ratio_high: float) -> TokenLoss:
    """-sg(clip(ratio, 1 - clip_ratio, 1 + clip_ratio_high)) · A · logprobs: the weight is bounded,
    no token is dropped.

    MiniMax-M1 (arXiv:2506.13585), ScaleRL (arXiv:2510.13786). Worked, bounds [0, 5] as in TRL:
    ratio 8, logprob -0.5, A = 1 → -5 · -0.5 = 2.5 (bounded), gradient by logprobs -5.
    """
    low, high = _bounds(clip_ratio, clip_ratio_high)
    weight = mx.stop_gradient(mx.clip(terms.ratio, low, high))
    return TokenLoss(
        -weight * terms.advantages * terms.logprobs, (terms.ratio < low) | (terms.ratio > high)
    )


def sapo(terms: Terms, *, sapo_tau_positive: float, sapo_tau_negative: float) -> TokenLoss:
    """-(4 / τ) · sigmoid(τ · (ratio - 1)) · A with τ by the sign of A: a smooth gate in place of a
    clip.

    SAPO (arXiv:2511.20347). Its gradient is that of -ratio · A at ratio 1, and fades on both sides.
    Worked: ratio 1, A = 1, τ = 1 → -4 · 0.5 = -2; ratio 3 → -4 · 0.880797 = -3.523188.
    """
    tau = mx.where(terms.advantages > 0, sapo_tau_positive, sapo_tau_negative)
    return TokenLoss(-(4.0 / tau) * mx.sigmoid(tau * (terms.ratio - 1.0)) * terms.advantages)


def dppo(terms: Terms, *, dppo_low: float, dppo_high: float, dppo_kl: float) -> TokenLoss:
    """-ratio · A, dropped if the *probability* p has moved too far the way that A pushes it, and
    a pull back: + dppo_kl · (logprobs - old_logprobs)². Dropped: A > 0 and p - p_old > dppo_high; A
    <= 0 and p - p_old < -dppo_low.

    DPPO with total variation (arXiv:2602.04879), as prime-rl's default loss has it. Worked, 0.2 /
    0.2, dppo_kl 0: p 0.6, p_old 0.3, A = 1 → dropped: 0; p 0.4, p_old 0.3, A = 1 → -4/3.
    """
    moved = mx.exp(terms.logprobs) - mx.exp(terms.old_logprobs)
    dropped = mx.where(terms.advantages > 0, moved > dppo_high, moved < -dppo_low)
    values = mx.where(dropped, 0.0, -terms.ratio * terms.advantages)
    return TokenLoss(values, dropped, dppo_kl * mx.square(terms.logprobs - terms.old_logprobs))


def gmpo(terms: Terms, *, clip_ratio: float, clip_ratio_high: float) -> TokenLoss:
    """-exp(mean of a sequence's bounded log-ratios) · A: the geometric mean of its tokens' ratios,
    each bounded first, [e^-clip_ratio, e^clip_ratio_high], on the side that A pushes it to. Each
    token has its own gradient, as in "sequence_token": the same if a sequence has one advantage.

    GMPO (arXiv:2507.20673); its range is e^±0.4, and its mean over sequences is
    loss_aggregation = "sequence". Worked, 0.4 / 0.4, A = 1: log-ratios 1 and -0.2 → exp((0.4 -
    0.2) / 2) = 1.105171 → -1.105171, and no gradient by the first token; A = -1: exp((1 - 0.2) / 2)
    = 1.491825 → 1.491825.
    """
    log_ratio = terms.log_ratio
    above = (terms.advantages > 0) & (log_ratio > clip_ratio_high)
    below = (terms.advantages < 0) & (log_ratio < -clip_ratio)
    bounded = mx.where(above, clip_ratio_high, mx.where(below, -clip_ratio, log_ratio))
    mean = terms.sequence_mean(bounded)
    ratio = mx.exp(mx.clip(mean, -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT))
    one = mx.exp(bounded - mx.stop_gradient(bounded))
    return TokenLoss(-mx.stop_gradient(ratio) * one * terms.advantages, above | below)


def vespo(
    terms: Terms,
    *,
    vespo_k_positive: float,
    vespo_lambda_positive: float,
    vespo_k_negative: float,
    vespo_lambda_negative: float,
) -> TokenLoss:
    """-sg(φ(W)) · A · logprobs, φ(W) = W^k · exp(λ · (1 - W)), k and λ by the sign of A. W is the
    *product* of a sequence's ratios, against the policy that sampled it; φ is 1 at W = 1 and fades
    on both sides.

    VESPO (arXiv:2602.10693), with TRL's bounds of log W. Worked, k 2, λ 3, A = 1: ratios 2 and 1 →
    W = 2, φ = 4 · e^-3 = 0.199148; logprob -0.5 → 0.099574, gradient by it -0.199148.
    """
    log_ratio = mx.clip(terms.log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    low, high = VESPO_LOG_WEIGHT
    log_weight = mx.clip(log_ratio.sum(axis=-1, keepdims=True), low, high)
    up = terms.advantages >= 0
    k = mx.where(up, vespo_k_positive, vespo_k_negative)
    fades = mx.where(
        up,
        max(vespo_lambda_positive, VESPO_LEAST_LAMBDA),
        max(vespo_lambda_negative, VESPO_LEAST_LAMBDA),
    )
    phi = mx.stop_gradient(mx.exp(k * log_weight + fades * (1.0 - mx.exp(log_weight))))
    return TokenLoss(-phi * terms.advantages * terms.logprobs)


def clip_cov(terms: Terms, *, clip_ratio: float, clip_ratio_high: float) -> TokenLoss:
    """`clip`, and 0 at the selected tokens: some of those whose log-probability and advantage go
    together most, which would make the policy's entropy fall fastest.

    Clip-Cov (arXiv:2505.22617); `losses.selection` chooses them. Worked: ratio 1.5, A = 1, bound
    2: -1.5, selected 0.
    """
    values, clipped = _surrogate(terms, *_bounds(clip_ratio, clip_ratio_high))
    return TokenLoss(mx.where(terms.selected, 0.0, values), clipped | terms.selected)


def kl_cov(terms: Terms, *, cov_weight: float) -> TokenLoss:
    """-ratio · A, and + cov_weight · |logprobs - old_logprobs| at the selected tokens, which holds
    them where they were.

    KL-Cov (arXiv:2505.22617); `losses.selection` chooses them. Worked, cov_weight 1: ratio 2, A =
    1: -2, selected -2 + ln 2 = -1.306853.
    """
    held = mx.where(terms.selected, cov_weight * mx.abs(terms.log_ratio), 0.0)
    return TokenLoss(-terms.ratio * terms.advantages + held)


def reinforce(terms: Terms) -> TokenLoss:
    """-A · logprobs (Williams 1992). No ratio: right only for rollouts of the policy that is
    trained.

    Worked: logprob -0.5, A = 2 → 1, gradient by logprobs -2.
    """
    return TokenLoss(-terms.advantages * terms.logprobs)


def importance_sampling(terms: Terms) -> TokenLoss:
    """-ratio · A, not bounded; at ratio 1 the gradient is `reinforce`'s (Tinker's
    `importance_sampling`).

    Worked: ratio 2, A = 1 → -2, gradient by logprobs -2.
    """
    return TokenLoss(-terms.ratio * terms.advantages)


def _bounds(clip_ratio: float, clip_ratio_high: float) -> tuple[float, float]:
    """The lowest and the highest ratio."""
    return 1.0 - clip_ratio, 1.0 + clip_ratio_high


def _surrogate(terms: Terms, low: float, high: float) -> tuple[mx.array, mx.array]:
    """Return the clipped surrogate [B, T], and a mask of tokens without gradient. A ratio that is
    the bound has one, as in torch: with clip_ratio = 0 a policy still learns from its own tokens.
    """
    ratio, advantages = terms.ratio, terms.advantages
    above, below = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
    bounded = mx.where(above, high, mx.where(below, low, ratio))
    return -bounded * advantages, above | below


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    function.__name__: function
    for function in (
        clip,
        dual_clip,
        two_sided,
        cispo,
        sapo,
        dppo,
        gmpo,
        vespo,
        clip_cov,
        kl_cov,
        reinforce,
        importance_sampling,
    )
}
"""By name; each takes `Terms`, and its settings by keyword."""


def off_policy(terms: Terms, threshold: float) -> mx.array:
    """Return which tokens [B, T] are of an answer with A < 0 that the policy has left: the mean of
    log(sampler / policy) over its tokens is above `threshold`, in nats. The sampler is
    rollout_logprobs (else old_logprobs).

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556). Worked, threshold 0.5: a
    sequence with log(sampler / policy) = [1, 0.2] has the mean 0.6: masked with A = -1, kept with
    A = 1.
    """
    sampled = terms.inputs.rollout_logprobs
    old = terms.old_logprobs if sampled is None else masked(sampled, terms.inputs.mask)
    left = terms.sequence_mean(old - mx.stop_gradient(terms.logprobs)) > threshold
    return (terms.advantages < 0) & left


def policy_loss(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """aggregate(weights · token_loss + kl_beta · KL(policy || reference)) - entropy_weight ·
    aggregate(entropy).

    `weights` (sampler correction) multiply the policy loss alone, as in TRL. The group enters
    through the advantages alone. "k3_ratio" multiplies the KL by the loss's own ratio. The entropy
    has its own aggregation (`entropy_aggregation`): with "token" it is the mean over tokens
    whatever the loss divides by, as in TRL. `off_policy_mask` leaves the policy loss of answers out
    that the policy has left (`off_policy`); they still count in the aggregation.

    Worked: entropies [[1, 2], [6, -]] with weight 0.1 and the aggregation "sequence": -0.1 · (1.5 +
    6) / 2 = -0.375 with entropy_aggregation "sequence", -0.1 · 9 / 3 = -0.3 with "token".

    Metrics: policy_loss; ratio_mean if there is a ratio; clip_fraction, the share of tokens at
    which the loss's bound acts, if it has one (where ratios are of whole sequences also as
    sequence_clip_fraction); off_policy_masked, the share of tokens that the mask leaves out; `kl`
    and `entropy` (token means) where `ref_logprobs` and `entropy` are given. Raises ValueError when
    the input of a weighted term is missing.
    """
    terms = Terms(inputs, options.ratio_level)
    kl_in_loss = isinstance(inputs.kl_beta, mx.array) or inputs.kl_beta != 0
    values, metrics = _policy_values(terms, options)
    if inputs.ref_logprobs is not None:
        kl = token_kl(
            inputs,
            options.kl_estimator,
            lambda: terms.ratio,
            shared=options.ratio_level == "sequence",
        )
        metrics["kl"] = aggregate(kl, inputs)
        if kl_in_loss:
            values = values + inputs.kl_beta * kl
    elif kl_in_loss:
        raise ValueError("kl_beta > 0 needs ref_logprobs")
    if inputs.entropy is not None:
        metrics["entropy"] = aggregate(inputs.entropy, inputs)
    loss = aggregate(values, inputs, options.aggregation)
    if inputs.entropy_weight is not None:
        metrics["bonus_entropy"] = _entropy(inputs, "token")
        loss = loss - inputs.entropy_weight * _entropy(inputs, options.entropy_aggregation)
    elif options.entropy_weight:
        loss = loss - options.entropy_weight * _entropy(inputs, options.entropy_aggregation)
    return LossOutputs(loss, metrics)


def _entropy(inputs: LossInputs, aggregation: Aggregation) -> mx.array:
    """Return the entropy bonus: over the tokens whose policy loss counts, as in TRL, with "token"
    their mean."""
    if inputs.entropy is None:
        raise ValueError("entropy_weight > 0 needs entropy")
    if inputs.counted is None or inputs.counted_normalizer is None:
        return aggregate(inputs.entropy, inputs, aggregation)
    counted = inputs.entropy * masked(inputs.counted, inputs.mask)
    of_them = replace(inputs, token_normalizer=inputs.counted_normalizer)
    return aggregate(counted, of_them, aggregation)


def _policy_values(terms: Terms, options: LossOptions) -> tuple[mx.array, dict[str, mx.array]]:
    """Return the token loss [B, T] as `policy_loss` weighs it, and its metrics."""
    inputs, token = terms.inputs, options.token_loss(terms)
    values, metrics = token.values, {}
    if inputs.weights is not None:
        values = values * masked(inputs.weights, inputs.mask)
    if inputs.counted is not None:
        values = values * masked(inputs.counted, inputs.mask)
    if options.off_policy_mask is not None:
        left_out = off_policy(terms, options.off_policy_mask)
        values = mx.where(left_out, 0.0, values)
        metrics["off_policy_masked"] = aggregate(left_out.astype(mx.float32), inputs)
    metrics["policy_loss"] = aggregate(values, inputs, options.aggregation)
    if inputs.old_logprobs is not None or inputs.rollout_logprobs is not None:
        metrics["ratio_mean"] = aggregate(terms.ratio, inputs)
    if token.clipped is not None:
        clipped = aggregate(token.clipped.astype(mx.float32), inputs)
        metrics |= dict.fromkeys(CLIP_METRICS[options.ratio_level], clipped)
    return values if token.penalty is None else values + token.penalty, metrics

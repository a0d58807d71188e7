"""Policy losses, one number a token. Each is a function of `Terms`; `registry.policy_loss` adds what they all have.

The ratio is exp(logprobs - old_logprobs): the policy now against the one that the tokens are from. Where the trainer
has not scored the step's tokens itself, that is the sampler's own `rollout_logprobs`, so that staleness, several
updates a batch and the sampler's rounding are corrected by one number.

Parameters are named as the keys of `[rl_training]`, and have the defaults of `config.algorithm.LOSS_SETTINGS`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import mlx.core as mx

from mlx_parallm.losses.kl import LOG_RATIO_LIMIT
from mlx_parallm.losses.types import LossInputs, masked

SEQUENCE_LOG_RATIO_LIMIT = 10.0  # as in verl

RatioLevel = Literal["token", "sequence", "sequence_token"]


@dataclass(frozen=True)
class Terms:
    """What a token loss reads. All [B, T] float32, and finite where the mask is false."""

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
        """Raises ValueError where none are known: against itself a policy has the ratio 1, and no clip ever acts."""
        old = self.inputs.rollout_logprobs if self.inputs.old_logprobs is None else self.inputs.old_logprobs
        if old is None:
            raise ValueError("a ratio needs rollout_logprobs or old_logprobs: the policy against itself is always 1")
        return masked(old, self.inputs.mask)

    @cached_property
    def ratio(self) -> mx.array:
        """ "token": exp(logprobs - old_logprobs), its logarithm kept within ±20.

        "sequence" (GSPO, arXiv:2507.18071): the geometric mean s of a sequence's ratios, the same at all its tokens,
        log s within ±10. "sequence_token" (GSPO-token): equal in value, but each token has its own gradient,
        s · ∇logprobs; so the gradient is equal too where a sequence has one advantage, and right where it has several.

        Worked: ratios 2 and 0.5 of one sequence → "token" [2, 0.5]; "sequence" exp((ln 2 - ln 2) / 2) = 1: [1, 1].
        """
        log_ratio = self.logprobs - self.old_logprobs
        if self.ratio_level == "token":
            return mx.exp(mx.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        lengths = mx.maximum(self.inputs.mask.sum(axis=-1, keepdims=True), 1)
        mean = log_ratio.sum(axis=-1, keepdims=True) / lengths
        sequence = mx.exp(mx.clip(mean, -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT))
        if self.ratio_level == "sequence":
            return mx.broadcast_to(sequence, log_ratio.shape)
        return mx.stop_gradient(sequence) * mx.exp(self.logprobs - mx.stop_gradient(self.logprobs))


@dataclass(frozen=True)
class TokenLoss:
    """`values` [B, T], minimised. `clipped` [B, T] bool: where the bound of this loss acts, None = it has none.
    `penalty` [B, T] is added to them, but is not multiplied by a sampler correction."""

    values: mx.array
    clipped: mx.array | None = None
    penalty: mx.array | None = None


def clip(terms: Terms, *, clip_ratio: float = 0.2, clip_ratio_high: float | None = None) -> TokenLoss:
    """PPO's clipped surrogate: -min(ratio · A, clip(ratio, 1 - clip_ratio, 1 + clip_ratio_high) · A).

    Schulman et al. 2017 (arXiv:1707.06347); clip_ratio_high > clip_ratio is DAPO's clip-higher (arXiv:2503.14476). For
    A > 0 the gradient ends above 1 + clip_ratio_high, for A < 0 below 1 - clip_ratio; on the other side it stays, as
    the way back.

    Worked, clip 0.2 / 0.28: ratio 1.5, A = 1 → -min(1.5, 1.28) = -1.28 (clipped); ratio 0.5, A = -1 →
    -min(-0.5, -0.8) = 0.8 (clipped); ratio 2, A = -1 → -min(-2, -1.28) = 2 (not clipped).
    """
    return TokenLoss(*_surrogate(terms.ratio, terms.advantages, clip_ratio, clip_ratio_high))


def dual_clip(
    terms: Terms, *, clip_ratio: float = 0.2, clip_ratio_high: float | None = None, dual_clip: float = 3.0
) -> TokenLoss:
    """`clip`, and for A < 0 never more than -dual_clip · A: a bad token made far likelier no longer rules the step.

    Ye et al. 2019 (arXiv:1912.09729), verl's default with c = 3.
    Worked, clip 0.2 / 0.2, c = 3: ratio 5, A = -1 → min(3, 5) = 3 (clipped); ratio 2, A = -1 → 2 (not clipped).
    """
    values, clipped = _surrogate(terms.ratio, terms.advantages, clip_ratio, clip_ratio_high)
    ceiling = -dual_clip * terms.advantages
    above = (terms.advantages < 0) & (values > ceiling)
    return TokenLoss(mx.where(above, ceiling, values), clipped | above)


def two_sided(
    terms: Terms, *, clip_ratio: float = 0.2, clip_ratio_high: float | None = None, ratio_delta: float = 4.0
) -> TokenLoss:
    """-min(min(ratio, ratio_delta) · A, clip(ratio) · A): `clip` with a bound for A < 0 too.

    INTELLECT-2 (arXiv:2505.07291); TRL's `delta`. ratio_delta has to be above 1 + clip_ratio_high.
    Worked, clip 0.2 / 0.2, delta 4: ratio 5, A = -1 → -min(-4, -1.2) = 4 (clipped); ratio 2, A = -1 → 2.
    """
    ratio, advantages = terms.ratio, terms.advantages
    inside = mx.clip(ratio, *_bounds(clip_ratio, clip_ratio_high))
    values = -mx.minimum(mx.minimum(ratio, ratio_delta) * advantages, inside * advantages)
    clipped = _surrogate(ratio, advantages, clip_ratio, clip_ratio_high)[1]
    return TokenLoss(values, clipped | ((advantages < 0) & (ratio > ratio_delta)))


def cispo(terms: Terms, *, clip_ratio: float = 1.0, clip_ratio_high: float | None = 4.0) -> TokenLoss:
    """-sg(clip(ratio, 1 - clip_ratio, 1 + clip_ratio_high)) · A · logprobs: the weight is bounded, no token is dropped.

    MiniMax-M1 (arXiv:2506.13585), ScaleRL (arXiv:2510.13786). Default bounds [0, 5], TRL's cap.
    Worked: ratio 8, logprob -0.5, A = 1 → -5 · -0.5 = 2.5 (bounded), gradient by logprobs -5.
    """
    low, high = _bounds(clip_ratio, clip_ratio_high)
    weight = mx.stop_gradient(mx.clip(terms.ratio, low, high))
    return TokenLoss(-weight * terms.advantages * terms.logprobs, (terms.ratio < low) | (terms.ratio > high))


def sapo(terms: Terms, *, sapo_tau_positive: float = 1.0, sapo_tau_negative: float = 1.05) -> TokenLoss:
    """-(4 / τ) · sigmoid(τ · (ratio - 1)) · A with τ by the sign of A: a smooth gate in place of a clip.

    SAPO (arXiv:2511.20347). Its gradient is that of -ratio · A at ratio 1, and fades on both sides.
    Worked: ratio 1, A = 1, τ = 1 → -4 · 0.5 = -2; ratio 3 → -4 · 0.880797 = -3.523188.
    """
    tau = mx.where(terms.advantages > 0, sapo_tau_positive, sapo_tau_negative)
    return TokenLoss(-(4.0 / tau) * mx.sigmoid(tau * (terms.ratio - 1.0)) * terms.advantages)


def dppo(terms: Terms, *, dppo_low: float = 0.2, dppo_high: float = 0.2, dppo_kl: float = 1e-3) -> TokenLoss:
    """-ratio · A, dropped where the *probability* p has moved too far the way that A pushes it, and a pull back:
    + dppo_kl · (logprobs - old_logprobs)². Dropped: A > 0 and p - p_old > dppo_high; A <= 0 and p - p_old < -dppo_low.

    DPPO with total variation (arXiv:2602.04879), as prime-rl's default loss has it.
    Worked, 0.2 / 0.2, dppo_kl 0: p 0.6, p_old 0.3, A = 1 → dropped: 0; p 0.4, p_old 0.3, A = 1 → -4/3.
    """
    moved = mx.exp(terms.logprobs) - mx.exp(terms.old_logprobs)
    dropped = mx.where(terms.advantages > 0, moved > dppo_high, moved < -dppo_low)
    values = mx.where(dropped, 0.0, -terms.ratio * terms.advantages)
    return TokenLoss(values, dropped, dppo_kl * mx.square(terms.logprobs - terms.old_logprobs))


def reinforce(terms: Terms) -> TokenLoss:
    """-A · logprobs (Williams 1992). No ratio: right only for rollouts of the policy that is trained.

    Worked: logprob -0.5, A = 2 → 1, gradient by logprobs -2.
    """
    return TokenLoss(-terms.advantages * terms.logprobs)


def importance_sampling(terms: Terms) -> TokenLoss:
    """-ratio · A, not bounded; at ratio 1 the gradient is `reinforce`'s (Tinker's `importance_sampling`).

    Worked: ratio 2, A = 1 → -2, gradient by logprobs -2.
    """
    return TokenLoss(-terms.ratio * terms.advantages)


def _bounds(clip_ratio: float, clip_ratio_high: float | None) -> tuple[float, float]:
    return 1.0 - clip_ratio, 1.0 + (clip_ratio if clip_ratio_high is None else clip_ratio_high)


def _surrogate(
    ratio: mx.array, advantages: mx.array, clip_ratio: float, clip_ratio_high: float | None
) -> tuple[mx.array, mx.array]:
    """The clipped surrogate [B, T], and where its gradient ends."""
    low, high = _bounds(clip_ratio, clip_ratio_high)
    values = -mx.minimum(ratio * advantages, mx.clip(ratio, low, high) * advantages)
    return values, ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))

"""Per-token estimators of KL(policy || reference) from sampled tokens (Schulman,
joschu.net/blog/kl-approx.html).

With d = ref_logprobs - logprobs:  k1 = -d  ·  abs = |d|  ·  k2 = d²/2  ·  k3 = exp(d) - 1 - d.
k1 and k3 are unbiased *values* of tokens that the policy itself sampled; as losses on such tokens
only k2 and k3_ratio have the gradient of the true KL. k3_ratio is both, and on tokens of an older
policy too: docs/algorithms.md.

The loss takes them in `policy_gradient.policy_loss`; the KL in the reward (`kl_in = "reward"`) is
`rl_training/step/prepare.py`'s.

Worked: logprobs -1.0, ref_logprobs -1.2 → d = -0.2: k1 = 0.2, abs = 0.2, k2 = 0.02, k3 = e^-0.2 - 1
+ 0.2 = 0.018731. Sampled at -1.5, the ratio is e^0.5 = 1.648721: k3_ratio = 0.030882, its slope by
logprobs 1.648721 · 0.2 = 0.329744. With the ratio of a sequence (GSPO) k3_ratio is k3 times that
one: the next example is in its docstring.
"""

from collections.abc import Callable

import mlx.core as mx

from mlx_parallm.losses.types import LossInputs, masked

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8 still is a float32; as in verl
K3_LIMIT = 10.0  # verl's cap: one absurd token must not be the whole gradient

Ratio = Callable[[], mx.array]
KLEstimator = Callable[[mx.array, mx.array, Ratio, bool], mx.array]
"""logprobs [B, T], ref_logprobs [B, T], the ratio [B, T], whether a sequence's tokens share one
ratio → [B, T]."""


def k1(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """logprobs - ref_logprobs. [...] → [...]; unbiased, may be negative."""
    return logprobs - ref_logprobs


def absolute(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """|logprobs - ref_logprobs|. [...] → [...]; a distance, not an estimate (verl's "abs")."""
    return mx.abs(logprobs - ref_logprobs)


def k2(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """(logprobs - ref_logprobs)² / 2. [...] → [...]; biased, low variance."""
    return 0.5 * mx.square(logprobs - ref_logprobs)


def k3(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """exp(d) - 1 - d with d = ref_logprobs - logprobs. [...] → [...]; unbiased, never negative.

    By expm1: exp(d) - 1 - d in float32 is pure rounding noise below |d| ≈ 1e-4.
    """
    d = mx.clip(ref_logprobs - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return mx.minimum(mx.expm1(d) - d, K3_LIMIT)


def k3_ratio(
    logprobs: mx.array, ref_logprobs: mx.array, ratio: mx.array, *, shared: bool = False
) -> mx.array:
    """ratio · k3, with the ratio that the policy loss has. [...] → [...].

    DeepSeek-V3.2 (arXiv:2512.02556), TRL's use_bias_correction_kl. If each token has its own
    ratio, the slope by logprobs is ratio · k3 - ratio · (exp(d) - 1) = ratio · (logprobs -
    ref_logprobs), which is written out: the two exponentials would cancel, and the cap of k3 turn
    the slope's sign.

    Args:
        shared: one ratio for all tokens of a sequence ("sequence"): its gradient reaches each of
            them.

    Worked: one sequence of two tokens with the ratios 2 and 0.5 and k3 0.1 and 0.3: by token 0.2
    and 0.15; its own ratio is exp((ln 2 - ln 2) / 2) = 1, so by sequence 0.1 and 0.3.
    """
    if shared:
        return ratio * k3(logprobs, ref_logprobs)
    value = mx.stop_gradient(ratio * k3(logprobs, ref_logprobs))
    far = mx.stop_gradient(mx.clip(logprobs - ref_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return value + mx.stop_gradient(ratio) * far * (logprobs - mx.stop_gradient(logprobs))


def token_ratio(logprobs: mx.array, old_logprobs: mx.array) -> mx.array:
    """exp(logprobs - old_logprobs), its logarithm kept within ±20. [...] → [...]."""
    return mx.exp(mx.clip(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


KL_ESTIMATORS: dict[str, KLEstimator] = {
    "k1": lambda new, ref, *_: k1(new, ref),
    "abs": lambda new, ref, *_: absolute(new, ref),
    "k2": lambda new, ref, *_: k2(new, ref),
    "k3": lambda new, ref, *_: k3(new, ref),
    "k3_ratio": lambda new, ref, ratio, shared: k3_ratio(new, ref, ratio(), shared=shared),
}


def token_kl(
    inputs: LossInputs, estimator: str, ratio: Ratio | None = None, *, shared: bool = False
) -> mx.array:
    """The estimates of KL(policy || reference) at each token, [B, T]; finite if the mask is
    false.

    Args:
        ratio: the policy loss's, for "k3_ratio"; default: of each token.
        shared: it is one number for all tokens of a sequence.

    Raises ValueError: the log-probabilities that "k3_ratio" divides by are not there.
    """
    assert inputs.ref_logprobs is not None
    logprobs, ref_logprobs = (
        masked(inputs.logprobs, inputs.mask),
        masked(inputs.ref_logprobs, inputs.mask),
    )
    ratio = ratio or (lambda: token_ratio(logprobs, inputs.ratio_logprobs))
    return KL_ESTIMATORS[estimator](logprobs, ref_logprobs, ratio, shared)

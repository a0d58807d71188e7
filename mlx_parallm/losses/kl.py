"""Per-token estimators of KL(policy || reference) from the policy's own samples (Schulman, joschu.net/blog/kl-approx).

With d = ref_logprobs - logprobs:  k1 = -d  ·  abs = |d|  ·  k2 = d²/2  ·  k3 = exp(d) - 1 - d.
k1 and k3 are unbiased *values*; as losses only k2's gradient is that of the true KL (joschu.net/blog/kl-approx.html).

The loss takes them in `policy_gradient.policy_loss`; the KL in the reward (`kl_in = "reward"`) is
`rl_training/step/prepare.py`'s.

Worked: logprobs -1.0, ref_logprobs -1.2 → d = -0.2: k1 = 0.2, abs = 0.2, k2 = 0.02, k3 = e^-0.2 - 1 + 0.2 = 0.018731.
"""

from collections.abc import Callable

import mlx.core as mx

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8 still is a float32; as in verl
K3_LIMIT = 10.0  # verl's cap: one absurd token must not be the whole gradient

KLEstimator = Callable[[mx.array, mx.array], mx.array]


def k1(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """logprobs - ref_logprobs. [...] → [...]; unbiased, may be negative."""
    return logprobs - ref_logprobs


def absolute(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """|logprobs - ref_logprobs|. [...] → [...]; a distance, not an estimate of the KL (verl's "abs")."""
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


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}

"""PPO's second half: the clipped loss of a value head that is trained beside the policy.

Worked, clip 0.2: V = 0.5, V_old = 0.1, return 1 → V is held at 0.3, ½ max(0.5², 0.7²) = 0.245, no gradient; return 0 →
½ max(0.5², 0.3²) = 0.125, gradient 0.5: the way back to V_old stays open.
"""

from collections.abc import Callable

import mlx.core as mx

from mlx_parallm.losses.kl import k3
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate, masked

Loss = Callable[[LossInputs], LossOutputs]


def value_loss(inputs: LossInputs, *, clip: float) -> LossOutputs:
    """½ max((V - R)², (clip(V, V_old ± clip) - R)²), the mean over tokens; clip = 0: ½ (V - R)².

    Schulman et al. 2017's code (openai/baselines, ppo2), TRL and verl. Metrics: value_loss; value_clip_fraction, the
    share of tokens where the held value is the one that counts. Raises ValueError: no values, old_values or returns.
    """
    if inputs.values is None or inputs.old_values is None or inputs.returns is None:
        raise ValueError("the value loss needs values, old_values and returns")
    values, old, returns = (masked(array, inputs.mask) for array in (inputs.values, inputs.old_values, inputs.returns))
    plain = mx.square(values - returns)
    held = mx.square(mx.clip(values, old - clip, old + clip) - returns) if clip else plain
    loss = 0.5 * aggregate(mx.maximum(plain, held), inputs)
    share = aggregate((held > plain).astype(mx.float32), inputs)
    return LossOutputs(loss, {"value_loss": loss, "value_clip_fraction": share})


def with_value_loss(policy_loss: Loss, *, clip: float, coefficient: float) -> Loss:
    """policy_loss + coefficient · value_loss (arXiv:1707.06347, eq. 9).

    Metrics: both losses'; approx_kl, the mean of r - 1 - log r with r = π / π_old, an estimate of KL(π_old || π).
    Raises ValueError: no log-probabilities to compare with.
    """

    def loss(inputs: LossInputs) -> LossOutputs:
        policy, value = policy_loss(inputs), value_loss(inputs, clip=clip)
        old = inputs.rollout_logprobs if inputs.old_logprobs is None else inputs.old_logprobs
        if old is None:
            raise ValueError("PPO needs rollout_logprobs or old_logprobs")
        moved = aggregate(k3(masked(old, inputs.mask), masked(inputs.logprobs, inputs.mask)), inputs)
        metrics = policy.metrics | value.metrics | {"approx_kl": moved}
        return LossOutputs(policy.loss + coefficient * value.loss, metrics)

    return loss

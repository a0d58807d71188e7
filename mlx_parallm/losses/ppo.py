"""The common parts of all policies that learn by PPO: `Policy`, advantages (GAE), the value loss,
and the update of a small policy's modules.

A language model's tokens are sampled by the engine and scored by the trainer. A small policy (a
recurrent controller, a chooser of prompts) is a `Policy`: it acts step by step, and is replayed
over whole rows of steps when it learns. Both end in one `LossInputs`: `gae` and the policy losses
do not know which of them it was.

Worked, value clip 0.2: V = 0.5, V_old = 0.1, return 1 → V is held at 0.3, ½ max(0.5², 0.7²) =
0.245, no gradient; return 0 → ½ max(0.5², 0.3²) = 0.125, gradient 0.5: the way back to V_old stays
open.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np

from mlx_parallm.losses.kl import k3
from mlx_parallm.losses.policy_gradient import LOSSES, LossOptions, policy_loss
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate, masked

Loss = Callable[[LossInputs], LossOutputs]


class Policy(Protocol):
    """A policy over B rows of steps. `state`: its memory between two steps, arrays [B, …]; None
    begins a row."""

    def act(self, observations: mx.array, state: Any) -> tuple[mx.array, Any]:
        """One step: observations [B, …] → actions [B, …], and the state after them."""
        ...

    def scores(
        self, observations: mx.array, actions: mx.array, state: Any
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Replay rows [B, T, …] from `state`: log-probabilities, entropies and values, [B, T]
        float32 each. The values are of the state before each action. What is differentiated when
        the policy learns."""
        ...


@dataclass(frozen=True)
class Steps:
    """Rows of steps that a `Policy` has made, right-padded. Arrays are [B, T], observations and
    actions [B, T, …]."""

    observations: mx.array
    actions: mx.array
    mask: mx.array  # bool: the policy's own steps, not padding
    logprobs: mx.array  # float32, of the policy that acted
    values: mx.array  # float32, of the same
    advantages: mx.array
    returns: mx.array
    state: Any = None  # state at the rows' begin


def loss_inputs(policy: Policy, steps: Steps) -> LossInputs:
    """The steps as the policy scores them now, normalised by their own counts."""
    logprobs, entropy, values = policy.scores(steps.observations, steps.actions, steps.state)
    return LossInputs(
        logprobs=logprobs,
        rollout_logprobs=steps.logprobs,
        advantages=steps.advantages,
        mask=steps.mask,
        token_normalizer=float(mx.sum(steps.mask)),
        sequence_normalizer=float(len(steps.mask)),
        entropy=entropy,
        values=values,
        old_values=steps.values,
        returns=steps.returns,
    )


def gae(
    rewards: np.ndarray, values: np.ndarray, last: np.ndarray, *, gamma: float, gae_lambda: float
) -> np.ndarray:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t, with V = A = 0 after the end
    (arXiv:1506.02438, eq. 16).

    Columns [N] float64 of sequences one after the other; `last`: if each one's last step is. An
    episode that was truncated has γ V of the state that it stopped in as part of its last reward.

    Worked, γ = 1, λ = 0.5, rewards [0, 1], V [0.4, 0.6]: δ = [0.2, 0.4], A = [0.2 + 0.5 · 0.4, 0.4]
    = [0.4, 0.4].
    """
    advantages, ends = np.zeros(len(values)), set(last.tolist())
    next_value = next_advantage = 0.0
    for t, reward, value in reversed(
        [*zip(range(len(values)), rewards.tolist(), values.tolist(), strict=True)]
    ):
        if t in ends:
            next_value = next_advantage = 0.0
        next_advantage = reward + gamma * next_value - value + gamma * gae_lambda * next_advantage
        next_value = value
        advantages[t] = next_advantage
    return advantages


def value_loss(inputs: LossInputs, *, clip: float) -> LossOutputs:
    """½ max((V - R)², (clip(V, V_old ± clip) - R)²), the mean over tokens; clip = 0: ½ (V - R)².

    Schulman et al. 2017's code (openai/baselines, ppo2), TRL and verl. Metrics: value_loss;
    value_clip_fraction, the share of tokens where the held value is the one that counts. Raises
    ValueError: no values, old_values or returns.
    """
    if inputs.values is None or inputs.old_values is None or inputs.returns is None:
        raise ValueError("the value loss needs values, old_values and returns")
    values, old, returns = (
        masked(array, inputs.mask) for array in (inputs.values, inputs.old_values, inputs.returns)
    )
    plain = mx.square(values - returns)
    held = mx.square(mx.clip(values, old - clip, old + clip) - returns) if clip else plain
    loss = 0.5 * aggregate(mx.maximum(plain, held), inputs)
    share = aggregate((held > plain).astype(mx.float32), inputs)
    return LossOutputs(loss, {"value_loss": loss, "value_clip_fraction": share})


def with_value_loss(policy_loss: Loss, *, clip: float, coefficient: float) -> Loss:
    """policy_loss + coefficient · value_loss (arXiv:1707.06347, eq. 9).

    Metrics: both losses'; approx_kl, the mean of r - 1 - log r with r = π / π_old, an estimate of
    KL(π_old || π). Raises ValueError: no log-probabilities to compare with.
    """

    def loss(inputs: LossInputs) -> LossOutputs:
        policy, value = policy_loss(inputs), value_loss(inputs, clip=clip)
        old = inputs.rollout_logprobs if inputs.old_logprobs is None else inputs.old_logprobs
        if old is None:
            raise ValueError("PPO needs rollout_logprobs or old_logprobs")
        moved = aggregate(
            k3(masked(old, inputs.mask), masked(inputs.logprobs, inputs.mask)), inputs
        )
        metrics = policy.metrics | value.metrics | {"approx_kl": moved}
        return LossOutputs(policy.loss + coefficient * value.loss, metrics)

    return loss


def clipped_ppo(
    *, clip_ratio: float, entropy_weight: float, value_clip: float, value_coefficient: float
) -> Loss:
    """PPO of a small policy: the clipped surrogate with entropy bonus, and the clipped value
    loss, means over steps."""
    options = LossOptions(
        token_loss=partial(LOSSES["clip"], clip_ratio=clip_ratio, clip_ratio_high=clip_ratio),
        ratio_level="token",
        aggregation="token",
        kl_estimator="k3",
        entropy_weight=entropy_weight,
        entropy_aggregation="token",
    )
    return with_value_loss(
        lambda inputs: policy_loss(inputs, options), clip=value_clip, coefficient=value_coefficient
    )


def update_parts(
    parts: Sequence[tuple[optimizers.Optimizer, nn.Module, Any]],
    metrics: Mapping[str, Any],  # arrays of one number
    *,
    max_grad_norm: float,
) -> dict[str, float]:
    """Update each part, (optimizer, module, gradients), by its gradients, clipped to a norm; a part
    whose gradient is not finite stays as it is. Return the metrics as numbers, and `grad_norm` of
    all parts, before clipping."""
    norms = []
    for optimizer, module, gradients in parts:
        clipped, norm = optimizers.clip_grad_norm(gradients, max_grad_norm)
        norms.append(float(norm.item()))
        if math.isfinite(norms[-1]):
            optimizer.update(module, clipped)
    mx.eval([(module.parameters(), optimizer.state) for optimizer, module, _ in parts])
    numbers = {name: float(value.item()) for name, value in metrics.items()}
    return numbers | {"grad_norm": math.hypot(*norms)}

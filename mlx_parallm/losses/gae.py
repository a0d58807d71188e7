"""PPO's credit assignment: values of every token and one reward at the end → advantages and returns.

V(s_t) is what the value head says where token t is predicted. Only trained tokens are states: a tool's answer between
two of them is passed over, so value and advantage are carried across it. The last trained token of a sequence gets the
reward and is the end of its episode, also where the answer was cut off (as in TRL and verl): a truncated answer is
worth the reward that it was given, and no value stands in for what was not written.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.losses.advantages import whiten
from mlx_parallm.losses.value import with_value_loss
from mlx_parallm.rl_training.step.prepare import PreparedBatch
from mlx_parallm.rl_training.step.trainer import Algorithm

STOP_FACTOR = 1.5  # of the target KL, as in Spinning Up and Stable-Baselines3


def ppo(policy: Algorithm, config: RLTrainingConfig) -> Algorithm:
    """PPO (arXiv:1707.06347) around an algorithm whose `advantages` are the plain rewards: a value loss beside its
    policy loss, generalised advantage estimation in the place of its advantages."""
    own = config.ppo
    return replace(
        policy,
        loss=with_value_loss(policy.loss, clip=own.value_clip, coefficient=own.value_coefficient),
        needs_values=True,
        finish=partial(
            estimate, gamma=own.gamma, gae_lambda=own.gae_lambda, normalize_advantages=own.normalize_advantages
        ),
        stop_kl=None if own.target_kl is None else STOP_FACTOR * own.target_kl,
    )


def estimate(
    prepared: PreparedBatch, *, gamma: float, gae_lambda: float, normalize_advantages: bool = True
) -> PreparedBatch:
    """Rewards in `advantages` → advantages, whitened over the batch, and returns (of advantages before whitening).

    Metrics: explained_variance, 1 - Var(return - V) / Var(return), of the values before the step.
    """
    assert prepared.old_values is not None
    if not len(prepared.old_values):
        return prepared
    values = prepared.old_values.astype(np.float64)
    rewards = np.zeros(len(values)) if prepared.kl_penalty is None else -prepared.kl_penalty.astype(np.float64)
    last = np.cumsum(prepared.lengths)[np.array(prepared.lengths) > 0] - 1
    rewards[last] += prepared.advantages[last]
    advantages = gae(rewards, values, last, gamma=gamma, gae_lambda=gae_lambda)
    returns = advantages + values
    spread = returns.var()
    explained = {"explained_variance": float(1.0 - advantages.var() / spread)} if spread > 0 else {}
    return replace(
        prepared,
        advantages=(whiten(advantages) if normalize_advantages else advantages).astype(np.float32),
        returns=returns.astype(np.float32),
        metrics={**prepared.metrics, **explained},
    )


def gae(rewards: np.ndarray, values: np.ndarray, last: np.ndarray, *, gamma: float, gae_lambda: float) -> np.ndarray:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t, with V = A = 0 after the end (arXiv:1506.02438, eq. 16).

    Columns [N] float64 of sequences one after the other; `last`: where each one's last token is.

    Worked, γ = 1, λ = 0.5, rewards [0, 1], V [0.4, 0.6]: δ = [0.2, 0.4], A = [0.2 + 0.5 · 0.4, 0.4] = [0.4, 0.4].
    """
    advantages, ends = np.zeros(len(values)), set(last.tolist())
    next_value = next_advantage = 0.0
    for t, reward, value in reversed([*zip(range(len(values)), rewards.tolist(), values.tolist(), strict=True)]):
        if t in ends:
            next_value = next_advantage = 0.0
        next_advantage = reward + gamma * next_value - value + gamma * gae_lambda * next_advantage
        next_value = value
        advantages[t] = next_advantage
    return advantages

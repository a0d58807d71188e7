"""TrainingMetrics: what one iteration of a library algorithm (`algorithms.py`) has come to. No MLX."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from mlx_parallm.types import Rollout


@dataclass(frozen=True)
class TrainingMetrics:
    """None: not known, or not of this algorithm. Rewards and lengths (sampled tokens) are of all that was collected for
    the iteration, also of groups without variance, which nothing is learned from."""

    iteration: int
    loss: float | None
    policy_loss: float | None
    value_loss: float | None
    kl: float | None  # to the reference, nats a token
    entropy: float | None  # nats a token
    grad_norm: float | None  # before clipping
    learning_rate: float
    reward_mean: float
    reward_std: float  # population
    reward_min: float
    reward_max: float
    num_trajectories: int
    length_mean: float
    length_std: float
    seconds: float
    line: Mapping[str, Any]  # of metrics.jsonl (rl_training/metrics.py), with everything else

    @property
    def trajectories_per_second(self) -> float:
        return self.num_trajectories / self.seconds

    @classmethod
    def of(cls, line: Mapping[str, Any], rollouts: Sequence[Rollout]) -> "TrainingMetrics":
        rewards = [rollout.reward for rollout in rollouts] or [math.nan]
        lengths = [rollout.sampled_tokens for rollout in rollouts] or [0]
        return cls(
            iteration=line["step"],
            loss=line["loss"],
            policy_loss=line.get("policy_loss"),
            value_loss=line.get("value_loss"),
            kl=line["kl"],
            entropy=line["entropy"],
            grad_norm=line["grad_norm"],
            learning_rate=line["learning_rate"],
            reward_mean=fmean(rewards),
            reward_std=pstdev(rewards),
            reward_min=min(rewards),
            reward_max=max(rewards),
            num_trajectories=len(rollouts),
            length_mean=fmean(lengths),
            length_std=pstdev(lengths),
            seconds=line["time_rollout_s"] + line["time_train_s"] + line["time_publish_s"],
            line=line,
        )

"""Adds up what `BatchStatistics` tells about the groups of one step."""

import math
from collections import defaultdict

from mlx_parallm.rl_training.batch import BatchStatistics
from mlx_parallm.types import RolloutGroup


class StatisticsCollector:
    """One step's worth; a new one for each step."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._by_environment: dict[str, list[float]] = defaultdict(list)
        self._lengths: list[int] = []
        self._truncated = 0
        self._groups = 0
        self._without_variance = 0
        self._staleness: list[int] = []
        self._stale = 0

    def add_trained(self, group: RolloutGroup, staleness: int) -> None:
        self._staleness.append(staleness)
        self._add(group)

    def add_without_variance(self, group: RolloutGroup) -> None:
        self._without_variance += 1
        self._add(group)

    def add_stale(self) -> None:
        self._stale += 1

    def _add(self, group: RolloutGroup) -> None:
        self._groups += 1
        rewards = [rollout.reward for rollout in group.rollouts]
        self._rewards += rewards
        self._by_environment[group.environment] += rewards
        self._lengths += [rollout.sampled_tokens for rollout in group.rollouts]
        self._truncated += sum(rollout.stop_reason == "length" for rollout in group.rollouts)

    def result(self) -> BatchStatistics:
        count = len(self._rewards)
        if count == 0:
            return BatchStatistics(dropped_stale=self._stale)
        mean = math.fsum(self._rewards) / count
        return BatchStatistics(
            groups=self._groups,
            sequences=count,
            reward_mean=mean,
            reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in self._rewards) / count),
            groups_without_variance=self._without_variance / self._groups,
            truncated_fraction=self._truncated / count,
            completion_tokens_mean=sum(self._lengths) / count,
            staleness=sum(self._staleness) / max(len(self._staleness), 1),
            staleness_max=max(self._staleness, default=0),
            dropped_stale=self._stale,
            reward_by_environment={
                name: math.fsum(rewards) / len(rewards) for name, rewards in sorted(self._by_environment.items())
            },
        )

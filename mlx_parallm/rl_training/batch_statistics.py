"""Adds up what `BatchStatistics` tells about the groups of one step."""

import math
from collections import defaultdict

from mlx_parallm.rl_training.batch import BatchStatistics
from mlx_parallm.types import RolloutGroup

WRONG, RIGHT = 0.0, 1.0
ROUNDING = 1e-6


class StatisticsCollector:
    """One step's worth; a new one for each step."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._by_environment: dict[str, list[float]] = defaultdict(list)
        self._parts: dict[str, list[float]] = defaultdict(list)
        self._lengths: list[int] = []
        self._surprise = 0.0
        self._ends: list[str | None] = []
        self._all_wrong = self._all_right = 0
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

    @property
    def stale(self) -> int:
        """Groups that were too old."""
        return self._stale

    def _add(self, group: RolloutGroup) -> None:
        self._groups += 1
        rewards = [rollout.reward for rollout in group.rollouts]
        self._rewards += rewards
        self._by_environment[group.environment] += rewards
        for rollout in group.rollouts:
            for name, score in rollout.scores.items():
                if name != "reward":
                    self._parts[name].append(score)
        self._lengths += [rollout.sampled_tokens for rollout in group.rollouts]
        self._surprise -= math.fsum(math.fsum(rollout.logprobs) for rollout in group.rollouts)  # 0 where not sampled
        self._ends += [rollout.stop_reason for rollout in group.rollouts]
        self._all_wrong += max(rewards) <= WRONG + ROUNDING
        self._all_right += min(rewards) >= RIGHT - ROUNDING

    def result(self) -> BatchStatistics:
        count = len(self._rewards)
        if count == 0:
            return BatchStatistics(dropped_stale=self._stale)
        mean = math.fsum(self._rewards) / count
        known = [end for end in self._ends if end is not None]
        return BatchStatistics(
            groups=self._groups,
            sequences=count,
            reward_mean=mean,
            reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in self._rewards) / count),
            groups_without_variance=self._without_variance / self._groups,
            groups_all_wrong=self._all_wrong / self._groups,
            groups_all_right=self._all_right / self._groups,
            truncated_fraction=self._ends.count("length") / count,
            eos_fraction=known.count("stop") / len(known) if known else None,
            completion_tokens_mean=sum(self._lengths) / count,
            rollout_entropy=self._surprise / max(sum(self._lengths), 1),
            staleness=sum(self._staleness) / max(len(self._staleness), 1),
            staleness_max=max(self._staleness, default=0),
            dropped_stale=self._stale,
            reward_by_environment={
                name: math.fsum(rewards) / len(rewards) for name, rewards in sorted(self._by_environment.items())
            },
            parts={name: math.fsum(scores) / len(scores) for name, scores in sorted(self._parts.items())},
        )

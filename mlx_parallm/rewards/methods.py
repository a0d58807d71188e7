"""Methods that combine the named parts of trajectories to one reward each. No MLX.

absolute   the weighted sum of its parts: each trajectory on its own
relative   the rank of that sum among the others, equal sums sharing their mean rank, as a z-score
gdpo       the weighted sum of its parts' z-scores, each among the others (sample deviation)
pareto     every part is a separate objective: 1 on the first front, less on each further one

`combine` does it for one group; a `RewardComputer` for trajectories of many, from Python or named
in `rewards`.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev, stdev
from typing import Any, ClassVar, get_args

import numpy as np

from mlx_parallm.config.environment import Method
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.types import MAX_REWARD, Trajectory, are_equal, has_score

METHODS: tuple[Method, ...] = get_args(Method)
GDPO_EPSILON = 1e-4

Parts = Mapping[str, float | None]  # None: the part does not apply
Objective = Callable[[Trajectory], float | None]


def average_ranks(values_N: Sequence[float]) -> list[float]:
    """Ranks from 1 (the smallest) to N; equal values share the mean of theirs. NaN, which is no
    score, stays NaN, and N counts the others."""
    if not values_N:
        return []
    if any(map(math.isnan, values_N)):
        return _of_numbers(average_ranks, values_N)
    _, which, counts = np.unique(
        np.asarray(values_N, np.float64), return_inverse=True, return_counts=True
    )
    mean_ranks = counts.cumsum() - (counts - 1) / 2
    return [float(rank) for rank in mean_ranks[which]]


def standardize(values_N: Sequence[float]) -> list[float]:
    """(value - mean) / population standard deviation; zeros if all are equal up to rounding. NaN,
    which is no score, stays NaN, and is in neither."""
    if any(map(math.isnan, values_N)):
        return _of_numbers(standardize, values_N)
    if not values_N or are_equal(values_N):
        return [0.0] * len(values_N)
    values = np.asarray(values_N, np.float64)
    return [float(value) for value in (values - values.mean()) / values.std()]


def _of_numbers(
    function: Callable[[Sequence[float]], list[float]], values_N: Sequence[float]
) -> list[float]:
    results = iter(function([value for value in values_N if not math.isnan(value)]))
    return [value if math.isnan(value) else next(results) for value in values_N]


def standardized_parts(parts_N: Sequence[Parts], names: Sequence[str]) -> list[dict[str, float]]:
    """Return the parts with (value - mean) / (standard deviation of a sample + 1e-4) in the place
    of each value; 0 where all are equal up to rounding. A part that does not apply is in neither.

    GDPO (arXiv:2601.05242), eq. 4; 1e-4 as TRL's. Worked, two answers: values 0 and 1 → ∓0.707007.
    """
    results: list[dict[str, float]] = [{} for _ in parts_N]
    for name in names:
        values = {
            n: value for n, parts in enumerate(parts_N) for _, value in _applicable(parts, [name])
        }
        equal = len(values) < 2 or are_equal(list(values.values()))
        std = 0.0 if equal else stdev(values.values())
        for n, value in zip(values, standardize(list(values.values())), strict=True):
            scale = math.sqrt((len(values) - 1) / len(values)) * std / (std + GDPO_EPSILON)
            results[n][name] = value * scale
    return results


def pareto_ranks(objectives_N_K: Sequence[Sequence[float]]) -> list[int]:
    """The front of each point, 0 for those that none dominates. Larger is better in every
    objective.

    A point dominates another if it is at least as good in all objectives and better in one; so
    equal points lie on one front. Front n holds points that none dominates once the fronts before
    it are taken away (non-dominated sorting, Deb et al. 2002, NSGA-II). O(N² K) memory; a front
    costs O(N²). A point with NaN is on no front: -1.
    """
    if not objectives_N_K:
        return []
    every = np.asarray(objectives_N_K, np.float64)
    whole = ~np.isnan(every).reshape(len(every), -1).any(axis=-1)
    points = every[whole]
    at_least = (points[:, None, :] >= points[None, :, :]).all(axis=-1)  # [N, N]
    dominates = at_least & ~at_least.T
    ranks = np.full(len(points), -1)
    rank = 0
    while (left := ranks < 0).any():
        dominated = (dominates & left[:, None]).any(axis=0)
        ranks[left & ~dominated] = rank
        rank += 1
    all_ranks = np.full(len(every), -1)
    all_ranks[whole] = ranks
    return [int(rank) for rank in all_ranks]


def pareto_rewards(objectives_N_K: Sequence[Sequence[float]]) -> list[float]:
    """1 - front / number of fronts: 1 on the first, so 1 for all if there is one front. NaN for
    a point with NaN."""
    ranks = pareto_ranks(objectives_N_K)
    fronts = max(ranks, default=0) + 1
    return [math.nan if rank < 0 else 1 - rank / fronts for rank in ranks]


def objectives_of(parts_N: Sequence[Parts], weights: Mapping[str, float]) -> dict[int, list[float]]:
    """Return the Pareto objectives by the position of their trajectory: its parts times their
    weights, so that a part of negative weight is a cost, and one of weight 0 is none.
    Trajectories that lack one of them are left out."""
    names = [
        name
        for name, weight in weights.items()
        if weight and any(_applies(parts, name) for parts in parts_N)
    ]
    return {
        position: [weights[name] * value for name, value in _applicable(parts, names)]
        for position, parts in enumerate(parts_N)
        if names and all(_applies(parts, name) for name in names)
    }


def combine(
    method: Method, parts_N: Sequence[Parts], weights: Mapping[str, float]
) -> list[float | None]:
    """Return one reward for each trajectory of a comparison; None: nothing could score it."""
    if method == "pareto":
        objectives = objectives_of(parts_N, weights)
        ranked, rewards = list(objectives), pareto_rewards(list(objectives.values()))
    else:
        ranked = [
            position
            for position, parts in enumerate(parts_N)
            if any(_applies(parts, name) for name in weights)
        ]
        if method == "gdpo":
            parts_N = standardized_parts(parts_N, list(weights))
        applicable = (_applicable(parts_N[position], weights) for position in ranked)
        rewards = [
            math.fsum(weights[name] * value for name, value in parts) for parts in applicable
        ]
        if method == "relative":
            rewards = standardize(average_ranks(rewards))
    by_position = dict(zip(ranked, rewards, strict=True))
    return [by_position.get(position) for position in range(len(parts_N))]


def _applies(parts: Parts, name: str) -> bool:
    return parts.get(name) is not None


def _applicable(
    parts: Parts, names: Sequence[str] | Mapping[str, float]
) -> list[tuple[str, float]]:
    return [(name, value) for name in names if (value := parts.get(name)) is not None]


class RewardComputer(ABC):
    """Scores trajectories after they are collected. A subclass computes named parts, which have
    weights.

    Any object with `compute_rewards(trajectories, method)` that returns one number for each can
    are in its place.
    """

    default_method: ClassVar[Method] = "absolute"

    def __init__(self, weights: Mapping[str, float], *, normalize: bool = False) -> None:
        """`normalize`: the rewards of one call have mean 0 and standard deviation 1 (population)
        under any method.

        Raises ConfigError: a weight that is not a number, or beyond ±MAX_REWARD."""
        for name, weight in weights.items():
            if not abs(weight) <= MAX_REWARD:
                raise ConfigError(f"{type(self).__name__}: the weight of {name!r} is {weight}")
        self.weights = dict(weights)
        self.normalize = normalize

    @abstractmethod
    def compute_parts(self, trajectories: Sequence[Trajectory]) -> list[Parts]:
        """Return the parts of each trajectory by their names, unweighted; None (or NaN) where
        a part does not apply; no part at all for a trajectory that nothing may score."""

    def compute_rewards(
        self, trajectories: Sequence[Trajectory], method: Method | None = None
    ) -> list[float | None]:
        """Return one number for each trajectory; None for one to which no part applies, which is
        not compared with others. `relative`, `gdpo` and `pareto` compare the trajectories of one
        prompt (`group_id`); those that are alone in their group are compared with each other.

        Raises ConfigError: an unknown method. RolloutRejectedError: a part beyond ±MAX_REWARD.
        """
        method = method or self.default_method
        if method not in METHODS:
            raise ConfigError(f"no reward method {method!r}: choose one of {', '.join(METHODS)}")
        rewards: list[float | None] = [None] * len(trajectories)
        parts = self._checked_parts(trajectories)
        for together in compared_together(trajectories):
            scores = combine(method, [parts[n] for n in together], self.weights)
            for n, score in zip(together, scores, strict=True):
                rewards[n] = score
        if not self.normalize:
            return rewards
        normalized = standardize([math.nan if reward is None else reward for reward in rewards])
        return [None if math.isnan(reward) else reward for reward in normalized]

    def compute_objective_statistics(
        self, trajectories: Sequence[Trajectory]
    ) -> dict[str, dict[str, float]]:
        """Return mean, std (population), min and max of each part over the trajectories that it
        applies to."""
        parts = self._checked_parts(trajectories)
        statistics = {}
        for name in self.weights:
            if values := [value for part in parts if (value := part.get(name)) is not None]:
                spread = {"std": pstdev(values), "min": min(values), "max": max(values)}
                statistics[name] = {"mean": fmean(values)} | spread
        return statistics

    def _checked_parts(self, trajectories: Sequence[Trajectory]) -> list[Parts]:
        parts: list[Parts] = [
            {name: value if has_score(value) else None for name, value in scores.items()}
            for scores in self.compute_parts(trajectories)
        ]
        for scores in parts:
            for name, value in scores.items():
                if value is not None and not abs(value) <= MAX_REWARD:
                    raise RolloutRejectedError(
                        f"{type(self).__name__}: {name} is {value}, not a number of at most"
                        f" ±{MAX_REWARD:g}"
                    )
        return parts


def compared_together(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Positions of the trajectories that are compared with each other."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for position, trajectory in enumerate(trajectories):
        groups[getattr(trajectory, "group_id", "")].append(position)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    return [group for group in groups.values() if len(group) > 1] + ([alone] if alone else [])

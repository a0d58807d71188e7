"""From the named parts of trajectories that are compared to the one number each that is trained on. No MLX.

absolute   the weighted sum of its parts: each trajectory on its own
relative   the rank of that sum among the others, equal sums sharing their mean rank, as a z-score
pareto     every part is an objective of its own: 1 on the first front, less on each further one
"""

import math
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np

from mlx_parallm.config.environment import Method

METHODS: tuple[Method, ...] = get_args(Method)

Parts = Mapping[str, float | None]  # None: the part does not apply


def average_ranks(values_N: Sequence[float]) -> list[float]:
    """Ranks from 1 (the smallest) to N; equal values share the mean of theirs."""
    if not values_N:
        return []
    _, which, counts = np.unique(np.asarray(values_N, np.float64), return_inverse=True, return_counts=True)
    mean_ranks = counts.cumsum() - (counts - 1) / 2
    return [float(rank) for rank in mean_ranks[which]]


def standardize(values_N: Sequence[float]) -> list[float]:
    """(value - mean) / population standard deviation; zeros where all are equal."""
    if not values_N or min(values_N) == max(values_N):
        return [0.0] * len(values_N)
    values = np.asarray(values_N, np.float64)
    return [float(value) for value in (values - values.mean()) / values.std()]


def pareto_ranks(objectives_N_K: Sequence[Sequence[float]]) -> list[int]:
    """The front of each point, 0 for those that none dominates. Larger is better in every objective.

    A point dominates another if it is at least as good in all objectives and better in one; so equal points lie on one
    front. Front n is what nothing dominates once the fronts before it are taken away (non-dominated sorting, Deb et al.
    2002, NSGA-II). O(N² K) memory; a front costs O(N²).
    """
    if not objectives_N_K:
        return []
    points = np.asarray(objectives_N_K, np.float64)
    at_least = (points[:, None, :] >= points[None, :, :]).all(axis=-1)  # [N, N]
    dominates = at_least & ~at_least.T
    ranks = np.full(len(points), -1)
    rank = 0
    while (left := ranks < 0).any():
        dominated = (dominates & left[:, None]).any(axis=0)
        ranks[left & ~dominated] = rank
        rank += 1
    return [int(rank) for rank in ranks]


def pareto_rewards(objectives_N_K: Sequence[Sequence[float]]) -> list[float]:
    """1 - front / number of fronts: 1 on the first, so 1 for all where there is one front."""
    ranks = pareto_ranks(objectives_N_K)
    fronts = max(ranks, default=0) + 1
    return [1 - rank / fronts for rank in ranks]


def objectives_of(parts_N: Sequence[Parts], weights: Mapping[str, float]) -> dict[int, list[float]]:
    """Pareto objectives by the position of their trajectory: its parts times their weights, so that a part of negative
    weight is a cost, and one of weight 0 is none. Trajectories without one that others have are left out."""
    names = [name for name, weight in weights.items() if weight and any(_applies(parts, name) for parts in parts_N)]
    return {
        position: [weights[name] * value for name, value in _known(parts, names)]
        for position, parts in enumerate(parts_N)
        if names and all(_applies(parts, name) for name in names)
    }


def combine(method: Method, parts_N: Sequence[Parts], weights: Mapping[str, float]) -> list[float | None]:
    """One reward for each of the trajectories that are compared with each other; None: nothing could score it."""
    if method == "pareto":
        objectives = objectives_of(parts_N, weights)
        ranked, rewards = list(objectives), pareto_rewards(list(objectives.values()))
    else:
        ranked = [position for position, parts in enumerate(parts_N) if any(_applies(parts, name) for name in weights)]
        known = (_known(parts_N[position], weights) for position in ranked)
        rewards = [math.fsum(weights[name] * value for name, value in parts) for parts in known]
        if method == "relative":
            rewards = standardize(average_ranks(rewards))
    by_position = dict(zip(ranked, rewards, strict=True))
    return [by_position.get(position) for position in range(len(parts_N))]


def _applies(parts: Parts, name: str) -> bool:
    return parts.get(name) is not None


def _known(parts: Parts, names: Sequence[str] | Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, value) for name in names if (value := parts.get(name)) is not None]

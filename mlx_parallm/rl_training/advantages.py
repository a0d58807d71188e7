"""Group advantages: how much better each rollout of a group did than its siblings. Plain Python, no MLX.

rewards of a group → one number per rollout, or None when the group has nothing to say (all rewards equal)
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from mlx_parallm.types import RolloutGroup

STD_EPSILON = 1e-8
EQUAL_TOLERANCE = 1e-6  # of the largest reward (at least 1): rounding noise divided by its own size is noise amplified

AdvantageKind = Literal["std", "mean"]
Estimator = Callable[[Sequence[float]], tuple[float, ...] | None]


def group_advantages(rewards: Sequence[float], kind: AdvantageKind = "std") -> tuple[float, ...] | None:
    """(r - mean) / (std + 1e-8) with the population's std (GRPO, arXiv:2402.03300), or r - mean (Dr. GRPO,
    arXiv:2503.20783). None for rewards that are equal up to rounding.

    Worked: [1, 0, 0] has mean 1/3 and population std 0.471405 → std: [1.414214, -0.707107, -0.707107],
    mean: [0.666667, -0.333333, -0.333333].
    """
    if max(rewards) - min(rewards) <= EQUAL_TOLERANCE * max(1.0, *(abs(reward) for reward in rewards)):
        return None
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return tuple(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return tuple(value / (std + STD_EPSILON) for value in centred)


def token_advantages(group: RolloutGroup, estimate: Estimator) -> tuple[tuple[float, ...], ...] | None:
    """Advantages [G][T] of every token of a group: the environment's own where it brings them, else `estimate`'s; zero
    for a rollout marked `zero_advantage`, whose reward counts in the group's mean all the same.

    None: every advantage is zero, there is nothing to learn from.
    """
    if group.advantages is None:
        estimated = estimate([rollout.reward for rollout in group.rollouts])
        if estimated is None:
            return None
        values: Sequence[float | tuple[float, ...]] = estimated
    else:
        values = group.advantages
    rows = tuple(
        (0.0,) * len(rollout.tokens)
        if rollout.zero_advantage
        else (tuple(value) if isinstance(value, Sequence) else (value,) * len(rollout.tokens))
        for value, rollout in zip(values, group.rollouts, strict=True)
    )
    return rows if any(value != 0 for row in rows for value in row) else None

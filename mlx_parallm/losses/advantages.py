"""Advantages: how much better each rollout of a group did than its siblings, or than the batch. No MLX.

rewards of a group → one number per rollout, or None when the group has nothing to say (all rewards equal)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.types import Rollout, RolloutGroup

STD_EPSILON = 1e-8
EQUAL_TOLERANCE = 1e-6  # of the largest reward (at least 1): rounding noise divided by its own size is noise amplified

AdvantageKind = Literal["std", "std_sample", "mean", "rloo", "none"]
Estimator = Callable[[Sequence[float]], tuple[float, ...] | None]


def group_advantages(
    rewards: Sequence[float], kind: AdvantageKind = "std", *, epsilon: float = STD_EPSILON
) -> tuple[float, ...] | None:
    """What the rewards of one group are worth:

    std          (r - mean) / (std + epsilon), population std (GRPO, arXiv:2402.03300)
    std_sample   the same with the sample's std, divided by G - 1 (as TRL, verl)
    mean         r - mean (Dr. GRPO, arXiv:2503.20783)
    rloo         r - mean of the others = G / (G - 1) · (r - mean) (arXiv:2402.14740)
    none         r itself (REINFORCE)

    None: all are equal up to rounding ("none": all are 0).

    Worked: [1, 0, 0] has mean 1/3 and population std 0.471405 → std: [1.414214, -0.707107, -0.707107],
    std_sample: [1.154701, -0.577350, -0.577350], mean: [0.666667, -0.333333, -0.333333], rloo: [1, -0.5, -0.5].
    """
    if kind == "none":
        return tuple(rewards) if any(rewards) else None
    if max(rewards) - min(rewards) <= EQUAL_TOLERANCE * max(1.0, *(abs(reward) for reward in rewards)):
        return None
    count = len(rewards)
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if kind in ("mean", "rloo"):
        scale = count / (count - 1) if kind == "rloo" else 1.0
        return tuple(scale * value for value in centred)
    freedom = count - 1 if kind == "std_sample" else count
    std = math.sqrt(math.fsum(value * value for value in centred) / freedom)
    return tuple(value / (std + epsilon) for value in centred)


def raw_rewards(rewards: Sequence[float]) -> tuple[float, ...]:
    """The rewards themselves, of every group: for algorithms whose baseline is the batch or a value network, to which a
    group of equal rewards has something to say."""
    return tuple(rewards)


def whiten(values: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(var + 1e-8) over all of them, sample variance, as verl and OpenRLHF do. [N] → [N] float64.

    One value has no spread: it becomes 0. Worked: [1, 0, 0.5] → mean 0.5, variance 0.25 → [1, -1, 0].
    """
    centred = np.asarray(values, np.float64) - np.mean(values, dtype=np.float64)
    variance = np.square(centred).sum() / max(centred.size - 1, 1)
    return np.asarray(centred / np.sqrt(variance + 1e-8))


def to_go(values: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Sums from each token to its sequence's end; sequences of these lengths lie end to end. [N] → [N] float64.

    Worked: [1, 2, 3, 4] of lengths 3 and 1 → [6, 5, 3, 4].
    """
    parts = np.split(np.asarray(values, np.float64), np.cumsum(lengths)[:-1])
    return np.concatenate([part[::-1].cumsum()[::-1] for part in parts])


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """What a completion's reward loses for its length: 0 up to max_length - buffer tokens, rising in a straight line to
    1 at max_length, and 1 beyond (the soft punishment of DAPO, arXiv:2503.14476, eq. 13, with its sign turned).

    Worked, max_length 20, buffer 4: 16 → 0, 17 → 0.25, 20 → 1, 25 → 1.
    """
    return min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)


@dataclass(frozen=True)
class Shaping:
    """What the trainer changes of a group before it makes advantages of it.

    `overlong_buffer`: rewards lose `overlong_penalty` of the episode's sampled tokens; 0 = nothing. `mask_truncated`:
    who ran into the length limit is left out of the batch, and counts in the group's mean. `leave_out_marked`: who is
    marked `zero_advantage` is left out too, where something would be learned from an advantage of 0.
    """

    overlong_length: int = 0
    overlong_buffer: int = 0
    mask_truncated: bool = False
    leave_out_marked: bool = False

    @classmethod
    def of(cls, config: RLTrainingConfig, *, leave_out_marked: bool) -> "Shaping":
        """`leave_out_marked`: the algorithm makes advantages of its own; a KL in the reward does so too."""
        length, buffer = config.overlong_length or 0, config.overlong_buffer
        leave_out = leave_out_marked or config.kl_in == "reward"
        return cls(length, buffer, mask_truncated=config.mask_truncated, leave_out_marked=leave_out)

    def reward(self, rollout: Rollout) -> float:
        """The one that advantages are made of; what is reported stays the environment's."""
        if not self.overlong_buffer:
            return rollout.reward
        length = rollout.sampled_tokens
        return rollout.reward - overlong_penalty(length, max_length=self.overlong_length, buffer=self.overlong_buffer)

    def leaves_out(self, rollout: Rollout) -> bool:
        truncated = self.mask_truncated and rollout.stop_reason == "length"
        return truncated or (self.leave_out_marked and rollout.zero_advantage)


PLAIN = Shaping()


def token_advantages(
    group: RolloutGroup, estimate: Estimator, shaping: Shaping = PLAIN
) -> tuple[tuple[float, ...], ...] | None:
    """Advantages [G][T] of every token of a group: the environment's own where it brings them, else `estimate`'s; zero
    for a rollout marked `zero_advantage` or left out, whose reward counts in the group's mean all the same.

    None: there is nothing to learn from. `estimate` says so, nobody is left, or the environment's own are all 0.
    """
    silent = [rollout.zero_advantage or shaping.leaves_out(rollout) for rollout in group.rollouts]
    if all(silent):
        return None
    values: Sequence[float | tuple[float, ...]] | None = group.advantages
    if values is None and (values := estimate([shaping.reward(rollout) for rollout in group.rollouts])) is None:
        return None
    rows = tuple(
        (0.0,) * len(rollout.tokens)
        if is_silent
        else (tuple(value) if isinstance(value, Sequence) else (value,) * len(rollout.tokens))
        for value, rollout, is_silent in zip(values, group.rollouts, silent, strict=True)
    )
    return rows if group.advantages is None or any(value != 0 for row in rows for value in row) else None

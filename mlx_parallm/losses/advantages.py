"""Advantages: how much better each rollout of a group did than its siblings, or than the batch. No
MLX.

rewards of a group → one number per rollout, or None when there is nothing to learn from it (all
rewards equal). With credit for each turn: rewards of the turns → one number per turn.

A new kind: its line here, and its name in `ADVANTAGES` of config/algorithm.py (docs/extending.md).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal, get_args

import numpy as np

from mlx_parallm.errors import ConfigError
from mlx_parallm.types import Rollout, RolloutGroup, are_equal, has_score

STD_EPSILON = 1e-8
LARGEST_SUMMED = 1e100  # squares and sums of larger rewards leave float64

BATCH_EPSILON = 1e-4  # TRL's
MAXRL_EPSILON = 1e-6  # of the authors' code

AdvantageKind = Literal["std", "std_sample", "mean", "rloo", "maxrl", "none", "std_batch", "batch"]
KINDS = get_args(AdvantageKind)
OverBatch = Literal["std_batch", "batch"]
OVER_BATCH = get_args(OverBatch)
Estimator = Callable[[Sequence[float]], tuple[float, ...] | None]


def group_advantages(
    rewards: Sequence[float | None], kind: AdvantageKind = "std", *, epsilon: float = STD_EPSILON
) -> tuple[float, ...] | None:
    """One advantage for each reward of a group. None or NaN stands for an answer without a score:
    its advantage is 0, and it is in no mean, deviation or number.

    std          (r - mean) / (std + epsilon), population std (GRPO, arXiv:2402.03300)
    std_sample   the same with the sample's std, divided by G - 1 (as TRL, verl)
    mean         r - mean (Dr. GRPO, arXiv:2503.20783)
    rloo         r - mean of the others = G / (G - 1) · (r - mean) (arXiv:2402.14740)
    maxrl        (r - mean) / (mean + 1e-6), of rewards from 0 on (MaxRL, arXiv:2602.02710)
    none         r itself (REINFORCE)
    std_batch    r - mean, which `over_batch` divides by the std of the step's rewards
    batch        r itself, which `over_batch` compares with the step's rewards

    None: all are equal up to rounding ("none": all are 0; "batch": never). Raises
    ValueError: another kind. ConfigError: "maxrl" of a reward below 0.

    Worked: [1, 0, 0] has mean 1/3 and population std 0.471405 → std: [1.414214, -0.707107,
    -0.707107],
    std_sample: [1.154701, -0.577350, -0.577350], mean: [0.666667, -0.333333, -0.333333], rloo: [1,
    -0.5, -0.5], maxrl: [1.999994, -0.999997, -0.999997].
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of advantage; there are {', '.join(KINDS)}")
    scored = [reward for reward in rewards if has_score(reward)]
    values = _group_advantages(scored, kind, epsilon) if scored else None
    if values is None or len(scored) == len(rewards):
        return values
    of_scored = iter(values)
    return tuple(next(of_scored) if has_score(reward) else 0.0 for reward in rewards)


def _group_advantages(
    rewards: Sequence[float], kind: AdvantageKind, epsilon: float
) -> tuple[float, ...] | None:
    if kind == "batch":
        return tuple(rewards)
    if kind == "none":
        return tuple(rewards) if any(rewards) else None
    largest = max(abs(reward) for reward in rewards)
    if are_equal(rewards):
        return None
    unit = max(1.0, largest / LARGEST_SUMMED)
    rewards = [reward / unit for reward in rewards]
    count = len(rewards)
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if kind == "maxrl":
        if min(rewards) < 0:
            raise ConfigError(
                f'advantage = "maxrl" divides by the mean of rewards from 0 on: {min(rewards):g} is'
                " below"
            )
        return tuple(value / (mean + MAXRL_EPSILON) for value in centred)
    if kind in ("mean", "rloo", "std_batch"):
        scale = count / (count - 1) if kind == "rloo" else 1.0
        return tuple(scale * value * unit for value in centred)
    freedom = count - 1 if kind == "std_sample" else count
    std = math.sqrt(math.fsum(value * value for value in centred) / freedom)
    return tuple(value / (std + epsilon) for value in centred)


def raw_rewards(rewards: Sequence[float]) -> tuple[float, ...]:
    """The rewards themselves. For algorithms whose baseline is the batch or a value network,
    which also learn from a group of equal rewards."""
    return tuple(rewards)


def whiten(values: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(var + 1e-8) over all of them, sample variance, as verl and OpenRLHF do. [N]
    → [N] float64.

    One value has no spread: it becomes 0. Worked: [1, 0, 0.5] → mean 0.5, variance 0.25 → [1, -1,
    0].
    """
    centred = np.asarray(values, np.float64) - np.mean(values, dtype=np.float64)
    variance = np.square(centred).sum() / max(centred.size - 1, 1)
    return np.asarray(centred / np.sqrt(variance + 1e-8))


def to_go(values: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """The sum from each token to its sequence's end; sequences of these lengths lie end to end. [N]
    → [N] float64.

    Worked: [1, 2, 3, 4] of lengths 3 and 1 → [6, 5, 3, 4].
    """
    parts = np.split(np.asarray(values, np.float64), np.cumsum(lengths)[:-1])
    return np.concatenate([part[::-1].cumsum()[::-1] for part in parts])


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """The reward that a completion loses for its length: 0 up to max_length - buffer tokens, rising
    linearly to 1 at max_length, and 1 beyond (the soft punishment of DAPO, arXiv:2503.14476, eq.
    13, with its sign turned).

    Worked, max_length 20, buffer 4: 16 → 0, 17 → 0.25, 20 → 1, 25 → 1.
    """
    return min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)


LengthPenalty = Literal["linear", "kimi"]


def length_penalties(
    rewards: Sequence[float], lengths: Sequence[int], kind: LengthPenalty
) -> list[float]:
    """Return what each answer of a group loses for its length, against the others'; its tokens are
    the sampled ones.

    linear   mean reward · length / the longest (prime-rl: a group that fails loses nothing)
    kimi     (length - the shortest) / (the longest - the shortest) - 1/2, and at least 0 if its
             reward is not above 0 (Kimi k1.5, arXiv:2501.12599, section 2.3.3); 0 if all are equal

    Worked, rewards 1, 1, 0, lengths 10, 20, 40: linear 1/6, 1/3, 2/3; kimi -1/2, -1/6, 1/2. kimi of
    rewards 0, 1, 1: 0, -1/6, 1/2.
    """
    shortest, longest = min(lengths), max(lengths)
    if kind == "linear":
        mean = math.fsum(rewards) / len(rewards)
        return [max(mean, 0.0) * length / max(longest, 1) for length in lengths]
    if shortest == longest:
        return [0.0] * len(lengths)
    places = [(length - shortest) / (longest - shortest) - 0.5 for length in lengths]
    return [
        place if reward > 0 else max(place, 0.0)
        for place, reward in zip(places, rewards, strict=True)
    ]


def best_and_worst(rewards: Sequence[float]) -> tuple[float, ...] | None:
    """Return 1 for the best of a group, -1 for the worst, 0 for the others; of equal ones the
    first counts. None: all are equal up to rounding.

    Worked: [0.2, 0.9, 0.9, 0.1] → [0, 1, 0, -1].
    """
    high, low = max(rewards), min(rewards)
    if are_equal(rewards):
        return None
    places = {rewards.index(low): -1.0, rewards.index(high): 1.0}
    return tuple(places.get(place, 0.0) for place in range(len(rewards)))


def by_sign(
    rewards: Sequence[float], *, weights: tuple[float, float] = (1.0, 1.0)
) -> tuple[float, ...] | None:
    """Return the label and weight of each answer: weights[0] for a reward above 0, -weights[1] for
    one below, 0 for 0. None: no answer has a label.

    Worked, weights (1, 2): [0.5, 0, -0.1] → [1, 0, -2].
    """
    labels = tuple(
        0.0 if reward == 0 else weights[0] if reward > 0 else -weights[1] for reward in rewards
    )
    return labels if any(labels) else None


@dataclass(frozen=True)
class Shaping:
    """Changes to a group before its advantages are computed. `step.algorithms.shaping_of` completes
    it.

    `overlong_buffer`: rewards lose `overlong_penalty` of the episode's sampled tokens; 0 = nothing.
    `mask_truncated`: no token of a rollout that reached the length limit is trained on, but it
    counts in the group's mean, and as a sequence of loss 0 in the means over sequences: a batch has
    as many sequences and updates with it as without (TRL).
    `leave_out_marked`: rollouts marked `zero_advantage` are left out too, if the algorithm would
    learn from an advantage of 0. Answers without a score are always left out.
    `turn_gamma`: each turn gets its own advantage, of rewards discounted by this factor;
    None: an episode has one advantage.
    `length_penalty`: rewards lose this many times `length_penalties` of their group.
    `over_batch`: the advantages of groups are one step of two (`over_batch`).
    """

    overlong_length: int
    overlong_buffer: int
    mask_truncated: bool
    leave_out_marked: bool
    turn_gamma: float | None = None
    length_penalty: tuple[LengthPenalty, float] | None = None
    over_batch: OverBatch | None = None

    def rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The rewards of a group that advantages are computed from. Metrics report the
        environment's own."""
        rewards = [rollout.reward for rollout in rollouts]
        lengths = [rollout.sampled_tokens for rollout in rollouts]
        lost = [0.0] * len(rewards)
        if self.length_penalty is not None and rewards:
            kind, weight = self.length_penalty
            lost = [weight * part for part in length_penalties(rewards, lengths, kind)]
        if self.overlong_buffer:
            limits = {"max_length": self.overlong_length, "buffer": self.overlong_buffer}
            lost = [
                part + overlong_penalty(length, **limits)
                for part, length in zip(lost, lengths, strict=True)
            ]
        return [reward - part for reward, part in zip(rewards, lost, strict=True)]

    def leaves_out(self, rollout: Rollout) -> bool:
        truncated = self.mask_truncated and rollout.stop_reason == "length"
        marked = self.leave_out_marked and rollout.zero_advantage
        return truncated or marked or not rollout.is_scored

    def credits_turns(self, group: RolloutGroup) -> bool:
        """Whether each turn of a group gets its own advantage: all its scored rollouts have
        rewards of their turns, and no other source made their advantages."""
        return (
            self.turn_gamma is not None
            and group.advantages is None
            and all(rollout.turn_rewards for rollout in group.scored)
        )


PLAIN = Shaping(0, 0, mask_truncated=False, leave_out_marked=False)


def token_advantages(
    group: RolloutGroup, estimate: Estimator, shaping: Shaping = PLAIN
) -> tuple[tuple[float, ...], ...] | None:
    """Advantages [G][T] of every token of a group: the environment's own if it brings them, else
    `estimate`'s. Zero for a rollout marked `zero_advantage` or left out, whose reward still counts
    in the group's mean; one without a score is zero and counts nowhere.

    T is the length of the rollout; where turns get their own advantages, that of all its
    segments, end to end (`by_segment` cuts a row).

    None: there is nothing to learn from (`estimate` returned None, no rollout is left, or the
    environment's are all 0).
    """
    silent = [rollout.zero_advantage or shaping.leaves_out(rollout) for rollout in group.rollouts]
    if all(silent):
        return None
    if shaping.credits_turns(group):
        return _turn_rows(group, estimate, shaping, silent)
    values: Sequence[float | tuple[float, ...]] | None = group.advantages
    if values is None:
        of_scored = estimate(shaping.rewards(group.scored))
        if of_scored is None:
            return None
        rest = iter(of_scored)
        values = [next(rest) if rollout.is_scored else 0.0 for rollout in group.rollouts]
    rows = tuple(
        (0.0,) * len(rollout.tokens)
        if is_silent
        else (tuple(value) if isinstance(value, Sequence) else (value,) * len(rollout.tokens))
        for value, rollout, is_silent in zip(values, group.rollouts, silent, strict=True)
    )
    return (
        rows
        if group.advantages is None or any(value != 0 for row in rows for value in row)
        else None
    )


def over_batch(
    groups: Sequence[RolloutGroup],
    rows: Sequence[tuple[tuple[float, ...], ...] | None],
    shaping: Shaping,
) -> list[tuple[tuple[float, ...], ...] | None]:
    """Advantages of a step's groups, as `token_advantages` made them, over the rewards of all its
    scored rollouts.

    std_batch    divided by (std + 1e-4): (r - mean of the group) / std of the step
    batch        (r - mean of the step) / (std of the step + 1e-4)

    The std is of a sample. These are TRL's scale_rewards = "batch" and the last step of its
    multi_objective_aggregation = "normalize_then_sum" (GDPO, arXiv:2601.05242, eq. 6). Groups whose
    advantages an environment brings keep them, and their rewards do not count; nor does a rollout
    that is left out get any. Where turns have their own advantages, a rollout counts with the
    rewards to go of its turns.

    Worked: groups [1, 0] and [4, 1] have the mean 1.5 and the std 1.732051 → std_batch [0.288658,
    -0.288658], [0.865976, -0.865976]; batch [-0.288658, -0.865976], [1.443292, -0.288658].
    Turns to go [3, 2] and [1, 1] beside the group [1, 0]: the std of 3, 2, 1, 1, 1, 0 is 1.032796 →
    std_batch [0.968152, 0.484076] and [-0.968152, -0.484076], ±0.484076.
    """
    kind = shaping.over_batch
    if kind is None:
        return list(rows)
    compared = [group.advantages is None for group in groups]
    rewards = [
        reward
        for group, is_compared in zip(groups, compared, strict=True)
        if is_compared
        for reward in _compared_numbers(group, shaping)
    ]
    unit = max(1.0, max(map(abs, rewards), default=0.0) / LARGEST_SUMMED)
    mean = math.fsum(reward / unit for reward in rewards) / max(len(rewards), 1)
    squares = math.fsum((reward / unit - mean) ** 2 for reward in rewards)
    equal = not rewards or are_equal(rewards)
    std = 0.0 if equal else math.sqrt(squares / (len(rewards) - 1))
    base = mean if kind == "batch" else 0.0

    def scaled(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple((value / unit - base) / (std + BATCH_EPSILON) for value in row)

    results: list[tuple[tuple[float, ...], ...] | None] = []
    for group, of_group, is_compared in zip(groups, rows, compared, strict=True):
        if of_group is None or not is_compared:
            results.append(of_group)
            continue
        silent = [
            rollout.zero_advantage or shaping.leaves_out(rollout) for rollout in group.rollouts
        ]
        results.append(
            tuple(row if left else scaled(row) for row, left in zip(of_group, silent, strict=True))
        )
    return results


def by_segment(row: Sequence[float], rollout: Rollout) -> list[tuple[float, ...]]:
    """Cut a row of `token_advantages` into those of the segments, oldest first.

    A row for the last one alone came from an environment, or is one number for all tokens: then
    its last number holds for the earlier segments.
    """
    if not rollout.earlier or len(row) == len(rollout.tokens):
        earlier = [(row[-1],) * len(segment.tokens) for segment in rollout.earlier]
        return [*earlier, tuple(row)]
    ends = list(accumulate(len(segment.tokens) for segment in rollout.segments))
    return [tuple(row[start:end]) for start, end in pairwise([0, *ends])]


def turn_returns(rewards: Sequence[float], gamma: float) -> tuple[float, ...]:
    """Return the reward to go of each turn: its own and the later ones', discounted by `gamma` a
    turn.

    Worked, gamma 0.5: [1, 0, 4] → [1 + 0 + 1, 0 + 2, 4] = [2, 2, 4].
    """
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return tuple(reversed(returns))


def turn_advantages(
    returns: Sequence[Sequence[float]], estimate: Estimator
) -> tuple[tuple[float, ...], ...] | None:
    """Advantages of the turns of a group from their rewards to go. [G][turns] → [G][turns].

    Turn k is compared with turn k of the others. A turn that no other episode has is compared with
    all turns of the group. 0 if the compared ones are equal; None: they are so everywhere.

    Worked, `mean`: [[3, 1], [1]] → turns 1: 3 and 1, mean 2 → 1 and -1; turn 2 is alone: 1
    against the mean of 3, 1, 1 → -2/3.
    """
    rows = [[0.0] * len(turns) for turns in returns]
    everything = [
        (member, turn) for member, turns in enumerate(returns) for turn in range(len(turns))
    ]
    varied = False
    for turn in range(max(map(len, returns), default=0)):
        members = [member for member, turns in enumerate(returns) if len(turns) > turn]
        compared = [(member, turn) for member in members] if len(members) > 1 else everything
        values = estimate([returns[member][number] for member, number in compared])
        if values is None:
            continue
        varied = True
        for (member, number), value in zip(compared, values, strict=True):
            if number == turn:
                rows[member][turn] = value
    return tuple(map(tuple, rows)) if varied else None


def _compared_numbers(group: RolloutGroup, shaping: Shaping) -> Iterable[float]:
    """The rewards of the scored rollouts, or the rewards to go of their turns."""
    if shaping.credits_turns(group):
        return chain.from_iterable(_returns(group, shaping))
    return shaping.rewards(group.scored)


def _returns(group: RolloutGroup, shaping: Shaping) -> list[tuple[float, ...]]:
    """The rewards to go of the turns of each scored rollout."""
    gamma = shaping.turn_gamma
    assert gamma is not None
    returns = []
    for rollout, reward in zip(group.scored, shaping.rewards(group.scored), strict=True):
        *before, last = rollout.turn_rewards
        rest = reward - math.fsum(rollout.turn_rewards)
        returns.append(turn_returns([*before, last + rest], gamma))
    return returns


def _turn_rows(
    group: RolloutGroup, estimate: Estimator, shaping: Shaping, silent: Sequence[bool]
) -> tuple[tuple[float, ...], ...] | None:
    # the others are not compared, and get no advantage
    advantages = turn_advantages(_returns(group, shaping), estimate)
    if advantages is None:
        return None
    of_scored = iter(advantages)
    turns_G = [next(of_scored) if rollout.is_scored else () for rollout in group.rollouts]
    return tuple(
        (0.0,) * sum(len(segment.tokens) for segment in rollout.segments)
        if is_silent or not turns
        else _spread(turns, rollout)
        for turns, rollout, is_silent in zip(turns_G, group.rollouts, silent, strict=True)
    )


def _spread(turns: Sequence[float], rollout: Rollout) -> tuple[float, ...]:
    """Return the number of a turn for each of its tokens and for what was asked before it; what
    follows a segment's last turn has that turn's."""
    row: list[float] = []
    number = 0
    for segment in rollout.segments:
        values = turns[number : number + len(segment.turns)]
        sampled_in = [
            v for v, length in zip(values, segment.turns, strict=True) for _ in range(length)
        ]
        sampled = 0
        for is_sampled in segment.mask:
            row.append(sampled_in[min(sampled, len(sampled_in) - 1)])
            sampled += is_sampled
        number += len(segment.turns)
    return tuple(row)


def pair_advantages(
    group: RolloutGroup, estimate: Estimator, shaping: Shaping = PLAIN
) -> tuple[tuple[float, ...], ...] | None:
    """Advantages [G][T] of a group of which a pair is made: 1 at each token of the answer that
    `estimate` (`best_and_worst`) calls the best, -1 of the worst, 0 elsewhere.

    An answer is in no pair if it is marked `zero_advantage` or left out, or is several
    sequences. If the environment brings advantages, that of an answer's last token is its
    reward.

    None: no pair, because the answers are tied or fewer than two are left.
    """
    places = [
        place
        for place, rollout in enumerate(group.rollouts)
        if not (rollout.zero_advantage or shaping.leaves_out(rollout) or rollout.earlier)
    ]
    if len(places) < 2:
        return None
    advantages = group.advantages
    if advantages is None:
        rewards = shaping.rewards([group.rollouts[place] for place in places])
    else:
        values = [advantages[place] for place in places]
        rewards = [value[-1] if isinstance(value, Sequence) else value for value in values]
    if (sides := estimate(rewards)) is None:
        return None
    side_of = dict(zip(places, sides, strict=True))
    return tuple(
        (side_of.get(place, 0.0),) * len(rollout.tokens)
        for place, rollout in enumerate(group.rollouts)
    )

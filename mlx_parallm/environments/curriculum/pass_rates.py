"""PassRates: how likely an answer to each row is right, estimated while the policy learns.

Each row has a Beta posterior: a prior, and the right and wrong answers of its groups. What was
known of a row counts at most as one group beside its next one, so that a row that is learned is
soon known to be. And an answer counts half after `half_life` further policy versions, for the
policy that gave it has changed: so a row that nobody answers goes back to the prior, and is tried
again. The prior is the
distribution of the pass rates of such rows, by the first groups of rows that were not seen
(`Population`): among many hopeless rows a new one is not worth much.

What a group of n answers is expected to teach is the chance that its rewards differ, 1 - p^n -
(1 - p)^n, under the posterior. It is what GRPO learns from: a group whose rewards are equal has no
advantages, and every other one is divided by its own deviation, so that all have the same sum of
squares. For n = 2 it is 2 p (1 - p). Expected, and not Thompson's sample of p: draws.py draws rows
by it, with chance enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

PRIOR = 0.2, 0.2
"""Right and wrong answers that a row begins with. Less than 1: most rows are easy or hopeless for a
policy, so a single group of equal rewards says much."""
PRIOR_GROUPS = 4.0
"""First groups of rows that PRIOR counts as much as."""
STRENGTHS = 0.05, 2.0
"""Answers that the prior of a row is worth: least and most."""
LEAST_MEAN = 0.02
LEAST_CHANCE = 1e-6
"""Least chance that a row's rewards differ, however many answers to it were alike. What draws such
a row again is the floor (draws.py), whose share of the groups goes by no chance."""
LEAST_ANSWERS = 0.5
"""Fewer answers, as far as they still count, are none."""


@dataclass(frozen=True)
class Kinds:
    """How many rows are of which kind.

    `easy`: all answers of its next group are more likely right than not; `hopeless`: all wrong;
    `learnable`: the rest; `unseen`: no answer counts yet.
    """

    easy: int = 0
    learnable: int = 0
    hopeless: int = 0
    unseen: int = 0


class RewardRange:
    """Rewards of any size as parts of a right answer, 0 to 1.

    With `threshold` a reward of at least that is right, and any other wrong. Without one a reward
    counts by its place between the lowest and the highest that were seen, 0 and 1 among them. A
    group whose rewards are all equal has taught nothing, so its answers count as all right or all
    wrong, whichever is nearer.
    """

    def __init__(self, threshold: float | None = None) -> None:
        self._threshold, self._low, self._high = threshold, 0.0, 1.0

    def right(self, rewards: Sequence[float]) -> float:
        """Return how many of the answers count as right, of at least one finite reward each."""
        if self._threshold is not None:
            return float(sum(reward >= self._threshold for reward in rewards))
        lowest, highest = min(rewards), max(rewards)
        self._low, self._high = min(self._low, lowest), max(self._high, highest)
        half = self._high / 2 - self._low / 2  # the difference may be infinite
        if lowest == highest:
            return float(len(rewards) if lowest / 2 - self._low / 2 >= half / 2 else 0)
        return sum((reward / 2 - self._low / 2) / half for reward in rewards)


class Population:
    """The distribution of the pass rates of rows that are not known, by its first two moments.

    Of a group with k of n answers right, k / n estimates E[p], and k (k - 1) / n (n - 1) E[p²].
    """

    def __init__(self) -> None:
        right, wrong = PRIOR
        mean = right / (right + wrong)
        self._groups = 0.0
        self._sums = np.zeros(2)
        self._begin = PRIOR_GROUPS * np.array([mean, mean * (right + 1) / (right + wrong + 1)])

    def add(self, right: float, wrong: float) -> None:
        """Count the first group of a row: at least two answers."""
        answers = right + wrong
        both = right * max(right - 1, 0.0) / (answers * (answers - 1))
        self._sums += [right / answers, both]
        self._groups += 1

    def age(self, weight: float) -> None:
        """Let the groups so far count `weight` times as much."""
        self._groups *= weight
        self._sums *= weight

    def prior(self) -> tuple[float, float]:
        """Return the parameters of the Beta distribution with these moments."""
        mean, square = (self._sums + self._begin) / (self._groups + PRIOR_GROUPS)
        mean = min(max(mean, LEAST_MEAN), 1 - LEAST_MEAN)
        spread = square - mean * mean
        least, most = STRENGTHS
        strength = most if spread <= 0 else min(max((mean - square) / spread, least), most)
        return float(mean * strength), float((1 - mean) * strength)


class PassRates:
    """The posteriors of rows, for groups of `group_size`, at least 2.

    Args:
        rates: of each row, measured before, worth a group; None: not measured.
        ordered: rows are levels of difficulty: what is right at one counts for all easier ones,
            what is wrong for all harder ones.

    Attributes:
        size: the group size.
        teaches: [rows] the chance that the rewards of a row's next group differ.
        newest: the newest policy version that an answer is of; None: no answer yet.
    """

    def __init__(
        self,
        rates: Sequence[float | None],
        *,
        group_size: int,
        half_life: float,
        ordered: bool = False,
    ) -> None:
        measured = np.array([np.nan if rate is None else rate for rate in rates], np.float64)
        self._right = np.nan_to_num(measured * group_size)
        self._wrong = np.nan_to_num((1 - measured) * group_size)
        self.size, self._half_life, self._ordered = group_size, half_life, ordered
        self.newest: int | None = None
        self._population = Population()
        self._prior = PRIOR
        # the chances that the next group is all right, all wrong
        self._all_right, self._all_wrong = self._chances(slice(0, len(rates)))
        self.teaches = self._differ(slice(0, len(rates)))

    def add(self, row: int, *, right: float, wrong: float, version: int | None = None) -> slice:
        """Count answers of policy `version` (None: of the newest one) to a row. Return the rows
        whose estimates have changed."""
        changed = self.count(row, right=right, wrong=wrong, version=version)
        self.estimate(changed)
        return changed

    def count(self, row: int, *, right: float, wrong: float, version: int | None) -> slice:
        """The same, but the estimates of the rows that are returned wait for `estimate`."""
        rows = slice(0, len(self._right))
        aged = self._age(version)
        if version is not None and self.newest is not None:
            weight = 0.5 ** ((self.newest - version) / self._half_life)
            right, wrong = right * weight, wrong * weight
        answers = right + wrong
        if answers >= 2 and self._right[row] + self._wrong[row] < LEAST_ANSWERS:
            self._population.add(right, wrong)
        easier = slice(0 if self._ordered else row, row + 1)
        harder = slice(row, len(self._right) if self._ordered else row + 1)
        touched = slice(easier.start, harder.stop)
        before = self._right[touched] + self._wrong[touched]
        weights = self.size / np.maximum(before, self.size)
        self._right[touched] *= weights
        self._wrong[touched] *= weights
        self._right[easier] += right
        self._wrong[harder] += wrong
        return rows if aged else touched

    def estimate(self, rows: slice) -> None:
        self._all_right[rows], self._all_wrong[rows] = self._chances(rows)
        self.teaches[rows] = self._differ(rows)

    def add_row(self) -> None:
        """Add a row that was not measured."""
        self._right, self._wrong = np.append(self._right, 0.0), np.append(self._wrong, 0.0)
        last = slice(len(self._right) - 1, len(self._right))
        right, wrong = self._chances(last)
        self._all_right = np.append(self._all_right, right)
        self._all_wrong = np.append(self._all_wrong, wrong)
        self.teaches = np.append(self.teaches, self._differ(last))

    def mean(self, row: int) -> float:
        """Return the estimated pass rate of a row."""
        right, wrong = self._right[row] + self._prior[0], self._wrong[row] + self._prior[1]
        return float(right / (right + wrong))

    def kinds(self) -> Kinds:
        """Count the rows of each kind."""
        seen = self._right + self._wrong > LEAST_ANSWERS
        easy = int(np.count_nonzero(seen & (self._all_right > 0.5)))
        hopeless = int(np.count_nonzero(seen & (self._all_wrong > 0.5)))
        count = int(np.count_nonzero(seen))
        return Kinds(easy, count - easy - hopeless, hopeless, len(seen) - count)

    def _age(self, version: int | None) -> bool:
        """Let the answers so far count less, if `version` is newer than all of them."""
        if version is None or (self.newest is not None and version <= self.newest):
            return False
        if self.newest is not None:
            weight = 0.5 ** ((version - self.newest) / self._half_life)
            self._right *= weight
            self._wrong *= weight
            self._population.age(weight)
        self.newest = version
        self._prior = self._population.prior()
        return True

    def _chances(self, rows: slice) -> tuple[Numbers, Numbers]:
        """Return E[p^n] and E[(1 - p)^n] under the posteriors of some rows."""
        right, wrong = self._right[rows] + self._prior[0], self._wrong[rows] + self._prior[1]
        total = right + wrong
        all_right, all_wrong = np.ones_like(right), np.ones_like(right)
        for count in range(self.size):
            all_right *= (right + count) / (total + count)
            all_wrong *= (wrong + count) / (total + count)
        return all_right, all_wrong

    def _differ(self, rows: slice) -> Numbers:
        return np.maximum(1.0 - self._all_right[rows] - self._all_wrong[rows], LEAST_CHANCE)

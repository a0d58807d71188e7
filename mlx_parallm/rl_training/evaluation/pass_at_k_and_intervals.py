"""Estimates from a sample of problems: pass@k, 95% intervals, paired differences. No MLX.

The problem is the unit everywhere: several answers to one problem are first combined to one number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Z = 1.959964  # quantile of a two-sided 95% interval
CHANCE = 0.05
FEWEST = 6
"""Problems: of fewer, chance alone moves all in one direction more than once in twenty times (2
· ½⁵ = 0.0625)."""
RESAMPLES = 10_000
RESAMPLED_AT_ONCE = 1_000_000  # draws: bounds the memory


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and the ends of its 95% interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """B minus A over the same problems. `p`: exact McNemar test, None where not every value is 0
    or 1. The interval of fewer than FEWEST problems says nothing: of one problem it has no
    width."""

    mean: float
    low: float
    high: float
    p: float | None
    problems: int

    @property
    def enough(self) -> bool:
        """Whether so many problems could show any difference."""
        return self.problems >= FEWEST

    @property
    def significant(self) -> bool:
        """Whether chance alone makes such a difference less than once in twenty times: by p,
        else by the interval."""
        if not self.enough:
            return False
        return self.p < CHANCE if self.p is not None else self.low > 0 or self.high < 0


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate without bias the probability that one of k answers is right, from `samples` answers
    with `right` right.

    1 - C(samples - right, k) / C(samples, k): Chen et al. 2021, arXiv:2107.03374, equation 1.
    Worked: 5 answers, 2 right, k = 2: 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10 = 0.7. Raises ValueError:
    k above `samples`.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} answers with {right} right")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value for each problem (at least one) and its 95% interval.

    Where every value is 0 or 1: Wilson's score interval (1927), which also holds near 0 and 1 and
    for few problems.
    Otherwise: percentile bootstrap over the problems. Worked: 8 of 10 → 0.8, [0.490, 0.943].
    """
    n, mean = len(values), math.fsum(values) / len(values)
    if not _shares(values):
        return Estimate(mean, *_bootstrap(values))
    scale = 1 + Z * Z / n
    centre = (mean + Z * Z / (2 * n)) / scale
    half = Z * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n)) / scale
    return Estimate(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Compare values for the same problems in the same order (at least one).

    The interval is a paired bootstrap's over the problems; `p` is McNemar's exact test: twice the
    smaller binomial tail of the problems that changed sides. Worked: 8 gained, 1 lost: 2 · (C(9, 0)
    + C(9, 1)) / 2⁹ = 0.0390625.
    """
    changes = [after - before for before, after in zip(a, b, strict=True)]
    p = None
    if _shares([*a, *b]):
        gained, lost = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
        n = gained + lost
        p = min(1.0, 2 * sum(math.comb(n, i) for i in range(min(gained, lost) + 1)) / 2**n)
    return Difference(math.fsum(changes) / len(changes), *_bootstrap(changes), p, len(changes))


def gain_is_sure(pairs: Sequence[tuple[float | None, float | None]]) -> bool:
    """Whether values after are higher than before by more than chance, whatever the missing ones
    (None, or not finite) would have been: each is taken as what speaks against it most, of the
    values that there are, and 0 and 1 if all lie between.

    Answers that have no score are seldom like those that have one. Manski 1990, Nonparametric
    bounds on treatment effects. Worked: of (0, 1) six times and (0, None) nine times the nine are
    taken as (0, 0): sure, p = 2 · ½⁶. Of (0.5, None) they are (0.5, 0): not sure.
    """
    finite = [tuple(map(finite_or_none, pair)) for pair in pairs]
    values = [value for pair in finite for value in pair if value is not None]
    if all(0 <= value <= 1 for value in values):
        values += [0.0, 1.0]
    filled = [
        (
            max(values) if before is None else before,
            min(values) if after is None else after,
        )
        for before, after in finite
        if before is not None or after is not None
    ]
    if not filled:
        return False
    change = difference(*map(list, zip(*filled, strict=True)))
    return change.significant and change.mean > 0


def finite_or_none(value: float | None) -> float | None:
    """Return a value, None if it is not finite: it stands for nothing."""
    return value if value is not None and math.isfinite(value) else None


def _shares(values: Sequence[float]) -> bool:
    return all(value in (0.0, 1.0) for value in values)


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the middle 95% of the means of resampled problems, the same every time; of few
    problems more than that.

    The percentiles of n values alone hold 86% of six. These are the "expanded" ones of Hesterberg
    2015, arXiv:1411.5279, section 5.4: Φ(-√(n / (n - 1)) · t) for 2.5%, t of n - 1 degrees.
    """
    values_N, rng = np.asarray(values, np.float64), np.random.default_rng(0)
    rows = max(1, RESAMPLED_AT_ONCE // len(values_N))
    means = [
        values_N[rng.integers(0, len(values_N), (min(rows, RESAMPLES - done), len(values_N)))].mean(
            axis=1
        )
        for done in range(0, RESAMPLES, rows)
    ]
    tail = _tail(len(values_N))
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _tail(n: int) -> float:
    """Return the share beyond either end of the interval. Worked: 0.0026 of 6 values, 0.016 of 20;
    t is Abramowitz and Stegun's 26.7.5."""
    if n < 2:
        return 0.0
    free = n - 1
    t = Z + (Z**3 + Z) / (4 * free) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
    return NormalDist().cdf(-math.sqrt(n / free) * t)

"""The facts that `health` judges: `Evidence`, of metrics lines, and `Arrivals`, of the groups that
have come for a step that waits. No MLX."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Metrics = Mapping[str, Any]
Window = Sequence[Metrics]

WINDOW = 5
"""Steps that are judged together."""
FEWEST_STEPS, FEWEST_GROUPS = 3, 32
"""With fewer of both, groups are not judged: three of three without variance is chance."""
FELL = 4.0
"""Standard errors that a reward has to fall by: of many windows some fall by two."""
LOST, LOST_ERRORS = 0.25, 2.5
"""A reward below this share of its former value has fallen from so many standard errors
on."""
NEARLY_ALL, FEWER_WRONG = 0.9, 0.25
"""Share of the groups that are all wrong, and by how much it was less at first."""
GAIN = 0.5
"""In standard deviations of the first rewards: more than noise (0.1 over five small steps), and
more than a collapsed policy reaches."""
SAME_REWARD = 1e-6


class Sign(NamedTuple):
    """A sentence and the numbers in it. A `setting` replaces that of the rule."""

    words: str
    numbers: Mapping[str, float]
    setting: str = ""


@dataclass(frozen=True)
class Evidence:
    """Metrics lines of the last steps, and of the run's first ones; without those the window is
    all there is."""

    window: Window
    start: Window = ()

    def values(self, key: str) -> list[float]:
        return values_of(self.window, key)

    def total(self, key: str) -> int:
        return round(sum(self.values(key)))

    def mean(self, key: str) -> float | None:
        return mean_of(self.window, key)

    @property
    def lines(self) -> Window:
        """Return the metrics lines of the first and last steps."""
        return [*self.start, *self.window]

    def first(self, key: str) -> float | None:
        return mean_of(self.start or self.window, key)

    def means(self, *keys: str) -> dict[str, float]:
        """The means of those keys that the window has."""
        return {key: mean for key in keys if (mean := self.mean(key)) is not None}

    @property
    def steps(self) -> str:
        return f"{len(self.window)} steps"

    @property
    def has_enough_groups(self) -> bool:
        return len(self.window) >= FEWEST_STEPS or self.total("groups") >= FEWEST_GROUPS

    @property
    def gained(self) -> bool:
        """Whether the reward is well above that of the first steps: the run learns, or has
        learned."""
        then, now, spread = (
            self.first("reward_mean"),
            self.mean("reward_mean"),
            self.first("reward_std"),
        )
        return (
            then is not None
            and now is not None
            and now - then > GAIN * (spread or 0.0) + SAME_REWARD
        )

    @property
    def rises(self) -> bool:
        """Whether the reward is above that of the first steps by more than chance: twice the
        standard error of the difference."""
        then, now = self.first("reward_mean"), self.mean("reward_mean")
        if then is None or now is None:
            return False
        return now - then > 2 * self._error(self.first("reward_std") or 0.0) + SAME_REWARD

    @property
    def fell(self) -> bool:
        """Whether the reward is far below that of the first steps, by no chance: the policy has
        lost what it could do."""
        then, now = self.first("reward_mean"), self.mean("reward_mean")
        if then is None or now is None:
            return False
        spread = max(self.first("reward_std") or 0.0, self.mean("reward_std") or 0.0)
        far = then - now > max(GAIN * spread, FELL * self._error(spread)) + SAME_REWARD
        lost = then > 0 and now < LOST * then and then - now > LOST_ERRORS * self._error(spread)
        return far or lost or (then > now and self._all_wrong_now)

    @property
    def _all_wrong_now(self) -> bool:
        """Whether nearly all groups are wrong, and far fewer were at first, by no chance."""
        then, now = self.first("groups_all_wrong"), self.mean("groups_all_wrong")
        if then is None or now is None or now < NEARLY_ALL or now - then < FEWER_WRONG:
            return False
        pooled = (then + now) / 2
        return now - then > FELL * self._error(math.sqrt(pooled * (1 - pooled)))

    def _error(self, spread: float) -> float:
        """The standard error of the difference of the last and the first rewards. It counts each
        group once, for its answers go together."""
        groups = [
            sum(values_of(lines, "groups")) or len(lines)
            for lines in (self.start or self.window, self.window)
        ]
        return spread * math.sqrt(sum(1 / count for count in groups)) if all(groups) else 0.0


@dataclass(frozen=True)
class Arrivals:
    """Groups that have come for a step that has no batch yet: no metrics line shows them."""

    step: int
    usable: int = 0
    stale: int = 0
    mismatched: int = 0
    alike: int = 0  # whose answers earn one reward
    why_alike: str = ""
    received: int = 0  # all, the rejected ones too
    rejected: int = 0
    reason: str = ""  # the most frequent one of the rejections
    times: int = 0  # how often, among the newest rejections
    silent_s: float | None = None  # since anything came, if that is too long
    paused: str = ""  # who has paused the engine
    endless: str = ""  # run.log's line about episodes that do not end


def values_of(window: Window, key: str) -> list[float]:
    numbers = (line.get(key) for line in window)
    return [
        float(number)
        for number in numbers
        if isinstance(number, int | float) and math.isfinite(number)
    ]


def mean_of(window: Window, key: str) -> float | None:
    values = values_of(window, key)
    return sum(values) / len(values) if values else None


def reward_limit(lines: Window, environment: str) -> tuple[float, int, int]:
    """Return the highest reward of an environment's answers, in how many steps one earned it,
    and of how many steps."""
    each = values_of(
        [(line.get("environments") or {}).get(environment, {}) for line in lines], "reward_max"
    )
    highest = max(each, default=0.0)
    return highest, sum(highest - best <= SAME_REWARD for best in each), len(each)

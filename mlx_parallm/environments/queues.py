"""Lane: the groups of one environment, in their order. What comes next, what is on its way, what is handed on, and
whether the environment delivers at all. No threads: `RolloutManager` holds a lock around every call.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.runner import GroupPlan, GroupResult
from mlx_parallm.environments.schedule import derive_seed, group_id

RECENT_GROUPS = 32
PATIENCE, LEAST_PATIENCE_S = 5.0, 2.0
"""An environment is late once its oldest group runs so many times longer than the longest of its recent ones (before it
has finished any: of the other environments'), and at least so long."""
FAILURES_UNTIL_BROKEN = 3
"""So many failed groups in a row, and the environment is tried with one group at a time."""
LONGEST_PAUSE_S = 5.0
"""Pause after a failed group: 0.05 s, doubled by each further failure in a row up to this."""


@dataclass(slots=True)
class _Started:
    plan: GroupPlan
    at: float
    result: GroupResult | None = None


class Lane:
    def __init__(self, source: EnvironmentSource, *, seed: int, clock: Callable[[], float]) -> None:
        self.source = source
        self.failures_in_a_row = 0
        self.not_before = 0.0  # the next group starts then at the earliest
        self._seed, self._clock = seed, clock
        self._group_size: int | None = None
        self._max_steps: int | None = None
        self._groups: Iterator[tuple[int, int]] = iter(())
        self._next = 0  # every own group below it has been started
        self._pending: dict[int, _Started] = {}  # started and not settled, in their order
        self._seconds: deque[float] = deque(maxlen=RECENT_GROUPS)  # of groups that were played to an end

    def rewind(self, groups: Iterator[tuple[int, int]], first: int) -> None:
        """Goes on at group `first`, the own groups from there on being `groups`; what was pending is forgotten."""
        self._groups, self._next = groups, first
        self._pending.clear()

    def limit(self, *, group_size: int | None, max_steps: int | None) -> None:
        """For the groups that start from now on; None: the configuration's size, any number of steps."""
        self._group_size, self._max_steps = group_size, max_steps

    @property
    def group_size(self) -> int:
        return self._group_size or self.source.config.group_size

    # --- the way of a group

    def start(self, known: Collection[str]) -> GroupPlan:
        """The next group that is not `known`; it is on its way from now on."""
        index, task = next(group for group in self._groups if self._id(group[0]) not in known)
        self._next = index + 1
        seed = derive_seed("group", self._seed, index)
        plan = GroupPlan(self._id(index), self.source, task, self.group_size, seed, index, max_steps=self._max_steps)
        self._pending[index] = _Started(plan, self._clock())
        return plan

    def finish(self, result: GroupResult) -> None:
        assert result.plan.index is not None
        started = self._pending[result.plan.index]
        started.result = result
        if result.failure is None:
            self._seconds.append(self._clock() - started.at)

    @property
    def ready(self) -> GroupResult | None:
        """The result to hand on now: that of the oldest group, once it is there."""
        return self._head.result if self._head else None

    def settle(self, *, failed: bool) -> None:
        """The `ready` result was handed on."""
        del self._pending[self.cursor]
        self.failures_in_a_row = self.failures_in_a_row + 1 if failed else 0
        if failed:
            self.not_before = self._clock() + min(LONGEST_PAUSE_S, 0.05 * 2 ** min(self.failures_in_a_row - 1, 10))

    # --- where it stands

    @property
    def cursor(self) -> int:
        """Own groups below it are settled."""
        return next(iter(self._pending), self._next)

    @property
    def pending(self) -> int:
        """Started and not settled."""
        return len(self._pending)

    @property
    def in_flight(self) -> int:
        """Started and not finished."""
        return sum(started.result is None for started in self._pending.values())

    @property
    def longest_s(self) -> float | None:
        return max(self._seconds, default=None)

    @property
    def broken(self) -> bool:
        return self.failures_in_a_row >= FAILURES_UNTIL_BROKEN

    def late_at(self, others: Iterable["Lane"]) -> float | None:
        """When patience with the oldest group ends; None: nothing is on its way, or nothing to compare it with."""
        usual = self.longest_s
        if usual is None:
            usual = max((lane.longest_s for lane in others if lane.longest_s is not None), default=None)
        if usual is None or self._head is None or self._head.result is not None:
            return None
        return self._head.at + max(LEAST_PATIENCE_S, PATIENCE * usual)

    def explain_late(self) -> str:
        """In words, while it is late."""
        assert self._head is not None
        return (
            f"environment {self.source.name} delivers nothing: {self._head.plan.group_id} has run for"
            f" {self._clock() - self._head.at:.0f} s, with {self.in_flight} groups in flight;"
            " its places go to the others"
        )

    def _id(self, index: int) -> str:
        return group_id(self.source.name, self._seed, index)

    @property
    def _head(self) -> _Started | None:
        return next(iter(self._pending.values()), None)


def absent(lanes: Collection[Lane], now: float) -> set[Lane]:
    """Lanes that the others do not wait for: late or broken ones. None, where that would leave nobody."""
    away = {lane for lane in lanes if lane.broken or is_late(lane, lanes, now)}
    return set() if len(away) == len(lanes) else away


def is_late(lane: Lane, lanes: Collection[Lane], now: float) -> bool:
    """True when the lane's oldest group takes far longer than is usual."""
    late_at = lane.late_at(lanes)
    return late_at is not None and now > late_at


def next_event(lanes: Collection[Lane], now: float) -> float | None:
    """Seconds until a pause or the patience with a lane ends; None: nothing will happen by itself."""
    ends = itertools.chain((lane.not_before for lane in lanes), (lane.late_at(lanes) for lane in lanes))
    return min((end - now for end in ends if end is not None and end >= now), default=None)

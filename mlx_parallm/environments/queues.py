"""EnvironmentQueue: the groups of one environment in their order, and how well the environment
delivers.

No threads: `RolloutScheduler` holds a lock around every call.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.group_order import derive_seed, group_id
from mlx_parallm.environments.runner import GroupPlan, GroupResult

RECENT_GROUPS = 32
PATIENCE, LEAST_PATIENCE_S = 5.0, 2.0
"""An environment is late when its oldest group runs PATIENCE times longer than the longest of
its recent groups (before it has finished any: of the other environments' groups), and at least
LEAST_PATIENCE_S."""
FAILURES_UNTIL_BROKEN = 3
"""After this many failed groups in a row the environment gets one group at a time."""
LONGEST_PAUSE_S = 5.0
"""Pause after a failed group: 0.05 s, doubled by each further failure in a row up to this."""
WORST_HEALTHY_FAILURE_RATE = 0.2
FEWEST_FAILURES = 3  # below it a rate says nothing


@dataclass(slots=True)
class _Started:
    plan: GroupPlan
    at: float
    result: GroupResult | None = None


class EnvironmentQueue:
    def __init__(self, source: EnvironmentSource, *, seed: int, clock: Callable[[], float]) -> None:
        self.source = source
        self.failures_in_a_row = 0
        self.not_before = 0.0  # the next group starts then at the earliest
        # failures of the recent groups; None: one that worked
        self.failures: deque[str | None] = deque(maxlen=RECENT_GROUPS)
        self.may_work = False  # a group has worked, or has failed because another server was away
        self._seed, self._clock = seed, clock
        self._group_size: int | None = None
        self._max_steps: int | None = None
        self._groups: Iterator[tuple[int, int]] = iter(())
        self._next = 0  # every group of this environment below it has been started
        self._pending: dict[int, _Started] = {}  # started and not settled, in their order
        # seconds of groups that were played to their end
        self._seconds: deque[float] = deque(maxlen=RECENT_GROUPS)
        self._last_progress = clock()

    def rewind(self, groups: Iterator[tuple[int, int]], first: int) -> None:
        """Continue at group `first` with `groups`, this environment's from there on; forget what
        was pending."""
        self._groups, self._next = groups, first
        self._pending.clear()
        if self.source.draws is not None:
            self.source.draws.rewind()

    def limit(self, *, group_size: int | None, max_steps: int | None) -> None:
        """Set the size and steps of groups that start from now on; None: the configuration's
        size, any number of steps."""
        self._group_size, self._max_steps = group_size, max_steps

    @property
    def group_size(self) -> int:
        return self._group_size or self.source.config.group_size

    # --- the way of a group

    def start(self, stored: Collection[str]) -> GroupPlan:
        """Return the next group that the store does not hold, and count it as in flight."""
        if not self.in_flight:
            self._last_progress = self._clock()
        index, task = next(group for group in self._groups if self._id(group[0]) not in stored)
        if self.source.draws is not None:
            task = self.source.draws.draw(index, self.cursor)
        self._next = index + 1
        seed = derive_seed("group", self._seed, index)
        plan = GroupPlan(
            self._id(index),
            self.source,
            task,
            self.group_size,
            seed,
            index,
            max_steps=self._max_steps,
        )
        self._pending[index] = _Started(plan, self._clock())
        return plan

    def finish(self, result: GroupResult) -> None:
        assert result.plan.index is not None
        started = self._pending[result.plan.index]
        started.result, self._last_progress = result, self._clock()
        if self.source.draws is not None:
            self.source.draws.finished(result)
        if result.failure is None:
            self._seconds.append(self._clock() - started.at)

    @property
    def ready(self) -> GroupResult | None:
        """The result to deliver now: the oldest group's, once it has finished."""
        return self._head.result if self._head else None

    def settle(self, reason: str | None, *, pause: bool) -> None:
        """Note that the `ready` result was delivered, or failed for a reason; `pause` after a
        failure."""
        result = self._pending.pop(self.cursor).result
        assert result is not None
        self.failures.append(reason)
        self.may_work |= reason is None or result.may_pass
        self.failures_in_a_row = self.failures_in_a_row + 1 if pause else 0
        if pause:
            self.not_before = self._clock() + min(
                LONGEST_PAUSE_S, 0.05 * 2 ** min(self.failures_in_a_row - 1, 10)
            )

    # --- its state

    @property
    def cursor(self) -> int:
        """The groups below this index are settled."""
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

    def late_at(self, others: Iterable["EnvironmentQueue"]) -> float | None:
        """Return when patience with the oldest group ends; None: nothing is in flight, or
        nothing to compare with."""
        usual = self.longest_s
        if usual is None:
            usual = max(
                (queue.longest_s for queue in others if queue.longest_s is not None), default=None
            )
        if usual is None or self._head is None or self._head.result is not None:
            return None
        return self._head.at + max(LEAST_PATIENCE_S, PATIENCE * usual)

    def health(self, *, late: bool, stall_after_s: float) -> str | None:
        """Say in a sentence that nothing finishes, or that too many groups fail; None: neither."""
        what, now = f"environment {self.source.name}", self._clock()
        if late and self._head is not None:
            return (
                f"{what} delivers nothing: {self._head.plan.group_id} has run for"
                f" {now - self._head.at:.0f} s, with"
                f" {self.in_flight} groups in flight; its places go to the others"
            )
        in_flight = [
            started.plan.group_id for started in self._pending.values() if started.result is None
        ]
        if in_flight and now - self._last_progress > stall_after_s:
            return (
                f"{what} stalled: nothing finished for {now - self._last_progress:.0f} s with"
                f" {len(in_flight)} groups in flight (oldest: {in_flight[0]})"
            )
        failures = [failure for failure in self.failures if failure is not None]
        if len(failures) >= max(FEWEST_FAILURES, WORST_HEALTHY_FAILURE_RATE * len(self.failures)):
            recent = len(self.failures)
            return (
                f"{what}: {len(failures)} of its last {recent} groups failed, the last one:"
                f" {failures[-1]}"
            )
        return None

    def _id(self, index: int) -> str:
        return group_id(self.source.name, self._seed, index)

    @property
    def _head(self) -> _Started | None:
        return next(iter(self._pending.values()), None)


def absent(queues: Collection[EnvironmentQueue], now: float) -> set[EnvironmentQueue]:
    """Return the queues that the others do not wait for: late or broken ones; none if that
    would be all of them."""
    away = {queue for queue in queues if queue.broken or is_late(queue, queues, now)}
    return set() if len(away) == len(queues) else away


def is_late(queue: EnvironmentQueue, queues: Collection[EnvironmentQueue], now: float) -> bool:
    """Whether the queue's oldest group takes far longer than is usual."""
    late_at = queue.late_at(queues)
    return late_at is not None and now > late_at


def next_event(queues: Collection[EnvironmentQueue], now: float) -> float | None:
    """Return the seconds until a pause or the patience with a queue ends; None: nothing will
    happen by itself."""
    ends = itertools.chain(
        (queue.not_before for queue in queues), (queue.late_at(queues) for queue in queues)
    )
    return min((end - now for end in ends if end is not None and end >= now), default=None)

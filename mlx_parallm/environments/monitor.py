"""Statistics and health of the environments: counters behind a lock, filled by the scheduler."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mlx_parallm.environments.runner import GroupPlan, GroupResult

RECENT_GROUPS = 32
WORST_HEALTHY_FAILURE_RATE = 0.2
FEWEST_FAILURES = 3  # below it a rate says nothing


@dataclass(frozen=True, slots=True)
class EnvironmentStatistics:
    groups: int = 0  # delivered
    failed: int = 0
    reward_sum: float = 0.0
    rollouts: int = 0

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.rollouts if self.rollouts else None


@dataclass(frozen=True, slots=True)
class RolloutStatistics:
    """Counts since the start of the process; times in seconds."""

    groups_started: int
    groups_delivered: int
    groups_failed: int
    groups_known: int  # played, and found in the store already
    rollouts: int  # of delivered groups
    sampled_tokens: int  # of delivered groups
    in_flight: int  # started, not finished
    held: int  # finished, waiting for an earlier group
    demand: int  # requested, not started
    waiting_s: float  # time with nothing in flight
    environments: Mapping[str, EnvironmentStatistics] = field(default_factory=dict)


class RolloutMonitor:
    def __init__(
        self, names: Sequence[str], *, stall_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._stall_after_s = stall_after_s
        self._in_flight: dict[str, str] = {}  # group id → environment
        self._recent: dict[str, deque[str | None]] = {name: deque(maxlen=RECENT_GROUPS) for name in names}  # failures
        self._per_environment = dict.fromkeys(names, EnvironmentStatistics())
        self._started = self._known = self._sampled_tokens = 0
        self._idle_since = clock()
        self._last_progress = dict.fromkeys(names, self._idle_since)
        self._waiting_s = 0.0
        self._may_pass = False  # a group has failed because another server was away

    def started(self, plans: Sequence[GroupPlan]) -> None:
        with self._lock:
            now = self._clock()
            if not self._in_flight:
                self._waiting_s += now - self._idle_since
            idle = {plan.source.name for plan in plans}.difference(self._in_flight.values())
            self._last_progress |= dict.fromkeys(idle, now)
            self._started += len(plans)
            self._in_flight |= {plan.group_id: plan.source.name for plan in plans}

    def finished(self, results: Sequence[GroupResult]) -> None:
        with self._lock:
            for result in results:
                del self._in_flight[result.plan.group_id]
            self._idle_since = self._clock()
            self._last_progress |= dict.fromkeys({result.plan.source.name for result in results}, self._idle_since)

    def cancelled(self) -> None:
        """Forget what was in flight."""
        with self._lock:
            if self._in_flight:
                self._in_flight.clear()
                self._idle_since = self._clock()

    def delivered(self, result: GroupResult, *, known: bool) -> None:
        name, rollouts = result.plan.source.name, result.group.rollouts
        with self._lock:
            self._recent[name].append(None)
            if known:
                self._known += 1
                return
            before = self._per_environment[name]
            self._per_environment[name] = EnvironmentStatistics(
                groups=before.groups + 1,
                failed=before.failed,
                reward_sum=before.reward_sum + sum(rollout.scores.get("reward", 0.0) for rollout in rollouts),
                rollouts=before.rollouts + len(rollouts),
            )
            self._sampled_tokens += sum(rollout.sampled_tokens for rollout in rollouts)

    def failed(self, result: GroupResult, reason: str) -> None:
        name = result.plan.source.name
        with self._lock:
            self._recent[name].append(reason)
            self._may_pass |= result.may_pass
            before = self._per_environment[name]
            self._per_environment[name] = EnvironmentStatistics(
                before.groups, before.failed + 1, before.reward_sum, before.rollouts
            )

    @property
    def only_failure(self) -> str | None:
        """Why every group since the start has failed; None: one has not, there were several reasons, or another server
        was away, which may come back."""
        with self._lock:
            reasons = {reason for recent in self._recent.values() for reason in recent}
            worked = self._known or self._may_pass or any(part.groups for part in self._per_environment.values())
            return reasons.pop() if len(reasons) == 1 and not worked else None

    def health(self, late: Mapping[str, str]) -> list[str]:
        """Return a sentence for each environment in which nothing finishes, or too many groups fail.

        `late` has the sentences of environments that the scheduler found late; they replace "nothing finishes".
        """
        with self._lock:
            found = [
                late.get(name) or self._stalled(name) or self._failing(name, failures)
                for name, failures in self._recent.items()
            ]
        return [sentence for sentence in found if sentence]

    def statistics(self, *, demand: int, held: int) -> RolloutStatistics:
        with self._lock:
            parts = dict(self._per_environment)
            idle = self._clock() - self._idle_since if not self._in_flight else 0.0
            return RolloutStatistics(
                groups_started=self._started,
                groups_delivered=sum(part.groups for part in parts.values()),
                groups_failed=sum(part.failed for part in parts.values()),
                groups_known=self._known,
                rollouts=sum(part.rollouts for part in parts.values()),
                sampled_tokens=self._sampled_tokens,
                in_flight=len(self._in_flight),
                held=held,
                demand=demand,
                waiting_s=self._waiting_s + idle,
                environments=parts,
            )

    def _stalled(self, name: str) -> str | None:
        silent_s = self._clock() - self._last_progress[name]
        groups = [group for group, environment in self._in_flight.items() if environment == name]
        if not groups or silent_s <= self._stall_after_s:
            return None
        return (
            f"environment {name} stalled: nothing finished for {silent_s:.0f} s with"
            f" {len(groups)} groups in flight (oldest: {groups[0]})"
        )

    def _failing(self, name: str, outcomes: Collection[str | None]) -> str | None:
        failures = [failure for failure in outcomes if failure is not None]
        if len(failures) < max(FEWEST_FAILURES, WORST_HEALTHY_FAILURE_RATE * len(outcomes)):
            return None
        return (
            f"environment {name}: {len(failures)} of its last {len(outcomes)} groups failed,"
            f" the last one: {failures[-1]}"
        )

"""GroupManager: which groups are played, and when. `rollouts.py` says what becomes of them.

    request_groups → manager's thread: which environment starts a group → its Player (a thread each) → results
        → manager's thread: in each environment's order → `_deliver`

Groups of one environment are delivered in the order in which they were started, whenever they finished. Otherwise a
batch of the groups that finish first is a batch of short answers, and the long ones go stale while they wait (the
short-answer bias); and because of it an environment's whole position is one number: groups below it are settled, groups
from it on are played again after a resume. Group ids are stable, so what the store holds already is recognised (`skip`,
or the sink's False).

Environments do not wait for each other's order. One that hangs (its oldest group takes far longer than is usual) or
dies (its groups fail one after another) is absent: it keeps the places that it holds, they no longer count, the others
make its groups, and the health line names it. It is back with its next finished group. With `fixed_order` (a run that
can be repeated bit for bit) nothing depends on a clock: all environments share a thread and wait for each other.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.monitor import RolloutMonitor, RolloutStatistics
from mlx_parallm.environments.queues import Lane, absent, is_late, next_event
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult, describe
from mlx_parallm.environments.schedule import Schedule
from mlx_parallm.environments.worker import Player
from mlx_parallm.errors import CheckpointError, EnvironmentFailedError
from mlx_parallm.system.log import get_logger

log = get_logger("environments")

STATE_VERSION = 2
FAILURES_IN_A_ROW = 64
"""So many failed groups in a row, with every environment broken, end the run: retrying does not mend it."""
ALIKE_FROM_THE_START = 8
"""The same where no group worked yet, and all failed for one reason that will not pass (`GroupResult.may_pass`)."""
LAST_STEPS_S = 2.0  # so long `stop` waits for the threads of steps, which free what episodes held (`end_episode`)


class GroupManager(ABC):
    """All public methods may be called from any thread."""

    def __init__(
        self,
        sources: Sequence[EnvironmentSource],
        *,
        seed: int,
        num_parallel: int,
        fixed_order: bool,
        stall_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            num_parallel: episodes in flight, in whole groups of the smallest environment; one group at least.
            fixed_order: the groups of one `request_groups` call are submitted atomically, call after call
                (deterministic mode), in portions of `num_parallel`.
        """
        self._seed, self._num_parallel, self._fixed_order, self._clock = seed, num_parallel, fixed_order, clock
        self._monitor = RolloutMonitor([source.name for source in sources], stall_after_s=stall_after_s, clock=clock)
        self._schedule = Schedule([source.config.weight for source in sources], seed=seed)
        self._changed = threading.Condition()  # guards what follows
        self._lanes = tuple(Lane(source, seed=seed, clock=clock) for source in sources)
        self._rewind(dict.fromkeys([lane.source.name for lane in self._lanes], 0))
        self._turn = 0  # position in the schedule: whose turn it is to start a group
        self._owed: deque[int] = deque()  # groups allowed and not delivered, one entry for each call
        self._known: set[str] = set()
        self._paused = self._stopping = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._players: list[Player] = []

    @abstractmethod
    def _runner(self) -> EpisodeRunner:
        """Plays the groups of all environments."""

    @abstractmethod
    def _deliver(self, result: GroupResult) -> tuple[str | None, bool]:
        """On the manager's thread: (why it is none that counts, whether it is one of those allowed)."""

    @abstractmethod
    def _begun(self, plans: Sequence[GroupPlan]) -> None:
        """These start now."""

    @property
    def _max_in_flight(self) -> int:
        return max(1, math.ceil(self._num_parallel / min(lane.group_size for lane in self._lanes)))

    # --- control, from any thread

    def start(self) -> None:
        runner, names = self._runner(), [lane.source.name for lane in self._lanes]
        self._players = [
            Player(name, runner, on_results=self._on_results, on_error=self._fail)
            for name in ([", ".join(names)] if self._fixed_order else names)
        ]
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def request_groups(self, n: int) -> None:
        """Allows n more groups. Each brings one group: failed and known ones are replaced."""
        if n < 1:
            return
        with self._changed:
            self._owed.append(n)
            self._changed.notify_all()

    def pause(self) -> None:
        """Starts no more groups; those in flight go on."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def skip(self, group_ids: Collection[str]) -> None:
        """Names groups that lie in the store already: they are not played again and use up no demand."""
        with self._changed:
            self._known.update(group_ids)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancels what is in flight (the engine drops it) and joins the threads, those of steps that block for two
        seconds at most. What was cancelled is not settled.

        Raises EnvironmentFailedError: an environment blocks its thread.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for player in self._players:
            player.stop()
        deadline = time.monotonic() + timeout_s
        blocked = [player.name for player in self._players if not player.stop(max(0.0, deadline - time.monotonic()))]
        if blocked:
            raise EnvironmentFailedError(
                f"environment {', '.join(blocked)} blocks its thread: it did not stop within {timeout_s:g} s"
            )
        deadline = min(deadline, time.monotonic() + LAST_STEPS_S)
        for lane in self._lanes:
            lane.source.join(deadline)

    def cancel(self) -> None:
        """`stop`, after which `start` plays what was in flight anew. Nothing is owed any more."""
        self.stop()
        self._monitor.cancelled()
        with self._changed:
            self._thread, self._players = None, []
            self._owed.clear()
            self._rewind({lane.source.name: lane.cursor for lane in self._lanes})

    def check(self) -> None:
        """Raises EnvironmentFailedError when the manager has given up."""
        if self._failure is not None:
            raise EnvironmentFailedError(f"environments stopped: {describe(self._failure)}") from self._failure

    # --- position

    def state(self) -> dict[str, Any]:
        """For the checkpoint; JSON. `next_group`: of each environment, the first index that is not settled."""
        with self._changed:
            cursors = {lane.source.name: lane.cursor for lane in self._lanes}
            return {"version": STATE_VERSION, "seed": self._seed, "turn": self._turn, "next_group": cursors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on at the groups that `state` names. Before `start`. Raises CheckpointError: not a state of ours."""
        if self._thread is not None:
            raise RuntimeError("restore() comes before start()")
        position = _position(state, [lane.source.name for lane in self._lanes])
        if position is None:
            raise CheckpointError(f"environment state not understood: {dict(state)}")
        if state["seed"] != self._seed:
            log.warning("seed changed: the environments draw other problems", saved=state["seed"], now=self._seed)
        for lane in self._lanes:
            if lane.source.in_order:
                log.warning(
                    "tasks come in order and begin anew: reset() takes neither index nor seed",
                    environment=lane.source.name,
                )
        with self._changed:
            self._turn, cursors = position
            self._rewind(cursors)

    def _rewind(self, cursors: Mapping[str, int]) -> None:
        for number, lane in enumerate(self._lanes):
            first = cursors[lane.source.name]
            lane.rewind(self._schedule.groups_of(number, first), first)

    # --- reports

    def absent(self) -> frozenset[str]:
        """Environments that the others do not wait for now."""
        with self._changed:
            return frozenset(lane.source.name for lane in self._absent(self._clock()))

    def health(self) -> str | None:
        """What is wrong, in words; None when nothing is."""
        if self._failure is not None:
            return f"environments stopped: {describe(self._failure)}"
        with self._changed:
            now = self._clock()
            late = [lane for lane in self._absent(now) if is_late(lane, self._lanes, now)]
            sentences = {lane.source.name: lane.explain_late() for lane in late}
        left = [_left_behind(lane.source) for lane in self._lanes if lane.source.left_behind]
        return "; ".join([*self._monitor.health(sentences), *left]) or None

    def statistics(self) -> RolloutStatistics:
        with self._changed:
            demand = max(0, sum(self._owed) - sum(lane.pending for lane in self._lanes))
            held = sum(lane.pending - lane.in_flight for lane in self._lanes)
        return self._monitor.statistics(demand=demand, held=held)

    # --- the manager's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._settle()
                with self._changed:
                    if not (self._stopping or self._start_groups() or self._oldest_ready()):
                        self._changed.wait(next_event(self._lanes, self._clock()))
        except Exception as error:  # noqa: BLE001  boundary of the thread: kept, told by health() and check()
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.error("environments stopped", error=describe(error))
        with self._changed:
            self._failure, self._stopping = error, True
            self._changed.notify_all()

    def _on_results(self, results: Sequence[GroupResult]) -> None:
        """A player's thread."""
        self._monitor.finished(results)
        with self._changed:
            for result in results:
                self._lane_of(result.plan).finish(result)
            self._changed.notify_all()

    def _start_groups(self) -> bool:
        """Starts what may be started now; False: nothing."""
        if self._stopping or self._paused or not self._owed:
            return False
        now = self._clock()
        away = self._absent(now)
        tried = [lane for lane in away if lane.broken and not lane.pending and lane.not_before <= now]
        lanes = tried[:1] or self._next_lanes([lane for lane in self._lanes if lane not in away], now)
        if lanes:
            self._play(lanes)
        return bool(lanes)

    def _next_lanes(self, there: Sequence[Lane], now: float) -> list[Lane]:
        """The environments whose groups are submitted together now."""
        pending, in_flight = sum(lane.pending for lane in there), sum(lane.in_flight for lane in there)
        if any(lane.not_before > now for lane in there):  # a pause after a failure: its turn stays its turn
            return []
        if self._fixed_order:
            count = 0 if pending else min(self._owed[0], self._max_in_flight)
        else:
            count = int(pending < sum(self._owed) and in_flight < self._max_in_flight)
        return [self._next_lane(there) for _ in range(count)]

    def _next_lane(self, there: Collection[Lane]) -> Lane:
        """Whose turn it is among those that are there; the turn is over then."""
        while True:
            lane = self._lanes[self._schedule.environment_of(self._turn)]
            self._turn += 1
            if lane in there:
                return lane

    def _play(self, lanes: Iterable[Lane]) -> None:
        plans = [lane.start(self._known) for lane in lanes]
        self._monitor.started(plans)
        self._begun(plans)
        number = 0 if self._fixed_order else self._lanes.index(self._lane_of(plans[0]))
        self._players[number].play(plans)

    def _lane_of(self, plan: GroupPlan) -> Lane:
        return next(lane for lane in self._lanes if lane.source is plan.source)

    def _absent(self, now: float) -> set[Lane]:
        return set() if self._fixed_order else absent(self._lanes, now)

    # --- what is finished

    def _settle(self) -> None:
        """Hands on everything that no earlier group of its environment holds back."""
        while not self._stopping:
            with self._changed:
                lane = self._oldest_ready()
                result = lane.ready if lane else None
            if lane is None or result is None:
                return
            reason, wanted = self._deliver(result)
            with self._changed:
                lane.settle(failed=reason is not None)
                if wanted and self._owed:
                    self._owed[0] -= 1
                    if self._owed[0] == 0:
                        self._owed.popleft()
            if reason is not None:
                self._give_up_at_last(reason)

    def _oldest_ready(self) -> Lane | None:
        return min((lane for lane in self._lanes if lane.ready), key=lambda lane: lane.cursor, default=None)

    def _give_up_at_last(self, reason: str) -> None:
        failures = sum(lane.failures_in_a_row for lane in self._lanes)
        enough = ALIKE_FROM_THE_START if self._monitor.only_failure == reason else FAILURES_IN_A_ROW
        if failures >= enough and all(lane.broken for lane in self._lanes):
            raise EnvironmentFailedError(f"{failures} groups in a row failed, the last one: {reason}")


def _left_behind(source: EnvironmentSource) -> str:
    return (
        f"environment {source.name}: {source.left_behind} threads still run its code although their episodes have ended"
        " (a thread cannot be killed): give what it waits for a time-out"
    )


def _position(state: Mapping[str, Any], names: Sequence[str]) -> tuple[int, dict[str, int]] | None:
    """(turn, first unsettled index of each environment); an environment that is new begins at its first group.

    Version 1 had one cursor for all environments, whose groups were settled in one order.
    """
    version, cursors, turn = state.get("version"), state.get("next_group"), state.get("turn")
    if version == 1 and isinstance(cursors, int):
        return cursors, dict.fromkeys(names, cursors)
    if version != STATE_VERSION or not isinstance(turn, int) or not isinstance(cursors, Mapping):
        return None
    if not all(isinstance(cursor, int) for cursor in cursors.values()):
        return None
    return turn, {name: cursors.get(name, 0) for name in names}

"""RolloutScheduler: which groups are played, and when. `manager.py` decides what becomes of them.

    request_groups → scheduler's thread: which environment starts a group, and which player plays it
    → results
        → scheduler's thread: in each environment's order → `_deliver`

A player has a RolloutWorker (a thread) for each environment: `LocalPlayer` in this process, and one
for each further process that plays groups. A group goes to the player with the fewest episodes in
flight.

Groups of one environment are delivered in the order in which they were started, whenever they
finished. Otherwise a batch of the groups that finish first is a batch of short answers, and the
long ones go stale while they wait (the short-answer bias). The order also makes an environment's
position one number: groups below it are settled, groups from it on are played again after a resume.
Group ids are stable, so groups that the store holds are recognised (`skip`, or the sink's False).

Environments do not wait for each other's order. One that hangs (its oldest group takes far longer
than is usual) or dies (its groups fail one after another) is absent: its groups in flight no longer
count, the others make its groups, and the health line names it. Its next finished group ends that.
With `fixed_order` (a run that can be repeated bit for bit) nothing depends on a clock: all
environments share a thread and wait for each other.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.group_order import Schedule
from mlx_parallm.environments.queues import EnvironmentQueue, absent, is_late, next_event
from mlx_parallm.environments.runner import (
    EpisodeRunner,
    GroupPlan,
    GroupPlayer,
    GroupResult,
    LocalPlayer,
    MakePlayer,
    describe,
)
from mlx_parallm.errors import CheckpointError, EnvironmentFailedError
from mlx_parallm.system.log import FILE_ONLY, get_logger

log = get_logger("environments")

STATE_VERSION = 2
FAILURES_IN_A_ROW = 64
"""This many failed groups in a row, with every environment broken, end the run: more attempts
would fail too."""
ALIKE_FROM_THE_START = 8
"""The same if no group worked yet and all failed for one reason that will not pass
(`GroupResult.may_pass`)."""
SHOWN_AFTER_S = 10.0
"""A failure of a run in which no group has worked is shown after as long: most end before, and
their last line has the reason."""
# `stop` waits this long for the threads of steps, which free what episodes held (`end_episode`)
LAST_STEPS_S = 2.0


class RolloutScheduler(ABC):
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
        players: Sequence[MakePlayer] = (),
    ) -> None:
        """
        Args:
            players: make the players of other processes. They play the groups of environments that
            do not `stay_here`.
            num_parallel: episodes in flight, in whole groups of the smallest environment; one group
            at least.
            fixed_order: the groups of one `request_groups` call are submitted atomically, call
            after call
                (deterministic mode), in portions of `num_parallel`.
        """
        self._seed, self._num_parallel, self._fixed_order, self._clock = (
            seed,
            num_parallel,
            fixed_order,
            clock,
        )
        self._stall_after_s = stall_after_s
        self._schedule = Schedule([source.config.weight for source in sources], seed=seed)
        self._changed = threading.Condition()  # guards what follows
        self._queues = tuple(EnvironmentQueue(source, seed=seed, clock=clock) for source in sources)
        self._rewind(dict.fromkeys([queue.source.name for queue in self._queues], 0))
        self._turn = 0  # position in the schedule: whose turn it is to start a group
        # groups requested and not delivered, one entry for each call
        self._requested: deque[int] = deque()
        self._stored: set[str] = set()
        self._stopping = False
        self._failure: BaseException | None = None
        self._failing_since: float | None = None  # the first failed group
        self._thread: threading.Thread | None = None
        self._make_players = tuple(players)
        self._players: list[GroupPlayer] = []
        # the groups in flight: number of the player, rollouts
        self._played: dict[str, tuple[int, int]] = {}

    @abstractmethod
    def _runner(self) -> EpisodeRunner:
        """Return what plays groups in this process."""

    @abstractmethod
    def _deliver(self, result: GroupResult) -> tuple[str | None, bool]:
        """Take a result, on the scheduler's thread; return (why it does not count or None,
        whether it was a requested one)."""

    @abstractmethod
    def _begun(self, plans: Sequence[GroupPlan]) -> None:
        """Called when these groups start."""

    @property
    def _max_in_flight(self) -> int:
        return max(
            1, math.ceil(self._num_parallel / min(queue.group_size for queue in self._queues))
        )

    # --- control, from any thread

    def start(self) -> None:
        runner, names = self._runner(), [queue.source.name for queue in self._queues]
        here = LocalPlayer(
            runner,
            names,
            fixed_order=self._fixed_order,
            on_results=self._on_results,
            on_error=self._fail,
        )
        self._players = [here, *(make(self._on_results, self._fail) for make in self._make_players)]
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def request_groups(self, n: int) -> None:
        """Request n more groups; failed and known ones are replaced."""
        if n < 1:
            return
        with self._changed:
            self._requested.append(n)
            self._changed.notify_all()

    def skip(self, group_ids: Collection[str]) -> None:
        """Do not play these groups, which the store holds already. They use up no request."""
        with self._changed:
            self._stored.update(group_ids)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel groups in flight (the engine drops them) and join the threads; wait two seconds at
        most for steps that block. Cancelled groups are not settled.

        Raises EnvironmentFailedError: an environment blocks its thread.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        deadline = time.monotonic() + timeout_s
        blocked = [name for player in reversed(self._players) for name in player.stop(timeout_s)]
        if blocked:
            raise EnvironmentFailedError(
                f"environment {', '.join(blocked)} blocks its thread: it did not stop within"
                f" {timeout_s:g} s"
            )
        deadline = min(deadline, time.monotonic() + LAST_STEPS_S)
        for queue in self._queues:
            queue.source.join(deadline)

    def cancel(self) -> None:
        """`stop`, after which `start` plays the groups in flight anew. Requests are forgotten."""
        self.stop()
        with self._changed:
            self._thread, self._players = None, []
            self._played.clear()
            self._requested.clear()
            self._rewind({queue.source.name: queue.cursor for queue in self._queues})

    def check(self) -> None:
        """Raises EnvironmentFailedError: the scheduler has given up."""
        if self._failure is not None:
            raise EnvironmentFailedError(
                f"environments stopped: {describe(self._failure)}"
            ) from self._failure

    # --- position

    def state(self) -> dict[str, Any]:
        """Return the position for the checkpoint, as JSON. `next_group`: each environment's
        first unsettled index."""
        with self._changed:
            cursors = {queue.source.name: queue.cursor for queue in self._queues}
            return {
                "version": STATE_VERSION,
                "seed": self._seed,
                "turn": self._turn,
                "next_group": cursors,
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the groups that `state` names; before `start`. Raises CheckpointError: not
        such a state."""
        if self._thread is not None:
            raise RuntimeError("restore() comes before start()")
        position = _position(state, [queue.source.name for queue in self._queues])
        if position is None:
            raise CheckpointError(f"environment state not understood: {dict(state)}")
        if state["seed"] != self._seed:
            log.warning(
                "seed changed: the environments draw other problems",
                saved=state["seed"],
                now=self._seed,
            )
        for queue in self._queues:
            if queue.source.in_order:
                log.warning(
                    "tasks come in order and begin anew: reset() takes neither index nor seed",
                    environment=queue.source.name,
                )
        with self._changed:
            self._turn, cursors = position
            self._rewind(cursors)

    def _rewind(self, cursors: Mapping[str, int]) -> None:
        for number, queue in enumerate(self._queues):
            first = cursors[queue.source.name]
            queue.rewind(self._schedule.groups_of(number, first), first)

    # --- reports

    @property
    def in_flight(self) -> int:
        """Groups that have started and not finished."""
        with self._changed:
            return sum(queue.in_flight for queue in self._queues)

    def health(self) -> str | None:
        """Describe the fault, or return None."""
        if self._failure is not None:
            return f"environments stopped: {describe(self._failure)}"
        with self._changed:
            now = self._clock()
            late = {queue for queue in self._absent(now) if is_late(queue, self._queues, now)}
            sentences = [
                queue.health(late=queue in late, stall_after_s=self._stall_after_s)
                for queue in self._queues
            ]
        sentences += [
            f"environment {queue.source.name} does not end its episodes: {queue.source.endless}"
            for queue in self._queues
            if queue.source.endless
        ]
        left = [_left_behind(queue.source) for queue in self._queues if queue.source.left_behind]
        return "; ".join([sentence for sentence in sentences if sentence] + left) or None

    # --- the scheduler's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._settle()
                with self._changed:
                    if not (self._stopping or self._start_groups() or self._oldest_ready()):
                        self._changed.wait(next_event(self._queues, self._clock()))
        except Exception as error:  # noqa: BLE001  boundary of the thread: health() and check() report it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        # `health` and `check` say it to those who watch
        log.error("environments stopped", error=describe(error), **{FILE_ONLY: True})
        with self._changed:
            self._failure, self._stopping = error, True
            self._changed.notify_all()

    def _on_results(self, results: Sequence[GroupResult]) -> None:
        """Called on a worker's thread."""
        with self._changed:
            for result in results:
                self._played.pop(result.plan.group_id, None)
                self._queue_of(result.plan).finish(result)
            self._changed.notify_all()

    def _start_groups(self) -> bool:
        """Start groups that may start now; False: there was none."""
        if self._stopping or not self._requested:
            return False
        now = self._clock()
        away = self._absent(now)
        tried = [
            queue
            for queue in away
            if queue.broken and not queue.pending and queue.not_before <= now
        ]
        queues = tried[:1] or self._next_queues(
            [queue for queue in self._queues if queue not in away], now
        )
        if queues:
            self._play(queues)
        return bool(queues)

    def _next_queues(self, there: Sequence[EnvironmentQueue], now: float) -> list[EnvironmentQueue]:
        """Return the environments whose groups are submitted together now."""
        pending, in_flight = (
            sum(queue.pending for queue in there),
            sum(queue.in_flight for queue in there),
        )
        # a pause after a failure: its turn stays its turn
        if any(queue.not_before > now for queue in there):
            return []
        if self._fixed_order:
            count = 0 if pending else min(self._requested[0], self._max_in_flight)
        else:
            count = int(pending < sum(self._requested) and in_flight < self._max_in_flight)
        return [self._next_queue(there) for _ in range(count)]

    def _next_queue(self, there: Collection[EnvironmentQueue]) -> EnvironmentQueue:
        """Take the next turn of one of the environments that are there."""
        while True:
            queue = self._queues[self._schedule.environment_of(self._turn)]
            self._turn += 1
            if queue in there:
                return queue

    def _play(self, queues: Iterable[EnvironmentQueue]) -> None:
        plans = [queue.start(self._stored) for queue in queues]
        self._begun(plans)
        shares: dict[int, list[GroupPlan]] = {}
        for plan in plans:
            player = self._player_of(plan)
            self._played[plan.group_id] = player, plan.size
            shares.setdefault(player, []).append(plan)
        for player, share in sorted(shares.items()):
            self._players[player].play(share)

    def _player_of(self, plan: GroupPlan) -> int:
        """Return the number of the player with the fewest episodes in flight; the first of
        several."""
        loads = [0] * (1 if plan.source.stays_here else len(self._players))
        for number, rollouts in self._played.values():
            if number < len(loads):
                loads[number] += rollouts
        return loads.index(min(loads))

    def _queue_of(self, plan: GroupPlan) -> EnvironmentQueue:
        return next(queue for queue in self._queues if queue.source is plan.source)

    def _absent(self, now: float) -> set[EnvironmentQueue]:
        return set() if self._fixed_order else absent(self._queues, now)

    # --- finished groups

    def _settle(self) -> None:
        """Deliver every result that no earlier group of its environment holds back."""
        while not self._stopping:
            with self._changed:
                queue = self._oldest_ready()
                result = queue.ready if queue else None
            if queue is None or result is None:
                return
            reason, wanted = self._deliver(result)
            with self._changed:
                queue.settle(reason or result.failure, pause=reason is not None)
                if wanted and self._requested:
                    self._requested[0] -= 1
                    if self._requested[0] == 0:
                        self._requested.popleft()
            if reason is not None:
                self._give_up_at_last(reason)

    def _oldest_ready(self) -> EnvironmentQueue | None:
        return min(
            (queue for queue in self._queues if queue.ready),
            key=lambda queue: queue.cursor,
            default=None,
        )

    def _may_end_now(self, result: GroupResult) -> bool:
        """Whether a failed group is one of the first, none has worked, and the failure stays: then
        the run ends within seconds, and its end says why."""
        if self._failing_since is None:
            self._failing_since = self._clock()
        young = self._clock() - self._failing_since < SHOWN_AFTER_S
        return young and not result.may_pass and not any(each.may_work for each in self._queues)

    def _give_up_at_last(self, reason: str) -> None:
        failures = sum(queue.failures_in_a_row for queue in self._queues)
        alike = all(failure == reason for queue in self._queues for failure in queue.failures)
        hopeless = alike and not any(queue.may_work for queue in self._queues)
        enough = ALIKE_FROM_THE_START if hopeless else FAILURES_IN_A_ROW
        if failures >= enough and all(queue.broken for queue in self._queues):
            raise EnvironmentFailedError(
                f"{failures} groups in a row failed, the last one: {reason}"
            )


def _left_behind(source: EnvironmentSource) -> str:
    return (
        f"environment {source.name}: {source.left_behind} threads still run its code although"
        " their episodes have ended"
        " (a thread cannot be killed): give its blocking call a time-out"
    )


def _position(state: Mapping[str, Any], names: Sequence[str]) -> tuple[int, dict[str, int]] | None:
    """Return (turn, each environment's first unsettled index); a new environment begins at its
    first group."""
    version, cursors, turn = state.get("version"), state.get("next_group"), state.get("turn")
    if version != STATE_VERSION or not isinstance(turn, int) or not isinstance(cursors, Mapping):
        return None
    if not all(isinstance(cursor, int) for cursor in cursors.values()):
        return None
    return turn, {name: cursors.get(name, 0) for name in names}

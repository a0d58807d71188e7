"""RolloutManager: the thread of the in-process environments. It keeps many groups in flight against the engine.

The trainer allows groups (`request_groups`), `Schedule` says what group k is, `EpisodeRunner` plays it, and the
finished `RolloutGroup` goes to `sink` (durable store) or, with the reason, to `on_failure`; a failed group is replaced
by a further one.

Groups reach the sink in the order in which they were started, whenever they finished. Otherwise a batch of the groups
that finish first is a batch of short answers, and the long ones go stale while they wait (the short-answer bias); and
because of it the whole position is one number, `cursor`: groups below it are settled, groups from it on are played
again after a resume. Group ids are stable, so what the store holds already is recognised (`skip`, or the sink's False).
"""

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlx_parallm.environments.base import ChatTokenizer, EnvironmentSource, PolicyClient
from mlx_parallm.environments.episodes import EpisodeRunner, GroupPlan, GroupResult, describe
from mlx_parallm.environments.monitor import RolloutMonitor, RolloutStatistics
from mlx_parallm.environments.schedule import Schedule, derive_seed, group_id
from mlx_parallm.errors import CheckpointError, EnvironmentFailedError, RolloutRejectedError
from mlx_parallm.log import get_logger
from mlx_parallm.types import RolloutGroup

log = get_logger("environments")

STATE_VERSION = 1
FAILURES_IN_A_ROW = 64
"""So many failed groups in a row end the run: something is broken that retrying does not mend."""
LONGEST_PAUSE_S = 5.0
"""Pause after a failed group: 0.05 s, doubled by each further failure in a row up to this."""


class RolloutManager:
    """All public methods may be called from any thread; `sink` and `on_failure` are called on the manager's own."""

    def __init__(
        self,
        client: PolicyClient,
        sources: Sequence[EnvironmentSource],
        tokenizer: ChatTokenizer,
        *,
        seed: int,
        temperature: float,
        max_token_length: int,
        sink: Callable[[RolloutGroup], bool | None],
        on_failure: Callable[[RolloutGroup, str], None] | None = None,
        adapter: str | None = None,
        fixed_order: bool = False,
        max_in_flight_groups: int = 16,
        template_kwargs: Mapping[str, Any] | None = None,
        stall_after_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            tokenizer: an instance of its own; it is used on the manager's thread.
            sink: takes a finished group for good. False = it was there already (another one is played instead);
                RolloutRejectedError = it may not be trained on; any other exception stops the manager.
            on_failure: takes a group that may not be trained on, and why.
            fixed_order: the groups of one `request_groups` call are submitted atomically, call after call
                (deterministic mode), in portions of at most `max_in_flight_groups`.
        """
        self._runner = EpisodeRunner(
            client,
            tokenizer,
            temperature=temperature,
            max_token_length=max_token_length,
            adapter=adapter,
            template_kwargs=template_kwargs,
        )
        self._sources = tuple(sources)
        self._schedule = Schedule([source.config.weight for source in sources], seed=seed)
        self._seed = seed
        self._sink = sink
        self._on_failure = on_failure
        self._fixed_order = fixed_order
        self._max_in_flight = max_in_flight_groups
        self._monitor = RolloutMonitor([source.name for source in sources], stall_after_s=stall_after_s, clock=clock)
        self._clock = clock

        self._lock = threading.Lock()  # guards what follows
        self._demand: deque[int] = deque()  # groups allowed and not started, one entry for each call
        self._known: set[str] = set()
        self._finished: dict[int, GroupResult | None] = {}  # waiting for an earlier group; None = skipped
        self._cursor = 0  # first group that is not settled
        self._next = 0  # first group that is not started
        self._paused = False
        self._stopping = False
        self._failures_in_a_row = 0
        self._not_before = 0.0
        self._failure: BaseException | None = None
        self._wake: Callable[[], object] | None = None  # wakes the loop while there is one
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)

    # --- control, from any thread

    def start(self) -> None:
        self._thread.start()

    def request_groups(self, n: int) -> None:
        """Allows n more groups. Each brings one group to the sink: failed and known ones are replaced."""
        if n < 1:
            return
        with self._lock:
            self._demand.append(n)
        self._notify()

    def pause(self) -> None:
        """Starts no more groups; those in flight go on."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False
        self._notify()

    def skip(self, group_ids: Collection[str]) -> None:
        """Names groups that lie in the store already: they are not played again and use up no demand."""
        with self._lock:
            self._known.update(group_ids)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancels what is in flight (the engine drops it) and joins the thread. What was cancelled is not settled.

        Raises EnvironmentFailedError: an environment blocks the thread.
        """
        with self._lock:
            self._stopping = True
        self._notify()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EnvironmentFailedError(f"an environment blocks its thread: it did not stop within {timeout_s:g} s")

    def check(self) -> None:
        """Raises EnvironmentFailedError when the manager has given up."""
        if self._failure is not None:
            raise EnvironmentFailedError(f"environments stopped: {describe(self._failure)}") from self._failure

    # --- position

    @property
    def cursor(self) -> int:
        """First group that is not settled."""
        with self._lock:
            return self._cursor

    def state(self) -> dict[str, Any]:
        """For the checkpoint; JSON."""
        return {"version": STATE_VERSION, "seed": self._seed, "next_group": self.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on at the group that `state` names. Before `start`. Raises CheckpointError: not a state of ours."""
        if self._thread.ident is not None:
            raise RuntimeError("restore() comes before start()")
        if state.get("version") != STATE_VERSION or not isinstance(state.get("next_group"), int):
            raise CheckpointError(f"environment state not understood: {dict(state)}")
        if state["seed"] != self._seed:
            log.warning("seed changed: the environments draw other problems", saved=state["seed"], now=self._seed)
        with self._lock:
            self._cursor = self._next = state["next_group"]

    # --- reports

    def health(self) -> str | None:
        """What is wrong, in words; None when nothing is."""
        if self._failure is not None:
            return f"environments stopped: {describe(self._failure)}"
        return self._monitor.health()

    def statistics(self) -> RolloutStatistics:
        with self._lock:
            demand, held = sum(self._demand), sum(result is not None for result in self._finished.values())
        return self._monitor.statistics(demand=demand, held=held)

    # --- the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:  # noqa: BLE001  boundary of the thread: kept, told by health() and check()
            self._failure = error
            log.error("environments stopped", error=describe(error))

    def _notify(self) -> None:
        if (wake := self._wake) is not None:
            with suppress(RuntimeError):  # the loop has ended: there is nobody to wake
                wake()

    async def _main(self) -> None:
        wake = asyncio.Event()
        self._wake = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, wake.set)
        running: set[asyncio.Task[None]] = set()
        try:
            while not self._stopping:
                wake.clear()
                while plans := self._startable():
                    task = asyncio.create_task(self._play(plans))
                    running.add(task)
                    task.add_done_callback(lambda _: wake.set())
                await self._wait(wake)
                for task in [task for task in running if task.done()]:
                    running.remove(task)
                    task.result()  # an error of the sink ends the thread
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _wait(self, wake: asyncio.Event) -> None:
        with self._lock:
            pause = self._not_before - self._clock() if self._demand else 0.0
        try:
            async with asyncio.timeout(pause if pause > 0 else None):
                await wake.wait()
        except TimeoutError:
            return

    def _startable(self) -> list[GroupPlan]:
        """The next groups to submit together; empty when none may start now."""
        with self._lock:
            room = self._max_in_flight - self._monitor.in_flight
            if self._stopping or self._paused or not self._demand or room < 1 or self._clock() < self._not_before:
                return []
            if self._fixed_order and self._monitor.in_flight:
                return []
            count = min(self._demand[0], room) if self._fixed_order else 1
            self._demand[0] -= count
            if self._demand[0] == 0:
                self._demand.popleft()
            plans = [self._next_plan() for _ in range(count)]
        self._monitor.started(plans)
        return plans

    def _next_plan(self) -> GroupPlan:
        while True:
            index = self._next
            self._next += 1
            placement = self._schedule.place(index)
            source = self._sources[placement.environment]
            name = group_id(source.name, self._seed, index)
            if name not in self._known:
                seed = derive_seed("group", self._seed, index)
                return GroupPlan(name, source, placement.task, source.config.group_size, seed, index)
            self._finished[index] = None

    async def _play(self, plans: Sequence[GroupPlan]) -> None:
        results = await self._runner.run(plans)
        self._monitor.finished(results)
        with self._lock:
            self._finished.update({result.plan.index: result for result in results if result.plan.index is not None})
        self._settle()

    def _settle(self) -> None:
        """Hands on everything that no earlier group holds back."""
        missing = 0
        while self._cursor in self._finished:
            result = self._finished[self._cursor]
            if result is not None and not self._deliver(result):
                missing += 1
            with self._lock:
                del self._finished[self._cursor]
                self._cursor += 1
        if missing:
            with self._lock:
                self._demand.appendleft(missing)

    def _deliver(self, result: GroupResult) -> bool:
        """Sink or failure; False when the demand for this group is still open."""
        reason = result.failure
        if reason is None:
            try:
                known = self._sink(result.group) is False
            except RolloutRejectedError as error:
                reason = str(error)
        if reason is None:
            self._failures_in_a_row = 0
            self._monitor.delivered(result, known=known)
            return not known
        self._failures_in_a_row += 1
        self._monitor.failed(result, reason)
        log.warning("group dropped", group=result.group.group_id, reason=reason)
        if self._on_failure is not None:
            self._on_failure(result.group, reason)
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            raise EnvironmentFailedError(f"{FAILURES_IN_A_ROW} groups in a row failed, the last one: {reason}")
        self._not_before = self._clock() + min(LONGEST_PAUSE_S, 0.05 * 2 ** min(self._failures_in_a_row - 1, 10))
        return False

"""The engine thread: takes commands between steps, steps while there is work, delivers each step's
events.

Everything MLX that serves runs here. `build` makes the engine on this thread from a model that was
evaluated where it was loaded (docs/design.md). The loop blocks on the command queue when idle.
After a step that raises, each sequence is computed alone: those that raise again fail, and the
engine continues. When none raises, the step is tried once more; if it raises again, all its
requests fail. After the third such step in a row the engine is dead, and `stats` says so. After a
fault of the device, here or in the trainer's thread, it is dead at once: nothing that was computed
since is delivered.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import mlx.core as mx

from mlx_parallm.engine.client import (
    Abort,
    Call,
    Command,
    CommandQueue,
    EngineClient,
    EngineInfo,
    Mailbox,
    NotifyIdle,
    StopThread,
    Submit,
    post,
)
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.lanes import Lanes
from mlx_parallm.engine.live_requests import Counters, Event, Failed, StreamDelta, summed
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.errors import (
    DeviceFaultError,
    EngineUnavailableError,
    ParallmError,
    RequestError,
)
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.serve_priority import Turns
from mlx_parallm.types import EngineStats, Request

IDLE_TURN_S = 1.0  # an idle thread shows that it lives this often
IDLE_TURNS_BEFORE_RELEASE = 5  # idle turns after which the KV cache is given back
SILENT_START_S = 5.0
SLOW_START = (
    "MLX compiles its kernels when a machine computes with them for the first time; with CUDA this"
    " takes about a minute, and as long again in the first step"
)
MAX_FAILED_STEPS = 3  # in a row


class EngineThread:
    """
    Args:
        build: makes the engine; runs on the new thread. `start` raises its exceptions.
        chats: makes one more, for chats beside the requests of the first.
        models: names under which the engine answers.
        turns: the order of engine and trainer if they share the device.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        models: ServedModels,
        turns: Turns | None = None,
        *,
        chats: Callable[[Engine], Engine] | None = None,
    ) -> None:
        self._queue = CommandQueue()
        self.client = EngineClient(self._queue, self.stats)
        self._build, self._build_chats = build, chats
        self._models = models
        self._turns = turns or Turns()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._started = threading.Event()
        self.lanes: Lanes | None = None  # once they are built
        self._build_error: BaseException | None = None
        self._error: str | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._idle_waiters: list[threading.Event] = []
        self._failed_steps: dict[Engine, int] = {}  # in a row
        self._last_turn = time.monotonic()
        self._stopping = False

    def start(self) -> None:
        """Starts the thread and waits until the engine is built. Raises what `build` raised."""
        self._thread.start()
        if not self._started.wait(SILENT_START_S):
            get_logger(__name__).info("preparing the model", hint=SLOW_START)
        self._started.wait()
        if self._build_error is not None:
            self._thread.join()
            raise self._build_error

    def stop(self, timeout_s: float | None = 30.0) -> None:
        """Ends the thread between two steps and joins it; unfinished requests get
        EngineUnavailableError."""
        if not self._thread.is_alive():
            return
        self._queue.commands.put(StopThread())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineUnavailableError(f"the engine thread did not end within {timeout_s} s")

    def stats(self) -> EngineStats:
        """A snapshot without a lock: single reads of plain numbers."""
        lanes, alive = self.lanes, self._thread.is_alive() and self._error is None
        if lanes is None:
            return EngineStats(
                alive=alive,
                ready=False,
                last_step_time=self._last_turn,
                waiting=0,
                policy_version=0,
                error=self._error,
                **vars(Counters()),
            )
        engine = lanes.others
        prefix_caches = [each.scheduler.room.prefix_cache for each in lanes]
        return EngineStats(
            alive=alive,
            ready=alive and not self._stopping,
            last_step_time=self._last_turn,
            waiting=sum(len([*each.scheduler.waiting, *each.on_disk]) for each in lanes),
            policy_version=engine.weights.version,
            error=self._error,
            prefix_cache_query_tokens=sum(cache.query_tokens for cache in prefix_caches),
            prefix_cache_hit_tokens=sum(cache.hit_tokens for cache in prefix_caches),
            holders=tuple(engine.holders),
            prefix_disk_hit_tokens=sum(each.on_disk.hit_tokens for each in lanes),
            prefix_disk_seconds_saved=sum(each.on_disk.seconds_saved for each in lanes),
            prefix_disk_used_bytes=engine.on_disk.used_bytes,
            prefix_disk_corrupt_files=engine.on_disk.corrupt_files,
            prefix_disk_stuck_files=engine.on_disk.stuck_files,
            prefix_disk_refused_files=engine.on_disk.refused_files,
            prefix_disk_dropped_bytes=engine.on_disk.dropped_bytes,
            prefix_disk_failed_reads=engine.on_disk.failed_reads,
            kv_layout=engine.cache.layout,
            **summed([each.counters for each in lanes]),
        )

    def _main(self) -> None:
        reason = "the engine has stopped"
        try:
            engine = self._build()
            chats = None if self._build_chats is None else self._build_chats(engine)
            lanes = self.lanes = Lanes(engine, chats)
            self._queue.open(EngineInfo(engine.limits, self._models, engine.grammars))
            self._started.set()
            while not self._stopping:
                self._turn(lanes)
        except BaseException as error:  # noqa: BLE001 - boundary: all waiting callers must learn of the thread's end
            fault = self._turns.faults.note(error, ends=True)
            self._error = reason = (
                f"the engine thread died: {error!r}"
                if fault is None
                else f"the engine has stopped: {fault}"
            )
            if self._started.is_set() and not isinstance(error, DeviceFaultError):
                get_logger(__name__).exception("engine_died")
            else:
                self._build_error = error
        finally:
            for engine in self.lanes or ():
                engine.on_disk.close()
            self._shut_down(reason)
            with suppress(RuntimeError):  # a fault that the device has stored
                mx.synchronize()
            mx.clear_streams()
            self._started.set()

    def _turn(self, lanes: Lanes) -> None:
        self._take_commands(lanes)
        self._deliver(lanes.take_events())
        self._turns.chats(lanes.serves_chats)
        if lanes.has_work and not self._stopping:
            with self._turns.step():
                self._step(lanes)
            self._turns.chats(lanes.serves_chats)
        if self._idle_waiters and lanes.idle:
            for event in self._idle_waiters:
                event.set()
            self._idle_waiters.clear()

    def _step(self, lanes: Lanes) -> None:
        try:
            events = lanes.step(ahead=not self._turns.engine_rests)
            self._turns.faults.check()
            self._failed_steps[lanes.last] = 0
        except Exception as error:  # boundary: a failed forward ends its requests, not the engine
            if self._turns.faults.note(error) is not None:
                raise
            get_logger(__name__).exception("engine_step_failed")
            engine = lanes.last
            failed = self._failed_steps[engine] = self._failed_steps.get(engine, 0) + 1
            if failed == 1:
                if engine.recover():
                    self._failed_steps[engine] = 0
                events = lanes.take_events()
            else:
                events = engine.fail_active(f"the engine's step failed: {error!r}")
            if failed >= MAX_FAILED_STEPS:
                self._deliver(events)
                raise
        self._deliver(events)

    def _take_commands(self, lanes: Lanes) -> None:
        """Take every command of the queue; when there is nothing to do, wait for one."""
        idle_turns = 0
        while not self._stopping:
            self._turns.faults.check()
            # also when commands alone keep it awake: paused is not stalled
            self._last_turn = time.monotonic()
            busy = lanes.has_work or (bool(self._idle_waiters) and lanes.idle)
            if not busy:
                self._turns.engine_idle()
                self._turns.chats(lanes.serves_chats)  # one may have been frozen just now
            try:
                command = self._queue.commands.get(block=not busy, timeout=IDLE_TURN_S)
            except queue.Empty:
                if busy:
                    return
                idle_turns += 1
                if idle_turns == IDLE_TURNS_BEFORE_RELEASE:
                    for engine in lanes:
                        engine.release_memory()
                continue
            self._execute(lanes, command)

    def _execute(self, lanes: Lanes, command: Command) -> None:
        match command:
            case Submit(letters):
                for request, mailbox in letters:
                    self._accept(lanes, request, mailbox)
            case Abort(request_id):
                for engine in lanes:
                    engine.abort(request_id)
            case NotifyIdle(event):
                self._idle_waiters.append(event)
            case Call(function, future, each):
                self._turns.engine_works()
                engines = [*lanes] if each else [lanes.others]
                if (error := _call(function, engines, future)) is not None:
                    self._turns.faults.note(error)
            case StopThread():
                self._stopping = True

    def _accept(self, lanes: Lanes, request: Request, mailbox: Mailbox) -> None:
        try:
            lanes.add(request)
        except ParallmError as error:
            self._send([(mailbox, Failed(mailbox.request_id, error))])
        except Exception as error:  # boundary: one request's bad values must not end the engine
            if self._turns.faults.note(error) is not None:
                raise
            get_logger(__name__).exception("request_refused")
            failure = RequestError(f"the request cannot be run: {error!r}")
            self._send([(mailbox, Failed(mailbox.request_id, failure))])
        else:
            self._mailboxes[mailbox.request_id] = mailbox

    def _deliver(self, events: list[Event]) -> None:
        letters = []
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is None:
                continue
            letters.append((mailbox, event))
            if not isinstance(event, StreamDelta):
                del self._mailboxes[event.request_id]
        self._send(letters)

    def _send(self, letters: list[tuple[Mailbox, Event]]) -> None:
        for mailbox in post(letters):
            if self._mailboxes.pop(mailbox.request_id, None):
                self.client.abort(mailbox.request_id)

    def _shut_down(self, reason: str) -> None:
        """Answers all that still wait: requests, queued commands, idle waiters."""
        self._queue.close(reason)
        self._turns.chats(False)
        unheard = list(self._mailboxes.values())
        while True:
            try:
                command = self._queue.commands.get_nowait()
            except queue.Empty:
                break
            match command:
                case Submit(letters):
                    unheard += [mailbox for _, mailbox in letters]
                case NotifyIdle(event):
                    event.set()
                case Call(future=future):
                    if future.set_running_or_notify_cancel():
                        future.set_exception(EngineUnavailableError(reason))
        self._mailboxes.clear()
        self._send([(m, Failed(m.request_id, EngineUnavailableError(reason))) for m in unheard])
        for event in self._idle_waiters:
            event.set()


def _call(
    function: Callable[[Engine], Any], engines: list[Engine], future: "Future[Any]"
) -> Exception | None:
    """Return the error that the caller has got."""
    if not future.set_running_or_notify_cancel():
        return None  # the caller has gone: a time limit, a shutdown
    try:
        results = [function(engine) for engine in engines]
        future.set_result(results[0])
    except Exception as error:  # noqa: BLE001 - boundary: the caller's function fails in the caller
        future.set_exception(error)
        return error
    return None

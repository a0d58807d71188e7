"""Requests of clients that rank 0's server hands to the engine of another rank, over a TCP
connection of their own.

    rank 0       BalancedClient → RankEngine → connection
    rank 1, …    connection → RankRequestWorker → EngineClient → this rank's engine; events go back
                 once a step

The messages are those of an engine thread: requests in, `StreamDelta` and `Finished` back. A rank
that cannot run a request, or that is lost, gives it back: rank 0's own engine runs it, unless the
client has seen a part of the answer. A rank reports its counters at a fixed pace. One that is
silent gets no more requests, and is given up in the end.
"""

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from mlx_parallm.distributed.heartbeat import LOOK_S, HeartbeatReader
from mlx_parallm.distributed.players import STOP_S, hang_up, received
from mlx_parallm.engine.client import Abort, EngineClient, Letters, Mailbox, left_of, post
from mlx_parallm.engine.live_requests import Event, Failed, Finished, StreamDelta
from mlx_parallm.environments.runner import describe
from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import EngineStats, Request

REPORT_S = 0.2  # between two reports of a rank's counters
# without a report (heartbeat.py): the rank gets no more requests until one comes
QUIET_LOOKS = 3
IDLE_WAIT_S = 0.5

log = get_logger("ranks")


@dataclass(frozen=True)
class RunRequests:
    """Requests that enter the engine's queue together."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class PauseAdmission:
    holder: str
    freeze: bool


@dataclass(frozen=True)
class ResumeAdmission:
    holder: str


@dataclass(frozen=True)
class ResetPrefixCache:
    pass


@dataclass(frozen=True)
class AwaitIdle:
    """Wait for IDLE_WAIT_S at most."""


Order = PauseAdmission | ResumeAdmission | ResetPrefixCache | AwaitIdle


@dataclass(frozen=True)
class Numbered:
    """An order that is answered by `Done`."""

    number: int
    order: Order


@dataclass(frozen=True)
class Done:
    """`result`: of `AwaitIdle`, whether the engine is idle; of `ResetPrefixCache`, whether no file
    is left."""

    number: int
    result: bool


@dataclass(frozen=True)
class RankReady:
    """The rank is ready for requests under these adapters; None is the base."""

    adapters: frozenset[str | None]


@dataclass(frozen=True)
class RankLoad:
    """`others`: choices that run or wait there, besides those of rank 0's requests. `idle_s`:
    since the engine's last step or idle turn, for the clocks of two machines differ."""

    stats: EngineStats
    others: int
    idle_s: float


@dataclass(frozen=True)
class Events:
    """The events of one step of the engine for rank 0's clients."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class Refused:
    """Requests that this rank cannot run."""

    request_ids: tuple[str, ...]
    why: str


class RankEngine:
    """The engine of another rank, as rank 0 sees it. Any thread; `hand_in` in the mailboxes' loop.

    Args:
        give_back: called with this engine and requests of which the client has seen nothing, when
            the rank refuses them or is lost; on another thread. It calls `released` for each, in
            the loop of its mailbox.
    """

    def __init__(
        self, connection: Connection, rank: int, give_back: Callable[["RankEngine", Letters], None]
    ) -> None:
        self.rank = rank
        self.stats: EngineStats | None = None
        self._connection, self._give_back = connection, give_back
        self._heartbeat = HeartbeatReader(connection)
        self._others = 0
        self._adapters: frozenset[str | None] = frozenset()
        self._lock = threading.Lock()  # guards what follows
        self._lost = False
        self._letters: dict[str, tuple[Request, Mailbox]] = {}
        self._choices = 0  # choices in these letters
        self._streamed: set[str] = set()  # requests of which the client has seen a part
        self._returning: set[str] = set()  # given back, and not yet released
        self._aborted: set[str] = set()  # ids of these letters' aborted requests
        self._orders: dict[int, Future[bool]] = {}
        self._numbers = itertools.count()
        # no caller waits for the network
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._write, name=f"requests to rank {rank}", daemon=True).start()
        threading.Thread(target=self._read, name=f"answers of rank {rank}", daemon=True).start()

    def serves(self, adapter: str | None) -> bool:
        return adapter in self._adapters and not self._lost and self._heartbeat.silent < QUIET_LOOKS

    @property
    def unfinished(self) -> int:
        """Choices that run or wait there."""
        return self._choices + self._others

    def hand_in(self, letters: Letters) -> None:
        """Takes requests as `EngineClient.hand_in` does."""
        with self._lock:
            lost = self._lost
            if not lost:
                self._letters |= {
                    request.request_id: (request, mailbox) for request, mailbox in letters
                }
                self._choices += sum(request.params.n for request, _ in letters)
                self._outgoing.put(RunRequests(tuple(request for request, _ in letters)))
            else:
                self._returning.update(request.request_id for request, _ in letters)
        if lost:
            self._give_back(self, letters)

    def abort(self, request_id: str) -> bool:
        """Returns whether the request is there, or on its way back."""
        with self._lock:
            if request_id not in self._letters and request_id not in self._returning:
                return False
            self._aborted.add(request_id)
            if request_id in self._letters:
                self._outgoing.put(Abort(request_id))
            return True

    def released(self, request_id: str) -> bool:
        """Lets go of a request that was given back; returns whether it was aborted."""
        with self._lock:
            self._returning.discard(request_id)
            aborted = request_id in self._aborted
            self._aborted.discard(request_id)
            return aborted

    def carry_out(self, order: Order) -> "Future[bool]":
        """Returns the order's result. A rank that is lost has nothing left to do: True."""
        future: Future[bool] = Future()
        with self._lock:
            if self._lost:
                future.set_result(True)
            else:
                number = next(self._numbers)
                self._orders[number] = future
                self._outgoing.put(Numbered(number, order))
        return future

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._connection.send(message)
        except OSError:  # the connection is closed: `_read` says so
            pass
        except Exception as error:  # noqa: BLE001  boundary of the thread: its requests would wait for ever
            log.error("a rank gets no more requests", rank=self.rank, why=describe(error))
        finally:
            hang_up(self._connection)

    def _read(self) -> None:
        try:
            with self._connection:
                message = received(self._connection)  # a rank that loads its model is silent
                while message is not None:
                    self._take(message)
                    message = self._heartbeat.next()
        finally:
            self._lose()

    def _take(self, message: RankReady | RankLoad | Events | Refused | Done) -> None:
        match message:
            case RankReady(adapters):
                self._adapters = adapters
            case RankLoad(stats, others, idle_s):
                self.stats, self._others = (
                    replace(stats, last_step_time=time.monotonic() - idle_s),
                    others,
                )
            case Events(events):
                self._deliver(events)
            case Refused(request_ids, why):
                self._return(request_ids, why)
            case Done(number, result):
                with self._lock:
                    future = self._orders.pop(number)
                _settle(future, result)

    def _deliver(self, events: Sequence[Event]) -> None:
        delivered, failed = [], []
        with self._lock:
            for event in events:
                if isinstance(event, Failed):
                    failed.append(event)
                elif (letter := self._letters.get(event.request_id)) is not None:
                    delivered.append((letter[1], event))
                    if isinstance(event, Finished):
                        self._forget(event.request_id)
                        self._aborted.discard(event.request_id)
                    else:
                        self._streamed.add(event.request_id)
        for mailbox in post(delivered):
            self.abort(mailbox.request_id)
        for failure in failed:
            self._return([failure.request_id], str(failure.error))

    def _return(self, request_ids: Sequence[str], why: str) -> None:
        """Requests that will not be finished there."""
        with self._lock:
            seen = {request_id for request_id in request_ids if request_id in self._streamed}
            letters = tuple(
                letter for request_id in request_ids if (letter := self._forget(request_id))
            )
            self._aborted -= seen
            self._returning.update(
                request.request_id for request, _ in letters if request.request_id not in seen
            )
        broken = [mailbox for _, mailbox in letters if mailbox.request_id in seen]
        error = EngineUnavailableError(f"rank {self.rank} cannot finish the answer: {why}")
        post((mailbox, Failed(mailbox.request_id, error)) for mailbox in broken)
        if unseen := tuple(letter for letter in letters if letter[1].request_id not in seen):
            log.info(
                "requests are run by rank 0 instead", rank=self.rank, requests=len(unseen), why=why
            )
            self._give_back(self, unseen)

    def _forget(self, request_id: str) -> tuple[Request, Mailbox] | None:
        letter = self._letters.pop(request_id, None)
        if letter is not None:
            self._choices -= letter[0].params.n
            self._streamed.discard(request_id)
        return letter

    def _lose(self) -> None:
        with self._lock:
            self._lost, self.stats = True, _ended(self.stats)
            request_ids, orders = list(self._letters), list(self._orders.values())
            self._orders.clear()
        self._outgoing.put(None)
        silent = f"it has been silent for {self._heartbeat.silent * LOOK_S:.0f} s"
        self._return(
            request_ids, silent if self._heartbeat.gives_up else "its connection is closed"
        )
        for future in orders:
            _settle(future, True)


def _ended(stats: EngineStats | None) -> EngineStats | None:
    """Return the last statistics of a lost rank: its totals, which may not fall."""
    return stats and replace(
        stats, running=0, waiting=0, kv_tokens=0, kv_bytes=0, kv_bytes_shared=0
    )


def _settle(future: "Future[bool]", result: bool) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)


class ForwardedMailbox(Mailbox):
    """Sends a request's events on."""

    def __init__(self, request_id: str, forward: Callable[[Event], None]) -> None:
        super().__init__(request_id)
        self._forward = forward

    def deliver(self, event: Event) -> None:
        self._forward(event)
        if not isinstance(event, StreamDelta):
            self.result.cancel()  # no task waits for it here: it counts as ended


class RankRequestWorker:
    """Run rank 0's requests on this rank's engine until the connection ends; on the other ranks."""

    def __init__(self, connection: Connection, client: EngineClient) -> None:
        self._connection, self._client = connection, client
        self._loop = LoopThread("requests of rank 0")
        self._events: list[Event] = []  # since the last letter
        self._running: dict[str, int] = {}  # choices, by request
        self._preparing: set[str] = set()
        self._aborted: set[str] = set()  # requests aborted since then
        self._loop.submit(self._report())
        threading.Thread(target=self._read, name="orders of rank 0", daemon=True).start()

    def close(self) -> None:
        self._loop.stop(timeout_s=STOP_S)

    def _read(self) -> None:
        with self._connection, contextlib.suppress(EngineUnavailableError):  # closed meanwhile
            while (message := received(self._connection)) is not None:
                self._loop.submit(self._take(message))
            self._loop.submit(self._abandon())

    async def _abandon(self) -> None:
        """Abort rank 0's requests after its end: no client waits for them."""
        self._aborted |= self._preparing
        for request_id in self._running:
            self._client.abort(request_id)

    async def _take(self, message: RunRequests | Abort | Numbered) -> None:
        match message:
            case RunRequests(requests):
                await self._run(requests)
            case Abort(request_id) if request_id in self._preparing:
                self._aborted.add(request_id)
            case Abort(request_id):
                self._client.abort(request_id)
            case Numbered(number, order):
                result = True
                try:
                    result = await self._carried_out(order)
                finally:
                    self._send(Done(number, result))

    async def _run(self, requests: tuple[Request, ...]) -> None:
        request_ids = tuple(request.request_id for request in requests)
        self._preparing.update(request_ids)
        try:
            await self._client.prepare(requests)
            self._running |= {request.request_id: request.params.n for request in requests}
            self._client.hand_in(
                tuple((each, ForwardedMailbox(each.request_id, self._forward)) for each in requests)
            )
        except Exception as error:  # noqa: BLE001  boundary: rank 0's client would wait for ever
            for request_id in request_ids:
                self._running.pop(request_id, None)
            self._send(Refused(request_ids, describe(error)))
        self._preparing.difference_update(request_ids)
        for request_id in self._aborted.intersection(request_ids):
            self._client.abort(request_id)
        self._aborted.difference_update(request_ids)

    def _forward(self, event: Event) -> None:
        if not self._events:  # all that a step has comes in one callback
            asyncio.get_running_loop().call_soon(self._flush)
        # an error of any class may not come whole through the connection
        if isinstance(event, Failed):
            event = Failed(event.request_id, EngineUnavailableError(str(event.error)))
        self._events.append(event)
        if not isinstance(event, StreamDelta):
            self._running.pop(event.request_id, None)

    def _flush(self) -> None:
        events, self._events = tuple(self._events), []
        self._send(Events(events))

    async def _carried_out(self, order: Order) -> bool:
        client = self._client
        with contextlib.suppress(EngineUnavailableError):  # a dead engine does not answer
            match order:
                case PauseAdmission(holder, freeze):
                    await asyncio.wrap_future(client.pause_admission(holder, freeze=freeze))
                case ResumeAdmission(holder):
                    await asyncio.wrap_future(client.resume_admission(holder))
                case ResetPrefixCache():
                    clearing = await asyncio.wrap_future(client.reset_prefix_cache())
                    return not await left_of(clearing)
                case AwaitIdle():
                    return await asyncio.to_thread(client.wait_idle, IDLE_WAIT_S)
        return True

    async def _report(self) -> None:
        self._send(RankReady(frozenset(model.adapter for model in self._client.models())))
        while True:
            others = max(0, self._client.queue.unfinished - sum(self._running.values()))
            stats = self._client.stats()
            self._send(RankLoad(stats, others, time.monotonic() - stats.last_step_time))
            await asyncio.sleep(REPORT_S)

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone: the main thread ends the process
            self._connection.send(message)

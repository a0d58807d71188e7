"""The engine's face for asyncio code: requests in, outputs and streams out. No MLX; any number of
threads and loops.

    server, environments → EngineClient → CommandQueue → EngineThread → Engine
                              ▲                              │ one call per loop and step
                              └──────── Mailbox.deliver ─────┘

A `Mailbox` belongs to one request and one asyncio loop. Only that loop's thread touches its future
and queue. The clients of one engine share its `CommandQueue`. With several ranks the server's
client is a `BalancedClient` (distributed/balance.py), which hands requests to the engines of other
ranks too.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_parallm.engine.grammar import Grammars
from mlx_parallm.engine.live_requests import Event, Failed, StreamDelta
from mlx_parallm.engine.prefix_disk.disk import PATIENCE_S, Clearing
from mlx_parallm.engine.served_models import AdapterUses, ServedModels
from mlx_parallm.engine.validation import RequestLimits, check_request
from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.types import (
    CompletionDelta,
    EngineStats,
    Request,
    RequestOutput,
    ServedModel,
    Structure,
)

TRAINER, CLIENTS, MEMORY = "trainer", "clients", "memory"  # holders that may pause admission


async def left_of(clearing: Clearing) -> str:
    """Return what is left of the files that are removed, and why. A disk that hangs is not waited
    for."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(clearing)), PATIENCE_S)
    except TimeoutError:
        return f"the disk has not removed them in {PATIENCE_S:.0f} s"


class Mailbox:
    """Receives the events of one request, in the asyncio loop that sent it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[RequestOutput] = self.loop.create_future()
        # None: the result is there
        self.deltas: asyncio.Queue[CompletionDelta | None] = asyncio.Queue()

    def deliver(self, event: Event) -> None:
        """Take an event, in the loop's thread."""
        if isinstance(event, StreamDelta):
            self.deltas.put_nowait(event.delta)
            return
        if not self.result.done():
            if isinstance(event, Failed):
                self.result.set_exception(event.error)
            else:
                self.result.set_result(event.output)
        self.deltas.put_nowait(None)


def post(letters: Iterable[tuple[Mailbox, Event]]) -> list[Mailbox]:
    """Deliver events from another thread: one callback per loop, not per token. Returns the
    mailboxes whose loops have
    ended: no caller waits there any more."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Event]]] = {}
    for letter in letters:
        by_loop.setdefault(letter[0].loop, []).append(letter)
    unheard = []
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver_all, batch)
        except RuntimeError:
            unheard += [mailbox for mailbox, _ in batch]
    return unheard


def _deliver_all(letters: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in letters:
        mailbox.deliver(event)


Letters = tuple[tuple[Request, Mailbox], ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """Requests that enter the queue together."""

    letters: Letters


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class NotifyIdle:
    """Sets `event` once nothing runs; requests may wait while admission is paused."""

    event: threading.Event


@dataclass(frozen=True, slots=True)
class Call:
    """Runs `function(engine)` on the engine thread between two steps. `each`: with the engine of
    every lane; the future has the first one's result."""

    function: Callable[[Any], Any]
    future: "Future[Any]"
    each: bool = False


@dataclass(frozen=True, slots=True)
class StopThread:
    pass


Command = Submit | Abort | NotifyIdle | Call | StopThread


@dataclass(frozen=True)
class EngineInfo:
    """Limits, names and grammars of an engine that is ready."""

    limits: RequestLimits
    models: ServedModels
    grammars: Grammars


class CommandQueue:
    """The way to one engine thread. Until the engine is ready, `ready` and `send` raise
    EngineUnavailableError."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.unfinished = 0  # choices that were handed to the engine and have no result yet
        self._info: EngineInfo | None = None
        self._closed: str | None = None
        self._lock = threading.Lock()  # no command may enter the queue after `close`

    def open(self, info: EngineInfo) -> None:
        self._info = info

    def close(self, reason: str) -> None:
        """Makes every later call raise EngineUnavailableError with this reason."""
        with self._lock:
            self._closed = reason

    def ready(self) -> EngineInfo:
        if self._closed is not None:
            raise EngineUnavailableError(self._closed)
        if self._info is None:
            raise EngineUnavailableError("the model is loading")
        return self._info

    def send(self, command: Command) -> None:
        with self._lock:
            self.ready()
            self.commands.put(command)

    def count(self, choices: int) -> None:
        with self._lock:
            self.unfinished += choices

    def uncount(self, choices: int, _result: object) -> None:
        with self._lock:
            self.unfinished -= choices


class EngineClient:
    """Calls raise EngineUnavailableError until the engine is ready.

    Args:
        queue: of the engine thread.
        stats: a snapshot of its counters.
    """

    def __init__(self, queue: CommandQueue, stats: Callable[[], EngineStats]) -> None:
        self.queue = queue
        self._stats = stats

    @property
    def engines(self) -> int:
        """How many engines work on this client's requests."""
        return 1

    @property
    def max_model_len(self) -> int:
        return self.queue.ready().limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.queue.ready().limits.vocab_size

    def stats(self) -> EngineStats:
        return self._stats()

    def models(self) -> tuple[ServedModel, ...]:
        return self.queue.ready().models.list()

    def shelved_models(self) -> tuple[ServedModel, ...]:
        """Adapters that requests may name though they lie on disk. Reads it: for a thread that
        may wait."""
        return self.queue.ready().models.shelved()

    @property
    def uses(self) -> AdapterUses:
        return self.queue.ready().models.uses

    def resolve_model(self, name: str | None) -> ServedModel:
        """Raises ModelNotFoundError."""
        models = self.queue.ready().models
        model = models.resolve(name)
        models.uses.note(model.adapter)
        return model

    def check(self, request: Request) -> None:
        """Raises RequestError: the request cannot be run."""
        check_request(request, self.queue.ready().limits)

    async def unenforced(self, structure: Structure) -> tuple[str, ...]:
        """Returns the schema keywords that the structure's grammar does not enforce. Raises
        RequestError."""
        return await self.queue.ready().grammars.unenforced(structure)

    async def generate(self, request: Request) -> RequestOutput:
        """Runs a request to its end. Cancelling it aborts the request and frees its rows.

        Raises RequestError (nothing was run) and EngineUnavailableError. What fails while it runs
        is in the output: finish_reason "error" and its text.
        """
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Runs requests as `generate` does. They enter the queue together, so identical prompts
        are computed once."""
        # keep what was read for them
        with self.uses.holding(request.adapter for request in requests):
            await self.prepare(requests)
            letters = tuple(
                (replace(request, stream=False), Mailbox(request.request_id))
                for request in requests
            )
            return await self._results(letters)

    async def _results(self, letters: Letters) -> list[RequestOutput]:
        self.hand_in(letters)
        try:
            return [await mailbox.result for _, mailbox in letters]
        finally:
            for request, mailbox in letters:
                if not mailbox.result.done() or mailbox.result.cancelled():
                    self.abort(request.request_id)
                elif mailbox.result.exception():
                    pass  # seen: asyncio must not report it as never retrieved

    async def stream(self, request: Request) -> AsyncGenerator[CompletionDelta, None]:
        """Yields deltas until every choice has finished. Leaving early aborts the request.
        Raises as `generate`."""
        with self.uses.holding([request.adapter]):
            await self.prepare([request])
            mailbox = Mailbox(request.request_id)
            self.hand_in(((replace(request, stream=True), mailbox),))
            try:
                while (delta := await mailbox.deltas.get()) is not None:
                    yield delta
                await mailbox.result
            finally:
                if not mailbox.result.done():
                    self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason "abort". Unknown or finished ones are ignored, and
        so is a dead engine."""
        with suppress(EngineUnavailableError):
            self.queue.send(Abort(request_id))

    def pause_admission(self, holder: str = TRAINER, *, freeze: bool = False) -> "Future[Any]":
        """Lets new requests wait; running ones continue, or with `freeze` stop too.

        The pause lasts until every holder has resumed. The future is done once the engine has
        paused.
        """
        return self.call(lambda engine: engine.pause(holder, freeze=freeze), each=True)

    def resume_admission(self, holder: str = TRAINER) -> "Future[Any]":
        return self.call(lambda engine: engine.resume(holder), each=True)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Blocks (not for use in a loop's thread) until nothing runs; False when the time ran
        out."""
        event = threading.Event()
        self.queue.send(NotifyIdle(event))
        return event.wait(timeout_s)

    def call(self, function: Callable[[Any], Any], *, each: bool = False) -> "Future[Any]":
        """Runs `function(engine)` on the engine thread between two steps; `each`: with every
        engine of the thread."""
        future: Future[Any] = Future()
        self.queue.send(Call(function, future, each))
        return future

    def release_caches(self) -> "Future[Any]":
        """Free all memory that no running sequence needs."""
        return self.call(lambda engine: engine.release_caches(), each=True)

    def reset_prefix_cache(self) -> "Future[Clearing]":
        """Forgets every prompt that was kept; the result is of the files on disk, which are removed
        behind it."""
        return self.call(lambda engine: engine.reset_prefix_cache(), each=True)

    def rank_stats(self) -> Mapping[int, EngineStats]:
        """Returns the counters of each rank's engine; empty if there is one rank."""
        return {}

    def hand_in(self, letters: Letters) -> None:
        """Gives requests that `prepare` has let through to the engine, together. The mailboxes
        get their events. In the mailboxes' loop."""
        self.queue.send(Submit(letters))
        for request, mailbox in letters:
            self.queue.count(request.params.n)
            mailbox.result.add_done_callback(partial(self.queue.uncount, request.params.n))

    async def prepare(self, requests: Sequence[Request]) -> None:
        """Refuses bad requests. Compiles grammars, and reads versions of the policy and adapters
        from disk, in other threads than this loop's and the engine's."""
        info = self.queue.ready()
        for request in requests:
            check_request(request, info.limits)
        await info.grammars.prepare([request.params.structure for request in requests])
        for adapter in {request.adapter for request in requests}:
            if adapter is not None and (load := info.models.loader(adapter)) is not None:
                await asyncio.to_thread(load)


class EngineAdmission:
    """Pauses an engine for the memory guard (system/footprint.py), from any thread. An engine that
    has ended is left alone.

    Args:
        trains: whether a training step is under way.
    """

    def __init__(self, client: EngineClient, trains: Callable[[], bool]) -> None:
        self._client, self._trains = client, trains

    def pause(self) -> None:
        with suppress(EngineUnavailableError):
            self._client.pause_admission(MEMORY)

    def resume(self) -> None:
        with suppress(EngineUnavailableError):
            self._client.resume_admission(MEMORY)

    def release(self) -> None:
        with suppress(EngineUnavailableError):
            self._client.release_caches()

    def busy(self) -> bool:
        return bool(self._client.stats().running) or self._trains()

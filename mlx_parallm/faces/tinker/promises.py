"""Results that wait for their clients. Server's thread only.

A request is answered at once with a promise's id; the client asks for the result until it is there.
A result is kept until well after its first delivery, because two polls may overlap and a client may
ask again. An id is the process's own mark and a random part, which cannot be guessed: an id with
another mark is a promise that was lost with its process.
"""

import asyncio
import json
import secrets
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.errors import DeviceFaultError, ParallmError, RefusedError
from mlx_parallm.faces.tinker.wire import PROTOBUF
from mlx_parallm.server.errors import ServerBusyError

POLL_S = 25.0  # a long poll's limit; the SDK gives up after 45
KEPT_AFTER_DELIVERY_S = 120.0
UNCLAIMED_S = 6 * 3600.0  # without anybody asking: the client is gone
NEEDED_S = 900.0  # the same when the memory is needed
# that a promise takes beside its result: its object, its id, its place in the queues
PROMISE_BYTES = 2048
JSON = "application/json"


_DONE = asyncio.Event()  # shared by all promises with a result: an event takes 1 kB
_DONE.set()


@dataclass(frozen=True)
class PromiseResult:
    """The answer to the client: a body and its media type. `failed`: the body says what went
    wrong."""

    body: bytes
    media_type: str = JSON
    failed: bool = False


def json_result(value: dict[str, Any]) -> PromiseResult:
    return PromiseResult(json.dumps(value).encode())


def protobuf_result(body: bytes) -> PromiseResult:
    return PromiseResult(body, PROTOBUF)


def failure(text: str, *, category: str) -> PromiseResult:
    """`category`: "user" (the request was wrong), "server", "unknown"."""
    return PromiseResult(json.dumps({"error": text, "category": category}).encode(), failed=True)


def failure_of(error: ParallmError) -> PromiseResult:
    """Return the text of an error for a client."""
    fault = isinstance(error, DeviceFaultError)
    return failure(str(error), category="server" if fault else "user")


def _no_reason() -> str:
    return ""


def _nothing() -> None:
    return None


@dataclass(eq=False, slots=True)
class Promise:
    """A result to come. `reason`: describes why it waits. `sequence_count`: sequences that
    it will hold.

    It is known by its request's number long after its result was collected, so it then holds
    nothing but its id.
    """

    request_id: str
    reason: Callable[[], str] = _no_reason
    model_id: str | None = None
    sequence_count: int = 0
    result: PromiseResult | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    on_result: list[Callable[["Promise"], None]] = field(default_factory=list)
    cancel: Callable[[], object] = _nothing
    delivered: bool = False

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        return tuple(f"{self.request_id}-{i}" for i in range(self.sequence_count))

    def answer(self) -> dict[str, Any]:
        """Return the immediate answer to the request."""
        answer: dict[str, Any] = {"request_id": self.request_id}
        if self.model_id is not None:
            answer["model_id"] = self.model_id
        if self.sequence_count:
            answer["sample_sequence_ids"] = list(self.sequence_ids)
        return answer


class Promises:
    """The promises of this server, until their clients have fetched the results.

    Args:
        most_bytes: of results that are kept.
    """

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._mark = uuid.uuid4().hex[:12]
        self._most_bytes, self._clock = most_bytes, clock
        self._bytes = 0  # promises and results together
        self._open: dict[str, Promise] = {}
        self._delivered: deque[tuple[float, str]] = deque()  # when, request id
        self._resolved: deque[tuple[float, str]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def new(self, model_id: str | None = None, sample_count: int = 0) -> Promise:
        """A new promise, with the ids of so many samples. Raises ServerBusyError: results take
        too much memory."""
        self._forget()
        while self._bytes > self._most_bytes and self._delivered:
            self._drop(self._delivered.popleft()[1])
        if self._bytes > self._most_bytes:
            self._drop_resolved(NEEDED_S)
        if self._bytes > self._most_bytes:
            raise ServerBusyError(
                f"results of {self._bytes} bytes wait for their clients"
                " (tinker.max_result_bytes); collect them first"
            )
        self._bytes += PROMISE_BYTES
        request_id = f"{self._mark}-{secrets.token_hex(16)}"
        promise = self._open[request_id] = Promise(
            request_id, model_id=model_id, sequence_count=sample_count
        )
        return promise

    def resolve(self, promise: Promise, result: PromiseResult) -> None:
        """Set the result, once; later ones (of a request that was cancelled meanwhile) are
        dropped."""
        if promise.ready.is_set():
            return
        promise.result = result
        if promise.request_id in self._open:
            self._bytes += len(result.body)
            self._resolved.append((self._clock(), promise.request_id))
        promise.ready.set()
        listeners, promise.on_result, promise.ready = promise.on_result, [], _DONE
        promise.reason, promise.cancel = _no_reason, _nothing  # they hold the model, the task
        for listener in listeners:
            listener(promise)

    def find(self, request_id: str) -> Promise:
        """Raises RefusedError, 410: a promise of another process, or one that was collected long
        ago."""
        self._forget()
        promise = self._open.get(request_id)
        if promise is None:
            if request_id.startswith(f"{self._mark}-"):
                raise RefusedError(
                    f"the result of request {request_id!r} was collected and is gone", 410
                )
            raise RefusedError(
                f"request {request_id!r} is unknown: the server was restarted, and what it had"
                " promised is lost."
                " Checkpoints are kept: create_training_client_from_state continues from one",
                410,
            )
        return promise

    async def wait(
        self, promise: Promise, seconds: float, ending: Callable[[], bool]
    ) -> PromiseResult | None:
        """The result, once it is there; None after `seconds`, or once the server is ending."""
        deadline = self._clock() + seconds
        while (
            not promise.ready.is_set() and not ending() and (left := deadline - self._clock()) > 0
        ):
            try:
                await asyncio.wait_for(promise.ready.wait(), min(left, 1.0))
            except TimeoutError:
                continue
        if promise.result is not None and not promise.delivered:
            promise.delivered = True
            self._delivered.append((self._clock(), promise.request_id))
        return promise.result

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop results whose client says that it has them."""
        for request_id in request_ids:
            if (promise := self._open.get(request_id)) is not None and promise.result is not None:
                self._drop(request_id)

    def _forget(self) -> None:
        now = self._clock()
        while self._delivered and now - self._delivered[0][0] > KEPT_AFTER_DELIVERY_S:
            self._drop(self._delivered.popleft()[1])
        self._drop_resolved(UNCLAIMED_S)

    def _drop_resolved(self, seconds: float) -> None:
        """Drop results that were not collected in time."""
        now = self._clock()
        while self._resolved and now - self._resolved[0][0] > seconds:
            self._drop(self._resolved.popleft()[1])

    def _drop(self, request_id: str) -> None:
        """Drop the result. A client that knows the request's number learns that there was one, no
        more."""
        promise = self._open.pop(request_id, None)
        if promise is not None:
            self._bytes -= PROMISE_BYTES
        if promise is not None and promise.result is not None:
            self._bytes -= len(promise.result.body)
            promise.result = None

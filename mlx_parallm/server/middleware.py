"""The layers around the routes, outermost first: request context → auth (auth.py) → body limit →
gate.

Plain ASGI callables: Starlette's BaseHTTPMiddleware would hide the client's hang-up from the
handlers.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.server.auth import PublicPaths
from mlx_parallm.server.context import ServerState
from mlx_parallm.server.errors import HEALTH, TIMED_OUT, error_body, error_response
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.sse import EVENT_STREAM, FORM, last_words
from mlx_parallm.system.log import get_logger

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# longest time without a byte of the body; and time allowed beside the slowest rate's
BODY_SECONDS = 30.0
SLOWEST_BYTES_PER_SECOND = 64 << 10
SMALL_BODY_BYTES = 64 << 10
UNFINISHED_BODIES = 8
_log = get_logger("server")


class RequestContextMiddleware:
    """Adds the request id (echoed or made, bound to the log), the access log and the time limit.

    An unforeseen error becomes a 500 without a traceback; the traceback is in the log, other
    requests continue.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, timeout_s: float) -> None:
        self._app = app
        self._metrics = metrics
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _named(scope, b"x-request-id") or uuid.uuid4().hex.encode()
        # the client's name for its conversation; for the log
        session = _named(scope, b"x-session-id")
        bound = {"request_id": request_id.decode()} | (
            {"session_id": session.decode()} if session else {}
        )
        answer = _Sender(send, request_id)
        started = time.perf_counter()
        limit = asyncio.timeout(self._timeout_s or None)
        with structlog.contextvars.bound_contextvars(**bound):
            try:
                async with limit:
                    await self._app(scope, receive, answer.send)
            # the drain's time is over; nothing is outside this layer but uvicorn
            except asyncio.CancelledError:
                await answer.cut_short(scope, receive, "the server is shutting down", 503)
            except Exception:  # noqa: BLE001  the HTTP boundary: one request's bug must not reach another's
                if limit.expired():
                    message = (
                        "the answer was not ready within server.request_timeout_s ="
                        f" {self._timeout_s:g} s"
                    )
                    await answer.cut_short(scope, receive, message, TIMED_OUT)
                else:
                    _log.exception("request failed", method=scope["method"], path=scope["path"])
                    message = "the server had an error while processing the request"
                    await answer.cut_short(scope, receive, message, 500)
            finally:
                seconds = time.perf_counter() - started
                self._metrics.observe_request(_route_of(scope), answer.status, seconds)
                _log.debug(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=answer.status,
                    milliseconds=round(seconds * 1e3, 1),
                )


class _Sender:
    """Sends one answer, knows how far it is, and ends it when it cannot continue."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self.status = 0
        self._send = send
        self._request_id = request_id
        self._streams = self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.get("headers", [])
            self._streams = any(value.startswith(EVENT_STREAM.encode()) for _, value in headers)
            message["headers"] = [*headers, (b"x-request-id", self._request_id)]
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def cut_short(self, scope: Scope, receive: Receive, message: str, status: int) -> None:
        """A proper error when nothing is out yet; a last event in a stream; else the connection
        breaks off."""
        if self.status == 0:
            await error_response(message, status)(scope, receive, self.send)
        elif self._streams and not self._ended:
            last = last_words(error_body(message, status), scope.get(FORM))
            await self.send({"type": "http.response.body", "body": last, "more_body": False})


class BodyLimitMiddleware:
    """413 for a body over the limit, whether it says so (Content-Length) or not (chunked); 408
    for one that comes too slowly; 503 where unfinished bodies take UNFINISHED_BODIES times the
    limit together (small ones are let in)."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._unfinished = 0  # bytes, of all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next(
            (value for key, value in scope["headers"] if key == b"content-length"), b"0"
        )
        too_long = announced.isdigit() and int(announced) > self._max_bytes
        received = held = 0
        finished = False
        begun = asyncio.get_running_loop().time()

        async def counted_receive() -> Message:
            nonlocal received, held, finished
            if too_long:  # raised on reading the body, so that a route can record the refusal
                raise HTTPException(413, self._message())
            if finished:
                return await receive()
            message = await _in_time(
                receive, begun + BODY_SECONDS + received / SLOWEST_BYTES_PER_SECOND
            )
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                received += size
                held += size
                self._unfinished += size
                finished = not message.get("more_body", False)
                if received > self._max_bytes:
                    raise HTTPException(413, self._message())
                if (
                    received > SMALL_BODY_BYTES
                    and self._unfinished > UNFINISHED_BODIES * self._max_bytes
                ):
                    raise HTTPException(
                        503, "too many request bodies are on their way", {"Retry-After": "1"}
                    )
            if finished:
                self._unfinished -= held
                held = 0
            return message

        try:
            await self._app(scope, counted_receive, send)
        finally:
            self._unfinished -= held

    def _message(self) -> str:
        return f"the request body is larger than {self._max_bytes} bytes"


async def _in_time(receive: Receive, deadline: float) -> Message:
    """The next part of a body. Raises HTTPException 408: nothing came for BODY_SECONDS, or not
    until `deadline`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(min(deadline, loop.time() + BODY_SECONDS)):
            return await receive()
    except TimeoutError:
        message = (
            f"the request's body came too slowly: nothing for {BODY_SECONDS:g}"
            " s, or less than 64 KiB a second"
        )
        raise HTTPException(408, message, {"Connection": "close"}) from None


class GateMiddleware:
    """503 from every route but /health until the engine and the tokenizer are there, and once the
    server drains.

    `while_loading`: path → the body of a 200 that is sent instead while the model loads. `public`:
    always let in.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        while_loading: Mapping[str, Any],
        public: PublicPaths,
    ) -> None:
        self._app = app
        self._state = state
        self._while_loading = while_loading
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == HEALTH or self._public.allows(scope):
            await self._app(scope, receive, send)
            return
        unavailable = self._state.unavailable
        if unavailable is not None:
            answer = error_response(unavailable[1], 503, code="model_not_ready")
            if unavailable[0] == "loading" and scope["path"] in self._while_loading:
                answer = JSONResponse(self._while_loading[scope["path"]])
            await answer(scope, receive, send)
            return
        with self._state.answering():
            await self._app(scope, receive, send)


def _named(scope: Scope, header: bytes) -> bytes | None:
    """The first value of that header that can be a name."""
    values = (bytes(value) for key, value in scope["headers"] if key == header)
    return next((value for value in values if _REQUEST_ID.fullmatch(value)), None)


def _route_of(scope: Scope) -> str:
    """The route's template, so that a label has few values; unknown paths share one."""
    return str(getattr(scope.get("route"), "path", "unmatched"))

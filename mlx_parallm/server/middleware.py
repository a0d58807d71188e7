"""The layers around the routes, outermost first: request context → auth (auth.py) → body limit → loading gate.

Plain ASGI callables: Starlette's BaseHTTPMiddleware would hide the client's hang-up from the handlers.
"""

import asyncio
import re
import time
import uuid

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.log import get_logger
from mlx_parallm.server.context import ServerState
from mlx_parallm.server.errors import error_response
from mlx_parallm.server.metrics import ServerMetrics

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_log = get_logger("server")


class RequestContextMiddleware:
    """Request id (echoed or made, bound to the log), access log, timing; and the last resort for unforeseen errors:
    one 500 without a traceback in it, the traceback in the log, the server unharmed."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        started = time.perf_counter()
        with structlog.contextvars.bound_contextvars(request_id=request_id.decode("ascii")):
            try:
                await self._app(scope, receive, send_with_id)
            except asyncio.CancelledError:  # the drain's time is over; nothing is outside this layer but uvicorn
                if status == 0:
                    await error_response("the server is shutting down", 503)(scope, receive, send_with_id)
            except Exception:  # noqa: BLE001  the HTTP boundary: one request's bug must not reach another's
                _log.exception("request failed", method=scope["method"], path=scope["path"])
                if status == 0:
                    response = error_response("the server had an error while processing the request", 500)
                    await response(scope, receive, send_with_id)
            finally:
                seconds = time.perf_counter() - started
                self._metrics.observe_request(_route_of(scope), status, seconds)
                _log.debug(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    milliseconds=round(seconds * 1e3, 1),
                )


class BodyLimitMiddleware:
    """413 for a body over the limit, whether it says so (Content-Length) or not (chunked)."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await error_response(self._message(), 413, code="request_too_large")(scope, receive, send)
            return
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise HTTPException(413, self._message())
            return message

        await self._app(scope, counted_receive, send)

    def _message(self) -> str:
        return f"the request body is larger than {self._max_bytes} bytes"


class LoadingGateMiddleware:
    """503 from every route but /health until the engine and the tokenizer are there."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._state.is_ready and scope["path"] != "/health":
            response = error_response(self._state.unavailable_reason, 503, code="model_not_ready")
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _request_id(scope: Scope) -> bytes:
    for key, value in scope["headers"]:
        if key == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


def _route_of(scope: Scope) -> str:
    """The route's template, so that a label has few values; unknown paths share one."""
    return str(getattr(scope.get("route"), "path", "unmatched"))

"""A recorder in front of another OpenAI-compatible server: `mlx_parallm traces record --upstream URL`.

Every request goes on to the upstream as it came, its key too, which is kept nowhere. Chat completions are recorded,
whole or streamed, before the client sees their end.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.errors import EndpointError, ParallmError
from mlx_parallm.server.auth import AuthMiddleware, PublicPaths
from mlx_parallm.server.errors import (
    ClientDisconnectedError,
    error_body,
    error_response,
    install_error_handlers,
    status_of,
)
from mlx_parallm.server.middleware import BodyLimitMiddleware
from mlx_parallm.server.protocol.fields import MAX_BODY_BYTES
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.sse import event, until_hangup
from mlx_parallm.system.log import get_logger
from mlx_parallm.traces.answers import ChunkReader, take_answer
from mlx_parallm.traces.recorder import RecordedCall, SessionRecorder, session_name
from mlx_parallm.traces.routes import SessionName, add_feedback
from mlx_parallm.traces.session import ABORTED, COMPLETE

CHAT = "chat/completions"
TIMEOUT_S = 600.0  # without a byte from the upstream
_HOP_BY_HOP = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host", "content-length", "content-encoding", "accept-encoding"),
)
log = get_logger("traces")


def recording_proxy(recorder: SessionRecorder, upstream: str) -> ASGIApp:
    """The application. Only this machine's own names are answered.

    Args:
        upstream: URL with the version, e.g. "https://api.openai.com/v1".

    Raises EndpointError: `upstream` is not a URL.
    """
    if not upstream.startswith(("http://", "https://")):
        raise EndpointError(f"{upstream!r} is not a URL: expected e.g. https://api.openai.com/v1")
    app = FastAPI(title="mlx_parallm traces")
    relay = _Relay(recorder, upstream.rstrip("/"))
    router = json_router("sessions")
    add_feedback(router, recorder)

    @router.api_route("/sessions/{name}/v1/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def relayed(name: SessionName, path: str, request: HTTPRequest) -> Response:
        return await relay.answer(session_name(name), path, request)

    app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(BodyLimitMiddleware, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(AuthMiddleware, api_key=None, origins=(), basic_prefixes=(), public=PublicPaths())
    return app


class _Relay:
    """Belongs to the server's loop."""

    def __init__(self, recorder: SessionRecorder, upstream: str) -> None:
        self._recorder, self._upstream = recorder, upstream
        self._client: httpx.AsyncClient | None = None

    @property
    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx.AsyncClient(timeout=httpx.Timeout(TIMEOUT_S, pool=None), limits=limits)
        return self._client

    async def answer(self, name: str, path: str, request: HTTPRequest) -> Response:
        body = await request.body()
        call = _call_of(name, body) if path == CHAT and request.method == "POST" else None
        headers = _passed_on(request.headers)
        sent = self._http.build_request(
            request.method, f"{self._upstream}/{path}", params=request.query_params, headers=headers, content=body
        )
        try:
            reply = await until_hangup(request.receive, self._http.send(sent, stream=True))
            if reply.headers.get("content-type", "").startswith("text/event-stream"):
                return _Relayed(reply, self._events(reply, call))
            try:
                content = await until_hangup(request.receive, reply.aread())
            finally:
                await reply.aclose()
        except ClientDisconnectedError:
            await self._write(call, ABORTED)
            raise
        except httpx.HTTPError as error:
            await self._write(call, ABORTED)
            return error_response(f"{self._upstream} cannot be reached: {str(error) or type(error).__name__}", 502)
        if call is not None and reply.is_success:
            answer = _json_object(content)
            take_answer(call[0], answer, temperature=call[2])
            if call[0].choices:
                await self._write(call, COMPLETE)
        return Response(content, reply.status_code, _passed_on(reply.headers))

    async def _events(
        self, reply: httpx.Response, call: "tuple[RecordedCall, int, float] | None"
    ) -> AsyncGenerator[bytes, None]:
        """The upstream's events, byte for byte."""
        reader = ChunkReader(*call) if call is not None else None
        written = False
        try:
            async with aclosing(_split_events(reply)) as events:
                async for raw in events:
                    data = _event_data(raw)
                    if reader is not None and data:
                        reader.take(data)
                        if reader.ended and not written:
                            written = True
                            await self._write(call, COMPLETE)
                    yield raw
        finally:
            await reply.aclose()
            if not written:
                await self._write(call, ABORTED)

    async def _write(self, call: "tuple[RecordedCall, int, float] | None", status: str) -> None:
        if call is not None:
            call[0].status = status
            await self._recorder.commit(call[0])


class _Relayed(Response):
    """Passes on a stream until its end, or until the client hangs up."""

    def __init__(self, reply: httpx.Response, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(status_code=reply.status_code, headers=_passed_on(reply.headers))
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_hangup(receive, self._send_all(send))
        except ClientDisconnectedError:
            log.debug("client hung up")
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except (httpx.HTTPError, ParallmError) as error:
            status = status_of(error) if isinstance(error, ParallmError) else 502
            failure = event(error_body(f"the stream broke off: {error}", status))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _call_of(name: str, body: bytes) -> tuple[RecordedCall, int, float] | None:
    """The call, its number of choices and its temperature; None where the upstream will refuse the body."""
    asked = _json_object(body)
    messages = asked.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    tools = [tool for tool in asked.get("tools") or () if isinstance(tool, dict)]
    choices, temperature = asked.get("n") or 1, asked.get("temperature")
    call = RecordedCall(name, messages, tools, asked.get("model"))
    return call, choices if isinstance(choices, int) else 1, 1.0 if temperature is None else float(temperature)


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


async def _split_events(reply: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events with the blank line that ends each."""
    rest = b""
    async for part in reply.aiter_bytes():
        rest += part
        while True:
            ends = [(at, len(mark)) for mark in (b"\n\n", b"\r\n\r\n") if (at := rest.find(mark)) >= 0]
            if not ends:
                break
            at, length = min(ends)
            yield rest[: at + length]
            rest = rest[at + length :]
    if rest:
        yield rest


def _event_data(raw: bytes) -> dict[str, Any]:
    lines = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
    return _json_object(b"\n".join(lines))

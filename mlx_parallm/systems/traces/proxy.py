"""A recorder in front of another OpenAI-compatible server: `mlx_parallm traces record --upstream
URL`.

Every request continues to the upstream as it came, its key too, which is kept nowhere; answers come
back byte for byte. Chat completions, Responses and Messages are recorded, whole or streamed, before
the client sees their end. Recording never fails a call: unreadable parts and failed writes are left
out, with a line in the log that says why and how many there are by now.
"""

from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from pydantic import BaseModel, BeforeValidator, Field, StrictFloat, StrictInt
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.errors import EndpointError, ParallmError
from mlx_parallm.server.auth import AuthMiddleware, PublicPaths
from mlx_parallm.server.client_hangup import until_hangup
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
from mlx_parallm.server.sse import event
from mlx_parallm.system.foreign_http import Bounds, async_client
from mlx_parallm.system.foreign_json import read_json
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.pydantic_faults import faults
from mlx_parallm.systems.traces.importers.other_apis import READERS
from mlx_parallm.systems.traces.received_answers import MOST_CHOICES, CallReader, take_answer
from mlx_parallm.systems.traces.recorder import RecordedCall, SessionRecorder, session_name
from mlx_parallm.systems.traces.routes import SessionName, add_feedback
from mlx_parallm.systems.traces.schema import SHAPES, Json
from mlx_parallm.systems.traces.session import ABORTED, COMPLETE, TurnStatus

TIMEOUT_S = 600.0  # without a byte from the upstream
LONGEST_EVENT = 8 << 20  # bytes of one that is recorded
BOUNDS = Bounds(event=Bounds.body)  # a longer one is passed on all the same
_HOP_BY_HOP = (
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
    "accept-encoding",
)
_DECODED = (*_HOP_BY_HOP, "content-encoding")  # headers of an answer that is decoded here
UNREADABLE = (*SHAPES, LookupError, ArithmeticError, RecursionError, ParallmError)
"""What a request or an answer of another form than the chat's, or a full disk, raises before its
session is written."""
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

    @router.api_route(
        "/sessions/{name}/v1/{path:path}",
        methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"],
        include_in_schema=False,
    )
    async def relayed(name: SessionName, path: str, request: HTTPRequest) -> Response:
        return await relay.answer(session_name(name), path, request)

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(BodyLimitMiddleware, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(
        AuthMiddleware, api_key=None, origins=(), basic_prefixes=(), public=PublicPaths()
    )
    return app


class _Relay:
    """Belongs to the server's loop."""

    def __init__(self, recorder: SessionRecorder, upstream: str) -> None:
        self._recorder, self._upstream = recorder, upstream
        self._client: Any = None

    @property
    def _http(self) -> Any:
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = async_client(
                BOUNDS,
                timeout=httpx.Timeout(TIMEOUT_S, pool=None),
                limits=limits,
                return_redirects=True,
            )
        return self._client

    async def answer(self, name: str, path: str, request: HTTPRequest) -> Response:
        body = await request.body()
        recording = _Recording(self._recorder)
        if path in READERS and request.method == "POST":
            recording.begin(name, READERS[path](), body)
        # as it was sent: "%2F" is not a slash
        rest = request.scope["raw_path"].split(b"/", 4)[4].decode("ascii")
        query = request.scope["query_string"].decode("ascii")
        url = f"{self._upstream}/{rest}" + (f"?{query}" if query else "")
        try:
            headers = _passed_on(request.headers.raw, _HOP_BY_HOP)
            sent = self._http.build_request(request.method, url, headers=headers, content=body)
            reply = await until_hangup(request.receive, self._http.send(sent, stream=True))
            if reply.headers.get("content-type", "").startswith("text/event-stream"):
                return _Relayed(reply, self._stream(reply, recording))
            try:
                content = await until_hangup(request.receive, reply.aread())
            finally:
                await reply.aclose()
        except ClientDisconnectedError:
            await recording.end(ABORTED)
            raise
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            await recording.end(ABORTED)
            reason = str(error) or type(error).__name__
            return error_response(f"{self._upstream} cannot be reached: {reason}", 502)
        if reply.is_success:
            await recording.whole(content)
        answer = Response(content, reply.status_code)
        answer.raw_headers = [
            *_passed_on(reply.headers.raw, _DECODED),
            (b"content-length", b"%d" % len(content)),
        ]
        return answer

    async def _stream(
        self, reply: httpx.Response, recording: "_Recording"
    ) -> AsyncGenerator[bytes, None]:
        """The upstream's bytes. What ends the answer is sent once it is recorded."""
        try:
            async for part in reply.aiter_bytes():
                await recording.part(part)
                yield part
            # some servers leave the last event without its blank line
            await recording.part(b"\n\n")
        finally:
            await reply.aclose()
            await recording.end(ABORTED)


class _ChatRequest(BaseModel):
    """The fields of a request that a recorder reads."""

    messages: list[Json]
    model: str | None = None
    # false, 0 or "" of a lax client is none, as its upstream may take it
    tools: Annotated[list[Json] | None, BeforeValidator(lambda value: value or None)] = None
    n: Annotated[StrictInt, Field(ge=0, le=MOST_CHOICES)] | None = None
    temperature: StrictFloat | None = None


class _Recording:
    """Records one call, or gives up: nothing that it reads or writes may fail the call."""

    given_up = 0  # calls of this process

    def __init__(self, recorder: SessionRecorder) -> None:
        self._recorder = recorder
        self._open: tuple[RecordedCall, CallReader] | None = None
        self._events = _EventSplitter()

    def begin(self, name: str, reader: CallReader, body: bytes) -> None:
        with self._giving_up(name):
            request = _ChatRequest.model_validate(reader.chat(_json_object(body)))
            call = RecordedCall(name, request.messages, request.tools or [], request.model)
            call.temperature = 1.0 if request.temperature is None else request.temperature
            self._open = call, reader

    async def whole(self, content: bytes) -> None:
        """Record an answer that was not streamed; one without choices is none."""
        if self._open is not None:
            call, reader = self._open
            with self._giving_up(call.session):
                take_answer(call, reader.answer(_json_object(content)))
            if call.choices:
                await self.end(COMPLETE)

    async def part(self, data: bytes) -> None:
        """Take the next bytes of a stream; record the call if they end it."""
        if self._open is None:
            return
        call, reader = self._open
        with self._giving_up(call.session):
            answer = None
            for event_bytes in self._events.feed(data):
                if chunk := _event_data(event_bytes):
                    answer = reader.take(chunk) or answer
            if answer is not None:
                take_answer(call, answer)
                await self.end(COMPLETE)

    async def end(self, status: TurnStatus) -> None:
        """Write the call, once."""
        if self._open is None:
            return
        (call, reader), self._open = self._open, None
        with self._giving_up(call.session):
            if status == ABORTED:
                take_answer(call, reader.so_far())
            call.status = status
            await self._recorder.commit(call)

    @contextmanager
    def _giving_up(self, session: str) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            self._open = None
            _Recording.given_up += 1
            reason = faults(error, 3)[:200] or type(error).__name__
            log.warning(
                "a call is not recorded", session=session, reason=reason, so_far=_Recording.given_up
            )


class _Relayed(Response):
    """Passes on a stream until its end, or until the client hangs up."""

    def __init__(self, reply: httpx.Response, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(status_code=reply.status_code)
        self.raw_headers = _passed_on(reply.headers.raw, _DECODED)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
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


def _json_object(content: bytes) -> dict[str, Any]:
    """Raises ValueError: no JSON object."""
    value = read_json(content)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _passed_on(
    headers: Iterable[tuple[bytes, bytes]], dropped: Collection[str]
) -> list[tuple[bytes, bytes]]:
    """Every header, also one that comes several times."""
    return [
        (name, value) for name, value in headers if name.decode("latin-1").lower() not in dropped
    ]


class _EventSplitter:
    """Finds the events of a stream. Raises ValueError: one has more than LONGEST_EVENT bytes."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []  # lines of the unfinished event
        self._line = bytearray()
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        pieces = data.split(b"\n")
        for number, piece in enumerate(pieces):
            self._line += piece
            self._size += len(piece)
            if self._size > LONGEST_EVENT:
                raise ValueError(f"an event has more than {LONGEST_EVENT} bytes")
            if number == len(pieces) - 1:
                break
            line = bytes(self._line).removesuffix(b"\r")
            self._line.clear()
            if line:
                self._lines.append(line)
            elif self._lines:
                event_bytes, self._lines, self._size = b"\n".join(self._lines), [], 0
                yield event_bytes


def _event_data(raw: bytes) -> dict[str, Any]:
    """The object of an event; an event without one (a comment, [DONE]) is empty."""
    data = b"\n".join(line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:"))
    return {} if not data or data == b"[DONE]" else _json_object(data)

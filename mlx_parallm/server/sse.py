"""Server-sent events: `EventStream` is a response that sends an async iterator of JSON objects."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from mlx_parallm.errors import ParallmError, RequestError
from mlx_parallm.server.client_hangup import until_hangup
from mlx_parallm.server.errors import ClientDisconnectedError, error_body, status_of
from mlx_parallm.system.log import get_logger

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
FORM = "stream_form"  # in the scope: the `StreamForm` of the stream that has begun
EVENT_STREAM = "text/event-stream"
_log = get_logger("server")


class StreamForm(Protocol):
    """A stream whose events have names: `type` of each, and no `[DONE]` after them."""

    def error(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """The last event of a stream that fails; `error`: OpenAI's error body."""


def as_json(data: Any) -> bytes:
    """Compact JSON in UTF-8. A half of a surrogate pair, which a model may write, stays an
    escape."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


class AnswerResponse(JSONResponse):
    """A JSON body with text of a model in it."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


def event(data: dict[str, Any], form: StreamForm | None = None) -> bytes:
    name = b"" if form is None else f"event: {data['type']}\n".encode()
    return name + b"data: " + as_json(data) + b"\n\n"


def last_words(error: dict[str, Any], form: StreamForm | None) -> bytes:
    """The end of a stream that fails. `error`: OpenAI's error body."""
    return event(error) + DONE if form is None else event(form.error(error), form)


class EventStream(Response):
    """Sends `events` as SSE and, without a form, `[DONE]` after them; closes the generator whatever
    happens.

    `prefetch` waits for the first event, so that a request that cannot run still gets its proper
    status. An error after the headers becomes a last event `{"error": …}`.
    """

    media_type = EVENT_STREAM

    def __init__(
        self, events: AsyncGenerator[dict[str, Any], None], form: StreamForm | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._form = events, form
        self._first: dict[str, Any] | None = None

    async def prefetch(self, receive: Receive) -> "EventStream":
        """Return itself. Raises what the first event's making raises, or
        ClientDisconnectedError."""
        self._first = await until_hangup(receive, self._next())
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FORM] = self._form
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await until_hangup(receive, self._send_all(send))
        except ClientDisconnectedError:
            _log.debug("client hung up")
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        try:
            data = self._first
            while data is not None:
                await send(_body(event(data, self._form)))
                data = await self._next()
            last = DONE if self._form is None else b""
        except ParallmError as error:
            last = last_words(_error_event(error), self._form)
        except Exception:  # noqa: BLE001  the headers are out: all that is left is to say so in the stream
            _log.exception("stream failed")
            last = last_words(
                error_body("the server had an error while processing the request", 500), self._form
            )
        await send(_body(last, more=False))

    async def _next(self) -> dict[str, Any] | None:
        return await anext(self._events, None)


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _error_event(error: ParallmError) -> dict[str, Any]:
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    return error_body(str(error), status_of(error), param=param, code=code)


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several generators as they come, each with its generator's position. The first
    error ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def pump(position: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    queue.put_nowait((position, item))
        finally:
            queue.put_nowait(None)

    pumps = [
        asyncio.ensure_future(pump(position, stream)) for position, stream in enumerate(streams)
    ]
    try:
        ended = 0
        while ended < len(pumps):
            entry = await queue.get()
            if entry is not None:
                yield entry
                continue
            ended += 1
            for done in pumps:
                if done.done() and not done.cancelled() and (error := done.exception()) is not None:
                    raise error
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

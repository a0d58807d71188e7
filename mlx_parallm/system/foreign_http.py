"""Clients of other people's servers: THE way to fetch anything over HTTP or a WebSocket.

    async_client, sync_client   an `httpx` client (or one of its fork `httpx2`) whose answers are
                                bounded: unpacked bytes, bytes of one event of a stream, seconds
    connect_socket              a WebSocket whose messages are bounded

A redirect is followed within the scheme, host and port that were asked, and refused beyond: a key
in the headers, or a request to a machine inside, would go where the other server says. What goes
beyond a bound raises the library's own `RequestError`, in one line.

`tests/test_architecture.py` holds the package to this module.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import httpx

from mlx_parallm.system.foreign_json import read_json

PIECE = 1 << 16  # bytes that are unpacked at a time
MOST_REDIRECTS = 5
LATE = "the answer did not end in time"
LOCAL = ("127.0.0.1", "localhost", "::1")
ACCEPTED = "gzip, deflate"  # what `Unpacked` unpacks piece by piece
_LINE_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_EVENT_ENDS = {
    "text/event-stream": _LINE_ENDS,
    "application/x-ndjson": (b"\n",),
    "application/jsonl": (b"\n",),
}


@dataclass(frozen=True)
class Bounds:
    """How much of an answer is taken: bytes of all of it, or of one event of a stream. `seconds`:
    from the request to the last byte; None: the caller bounds it. `containers`: lists and objects
    of its JSON."""

    body: int = 64 << 20
    event: int = 16 << 20
    seconds: float | None = None
    containers: int = 4 << 20


class BeyondBoundsError(Exception):
    """An answer that is larger or later than it may be. One line; the clients raise it as their
    library's RequestError."""


class Unpacked:
    """Takes an answer's bytes as they come; gives them unpacked, a piece at a time, and counts.

    Args:
        encoding: the header Content-Encoding; `media_type`: Content-Type, which says whether events
            are counted alone, or the whole; `announced`: Content-Length.
        what: its name in errors.

    Raises BeyondBoundsError: packed in a way that nobody asked for, or announced too large.
    """

    def __init__(
        self,
        encoding: str,
        media_type: str,
        announced: str,
        bounds: Bounds,
        what: str = "the answer",
    ) -> None:
        self._what = what
        self._bounds, self._raw, self._size, self._end = bounds, 0, 0, b""
        self._ends = _EVENT_ENDS.get(media_type.partition(";")[0].strip().lower(), ())
        self._encoding = encoding.strip().lower().removeprefix("x-")
        if self._encoding not in ("", "identity", "gzip", "deflate"):
            raise BeyondBoundsError(
                f"{self._what} is packed as {encoding[:40]!r}; read here are: {ACCEPTED}"
            )
        if not self._ends and announced.isdigit() and int(announced[:20]) > bounds.body:
            raise BeyondBoundsError(self._too_large(int(announced[:20])))
        self._unpacker: Any = None
        if self._encoding in ("gzip", "deflate"):
            self._unpacker = zlib.decompressobj(31 if self._encoding == "gzip" else 15)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what some bytes hold. Raises BeyondBoundsError."""
        if self._unpacker is None:
            self._count(data)
            yield data
            return
        self._raw += len(data)
        if not self._ends and self._raw > self._bounds.body:
            raise BeyondBoundsError(self._too_large(self._raw))
        first = self._raw == len(data)
        while data:
            try:
                piece = self._unpacker.decompress(data, PIECE)
            except zlib.error as error:
                if not (first and self._encoding == "deflate"):
                    raise BeyondBoundsError(
                        f"{self._what} is not {self._encoding}: {error}"
                    ) from error
                self._unpacker, first = zlib.decompressobj(-15), False  # without zlib's header
                continue
            first = False
            if piece:
                self._count(piece)
                yield piece
            data = self._unpacker.unconsumed_tail
            if self._unpacker.eof and (data := self._unpacker.unused_data):
                self._unpacker = zlib.decompressobj(31)  # another member of the same gzip

    def _count(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._ends:
            joined = self._end + piece
            at = max(
                (joined.rfind(end) + len(end) for end in self._ends if end in joined), default=0
            )
            if at:
                self._size = len(joined) - at
            self._end = joined[-3:]
        if self._size > (self._bounds.event if self._ends else self._bounds.body):
            raise BeyondBoundsError(self._too_large(self._size))

    @property
    def is_complete(self) -> bool:
        """Whether what was packed has come to its end."""
        return self._unpacker is None or self._unpacker.eof

    def _too_large(self, size: int) -> str:
        what, most = self._what, self._bounds.body
        if self._ends:
            what, most = f"an event of {what}", self._bounds.event
        return f"{what} has {size:,} bytes or more, at most {most:,} are taken"


def json_of(reply: Any, bounds: Bounds | None = None) -> Any:
    """Return the JSON of an answer that was read. Raises ValueError: it is none, or beyond the
    bounds."""
    return read_json(reply.content, most=(bounds or Bounds()).containers)


def async_client(
    bounds: Bounds | None = None,
    *,
    library: ModuleType = httpx,
    return_redirects: bool = False,
    look: Callable[[Any], Awaitable[None]] | None = None,
    on_refusal: Callable[[str], None] | None = None,
    **options: Any,
) -> Any:
    """Return an `AsyncClient` of `library`.

    Args:
        library: `httpx`, or `httpx2`.
        return_redirects: the caller handles them: they are answers like others.
        look: is given each answer before its body is read, and may read it.
        on_refusal: is told why an answer is refused, if the caller never sees the error.
        options: the client's own.
    """
    client = _async_client(library)(**_with_encoding(options))
    client.bounds, client.return_redirects = bounds or Bounds(), return_redirects
    client.look, client.on_refusal = look, on_refusal
    return client


def sync_client(bounds: Bounds | None = None, **options: Any) -> httpx.Client:
    """Return a `Client` of httpx. `options`: the client's own."""
    client = _SyncClient(**_with_encoding(options))
    client.bounds = bounds or Bounds()
    return client


async def connect_socket(url: str, *, open_timeout_s: float, **options: Any) -> Any:
    """Open a WebSocket, without following any redirect; no proxy leads to this machine itself.

    Args:
        options: of `websockets.asyncio.client.connect`, `max_size` among them.

    Raises as `websockets` does: OSError (a TimeoutError is one), WebSocketException.
    """
    from websockets.asyncio.client import connect

    class Connect(connect):
        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc  # the answer's own status, as an error

    proxy = None if is_local(url) else True
    return await Connect(url, open_timeout=open_timeout_s, proxy=proxy, **options)


def is_local(url: str) -> bool:
    """Return whether the server runs on this machine; such a server is reached without a proxy."""
    return urlsplit(url).hostname in LOCAL


def _with_encoding(options: dict[str, Any]) -> dict[str, Any]:
    names = {name.lower() for name in options.get("headers") or {}}
    wanted = {} if "accept-encoding" in names else {"Accept-Encoding": ACCEPTED}
    return {**options, "headers": {**wanted, **(options.get("headers") or {})}}


def _unpacked(response: Any, bounds: Bounds) -> Unpacked:
    """Take the packing of an answer over from the library, whose unpackers have no bound."""
    headers = response.headers
    encoding = headers.pop("content-encoding", "")
    body = response.request.method != "HEAD"
    announced = headers.get("content-length", "") if body else ""
    return Unpacked(encoding, headers.get("content-type", ""), announced, bounds)


def _following(response: Any) -> Any:
    """Return the request that a redirect leads to; None: it is not a redirect. Raises
    BeyondBoundsError: it leads to another server, or would lose the request's body."""
    following = response.next_request
    if following is None:
        return None
    origin, target = response.request.url, following.url
    place = f"{target.scheme}://{target.netloc.decode('ascii', 'replace')}"[:200]
    if (origin.scheme, origin.host, origin.port) != (target.scheme, target.host, target.port) or (
        target.userinfo and target.userinfo != origin.userinfo
    ):
        raise BeyondBoundsError(
            f"HTTP {response.status_code} leads to {place}: a redirect to another server is not"
            " followed: set its URL if you trust it"
        )
    if following.method != response.request.method:
        raise BeyondBoundsError(
            f"HTTP {response.status_code} leads to {str(target)[:200]} and would lose what was"
            " sent: set its URL"
        )
    return following


@cache
def _async_client(library: Any) -> Any:
    """Return the client's class over `library`'s own."""
    error = type("ForeignAnswerError", (library.RequestError,), {})
    body = type("ForeignBody", (_Body, library.AsyncByteStream), {})
    return type(
        "ForeignClient", (_Client, library.AsyncClient), {"error": error, "body_type": body}
    )


class _Body:
    """The unpacked bytes of an answer. `until`: of the loop's clock."""

    def __init__(self, response: Any, client: "_Client", until: float | None) -> None:
        self._stream, self._request = response.stream, response.request
        self._unpacked, self._until = _unpacked(response, client.bounds), until
        self._client = client

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._stream)
        try:
            while (data := await self._next(pieces)) is not None:
                for piece in self._unpacked.feed(data):
                    yield piece
        except BeyondBoundsError as error:
            raise self._client.refusal(error, self._request) from error

    async def _next(self, pieces: Any) -> bytes | None:
        try:
            async with asyncio.timeout_at(self._until) as limit:
                data: bytes | None = await anext(pieces, None)
                return data
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BeyondBoundsError(LATE) from error

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Client:
    """Over an `AsyncClient`."""

    error: Any
    body_type: Any
    bounds: Bounds
    return_redirects: bool
    look: Callable[[Any], Awaitable[None]] | None
    on_refusal: Callable[[str], None] | None

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """Send as the library does. Raises its RequestError: an answer beyond the bounds."""
        options["follow_redirects"] = False
        seconds = self.bounds.seconds
        until = None if seconds is None else asyncio.get_running_loop().time() + seconds
        try:
            for _ in range(MOST_REDIRECTS):
                response = await self._first_bytes(request, until, options)
                async with AsyncExitStack() as unread:
                    unread.push_async_callback(response.aclose)
                    response.stream = self.body_type(response, self, until)
                    following = None if self.return_redirects else _following(response)
                    if following is None:
                        await self._read(response, stream=stream)
                        unread.pop_all()
                        return response
                    request = following
            raise BeyondBoundsError(f"more than {MOST_REDIRECTS} redirects")
        except BeyondBoundsError as error:
            raise self.refusal(error, request) from error

    def refusal(self, error: BeyondBoundsError, request: Any) -> Exception:
        """Return the library's error of an answer beyond the bounds."""
        if self.on_refusal is not None:
            self.on_refusal(str(error))
        made: Exception = self.error(str(error), request=request)
        return made

    async def _first_bytes(self, request: Any, until: float | None, options: Any) -> Any:
        try:
            async with asyncio.timeout_at(until) as limit:
                return await super().send(request, stream=True, **options)  # type: ignore[misc]
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BeyondBoundsError(LATE) from error

    async def _read(self, response: Any, *, stream: bool) -> None:
        if self.look is not None:
            await self.look(response)
        if not stream:
            await response.aread()


class _SyncBody(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, bounds: Bounds, until: float | None) -> None:
        self._stream: Any = response.stream
        self._request, self._until = response.request, until
        self._unpacked = _unpacked(response, bounds)

    def __iter__(self) -> Iterator[bytes]:
        try:
            for data in self._stream:
                if self._until is not None and time.monotonic() > self._until:
                    raise BeyondBoundsError(LATE)
                yield from self._unpacked.feed(data)
        except BeyondBoundsError as error:
            raise httpx.RequestError(str(error), request=self._request) from error

    def close(self) -> None:
        self._stream.close()


class _SyncClient(httpx.Client):
    bounds: Bounds

    def send(
        self, request: httpx.Request, *, stream: bool = False, **options: Any
    ) -> httpx.Response:
        """Send as httpx does. Raises httpx.RequestError: an answer beyond the bounds."""
        options["follow_redirects"] = False
        seconds = self.bounds.seconds
        until = None if seconds is None else time.monotonic() + seconds
        try:
            for _ in range(MOST_REDIRECTS):
                response = super().send(request, stream=True, **options)
                with ExitStack() as unread:
                    unread.callback(response.close)
                    response.stream = _SyncBody(response, self.bounds, until)
                    following = _following(response)
                    if following is None:
                        if not stream:
                            response.read()
                        unread.pop_all()
                        return response
                    request = following
            raise BeyondBoundsError(f"more than {MOST_REDIRECTS} redirects")
        except BeyondBoundsError as error:
            raise httpx.RequestError(str(error), request=request) from error

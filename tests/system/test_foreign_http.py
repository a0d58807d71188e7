"""Clients of other servers against real ones that answer too much, too late, or from elsewhere."""

import asyncio
import gzip
import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import httpx
import pytest

from mlx_parallm.system.foreign_http import Bounds, async_client, connect_socket, sync_client
from mlx_parallm.system.foreign_json import (
    MAX_DEPTH,
    TooDeepError,
    TooManyContainersError,
    read_json,
)

httpx2 = pytest.importorskip("httpx2")
websockets = pytest.importorskip("websockets")
SMALL = Bounds(body=1 << 20, event=1 << 16, seconds=20.0)
TEXT = b'{"answer": 4711}'
Handle = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(handle: Handle) -> Iterator[str]:
    """A server whose every request is answered by `handle`; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with suppress(OSError):  # the client has gone
                handle(self)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def answering(body: bytes, status: int = 200, **headers: str) -> Handle:
    def handle(request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        request.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return handle


def endless(piece: bytes, media_type: str = "application/json", pause_s: float = 0.0) -> Handle:
    """Chunks without end; `pause_s` before each."""

    def handle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", media_type)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        gone = threading.Event()
        while not gone.wait(pause_s):
            request.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    return handle


def fetch(url: str, bounds: Bounds, library: ModuleType | None, method: str = "GET") -> bytes:
    """`library`: None for the client that blocks."""
    if library is None:
        with sync_client(bounds) as client:
            return client.request(method, url).content

    async def run() -> bytes:
        async with async_client(bounds, library=library) as client:
            answer: bytes = (await client.request(method, url)).content
            return answer

    return asyncio.run(run())


CLIENTS = pytest.mark.parametrize("library", [httpx, httpx2, None], ids=["httpx", "httpx2", "sync"])


def _bomb(encoding: str) -> bytes:
    packer = zlib.compressobj(9, wbits={"gzip": 31, "deflate": 15}[encoding])
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(256)), packer.flush()])


@CLIENTS
@pytest.mark.parametrize(
    ("handle", "bounds", "words"),
    [
        (answering(_bomb("gzip"), Content_Encoding="gzip"), SMALL, "at most 1,048,576"),
        (answering(_bomb("deflate"), Content_Encoding="deflate"), SMALL, "at most 1,048,576"),
        (answering(TEXT, Content_Encoding="zstd"), SMALL, "packed as 'zstd'"),
        (answering(TEXT, Content_Encoding="gzip, gzip"), SMALL, "packed as"),
        (answering(TEXT, Content_Encoding="gzip"), SMALL, "is not gzip"),
        (answering(b"", Content_Length=str(1 << 40)), SMALL, "1,099,511,627,776 bytes or more"),
        (endless(bytes(1 << 16)), SMALL, "at most 1,048,576"),
        (endless(b"data: x\n", "text/event-stream"), SMALL, "an event of the answer"),
        (endless(b"x", pause_s=0.01), Bounds(seconds=0.1), "did not end in time"),
    ],
    ids=["gzip", "deflate", "zstd", "twice", "torn", "announced", "endless", "event", "slow"],
)
def test_an_answer_beyond_the_bounds_is_refused(
    library: ModuleType | None, handle: Handle, bounds: Bounds, words: str
) -> None:
    error = (library or httpx).RequestError
    with serving(handle) as url:
        tracemalloc.start()
        try:
            with pytest.raises(error, match=words):
                fetch(url, bounds, library)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


@CLIENTS
@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (TEXT, "identity"),
        (gzip.compress(TEXT), "gzip"),
        (gzip.compress(TEXT[:5]) + gzip.compress(TEXT[5:]), "x-gzip"),
        (zlib.compress(TEXT), "deflate"),
        (zlib.compress(TEXT)[2:-4], "deflate"),
    ],
    ids=["plain", "gzip", "two members", "deflate", "raw deflate"],
)
def test_a_packed_answer_is_read(library: ModuleType | None, body: bytes, encoding: str) -> None:
    with serving(answering(body, Content_Encoding=encoding)) as url:
        assert fetch(url, SMALL, library) == TEXT


@CLIENTS
def test_a_redirect_stays_on_its_server(library: ModuleType | None) -> None:
    asked: list[str] = []

    def handle(request: BaseHTTPRequestHandler) -> None:
        asked.append(f"{request.command} {request.path}")
        if request.path == "/there":
            answering(TEXT)(request)
        elif request.path == "/turning":
            answering(b"", 307, Location="/turning")(request)
        elif request.path == "/lossy":
            answering(b"", 302, Location="/there")(request)
        else:
            answering(b"", 307, Location=elsewhere if request.path == "/away" else "/there")(
                request
            )

    error = (library or httpx).RequestError
    with serving(handle) as elsewhere, serving(handle) as url:
        assert fetch(f"{url}/here", SMALL, library, "POST") == TEXT
        with pytest.raises(error, match=f"leads to {elsewhere}.*not followed"):
            fetch(f"{url}/away", SMALL, library)
        with pytest.raises(error, match="would lose what was sent"):
            fetch(f"{url}/lossy", SMALL, library, "POST")
        with pytest.raises(error, match="redirects"):
            fetch(f"{url}/turning", SMALL, library)
    assert asked[:3] == ["POST /here", "POST /there", "GET /away"]
    assert "GET /" not in asked  # of the other server


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_websocket_follows_no_redirect(status: int) -> None:
    """`websockets` goes where the answer says, to another host and to a path of the same."""
    asked: list[str] = []

    def handle(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        place = elsewhere if request.path == "/away" else ""
        answering(b"", status, Location=f"{place}/there")(request)

    with serving(handle) as elsewhere, serving(handle) as url:
        for path in ("/away", "/here"):
            with pytest.raises(websockets.InvalidStatus, match=str(status)):
                asyncio.run(connect_socket(f"ws{url[4:]}{path}", open_timeout_s=20))
    assert asked == ["/away", "/here"]


def test_many_events_may_come_over_any_time() -> None:
    """The bound is on one event: a stream may be longer than it."""
    events = b"".join(b'data: {"n": %d}\n\n' % number for number in range(9999))

    async def run() -> bytes:
        async with (
            async_client(Bounds(body=10, event=99)) as client,
            client.stream("GET", url) as a,
        ):
            return b"".join([piece async for piece in a.aiter_bytes()])

    with serving(answering(events, Content_Type="text/event-stream; charset=utf-8")) as url:
        assert asyncio.run(run()) == events


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"[" * 100_000 + b"]" * 100_000, TooDeepError),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), TooDeepError),
        (b"[" + b"[]," * 600_000 + b"{}" * 600_000 + b"]", TooManyContainersError),
        ("{", ValueError),
        (b'"\xff"', ValueError),
    ],
)
def test_json_that_would_end_the_process_is_refused(text: bytes | str, error: type) -> None:
    with pytest.raises(error):
        read_json(text)


def test_json_within_the_bounds_is_read() -> None:
    value = json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert read_json(json.dumps(value)) == value

"""An HTTP server that answers as no server should. The path says how:

/slow /endless /bomb /redirect /loop /hang /garbage /headers /deep /wide /null /cut /large
/events (a stream without an end of an event)

with hostile_server() as server: httpx.get(f"{server.url}/bomb")
"""

import contextlib
import gzip
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PIECE = b"%x\r\n%s\r\n" % (MB, b" " * MB)
Answer = Callable[[socket.socket, threading.Event], None]


def _slow(client: socket.socket, stop: threading.Event) -> None:
    client.sendall(HEAD + b"\r\n{")
    while not stop.wait(0.5):
        client.sendall(b" ")


def _endless(client: socket.socket, stop: threading.Event) -> None:
    client.sendall(CHUNKED)
    while not stop.is_set():
        client.sendall(PIECE)


def _events(client: socket.socket, stop: threading.Event) -> None:
    client.sendall(EVENTS + b"data: ")
    while not stop.is_set():
        client.sendall(b"x" * MB)


def _bomb(client: socket.socket, stop: threading.Event) -> None:
    packed = gzip.compress(b" " * (64 * MB), compresslevel=1) * 32  # members: 2 GB
    client.sendall(HEAD + b"Content-Encoding: gzip\r\n\r\n" + packed)


def _hang(client: socket.socket, stop: threading.Event) -> None:
    stop.wait(600)


def _headers(client: socket.socket, stop: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\n")
    while not stop.is_set():
        client.sendall(b"x-a: %s\r\n" % (b"b" * 1000) * 100)


def _says(content: bytes) -> Answer:
    def answer(client: socket.socket, stop: threading.Event) -> None:
        client.sendall(content)

    return answer


def _redirect(place: str) -> bytes:
    return f"HTTP/1.1 307 X\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()


ANSWERS: Mapping[str, Answer] = {
    "slow": _slow,
    "endless": _endless,
    "events": _events,
    "bomb": _bomb,
    "hang": _hang,
    "headers": _headers,
    "redirect": _says(_redirect("http://169.254.169.254/latest/meta-data")),
    "loop": _says(_redirect("/loop")),
    "garbage": _says(b"\x16\x03\x01\x00\xffgarbage\r\n\r\n" * 100),
    "deep": _says(HEAD + b"\r\n" + b"[" * 200_000 + b"]" * 200_000),
    "wide": _says(HEAD + b"\r\n[" + b"[]," * (8 * MB) + b"[]]"),
    "null": _says(HEAD + b"Content-Length: 4\r\n\r\nnull"),
    "cut": _says(HEAD + b'Content-Length: 400\r\n\r\n{"choices"'),
    "large": _says(HEAD + b"Content-Length: 99999999999999\r\n\r\n"),
}


@dataclass
class Hostile:
    """A server that runs. `asked`: set once somebody has."""

    url: str
    asked: threading.Event


@contextlib.contextmanager
def hostile_server() -> Iterator[Hostile]:
    """Start one, which ends with the block."""
    stop, listener = threading.Event(), socket.create_server(("127.0.0.1", 0), backlog=200)
    server = Hostile(f"http://127.0.0.1:{listener.getsockname()[1]}", threading.Event())

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(60)
            path = client.recv(65536).partition(b" ")[2].partition(b" ")[0].decode("latin-1")
            server.asked.set()
            ways = [name for name in path.split("/") if name in ANSWERS]
            ANSWERS[ways[0] if ways else "null"](client, stop)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server
    finally:
        stop.set()
        listener.close()

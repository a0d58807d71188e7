"""The bounds of connections: how many there are, and how long one may take to send its request.

uvicorn closes idle connections after an answer. It has no bound on connections that closes
any (its `limit_concurrency` answers requests with 503), and a connection that has sent nothing, or
half a header, stays for
ever: without a key, each holds one of the process's files until the trainer can open none.
Unfinished bodies are `middleware.BodyLimitMiddleware`'s.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.auto import AutoHTTPProtocol

FIRST_REQUEST_SECONDS = 30.0  # from the connection to the end of its first request's header
# the same after an answer; above uvicorn's keep-alive, which closes what sends nothing
NEXT_REQUEST_SECONDS = 120.0
REPEATED_WARNING_SECONDS = 60.0
# times server.max_concurrent_requests: clients keep connections open between requests
CONNECTIONS_PER_REQUEST = 4
FEWEST_CONNECTIONS = 64
RESERVED_FILES = 512  # for the model, the rollouts, the metrics, checkpoints and sandboxes
_log = logging.getLogger("uvicorn.error")


def connection_limit(max_concurrent_requests: int, files: int) -> int:
    """Return how many connections there may be in a process that can open so many files."""
    wanted = CONNECTIONS_PER_REQUEST * max_concurrent_requests
    return max(FEWEST_CONNECTIONS, min(wanted, max(files - RESERVED_FILES, files // 2)))


class ConnectionGuard:
    """Knows the open connections. In the HTTP thread only.

    One too many takes the place of the oldest that waits for its first request, or else for its
    next one. When all are busy it is refused. So an attacker who opens connections without end
    does not keep others out.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        # oldest first: the connection's state, and since when
        self._open: dict[Any, tuple[object, float]] = {}

    def opened(self, connection: Any) -> None:
        self._open[connection] = (_progress(connection), self._clock())
        if len(self._open) <= self._limit:
            return
        _log.warning("there are too many connections: those that wait for a request are closed")
        silent = (each for each in self._open if each.cycle is None and each is not connection)
        idle = (
            each
            for each in self._open
            if _is_idle(each) and not each.transport.get_write_buffer_size()
        )
        self._drop(next(silent, None) or next(idle, connection))

    def closed(self, connection: Any) -> None:
        self._open.pop(connection, None)

    def sweep(self) -> None:
        """Close connections that wait for too long. Call it about once a second."""
        now = self._clock()
        for connection, (progress, since) in list(self._open.items()):
            if (current := _progress(connection)) != progress:
                self._open[connection] = (current, now)
                continue
            allowed = FIRST_REQUEST_SECONDS if connection.cycle is None else NEXT_REQUEST_SECONDS
            if _is_idle(connection) and now - since >= allowed:
                self._drop(connection)

    def drop_unread(self) -> None:
        """Drop connections whose client reads nothing: last words to it would wait for ever."""
        for connection in [each for each in self._open if each.flow.write_paused]:
            self._drop(connection)

    def _drop(self, connection: Any) -> None:
        self.closed(connection)
        connection.transport.abort()


def _is_idle(connection: Any) -> bool:
    """No request is being answered: half a header, or a body that is not read any more, counts
    as idle."""
    return connection.cycle is None or connection.cycle.response_complete


def _progress(connection: Any) -> object:
    """Return a value that changes with each request, and as the client takes its answer."""
    return connection.cycle, connection.transport.get_write_buffer_size()


def guarded_protocol(guard: ConnectionGuard) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, each connection of which tells `guard` when it opens and
    closes."""

    class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[valid-type,misc]  # one of two classes, found at import
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            guard.opened(self)

        def connection_lost(self, exc: Exception | None) -> None:
            guard.closed(self)
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Answer bytes that are not HTTP, unless the connection has no place for another
            answer: h11 would raise. The request that it belongs to gets no answer of its own."""
            cycle, conn = self.cycle, getattr(self, "conn", None)  # httptools' has no `conn`
            has_place = conn is None or conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
            if cycle is not None and not cycle.response_complete:
                has_place = has_place and not cycle.response_started
                cycle.disconnected = True
                cycle.message_event.set()
            if has_place:
                super().send_400_response(msg)
            else:
                self.transport.close()

    return GuardedProtocol


class SparseWarnings(logging.Filter):
    """Lets a warning with the same text through once a minute: anyone who can connect can cause
    uvicorn's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # words → until when, and how many were held back
        self._quiet: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        words, now = str(record.msg), self._clock()
        until, held_back = self._quiet.get(words, (now, 0))
        if now < until:
            self._quiet[words] = (until, held_back + 1)
            return False
        self._quiet[words] = (now + REPEATED_WARNING_SECONDS, 0)
        if held_back:
            record.msg = f"{words} ({held_back} more in the minute before)"
        return True


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio repeats a failed accept two thousand times, each with a traceback: one line says
    it."""
    if "accept" in context["message"]:
        _log.warning("no connection can be accepted: %s", context.get("exception"))
    else:
        loop.default_exception_handler(context)

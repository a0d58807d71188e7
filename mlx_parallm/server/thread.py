"""The HTTP thread: uvicorn with its own asyncio loop, on a socket that main has bound.

Bound in main, because uvicorn in a thread answers a taken port with a silent SystemExit; without
uvicorn's signal handlers, because the daemon takes signals itself.
"""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.server.connection_limits import (
    ConnectionGuard,
    SparseWarnings,
    connection_limit,
    guarded_protocol,
    on_loop_error,
)
from mlx_parallm.system.files import raise_file_limit
from mlx_parallm.system.signals import END_S, Shutdown

BACKLOG = 2048
# Longer than clients keep an idle connection (httpx 5 s, aiohttp 15 s): the side that closes first
# while
# the other sends makes a request fail.
KEEP_ALIVE_SECONDS = 75
STARTUP_SECONDS = 30.0
TICKS_PER_SWEEP = 10  # uvicorn ticks ten times a second
WATCH_S = 1.0  # a process whose HTTP thread has died ends this soon
JOIN_MARGIN_SECONDS = 5.0  # after the drain: cancelled handlers and the lifespan


class ServerThreadError(ParallmError):
    """The HTTP thread did not start or did not end."""


def bind_socket(host: str, port: int, setting: str = "server.port") -> socket.socket:
    """A listening socket; port 0 takes a free one (`socket.getsockname()[1]` says which).

    Args:
        setting: what chooses the port: a key, or a command's flag.

    Raises ConfigError: port taken or not allowed, no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"server.host = {host!r} is not an address of this machine: {error.strerror}"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_bind_problem(host, port, error, setting)) from error
    listener.setblocking(False)
    return listener


def _bind_problem(host: str, port: int, error: OSError, setting: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is already in use: stop the process that has it, or choose"
            f" another with {setting} (0 takes a free one)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} needs privileges: choose one above 1023 with {setting}"
    return f"cannot listen on {host}:{port}: {error.strerror}"


class ServerThread:
    """Serves `app` on `listener` from `start` to `stop`, in its own thread, with so many
    connections at most (`connection_limits.connection_limit`). Single use."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        max_connections: int,
        *,
        lifespan: Literal["on", "off"] = "off",
    ) -> None:
        """`lifespan`: whether the app starts and ends its own parts."""
        guard = ConnectionGuard(max_connections)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=guarded_protocol(guard),
            ws="none",
            lifespan=lifespan,
            log_config=None,
            access_log=False,  # the app writes its own
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = _UvicornServer(config, guard)
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Return once requests are answered. Raises ServerThreadError."""
        self._thread.start()
        self._server.settled.wait(STARTUP_SECONDS)
        if not self._server.started:
            raise ServerThreadError("the HTTP server did not start")

    def stop(self, drain_timeout: float) -> None:
        """Accept nothing more, let running requests end for `drain_timeout` seconds, cancel
        the rest, join."""
        self._server.config.timeout_graceful_shutdown = drain_timeout  # type: ignore[assignment]  # wait_for's seconds
        self._server.should_exit = True
        self._thread.join(drain_timeout + JOIN_MARGIN_SECONDS)
        self._listener.close()
        if self._thread.is_alive():
            raise ServerThreadError("the HTTP thread did not end")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._server.settled.set()

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._listener])
        # a handler's thread ends by itself: the loop's end waits only for those that it knows
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


def serve_until_signal(
    make: Callable[[], ASGIApp],
    host: str,
    port: int,
    announce: Callable[[str], None],
    *,
    drain_s: float,
    draining: Callable[[], None] = lambda: None,
    connections: int = 0,
    port_flag: str = "--port",
    lifespan: Literal["on", "off"] = "off",
) -> None:
    """Serve an app alone in its process, without a model, until a shutdown signal. Main thread
    only.

    Args:
        make: makes the app, within the time that a signal interrupts.
        announce: is called with the URL, once it answers.
        draining: is called before running requests get `drain_s` seconds to end.
        connections: most of them; 0: as `connection_limit` does.
        port_flag: the command's flag for `port`.

    Raises ConfigError: the port. Also errors of `make`.
    """
    with Shutdown() as shutdown:
        shutdown.limit_s = drain_s + END_S
        with shutdown.interrupts():
            app, listener = make(), bind_socket(host, port, port_flag)
            limit = connection_limit(connections, raise_file_limit())
            thread = ServerThread(app, listener, limit, lifespan=lifespan)
            thread.start()
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        while thread.alive and not shutdown.stop.wait(WATCH_S):
            pass
        draining()
        thread.stop(drain_s)


class _UvicornServer(uvicorn.Server):
    """Says when it is up, and waits for cancelled handlers, so that each aborts its generation
    before the loop ends."""

    def __init__(self, config: uvicorn.Config, guard: ConnectionGuard) -> None:
        super().__init__(config)
        self.settled = threading.Event()
        self._guard = guard

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        # asyncio: "socket.send() raised exception.", for each event to a client that is gone
        for logger in map(logging.getLogger, ("uvicorn.error", "asyncio")):
            if not any(isinstance(each, SparseWarnings) for each in logger.filters):
                logger.addFilter(SparseWarnings())
        await super().startup(sockets=sockets)
        self.settled.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SWEEP == 0:
            self._guard.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets=sockets)
        self._guard.drop_unread()
        if self.server_state.tasks:
            # half of what `stop` waits: the other half is for the loop's end, which cancels again
            await asyncio.wait(self.server_state.tasks, timeout=JOIN_MARGIN_SECONDS / 2)

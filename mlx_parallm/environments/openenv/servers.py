"""The servers of one [[environments]] entry: which of them gets the next episode, and what becomes
of one that is full, does not answer, or has ended.

    `open`: the server with fewest sessions → connect → reset → (ServerSession, first ServerStep)

A session that cannot be opened is tried again, on another server if there is one; after the
first action an episode that is lost stays lost. Of several servers each gets a few sessions first,
and one more with each episode that it plays to the end, so that one that hangs holds few episodes
up. A server that failed is left alone for a while, longer each time. One that is started by a
command is started again when it has ended.
"""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import httpx

from mlx_parallm.environments.openenv.session import (
    NoCapacityError,
    ServerSession,
    ServerStep,
)
from mlx_parallm.errors import ConfigError, EndpointError
from mlx_parallm.system.foreign_http import Bounds, is_local, json_of, sync_client
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.processes import end_family, marked

log = get_logger("environments")

PORT = "{port}"
POLL_S, START_POLL_S = 0.02, 0.1
PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0  # after a failure; doubled each time
FULL_S = 0.05  # before a server is asked again that is full without a session of ours
TRUST = 4  # sessions of a server, one of several, before it has played an episode
FORGET_S = 30.0  # before a server that was full with ours is asked for more than it took
LAST_WORDS = 300  # bytes of the output of a server that ended
PIECE = 1 << 14  # bytes of its output that are read at once
TAIL_S = 1.0  # longest wait for its last words: a process that it started may hold its output open


@dataclass
class Server:
    """A server, and how it is doing. `command` starts it, if it is ours."""

    url: str
    command: tuple[str, ...] = ()
    sessions: int = 0
    failures: int = 0  # since the last episode that it played to the end
    rests_until: float = 0.0
    trust: int = TRUST  # sessions that it gets, one more after each episode
    most: int | None = None  # sessions of ours that it took when it was full
    most_until: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    output: "Tail | None" = None
    mark: str = ""  # marks the processes that it started

    @property
    def pid(self) -> int:
        assert self.process is not None, "it was started"
        return self.process.pid

    def leave(self) -> None:
        self.sessions -= 1

    def note_full(self) -> None:
        """Note that the server is full: it takes no more sessions than ours now, or none for a
        while."""
        now = time.monotonic()
        if self.sessions > 0:
            self.most, self.most_until = self.sessions, now + FORGET_S
        else:
            self.rests_until = now + FULL_S

    def has_room(self, limit: int | None) -> bool:
        """Whether it may take one more session."""
        limits = [] if limit is None else [limit]
        if self.most is not None and time.monotonic() < self.most_until:
            limits.append(self.most)
        return all(self.sessions < each for each in limits)

    @property
    def ended(self) -> bool:
        return bool(self.command) and (self.process is None or self.process.poll() is not None)


class Servers:
    """Any number of episodes share it, on one loop or several."""

    def __init__(
        self,
        urls: Sequence[str],
        commands: Sequence[tuple[str, ...]],
        *,
        max_sessions: int | None,
        connect_timeout_s: float,
        message_timeout_s: float,
        ready_timeout_s: float,
        wait_s: float,
        retries: int,
    ) -> None:
        """Start the commands, and wait until each server answers.

        Args:
            commands: each starts a server; `{port}` in one stands for its port.
            max_sessions: of one server at once; None: as many as it takes.
            wait_s: longest wait for a free session.
            retries: of opening a session.

        Raises ConfigError: a server does not answer.
        """
        self._max_sessions, self._wait_s, self._retries = max_sessions, wait_s, retries
        self._connect_timeout_s, self._message_timeout_s = connect_timeout_s, message_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self.servers = [Server(url) for url in urls]
        self.servers += [Server("", command) for command in commands]
        self._finalizer = weakref.finalize(self, _stop, self.servers)  # at exit, too
        try:
            for server in self.servers:
                if server.command:
                    _start(server)
            for server in self.servers:
                _wait_for(server, self._ready_timeout_s)
        except EndpointError as error:
            self.close()
            raise ConfigError(f"openenv: {error}") from error

    def schemas(self) -> Mapping[str, Any]:
        """Return the JSON schemas of "action", "observation" and "state". Raises ConfigError."""
        url = f"{self.servers[0].url}/schema"
        try:
            answer = _get(url, self._connect_timeout_s)
            answer.raise_for_status()
            schemas: Mapping[str, Any] = json_of(answer)
            _check_schema(schemas["action"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"openenv: {url}: no schema of the actions: {error or type(error).__name__}"
            ) from error
        return schemas

    def close(self) -> None:
        """End the servers that were started here."""
        self._finalizer()

    @asynccontextmanager
    async def open(
        self, reset: Mapping[str, Any]
    ) -> AsyncIterator[tuple[ServerSession, ServerStep]]:
        """Hold a session in which an episode has begun. Raises EndpointError: none could be
        opened; RolloutRejectedError: the environment has failed."""
        server, session, first = await self._opened(reset)
        try:
            yield session, first
            server.failures, server.trust = 0, server.trust + 1
        except EndpointError:
            self._note_failure(server)
            raise
        finally:
            try:
                await session.close()
            finally:
                server.leave()

    async def _opened(self, reset: Mapping[str, Any]) -> tuple[Server, ServerSession, ServerStep]:
        failures, until = 0, time.monotonic() + self._wait_s
        full: EndpointError | None = None
        while True:
            if time.monotonic() > until:
                raise EndpointError(
                    f"{self.servers[0].url}: no session was free within {self._wait_s:g} s"
                    f" ({full or f'max_sessions = {self._max_sessions}'})"
                )
            server = self._pick()
            if server is None:
                await asyncio.sleep(POLL_S)
                continue
            try:
                session, first = await self._begin(server, reset)
            except NoCapacityError as error:
                full = error
                server.note_full()
            except EndpointError:
                self._note_failure(server)
                failures += 1
                if failures > self._retries:
                    raise
            else:
                return server, session, first

    async def _begin(
        self, server: Server, reset: Mapping[str, Any]
    ) -> tuple[ServerSession, ServerStep]:
        async with AsyncExitStack() as unused:
            server.sessions += 1
            unused.callback(server.leave)
            if server.ended:
                await asyncio.to_thread(self._start_again, server)
            session = await ServerSession.connect(
                server.url,
                connect_timeout_s=self._connect_timeout_s,
                timeout_s=self._message_timeout_s,
            )
            unused.push_async_callback(session.close)
            first = await session.reset(reset)
            unused.pop_all()
        return session, first

    def _pick(self) -> Server | None:
        """Return the server with the fewest sessions that is neither full nor resting."""
        now = time.monotonic()
        awake = [
            server
            for server in self.servers
            if server.rests_until <= now
            and server.has_room(self._max_sessions)
            and (server.sessions < server.trust or len(self.servers) == 1)
        ]
        return min(awake, key=lambda server: server.sessions, default=None)

    def _note_failure(self, server: Server) -> None:
        pause = min(PAUSE_S * 2**server.failures, LONGEST_PAUSE_S)
        server.failures, server.trust = server.failures + 1, 1
        server.rests_until = time.monotonic() + pause

    def _start_again(self, server: Server) -> None:
        with _STARTING:
            if server.ended:
                log.warning("an OpenEnv server has ended; it is started again", url=server.url)
                _start(server)
        _wait_for(server, self._ready_timeout_s)


_STARTING = threading.Lock()


def command_of(option: str | Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command. Raises ConfigError: it has no place for the port."""
    words = tuple(shlex.split(option)) if isinstance(option, str) else tuple(map(str, option))
    if not any(PORT in word for word in words):
        raise ConfigError(
            f"openenv: command {' '.join(words)!r} has to say where the port goes: {PORT}"
        )
    return words


def _start(server: Server) -> None:
    """Raises EndpointError: the command cannot be run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server.url = f"http://127.0.0.1:{port}"
    words = [word.replace(PORT, str(port)) for word in server.command]
    if server.process is not None:
        end_family(server.pid, server.mark)  # a server that has ended
    try:
        variables, server.mark = marked()
        server.process = subprocess.Popen(
            words,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal must not end it before its episodes
        )
    except OSError as error:
        raise EndpointError(f"command {words[0]!r}: {error}") from error
    assert server.process.stdout is not None, "it is a pipe"
    server.output = Tail(server.process.stdout)


class Tail:
    """The end of a process's output. It reads all of it, so that the process never blocks."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._end = pipe, b""
        self._thread = threading.Thread(target=self._read, name="openenv output", daemon=True)
        self._thread.start()

    def words(self) -> str:
        """Return the last LAST_WORDS characters in one line, of a process that has ended."""
        self._thread.join(TAIL_S)
        return " ".join(self._end[-LAST_WORDS:].decode(errors="replace").split())

    def _read(self) -> None:
        with self._pipe:
            while piece := os.read(self._pipe.fileno(), PIECE):
                self._end = (self._end + piece)[-PIECE:]


def _wait_for(server: Server, timeout_s: float) -> None:
    """Raises EndpointError: the server does not answer in time, or has ended."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            answer = _get(f"{server.url}/health", max(POLL_S, timeout_s / 4))
            if answer.status_code < 400:
                return
            why = f"/health answers {answer.status_code}"
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
        if server.ended:
            code = server.process.returncode if server.process is not None else None
            words = server.output.words() if server.output is not None else ""
            raise EndpointError(f"{' '.join(server.command)!r} has ended with {code}: {words}")
        if time.monotonic() > until:
            raise EndpointError(f"{server.url}: no OpenEnv server answers: {why}")
        time.sleep(START_POLL_S)


def _get(url: str, timeout_s: float) -> httpx.Response:
    """Raises httpx.HTTPError."""
    bounds = Bounds(seconds=timeout_s)
    with sync_client(bounds, timeout=timeout_s, trust_env=not is_local(url)) as client:
        return client.get(url)


def _check_schema(action: Any) -> None:
    """Raises TypeError: it is not a schema of an object."""
    if not isinstance(action, Mapping):
        raise TypeError("its action is not a schema")
    fields, required = action.get("properties", {}), action.get("required", [])
    if not isinstance(fields, Mapping) or not all(isinstance(f, Mapping) for f in fields.values()):
        raise TypeError("the properties of its action are not schemas by name")
    if not isinstance(required, list) or not isinstance(action.get("title", ""), str):
        raise TypeError("its action's required is not a list, or its title is not text")


def _stop(servers: Sequence[Server]) -> None:
    started = [server for server in servers if server.process is not None]
    for server in started:  # all of them end at the same time
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGTERM)
    for server in started:
        end_family(server.pid, server.mark)
        assert server.process is not None, "it was started"
        server.process.wait()

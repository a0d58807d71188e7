"""Tools behind one interface: Python functions, and the servers of the Model Context Protocol (MCP).

    ToolClient.call(name, arguments)  →  ToolResult        blocks; `acall` awaits
      ├── a function of the process, on a thread
      └── MCPServer: a command (stdio) or a URL (streamable HTTP), started with the first call, restarted when it ended

A call never raises for what a tool or a server does: an unknown tool, a failure, a time-out and a server that ended are
a `ToolResult` with `error`. It takes at most the `timeout_s` of its server, and `start_timeout_s` more if that has to
be started. The SDK (extra `mcp`) is imported with the first start. MCP: https://modelcontextprotocol.io/specification.
"""

import asyncio
import inspect
import json
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.execution.tool_calls import ToolLike, tool_definition
from mlx_parallm.system.loop_thread import LoopThread

Failure = Literal["unknown_tool", "arguments", "tool", "timeout", "server"]
INSTALL = "pip install 'mlx-parallm[mcp]'"
STOP_TIMEOUT_S = 10.0  # the SDK itself waits 2 s, sends SIGTERM, waits 2 s, and kills
FUNCTION_THREADS = 32
LONGEST_RESULT = 65_536  # characters
MOST_CACHED = 4_096
CONNECTION_CLOSED, INVALID_PARAMS = -32000, -32602  # of JSON-RPC, as the SDK uses them


@dataclass(frozen=True)
class ToolResult:
    """What a call gave. `text` is for the policy; after a failure it says what went wrong."""

    text: str
    structured: Any = None  # JSON, where the tool returned some
    error: Failure | None = None
    seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class MCPServer:
    """How to reach one server. Raises ConfigError: not one of `command` and `url`, a bound that is not above 0."""

    name: str
    command: Sequence[str] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)  # over PATH, HOME, USER and such; nothing else is inherited
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # of HTTP
    timeout_s: float = 30.0  # of a call
    start_timeout_s: float = 30.0
    max_concurrent: int = 16  # calls at a time
    restarts: int = 3  # starts in a row that may fail; then its tools fail at once
    cache: bool = True  # of the tools that the server marks read-only
    tools: Sequence[str] = ()  # only these; none named: all

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"MCP server {self.name!r}: set either command or url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"MCP server {self.name!r}: url begins with http:// or https://, not {self.url!r}")
        if min(self.timeout_s, self.start_timeout_s) <= 0 or self.max_concurrent < 1 or self.restarts < 0:
            raise ConfigError(f"MCP server {self.name!r}: timeout_s, start_timeout_s and max_concurrent are above 0")


class ToolClient:
    """Tools by name. Close it, or use it as a context manager: then no server's process is left.

    Raises ConfigError: a name twice, a server that cannot be started, or does not have one of its `tools`.
    """

    def __init__(self, servers: Sequence[MCPServer] = (), functions: Sequence[Callable[..., Any]] = ()) -> None:
        self._loop = LoopThread("tools", "the tool client")
        self._lock = threading.Lock()
        self._functions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
        self._threads = ThreadPoolExecutor(FUNCTION_THREADS, thread_name_prefix="tool")
        self._connections = {server.name: _Connection(server) for server in servers}
        if len(self._connections) < len(servers):
            raise ConfigError(f"two MCP servers have one name: {', '.join(server.name for server in servers)}")
        self._cache: dict[tuple[str, str], ToolResult] = {}
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._starting = asyncio.Lock()
        self._served: dict[str, _Connection] | None = None
        for function in functions:
            self.register_tool(tool_definition(function)["name"], function)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def register_tool(self, name: str, function: Callable[..., Any], definition: ToolLike | None = None) -> None:
        """Add a function; its signature and docstring are the definition unless one is given."""
        if name in self._functions:
            raise ConfigError(f"there is a tool {name!r} already")
        self._functions[name] = (function, {**tool_definition(definition or function), "name": name})

    def definitions(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of every tool; starts the servers. Raises ConfigError."""
        served = self._loop.run(self._tools_of_servers())
        own = [definition for _, definition in self._functions.values()]
        return own + [connection.definitions[name] for name, connection in served.items()]

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        cached: bool = True,
    ) -> ToolResult:
        """Call a tool and wait. `timeout_s` of its server bounds it; a function of the process has no bound.

        Args:
            timeout_s: bounds this call too, of a function as well; its thread may go on.
            cached: false: the tool is called even where an earlier result is kept.
        """
        return self._loop.run(self._bounded_call(name, dict(arguments or {}), timeout_s, cached))

    async def acall(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Do the same for the code of another loop."""
        return await self._loop.arun(self._call(name, dict(arguments or {})))

    async def _bounded_call(
        self, name: str, arguments: dict[str, Any], timeout_s: float | None, cached: bool
    ) -> ToolResult:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await self._call(name, arguments, cached=cached)
        except TimeoutError:
            if not limit.expired():
                raise
            result = ToolResult(f"{name}: no answer within {timeout_s:g} s", error="timeout", seconds=timeout_s or 0.0)
            self._count(result)
            return result

    def metrics(self) -> dict[str, float]:
        """Return counts since the start: calls, cached, each failure, restarts, and the mean seconds of a call."""
        with self._lock:
            counts, calls = dict(self._counts), self._counts["calls"]
            seconds = self._seconds / calls if calls else 0.0
        restarts = sum(max(connection.starts - 1, 0) for connection in self._connections.values())
        return {**{name: float(n) for name, n in counts.items()}, "restarts": float(restarts), "mean_seconds": seconds}

    def close(self) -> None:
        """End every server. May be called again."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loop.stop(self._close_all, STOP_TIMEOUT_S)

    async def _close_all(self) -> None:
        await asyncio.gather(*(connection.stop() for connection in self._connections.values()))

    async def _tools_of_servers(self) -> "dict[str, _Connection]":
        """Start every server once. Raises ConfigError."""
        async with self._starting:
            if self._served is not None:
                return self._served
            try:
                await asyncio.gather(*(connection.ensure() for connection in self._connections.values()))
            except ToolFailedError as error:
                raise ConfigError(str(error)) from error
            served: dict[str, _Connection] = {}
            for connection in self._connections.values():
                for name in connection.definitions:
                    if name in served or name in self._functions:
                        raise ConfigError(f"MCP server {connection.server.name!r}: there is a tool {name!r} already")
                    served[name] = connection
            self._served = served
            return served

    async def _call(self, name: str, arguments: dict[str, Any], *, cached: bool = True) -> ToolResult:
        key = (name, repr(sorted(arguments.items())))
        if cached and (kept := self._cache.get(key)) is not None:
            self._count(kept)
            return kept
        began, connection = time.perf_counter(), None
        if name in self._functions:
            result = await self._call_function(name, arguments)
        else:
            try:
                connection = (await self._tools_of_servers()).get(name)
                if connection is None:
                    known = ", ".join([*self._functions, *(self._served or {})]) or "none"
                    raise ToolFailedError(f"there is no tool {name!r}; there are: {known}")
                result = await connection.call(name, arguments)
            except ToolFailedError as error:
                result = ToolResult(str(error), error="unknown_tool")
            except ConfigError as error:
                result = ToolResult(str(error), error="server")
        result = ToolResult(_shortened(result.text), result.structured, result.error, time.perf_counter() - began)
        self._count(result)
        if connection and connection.is_cached(name) and result.error is None and len(self._cache) < MOST_CACHED:
            self._cache[key] = replace(result, cached=True, seconds=0.0)
        return result

    async def _call_function(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        function = self._functions[name][0]
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return ToolResult(f"{name}: {error}", error="arguments")
        loop = asyncio.get_running_loop()
        try:
            value, raised = await loop.run_in_executor(self._threads, _outcome, function, arguments)
            if raised is not None:
                raise raised
            if inspect.isawaitable(value):
                value = await value
            text = value if isinstance(value, str) else _json(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - boundary: the policy reads why
            return ToolResult(f"{name} failed: {type(error).__name__}: {error}", error="tool")
        return ToolResult(text, None if isinstance(value, str) else value)

    def _count(self, result: ToolResult) -> None:
        with self._lock:
            self._counts["calls"] += 1
            self._counts["cached"] += result.cached
            self._seconds += result.seconds
            if result.error is not None:
                self._counts[result.error] += 1


class _Connection:
    """One server. Everything runs in the client's loop; a task of its own holds the session open."""

    def __init__(self, server: MCPServer) -> None:
        self.server, self.starts = server, 0
        self.definitions: dict[str, dict[str, Any]] = {}
        self._read_only: set[str] = set()
        self._failed_starts = 0
        self._answered = 0  # calls, since the last start
        self._lock, self._slots = asyncio.Lock(), asyncio.Semaphore(server.max_concurrent)
        self._session: Any = None
        self._holder: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    def is_cached(self, name: str) -> bool:
        return self.server.cache and name in self._read_only

    async def ensure(self) -> Any:
        """Return the session; start the server where there is none. Raises ToolFailedError."""
        async with self._lock:
            if self._session is not None:
                return self._session
            if self._failed_starts > self.server.restarts:
                raise ToolFailedError(f"{self._what}: it could not be started {self._failed_starts} times in a row")
            await self._let_go()
            self.starts += 1
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._end, self._answered = asyncio.Event(), 0
            self._holder = asyncio.create_task(self._hold(ready, self._end))
            try:
                self._session = await asyncio.wait_for(asyncio.shield(ready), self.server.start_timeout_s)
            except (Exception, asyncio.CancelledError) as error:
                self._failed_starts += 1
                await self._let_go()
                if isinstance(error, asyncio.CancelledError | ConfigError):
                    raise
                late = f"no answer within {self.server.start_timeout_s:g} s"
                why = late if isinstance(error, TimeoutError) else _words(error)
                raise ToolFailedError(f"{self._what} cannot be started: {why}") from error
            self._failed_starts = 0
            return self._session

    @property
    def _what(self) -> str:
        return f"MCP server {self.server.name!r} ({self.server.url or ' '.join(self.server.command)})"

    async def _hold(self, ready: "asyncio.Future[Any]", end: asyncio.Event) -> None:
        """Open the session, list the tools, keep it open until `end`."""
        try:
            async with self._opened() as session:
                await self._list(session)
                ready.set_result(session)
                await end.wait()
        except Exception as error:  # noqa: BLE001 - boundary: whoever waits for the start is told
            if not ready.done():
                ready.set_exception(error)
        finally:
            if self._end is end:
                self._session = None

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        try:
            import httpx2
            import mcp
            from mcp.client.stdio import stdio_client
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise ConfigError(f"{self._what}: {INSTALL}") from error
        async with AsyncExitStack() as stack:
            if self.server.url:
                http = await stack.enter_async_context(
                    httpx2.AsyncClient(headers=dict(self.server.headers), timeout=self.server.timeout_s)
                )
                transport = streamable_http_client(self.server.url, http_client=http)
            else:
                command, *arguments = self.server.command
                quiet = stack.enter_context(_nowhere())
                parameters = mcp.StdioServerParameters(
                    command=command, args=arguments, env=dict(self.server.env), cwd=self.server.cwd
                )
                transport = stdio_client(parameters, errlog=quiet)
            yield await stack.enter_async_context(mcp.Client(transport, cache=None))

    async def _list(self, session: Any) -> None:
        found, cursor = {}, None
        while True:
            page = await session.list_tools(cursor=cursor)
            found.update({tool.name: tool for tool in page.tools})
            cursor = page.next_cursor
            if not cursor:
                break
        if missing := set(self.server.tools) - set(found):
            raise ConfigError(f"{self._what} has no tool {sorted(missing)[0]!r}; it has: {', '.join(found)}")
        chosen = [found[name] for name in self.server.tools or found]
        self.definitions = {
            tool.name: {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in chosen
        }
        self._read_only = {tool.name for tool in chosen if tool.annotations and tool.annotations.read_only_hint}

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool within `timeout_s`, the wait for a slot included; a restart has `start_timeout_s` of its own."""
        session = None
        try:
            session = await self.ensure()
            answered = self._answered
            async with asyncio.timeout(self.server.timeout_s), self._slots:
                answer = await session.call_tool(name, arguments)
        except TimeoutError:
            if session is self._session and answered == self._answered:  # it answers nobody: begin anew
                await self._let_go()
            return ToolResult(f"{name}: no answer within {self.server.timeout_s:g} s", error="timeout")
        except ToolFailedError as error:
            return ToolResult(str(error), error="server")
        except Exception as error:  # noqa: BLE001 - boundary: a server may answer anything
            return await self._failed(name, error, session)
        self._answered += 1
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in answer.content)
        if not text and answer.structured_content is not None:
            text = _json(answer.structured_content)
        return ToolResult(text, answer.structured_content, "tool" if answer.is_error else None)

    async def _failed(self, name: str, error: Exception, session: Any) -> ToolResult:
        code = getattr(error, "code", None)
        if isinstance(code, int) and code != CONNECTION_CLOSED:
            self._answered += 1
            return ToolResult(f"{name}: {_words(error)}", error="arguments" if code == INVALID_PARAMS else "tool")
        if session is self._session:
            await self._let_go()
        return ToolResult(f"{self._what} failed: {_words(error)}", error="server")

    async def stop(self) -> None:
        """End the server; it does not start again."""
        self._failed_starts = self.server.restarts + 1
        await self._let_go()

    async def _let_go(self) -> None:
        """Close the session; the SDK ends the process. A start that is not over is cancelled."""
        is_open, self._session = self._session is not None, None
        self._end.set()
        if self._holder is None or self._holder.done():
            return
        if not is_open:
            self._holder.cancel()
        _, waiting = await asyncio.wait({self._holder}, timeout=STOP_TIMEOUT_S)
        for holder in waiting:
            holder.cancel()


def _outcome(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
    """Return what a function returns, and what it raises if asyncio would wait for that for ever, or end with it."""
    try:
        return function(**arguments), None
    except (StopIteration, SystemExit) as error:
        return None, error


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _words(error: BaseException) -> str:
    """Return the first line of the innermost error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_RESULT:
        return text
    return f"{text[:LONGEST_RESULT]}\n[… cut: {len(text):,} characters]"

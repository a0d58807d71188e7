"""MCPServer: how to reach a server of the Model Context Protocol. MCPConnection: one that runs, and is kept running.

The SDK (extra `mcp`) is imported with the first start. MCP: https://modelcontextprotocol.io/specification.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.execution.tool_results import ToolResult, as_json
from mlx_parallm.system.packages import install

CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 30.0
MAX_CONCURRENT = 16
RESTARTS = 3
RETRY_PAUSE_S = 60.0  # between two starts after `restarts` that failed
STOP_TIMEOUT_S = 10.0  # the SDK itself waits 2 s, sends SIGTERM, waits 2 s, and kills
CONNECTION_CLOSED, INVALID_PARAMS = -32000, -32602  # of JSON-RPC, as the SDK uses them


@dataclass(frozen=True)
class MCPServer:
    """How to reach one server. Raises ConfigError: not one of `command` and `url`, a bound that is not above 0."""

    name: str
    command: Sequence[str] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)  # over PATH, HOME, USER and such; nothing else is inherited
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # of HTTP
    timeout_s: float = CALL_TIMEOUT_S  # of a call
    start_timeout_s: float = START_TIMEOUT_S
    max_concurrent: int = MAX_CONCURRENT  # calls at a time
    restarts: int = RESTARTS  # starts in a row that may fail; then there is one a minute, and calls fail at once
    cache: bool = True  # of the tools that the server marks read-only
    tools: Sequence[str] = ()  # only these; none named: all

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"MCP server {self.name!r}: set either command or url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"MCP server {self.name!r}: url begins with http:// or https://, not {self.url!r}")
        if min(self.timeout_s, self.start_timeout_s) <= 0 or self.max_concurrent < 1 or self.restarts < 0:
            raise ConfigError(f"MCP server {self.name!r}: timeout_s, start_timeout_s and max_concurrent are above 0")


class MCPConnection:
    """One server. Everything runs in one loop; a task of its own holds the session open."""

    def __init__(self, server: MCPServer) -> None:
        self.server, self.starts = server, 0
        self.definitions: dict[str, dict[str, Any]] = {}
        self._read_only: set[str] = set()
        self._failed_starts, self._why, self._retry_at = 0, "", 0.0
        self._answered = 0  # calls, since the last start
        self._slots = asyncio.Semaphore(server.max_concurrent)
        self._session: Any = None
        self._starting: asyncio.Task[Any] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # holders of sessions that were let go
        self._end = asyncio.Event()
        self._stopped = False

    def is_cached(self, name: str) -> bool:
        return self.server.cache and name in self._read_only

    async def ensure(self) -> Any:
        """Return the session; start the server where there is none. All who wait share one start, and its failure.

        Raises ToolFailedError: it cannot be started. ConfigError: it lacks a tool, or the SDK is not installed.
        """
        if self._session is not None:
            return self._session
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(self._started)
        return await asyncio.shield(self._starting)

    def _started(self, start: "asyncio.Task[Any]") -> None:
        self._starting = None
        if not start.cancelled():
            start.exception()  # who waited has it; it is no "exception was never retrieved" where nobody waits any more

    async def _start(self) -> Any:
        if self._stopped:
            raise ToolFailedError(f"{self._what} was stopped")
        if self._failed_starts > self.server.restarts and time.monotonic() < self._retry_at:
            raise ToolFailedError(f"{self._why} ({self._failed_starts} times in a row; it is tried once a minute)")
        self.starts += 1
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._end, self._answered = asyncio.Event(), 0
        self._holder = asyncio.create_task(self._hold(ready, self._end))
        try:
            self._session = await asyncio.wait_for(asyncio.shield(ready), self.server.start_timeout_s)
        except (Exception, asyncio.CancelledError) as error:
            self._failed_starts, self._retry_at = self._failed_starts + 1, time.monotonic() + RETRY_PAUSE_S
            self._let_go()
            if isinstance(error, asyncio.CancelledError | ConfigError):
                raise
            late = f"no answer within {self.server.start_timeout_s:g} s"
            self._why = f"{self._what} cannot be started: {late if isinstance(error, TimeoutError) else words(error)}"
            raise ToolFailedError(self._why) from error
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
                ready.exception()  # a start that has timed out asks no more
        finally:
            if self._end is end:
                self._session = None

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        try:
            import httpx2
            from mcp import Client, StdioServerParameters
            from mcp.client.stdio import stdio_client
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:  # no SDK, or one of before 2.0, to which many servers bind it
            raise ConfigError(f"{self._what}: {error}: {install('mcp')}") from error
        async with AsyncExitStack() as stack:
            if self.server.url:
                http = await stack.enter_async_context(
                    httpx2.AsyncClient(headers=dict(self.server.headers), timeout=self.server.timeout_s)
                )
                transport = streamable_http_client(self.server.url, http_client=http)
            else:
                command, *arguments = self.server.command
                quiet = stack.enter_context(_nowhere())
                parameters = StdioServerParameters(
                    command=command, args=arguments, env=dict(self.server.env), cwd=self.server.cwd
                )
                transport = stdio_client(parameters, errlog=quiet)
            yield await stack.enter_async_context(Client(transport, cache=None))

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

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool within `timeout_s`, the wait for a slot included; a restart has `start_timeout_s` of its own."""
        at_first, answered = self._session, self._answered
        try:
            async with asyncio.timeout(self.server.timeout_s) as limit, self._slots:
                if self._session is None:
                    rest = (limit.when() or 0.0) - asyncio.get_running_loop().time()
                    limit.reschedule(None)
                    await self.ensure()
                    limit.reschedule(asyncio.get_running_loop().time() + rest)
                session = at_first = self._session
                if session is None:
                    raise ToolFailedError(f"{self._what} ended as it began")
                answer = await session.call_tool(name, dict(arguments))
        except TimeoutError:
            if at_first is not None and at_first is self._session and answered == self._answered:
                self._let_go()  # it answers nobody: begin anew
            return ToolResult(f"{name}: no answer within {self.server.timeout_s:g} s", error="timeout")
        except ToolFailedError as error:
            return ToolResult(str(error), error="server")
        except Exception as error:  # noqa: BLE001 - boundary: a server may answer anything
            return self._failed(name, error, at_first)
        self._answered += 1
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in answer.content)
        if not text and answer.structured_content is not None:
            text = as_json(answer.structured_content)
        return ToolResult(text, answer.structured_content, "tool" if answer.is_error else None)

    def _failed(self, name: str, error: Exception, session: Any) -> ToolResult:
        code = getattr(error, "code", None)
        if isinstance(code, int) and code != CONNECTION_CLOSED:
            self._answered += 1
            return ToolResult(f"{name}: {words(error)}", error="arguments" if code == INVALID_PARAMS else "tool")
        if session is not None and session is self._session:
            self._let_go()
        return ToolResult(f"{self._what} failed: {words(error)}", error="server")

    async def stop(self) -> None:
        """End the server, and wait for its end; it does not start again."""
        self._stopped = True
        if self._starting is not None:
            self._starting.cancel()
        self._let_go()
        if self._ending:
            _, waiting = await asyncio.wait(self._ending, timeout=STOP_TIMEOUT_S)
            for holder in waiting:
                holder.cancel()

    def _let_go(self) -> None:
        """Close the session, and wait for nothing: the SDK ends the process. A start that is not over is cancelled."""
        is_open, self._session = self._session is not None, None
        self._end.set()
        holder, self._holder = self._holder, None
        if holder is None or holder.done():
            return
        self._ending.add(holder)
        holder.add_done_callback(self._ending.discard)
        if not is_open:
            holder.cancel()


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def words(error: BaseException) -> str:
    """Return the first line of the innermost error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]

"""Tools behind one interface: Python functions, and the servers of the Model Context Protocol
(MCP).

    ToolClient.call(name, arguments)  →  ToolResult        blocks; `acall` awaits
      ├── a function of the process, on a thread of its call
      └── MCPServer (mcp_connection.py): a command (stdio) or a URL (streamable HTTP),
          started with the first call, restarted when it ended

A call never raises for a failure of a tool or a server: an unknown tool, a failure, a time-out, a
server that ended and a result that is too large are a `ToolResult` with `error`. It takes at most
the `timeout_s` of its server, and `start_timeout_s` more if that has to be started; a function at
most `function_timeout_s`.
"""

import asyncio
import inspect
import re
import threading
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from mlx_parallm.errors import ConfigError, EngineUnavailableError, ToolFailedError
from mlx_parallm.execution.mcp_connection import STOP_TIMEOUT_S, MCPConnection, MCPServer
from mlx_parallm.execution.tool_calls import tool_definition
from mlx_parallm.execution.tool_results import (
    FAILURES,
    UNANSWERED,
    CallsBefore,
    RecordedTools,
    ToolResult,
    as_json,
    bounded,
    no_such_tool,
)
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.loop_thread import LoopThread

__all__ = ["MCPServer", "MCPToolClient", "ToolClient", "ToolResult"]

log = get_logger("tools")

FUNCTION_TIMEOUT_S = 30.0
MOST_LEFT_BEHIND = 64  # calls of functions that did not return in time and still run
CACHED_CHARACTERS = 32_000_000


class ToolClient:
    """Tools by name. Close it, or use it as a context manager: then no server's process is left.

    Raises ConfigError: a name twice, a server that cannot be started, or does not have one of its
    `tools`.
    """

    def __init__(
        self,
        servers: Sequence[MCPServer] = (),
        functions: Sequence[Callable[..., Any]] = (),
        *,
        function_timeout_s: float = FUNCTION_TIMEOUT_S,
        recorded: RecordedTools | None = None,
    ) -> None:
        """
        Args:
            function_timeout_s: longest call of a function. Its thread cannot be killed: it is left
                behind.
            recorded: tools whose recorded answers are replayed, unless a function or server has
                a tool of that name.
        """
        self._recorded = recorded
        self._loop = LoopThread("tools", "the tool client")
        self._lock = threading.Lock()
        self._functions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
        self._function_timeout_s = function_timeout_s
        self._left_behind: list[threading.Thread] = []
        self._connections = {server.name: MCPConnection(server) for server in servers}
        if len(self._connections) < len(servers):
            raise ConfigError(
                f"two MCP servers have one name: {', '.join(server.name for server in servers)}"
            )
        self._cache: OrderedDict[tuple[str, str], ToolResult] = OrderedDict()
        self._cached_characters = 0
        # cached answers of tools, dropped at each change
        self._under_way: dict[tuple[Any, ...], asyncio.Task[ToolResult]] = {}
        self._changes = 0  # begins and ends of calls that may have changed something
        self._changing = 0  # such calls that are under way
        self._counts: Counter[str] = Counter()
        # one for each server and function
        self._owners: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds = 0.0
        self._resolving: asyncio.Task[dict[str, _ServedTool]] | None = None
        self._served: dict[str, _ServedTool] | None = None
        for function in functions:
            self.register_tool(tool_definition(function)["name"], function)
        # at exit, too
        self._finalizer = weakref.finalize(self, _end, self._loop, list(self._connections.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def register_tool(self, name: str, function: Callable[..., Any]) -> None:
        """Add a function; its signature and docstring are the definition."""
        if name in self._functions or name in (self._served or {}):
            raise ConfigError(f"there is a tool {name!r} already")
        self._functions[name] = (function, {**tool_definition(function), "name": name})

    def definitions(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of every tool; starts the servers. Raises
        ConfigError."""
        served = self._loop.run(self._tools_of_servers()) if self._connections else {}
        functions = [definition for _, definition in self._functions.values()]
        live = functions + [
            {**tool.connection.definitions[tool.name], "name": name}
            for name, tool in served.items()
        ]
        names = {definition["name"] for definition in live}
        recorded = {} if self._recorded is None else self._recorded.definitions
        return live + [each for name, each in recorded.items() if name not in names]

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        cached: bool = True,
        before: CallsBefore | None = None,
    ) -> ToolResult:
        """Call a tool and wait.

        Args:
            timeout_s: of this call, in the place of its server's `timeout_s` or
                `function_timeout_s`; the thread of a function may continue.
            cached: false: call the tool even if an earlier result is cached.
            before: the episode's earlier calls, for a recorded tool whose answers differ.
        """
        return self._loop.run(
            self._call(name, dict(arguments or {}), timeout_s, cached=cached, before=before)
        )

    async def acall(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        before: CallsBefore | None = None,
    ) -> ToolResult:
        """Do the same for the code of another loop. Cancelling it cancels the call."""
        return await self._loop.arun(self._call(name, dict(arguments or {}), before=before))

    def forget(self) -> None:
        """Drop every answer that is kept: something outside, a reset, has changed what tools
        see."""
        self._loop.run(self._forget())

    async def _forget(self) -> None:
        self._changes += 1
        self._cache.clear()
        self._cached_characters = 0

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Hold while a call may change what others read: cached answers are dropped, and
        answers read meanwhile are not kept."""
        await self._forget()
        self._changing += 1
        try:
            yield
        finally:
            self._changing -= 1
            await self._forget()

    def metrics(self) -> dict[str, float]:
        """Return counts since the start: "calls", "errors", "timeouts", "restarts",
        "cache_hits", "seconds" (summed over the calls), and "errors/KIND" of each kind of
        failure."""
        with self._lock:
            counts, seconds = Counter(self._counts), self._seconds
        kinds = {f"errors/{kind}": float(counts[kind]) for kind in FAILURES}
        restarts = sum(max(connection.starts - 1, 0) for connection in self._connections.values())
        return {
            "calls": float(counts["calls"]),
            "errors": sum(kinds.values()),
            "timeouts": kinds["errors/timeout"],
            "restarts": float(restarts),
            "cache_hits": float(counts["cached"]),
            "seconds": seconds,
            **kinds,
        }

    def metrics_by_owner(self) -> dict[str, dict[str, int]]:
        """Return the counts of each server, and of each function, by name: "calls", "unanswered"
        (no answer in time, or a server that ended), "failed" (an error of the tool)."""
        with self._lock:
            return {owner: dict(counts) for owner, counts in self._owners.items()}

    def close(self) -> None:
        """End every server. May be called again."""
        self._finalizer()

    async def _tools_of_servers(self) -> "dict[str, _ServedTool]":
        """Start every server once; all who wait share one attempt, and its failure. Raises
        ConfigError."""
        if self._served is not None:
            return self._served
        if self._resolving is None:
            self._resolving = asyncio.create_task(self._resolve())
            self._resolving.add_done_callback(self._resolved)
        return await asyncio.shield(self._resolving)

    def _resolved(self, attempt: "asyncio.Task[dict[str, _ServedTool]]") -> None:
        self._resolving = None
        if not attempt.cancelled():
            attempt.exception()  # mark it as retrieved: no caller waits any more

    async def _resolve(self) -> "dict[str, _ServedTool]":
        """Name the tools of all servers. A name that several have, or a function has, gets its
        server's name before it."""
        try:
            await asyncio.gather(
                *(connection.ensure() for connection in self._connections.values())
            )
        except ToolFailedError as error:
            raise ConfigError(str(error)) from error
        tools = [
            _ServedTool(connection, name)
            for connection in self._connections.values()
            for name in connection.definitions
        ]
        times = Counter([*self._functions, *(tool.name for tool in tools)])
        served: dict[str, _ServedTool] = {}
        for tool in tools:
            name = tool.name if times[tool.name] == 1 else tool.long_name
            if name in served or name in self._functions or (name != tool.name and times[name]):
                raise ConfigError(
                    f"MCP server {tool.connection.server.name!r}: there is a tool {name!r} already:"
                    " give the server another name"
                )
            served[name] = tool
        if renamed := [name for name, tool in served.items() if name != tool.name]:
            log.warning("tools of one name got their server's name before it", tools=renamed)
        self._served = served
        return served

    async def _call(
        self,
        name: str,
        arguments: dict[str, Any],
        timeout_s: float | None = None,
        *,
        cached: bool = True,
        before: CallsBefore | None = None,
    ) -> ToolResult:
        key = (name, repr(sorted(arguments.items())))
        if cached and (kept := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self._count(name, kept)
            return kept
        began, shared = time.perf_counter(), False
        if name in self._functions:
            seconds = timeout_s or self._function_timeout_s
            async with self._change():
                result = bounded(name, await self._call_function(name, arguments, seconds))
        else:
            try:
                tool, recorded = (await self._tools_of_servers()).get(name), self._recorded
                if tool is None and recorded is not None and name in recorded.definitions:
                    result = bounded(name, recorded.call(name, arguments, before))
                elif tool is None:
                    result = no_such_tool(name, [*self._functions, *(self._served or {})])
                elif cached and tool.connection.is_cached(tool.name):
                    shared = (*key, timeout_s, self._changes) in self._under_way
                    result = await self._shared_call(tool, key, arguments, timeout_s)
                elif tool.connection.is_read_only(tool.name):
                    result = await tool.call(name, arguments, timeout_s)
                else:
                    async with self._change():
                        result = await tool.call(name, arguments, timeout_s)
            except ConfigError as error:
                result = ToolResult(str(error), error="server")
        hit = shared and result.error is None
        result = replace(result, seconds=time.perf_counter() - began, cached=hit)
        self._count(name, result)
        return result

    async def _shared_call(
        self,
        tool: "_ServedTool",
        key: tuple[str, str],
        arguments: Mapping[str, Any],
        timeout_s: float | None,
    ) -> ToolResult:
        """Call a tool whose answers are kept, and keep its result where nothing can have changed
        it meanwhile. Who asks the same waits for the same call: the episodes of a group often do.
        A server that was started anew may have another state."""
        changes, starts = self._changes, tool.connection.starts

        async def call() -> ToolResult:
            result = await tool.call(key[0], arguments, timeout_s)
            if tool.connection.starts != starts:
                await self._forget()
            elif result.error is None and self._changes == changes and not self._changing:
                self._keep(key, replace(result, cached=True))
            return result

        call_key = (*key, timeout_s, changes)
        task = self._under_way.get(call_key)
        if task is None:
            task = self._under_way[call_key] = asyncio.create_task(call())
            task.add_done_callback(lambda _: self._under_way.pop(call_key))
        return await asyncio.shield(task)

    async def _call_function(
        self, name: str, arguments: dict[str, Any], timeout_s: float
    ) -> ToolResult:
        function = self._functions[name][0]
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return ToolResult(f"{name}: {error}", error="arguments")
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= MOST_LEFT_BEHIND:
            words = (
                f"{name} is not called: {len(self._left_behind)} earlier calls"
                " of functions have not returned"
            )
            return ToolResult(words, error="timeout")
        thread, outcome = _on_a_thread(name, function, arguments)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                value, raised = await outcome
                if raised is not None:
                    raise raised
                if inspect.isawaitable(value):
                    value = await value
            text = value if isinstance(value, str) else as_json(value)
        except asyncio.CancelledError:
            self._left_behind.append(thread)
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - boundary: the policy reads why
            if isinstance(error, TimeoutError) and limit.expired():
                self._left_behind.append(thread)
                return ToolResult(f"{name}: no answer within {timeout_s:g} s", error="timeout")
            return ToolResult(f"{name} failed: {type(error).__name__}: {error}", error="tool")
        return ToolResult(text, None if isinstance(value, str) else value)

    def _keep(self, key: tuple[str, str], result: ToolResult) -> None:
        if key in self._cache:
            return
        self._cache[key] = result
        self._cached_characters += _size(key, result)
        while self._cached_characters > CACHED_CHARACTERS:
            self._cached_characters -= _size(*self._cache.popitem(last=False))

    def _count(self, name: str, result: ToolResult) -> None:
        served = (self._served or {}).get(name)
        owner = name if served is None else served.connection.server.name
        with self._lock:
            if name in self._functions or served is not None:
                self._owners[owner]["calls"] += 1
                self._owners[owner]["unanswered"] += result.error in UNANSWERED
                self._owners[owner]["failed"] += result.error == "tool"
            self._counts["calls"] += 1
            self._counts["cached"] += result.cached
            self._seconds += result.seconds
            if result.error is not None:
                self._counts[result.error] += 1


@dataclass(frozen=True)
class _ServedTool:
    """A tool of a server, by its name there."""

    connection: MCPConnection
    name: str

    @property
    def long_name(self) -> str:
        server = re.sub(r"[^A-Za-z0-9_-]", "_", self.connection.server.name)
        return f"{server}_{self.name}"

    async def call(
        self, shown: str, arguments: Mapping[str, Any], timeout_s: float | None
    ) -> ToolResult:
        """`shown`: its name in this client."""
        return bounded(shown, await self.connection.call(self.name, arguments, timeout_s))


MCPToolClient = ToolClient
"""The specification's name: `MCPToolClient().register_tool("math_solve", my_math_solver)`."""


def _end(loop: LoopThread, connections: Sequence[MCPConnection]) -> None:
    """End the servers, then the loop, whose end cancels all tasks: an SDK session that is
    cancelled while it ends its server would leave that."""

    async def stop() -> None:
        await asyncio.gather(*(connection.stop() for connection in connections))

    # a finalizer may run in the loop, and cannot wait for itself
    if connections and not loop.is_current:
        with suppress(EngineUnavailableError, TimeoutError):
            loop.submit(stop()).result(2 * STOP_TIMEOUT_S)
    loop.stop(stop, STOP_TIMEOUT_S)


def _size(key: tuple[str, str], result: ToolResult) -> int:
    structured = as_json(result.structured) if result.structured is not None else ""
    return 100 + len(key[1]) + len(result.text) + len(structured)


def _on_a_thread(
    name: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> "tuple[threading.Thread, asyncio.Future[tuple[Any, BaseException | None]]]":
    """Call a function on a daemon thread of its own: one that never returns holds up no other
    call, and no exit. The future has its result or exception."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, raised: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, raised))

    def work() -> None:
        value, raised = None, None
        try:
            value = function(**arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - boundary: it is the call's result
            raised = error
        with suppress(RuntimeError):  # the client was closed meanwhile
            loop.call_soon_threadsafe(settle, value, raised)

    thread = threading.Thread(target=work, name=f"tool {name}", daemon=True)
    thread.start()
    return thread, outcome

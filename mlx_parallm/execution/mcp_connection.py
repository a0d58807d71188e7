"""MCPServer: how to reach a server of the Model Context Protocol. MCPConnection: one that runs, and
is kept running.

The SDK (extra `mcp`) is imported with the first start. MCP:
https://modelcontextprotocol.io/specification.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.execution.mcp_process import TOO_LARGE, server_process
from mlx_parallm.execution.tool_results import Failure, ToolResult, as_json
from mlx_parallm.system.foreign_http import Bounds, async_client
from mlx_parallm.system.foreign_json import fault, validator
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.packages import install

CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 30.0
MAX_CONCURRENT = 16
RESTARTS = 3
RETRY_PAUSE_S = 60.0  # between two starts after `restarts` that failed
STOP_TIMEOUT_S = 10.0  # it has 2 s to end, 2 s after SIGTERM, and is killed
CONNECTION_CLOSED = -32000  # JSON-RPC's code, as the SDK uses it
ERRORS: Mapping[int, Failure] = {-32602: "arguments", TOO_LARGE: "too_large"}
LAST_WORDS_S = 0.5  # a server that ended has written its last line by then
MOST_PAGES, MOST_TOOLS = 1000, 10_000  # limits of tools/list
ANSWER_BOUNDS = Bounds(body=16 << 20, event=16 << 20)
KEPT_BYTES, SHOWN_LINES, SHOWN_CHARACTERS = 8192, 8, 800  # limits on a server's output in errors
log = get_logger("tools")


@dataclass(frozen=True)
class MCPServer:
    """How to reach one server. Raises ConfigError: not one of `command` and `url`, a bound that
    is not above 0."""

    name: str
    command: Sequence[str] = ()
    url: str = ""
    # over PATH, HOME, USER and such; nothing else is inherited
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # HTTP only
    timeout_s: float = CALL_TIMEOUT_S  # limit of one call
    start_timeout_s: float = START_TIMEOUT_S
    max_concurrent: int = MAX_CONCURRENT  # calls at a time
    # starts in a row that may fail; then there is one a minute, and calls fail at once
    restarts: int = RESTARTS
    cache: bool = True  # cache answers of tools that are pure: `is_cached`
    tools: Sequence[str] = ()  # only these; none named: all

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"MCP server {self.name!r}: set either command or url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"MCP server {self.name!r}: url begins with http:// or https://, not {self.url!r}"
            )
        if (
            min(self.timeout_s, self.start_timeout_s) <= 0
            or self.max_concurrent < 1
            or self.restarts < 0
        ):
            raise ConfigError(
                f"MCP server {self.name!r}: timeout_s, start_timeout_s"
                " and max_concurrent are above 0"
            )


class MCPConnection:
    """One server. Everything runs in one loop; its own task holds the session open."""

    def __init__(self, server: MCPServer) -> None:
        self.server, self.starts = server, 0
        self.definitions: dict[str, dict[str, Any]] = {}
        self._read_only: set[str] = set()
        self._constant: set[str] = set()
        self._output_schemas: dict[str, str] = {}
        self._failed_starts, self._why, self._retry_at = 0, "", 0.0
        self._answered = 0  # calls, since the last start
        self._slots = asyncio.Semaphore(server.max_concurrent)
        self._session: Any = None
        self._starting: asyncio.Task[Any] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # holders of sessions that were let go
        self._end = asyncio.Event()
        self._stopped = False
        self._stage = ""  # start-up stage
        self._printed = PrintedOutput()

    def is_read_only(self, name: str) -> bool:
        """Whether a call changes nothing, as the server says."""
        return name in self._read_only

    def is_cached(self, name: str) -> bool:
        """Whether an answer is kept for equal calls: the server marks the tool read-only and
        idempotent, and not of an open world. Read-only alone is not constant: a clock is."""
        return self.server.cache and name in self._constant

    async def ensure(self) -> Any:
        """Return the session; start the server if there is none. All who wait share one start,
        and its failure.

        Raises ToolFailedError: it cannot be started. ConfigError: it lacks a tool, or the SDK is
        not installed.
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
            # who waited has it; it is no "exception was never retrieved" when all waiters are gone
            # more
            start.exception()

    async def _start(self) -> Any:
        if self._stopped:
            raise ToolFailedError(f"{self._what} was stopped")
        if self._failed_starts > self.server.restarts and time.monotonic() < self._retry_at:
            raise ToolFailedError(
                f"{self._why} ({self._failed_starts} times in a row; it is tried once a minute)"
            )
        self._import_sdk()
        self.starts += 1
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._end, self._answered, self._printed = asyncio.Event(), 0, PrintedOutput()
        self._holder = asyncio.create_task(self._hold(ready, self._end))
        try:
            self._session = await asyncio.wait_for(
                asyncio.shield(ready), self.server.start_timeout_s
            )
        except (Exception, asyncio.CancelledError) as error:
            self._failed_starts, self._retry_at = (
                self._failed_starts + 1,
                time.monotonic() + RETRY_PAUSE_S,
            )
            self._let_go()
            if isinstance(error, asyncio.CancelledError | ConfigError):
                raise
            late = (
                f"no answer within {self.server.start_timeout_s:g} s"
                f" (start_timeout_s) to {self._stage}"
            )
            why = late if isinstance(error, TimeoutError) else words(error)
            self._why = f"{self._what} cannot be started: {why}{self._printed.in_words()}"
            raise ToolFailedError(self._why) from error
        self._failed_starts = 0
        return self._session

    def _import_sdk(self) -> None:
        """Import the SDK, which takes a second, before a start is timed. Raises ConfigError: it
        is not installed."""
        try:
            import httpx2  # noqa: F401
            from mcp import Client  # noqa: F401
            from mcp.client.streamable_http import streamable_http_client  # noqa: F401
        except ImportError as error:  # no SDK, or one of before 2.0, to which many servers bind it
            raise ConfigError(f"{self._what}: {error}: {install('mcp')}") from error
        # no tracebacks of the SDK: results and errors say what failed
        logging.getLogger("mcp.client").setLevel(logging.CRITICAL)

    @property
    def _what(self) -> str:
        return (
            f"MCP server {self.server.name!r} ({self.server.url or ' '.join(self.server.command)})"
        )

    async def _hold(self, ready: "asyncio.Future[Any]", end: asyncio.Event) -> None:
        """Open the session, list the tools, keep it open until `end`."""
        try:
            async with self._opened() as session:
                await self._list(session)
                ready.set_result(session)
                await end.wait()
        except Exception as error:  # noqa: BLE001 - boundary: those who wait for the start get it
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # a start that has timed out asks no more
        finally:
            if self._end is end:
                self._session = None

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        printed = self._printed
        async with AsyncExitStack() as stack:
            if self.server.url:
                http = async_client(
                    ANSWER_BOUNDS,
                    library=httpx2,
                    return_redirects=True,  # the SDK follows them on the same server
                    look=printed.take_response,
                    on_refusal=printed.take_refusal,
                    headers=dict(self.server.headers),
                    timeout=None,  # calls and starts have their own
                )
                transport: Any = streamable_http_client(
                    self.server.url, http_client=await stack.enter_async_context(http)
                )
            else:
                transport = self._process()
            self._stage = "initialize"
            client = await stack.enter_async_context(
                Client(transport, cache=None, message_handler=printed.take_message)
            )
            # the SDK's check ends the call of a tool without structured content, and its patterns
            # have no bound: `call` checks the result
            client.session.validate_tool_result = _unchecked
            yield client

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            writer = await self._printed.listen(stack)
            try:
                streams = await stack.enter_async_context(
                    server_process(
                        self.server.command,
                        environment=self.server.env,
                        directory=self.server.cwd,
                        stderr=writer,
                    )
                )
            finally:
                writer.close()  # the process has its own
            yield streams

    async def _list(self, session: Any) -> None:
        self._stage, tools = "tools/list", await self._all_tools(session)
        if missing := set(self.server.tools) - set(tools):
            raise ConfigError(
                f"{self._what} has no tool {sorted(missing)[0]!r}; it has: {', '.join(tools)}"
            )
        chosen = [tools[name] for name in self.server.tools or tools]
        self.definitions = {
            tool.name: {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            for tool in chosen
        }
        hints = {tool.name: tool.annotations for tool in chosen if tool.annotations}
        self._read_only = {name for name, hint in hints.items() if hint.read_only_hint}
        self._constant = {
            name
            for name in self._read_only
            if hints[name].idempotent_hint and not hints[name].open_world_hint
        }
        self._output_schemas = {
            tool.name: source for tool in chosen if (source := self._output_schema(tool))
        }

    async def _all_tools(self, session: Any) -> dict[str, Any]:
        """Return the server's tools by name, of all pages."""
        tools: dict[str, Any] = {}
        cursor, seen = None, set[str]()
        while True:
            page = await session.list_tools(cursor=cursor)
            tools.update({tool.name: tool for tool in page.tools})
            cursor = page.next_cursor
            if not cursor:
                return tools
            if cursor in seen or len(seen) == MOST_PAGES or len(tools) > MOST_TOOLS:
                why = "the same again" if cursor in seen else "always another"
                log.warning(
                    "the list of a server's tools has no end; those that it listed are used",
                    server=self._what,
                    cursor=f"{cursor[:80]} ({why})",
                    tools=len(tools),
                )
                return tools
            seen.add(cursor)

    def _output_schema(self, tool: Any) -> str | None:
        """Return a tool's schema of results as JSON text, if it can be checked."""
        if tool.output_schema is None:
            return None
        source = json.dumps(tool.output_schema)
        try:
            validator(source)
        except ValueError as error:
            log.warning(
                "the results of a tool are not checked: its outputSchema cannot be read",
                server=self._what,
                tool=tool.name,
                reason=str(error)[:300],
            )
            return None
        return source

    async def call(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float | None = None
    ) -> ToolResult:
        """Call a tool within `timeout_s` (default: the server's), the wait for a slot included;
        a restart has `start_timeout_s` of its own."""
        at_first, answered, seconds = (
            self._session,
            self._answered,
            timeout_s or self.server.timeout_s,
        )
        try:
            async with asyncio.timeout(seconds) as limit, self._slots:
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
                self._let_go()  # it does not answer: begin anew
            return ToolResult(f"{name}: no answer within {seconds:g} s", error="timeout")
        except ToolFailedError as error:
            return ToolResult(str(error), error="server")
        except Exception as error:  # noqa: BLE001 - boundary: a server may answer anything
            return await self._failed(name, error, at_first)
        self._answered += 1
        return self._result(name, answer)

    def _result(self, name: str, answer: Any) -> ToolResult:
        structured = answer.structured_content
        text = "\n".join(content_text(block) for block in answer.content)
        if not text and structured is not None:
            text = as_json(structured)
        if answer.is_error:
            return ToolResult(text, structured, "tool")
        schema = self._output_schemas.get(name)
        if structured is not None and schema is not None:
            reason = fault(schema, structured, what="the result")
            if reason is not None:
                text = (
                    f"{text}\n[{name}: the server breaks the tool's outputSchema: {reason[:300]}]"
                )
                return ToolResult(text, structured, "server")
        return ToolResult(text, structured)

    async def _failed(self, name: str, error: Exception, session: Any) -> ToolResult:
        code, printed = getattr(error, "code", None), self._printed
        if isinstance(code, int) and code != CONNECTION_CLOSED:
            self._answered += 1
            text = f"{name}: {words(error)}{printed.http_in_words()}"
            return ToolResult(text, error=ERRORS.get(code, "tool"))
        if session is not None and session is self._session:
            self._let_go()
        await printed.ended()
        return ToolResult(
            f"{self._what} failed: {words(error)}{printed.in_words()}", error="server"
        )

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
        """Close the session, and wait for nothing: the SDK ends the process. A start that is not
        over is cancelled."""
        is_open, self._session = self._session is not None, None
        self._end.set()
        holder, self._holder = self._holder, None
        if holder is None or holder.done():
            return
        self._ending.add(holder)
        holder.add_done_callback(self._ending.discard)
        if not is_open:
            holder.cancel()
        else:
            asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, holder.cancel)


class PrintedOutput(asyncio.Protocol):
    """Keep the end of what a server printed, for the error that says why it failed: its stderr,
    what on its stdout is not JSON-RPC, and the last HTTP answer if that was an error."""

    def __init__(self) -> None:
        self._stderr, self._stdout, self._http = bytearray(), list[str](), ""
        self._ended = asyncio.Event()
        self._ended.set()

    async def listen(self, stack: AsyncExitStack) -> Any:
        """Return a file for the process to write its stderr to; the caller closes it once the
        process has it."""
        reading, writing = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: self, os.fdopen(reading, "rb", 0)
        )
        self._ended.clear()

        async def close() -> None:
            try:
                await self.ended()
            finally:
                transport.close()

        stack.push_async_callback(close)
        return os.fdopen(writing, "w")

    def data_received(self, data: bytes) -> None:
        self._stderr += data
        del self._stderr[:-KEPT_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    async def ended(self) -> None:
        """Wait for the end of the stderr, not for long: a child of the server may keep it open."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), LAST_WORDS_S)

    async def take_message(self, message: Any) -> None:
        """Take a message handler's message: notifications mean nothing here, an error is a line
        that is not JSON-RPC."""
        if isinstance(message, Exception):
            errors: list[Any] = getattr(message, "errors", list)()
            line = str(errors[0].get("input", "")) if errors else words(message)
            self._stdout = [*self._stdout, line][-SHOWN_LINES:]

    async def take_response(self, response: Any) -> None:
        """Take an HTTP answer before its body is read."""
        self._http = ""
        if response.status_code >= 400:
            body = (await response.aread())[:KEPT_BYTES].decode(errors="replace")
            self._http = f"HTTP {response.status_code} {_end_of(body)}".strip()

    def take_refusal(self, words: str) -> None:
        """Take why an HTTP answer was not read."""
        self._http = words

    def http_in_words(self) -> str:
        return f"; the server's answer: {self._http}" if self._http else ""

    def in_words(self) -> str:
        """Return the server's output, to be added to an error; "" without any."""
        stderr, stdout = (
            _end_of(self._stderr.decode(errors="replace")),
            _end_of("\n".join(self._stdout)),
        )
        return (
            (f"; the end of its stderr: {stderr}" if stderr else "")
            + (f"; on its stdout was no JSON-RPC: {stdout}" if stdout else "")
            + self.http_in_words()
        )


def content_text(block: Any) -> str:
    """Return a part of a result as the policy reads it: a text, a resource's text, a link's
    address; of other content its type and size."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        resource = block.resource
        if (text := getattr(resource, "text", None)) is not None:
            return str(text)
        return f"[resource {resource.uri}{_form(resource.mime_type, resource.blob)}]"
    if block.type == "resource_link":
        about = " ".join(
            str(text) for text in (block.title or block.name, block.description) if text
        )
        return f"[{about}]({block.uri}){_form(block.mime_type, None)}"
    return f"[{block.type}{_form(getattr(block, 'mime_type', None), getattr(block, 'data', None))}]"


def _form(mime_type: str | None, base64: str | None) -> str:
    size = "" if base64 is None else f", {len(base64) * 3 // 4:,} bytes"
    return f"{f' {mime_type}' if mime_type else ''}{size}"


async def _unchecked(name: str, result: Any) -> None:
    """Take the place of the SDK's check of a result."""


def _end_of(text: str) -> str:
    """Return the last lines on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    end = " | ".join(lines[-SHOWN_LINES:])
    return end if len(end) <= SHOWN_CHARACTERS else f"… {end[-SHOWN_CHARACTERS:]}"


def words(error: BaseException) -> str:
    """Return the first line of the innermost error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]

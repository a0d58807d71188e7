"""The stdio transport of MCP: a server as a process, JSON-RPC a line, all of it bounded.

The SDK's own buffers a line without a bound, and leaves the children of a server that ends by
itself. https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#stdio
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from mlx_parallm.system.foreign_json import check_containers
from mlx_parallm.system.processes import end_family, marked

LONGEST_LINE = 32 << 20  # bytes
TOO_LONG = b"the server's answer has more than %d bytes" % LONGEST_LINE
TOO_LARGE = -32099  # a code of JSON-RPC that is free for an implementation: an answer with TOO_LONG
KEPT = 256  # bytes of each end of a line that is too long
EXIT_S = 2.0  # for a server whose stdin was closed to end by itself
POLL_S = 0.01
_ID = re.compile(rb'"id"\s*:\s*(\d{1,15})\b')


@asynccontextmanager
async def server_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: str | None,
    stderr: Any,
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server, and end it with all that it started; yields the SDK's streams of messages.

    Args:
        environment: over the few variables that the SDK passes on.
        stderr: a file for its output.

    Raises OSError, ValueError: the command cannot be run.
    """
    import anyio
    from mcp.client.stdio import get_default_environment

    variables, mark = marked({**get_default_environment(), **environment})
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=variables,
        cwd=directory,
        start_new_session=True,
        limit=LONGEST_LINE,
    )
    to_session, from_server = anyio.create_memory_object_stream[Any](0)
    to_server, from_session = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.create_task(_read(process, to_session)),
        asyncio.create_task(_write(process, from_session, to_session)),
    ]
    try:
        yield from_server, to_server
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process, mark)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (to_session, from_server, to_server, from_session):
                await stream.aclose()


async def _read(process: asyncio.subprocess.Process, to_session: Any) -> None:
    """Give the session each line as a message, or as an exception if it is not one; at the end
    read on, so that the server never waits for a reader."""
    import anyio

    stdout = process.stdout
    assert stdout is not None, "it is a pipe"
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
        async with to_session:
            while line := await _line(stdout):
                await to_session.send(_message(line))
    with suppress(ConnectionError):
        while await stdout.read(1 << 16):
            pass


async def _line(stdout: asyncio.StreamReader) -> bytes:
    """Return the next line, b"" at the end; of one that is too long its two ends, with the reason
    between them."""
    try:
        return await stdout.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError:
        begin, end = await stdout.read(KEPT), b""
    while not end.endswith(b"\n"):
        try:
            end = (end + await stdout.readuntil())[-KEPT:]
        except asyncio.LimitOverrunError as error:
            end = (await stdout.read(error.consumed))[-KEPT:]
        except asyncio.IncompleteReadError:
            break
    return begin + TOO_LONG + end


async def _write(process: asyncio.subprocess.Process, from_session: Any, to_session: Any) -> None:
    stdin = process.stdin
    assert stdin is not None, "it is a pipe"
    try:
        async for message in from_session:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            stdin.write(text.encode() + b"\n")
            await stdin.drain()
    except OSError:
        # it reads no more: the session sees the end of the connection, and waits for no answer
        await to_session.aclose()


def _message(line: bytes) -> Any:
    from mcp.shared.message import SessionMessage
    from mcp_types import ErrorData, JSONRPCError, jsonrpc_message_adapter

    number = _ID.search(line) if TOO_LONG in line else None
    if number is not None:  # the call fails, and the server continues
        error = ErrorData(code=TOO_LARGE, message=TOO_LONG.decode())
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(number[1]), error=error))
    try:
        check_containers(line)
        text = line.decode(errors="replace").rstrip("\r\n")
        return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValueError as error:
        return error


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Close the server's stdin, wait for its end, and kill it if it stays."""
    assert process.stdin is not None, "it is a pipe"
    with suppress(OSError):
        process.stdin.close()
    await _exited(process)
    await asyncio.to_thread(end_family, process.pid, mark)
    await _exited(process)
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()  # a pipe that another process holds would be reported as not closed


async def _exited(process: asyncio.subprocess.Process) -> None:
    """Wait for its end, EXIT_S at most. Not `process.wait()`: that waits for the ends of its pipes
    too, which a child may hold open."""
    until = asyncio.get_running_loop().time() + EXIT_S
    while process.returncode is None and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)

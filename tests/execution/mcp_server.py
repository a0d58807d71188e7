"""An MCP server for tests: `python mcp_server.py [stdio | http PORT]`. Its tools fail in every
way."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("tests")
calls = 0


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """Count the calls of this tool."""
    global calls
    calls += 1
    return calls


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def clock() -> int:
    """Count the calls of this tool, as a clock that is only read."""
    return count()


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))
def counted() -> int:
    """Return how often `count` was called."""
    return calls


@server.tool(
    annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=True)
)
def news() -> int:
    """Count the calls of this tool, as a page that others write."""
    return count()


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def crash() -> str:
    """End the server with a last word."""
    print("out of memory: the table of prices", file=sys.stderr, flush=True)
    os._exit(1)


@server.tool()
def garbage() -> str:
    """Write what is not JSON-RPC to stdout."""
    sys.stdout.buffer.write(b"\xff\xfe{]\n" * 3)
    sys.stdout.flush()
    return "written"


@server.tool()
def much(characters: int) -> str:
    """Return much text."""
    return "x" * characters


@server.tool()
def pid() -> int:
    """Return the process."""
    return os.getpid()


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    elif sys.argv[1:2] == ["late"]:
        time.sleep(60)
    elif sys.argv[1:2] == ["ends"]:
        sys.exit(3)
    else:
        server.run("stdio")

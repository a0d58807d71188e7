"""An MCP server whose tools fail in every way, for tool_faults.py.

    python faulty_mcp_server.py NAME [SECONDS before it starts]

Its tools are called NAME_echo and so on.
"""

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import MCPServer

NAME = sys.argv[1]
server = MCPServer(NAME)


@server.tool(name=f"{NAME}_echo")
async def echo(n: int) -> int:
    """Return the number."""
    return n


@server.tool(name=f"{NAME}_nap")
async def nap(seconds: float) -> float:
    """Sleep; others are answered meanwhile."""
    await asyncio.sleep(seconds)
    return seconds


@server.tool(name=f"{NAME}_hang")
async def hang() -> str:
    """Block the whole server for ever."""
    time.sleep(10**6)  # noqa: ASYNC251  the fault
    return ""


@server.tool(name=f"{NAME}_die")
async def die() -> str:
    """End the server at once."""
    os._exit(1)


@server.tool(name=f"{NAME}_garbage")
async def garbage() -> str:
    """Write what is not JSON-RPC to stdout, and answer."""
    sys.stdout.buffer.write(b"\xff\xfe{]\n" * 3)
    sys.stdout.flush()
    return "written"


@server.tool(name=f"{NAME}_huge")
async def huge() -> str:
    """Return 10 MB."""
    return "x" * 10**7


if __name__ == "__main__":
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    server.run("stdio")

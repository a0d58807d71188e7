"""Functions as tools, which need no MCP: whatever they do, the client goes on."""

import asyncio
import sys

from mlx_parallm.execution.tool_client import ToolClient, ToolResult


def test_no_function_hangs_ends_or_breaks_the_client() -> None:
    """A future that gets a StopIteration is never done, and SystemExit ends a loop."""

    def first_of(names: list[str]) -> str:
        return next(iter(names))

    def leave() -> None:
        sys.exit(3)

    async def leave_later() -> None:
        sys.exit(4)

    def pairs() -> dict[tuple[int, int], int]:
        return {(1, 2): 3}

    async def results(client: ToolClient) -> list[ToolResult]:
        calls = [("first_of", {"names": []}), ("leave", {}), ("leave_later", {}), ("pairs", {})]
        async with asyncio.timeout(20):
            return [await client.acall(name, arguments) for name, arguments in calls]

    with ToolClient(functions=[first_of, leave, leave_later, pairs]) as client:
        found = asyncio.run(results(client))
        assert [result.error for result in found] == ["tool"] * 4
        for result, words in zip(found, ("StopIteration", "SystemExit: 3", "SystemExit: 4", "TypeError"), strict=True):
            assert words in result.text
        assert client.call("first_of", {"names": [{1: 2, "a": 3}]}).error is None

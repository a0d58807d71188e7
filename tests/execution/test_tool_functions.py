"""Functions as tools, which need no MCP: whatever they do, the client continues."""

import asyncio
import sys
import threading

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import (
    MOST_LEFT_BEHIND,
    MCPToolClient,
    ToolClient,
    ToolResult,
)


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
        for result, words in zip(
            found, ("StopIteration", "SystemExit: 3", "SystemExit: 4", "TypeError"), strict=True
        ):
            assert words in result.text
        assert client.call("first_of", {"names": [{1: 2, "a": 3}]}).error is None


def test_functions_that_hang_hold_up_nobody() -> None:
    """More calls hang than a pool has threads, to the end of the test; the others are answered
    all the same, and the hanging ones in time."""
    open_gate = threading.Event()

    def hang() -> str:
        open_gate.wait(600)
        return "late"

    def fast(n: int) -> int:
        return n

    async def results(client: ToolClient) -> tuple[list[ToolResult], list[ToolResult]]:
        hanging = [asyncio.create_task(client.acall("hang")) for _ in range(MOST_LEFT_BEHIND + 6)]
        answered = await asyncio.gather(*(client.acall("fast", {"n": n}) for n in range(50)))
        return answered, await asyncio.gather(*hanging)

    with ToolClient(functions=[hang, fast], function_timeout_s=1.0) as client:
        answered, hung = asyncio.run(results(client))
        assert [result.text for result in answered] == [str(n) for n in range(50)]
        assert {result.text for result in hung} == {"hang: no answer within 1 s"}
        refused = client.call("fast", {"n": 1})
        assert (
            refused.error == "timeout" and f"{MOST_LEFT_BEHIND + 6} earlier calls" in refused.text
        )
        metrics = client.metrics()
        assert (metrics["calls"], metrics["timeouts"]) == (51 + len(hung), 1 + len(hung))
        open_gate.set()


def test_a_structured_result_is_bounded() -> None:
    def table(rows: int) -> list[str]:
        return ["x" * 100] * rows

    with MCPToolClient(functions=[table]) as client:
        assert client.call("table", {"rows": 3}).structured == ["x" * 100] * 3
        large = client.call("table", {"rows": 10_000})
        assert large.error == "too_large" and large.structured is None and len(large.text) < 200


def test_a_result_holds_whole_characters() -> None:
    """A name of a file that is not UTF-8, or half an emoji: the prompt with it could not be read,
    and a whole group was lost."""

    def names(part: str) -> str:
        if part == "none":
            raise ValueError("no \udc80")
        return f"a{part}\udc80 \ud83d\ude00"

    with ToolClient(functions=[names]) as client:
        texts = [client.call("names", {"part": part}).text for part in ("\ud800!", "ü", "none")]
    assert texts[:2] == ["a\ufffd!\ufffd 😀", "aü\ufffd 😀"] and "no \ufffd" in texts[2]


def test_the_specifications_client() -> None:
    def my_math_solver(expression: str) -> float:
        return float(expression.split("+")[0]) + float(expression.split("+")[1])

    mcp = MCPToolClient()
    mcp.register_tool("math_solve", my_math_solver)
    try:
        assert mcp.call("math_solve", {"expression": "2+3"}).structured == 5.0
        with pytest.raises(ConfigError, match="'math_solve'"):
            mcp.register_tool("math_solve", my_math_solver)
    finally:
        mcp.close()

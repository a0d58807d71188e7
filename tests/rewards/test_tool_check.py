"""builtin:tool: a tool's word is the score; and functions of the user's that take the client."""

import asyncio
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.types import Rollout, Trajectory


def solve(question: str) -> float:
    """Add what stands on both sides of a plus."""
    a, b = question.split("+")
    return float(a) + float(b)


def correct(a: int, answer: str) -> bool:
    return float(answer) == a


def describe() -> str:
    return "rather good"


def rollouts(*texts: str) -> list[Trajectory]:
    rollout = Rollout((1,), (1,), (0.0,), (0,), 1.0, {}, stop_reason="stop")
    return [Trajectory(text, rollout, step_count=1, group_id="g") for text in texts]


def judged_by(name: str, **options: Any) -> RewardFunctions:
    options = {"tool": {"name": name, "arguments": {}, **options}}
    return RewardFunctions(["builtin:tool"], (), columns=None, key="rewards", options=options)


async def scores(options: dict[str, Any], row: dict[str, Any], *texts: str) -> list[float | None]:
    with ToolClient(functions=[solve, correct, describe]) as client:
        functions = judged_by(**options)
        functions.use_tools(client)
        parts, *_ = await functions.parts("2+3?", row, rollouts(*texts), TrainingProgress)
        return [each["tool"] for each in parts if each is not None]


async def test_a_tool_judges_each_answer() -> None:
    verify = {"name": "correct", "arguments": {"a": "{a}", "answer": "{completion}"}}
    # the third is not a number: the tool refuses it, which is the answer's fault
    assert await scores(verify, {"a": 5}, "5.0", "6", "five") == [1.0, 0.0, 0.0]
    equal = {
        "name": "solve",
        "arguments": {"question": "{question}"},
        "equals": "{completion}",
        "pattern": r"= (\d+)",
    }
    assert await scores(equal, {"question": "2+3"}, "2+3 = 5", "= 6", "5") == [1.0, 0.0, 0.0]
    number = {"name": "solve", "arguments": {"question": "{completion}+0"}}
    assert await scores(number, {}, "0.25", "3") == [0.25, 3.0]
    assert await scores({**number, "threshold": 1.0}, {}, "0.25", "3") == [0.0, 1.0]


async def test_a_judge_that_is_away_teaches_nothing() -> None:
    async def nap() -> None:
        await asyncio.sleep(60)

    functions = judged_by("nap")
    with ToolClient(functions=[nap], function_timeout_s=0.1) as client:
        functions.use_tools(client)
        parts, *_ = await functions.parts("?", {}, rollouts("a"), TrainingProgress)
    assert parts == [{"tool": None}]


async def test_what_is_no_score_is_an_error() -> None:
    with pytest.raises(RolloutRejectedError, match="no number, no yes or no"):
        await scores({"name": "describe", "arguments": {}}, {}, "a")


def test_tools_that_are_missing_are_found_before_a_run() -> None:
    functions = judged_by("solved")
    with pytest.raises(ConfigError, match="reward tool"):
        functions.use_tools(None)
    missing = "no tool 'solved'; did you mean 'solve'"
    with ToolClient(functions=[solve]) as client, pytest.raises(ConfigError, match=missing):
        functions.use_tools(client)


async def test_a_function_of_the_users_gets_the_client(tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(
        "def right(completions, tool_client, question, **columns):\n"
        "    value = tool_client.call('solve', {'question': question[0]}).text\n"
        "    return [float(float(text) == float(value)) for text in completions]\n"
    )
    functions = RewardFunctions(
        [f"python:{tmp_path}/own.py:right"], (), columns=["question"], key="rewards"
    )
    with ToolClient(functions=[solve]) as client:
        functions.use_tools(client)
        parts, *_ = await functions.parts(
            "?", {"question": "2+3"}, rollouts("5", "6"), TrainingProgress
        )
    assert parts == [{"right": 1.0}, {"right": 0.0}]

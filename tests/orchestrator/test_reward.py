"""Rewards with numbers worked by hand from the table of docs/systems.md#hybrid."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import ToolClient, ToolResult
from mlx_parallm.systems.experts import ExpertRegistry
from mlx_parallm.systems.orchestrator import Orchestrator, OrchestratorConfig
from mlx_parallm.systems.orchestrator.environment import outcome
from mlx_parallm.systems.orchestrator.reward import (
    CallRecord,
    HybridTask,
    RewardConfig,
    final_reward,
    is_solved,
    last_number,
    matches,
    nearest_shot,
    physics_reward,
    step_reward,
    violations,
)


@dataclass
class Played:
    task: HybridTask
    answer: str | None = None
    steps: int = 2
    calls: list[CallRecord] = field(default_factory=list)


def shot(distance: float, wind: float = 0.0, expert: str = "aim", error: Any = None) -> CallRecord:
    result = ToolResult("", {"distance": distance}, error)
    return CallRecord(
        "physics_simulate", {"angle": 45.0, "velocity": 40.0, "wind": wind}, result, expert
    )


def solve(text: str = "42", error: Any = None) -> CallRecord:
    return CallRecord("math_solve", {"expression": "6*7"}, ToolResult(text, error=error))


def final(played: Played, config: RewardConfig | None = None, *, timed_out: bool = False) -> float:
    return final_reward(config or RewardConfig(), played, timed_out=timed_out)


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_an_episode_that_its_task_function_cannot_score_has_no_score(nothing: Any) -> None:
    config = RewardConfig(task_rewards={"math": lambda episode: nothing})
    played = Played(HybridTask("6*7?", {"expected_answer": 42}, type="math"), "42")
    assert math.isnan(final(played, config)) and math.isnan(final(played, config, timed_out=True))
    with ToolClient() as tools:
        orchestrator = Orchestrator(OrchestratorConfig(rewards=config), ExpertRegistry(), tools)
        orchestrator.reset(played.task)
        orchestrator.step("ANSWER: 42")
    assert outcome(orchestrator)["reward"] is None and outcome(orchestrator)["solved"] is True


def test_the_end_of_a_sum() -> None:
    sum_ = HybridTask("6*7?", {"expected_answer": 42}, type="math")
    # correct 1 + exact 0.5 + fast (2 < 5 steps) 0.5 + efficient (1 ≤ 3 calls) 0.2
    assert final(Played(sum_, "42", 2, [solve()])) == pytest.approx(2.2)
    assert final(Played(sum_, "42", 5, [solve()])) == pytest.approx(1.7)
    assert final(Played(sum_, "42", 5, [solve()] * 4)) == pytest.approx(1.5)
    # within 0.01, not exact
    assert final(Played(sum_, "42.005", 9, [solve()] * 4)) == pytest.approx(1.0)
    assert final(Played(sum_, "45", 2)) == pytest.approx(-0.5)  # near is wrong, unless one says so
    near = RewardConfig(partial_answer_reward=0.25)
    assert final_reward(near, Played(sum_, "45", 2), timed_out=False) == pytest.approx(0.25)
    with pytest.raises(ConfigError, match="correct_answer_reward"):
        RewardConfig(partial_answer_reward=1.0)
    for wrong in (math.nan, math.inf, "0.5", True):
        with pytest.raises(ConfigError, match="has to be a number"):
            RewardConfig(partial_answer_reward=wrong)
    assert final(Played(sum_, "47", 2)) == pytest.approx(-0.5)
    assert final(Played(sum_, "", 2)) == final(Played(sum_, None, 2)) == pytest.approx(-1.0)
    assert final(Played(sum_, None, 50), timed_out=True) == pytest.approx(-2.0)
    assert final(Played(HybridTask("talk"), "hello", 2)) == pytest.approx(0.1 + 0.5 + 0.2)


def test_the_end_of_a_shot() -> None:
    aim = HybridTask("hit", {"target": 100.0, "wind": 2.0, "tolerance": 1.0}, type="physics")
    many = [solve()] * 4  # neither fast nor efficient
    # no expected answer: 0.1; then 1, 0.5 or -0.5
    assert final(Played(aim, "done", 6, [*many, shot(100.5, 2.0)])) == pytest.approx(1.1)
    assert final(Played(aim, "done", 6, [*many, shot(104.0, 2.0)])) == pytest.approx(0.6)
    assert final(Played(aim, "done", 6, [*many, shot(106.0, 2.0)])) == pytest.approx(-0.4)
    # A shot in another wind, or a failed one, hits nothing, whatever the planner says.
    assert (
        nearest_shot(Played(aim, "hit!", 2, [shot(100.0, 0.0), shot(100.0, 2.0, error="timeout")]))
        == math.inf
    )
    assert physics_reward(Played(aim, "hit!", 2, [])) == -0.5
    assert not is_solved(RewardConfig(), Played(aim, "hit!", 2, [shot(100.0, 0.0)]))
    assert is_solved(RewardConfig(), Played(aim, "hit!", 2, [shot(100.0, 2.0)]))
    assert not is_solved(RewardConfig(), Played(aim, None, 2, [shot(100.0, 2.0)]))


def test_constraints_are_judged_at_the_end() -> None:
    limits = {"max_tool_calls": 1, "required_tools": ["math_solve", "physics_simulate"]}
    task = HybridTask("x", {"expected_answer": "yes"}, limits)
    assert violations(Played(task, calls=[solve(), solve()])) == [
        "2 tool calls, at most 1",
        "physics_simulate was not used",
    ]
    assert (
        violations(Played(task, calls=[solve(), shot(1.0), shot(2.0)])) == []
    )  # an expert's calls are not the planner's
    assert violations(Played(task, calls=[solve(error="tool"), shot(1.0)])) == [
        "math_solve was not used"
    ]
    # correct 1 + fast 0.5 + efficient 0.2 - two violations
    assert final(Played(task, "yes", 2, [solve(), solve()])) == pytest.approx(0.7)


def test_steps() -> None:
    config = RewardConfig(valid_tool_call_reward=0.05, expert_delegation_reward=0.03)
    assert (
        step_reward(config, "think", None)
        == step_reward(config, "answer", None)
        == pytest.approx(-0.01)
    )
    assert step_reward(config, "tool", None) == pytest.approx(0.04)
    assert step_reward(config, "tool", "unknown_tool") == pytest.approx(-0.11)
    assert step_reward(config, "tool", "malformed") == step_reward(
        config, "delegate", "unknown_expert"
    )
    assert (
        step_reward(config, "tool", "timeout")
        == step_reward(config, "tool", "tool")
        == pytest.approx(-0.21)
    )
    assert step_reward(config, "delegate", None) == pytest.approx(0.02)
    assert step_reward(config, "delegate", None, success=True) == pytest.approx(0.22)


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("The sum is 42.", 42, True),
        ("421", "42", False),
        ("42 or 43", 42, False),
        ("1,234.5 m", 1234.5, True),
        ("-3e2", -300, True),
        ("It is Paris, France.", "paris", True),
        ("parish", "paris", False),
        ("New  York city", "new york", True),
        ("", "x", False),
        ("none", 1, False),
        # units and their powers, names with digits
        ("42 m/s^2", 42, True),
        ("42 m/s²", 42, True),
        *[(f"It is {text}", 42, True) for text in ("42 m·s⁻¹", "42 m^{2}", "42 m**2", "**42**")],
        *[(text, 42, True) for text in ("4.2 × 10^1", "4.2·10¹", "4.2e1", "答案是42。", "42です")],
        ("−300", -300, True),
        ("北京是首都", "北京", True),
        *[(text, "B", True) for text in (r"\boxed{B}", "Option B is right", "I choose B")],
        ("I choose a banana", "A", False),
        ("It is 42 m2.", 42, True),
        ("42m^-2", 42, True),
        ("x1 is 42", 42, True),
        ("x1", 1, False),
        ("2.5e-3 kg", 0.0025, True),
        ("42 or 10^6", 42, False),
        # a letter is chosen, and no article
        ("a banana", "A", False),
        ("The answer is a banana.", "A", False),
        ("A banana is B", "B", True),
        ("B is the answer", "B", True),
        ("B is the answer, A is not", "A", False),
        ("a banana is the answer", "A", False),
        ("A", "a", True),
        ("(A)", "A", True),
        ("The answer is A.", "A", True),
        ("A. Paris", "A", True),
        ("Option B, not A", "A", False),
        ("the cat", "the", False),
        ("I use C.", "C++", False),
        ("I use c++.", "C++", True),
    ],
)
def test_matches(answer: str, expected: Any, right: bool) -> None:
    assert matches(answer, expected, 0.01) is right


def test_last_number() -> None:
    assert last_number("7 then 8,001") == 8001
    assert last_number("1e999") is None and last_number("-") is None and last_number(None) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": "x", "goal": 3},
        {"prompt": "x", "goal": {"target": "far"}},
        {"prompt": "x", "goal": {"target": 50, "tolerance": 0}},
        {"prompt": "x", "goal": {"expected": 3}},
        {"prompt": "x", "goal": {"answer": 3}},
        {"prompt": "x", "goal": {"targets": 3}},
        {"prompt": "x", "constraints": {"most": 1}},
        {"prompt": "x", "constraints": {"max_tool_calls": "3"}},
        {"prompt": "x", "constraints": {"max_tool_calls": -1}},
        {"prompt": "x", "constraints": {"required_tools": "math_solve"}},
        {"goal": {}},
    ],
)
def test_wrong_tasks(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        HybridTask.of(wrong)


def test_a_task_may_have_goals_of_its_own() -> None:
    """Functions of the user's read them; only what is nearly a known name is refused."""
    assert HybridTask.of({"prompt": "x", "goal": {"colour": "red", "hint": 3}}).goal["hint"] == 3

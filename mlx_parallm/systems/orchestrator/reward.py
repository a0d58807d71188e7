"""The reward of each step and of the end of an episode: `RewardConfig`, and functions for types of
tasks. No MLX.

    step      step_penalty + what the call is worth                         `step_reward`
    end       answer + task function + bonuses + violated constraints       `final_reward`

An episode is judged by what the tools have returned, never by what the policy says of it: a shot
counts with the angle, velocity and wind of its call, and only in the wind of the task.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import ToolResult

SIMULATOR = "physics_simulate"
SHOT_TOLERANCE_M = 1.0  # of a task that sets none
NEAR = 5.0  # times the tolerance: a near miss
GOALS = ("expected_answer", "target", "tolerance", "wind")
EXACT = 1e-9  # of math_reward, relative

_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class HybridTask:
    """One task. `goal`: expected_answer, or target (m) with tolerance and wind. `constraints`:
    max_tool_calls, required_tools. Raises ConfigError: another type of value."""

    prompt: Any  # a text, or messages
    goal: Mapping[str, Any] = field(default_factory=dict)
    constraints: Mapping[str, Any] = field(default_factory=dict)
    type: str = "general"  # chooses the task function

    def __post_init__(self) -> None:
        for name, value in (("goal", self.goal), ("constraints", self.constraints)):
            if not isinstance(value, Mapping):
                raise ConfigError(f"task: {name} has to be a table, not {value!r}")
        self._check_goal()
        self._check_constraints()

    def _check_goal(self) -> None:
        for name in ("target", "tolerance", "wind"):
            if name in self.goal and _number(self.goal[name]) is None:
                raise ConfigError(f"task: goal.{name} has to be a number, not {self.goal[name]!r}")
        if "tolerance" in self.goal and _tolerance(self) <= 0:
            raise ConfigError(
                f"task: goal.tolerance has to be above 0, not {self.goal['tolerance']!r}"
            )
        for name in self.goal:  # others are for functions of the user's
            if name not in GOALS and (meant := nearly(str(name), GOALS)):
                raise ConfigError(
                    f"task: goal has {name!r}, which nothing reads; did you mean {meant!r}?"
                )

    def _check_constraints(self) -> None:
        if unknown := sorted(set(self.constraints) - {"max_tool_calls", "required_tools"}):
            raise ConfigError(
                f"task: constraints has no {unknown[0]!r}: there are max_tool_calls and"
                " required_tools"
            )
        most = self.constraints.get("max_tool_calls")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise ConfigError(
                f"task: constraints.max_tool_calls has to be a whole number, not {most!r}"
            )
        required = self.constraints.get("required_tools", ())
        if isinstance(required, str) or not all(isinstance(name, str) for name in required):
            raise ConfigError(
                f"task: constraints.required_tools has to be a list of names, not {required!r}"
            )

    @classmethod
    def of(cls, data: "Mapping[str, Any] | HybridTask") -> "HybridTask":
        """Read a row; columns besides these are the data's own. Raises ConfigError."""
        if isinstance(data, HybridTask):
            return data
        if not isinstance(data, Mapping) or "prompt" not in data:
            raise ConfigError(f"a task needs a prompt: {data!r}")
        values = {
            name: data[name]
            for name in ("goal", "constraints", "type")
            if data.get(name) is not None
        }
        return cls(data["prompt"], **values)


@dataclass(frozen=True)
class CallRecord:
    """One call of a tool: by the policy, or in an expert's loop (`expert`)."""

    name: str
    arguments: Mapping[str, Any]
    result: ToolResult
    expert: str = ""


class EpisodeView(Protocol):
    """The part of an episode that rewards read; `Orchestrator` has it."""

    @property
    def task(self) -> HybridTask: ...
    @property
    def steps(self) -> int: ...
    @property
    def answer(self) -> str | None: ...
    @property
    def calls(self) -> Sequence[CallRecord]: ...


TaskReward = Callable[[EpisodeView], float]


def math_reward(episode: EpisodeView) -> float:
    """0.5 where the answer is the expected number exactly."""
    expected, answered = (
        _number(episode.task.goal.get("expected_answer")),
        last_number(episode.answer),
    )
    if expected is None or answered is None:
        return 0.0
    return 0.5 if math.isclose(answered, expected, rel_tol=EXACT, abs_tol=EXACT) else 0.0


def physics_reward(episode: EpisodeView) -> float:
    """1 for a hit, 0.5 within five times the tolerance, else -0.5."""
    error, tolerance = nearest_shot(episode), _tolerance(episode.task)
    if error < tolerance:
        return 1.0
    return 0.5 if error < NEAR * tolerance else -0.5


TASK_REWARDS: Mapping[str, TaskReward] = MappingProxyType(
    {"math": math_reward, "physics": physics_reward}
)


@dataclass(frozen=True)
class RewardConfig:
    """The numbers of the specification. `task_rewards`: type of task → function, added at the
    end of an episode."""

    correct_answer_reward: float = 1.0
    partial_answer_reward: float = 0.5  # a number within `partial_within` of the expected one
    wrong_answer_penalty: float = -0.5
    no_answer_penalty: float = -1.0
    unverified_answer_reward: float = 0.1  # any answer to a task without an expected one
    step_penalty: float = -0.01
    timeout_penalty: float = -2.0  # the last step allowed, and no answer
    valid_tool_call_reward: float = 0.0
    invalid_tool_call_penalty: float = -0.1  # no such tool or expert, or a call that cannot be read
    tool_error_penalty: float = -0.2  # the tool failed, or did not answer in time
    expert_delegation_reward: float = 0.0
    expert_success_bonus: float = 0.2
    fast_completion_bonus: float = 0.5  # solved in fewer than `fast_steps` steps
    # solved with at most `efficient_calls` calls of the policy
    efficient_tool_use_bonus: float = 0.2
    constraint_violation_penalty: float = -0.5  # each
    answer_tolerance: float = 0.01
    partial_within: float = 0.1
    fast_steps: int = 5
    efficient_calls: int = 3
    task_rewards: Mapping[str, TaskReward] = field(default_factory=lambda: TASK_REWARDS)

    def __post_init__(self) -> None:
        if self.answer_tolerance <= 0 or self.partial_within < 0:
            raise ConfigError(
                "rewards: answer_tolerance has to be above 0 and partial_within at least 0"
            )


def step_reward(
    config: RewardConfig, kind: str, error: str | None, *, success: bool = False
) -> float:
    """Return what a step is worth besides its outcome. `error`: `ToolResult.error`, "malformed"
    or "unknown_expert"."""
    reward = config.step_penalty
    if kind not in ("tool", "delegate"):
        return reward
    if error in ("unknown_tool", "unknown_expert", "malformed", "arguments"):
        return reward + config.invalid_tool_call_penalty
    if error is not None:
        return reward + config.tool_error_penalty
    if kind == "tool":
        return reward + config.valid_tool_call_reward
    return (
        reward + config.expert_delegation_reward + (config.expert_success_bonus if success else 0.0)
    )


def final_reward(config: RewardConfig, episode: EpisodeView, *, timed_out: bool) -> float:
    """Return what the end adds: the answer or the time-out, the task function, bonuses, violated
    constraints."""
    reward = config.timeout_penalty if timed_out else answer_reward(config, episode)
    if episode.task.type in config.task_rewards:
        reward += float(config.task_rewards[episode.task.type](episode))
    if is_solved(config, episode):
        own_calls = sum(not call.expert for call in episode.calls)
        reward += config.fast_completion_bonus if episode.steps < config.fast_steps else 0.0
        reward += config.efficient_tool_use_bonus if own_calls <= config.efficient_calls else 0.0
    return reward + config.constraint_violation_penalty * len(violations(episode))


def answer_reward(config: RewardConfig, episode: EpisodeView) -> float:
    if not episode.answer:
        return config.no_answer_penalty
    expected = episode.task.goal.get("expected_answer")
    if expected is None:
        return config.unverified_answer_reward
    if matches(episode.answer, expected, config.answer_tolerance):
        return config.correct_answer_reward
    wanted, answered = _number(expected), last_number(episode.answer)
    if (
        wanted is not None
        and answered is not None
        and abs(answered - wanted) <= config.partial_within * abs(wanted)
    ):
        return config.partial_answer_reward
    return config.wrong_answer_penalty


def is_solved(config: RewardConfig, episode: EpisodeView) -> bool:
    """Whether the expected answer was given and the target was hit, as far as the task has them;
    there is an answer."""
    goal = episode.task.goal
    if not episode.answer:
        return False
    if "expected_answer" in goal and not matches(
        episode.answer, goal["expected_answer"], config.answer_tolerance
    ):
        return False
    return "target" not in goal or nearest_shot(episode) < _tolerance(episode.task)


def violations(episode: EpisodeView) -> list[str]:
    """Return the violated constraints in words. Calls in experts' loops count for required_tools
    only."""
    limits, violated = episode.task.constraints, []
    planner_calls = sum(not call.expert for call in episode.calls)
    if (most := limits.get("max_tool_calls")) is not None and planner_calls > most:
        violated.append(f"{planner_calls} tool calls, at most {most}")
    used = {call.name for call in episode.calls if call.result.error is None}
    return violated + [
        f"{name} was not used" for name in limits.get("required_tools", ()) if name not in used
    ]


def nearest_shot(episode: EpisodeView) -> float:
    """Return the least distance of a shot from the target, m; inf without a shot in the wind of
    the task."""
    goal = episode.task.goal
    target, wind = _number(goal.get("target")), _number(goal.get("wind", 0.0))
    if target is None:
        return math.inf
    landed = [
        _number(call.result.value.get("distance"))
        for call in episode.calls
        if call.name == SIMULATOR
        and call.result.error is None
        and isinstance(call.result.value, Mapping)
        if _number(call.arguments.get("wind", 0.0)) == wind
    ]
    return min(
        (abs(distance - target) for distance in landed if distance is not None), default=math.inf
    )


def matches(answer: str, expected: Any, tolerance: float) -> bool:
    """Whether an answer is the expected one: of a number the last one within `tolerance`, of a text
    its words in order.

    "The sum is 42." is 42; "421" and "42 or 43" are not.
    """
    if (wanted := _number(expected)) is not None:
        answered = last_number(answer)
        return answered is not None and abs(answered - wanted) < tolerance
    words, wanted_words = _words(answer), _words(str(expected))
    count = len(wanted_words)
    return bool(count) and any(
        words[i : i + count] == wanted_words for i in range(len(words) - count + 1)
    )


def nearly(name: str, names: Sequence[str]) -> str | None:
    """Return the name that was probably meant; None: it is a name of its own."""
    inside = [candidate for candidate in names if name and name in candidate]
    return next(iter(inside or difflib.get_close_matches(name, names, n=1, cutoff=0.65)), None)


def last_number(text: str | None) -> float | None:
    """Return the last number in a text, "1,234.5" as well; None: there is none."""
    for digits in reversed(_NUMBER.findall(text or "")):
        if any(character.isdigit() for character in digits):
            return _number(digits.replace(",", ""))
    return None


def _number(value: Any) -> float | None:
    """Return a finite number of a number or of its text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _tolerance(task: HybridTask) -> float:
    return float(task.goal.get("tolerance", SHOT_TOLERANCE_M))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())

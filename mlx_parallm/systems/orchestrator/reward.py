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
SHOT_TOLERANCE_M = 1.0  # default
NEAR = 5.0  # times the tolerance: a near miss
GOALS = ("expected_answer", "target", "tolerance", "wind")
EXACT = 1e-9  # relative tolerance of math_reward

_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
# digits that are not a number: of a unit's power, behind a number or not ("m/s^2", "m2"), of a name
# ("x1")
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # no spaces between words
_LETTER = rf"[^\W\d_{_CJK}]"
_POWER = r"(?:\s*+\^\s*+\{?[-+]?\d++\}?|\*\*[-+]?\d++(?!\*))"
_IN_A_WORD = re.compile(
    rf"(?<!{_LETTER})(?!(?<=\d)[eE][-+]?\d){_LETTER}++(?:{_POWER}|\d++)|\^\s*+\{{?[-+]?\d++"
)
_RAISED = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_TIMES_TEN = re.compile(r"(?<=\d)\s*+[×xX·⋅*]\s*+10(?:\^|\*\*)\{?([-+]?\d++)\}?")
# a letter that an answer marks as chosen: "(A)", "*A*", "answer: A", "is A.", "option A", "A) …",
# "A is the …"
_MARKED_LETTER = re.compile(
    r"[(\[*{]\s*+([^\W\d_])\s*+[)\]*}]"
    r"|(?:\b(?:answer|option|choice|choose|pick|is)\b|:)\s*+\**+([^\W\d_])\b(?!'|\s+\w)"
    r"|\b(?:option|choice)\s++\**+([^\W\d_])\b(?!')"
    r"|^\s*+([^\W\d_])\s*+[).:]"
    r"|(?<![\w'])([^\W\d_])\**+\s++is\s++(?:the|right|correct|my)\b",
    re.IGNORECASE | re.MULTILINE,
)
ARTICLES = ("a", "an", "the")


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


TaskReward = Callable[[EpisodeView], float | None]
"""None, or NaN: it cannot tell, and the episode has no score."""


def math_reward(episode: EpisodeView) -> float:
    """0.5 if the answer is the expected number exactly."""
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
    # a number within `partial_within` of the expected one; None: as any wrong one. It teaches
    # guesses if they earn more than what the policy does else
    partial_answer_reward: float | None = None
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
        for name, value in vars(self).items():
            if name == "task_rewards" or (name == "partial_answer_reward" and value is None):
                continue
            if isinstance(value, str) or _number(value) is None:
                raise ConfigError(f"rewards: {name} has to be a number, not {value!r}")
        if self.answer_tolerance <= 0 or self.partial_within < 0:
            raise ConfigError(
                "rewards: answer_tolerance has to be above 0 and partial_within at least 0"
            )
        partial = self.partial_answer_reward
        if partial is not None and partial >= self.correct_answer_reward:
            raise ConfigError(
                f"rewards: partial_answer_reward ({partial:g}) has to be below"
                f" correct_answer_reward ({self.correct_answer_reward:g})"
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
    constraints. NaN where the task function gives no score."""
    reward = config.timeout_penalty if timed_out else answer_reward(config, episode)
    if episode.task.type in config.task_rewards:
        score = config.task_rewards[episode.task.type](episode)
        reward += math.nan if score is None else float(score)
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
        config.partial_answer_reward is not None
        and wanted is not None
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
    its words in order. Articles are not words, and the powers of a unit no numbers; a text of one
    letter, which may be an article, has to be the whole answer, or come after "answer", "is", ":"
    or in brackets.

    "The sum is 42." and "42 m/s^2" are 42; "421" and "42 or 43" are not. "(A)" and "The answer is
    A." are A; "a banana" is not.
    """
    if (wanted := _number(expected)) is not None:
        answered = last_number(answer)
        return answered is not None and abs(answered - wanted) < tolerance
    text = str(expected).strip()
    if len(text) == 1 and text.isalpha():
        return _is_letter(answer, text)
    if re.search(r"[^\w\s.,;:!?'\"-]", text):  # "C++" is not "C"
        wanted_text, spaced = " ".join(text.split()), " ".join(answer.split())
        return bool(re.search(rf"(?<!\w){re.escape(wanted_text)}(?!\w)", spaced, re.IGNORECASE))
    if re.search(f"[{_CJK}]", text):
        return text.casefold() in answer.casefold()
    words, wanted_words = _words(answer), _words(text)
    if len(wanted_words) == 1 and wanted_words[0] in ARTICLES:
        return words == wanted_words
    count = len(wanted_words)
    return bool(count) and any(
        words[i : i + count] == wanted_words for i in range(len(words) - count + 1)
    )


def _is_letter(answer: str, letter: str) -> bool:
    """Whether an answer chooses a letter: it is all of it, or the last that is marked as chosen."""
    bare = answer.strip().strip("().[]*\"'`:").strip()
    if bare.casefold() == letter.casefold():
        return True
    marked = _MARKED_LETTER.findall(answer)
    chosen = next((part for part in marked[-1] if part), "") if marked else ""
    return chosen.casefold() == letter.casefold()


def nearly(name: str, names: Sequence[str]) -> str | None:
    """Return the name that was probably meant; None: it is its own name."""
    inside = [candidate for candidate in names if name and name in candidate]
    return next(iter(inside or difflib.get_close_matches(name, names, n=1, cutoff=0.65)), None)


def last_number(text: str | None) -> float | None:
    """Return the last number in a text, "1,234.5" as well, or None. Digits within a
    word or a power of a unit ("m/s^2", "m2", "x1") are none."""
    plain = (text or "").replace("\u2212", "-")  # the minus sign
    plain = re.sub("[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda power: "^" + power[0].translate(_RAISED), plain)
    for digits in reversed(_NUMBER.findall(_IN_A_WORD.sub(" ", _TIMES_TEN.sub(r"e\1", plain)))):
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

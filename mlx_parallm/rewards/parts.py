"""Reward parts that are built in: `rewards = ["builtin:NAME"]`, `reward_options = { NAME = {…} }`.
No MLX.

Every entry of `PARTS` is a factory: its keywords are the part's options, and it returns a reward
function with TRL's signature (`functions.py`). Scores are 0 to 1 unless the docstring says
otherwise; None: the part does not apply. `threshold` makes a soft part binary.
`docs/rewards.md#built-in-parts` lists them all, and the reward computer "svrl".
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards.call_check import tool_call
from mlx_parallm.rewards.code import code, fenced, syntax
from mlx_parallm.rewards.group_judge import group_judge
from mlx_parallm.rewards.judge import judge
from mlx_parallm.rewards.learned import learned
from mlx_parallm.rewards.math_check import math
from mlx_parallm.rewards.methods import Objective, Parts, RewardComputer
from mlx_parallm.rewards.part_tools import (
    Completions,
    Scores,
    by_column,
    compiled,
    in_time,
    texts_of,
    to_binary,
)
from mlx_parallm.rewards.tool_check import tool
from mlx_parallm.rewards.trained_reward_model import reward_model
from mlx_parallm.system.foreign_json import steps_of_check, validator
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.patterns import Pattern
from mlx_parallm.types import Trajectory, has_score

Part = Callable[..., Any]
log = get_logger(__name__)

XML_TAG = re.compile(r"</?[A-Za-z][\w:.-]*(?:\s[^<>]*)?/?>")
TAG_COST, FORMAT_FLOOR = 0.1, 0.5
APPROPRIATE_BONUS, NO_CALL = 0.1, 0.3
FAILED_COST = 0.2
EFFICIENCY = {"tokens": 0.4, "calls": 0.3, "steps": 0.3}


def answer_match(
    *, column: str = "answer", pattern: str | None = None, exact: bool = False
) -> Part:
    """1 if the answer equals the reference, else 0. Case, runs of white space and punctuation
    around it are ignored, with `exact` only white space around it. `pattern`: a regular expression
    whose last match is the answer, by its first group if it has one.

    Raises ConfigError: the pattern is not a regular expression.
    """
    find = None if pattern is None else compiled(pattern, re.DOTALL)

    def plain(text: str) -> str:
        return (
            text.strip() if exact else " ".join(text.casefold().split()).strip(" .,:;!?\"'`$*()[]")
        )

    def score(text: str, reference: Any) -> float:
        if find is not None:
            answer_part = find.last_part(text)
            if answer_part is None:
                return 0.0
            text = answer_part
        return float(plain(text) == plain(str(reference)))

    return by_column(score, column)


def regex(*, pattern: str, whole: bool = False) -> Part:
    """1 if the expression is found in the answer (`whole`: is all of it), else 0. Raises
    ConfigError."""
    find = compiled(pattern, re.DOTALL)
    match = find.fullmatch if whole else find.search
    return _of_text(lambda text: float(match(text) is not None))


def json_valid(*, schema: Mapping[str, Any] | str | None = None) -> Part:
    """1 if the answer is JSON (its last ```json block, if it has one) and fits `schema`, else
    0.
    `schema`: a JSON schema, or the path of one.

    Raises ConfigError: a file that cannot be read, an invalid schema.
    """
    is_valid: Callable[[Any], bool] = (lambda value: True) if schema is None else _schema(schema)

    def score(text: str) -> float:
        blocks = [block for name, block in fenced(text) if name == "json"]
        try:
            return float(
                is_valid(json.loads(blocks[-1] if blocks else text, parse_constant=_no_constant))
            )
        except (ValueError, RecursionError):
            return 0.0

    return _of_text(score)


def format_(*, tags: Sequence[str] = (), threshold: float | None = None) -> Part:
    """Score the form of the answer. With `tags`: 1 if it is these XML elements in this order and
    nothing else, each once, else 0. Without: 1, less 0.1 for each XML tag in it, at least 0.5."""
    elements = [rf"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags]
    whole = Pattern(r"\s*" + r"\s*".join(elements) + r"\s*", re.DOTALL)

    def score(text: str) -> float:
        if not tags:
            return max(FORMAT_FLOOR, 1 - TAG_COST * len(XML_TAG.findall(text)))
        once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags)
        return float(once and whole.fullmatch(text) is not None)

    return _of_text(score, threshold)


def length(*, target: int, threshold: float | None = None) -> Part:
    """1 for `target` sampled tokens, less by the distance in targets, at least 0. Raises
    ConfigError."""
    if target < 1:
        raise ConfigError(f"target = {target}: a number of tokens, 1 or more")

    def part(completion_ids: Sequence[Sequence[int]]) -> Scores:
        return to_binary(
            [max(0.0, 1 - abs(len(ids) - target) / target) for ids in completion_ids], threshold
        )

    return part


def overlong(*, length: int, buffer: int) -> Part:
    """0 up to `length - buffer` sampled tokens, then down in a line to -1 at `length`, -1 beyond:
    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), like
    rl_training.overlong_buffer for all environments.

    Raises ConfigError: not 0 < buffer <= length.
    """
    if not 0 < buffer <= length:
        raise ConfigError(f"buffer = {buffer}, length = {length}: expected 0 < buffer <= length")

    def part(completion_ids: Sequence[Sequence[int]]) -> Scores:
        return [
            min(0.0, max(-1.0, (length - buffer - len(ids)) / buffer)) for ids in completion_ids
        ]

    return part


def tool_success(*, threshold: float | None = None) -> Part:
    """ok / calls + 0.1 · appropriate / calls, at most 1, of the episode's tool calls:
    metadata["tool_calls"]. A call is appropriate whose tool is in the row's column `tools`, a
    list of names. Without a call: 0.3 if the row names tools, else None."""

    def part(
        trajectories: Sequence[Trajectory], tools: Sequence[Sequence[str] | None] | None = None
    ) -> Scores:
        rows = tools or [None] * len(trajectories)
        return to_binary(
            [score(t, wanted or ()) for t, wanted in zip(trajectories, rows, strict=True)],
            threshold,
        )

    def score(trajectory: Trajectory, wanted: Sequence[str]) -> float | None:
        calls: Sequence[Mapping[str, Any]] = trajectory.metadata.get("tool_calls", ())
        if not calls:
            return NO_CALL if wanted else None
        ok, appropriate = (
            sum(bool(c.get("ok")) for c in calls),
            sum(c["name"] in wanted for c in calls),
        )
        return min(1.0, (ok + APPROPRIATE_BONUS * appropriate) / len(calls))

    return part


def task_completion(*, threshold: float | None = None) -> Part:
    """completed / created - 0.2 · failed / created, at least 0, of the episode's tasks:
    metadata["tasks"] = {"created", "completed", "failed"}, numbers; None if none was created."""

    def score(trajectory: Trajectory) -> float | None:
        tasks: Mapping[str, int] = trajectory.metadata.get("tasks", {})
        created = tasks.get("created", 0)
        if not created:
            return None
        return max(
            0.0, (tasks.get("completed", 0) - FAILED_COST * tasks.get("failed", 0)) / created
        )

    return _of_trajectory(score, threshold)


def efficiency(
    *, tokens: int = 2000, calls: int = 10, steps: int = 15, threshold: float | None = None
) -> Part:
    """0.4 · (1 - sampled tokens / `tokens`) + 0.3 · (1 - tool calls / `calls`) + 0.3 · (1 -
    steps / `steps`), each term at least 0; an episode without tool calls in its metadata is
    weighted by the other two. Raises ConfigError."""
    if min(tokens, calls, steps) < 1:
        raise ConfigError(
            f"tokens = {tokens}, calls = {calls}, steps = {steps}: expected 1 or more for each"
        )

    def score(trajectory: Trajectory) -> float:
        used = {
            "tokens": trajectory.rollout.sampled_tokens / tokens,
            "steps": trajectory.step_count / steps,
        }
        if "tool_calls" in trajectory.metadata:
            used["calls"] = len(trajectory.metadata["tool_calls"]) / calls
        left = sum(EFFICIENCY[name] * max(0.0, 1 - share) for name, share in used.items())
        return left / sum(EFFICIENCY[name] for name in used)

    return _of_trajectory(score, threshold)


def _of_text(score: Callable[[str], float], threshold: float | None = None) -> Part:
    def part(completions: Completions) -> Scores:
        scores = [in_time(score, text) for text in texts_of(completions)]
        return to_binary(scores, threshold)

    return part


def _of_trajectory(score: Callable[[Trajectory], float | None], threshold: float | None) -> Part:
    def part(trajectories: Sequence[Trajectory]) -> Scores:
        return to_binary([score(trajectory) for trajectory in trajectories], threshold)

    return part


def _schema(source: Mapping[str, Any] | str) -> Callable[[Any], bool]:
    try:
        text = Path(source).read_text() if isinstance(source, str) else json.dumps(source)
        is_valid: Callable[[Any], bool] = validator(text, formats=False).is_valid
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"schema: {' '.join(str(error).split())[:300]}") from error

    def follows(value: Any) -> bool:
        try:
            steps_of_check(text, value)
        except ValueError as error:
            log.warning("schema: %s: counted as invalid", error)
            return False
        return is_valid(value)

    return follows


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class SVRLRewardComputer(RewardComputer):
    """Quality of the answer against the cost of its verification (`environments/kinds/svrl.py`):

        task - verification_weight · spent / budget + efficiency_weight · max(0, (max_steps - steps)
        / max_steps)

    with the parts `task`, `cost` = spent / budget, and `efficiency`. `pareto` takes them as
    objectives, `cost` negated.
    """

    def __init__(
        self,
        task_evaluator: Objective | None = None,
        verification_weight: float = 0.1,
        efficiency_weight: float = 0.05,
        *,
        normalize: bool = False,
    ) -> None:
        """`task_evaluator`: quality of an answer, by default `final_answer_is_right`."""
        weights = {"task": 1.0, "cost": -verification_weight, "efficiency": efficiency_weight}
        super().__init__(weights, normalize=normalize)
        self._evaluate = task_evaluator or final_answer_is_right

    def compute_parts(self, trajectories: Sequence[Trajectory]) -> list[Parts]:
        return [self._parts(trajectory) for trajectory in trajectories]

    def _parts(self, trajectory: Trajectory) -> Parts:
        metadata = trajectory.metadata
        if missing := sorted({"spent", "budget", "max_steps"} - set(metadata)):
            raise RolloutRejectedError(
                "SVRLRewardComputer: the trajectory's metadata has no"
                f" {', '.join(missing)}: is this SVRL?"
            )
        task = self._evaluate(trajectory)
        if not has_score(task):
            return {}  # nothing judged the answer: its cost alone is not a score
        return {
            "task": task,
            "cost": metadata["spent"] / metadata["budget"],
            "efficiency": max(
                0.0, (metadata["max_steps"] - trajectory.step_count) / metadata["max_steps"]
            ),
        }


def final_answer_is_right(trajectory: Trajectory) -> float:
    """1 where metadata["final_answer"] equals metadata["answer"], as a number or as text but for
    case and white space.

    Raises RolloutRejectedError: the task has no "answer".
    """
    answer = trajectory.metadata.get("answer")
    if answer is None:
        raise RolloutRejectedError(
            'the task has no "answer" to compare with: pass a task_evaluator'
        )
    final = trajectory.metadata.get("final_answer")
    return 0.0 if final is None else float(_equal(str(final), str(answer)))


def _equal(final: str, answer: str) -> bool:
    try:
        return float(final) == float(answer)
    except ValueError:
        return " ".join(final.lower().split()) == " ".join(answer.lower().split())


OPINIONS: Mapping[str, Callable[..., Part]] = MappingProxyType(
    {
        "judge": judge,
        "group_judge": group_judge,
        "learned": learned,
        "reward_model": reward_model,
    }
)
"""Parts that are no rules: a policy can find answers that only they like."""
PARTS: Mapping[str, Callable[..., Part]] = MappingProxyType(
    {
        "answer_match": answer_match,
        "math": math,
        "regex": regex,
        "json": json_valid,
        "format": format_,
        "length": length,
        "overlong": overlong,
        "code": code,
        "syntax": syntax,
        "tool": tool,
        "tool_call": tool_call,
        "tool_success": tool_success,
        "task_completion": task_completion,
        "efficiency": efficiency,
        **OPINIONS,
    }
)
WEIGHTS: Mapping[str, float] = MappingProxyType(
    dict.fromkeys(PARTS, 1.0)
    | {"code": 2.0, "tool_success": 2.0, "task_completion": 1.5, "efficiency": 0.5}
)
"""Default weights of the parts."""
MAY_BE_BELOW_0 = ("overlong", "reward_model", "svrl")
"""Those whose scores may be below 0, a `reward_model` without a `threshold`."""
BUILT_IN: Mapping[str, Callable[..., Any]] = MappingProxyType({**PARTS, "svrl": SVRLRewardComputer})
"""Everything that `builtin:NAME` may name."""

"""Rewards over traces: the reward functions of training, asked about runs that are over.

    RewardEngine()             the built-in parts, each with its weight, as one score of a trace or
                               a group
    add_reward_labels          a label from reward functions, as `[[environments]] rewards` names
                               them
    fit_learned                `LearnedReward` from the labels of traces

A trace becomes the `Trajectory` that rewards see in training, so one function labels, trains and
evaluates.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.user_code import PREFIX, absolute, user_code
from mlx_parallm.rewards.functions import BUILTIN, RewardFunctions, TrainingProgress
from mlx_parallm.rewards.learned import LearnedReward
from mlx_parallm.rewards.methods import Parts, standardize
from mlx_parallm.rewards.threads import ASYNC_FUNCTIONS
from mlx_parallm.systems.traces.builders import score_of, weighted_mean
from mlx_parallm.systems.traces.schema import Json, present, text_of, without
from mlx_parallm.systems.traces.session import label_about
from mlx_parallm.systems.traces.trace import TASKS, Trace
from mlx_parallm.types import MAX_REWARD, Rollout, Trajectory, Turn, has_score

PARTS = ("code", "syntax", "tool_success", "task_completion", "efficiency", "format")
GOOD_FROM = 0.6
REWARD = "reward"


def trajectory_of(trace: Trace) -> Trajectory:
    """Return the trace as rewards see an episode. Its metadata has `tool_calls` (name, ok,
    arguments, result), where there are any tools, and `tasks`. Token ids are those that were
    recorded; else only their number is known, and they are zeros without log-probabilities."""
    messages = trace.messages
    answers = [step for step in trace.steps if step.sampled]
    opening, turns, prompt = [], list[Turn](), list[str]()
    for message in messages:
        text = text_of(message.get("content"))
        if message["role"] == "assistant":
            turns.append(Turn("\n".join(prompt), text))
            prompt = []
        else:
            prompt.append(text)
            if not turns:
                opening.append(text)
    metadata: Json = {}
    calls = trace.tool_calls
    if calls or trace.tools:
        metadata["tool_calls"] = [
            {"name": c.tool_name, "ok": c.success, "arguments": c.arguments, "result": c.result}
            for c in calls
        ]
    tasks = (trace.tasks_created, trace.tasks_completed, trace.tasks_failed)
    created, completed, failed = map(len, tasks)
    created = created or completed + failed  # a collector that notes no plan notes the ends
    if created:
        metadata["tasks"] = dict(zip(TASKS, (created, completed, failed), strict=True))
    metrics = [step.metrics for step in answers if step.metrics]
    ids = tuple(chain(*(each.completion_token_ids or () for each in metrics)))
    tokens = ids or (0,) * trace.total_tokens_out
    mask, versions = (1,) * len(tokens), (-1,) * len(tokens)
    end = "length" if trace.get("aborted") else "stop"
    rollout = Rollout(tokens, mask, None, versions, 1.0, {}, end)
    return Trajectory(
        text=answers[-1].text if answers else "",
        rollout=rollout,
        prompt="\n".join(opening),
        history=tuple(turns),
        step_count=max(1, trace.llm_calls_count),
        metadata=metadata,
        group_id=str(trace.get("group_id") or ""),
        messages=tuple(messages),
    )


def opening_of(trace: Trace) -> list[Json]:
    """The messages before the first answer."""
    return list(takewhile(lambda message: message["role"] != "assistant", trace.messages))


class RewardEngine:
    """Built-in reward parts over traces. Code in an answer is executed, in the sandbox.

    Args:
        parts: names of `builtin:` parts, the classes of `mlx_parallm.systems.pipeline`
            (`CodeExecutionReward()`), or objects of your own subclass of its `BaseReward`:
            anything with `compute(trace)`, plain or async, which returns a number, a bool, None
            (it does not apply), or an object whose `score` is one. Its `name` (default: the
            class's) and `weight` (default 1) count.
        weights: of parts, by name, in the place of the default ones.
        options: of parts, by name, e.g. {"learned": {"path": "reward.json"}}.

    Raises ConfigError: no such part, a part without `compute`, a weight that is not finite, wrong
    options, or no sandbox on this machine.
    """

    def __init__(
        self,
        parts: Sequence[Any] = PARTS,
        *,
        weights: Mapping[str, float] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        named = {_name_of_part(part): part for part in parts}
        if len(named) < len(parts):
            raise ConfigError(f"RewardEngine: two parts have one name: {', '.join(named)}")
        self._computed = {name: part for name, part in named.items() if _computes(part)}
        for name, part in self._computed.items():
            if isinstance(part, type) or not callable(getattr(part, "compute", None)):
                raise ConfigError(
                    f"RewardEngine: {name} is no object with compute(trace): give one, or the name"
                    f" of a built-in part: {', '.join(PARTS)}"
                )
        built_in = without(named, *self._computed)
        chosen = {name: getattr(part, "options", None) for name, part in built_in.items()}
        chosen |= dict(options or {})
        self._functions = RewardFunctions(
            [BUILTIN + name for name in built_in],
            (),
            columns=None,
            key="RewardEngine",
            options={name: chosen[name] or {} for name in built_in if chosen[name]},
        )
        weigh = {name: float(getattr(part, "weight", 1.0)) for name, part in self._computed.items()}
        self.weights = self._functions.weights | weigh | dict(weights or {})
        if wrong := [name for name, weight in self.weights.items() if not _is_finite(weight)]:
            raise ConfigError(f"RewardEngine: the weight of {wrong[0]!r} is not a finite number")
        if unknown := sorted(set(self.weights) - set(named)):
            raise ConfigError(
                f"RewardEngine: a weight for {unknown[0]!r}, which is none of {', '.join(named)}"
            )

    def compute_all(self, trace: Trace) -> dict[str, float | None]:
        """Return the score of each part, 0 to 1; None: it does not apply. Raises
        RolloutRejectedError."""
        scores: dict[str, float | None] = dict.fromkeys(self._functions.names)
        if scores:
            scores |= _scores(self._functions, trace)
        return scores | {name: _score(name, part, trace) for name, part in self._computed.items()}

    def compute_combined(self, trace: Trace) -> float | None:
        """Return Σ weight · score / Σ weight over the parts that apply; None where none does."""
        return self._combined(self.compute_all(trace))

    def compute_for_group(self, traces: Sequence[Trace]) -> list[float | None]:
        """Return each combined score as a z-score in the group: (score - mean) / population
        standard deviation. None for a trace without a score, which is in neither."""
        scores = map(self.compute_combined, traces)
        values = standardize([math.nan if score is None else score for score in scores])
        return [value if has_score(value) else None for value in values]

    def get_binary_label(self, trace: Trace, threshold: float = GOOD_FROM) -> bool | None:
        """Return whether the combined score is at least the threshold, or None."""
        score = self.compute_combined(trace)
        return None if score is None else score >= threshold

    def summary(self, trace: Trace) -> str:
        """Return one line: the combined score and every part that applies."""
        parts = self.compute_all(trace)
        shown = ", ".join(
            f"{name} {value:.2f}" for name, value in parts.items() if value is not None
        )
        score = self._combined(parts)
        return "– (no part applies)" if score is None else f"{score:.2f} ({shown})"

    def _combined(self, parts: Parts) -> float | None:
        return weighted_mean(present(parts), self.weights)


def _is_finite(weight: Any) -> bool:
    return isinstance(weight, int | float) and math.isfinite(weight)


def _name_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part if isinstance(part, type) else type(part)
    return str(getattr(part, "part", "") or getattr(part, "name", "") or kind.__name__)


def _computes(part: Any) -> bool:
    """Whether it is an object of the user's that computes the score, no built-in part."""
    return not isinstance(part, str) and not getattr(part, "part", "")


def _score(name: str, part: Any, trace: Trace) -> float | None:
    """Raises RolloutRejectedError: it raises, or returns something else."""
    with user_code(f"RewardEngine: {name}, on trace {trace.trace_id}", RolloutRejectedError):
        result = part.compute(trace)
        if inspect.iscoroutine(result):
            result = ASYNC_FUNCTIONS.run(result)
        value = getattr(result, "score", result)
        number = None if value is None else float(value)
    if number is not None and abs(number) > MAX_REWARD:
        raise RolloutRejectedError(f"RewardEngine: {name} is {number}: at most ±{MAX_REWARD:g}")
    return number if has_score(number) else None


def references_of(rewards: Sequence[str], directory: Path) -> list[str]:
    """Return rewards of a command line as a configuration has them: with "python:" and absolute
    paths."""
    named = [name if name.startswith((PREFIX, BUILTIN)) else PREFIX + name for name in rewards]
    return [absolute(name, [directory]) for name in named]


def add_reward_labels(
    traces: Sequence[Trace], rewards: Sequence[str], name: str = REWARD
) -> tuple[int, int]:
    """Label traces by the weighted mean of reward functions; return how many were labelled, and how
    many left alone.

    Args:
        rewards: as in `[[environments]] rewards`: "python:file.py:f", "builtin:NAME".

    Raises ConfigError: no such function; RolloutRejectedError: it fails.
    """
    functions = RewardFunctions(rewards, (), columns=None, key="--reward")
    labelled, by = 0, f"verifier:{','.join(functions.names)}"
    for trace in traces:
        if scores := present(_scores(functions, trace)):
            value = weighted_mean(scores, functions.weights) or 0.0
            trace.add_label(label_about(trace, name, value, by))
            labelled += 1
    return labelled, len(traces) - labelled


def _scores(functions: RewardFunctions, trace: Trace) -> Parts:
    """Return the score of each function; empty where none applies."""
    row, trajectory = trace.get("columns", {}), trajectory_of(trace)
    call = functions.parts(opening_of(trace), row, [trajectory], TrainingProgress)
    parts, *_ = ASYNC_FUNCTIONS.run(call)  # this thread may have a running loop: a notebook's
    return parts[0] or {}


def fit_learned(traces: Sequence[Trace], good_from: float = 0.5) -> LearnedReward:
    """Learn a reward from the scores of traces. Raises ConfigError: fewer than 10 good or 10 bad
    ones."""
    scored = [(trace, score) for trace in traces if (score := score_of(trace)) is not None]
    trajectories = [trajectory_of(trace) for trace, _ in scored]
    return LearnedReward.fit(trajectories, [score >= good_from for _, score in scored])

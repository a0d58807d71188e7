"""`evaluations.jsonl` of a run: the result of each evaluation, and the score of a checkpoint by
them. No MLX."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from mlx_parallm.config.evaluation import PREFIX
from mlx_parallm.errors import CheckpointError
from mlx_parallm.run_files.metrics import MetricsFile

EVALUATIONS_FILE = "evaluations.jsonl"
MOST_UNSCORED = 0.5
"""The share of an environment's problems without a score: the others are too few of them."""

Line = dict[str, Any]


class _EvaluationRecord(TypedDict):
    """`Evaluation.to_json()`, as far as readers rely on it."""

    numbers: dict[str, float | None]
    problems: list[dict[str, Any]]
    examples: list[dict[str, Any]]


class _Made(TypedDict):
    """A line of an evaluation that was made."""

    step: int
    version: int
    seconds: float
    score: float | None
    environments: dict[str, _EvaluationRecord]


_MADE = TypeAdapter(_Made)


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    step: int
    version: int
    score: float


class EvaluationLog:
    """The log of one run. Use it on the trainer's thread.

    A line is `{"step", "version", "seconds", "score", "environments": {NAME:
    Evaluation.to_json()}}`, or `{"step", "skipped": why}`. It is on the disk before the metrics
    line with its numbers.

    Raises CheckpointError: the file is damaged.

    Args:
        metric: the key of `flat` that checkpoints are compared by; None: they are compared
            otherwise.
        hide: removes secrets from a line.
    """

    def __init__(
        self, run: Path, metric: str | None = None, hide: Callable[[Line], Line] = dict
    ) -> None:
        self._file, self._metric, self._hide = MetricsFile(run / EVALUATIONS_FILE), metric, hide
        self.lines: list[Line] = [self._checked(line) for line in self._file.read()]
        self.running: int | None = None  # the step that is being evaluated

    def _checked(self, line: Line) -> Line:
        try:
            if "skipped" not in line:
                _MADE.validate_python(line, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                f"{self._file.path}: the evaluation of step {line['step']} is damaged: {where}:"
                f" {first['msg']}"
            ) from error
        return line

    def cut(self, step: int) -> None:
        """Remove the lines of later steps: the run continues from `step`."""
        self._file.cut(step)
        self.lines = [line for line in self.lines if line["step"] <= step]

    def add(self, line: Line) -> None:
        """Raises CheckpointError: a full disk."""
        line = self._hide(line)
        self._file.append(line)
        self.lines.append(line)

    def done(self) -> list[Line]:
        return [line for line in self.lines if "skipped" not in line]

    @property
    def skipped(self) -> int:
        """How many evaluations were due and not made."""
        return len(self.lines) - len(self.done())

    def settled(self, step: int) -> bool:
        """Whether the step has a result, or a reason for having none."""
        return any(line["step"] == step for line in self.lines)

    @property
    def decides(self) -> bool:
        """Whether evaluations decide which checkpoint is the best."""
        return self._metric is not None

    def score(self, step: int, version: int) -> float | None:
        """Return the score of a checkpoint's weights; None if they were not evaluated, or the
        evaluation says nothing of them."""
        for line in self.done():
            if (line["step"], line["version"]) == (step, version) and not says_nothing(line):
                return flat(line).get(self._metric or "")
        return None

    def best(self) -> BestEvaluation | None:
        """Return the evaluation with the highest score, of equal ones the first."""
        scored = [
            BestEvaluation(line["step"], line["version"], score)
            for line in self.done()
            if not says_nothing(line)
            and (score := flat(line).get(self._metric or "")) is not None  # no answer was scored
        ]
        return max(scored, key=lambda each: each.score, default=None)

    def awaited(self, step: int) -> bool:
        """Whether the checkpoint of that step may yet turn out to be the best."""
        return step == self.running


def says_nothing(line: Mapping[str, Any]) -> str:
    """Return why an evaluation (a line of evaluations.jsonl) says nothing of its weights; "": it
    does."""
    parts = line["environments"].values()
    if any(part.get("own_examiner") and part.get("one_answer") for part in parts):
        return "nearly every held-out prompt gets one answer, and its reward was trained on"
    for part in parts:
        unscored = sum(each["greedy"] is None and not each["sampled"] for each in part["problems"])
        if unscored > MOST_UNSCORED * len(part["problems"]):
            return f"{unscored} of {len(part['problems'])} held-out problems have no score"
    return ""


def flat(line: Line) -> dict[str, float | None]:
    """Return an evaluation as keys of metrics.jsonl: eval/step, eval/score, eval/NAME/accuracy,
    …"""
    numbers = {f"{PREFIX}{key}": line[key] for key in ("step", "version", "seconds", "score")}
    for name, part in line["environments"].items():
        numbers |= {f"{PREFIX}{name}/{metric}": value for metric, value in part["numbers"].items()}
    return numbers


def sentence(line: Mapping[str, Any]) -> str:
    """Describe an evaluation in a sentence for people."""
    results = []
    for name, part in line["environments"].items():
        numbers = part["numbers"]
        shown = [
            metric
            for metric in numbers
            if metric in ("accuracy", "reward") or metric.startswith("pass@")
        ]
        shown = [metric for metric in shown if f"{metric}_low" in numbers]
        if numbers.get("reward") == numbers.get("accuracy") and "reward" in shown:
            shown.remove("reward")
        parts = [
            f"{m} {numbers[m]:.3f} [{numbers[f'{m}_low']:.3f}, {numbers[f'{m}_high']:.3f}]"
            for m in shown
        ]
        results.append(f"{name}: {', '.join(parts) or 'every answer failed'}")
    return f"evaluation of step {line['step']} (version {line['version']}): {'; '.join(results)}"

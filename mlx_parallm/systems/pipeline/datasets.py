"""Turn traces into rows in Python: reward parts as classes, a builder for each of two kinds of
rows, `DatasetPipeline`.

    CodeExecutionReward().compute(trace)                   RewardResult
    RewardEngine([CodeExecutionReward(), "efficiency"])    several as one score
    KTODatasetBuilder().build_dataset(traces)              rows

The parts are those of `traces.rewards.RewardEngine`, the rows those of
`traces.builders.build_dataset`, which has every kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from mlx_parallm.systems.traces.builders import (
    Dataset,
    DatasetOptions,
    Kind,
    build_dataset,
    write_dataset,
)
from mlx_parallm.systems.traces.importers.report import ImportReport
from mlx_parallm.systems.traces.labeling import add_rule_labels
from mlx_parallm.systems.traces.privacy import RedactionHit, secret_finder
from mlx_parallm.systems.traces.reading import read_traces, redacted
from mlx_parallm.systems.traces.rewards import RewardEngine, add_reward_labels, references_of
from mlx_parallm.systems.traces.schema import Json
from mlx_parallm.systems.traces.trace import Trace

Messages = list[Json]
WEIGHT = 1.0


@dataclass(frozen=True)
class RewardResult:
    """The result of one reward part for a trace. `score`: 0 to 1; None: the part does not apply."""

    name: str = ""
    score: float | None = None
    weight: float = WEIGHT


class BaseReward(ABC):
    """One part of a reward, to be subclassed: `compute` scores a trace. A `RewardEngine` takes
    objects of a subclass beside the built-in parts; `name` (default: the class's) and `weight`
    count there."""

    name: str = ""
    weight: float = WEIGHT

    @abstractmethod
    def compute(self, trace: Trace) -> RewardResult | float | None:
        """Return the score: 0 to 1, or a result; None: the part does not apply."""

    def __str__(self) -> str:
        return self.name or type(self).__name__


class BuiltInReward(BaseReward):
    """A built-in part. `options`: its keywords (docs/rewards.md#built-in-parts). Raises
    ConfigError."""

    part: ClassVar[str] = ""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._engine = RewardEngine([self.part], options={self.part: options} if options else None)
        self.name, self.weight = self.part, self._engine.weights[self.part]

    def compute(self, trace: Trace) -> RewardResult:
        """Score a trace. Raises RolloutRejectedError."""
        return RewardResult(self.part, self._engine.compute_all(trace)[self.part], self.weight)


class CodeExecutionReward(BuiltInReward):
    """Run the code in an answer, in the sandbox: the share of blocks that end well."""

    part = "code"


class SyntaxValidationReward(BuiltInReward):
    """Check that the code in an answer can be parsed."""

    part = "syntax"


class ToolSuccessReward(BuiltInReward):
    """Count the tool calls that succeeded."""

    part = "tool_success"


class TaskCompletionReward(BuiltInReward):
    """Count the tasks that were completed, and those that failed."""

    part = "task_completion"


class EfficiencyReward(BuiltInReward):
    """Score few tokens, calls and steps."""

    part = "efficiency"


class FormatComplianceReward(BuiltInReward):
    """Score answers without XML tags, or with exactly those that are wanted (`tags`)."""

    part = "format"


class KTOExample(TypedDict):
    """A row of kind "kto"."""

    prompt: Messages
    completion: Messages
    label: bool


class GRPOExample(TypedDict):
    """A row of kind "grpo": a prompt, and a group of answers with their scores."""

    prompt: Messages
    completions: list[Messages]
    rewards: list[float]


class RowsBuilder:
    """Make rows of one kind. `options`: further fields of `DatasetOptions`. Raises ConfigError."""

    kind: ClassVar[Kind]

    def __init__(self, **options: Any) -> None:
        self.options = DatasetOptions(self.kind, **options)

    def build_dataset(self, traces: Iterable[Trace]) -> Dataset:
        """Return the rows. Raises TraceError: no row can be made."""
        return build_dataset(traces, self.options)

    def save(self, dataset: Dataset, directory: str | Path) -> Json:
        """Write train.jsonl, test.jsonl and the card; return the card."""
        return write_dataset(dataset, Path(directory))


class KTODatasetBuilder(RowsBuilder):
    """Good and bad answers; `balance` drops rows of the larger side."""

    kind = "kto"


class GRPODatasetBuilder(RowsBuilder):
    """Groups of answers to one prompt, with their scores."""

    kind = "grpo"


class DatasetPipeline:
    """Read traces, hide secrets, label, and make rows of any kind.

    Args:
        traces: files or directories that `mlx_parallm traces import` reads.
        rewards: reward functions that label, "builtin:NAME" or "python:file.py:f".
        rules: functions of a `Trace` that label, "python:file.py:f".
        redact: False keeps secrets.

    Raises TraceError, ConfigError.
    """

    def __init__(
        self,
        *traces: str | Path,
        rewards: Sequence[str] = (),
        rules: Sequence[str] = (),
        redact: bool = True,
    ) -> None:
        hits: list[RedactionHit] = []
        self.report = ImportReport()
        finder = secret_finder() if redact else None
        self.traces = [
            trace
            for path in traces
            for trace in redacted(read_traces(Path(path), self.report), finder, hits)
        ]
        for rule in references_of(rules, Path.cwd()):
            add_rule_labels(self.traces, rule, "rule")
        if rewards:
            add_reward_labels(self.traces, references_of(rewards, Path.cwd()))

    def build(self, kind: Kind, directory: str | Path | None = None, **options: Any) -> Dataset:
        """Return rows of a kind, and write them where there is a `directory`."""
        dataset = build_dataset(self.traces, DatasetOptions(kind, **options))
        if directory is not None:
            write_dataset(dataset, Path(directory))
        return dataset

    def build_kto_dataset(self, directory: str | Path | None = None, **options: Any) -> Dataset:
        return self.build("kto", directory, **options)

    def build_grpo_dataset(self, directory: str | Path | None = None, **options: Any) -> Dataset:
        return self.build("grpo", directory, **options)

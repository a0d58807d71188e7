"""The built-in reward parts over traces, a class each: a `RewardEngine` with one part.

CodeExecutionReward().compute(trace)          RewardResult
RewardEngine([CodeExecutionReward(), "efficiency"])    several as one score
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_parallm.traces.execution import ExecutionTrace
from mlx_parallm.traces.rewards import RewardEngine
from mlx_parallm.traces.schema import Trace


@dataclass(frozen=True)
class RewardResult:
    """What a part says of a trace. `score`: 0 to 1; None: the part does not apply."""

    name: str
    score: float | None
    weight: float


class BaseReward:
    """One part. `options`: its keywords (docs/reward_parts.md). Raises ConfigError."""

    part: ClassVar[str] = ""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._engine = RewardEngine([self.part], options={self.part: options} if options else None)

    def __str__(self) -> str:
        return self.part

    @property
    def weight(self) -> float:
        return self._engine.weights[self.part]

    def compute(self, trace: Trace | ExecutionTrace) -> RewardResult:
        """Score a trace. Raises RolloutRejectedError."""
        return RewardResult(self.part, self._engine.compute_all(trace)[self.part], self.weight)


class CodeExecutionReward(BaseReward):
    """Run the code in an answer, in the sandbox: the share of blocks that end well."""

    part = "code"


class SyntaxValidationReward(BaseReward):
    """Check that the code in an answer can be parsed."""

    part = "syntax"


class ToolSuccessReward(BaseReward):
    """Count the tool calls that succeeded."""

    part = "tool_success"


class TaskCompletionReward(BaseReward):
    """Count the tasks that were completed, and those that failed."""

    part = "task_completion"


class EfficiencyReward(BaseReward):
    """Score few tokens, calls and steps."""

    part = "efficiency"


class FormatComplianceReward(BaseReward):
    """Score answers without XML tags, or with exactly those that are wanted (`tags`)."""

    part = "format"

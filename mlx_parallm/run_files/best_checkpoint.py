"""Which checkpoint is the best: by the evaluations on held-out problems if they decide, else by
the newest score of held-out rows, else by the mean reward of the last steps. No MLX.

`checkpoint.Checkpointer` points the link `best` at it.
"""

import math
from pathlib import Path
from typing import Protocol

from mlx_parallm.config.evaluation import PREFIX, EvaluationConfig
from mlx_parallm.run_files.metrics import MetricsFile

SCORED_STEPS = 10
HELDOUT = "heldout_score"  # key of metrics.jsonl (heldout_rows.py)


class Judge(Protocol):
    """Says which checkpoint is the best, if its own score does not:
    `run_files.evaluations.EvaluationLog`."""

    @property
    def decides(self) -> bool: ...

    def score(self, step: int, version: int) -> float | None: ...

    def awaited(self, step: int) -> bool: ...


def score(metrics: Path, step: int, *, after: int = 0) -> float | None:
    """Return the number that checkpoints are compared by; higher is better.

    It is the newest `heldout_score` of the last `SCORED_STEPS` lines, else their mean reward; None
    if there are fewer lines, or neither is in them. Lines up to step `after` tell of weights
    that a rollback left.
    """
    lines = [
        line for line in MetricsFile(metrics).last(SCORED_STEPS) if after < line["step"] <= step
    ]
    for line in reversed(lines):
        if line.get(HELDOUT) is not None:
            return float(line[HELDOUT])
    rewards = [line["reward_mean"] for line in lines if line.get("reward_mean") is not None]
    return math.fsum(rewards) / SCORED_STEPS if len(rewards) == SCORED_STEPS else None


def best_by(keep_best: bool | str, evaluation: EvaluationConfig) -> str | None:
    """Return the metric of evaluations that checkpoints are compared by; None: they have a score
    already."""
    if isinstance(keep_best, str):
        return keep_best
    return f"{PREFIX}score" if keep_best and evaluation.problems and evaluation.every else None

"""The end of a run at a number of its metrics (rl_training.until)."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_parallm.config.condition import Condition, condition_of
from mlx_parallm.config.evaluation import EvaluationConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.events import Noted, RunEvents
from mlx_parallm.run_files.best_checkpoint import HELDOUT
from mlx_parallm.run_files.metrics import KEYS, number_of

ENDED = "ended"
"""Key of the last line of metrics.jsonl of a run that ended so: the condition and the number."""
NO_NUMBERS = (
    "mismatch_fresh",
    "gave_up",
    "rolled_back_to",
    "reward_by_environment",
    "environments",
    "full_marks",
)
ALIKE = 0.85  # as difflib counts: one or two letters


def check_until(until: str | None, evaluation: EvaluationConfig, *, rows: bool) -> None:
    """Raises ConfigError: rl_training.until names what is no number, or what no line of this run
    will have. `rows`: it learns from rows of a file."""
    if until is None:
        return
    name = condition_of(until).name
    why = None
    if name in NO_NUMBERS:
        why = "is no number"
    elif name == HELDOUT and not rows:
        why = "is of runs on rows of a file; eval/score is that of [evaluation]"
    elif name.startswith("eval/") and not rows and not (evaluation.problems and evaluation.every):
        why = "comes with evaluation.problems and evaluation.every, which are 0"
    elif near := [] if name in KEYS else difflib.get_close_matches(name, KEYS, 1, ALIKE):
        why = f"is in no line of metrics.jsonl; did you mean {near[0]!r}?"
    if why is not None:
        raise ConfigError(f"rl_training.until = {until!r}: {name} {why}")


class Until:
    """One run's condition; without one nothing meets it."""

    def __init__(self, condition: Condition | None) -> None:
        self._condition, self._seen = condition, False

    @classmethod
    def of(cls, text: str | None) -> "Until":
        return cls(None if text is None else condition_of(text))

    def met_by(self, line: Mapping[str, Any]) -> str | None:
        """Return the condition and the number of a new line that meets it, else None."""
        if self._condition is None:
            return None
        value = number_of(line, self._condition.name)
        self._seen = self._seen or value is not None
        return f"{self._condition}: {value:.6g}" if self._condition.holds(value) else None

    def ended(self, line: Mapping[str, Any] | None) -> bool:
        """Whether a run with this newest line has ended by this very condition."""
        ended = str((line or {}).get(ENDED))
        return self._condition is not None and ended.startswith(f"{self._condition}: ")

    def tell(
        self,
        line: Mapping[str, Any] | None,
        written: Iterable[Mapping[str, Any]],
        events: RunEvents,
    ) -> None:
        """Say at the end why it is one, or that the condition was never met. `written`: the run's
        lines, also those before a resume."""
        if self._condition is None:
            return
        step = (line or {}).get("step", 0)
        if line is not None and self.ended(line):
            why = f"rl_training.until is met, {line[ENDED]}"
            events.emit(Noted(f"the run has ended at step {step}: {why}"))
        elif self._seen or any(
            number_of(each, self._condition.name) is not None for each in written
        ):
            events.emit(Noted(f"rl_training.until was not met: {self._condition}"))
        else:
            events.warn(
                "rl_training.until names a metric that never came",
                metric=self._condition.name,
                until=str(self._condition),
            )

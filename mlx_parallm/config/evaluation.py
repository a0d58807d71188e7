"""[evaluation]: held-out problems, answered during training and by `mlx_parallm eval`."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from mlx_parallm.config.environment import EnvironmentConfig, Section, unique_names

ABOUT_TRAINING = ("weight", "group_size", "reward_method")
"""Keys of an environment about training only: each answer of an evaluation is scored alone."""
GREEDY_METRICS = ("accuracy", "reward")
PREFIX = "eval/"


class EvaluationConfig(Section):
    problems: int = Field(0, ge=0)
    """Held-out problems of each environment in an evaluation, the same each time; 0 = no
    evaluation."""
    every: int = Field(0, ge=0)
    """Steps between two evaluations; 0 = only `at_start` and `at_end`."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    greedy: bool = True
    """One greedy answer to each problem (accuracy, reward)."""
    samples: int = Field(0, ge=0)
    """Sampled answers to each problem (pass@1, pass@2, pass@4, … up to this number)."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled answers."""
    top_p: float = Field(1.0, gt=0, le=1)
    """top_p of the sampled answers."""
    max_fall: float | None = Field(None, ge=0)
    """How far the score that checkpoints are compared by (rl_training.keep_best) may fall below its
    best; beyond it the weights go back to the best ones. Default: they never do."""
    environments: tuple[EnvironmentConfig, ...] = ()
    """Environments to evaluate instead of the held-out problems of [[environments]]; of a
    "dataset" all rows."""

    @model_validator(mode="before")
    @classmethod
    def _all_rows(cls, data: Any) -> Any:
        """Hold out all rows of a data set that is there for evaluation."""
        entries = data.get("environments") if isinstance(data, dict) else None
        if not isinstance(entries, list | tuple):
            return data
        heldout = [
            {"heldout_fraction": 1.0, **entry}
            if isinstance(entry, dict) and entry.get("kind") == "dataset" and not _has_split(entry)
            else entry
            for entry in entries
        ]
        return {**data, "environments": heldout}

    @model_validator(mode="after")
    def _consistent(self) -> "EvaluationConfig":
        if not self.greedy and not self.samples:
            raise ValueError(
                "neither greedy answers nor samples: set greedy = true, or samples to a number"
            )
        if "problems" not in self.model_fields_set and (
            self.every or self.samples or self.environments
        ):
            raise ValueError(
                "problems is not set: how many of each environment (0 switches evaluation off)"
            )
        for entry in self.environments:
            if wrong := [key for key in ABOUT_TRAINING if key in entry.changed()]:
                raise ValueError(
                    f"environments: {entry.name}: {wrong[0]} is about"
                    " training; it has no place here"
                )
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics of each environment, as in eval/NAME/<metric>; each has …_low and
        …_high."""
        greedy = GREEDY_METRICS if self.greedy else ()
        sampled = ("sampled_reward",) if self.samples else ()
        return (*greedy, *sampled, *(f"pass@{k}" for k in pass_ks(self.samples)))


def pass_ks(samples: int) -> tuple[int, ...]:
    """Return the k of pass@k that `samples` answers allow: powers of two, and `samples` itself."""
    powers = {1 << exponent for exponent in range(samples.bit_length())}
    return tuple(sorted(powers | {samples})) if samples else ()


def check_evaluation(
    evaluation: EvaluationConfig, environments: Sequence[EnvironmentConfig], keep_best: bool | str
) -> None:
    """Raises ValueError: nothing to evaluate, no rows left to train on, or a `keep_best` that is
    not measured."""
    if whole := [entry.name for entry in environments if entry.heldout_fraction == 1]:
        raise ValueError(
            f"environments: {whole[0]}: heldout_fraction = 1 leaves no rows to train on"
        )
    if evaluation.max_fall is not None and not (
        evaluation.problems and evaluation.every and keep_best
    ):
        raise ValueError(
            "evaluation.max_fall goes back to the best evaluated checkpoint: set"
            " evaluation.problems and every, and leave rl_training.keep_best on"
        )
    evaluated = evaluation.environments or environments
    if evaluation.problems and not evaluated:
        raise ValueError(
            f"evaluation.problems = {evaluation.problems}, but there is no environment to evaluate:"
            " add [[evaluation.environments]], or set evaluation.problems = 0"
        )
    if isinstance(keep_best, str):
        measured = [
            f"{PREFIX}{name}/{metric}"
            for name in unique_names(evaluated)
            for metric in evaluation.metrics
        ]
        if not evaluation.problems or not (evaluation.every or evaluation.at_end):
            raise ValueError(
                f"rl_training.keep_best = {keep_best!r} needs [evaluation] with problems and every"
            )
        if keep_best not in (f"{PREFIX}score", *measured):
            raise ValueError(
                f"rl_training.keep_best = {keep_best!r} is not measured; there are"
                f" {PREFIX}score, {', '.join(measured)}"
            )


def _has_split(entry: dict[str, Any]) -> bool:
    return any(
        entry.get(key) is not None for key in ("heldout_data", "heldout_split", "heldout_fraction")
    )

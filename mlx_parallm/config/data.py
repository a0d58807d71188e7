"""[data] and [rl_training.preference]: rows of a file in the place of rollouts. Part of the tree of `load.py`."""

from typing import Any, Literal

from pydantic import Field, model_validator

from mlx_parallm.config.algorithm import PrepareConfig
from mlx_parallm.config.environment import HUB_PREFIX, Section

PAIRED = ("dpo", "orpo", "simpo", "cpo")  # a row is a chosen and a rejected completion
DATA_ALGORITHMS = (*PAIRED, "kto", "sft")
"""Algorithms that learn from `[data]`: nothing is sampled, no environment is played."""
USES_REFERENCE = ("dpo", "kto")

BETAS = {"dpo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0, "cpo": 0.1}
OPTIONS = {
    "dpo": {"beta", "loss_type", "label_smoothing"},
    "kto": {"beta", "desirable_weight", "undesirable_weight"},
    "orpo": {"beta"},
    "simpo": {"beta", "gamma"},
    "cpo": {"beta", "nll_weight"},
}
"""Keys of [rl_training.preference] that each algorithm reads; a key set for another one is an error."""
ROLLOUT_KEYS = (
    *PrepareConfig.model_fields,
    *("kl_beta", "kl_estimator", "entropy_weight", "overlong_buffer", "update_epochs", "temperature"),
    *("buffer_sampling", "max_empty_rounds"),
)
"""Keys of [rl_training] about rollouts and their rewards, besides those of the presets (algorithm.py)."""


class DataConfig(Section):
    path: str | None = None
    """JSONL file of rows, or "hf:owner/name", needed by dpo, orpo, simpo, cpo, kto, sft (docs/training_on_data.md)."""
    subset: str | None = None
    """The hub data set's subset, where it has several."""
    split: str = "train"
    """The hub data set's split to train on; of a data set in `eval_path`, the one that is held out."""
    eval_path: str | None = None
    """JSONL file or hub data set of held-out rows; then all rows of `path` are trained on."""
    eval_split: str | None = None
    """The same of another split of the hub data set in `path`."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the rows held out where neither of the former is given, by a hash of the prompt; 0 = none."""
    eval_every: int = Field(20, ge=0)
    """Steps between two measurements on the held-out rows; also after the last step. 0 = only then."""
    eval_rows: int = Field(256, ge=1)
    """Held-out rows that are measured, the same each time."""
    max_length: int = Field(2048, ge=2)
    """Longest sequence (prompt + completion) that is trained on."""
    too_long: Literal["error", "skip"] = "error"
    """What longer rows are: an error that names the first, or left out (their number is logged)."""
    prompt_format: Literal["chat", "text"] = "chat"
    """Strings become messages of the chat template (chat), or are trained on as they are, EOS at the end (text)."""

    @model_validator(mode="after")
    def _consistent(self) -> "DataConfig":
        if self.eval_path is not None and self.eval_split is not None:
            raise ValueError("eval_path and eval_split are two ways to say one thing: set one of them")
        of_hub = any((path or "").startswith(HUB_PREFIX) for path in (self.path, self.eval_path))
        wrong = [name for name in ("subset", "split", "eval_split") if name in _changed(self)]
        if wrong and not of_hub:
            raise ValueError(f'{wrong[0]} is of a data set of the hub, path = "hf:owner/name": a file has none')
        return self


class PreferenceConfig(Section):
    beta: float | None = Field(None, gt=0)
    """Scale of the implied reward; default 0.1, with simpo 2.0. orpo: weight of the odds ratio."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "ipo_sum", "robust"] = "sigmoid"
    """dpo: the loss of a margin. ipo averages log-probabilities over tokens (TRL), ipo_sum adds them (the paper)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo with sigmoid (cDPO) or robust: the probability that a pair's label is wrong."""
    gamma: float = Field(1.0, ge=0)
    """simpo: margin by which the chosen one is to win."""
    nll_weight: float = Field(1.0, ge=0)
    """cpo: weight of the chosen completion's negative log-likelihood (a mean over its tokens)."""
    desirable_weight: float = Field(1.0, gt=0)
    """kto: weight of rows with label true."""
    undesirable_weight: float = Field(1.0, gt=0)
    """kto: weight of rows with label false."""

    @model_validator(mode="after")
    def _consistent(self) -> "PreferenceConfig":
        if self.loss_type == "robust" and self.label_smoothing == 0:
            raise ValueError('loss_type = "robust" needs label_smoothing > 0: the share of labels that are wrong')
        if self.label_smoothing > 0 and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(f"loss_type = {self.loss_type!r} has no label_smoothing: set it to 0, or use sigmoid")
        return self


def check_data(data: DataConfig, training: Any, environments: int) -> None:
    """Raises ValueError: rows without an algorithm that learns from them or the other way round, both rows and
    environments, or a key that the algorithm does not read. `training` is the whole [rl_training]."""
    algorithm = training.algorithm
    if algorithm not in DATA_ALGORITHMS:
        if _changed(data):
            raise ValueError(
                f"data.{_changed(data)[0]} is set, but {algorithm} learns from rollouts: set rl_training.algorithm to"
                f" one of {', '.join(DATA_ALGORITHMS)}, or give rows to an environment (docs/your_data.md)"
            )
    elif data.path is None:
        raise ValueError(f'algorithm = "{algorithm}" learns from rows of a file: set data.path = "rows.jsonl"')
    elif environments:
        raise ValueError(f'algorithm = "{algorithm}" learns from data.path alone: leave out [[environments]]')
    elif unread := [name for name in ROLLOUT_KEYS if name in _changed(training)]:
        raise ValueError(f"rl_training.{unread[0]} is about rollouts: {algorithm} does not use it")
    elif training.weight_updates.max_publish_kl is not None:
        raise ValueError("rl_training.weight_updates.max_publish_kl is measured on rollouts: with rows there are none")
    elif changed := _changed(training.atropos):
        raise ValueError(f"rl_training.atropos.{changed[0]} is about rollouts: {algorithm} does not use it")
    elif algorithm == "kto" and training.batch_size < 2:
        raise ValueError("kto estimates a KL over a mini-batch: batch_size has to be at least 2")
    if wrong := [name for name in _changed(training.preference) if name not in OPTIONS.get(algorithm, ())]:
        readers = ", ".join(name for name, keys in OPTIONS.items() if wrong[0] in keys)
        raise ValueError(f"rl_training.preference.{wrong[0]} is an option of {readers}: {algorithm} does not use it")


def _changed(section: Section) -> list[str]:
    """Keys that are not at their defaults: a saved configuration names them all."""
    fields = type(section).model_fields
    return [name for name, field in fields.items() if getattr(section, name) != field.get_default()]

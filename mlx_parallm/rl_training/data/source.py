"""A run that learns from rows of a file: `DataSource` reads them and builds what takes the place of
rollouts.

rows checked → tokenised (before anything is written) → DataBatches for the loop, HeldOut for its
metrics lines
"""

import hashlib
import struct
from collections.abc import Callable
from typing import Any

from mlx_parallm.config.load import Config
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.execution.prompt_images import text_of
from mlx_parallm.execution.user_code import shown
from mlx_parallm.rl_training.checkpoints.trainer_state import TrainerState
from mlx_parallm.rl_training.data.batches import DataBatches, steps_per_epoch
from mlx_parallm.rl_training.data.rows import read_examples
from mlx_parallm.rl_training.data.tokens import Unit, encode_all, form_of
from mlx_parallm.rl_training.evaluation.heldout_rows import HeldOut, no_ratios
from mlx_parallm.rl_training.sources import RolloutSource, Served
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import ChatTokenizer

log = get_logger("train")

Fit = Callable[[Config, int], Config]
"""(configuration, rows that are trained on) → the configuration whose steps are counted by them."""


class DataSource(RolloutSource):
    """Main thread only. Raises ConfigError: a bad row, with file and line; too few rows."""

    name = "data"

    def __init__(self, config: Config, tokenizer: ChatTokenizer) -> None:
        self._config, self._algorithm = config, config.rl_training.algorithm
        train, heldout = read_examples(config.data, self._algorithm)
        kwargs, form = config.model.chat_template_kwargs, form_of(self._algorithm)
        self._train, self._heldout = (
            encode_all(examples, tokenizer, config.data, kwargs, form=form)
            for examples in (train, heldout)
        )
        for examples, units in ((train, self._train), (heldout, self._heldout)):
            if examples and not units:
                raise ConfigError(
                    f"data: none of {len(examples)} rows ({examples[0].where}, …) fits into"
                    " data.max_length ="
                    f" {config.data.max_length} tokens: raise it, or shorten the rows"
                )
        self._state: dict[str, Any] = {
            "rows": len(self._train),
            "sha256": _fingerprint(self._train),
        }
        self.example_prompt = _prompt_text(train[0].prompt)
        log.info(
            "rows",
            train=len(self._train),
            heldout=len(self._heldout),
            file=shown(str(config.data.path)),
        )

    def total_steps(self, training: RLTrainingConfig) -> int:
        """Return the configured number of steps; by default one pass over the rows."""
        configured = "total_steps" in training.model_fields_set
        return (
            training.total_steps
            if configured
            else steps_per_epoch(len(self._train), training.batch_size)
        )

    def with_total_steps(self, fit: Fit | None = None) -> Config:
        """The configuration with `total_steps` set. `fit`: counts the steps otherwise than in
        one pass, and may lower batch_size to the number of rows. Raises ConfigError: fewer rows
        than one mini-batch."""
        training = self._config.rl_training
        training = training.model_copy(update={"total_steps": self.total_steps(training)})
        self._config = self._config.model_copy(update={"rl_training": training})
        if fit is not None:
            self._config = fit(self._config, len(self._train))
        batch_size = self._config.rl_training.batch_size
        if len(self._train) < batch_size:
            raise ConfigError(
                f"data: {len(self._train)} rows to train on are fewer than one mini-batch:"
                " rl_training.batch_size ="
                f" {batch_size}"
            )
        return self._config

    def batches(self, trainer: Trainer) -> DataBatches:
        training = self._config.rl_training
        score = trainer.log_ratios if training.preference.kto_loss == "kto" else no_ratios
        return DataBatches(
            self._train,
            batch_size=training.batch_size,
            seed=training.seed,
            shuffle=self._config.data.shuffle,
            weights=self._weights,
            log_ratios=score if self._algorithm == "kto" else None,
        )

    def heldout(self, trainer: Trainer) -> HeldOut:
        training = self._config.rl_training
        return HeldOut(
            self._heldout,
            trainer,
            self._config.data,
            weights=self._weights,
            last=training.total_steps,
            measures_kl=training.preference.kto_loss == "kto",
        )

    @property
    def _weights(self) -> tuple[float, float]:
        preference = self._config.rl_training.preference
        return preference.desirable_weight, preference.undesirable_weight

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return what a resume compares. Steps are a function of seed and rows, so a resumed run
        needs the same rows."""
        return self._state

    def start(self, served: Served, state: TrainerState | None) -> None:
        """Raises CheckpointError: the checkpoint was saved with other rows."""
        saved = state.sources[self.name] if state is not None else self._state
        if saved != self._state:
            raise CheckpointError(
                f"data: {shown(str(self._config.data.path))} gives other tokens than when this run"
                " began"
                f" ({saved['rows']} rows then, {len(self._train)} now): put file, chat template"
                " and data.* back as they"
                " were, or start a new run from this one's weights (model.lora_path)"
            )


def _fingerprint(units: list[Unit]) -> str:
    digest = hashlib.sha256()
    for unit in units:
        digest.update(b"1" if unit.label else b"0")
        if unit.margin:
            digest.update(struct.pack("<d", unit.margin))
        for sequence in unit.sequences:
            digest.update(len(sequence.tokens).to_bytes(4, "little"))
            digest.update(sequence.tokens.tobytes())
            digest.update(sequence.mask.tobytes())
            digest.update("".join(sequence.images).encode())
    return digest.hexdigest()


def _prompt_text(prompt: Any) -> str:
    return (
        (prompt or ("Hello!"))
        if isinstance(prompt, str)
        else text_of(prompt[-1]["content"])
        if prompt
        else "Hello!"
    )

"""A run that learns from rows of a file: `DataSource` reads them and builds what takes the place of
rollouts.

rows checked → tokenised (before anything is written) → DataBatches for the loop, HeldOut for its
metrics lines
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.config.data import DataConfig, PreferenceConfig
from mlx_parallm.config.load import Config
from mlx_parallm.environments.row_images import example_content
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.execution.prompt_images import stored_names
from mlx_parallm.execution.user_code import shown
from mlx_parallm.rl_training.data.batches import DataBatches, best_fit_decreasing
from mlx_parallm.rl_training.data.examples import read_examples
from mlx_parallm.rl_training.data.heldout_rows import HeldOut, no_ratios
from mlx_parallm.rl_training.data.learned_tokens import Unit, encode_all, form_of
from mlx_parallm.rl_training.sources import RolloutSource, Served
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import ChatTokenizer

log = get_logger("train")

PACKED_TOGETHER = 1000

Fit = Callable[[Path, int], Config]
"""(directory of the run, examples that are trained on) → the configuration whose steps are counted
by them."""


class DataSource(RolloutSource):
    """Main thread only. Raises ConfigError: a bad row, with file and line; too few rows."""

    name = "data"

    def __init__(
        self,
        config: DataConfig,
        algorithm: str,
        preference: PreferenceConfig,
        tokenizer: ChatTokenizer,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._config, self._algorithm, self._preference = config, algorithm, preference
        train, heldout = read_examples(config, algorithm)
        form = form_of(algorithm)
        self._train, self._heldout = (
            encode_all(examples, tokenizer, config, template_kwargs, form=form)
            for examples in (train, heldout)
        )
        for examples, units in ((train, self._train), (heldout, self._heldout)):
            if examples and not units:
                raise ConfigError(
                    f"data: none of {len(examples)} rows ({examples[0].where}, …) fits into"
                    " data.max_length ="
                    f" {config.max_length} tokens: raise it, or shorten the rows"
                )
        self._packs = _packs(self._train, config.max_length) if config.pack_rows else None
        self._state: dict[str, Any] = {
            "rows": len(self._train),
            "sha256": _fingerprint(self._train),
        }
        if self._packs is not None:
            self._state["packs"] = len(self._packs)
        self.example_prompt = _prompt_content(train[0].prompt)
        log.info(
            "rows",
            train=len(self._train),
            heldout=len(self._heldout),
            file=shown(str(config.path)),
            **({} if self._packs is None else {"packs": len(self._packs)}),
        )

    @property
    def examples(self) -> int:
        """How many are trained on in a pass: rows, or packs of them."""
        return len(self._train if self._packs is None else self._packs)

    def check_examples(self, batch_size: int) -> None:
        """Raises ConfigError: fewer examples than one mini-batch."""
        if self.examples < batch_size:
            kind = "rows" if self._packs is None else f"packs of {len(self._train)} rows"
            raise ConfigError(
                f"data: {self.examples} {kind} to train on are fewer than one mini-batch:"
                f" rl_training.batch_size = {batch_size}"
            )

    def batches(self, trainer: Trainer) -> DataBatches:
        score = trainer.log_ratios if self._measures_kl else no_ratios
        return DataBatches(
            self._train,
            packs=self._packs,
            batch_size=trainer.options.batch_size,
            seed=trainer.options.seed,
            shuffle=self._config.shuffle,
            weights=self._weights,
            pairs_together=trainer.options.preference.pairs_together,
            log_ratios=score if self._algorithm == "kto" else None,
            scored_first=trainer.algorithm.finish is not None,
        )

    def heldout(self, trainer: Trainer, total_steps: int) -> HeldOut:
        return HeldOut(
            self._heldout,
            trainer,
            self._config,
            weights=self._weights,
            last=total_steps,
            measures_kl=self._measures_kl,
        )

    @property
    def _measures_kl(self) -> bool:
        return self._preference.kto_loss == "kto"

    @property
    def _weights(self) -> tuple[float, float]:
        return self._preference.desirable_weight, self._preference.undesirable_weight

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state that a resume compares. Steps are a function of seed and rows, so a
        resumed run needs the same rows."""
        return self._state

    def start(self, served: Served, state: TrainerState | None) -> None:
        """Raises CheckpointError: the checkpoint was saved with other rows."""
        saved = state.sources[self.name] if state is not None else self._state
        if saved != self._state:
            raise CheckpointError(
                f"data: {shown(str(self._config.path))} gives other tokens than when this run began"
                f" ({_counted(saved)} then, {_counted(self._state)} now): put file, chat template"
                " and data.* back as they were, or start a new run from this"
                " one's weights (model.lora_path)"
            )


def _packs(units: Sequence[Unit], max_length: int) -> list[list[int]]:
    """Pack PACKED_TOGETHER rows after the other, as `datasets.map` hands them to TRL. A unit of SFT
    is one sequence."""
    sizes = [len(unit.sequences[0].tokens) for unit in units]
    return [
        [first + row for row in pack]
        for first in range(0, len(sizes), PACKED_TOGETHER)
        for pack in best_fit_decreasing(sizes[first : first + PACKED_TOGETHER], max_length)
    ]


def _counted(state: Mapping[str, Any]) -> str:
    packs = f" in {state['packs']} packs" if "packs" in state else ""
    return f"{state['rows']} rows{packs}"


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
            digest.update("".join(stored_names(sequence.carried)).encode())
    return digest.hexdigest()


def _prompt_content(prompt: Any) -> Any:
    if isinstance(prompt, str) or not prompt:
        return prompt or "Hello!"
    return example_content(prompt)

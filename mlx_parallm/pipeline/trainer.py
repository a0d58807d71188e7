"""`RLTrainer`: the training stage alone, on rows in Python: a trainer of `mlx_parallm.trl`, chosen by the method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mlx_parallm.errors import ConfigError
from mlx_parallm.trl.trainers import DPOTrainer, GRPOTrainer, KTOTrainer, SFTTrainer, TrainOutput, TRLTrainer

RowsMethod = Literal["grpo", "kto", "dpo", "sft"]
TRAINERS: Mapping[str, type[TRLTrainer]] = {
    "grpo": GRPOTrainer,
    "kto": KTOTrainer,
    "dpo": DPOTrainer,
    "sft": SFTTrainer,
}


@dataclass(frozen=True)
class TrainingConfig:
    """What is trained, and how.

    Attributes:
        base_model: directory, hub id or "builtin:tiny".
        lora: settings of the adapter, as `peft_config` of the trainers; None trains all weights.
        arguments: further ones of TRL's configuration of the method (docs/trl.md): learning_rate, beta, …
    """

    base_model: str
    method: RowsMethod = "grpo"
    output_dir: str | Path = "rl_training/model"
    lora: Any = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


class RLTrainer:
    """Train on rows: `train(rows)`, then `save_model(directory)`.

    Args:
        rewards: GRPO's reward functions.

    Raises ConfigError: a method that there is not, rewards for one without, or what the trainer refuses.
    """

    def __init__(self, config: TrainingConfig, rewards: Sequence[Any] = ()) -> None:
        if config.method not in get_args(RowsMethod):
            raise ConfigError(f"method = {config.method!r}: expected one of {', '.join(get_args(RowsMethod))}")
        if bool(rewards) != (config.method == "grpo"):
            raise ConfigError('RLTrainer: rewards are for method = "grpo", which needs some')
        self.config, self._rewards = config, list(rewards)
        self.trainer: TRLTrainer | None = None

    def train(self, rows: Any, eval_rows: Any = None) -> TrainOutput:
        """Train on rows (a list, a file, a `datasets.Dataset`). Raises what the trainer of the method raises."""
        config, kind = self.config, TRAINERS[self.config.method]
        args = kind.config_class(output_dir=str(config.output_dir), **config.arguments)
        rewards = {"reward_funcs": self._rewards} if self._rewards else {}
        self.trainer = kind(
            config.base_model, args=args, train_dataset=rows, eval_dataset=eval_rows, peft_config=config.lora, **rewards
        )
        return self.trainer.train()

    def save_model(self, directory: str | Path) -> None:
        """Write the adapter, or the model, where PEFT and transformers expect it."""
        if self.trainer is None:
            raise RuntimeError("train(rows) comes first")
        self.trainer.save_model(str(directory))

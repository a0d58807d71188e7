"""Attributes and methods of transformers' Trainer that scripts use around `train`: each works,
or says what to use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.faces.trl.callbacks import Callbacks, TRLState
from mlx_parallm.faces.trl.config import TrainerConfig

_OPTIMIZER = "the run holds it: optim, learning_rate and lr_scheduler_type choose it"
_BATCHES = "batches are made of rows without padding: train_dataset has the rows"
NOT_ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(
        ("optimizer", "lr_scheduler", "create_optimizer", "create_scheduler"), _OPTIMIZER
    ),
    "create_optimizer_and_scheduler": _OPTIMIZER,
    **dict.fromkeys(
        ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "data_collator"),
        _BATCHES,
    ),
    "ref_model": "the reference is the model as it was before training, without the adapter",
    "predict": "trainer.evaluate() measures eval_dataset; serve=True answers at trainer.url",
    **dict.fromkeys(
        ("compute_loss", "training_step", "prediction_step"),
        "a loss of your own is GRPOTrainer(loss=…)",
    ),
    "compute_metrics": "trainer.evaluate() returns the loss and its metrics",
    **dict.fromkeys(
        ("push_to_hub", "create_model_card", "init_hf_repo"),
        "nothing is uploaded: train, then `mlx_parallm merge --push-to-hub OWNER/NAME`",
    ),
    "hyperparameter_search": "call train with other arguments and another output_dir",
    "vllm_generation": "the engine of this process samples",
    "deepspeed": "several machines train by mlx.launch (docs/operations.md#several-processes)",
}
"""Attributes that do not exist here → what to use instead."""


class Accelerator:
    """The attributes of `trainer.accelerator` that scripts read, for one process."""

    is_main_process = is_local_main_process = is_last_process = True
    process_index = local_process_index = 0
    num_processes = 1

    def wait_for_everyone(self) -> None:
        """Return at once."""

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        return model

    def print(self, *values: Any, **options: Any) -> None:
        print(*values, **options)  # noqa: T201 - accelerate's method prints

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.accelerator.{name}: MLX computes in this process, without accelerate"
        )


class TrainerAttributes:
    """Mixed into the trainers."""

    args: TrainerConfig
    state: TRLState
    _callbacks: Callbacks

    accelerator = Accelerator()

    @property
    def callback_handler(self) -> Callbacks:
        return self._callbacks

    @property
    def control(self) -> Any:
        return self._callbacks.control

    @property
    def tokenizer(self) -> Any:
        """The older name of `processing_class`."""
        return self.processing_class

    def is_world_process_zero(self) -> bool:
        return True

    def is_local_process_zero(self) -> bool:
        return True

    def add_callback(self, callback: Any) -> None:
        self._callbacks.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self._callbacks.pop_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback, or the first of a class, away and return it; None if there is
        none."""
        return self._callbacks.pop_callback(callback)

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history`, and call `on_log`."""
        entry = dict(logs) | {"epoch": self.state.epoch}
        self.state.log_history.append(entry | {"step": self.state.global_step})
        self._callbacks.call("on_log", logs=entry)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print numbers below the name of a split."""
        lines = [
            f"***** {split} metrics *****",
            *(f"  {name} = {metrics[name]}" for name in sorted(metrics)),
        ]
        print("\n".join(lines))  # noqa: T201 - transformers' method prints

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write SPLIT_results.json into output_dir; `combined`: add them to all_results.json
        too."""
        directory = Path(self.args.output_dir).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / f"{split}_results.json", metrics)
        if combined:
            file = directory / "all_results.json"
            earlier = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            _write(file, earlier | dict(metrics))

    def save_state(self) -> None:
        """Write `state` into output_dir, as log_history.json: checkpoints have a
        trainer_state.json of their own."""
        directory = Path(self.args.output_dir).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / "log_history.json", vars(self.state))

    def __getattr__(self, name: str) -> Any:
        """Find an argument by its name, as TRL's trainers have many of them (`trainer.beta`)."""
        args = self.__dict__.get("args")
        if args is not None and name in type(args).model_fields:
            return getattr(args, name)
        reason = NOT_ATTRIBUTES.get(name, "TRL's trainers may have it, this one has not")
        raise AttributeError(f"{type(self).__name__}.{name}: {reason} (docs/trl.md)")


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(
        json.dumps(dict(values), indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8"
    )

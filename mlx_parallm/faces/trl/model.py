"""`trainer.model`: the MLX module that is trained, with the methods that users of TRL and PEFT
look for first; and the files that `trainer.save_model` writes."""

import copy
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LearningSection, LoraConfig
from mlx_parallm.models.adapters.adalora import PARAMETERS, save_adalora
from mlx_parallm.models.adapters.peft import save_peft
from mlx_parallm.models.adapters.rope_length import record_rope_length
from mlx_parallm.models.heads.value_head import VALUE_HEAD_FILE
from mlx_parallm.models.loading import evaluate_module, load_model
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.models.scoring.card import CARD_FILE
from mlx_parallm.rl_training.factory import build_policy
from mlx_parallm.rl_training.initial_adapter import initial_adapter
from mlx_parallm.rl_training.step.algorithms import Algorithm
from mlx_parallm.rl_training.step.policy import REFERENCE_FILE
from mlx_parallm.run_files.checksums import CHECKSUMS_FILE
from mlx_parallm.system.files import write_directory

ROUTER = "router_aux_loss_coef"
NOT_HERE: Mapping[str, str] = {
    "generate": "answers are sampled by the server: serve=True, then"
    " trainer.url; or `mlx_parallm serve`",
    "save_pretrained": "trainer.save_model(DIR) writes the adapter or the model",
    "push_to_hub": "train, then `mlx_parallm merge --push-to-hub OWNER/NAME`",
    "merge_and_unload": "`mlx_parallm merge` merges an adapter into its base",
    "get_input_embeddings": "it is an MLX module: trainer.model.named_modules() lists its layers",
    **dict.fromkeys(
        ("to", "cuda", "cpu", "half", "bfloat16"), "MLX holds its arrays in one memory"
    ),
    **dict.fromkeys(("device", "hf_device_map"), "MLX holds its arrays in one memory"),
}
"""Names of torch's and transformers' models that are missing here → what to use instead."""


class ModelMethods:
    """Methods of torch's, transformers' and PEFT's models, for an `mlx.nn.Module`. Numbers are
    `mx.array`s."""

    config: SimpleNamespace

    def named_parameters(self) -> Iterator[tuple[str, mx.array]]:
        """Yield path and numbers of each parameter; `trainable_parameters()` is MLX's tree of
        those that learn."""
        yield from tree_flatten(self.parameters())

    def get_parameter(self, target: str) -> mx.array:
        """Return the numbers at a path of `named_parameters`. Raises AttributeError: there is no
        such path."""
        parameter = dict(self.named_parameters()).get(target)
        if parameter is None:
            raise AttributeError(f"the model has no parameter {target!r}")
        return parameter

    def num_parameters(self, only_trainable: bool = False) -> int:
        tree = self.trainable_parameters() if only_trainable else self.parameters()
        return sum(math.prod(array.shape) for _, array in tree_flatten(tree))

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return (trained, all): packed weights of a quantised base count as they are stored."""
        return self.num_parameters(only_trainable=True), self.num_parameters()

    def print_trainable_parameters(self) -> None:
        trained, total = self.get_nb_trainable_parameters()
        line = (
            f"trainable params: {trained:,d} || all params: {total:,d} || trainable%:"
            f" {100 * trained / total:.4f}"
        )
        print(line)  # noqa: T201 - PEFT's method prints

    def __getattr__(self, name: str) -> Any:
        if name in NOT_HERE:
            raise AttributeError(f"trainer.model.{name}: {NOT_HERE[name]} (docs/trl.md)")
        return super().__getattr__(name)  # type: ignore[misc]


def with_methods(module: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Return a view of the module that has `ModelMethods` too; layers and numbers are the module's
    own.

    Args:
        config: config.json.
    """
    view = copy.copy(module)
    object.__setattr__(view, "config", SimpleNamespace(**config))
    view.__class__ = type(type(module).__name__, (ModelMethods, type(module)), {})
    return view


def module_before_training(
    model: ModelConfig, training: LearningSection, algorithm: Algorithm, checkpoint_dir: Path
) -> nn.Module:
    """Load the module that a run of these settings begins with. On a thread that may use MLX.

    Raises ModelError, AdapterError, ConfigError.
    """
    lora = training.lora
    loaded = load_model(model, quantize=lora.enabled and lora.quantize_base)
    policy = build_policy(
        loaded,
        training,
        algorithm,
        initial_adapter=initial_adapter(model, lora, checkpoint_dir),
    )
    evaluate_module(policy.model)
    return with_methods(policy.model, loaded.config)


def save(checkpoint: Path, target: Path, *, lora: LoraConfig, base: str) -> None:
    """Write a checkpoint's weights into `target`: an adapter in PEFT's files, else all weights."""
    if lora.enabled:
        adapter = load_adapter(checkpoint)

        def write(directory: Path) -> None:
            if lora.use_adalora:
                schedule = adapter.config[PARAMETERS]
                save_adalora(
                    directory, adapter.layers, dropout=lora.dropout, base=base, schedule=schedule
                )
            else:
                save_peft(directory, adapter.layers, dropout=lora.dropout, base=base)
            record_rope_length(directory, adapter.config)
            if (checkpoint / CARD_FILE).is_file():  # a reward model is more than its adapter
                for name in (CARD_FILE, VALUE_HEAD_FILE):
                    shutil.copyfile(checkpoint / name, directory / name)

        write_into(target, write)
        return
    skipped = ("trainer_state", "optimizer", "served", REFERENCE_FILE, CHECKSUMS_FILE)

    def copy(directory: Path) -> None:
        for file in checkpoint.iterdir():
            if file.is_file() and not file.name.startswith(skipped):
                shutil.copyfile(file, directory / file.name)

    write_into(target, copy)


def write_into(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new directory, then move its files to `target`, so that none is half written."""
    with TemporaryDirectory(dir=target, prefix=".saving_") as name:
        write_directory(Path(name) / "files", fill)
        for file in (Path(name) / "files").iterdir():
            file.replace(target / file.name)


def warn_of_router(model_config: Mapping[str, Any]) -> None:
    """Warn where TRL would add the loss of a mixture's router: by the coefficient of config.json,
    or of transformers' class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = model_config.get("text_config") or model_config
    kind = str(text.get("model_type"))
    default = (
        getattr(CONFIG_MAPPING[kind], "router_aux_loss_coef", None)
        if kind in CONFIG_MAPPING
        else None
    )
    coefficient = text.get(ROUTER, default)
    if coefficient:
        warnings.warn(
            f"{ROUTER}=None: TRL would add {coefficient:g} times the router's balancing loss, as"
            f" the model's configuration says; here it is off: set {ROUTER}=0 (docs/trl.md)",
            stacklevel=2,
        )

"""`trainer.model`: the MLX module that is trained, with the methods that users of TRL and PEFT
look for first."""

import copy
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.config.load import Config
from mlx_parallm.models.loading import evaluate_module, load_model
from mlx_parallm.rl_training.checkpoints.resume import initial_adapter
from mlx_parallm.rl_training.factory import build_policy
from mlx_parallm.rl_training.step.algorithms import make_algorithm

NOT_HERE: Mapping[str, str] = {
    "generate": "answers are sampled by the server: serve=True, then trainer.url; or `mlx_parallm"
    " serve`",
    "save_pretrained": "trainer.save_model(DIR) writes the adapter or the model",
    "push_to_hub": "train, then `mlx_parallm merge --push-to-hub OWNER/NAME`",
    "merge_and_unload": "`mlx_parallm merge` merges an adapter into its base",
    "get_input_embeddings": "it is an MLX module: trainer.model.named_modules() lists its layers",
    **dict.fromkeys(
        ("to", "cuda", "cpu", "half", "bfloat16"), "MLX holds its arrays in one memory"
    ),
    **dict.fromkeys(("device", "hf_device_map"), "MLX holds its arrays in one memory"),
}
"""Names of torch's and transformers' models that there are not → what to use instead."""


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


def module_before_training(config: Config) -> nn.Module:
    """Load the module that a run of this configuration begins with. On a thread that may use MLX.

    Raises ModelError, AdapterError, ConfigError.
    """
    training = config.rl_training
    loaded = load_model(
        config.model, quantize=training.lora.enabled and training.lora.quantize_base
    )
    policy = build_policy(
        loaded, training, make_algorithm(training), initial_adapter=initial_adapter(config)
    )
    evaluate_module(policy.model)
    return with_methods(policy.model, loaded.config)

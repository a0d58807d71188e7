"""The experts of a mixture: how many, and whether their stacks get adapters."""

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.nn as nn

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import AdapterError
from mlx_parallm.models.mlx_lm_api import QuantizedSwitchLinear, SwitchLinear

_NUMBER = ("num_experts", "num_local_experts", "n_routed_experts")


def number_of_experts(text: Mapping[str, Any]) -> int:
    """Return how many experts a block has, by a config.json or a model's arguments; 0: none."""
    return next((int(text[key]) for key in _NUMBER if text.get(key)), 0)


def are_experts(layer: nn.Module) -> bool:
    """Whether a linear layer is a stack of experts."""
    return isinstance(layer, SwitchLinear | QuantizedSwitchLinear)


def adaptable(layers: Mapping[str, nn.Module], config: LoraConfig) -> dict[str, nn.Module]:
    """Return the layers that may be adapted, by their paths."""
    return {
        path: layer
        for path, layer in layers.items()
        if config.routed_experts or not are_experts(layer)
    }


def check_adapted(layers: Iterable[nn.Module], config: LoraConfig) -> None:
    """Raises AdapterError: experts are to be adapted, and none of these layers is a stack."""
    if config.routed_experts and not any(map(are_experts, layers)):
        raise AdapterError(
            "lora.routed_experts = true, but the target modules are not stacked experts: leave it"
            " out, or name those of a mixture of experts"
        )


def refused(target: str) -> AdapterError:
    """Return the error of a target that names stacks alone, which are not to be adapted."""
    return AdapterError(
        f"target module {target!r} is a stack of routed experts: set lora.routed_experts ="
        " true to give each its own adapter, or adapt attention projections"
    )

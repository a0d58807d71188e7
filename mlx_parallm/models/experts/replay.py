"""Whether a trainer watches its model's experts, and repeats those that the engine recorded."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.config.training import LearningSection
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.experts.routing import (
    blocks_of_experts,
    prepare_routing,
    routing_shape,
    why_not_routed,
)
from mlx_parallm.models.experts.targets import are_experts
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import NARROW_IDS

log = get_logger("trainer")
EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
REPEATED, REPEATED_PROMPTS = "experts", "prompt_experts"
"""Names of what the engine records for a trainer: the experts of sampled tokens, and of prompts."""


class ExpertReplay(NamedTuple):
    """`shape`: (layers, experts a token, experts) of a model whose experts are watched. `sampled`:
    those of sampled tokens are repeated; `prompts`: those of the others too."""

    shape: tuple[int, int, int] | None = None
    sampled: bool = False
    prompts: bool = False

    @property
    def recorded(self) -> frozenset[str]:
        """Names of what the engine has to record."""
        names = {REPEATED: self.sampled, REPEATED_PROMPTS: self.prompts}
        return frozenset(name for name, wanted in names.items() if wanted)


def replay_of(
    model: nn.Module, training: LearningSection, kv_bits: int | None, *, watches: bool = True
) -> ExpertReplay:
    """Prepare the model of a trainer. Raises ConfigError: [rl_training] wants experts repeated that
    cannot be."""
    setting = "off" if training.learns_from_rows else training.router_replay
    shape = watched_experts(model, setting) if watches else None
    if shape is None:
        if training.router_replay_prompts:
            raise ConfigError(
                "rl_training.router_replay_prompts = true, but this model has no experts that can"
                " be repeated: leave it out"
            )
        return ExpertReplay()
    sampled = is_repeated(model, training, kv_bits)
    return ExpertReplay(shape, sampled, sampled and training.router_replay_prompts)


def is_repeated(model: nn.Module, training: LearningSection, kv_bits: int | None) -> bool:
    """Whether a training repeats the experts of a model that has such."""
    return not training.learns_from_rows and replays_experts(
        model,
        training.router_replay,
        staleness=training.max_staleness,
        rounded=training.lora.qat_bits is not None,
        kv_bits=kv_bits,
    )


def recorded_bytes(model: nn.Module, text: Mapping[str, Any]) -> int:
    """Return the bytes of a token's recorded experts; 0: the model has none. `text`: of its
    config.json, what describes the language model."""
    if not (blocks := len(blocks_of_experts(model))):
        return 0
    each = next((int(text[key]) for key in EXPERTS_A_TOKEN if text.get(key)), 1)
    experts = next(layer.num_experts for layer in model.modules() if are_experts(layer))
    return blocks * each * (1 + (experts > NARROW_IDS))


def recorded_for(model: nn.Module, training: LearningSection) -> frozenset[str]:
    """Prepare a model that is served, and return names of what a trainer that is attached later may
    repeat."""
    wanted = training.router_replay != "off" and watched_experts(model, "off") is not None
    return ExpertReplay(sampled=wanted).recorded


def watched_experts(
    model: nn.Module, setting: Literal["off", "on", "auto"]
) -> tuple[int, int, int] | None:
    """Prepare a model, and return `routing_shape`; None: it has no experts, or they cannot be
    watched and repeated. Raises ConfigError: router_replay is "on", and they cannot."""
    if not blocks_of_experts(model) and setting != "on":
        return None
    prepare_routing(model)
    if reason := why_not_routed(model):
        if setting == "on":
            raise ConfigError(
                f'rl_training.router_replay = "on", but {reason}; leave it out or set it to "off"'
            )
        if setting == "auto":
            log.warning("the router of the trainer chooses its own experts", reason=reason)
        return None
    return routing_shape(model)


def replays_experts(
    model: nn.Module,
    setting: Literal["off", "on", "auto"],
    *,
    staleness: int,
    rounded: bool = False,
    kv_bits: int | None = None,
) -> bool:
    """Whether the trainer of a model with `watched_experts` repeats the engine's.

    "auto": if the two may choose differently, because the weights are not float32, rollouts may
    be older than the weights by `staleness` steps, the trainer's weights are `rounded`, or the
    engine keeps keys and values in `kv_bits`.
    """
    if setting != "auto":
        return setting == "on"
    arrays = [array for _, array in tree_flatten(model.parameters())]
    exact = all(array.dtype == mx.float32 for array in arrays)
    return staleness > 0 or rounded or kv_bits is not None or not exact

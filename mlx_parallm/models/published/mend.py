"""Makes mlx-lm's classes compute the model that config.json describes.

model_classes      mlx-lm's classes of a model, with arguments in their spelling and mended
                   models: every loading here goes through them
load_hf_model      mlx-lm's loading with these classes
unheeded_keys      keys of a config.json that nothing here heeds
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.nn as nn

from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import load_mlx_lm_model, mlx_lm_classes
from mlx_parallm.models.published.activations import KEYS, same, use_activation
from mlx_parallm.models.published.architectures import (
    Architecture,
    architecture_of,
    class_arguments,
    unheeded,
)
from mlx_parallm.models.published.classes import check_one_head, reading, tie_head
from mlx_parallm.models.published.forwards import experts_of_other_groups, indexer_norms
from mlx_parallm.models.published.fp8 import fp8_reading
from mlx_parallm.models.published.reader import Published, read_published
from mlx_parallm.models.published.rope import Rope, RopeTurns, turned_part, turns_of
from mlx_parallm.models.published.windows import place_windows, windows_in, windows_of, within

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return stands for the classes of a model and of its arguments: `from_dict` of the second
    takes config.json, and the first builds the mended model.

    Raises ValueError: mlx-lm has no such `model_type`; ModelError: config.json describes a model
    that the class cannot compute.
    """
    model_class, args_class = mlx_lm_classes(config)
    published = read_published(config)
    if published is None:
        return model_class, args_class
    if why := architecture_of(published).differs:
        raise ModelError(f"model_type = {published.model_type!r} is not computed here: {why}")
    names = argument_names(text_arguments(published, model_class, args_class))

    arguments_of, model_type = partial(class_arguments, published, names), published.model_type

    class MendedArguments:
        @staticmethod
        def from_dict(written: Mapping[str, Any]) -> Any:
            text = written.get("text_config")
            if not isinstance(text, Mapping):
                return args_class.from_dict(arguments_of(written))
            text = {"model_type": model_type, **arguments_of(text)}
            if "tie_word_embeddings" in written:  # transformers reads it at the top
                text["tie_word_embeddings"] = written["tie_word_embeddings"]
            # Gemma's classes look for the size of the vocabulary at the top
            size = {"vocab_size": text["vocab_size"]} if "vocab_size" in text else {}
            return args_class.from_dict({**size, **written, "text_config": text})

    def build(arguments: Any) -> nn.Module:
        model: nn.Module = model_class(arguments)
        if not hasattr(model, "_no_grad"):  # recurrent_gemma leaves out nn.Module's constructor
            nn.Module.__init__(model)
        mend(model, published)
        if published.get("tie_word_embeddings") and config.get("tie_word_embeddings", True):
            model.__class__ = reading(type(model), check_one_head)
        if (read := fp8_reading(config)) is not None:
            model.__class__ = reading(type(model), read)
        return model

    return build, MendedArguments


load_hf_model = partial(load_mlx_lm_model, get_model_classes=model_classes)


_TEXT_MODULES = {
    "deepseek_v3": "deepseek_v3",
    "gemma3_text": "gemma3_text",
    "gemma4_text": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "llama": "llama",
    "ministral3": "ministral3",
    "mistral": "llama",
    "mistral4": "mistral4",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""`model_type` of a part that reads text → mlx-lm's module that computes it."""


def text_arguments(published: Published, model_class: Any, args_class: Any) -> Any:
    """Return the class of the arguments of the part that reads text."""
    names = [field.name for field in dataclasses.fields(args_class)]
    if "text_config" not in names:
        return args_class
    for kind in (args_class, *model_class.__mro__):
        module = sys.modules[kind.__module__]
        for name in ("TextModelArgs", "TextArgs", "TextConfig"):
            if dataclasses.is_dataclass(part := getattr(module, name, None)):
                return part
    if (module_name := _TEXT_MODULES.get(published.model_type)) is not None:
        return mlx_lm_classes({"model_type": module_name})[1]
    raise ModelError(f"text_config: model_type {published.model_type!r} is not supported here")


def argument_names(args_class: Any) -> frozenset[str]:
    """Return the keys that a class's arguments have."""
    if dataclasses.is_dataclass(args_class):
        return frozenset(field.name for field in dataclasses.fields(args_class))
    return frozenset(inspect.signature(args_class).parameters)


def mend(model: nn.Module, published: Published) -> None:
    """Put ropes, windows and the activation of config.json into a model, in place. Raises
    ModelError."""
    architecture = architecture_of(published)
    if architecture.layers:
        architecture.layers(model, published)
    if architecture.own_ropes is not None:
        _check_own_ropes(published, architecture.own_ropes)
    elif published.ropes:
        _place_ropes(model, published)
    wanted, own_windows = windows_of(published), windows_in(model)
    if wanted is not None and own_windows is not None:
        context = int(published.get("max_position_embeddings", sys.maxsize))
        if within(context, wanted) != within(context, own_windows):
            place_windows(model, within(context, wanted))
    indexer_norms(model)
    experts_of_other_groups(model)
    if architecture.own_head and published.get("tie_word_embeddings"):
        tie_head(model)
    if architecture.mend:
        architecture.mend(model, published)
    if architecture.rounding:
        architecture.rounding(model, published)
    _place_activation(model, published, architecture)


def _place_activation(model: nn.Module, published: Published, architecture: Architecture) -> None:
    key = next((k for k in KEYS if k in published.keys), "")
    named = str(published.get(key)) if key else ""
    if named and architecture.activation and not same(named, architecture.activation):
        if not architecture.activated:
            raise ModelError(
                f"{key} = {named!r}: mlx-lm's class of {published.model_type} computes"
                f" {architecture.activation!r} alone"
            )
        use_activation(model, named)


def _check_own_ropes(published: Published, kinds: frozenset[str]) -> None:
    for rope in published.ropes.values():
        if (kind := rope.get("rope_type", "default")) not in kinds:
            raise ModelError(
                f"rope_parameters (rope_scaling): rope_type {kind!r} is not supported for"
                f" {published.model_type}"
            )


def _place_ropes(model: nn.Module, published: Published) -> None:
    placed = False
    for path, module in list(model.named_modules()):
        old = module.get("rope") if isinstance(module, nn.Module) else None
        if not isinstance(old, nn.Module) or type(old).__name__ == "NoPE":
            continue
        layer = _LAYER.search(f"{path}.")
        rope = published.rope_of(int(layer[1])) if layer else published.rope
        if rope is None:
            continue
        turns = turns_of(published, rope, published.head_dim)
        module.rope = _rope(old, published, rope, turns, of_indexer=path.endswith("indexer"))
        placed = True
    if not placed:
        _check_own_ropes(published, frozenset({"default"}))


def _rope(
    old: Any,
    published: Published,
    rope: Mapping[str, Any],
    turns: RopeTurns,
    *,
    of_indexer: bool = False,
) -> nn.Module:
    """Return MLX's own module if it computes this rope, else ours. `of_indexer`:
    `rope_interleave` does not speak of it."""
    traditional = bool(getattr(old, "traditional", type(old).__name__.startswith("DeepseekV2")))
    if "rope_interleave" in published.keys and not of_indexer:
        traditional = bool(published.config.rope_interleave)
    kind = rope.get("rope_type", "default")
    odd = int(published.head_dim * turned_part(published, rope)) % 2
    if kind in ("default", "linear") and turns.factor == 1.0 and not odd:
        scale = 1 / rope["factor"] if kind == "linear" else 1.0
        return nn.RoPE(2 * len(turns.inverse), traditional, rope["rope_theta"], scale)
    return Rope(turns, traditional=traditional, kind=kind)


def unheeded_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that change the forward pass and that nothing here heeds,
    with their values. Raises ModelError."""
    published = read_published(config)
    if published is None:
        return {}
    try:
        classes = mlx_lm_classes(dict(config))
    except (ValueError, SystemExit):
        return {}  # no such class: the loader reports it
    return unheeded(published, argument_names(text_arguments(published, *classes)))

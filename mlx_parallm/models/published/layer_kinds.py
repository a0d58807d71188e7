"""Kinds of layers as a class of mlx-lm looks for them: one of each kind, or a window's pattern that
is no longer than the model. Also which kinds have a rope."""

from dataclasses import replace
from typing import Any

import mlx.nn as nn

from mlx_parallm.errors import ModelError
from mlx_parallm.models.published.reader import GLOBAL, Published
from mlx_parallm.models.published.windows import SLIDING


def both_kinds(published: Published, arguments: dict[str, Any]) -> None:
    """The class looks for one layer of each kind in every forward."""
    keys = [key for key in ("layer_types", "layers_block_type") if published.get(key)]
    kinds = {kind for key in keys for kind in published.get(key)}
    if keys and len(kinds - {"mlp", "moe"}) < 2:
        raise ModelError(
            f"config.json has {' or '.join(keys)} of one kind alone"
            f" ({', '.join(sorted(kinds))}): not supported"
        )


def global_types(published: Published, arguments: dict[str, Any]) -> None:
    """The class looks for one layer that sees the whole text."""
    types = list(published.get("layer_types") or ())
    if types and GLOBAL not in types:
        types[0] = GLOBAL
    arguments["layer_types"] = types or None


def mixed_types(published: Published, arguments: dict[str, Any]) -> None:
    """The class looks for one layer of each kind; the windows are put in afterwards."""
    types = list(published.config.layer_types)
    if len(types) == 1:
        both_kinds(published, arguments)
    if SLIDING not in types:
        types[0] = SLIDING
    elif GLOBAL not in types:
        types[0] = GLOBAL
    arguments["layer_types"] = types


def one_global(published: Published, arguments: dict[str, Any]) -> None:
    if GLOBAL not in published.config.layer_types:
        raise ModelError("config.json has layer_types without full_attention: not supported")


def one_linear(published: Published, arguments: dict[str, Any]) -> None:
    """The class knows by a convolution whether a checkpoint's norms are those of transformers."""
    if set(published.config.layer_types) == {GLOBAL}:
        raise ModelError("config.json has layer_types without linear_attention: not supported")


def some_experts(published: Published, arguments: dict[str, Any]) -> None:
    """The class knows by its experts whether a checkpoint is one of transformers'."""
    config, step = published.config, published.config.decoder_sparse_step
    sparse = set(range(step - 1, published.layers, step))
    if not config.num_experts or not sparse - set(config.mlp_only_layers):
        raise ModelError(
            "config.json has no layer of experts (num_experts, decoder_sparse_step,"
            " mlp_only_layers): not supported"
        )


def short_pattern(published: Published, arguments: dict[str, Any]) -> None:
    """The class takes its pattern's first full-attention layer for the mask; the
    windows are put in afterwards."""
    layers = published.layers
    arguments["sliding_window_pattern"] = min(arguments.get("sliding_window_pattern", 4), layers)


def letters_of_exaone4(published: Published, arguments: dict[str, Any]) -> None:
    letters = "".join("L" if k == SLIDING else "G" for k in published.config.layer_types)
    # it looks for one of each kind; one more is not a layer's
    letters += "".join({"L", "G"} - set(letters))
    arguments["sliding_window_pattern"] = letters if published.get("sliding_window") else None


def layers_by_types(model: nn.Module, published: Published) -> None:
    """The class has a layer that sees the whole text at the end of each `full_attention_interval`;
    others of the kinds of `layer_types` take their places."""
    text: Any = model.get("language_model", model)
    inner, wanted = text.model, [kind != GLOBAL for kind in published.config.layer_types]
    for place, (layer, linear) in enumerate(zip(inner.layers, wanted, strict=True)):
        if layer.is_linear != linear:
            interval = place + 2 if linear else 1
            arguments = replace(text.args, full_attention_interval=interval)
            inner.layers[place] = type(layer)(arguments, place)
    inner.ssm_idx, inner.fa_idx = (
        wanted.index(kind) if kind in wanted else None for kind in (True, False)
    )


def one_of_each(model: nn.Module, published: Published) -> None:
    last = published.layers - 1
    inner: Any = model.model
    if inner.swa_idx is not None:
        inner.swa_idx, inner.full_idx = min(inner.swa_idx, last), min(inner.full_idx, last)


def one_of_each_in_mimo(model: nn.Module, published: Published) -> None:
    last = published.layers - 1
    inner: Any = model.model
    inner.swa_idx, inner.ga_idx = min(inner.swa_idx, last), min(inner.ga_idx, last)


def ropes_of_exaone(model: nn.Module, published: Published) -> None:
    """Full-attention layers have no rope, if the model has windows."""
    if published.get("sliding_window"):
        for layer, kind in zip(model.layers, published.config.layer_types, strict=True):
            layer.self_attn.use_rope = kind == SLIDING


def ropes_where_sliding(model: nn.Module, published: Published) -> None:
    for layer, kind in zip(model.layers, published.config.layer_types, strict=True):
        layer.self_attn.use_sliding_window = kind == SLIDING

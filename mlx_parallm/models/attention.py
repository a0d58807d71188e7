"""Attention over keys that are no array: how a cache of its own layout serves mlx-lm's models unchanged.

mlx-lm's attention layers give what `cache.update_and_fetch` returned to `scaled_dot_product_attention`. Where that is a
`RoutedKeys`, the call goes to it; every other call goes to mlx-lm as before. A layer that looks into its keys in
between (a latent, an index, a softcap) raises there, which `engine/cache/batch.py` finds out at load.
"""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.mlx_lm_api import mlx_lm_attention

_NAME = "scaled_dot_product_attention"


class RoutedKeys:
    """What a layer's cache returns in the place of keys and values. Abstract: each cache has its own below it."""

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attention of queries [n, heads, 1, D] over all that each row holds → [n, heads, 1, Dv]."""
        raise NotImplementedError


def route_attention(model: nn.Module) -> bool:
    """Let calls of the model's attention layers reach `RoutedKeys`; return whether there are any. Other models of the
    same modules compute as before."""
    modules = {sys.modules[kind.__module__] for layer in model.modules() for kind in type(layer).__mro__}
    calling = [module for module in modules if module.__dict__.get(_NAME) in (mlx_lm_attention, _attention)]
    for module in calling:
        vars(module)[_NAME] = _attention
    return bool(calling)


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Raises NotImplementedError: a `RoutedKeys` with a mask or sinks; the check at load then names the layer."""
    if not isinstance(keys, RoutedKeys):
        return mlx_lm_attention(queries, keys, values, cache, scale, mask, sinks)
    if mask is not None or sinks is not None or values is not keys:
        raise NotImplementedError("its attention has a mask or sinks of its own")
    return keys.attend(queries, scale)

"""Replace the computation in mlx-lm's attention layers: our cache layouts serve mlx-lm's models
unchanged.

mlx-lm's attention layers give what `cache.update_and_fetch` returned to
`scaled_dot_product_attention`. If that is a `RoutedKeys`, the call goes to it; on a CPU, one of
several queries goes to `cpu/attention.py`; every other call goes to mlx-lm as before. A layer that
looks into its keys in between (a latent, an index, a softcap) raises there, which
`engine/cache/batch.py` finds out at load.
"""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.cpu.attention import attend_by_heads as attend_by_heads
from mlx_parallm.models.cpu.attention import attention, takes
from mlx_parallm.models.cpu.attention import attention_of_rows as attention_of_rows
from mlx_parallm.models.cpu.attention import takes_rows as takes_rows
from mlx_parallm.models.mlx_lm_api import mlx_lm_attention

_NAME = "scaled_dot_product_attention"


class RoutedKeys:
    """An object that a layer's cache returns in place of keys and values. Abstract: each cache has
    its subclass."""

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        """Attention of queries [n, heads, 1, D] over all that each row holds → [n, heads, 1, Dv].

        `sinks` [heads]: a logit of each head that takes its part of the softmax and has no value
        (gpt-oss). Raises NotImplementedError: this cache knows none.
        """
        raise NotImplementedError


class RoutedLatent(RoutedKeys):
    """Keys of latent attention (MLA), whose layer gives the products of the rotated queries and
    keys as a mask. Its cache returns the identity in the place of the rotated keys, so what comes
    as the mask are the rotated queries times `scale`. Abstract."""

    def attend_latent(self, queries: mx.array, rotated: mx.array, scale: float) -> mx.array:
        """Attention of queries [n, heads, 1, D] and rotated ones [n, heads, 1, R] over the latents
        that each row holds → [n, heads, 1, D]."""
        raise NotImplementedError


def route_attention(model: nn.Module) -> bool:
    """Route calls of the model's attention layers to this module, and those of other models of the
    same classes; return whether there are any."""
    modules = {
        sys.modules[kind.__module__] for layer in model.modules() for kind in type(layer).__mro__
    }
    calling = [
        module for module in modules if module.__dict__.get(_NAME) in (mlx_lm_attention, _attention)
    ]
    for module in calling:
        vars(module)[_NAME] = _attention
    return bool(calling)


def attend_with_mask(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    cache: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention over arrays, by whichever is faster: `cpu/attention.py` or mlx-lm's."""
    if sinks is None and takes(queries, keys, values, mask):
        return attention(queries, keys, values, scale, mask)
    return mlx_lm_attention(queries, keys, values, cache, scale, mask, sinks)


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Raises NotImplementedError: a `RoutedKeys` with a mask, or with sinks that it does not know;
    the check at load then names the layer."""
    if not isinstance(keys, RoutedKeys):
        if isinstance(keys, mx.array):
            return attend_with_mask(queries, keys, values, scale, mask, cache, sinks)
        return mlx_lm_attention(queries, keys, values, cache, scale, mask, sinks)
    if isinstance(keys, RoutedLatent) and isinstance(mask, mx.array) and values is keys:
        return keys.attend_latent(queries, mask, scale)
    if mask is not None or values is not keys:
        raise NotImplementedError("its attention has its own mask")
    return keys.attend(queries, scale, sinks)

"""Sliding windows as config.json places them, in classes of mlx-lm that know none or place them by
their own pattern.

A window is a mask: the block makes its own in the place of the one that the model passes, and the
model keeps a rotating cache for it, as mlx-lm's models with windows do.
"""

import functools
import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import (
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)
from mlx_parallm.models.published.classes import named_as, once
from mlx_parallm.models.published.reader import Published

SLIDING = "sliding_attention"


def windows_of(published: Published) -> list[int | None] | None:
    """Return each layer's window as transformers places it: how many tokens an attention layer
    sees, itself included; None: all. None in the whole: the architecture has no such key."""
    if "sliding_window" not in published.keys:
        return None
    if not (size := published.get("sliding_window")):
        return [None] * published.layers
    types = published.get("layer_types") if "layer_types" in published.keys else None
    if not types:
        return [int(size)] * published.layers
    return [int(size) if kind == SLIDING else None for kind in types]


def within(context: int, windows: list[int | None]) -> list[int | None]:
    """Return windows without those that see every text of at most `context` tokens whole."""
    return [window if window is not None and window < context else None for window in windows]


def windows_in(model: nn.Module) -> list[int | None] | None:
    """Return the windows that a model of mlx-lm has by itself, by its caches. None: it keeps others
    than one for each layer."""
    caches = make_prompt_cache(model)
    if len(caches) != len(list(model.layers)):
        return None
    return [cache.max_size if isinstance(cache, RotatingKVCache) else None for cache in caches]


def place_windows(model: nn.Module, windows: list[int | None]) -> None:
    """Let each block of a model see its window, in place.

    Raises ModelError: the blocks take no mask, or the layers are not one for each window.
    """
    blocks = list(model.layers)
    if len(blocks) != len(windows):
        raise ModelError(f"sliding_window: the model has {len(blocks)} layers, not {len(windows)}")
    for block, window in zip(blocks, windows, strict=True):
        block.__class__ = _windowed_block(type(block))
        block.window = window
    model.__class__ = _windowed_model(type(model))
    model.windows = windows


@once
def _windowed_block(kind: Any) -> type[Any]:
    parameters = list(inspect.signature(kind.__call__).parameters)
    if "mask" not in parameters or "cache" not in parameters:
        raise ModelError(f"sliding_window is not supported: {kind.__name__} takes no mask")
    at = {name: parameters.index(name) - 1 for name in ("mask", "cache")}

    class WindowedBlock(kind):
        @functools.wraps(kind.__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("cache")
            if len(args) > at["cache"]:
                cache = args[at["cache"]]
            hidden = next(value for value in args if isinstance(value, mx.array) and value.ndim > 2)
            passed = args[at["mask"]] if len(args) > at["mask"] else kwargs.get("mask")
            mask = create_attention_mask(
                hidden,
                cache,
                window_size=self.window,
                return_array=isinstance(passed, mx.array),  # the class reads no "causal"
            )
            if len(args) > at["mask"]:
                args = (*args[: at["mask"]], mask, *args[at["mask"] + 1 :])
            else:
                kwargs["mask"] = mask
            return super().__call__(*args, **kwargs)

    return named_as(WindowedBlock, kind)


@once
def _windowed_model(kind: Any) -> type[Any]:
    class WindowedModel(kind):
        def make_cache(self) -> list[Any]:
            made = getattr(super(), "make_cache", None)
            caches = made() if made else [KVCache() for _ in self.windows]
            return [
                _cache_for(cache, window)
                for cache, window in zip(caches, self.windows, strict=True)
            ]

    return named_as(WindowedModel, kind)


def _cache_for(cache: Any, window: int | None) -> Any:
    if not isinstance(cache, KVCache | RotatingKVCache):
        return cache
    return KVCache() if window is None else RotatingKVCache(max_size=window, keep=0)

"""The caches of a prefill: mlx-lm's own, allocated at once, beginning with the prefix that the
cache holds."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.engine.cache.kv_format import AS_COMPUTED, KVFormat
from mlx_parallm.engine.cache.prefix import PrefixChunk
from mlx_parallm.models.mlx_lm_api import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)


class CannotBatchError(Exception):
    """A running cache has no cache for one of the layers; the message names it."""


class WindowedKVCache(KVCache):
    """A prefill cache of a sliding-window layer: keeps all positions, sees the last `window`."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        window = min(window_size or self._window, self._window)
        return super().make_mask(N, return_array=return_array, window_size=window)


def new_caches(
    model: nn.Module,
    length: int,
    prefixes: SequenceOf[tuple[PrefixChunk, ...]] = (),
    kv_format: KVFormat = AS_COMPUTED,
) -> list[Any]:
    """mlx-lm's caches for a prefill of `length` positions, allocated at once (their growth copies).

    `kv_format`: of the prefixes' segments. A prefill computes with keys and values that are not
    quantised.
    """
    caches = [_prefill_cache(cache, length) for cache in make_prompt_cache(model)]
    if any(prefixes):
        _restore_prefixes(leaves(caches), prefixes, kv_format)
    return caches


def arrays_of(caches: Iterable[Any]) -> list[mx.array]:
    """Every array that mlx-lm caches hold, to be evaluated."""
    return [
        array
        for _, array in tree_flatten([cache.state for cache in caches])
        if isinstance(array, mx.array)
    ]


def token_bytes(model: nn.Module, caches: list[Any]) -> int:
    """Bytes of one token's keys and values, by the shapes [1, H, T, D] that a forward gives to
    fresh caches."""
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    growing = [cache for cache in leaves(caches) if not isinstance(cache, ArraysCache)]
    return sum(array.nbytes // array.shape[2] for array in arrays_of(growing) if array.ndim == 4)


def states_of(caches: Iterable[Any]) -> list[mx.array | None]:
    """The states of recurrent layers, [rows, …] each, None if a layer has none yet:
    `begin_with` takes them so."""
    return [
        array for cache in leaves(caches) if isinstance(cache, ArraysCache) for array in cache.cache
    ]


def present(states: Iterable[mx.array | None]) -> list[mx.array]:
    return [array for array in states if array is not None]


def keys_and_values(caches: Iterable[Any], start: int, stop: int, row: int = 0) -> list[mx.array]:
    """Positions [start, stop) of each layer's keys and values in a row of mlx-lm's caches, [1, H,
    stop - start, D].

    Copies: slices would keep all of the caches' arrays alive.
    """
    index = mx.array([row], dtype=mx.int32)
    return [
        mx.take(array[:, :, start:stop], index, axis=0)
        for cache in leaves(caches)
        if isinstance(cache, KVCache)
        for array in (cache.keys, cache.values)
    ]


def begin_with(recurrent: Iterable[ArraysCache], states: list[mx.array | None]) -> None:
    """Gives fresh caches of recurrent layers these states."""
    left = iter(states)
    for cache in recurrent:
        cache.cache = [next(left) for _ in cache.cache]


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def _restore_prefixes(
    caches: Iterable[Any], rows: SequenceOf[tuple[PrefixChunk, ...]], kv_format: KVFormat
) -> None:
    """Fill fresh mlx-lm KVCaches of a prefill with the stored prefixes, of one length for all rows.

    A quantised prefix is kept as `stored_prefix` of its cache: quantised a second time it would
    have other bits. Recurrent layers begin with the snapshot at the prefix's end; such a prefill
    has one row.
    """
    count = kv_format.arrays
    caches = list(caches)
    recurrent = [cache for cache in caches if isinstance(cache, ArraysCache)]
    if recurrent:
        [chunks] = rows
        begin_with(recurrent, chunks[-1].segment.snapshots[chunks[-1].stop])
    for layer, cache in enumerate(cache for cache in caches if not isinstance(cache, ArraysCache)):
        stored = partial(_stored, rows, range(count * layer, count * (layer + 1)))
        cache.update_and_fetch(*kv_format.unpack(stored()))
        if kv_format.bits is not None:
            cache.stored_prefix = stored


def _stored(rows: SequenceOf[tuple[PrefixChunk, ...]], kinds: Iterable[int]) -> list[mx.array]:
    """Return the arrays `kinds` of the rows' chunks, [rows, H, P, ·] each."""
    return [
        mx.concatenate(
            [
                mx.concatenate(
                    [p.segment.arrays[kind][:, :, : p.stop - p.start] for p in chunks], axis=2
                )
                for chunks in rows
            ]
        )
        for kind in kinds
    ]


def _prefill_cache(cache: Any, length: int) -> Any:
    if type(cache) is CacheList:
        return CacheList(*(_prefill_cache(inner, length) for inner in cache.caches))
    if type(cache) is RotatingKVCache:
        cache = WindowedKVCache(cache.max_size)
    if isinstance(cache, KVCache):
        cache.step = length
    return cache

"""The cache of any mlx-lm architecture, behind one face: `ModelRunner` and `Engine` do not know which one they have.

    BatchCache   one forward decodes all rows. Each layer keeps keys and values of all positions (`kv_cache.SlotCache`;
                 a sliding window is a mask over them, so prefixes can be shared), a recurrent state of fixed size a row
                 (mlx-lm's ArraysCache, dense rows as in SlotCache), or several of these (CacheList).
    RowCaches    one forward a row, over mlx-lm's own caches of that row alone: for architectures that read
                 `cache.offset` as a number, shape a mask for one row, or bring a cache of their own.

`probe.choose_cache` takes the first that gives what the model's own forward gives. mlx-lm's batch caches (left padding)
are not used: they copy all keys and values whenever a row comes or goes, and most of what RowCaches is for fails with
them too. `tests/engine/test_architectures.py` holds both to mlx-lm's own answers.
"""

import copy
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.engine.cache.prefix import Piece
from mlx_parallm.engine.cache.rectangle import LayerCache, SlotCache, restore_prefixes
from mlx_parallm.models.mlx_lm_api import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache


class CannotBatchError(Exception):
    """A layer's cache is none that `BatchCache` knows; the message names it."""


class WindowedKVCache(KVCache):
    """A prefill cache of a sliding-window layer: keeps all positions, sees the last `window`."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        window = min(window_size or self._window, self._window)
        return super().make_mask(N, return_array=return_array, window_size=window)


class BatchCache(SlotCache):
    """
    Args:
        model: asked for its caches.
        max_rows: most sequences that decode together.
        max_positions: longest sequence.

    Raises:
        CannotBatchError: a layer needs a cache of another kind.
    """

    def __init__(self, model: nn.Module, max_rows: int, max_positions: int) -> None:
        super().__init__(0, max_rows, max_positions)
        self._model = model
        self._states: list[ArraysCache] = []
        self._model_caches = [self._served(cache) for cache in make_prompt_cache(model)]

    @property
    def rewindable(self) -> bool:
        """A longer row holds every prefix of itself; a recurrent state is only where it is."""
        return not self._states

    @property
    def unread(self) -> list[mx.array]:
        """What a step computes and its logits do not need: to be evaluated with them, or its graph stays alive."""
        return [array for state in self._states for array in state.cache if array is not None]

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(array.nbytes for array in self.unread)

    def new_prefill(self, length: int, known: SequenceOf[tuple[Piece, ...]] = ()) -> list[Any]:
        """mlx-lm's caches for a prefill of `length` positions, allocated at once (their growth copies).

        `known`: what the prefix cache holds of each row's prompt.
        """
        caches = [_prefill_cache(cache, length) for cache in make_prompt_cache(self._model)]
        if any(known):
            restore_prefixes(_leaves(caches), known)
        return caches

    def token_bytes(self) -> int:
        """Memory of one position of one row, all layers; 0 when it does not grow with the text."""
        return token_bytes(self._model, self.new_prefill(1))

    def batches(self) -> list[tuple[int, int, list[Any]]]:
        """(start, stop, caches) of each forward of the step: rows [start, stop) decode in it."""
        return [(0, self.rows, self._model_caches)]

    def begin_step(self, positions: list[int]) -> None:
        """As in SlotCache; the state of a row at position 0 is zero, whatever its last owner left."""
        super().begin_step(positions)
        first = [position == 0 for position in positions]
        fresh = mx.array(first) if any(first) else None
        for state in self._states:
            for index, array in enumerate(state.cache):
                if array is not None:
                    array = _with_rows(array, self.rows)
                    if fresh is not None:
                        empty = fresh.reshape(-1, *[1] * (array.ndim - 1))
                        array = mx.where(empty, mx.zeros_like(array), array)
                    state.cache[index] = array

    def move_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        super().move_rows(sources, targets, length)
        for state in self._states:
            for index, array in enumerate(state.cache):
                if array is not None:
                    array = _with_rows(array, max(*sources, *targets) + 1)
                    array[mx.array(targets)] = array[mx.array(sources)]
                    state.cache[index] = array

    def write_prefixes(self, prefill: SequenceOf[Any], sources: tuple[int, ...], first_row: int, length: int) -> None:
        computed = list(_leaves(prefill))
        kept = [cache for cache in computed if isinstance(cache, KVCache)]
        if kept:
            super().write_prefixes(kept, sources, first_row, length)
        states = [cache for cache in computed if isinstance(cache, ArraysCache)]
        stop = first_row + len(sources)
        self.reserve(stop, length + 1)
        for state, of_prefill in zip(self._states, states, strict=True):
            for index, array in enumerate(of_prefill.cache):
                if array is not None:
                    rows = array[mx.array(sources)]
                    present = state.cache[index]
                    present = mx.zeros((stop, *rows.shape[1:]), rows.dtype) if present is None else present
                    present = _with_rows(present, max(stop, present.shape[0]))
                    present[first_row:stop] = rows
                    state.cache[index] = present

    def clear(self) -> None:
        super().clear()
        for state in self._states:
            state.cache = [None] * len(state.cache)

    def check_integrity(self, cached: list[int]) -> None:
        super().check_integrity(cached)
        rows = {array.shape[0] for array in self.unread}
        assert len(rows) <= 1, f"states differ: {rows} rows"

    def _served(self, cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(self._served(inner) for inner in cache.caches))
        if type(cache) is ArraysCache:
            self._states.append(cache)
            return cache
        if type(cache) is KVCache or (type(cache) is RotatingKVCache and not cache.keep):
            self.layers.append(LayerCache(self, window=getattr(cache, "max_size", None)))
            return self.layers[-1]
        raise CannotBatchError(f"a layer needs {type(cache).__name__}")


class RowCaches:
    """mlx-lm's own caches, one set a row. `rows` of the step being built decode one after the other."""

    rewindable = False

    def __init__(self, model: nn.Module, max_positions: int) -> None:
        self._model = model
        self._rows: list[list[Any]] = []
        self.rows = 0
        self.position_capacity = max_positions

    @property
    def unread(self) -> list[mx.array]:
        return [array for row in self._rows[: self.rows] for array in arrays_of(row)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for row in self._rows for array in arrays_of(row))

    def new_prefill(self, length: int, known: SequenceOf[tuple[Piece, ...]] = ()) -> list[Any]:
        return list(make_prompt_cache(self._model))

    def token_bytes(self) -> int:
        return token_bytes(self._model, self.new_prefill(1))

    def batches(self) -> list[tuple[int, int, list[Any]]]:
        return [(row, row + 1, caches) for row, caches in enumerate(self._rows[: self.rows])]

    def begin_step(self, positions: list[int]) -> None:
        self.rows = len(positions)
        self._reach(self.rows)
        for row, position in enumerate(positions):
            if position == 0:
                self._rows[row] = self.new_prefill(0)

    def move_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        self._reach(max(*sources, *targets) + 1)
        for target, caches in zip(targets, [self._rows[source] for source in sources], strict=True):
            self._rows[target] = caches

    def write_prefixes(self, prefill: SequenceOf[Any], sources: tuple[int, ...], first_row: int, length: int) -> None:
        assert set(sources) == {0}, "prompts are computed one at a time"
        self._reach(first_row + len(sources))
        for row in range(first_row, first_row + len(sources)):
            self._rows[row] = copy.deepcopy(list(prefill))  # the arrays are shared until one row writes

    def reserve(self, rows: int, positions: int, max_tokens: int | None = None) -> None:
        """Nothing: each row grows by itself."""

    def read(self, row: int, start: int, stop: int) -> list[mx.array]:
        raise NotImplementedError("a row that is not rewindable has no prefixes")

    def scrub_row(self, row: int) -> None:
        """Nothing: no row reads another's cache, and the next owner brings its own."""

    def shrink_to(self, cached: list[int]) -> None:
        del self._rows[len(cached) :]

    def clear(self) -> None:
        self._rows, self.rows = [], 0

    def check_integrity(self, cached: list[int]) -> None:
        assert len(cached) <= len(self._rows), f"{len(cached)} rows, caches of {len(self._rows)}"

    def _reach(self, rows: int) -> None:
        while len(self._rows) < rows:
            self._rows.append(self.new_prefill(0))


def arrays_of(caches: Iterable[Any]) -> list[mx.array]:
    """Every array that mlx-lm caches hold, to be evaluated."""
    return [array for _, array in tree_flatten([cache.state for cache in caches]) if isinstance(array, mx.array)]


def token_bytes(model: nn.Module, caches: list[Any]) -> int:
    """Bytes of one token's keys and values, by the shapes [1, H, T, D] that a forward gives to fresh caches."""
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    growing = [cache for cache in _leaves(caches) if not isinstance(cache, ArraysCache)]
    return sum(array.nbytes // array.shape[2] for array in arrays_of(growing) if array.ndim == 4)


def _prefill_cache(cache: Any, length: int) -> Any:
    if type(cache) is CacheList:
        return CacheList(*(_prefill_cache(inner, length) for inner in cache.caches))
    if type(cache) is RotatingKVCache:
        cache = WindowedKVCache(cache.max_size)
    if isinstance(cache, KVCache):
        cache.step = length
    return cache


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _with_rows(array: mx.array, rows: int) -> mx.array:
    """Cuts rows off, or appends zeros."""
    missing = rows - array.shape[0]
    if missing > 0:
        return mx.concatenate([array, mx.zeros((missing, *array.shape[1:]), array.dtype)])
    return array[:rows] if missing < 0 else array

"""Recurrent states of the running rows beside keys and values by tokens: one small state a row, in
the batch's order.

A state belongs to a `Row` and not to a number, so rows that move cost nothing; when the batch's
order changes, the arrays are gathered once.
"""

from collections.abc import Sequence as SequenceOf

import mlx.core as mx

from mlx_parallm.engine.cache.size_classes import Row
from mlx_parallm.models.mlx_lm_api import ArraysCache


class RowStates:
    """`caches`: the recurrent layers' own, which the model reads and writes; arrays [rows, …] of
    `_owners`."""

    def __init__(self) -> None:
        self.caches: list[ArraysCache] = []
        self._owners: list[Row] = []

    @property
    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.cache if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def begin_step(self, rows: list[Row], positions: list[int]) -> None:
        """Puts the states in the order of `rows`; one whose row begins (position 0, or new) is
        zero."""
        if not self.caches:
            return
        place = {id(row): index for index, row in enumerate(self._owners)}
        count = len(self._owners)
        index = [
            place.get(id(row), count) if position else count
            for row, position in zip(rows, positions, strict=True)
        ]
        if index != list(range(count)):
            chosen = mx.array(index, dtype=mx.int32)
            for cache in self.caches:
                cache.cache = [
                    None if array is None else mx.take(with_rows(array, count + 1), chosen, axis=0)
                    for array in cache.cache
                ]
        self._owners = list(rows)

    def write(
        self, computed: SequenceOf[ArraysCache], sources: list[int], rows: SequenceOf[Row]
    ) -> None:
        """Adds rows, whose states are those of rows `sources` of a prefill."""
        if not self.caches:
            return
        index, count = mx.array(sources, dtype=mx.int32), len(self._owners)
        for cache, of_prefill in zip(self.caches, computed, strict=True):
            for place, array in enumerate(of_prefill.cache):
                held = cache.cache[place]
                if array is not None:
                    added = mx.take(array, index, axis=0)
                    before = (
                        mx.zeros((count, *added.shape[1:]), added.dtype) if held is None else held
                    )
                    cache.cache[place] = mx.concatenate([before, added]) if count else added
                elif held is not None:
                    cache.cache[place] = with_rows(held, count + len(sources))
        self._owners += rows

    def read(self, row: Row) -> list[mx.array | None]:
        """Copies of a row's states, [1, …] each."""
        index = mx.array(
            [next(i for i, owner in enumerate(self._owners) if owner is row)], dtype=mx.int32
        )
        return [
            None if array is None else array[index]
            for cache in self.caches
            for array in cache.cache
        ]

    def clear(self) -> None:
        self._owners = []
        for cache in self.caches:
            cache.cache = [None] * len(cache.cache)

    def check(self) -> None:
        rows = {array.shape[0] for array in self.arrays}
        assert rows <= {len(self._owners)}, f"states of {rows} rows, {len(self._owners)} owners"


def with_rows(array: mx.array, rows: int) -> mx.array:
    """Cuts rows off, or appends zeros."""
    missing = rows - array.shape[0]
    if missing > 0:
        return mx.concatenate([array, mx.zeros((missing, *array.shape[1:]), array.dtype)])
    return array[:rows] if missing < 0 else array

"""Keys and values of the running sequences: one preallocated array per layer, one row per sequence, right-padded.

`SlotCache` owns the rows, `LayerCache` is one layer's face in mlx-lm's cache protocol, so unmodified mlx-lm models run:
`model(tokens, cache=slots.layers)`. Rows are dense in [0, n). A decode step writes each row at its own position with a
scatter that MLX carries out in place (the array has no other owner; measured: peak memory does not move, 0.1 ms a
layer). A finished row is overwritten by the last one; an admission writes one row's prefix; nothing else is copied.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.mlx_lm_api import make_prompt_cache

POSITION_BLOCK = 32  # attention reads up to a multiple of this: few shapes, little padding
FIRST_CAPACITY = 128  # positions of a fresh cache; doubles up to DOUBLING_LIMIT, then grows by that much
DOUBLING_LIMIT = 2048


class LayerCache:
    """One layer's rows. `keys` [R, H, C, Dk] and `values` [R, H, C, Dv]; R rows and C positions of capacity."""

    def __init__(self, slots: "SlotCache") -> None:
        self._slots = slots
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """[n] int32: where each row's next token goes; rope takes it per row."""
        return self._slots.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes one token per row ([n, H, 1, D] each); returns views [n, H, T, D] of the rows' first T positions."""
        slots = self._slots
        if self.keys is None or self.values is None:
            self.keys, self.values = slots.allocate(keys), slots.allocate(values)
        self.keys[slots.indices, :, slots.positions] = keys[:, :, 0]
        self.values[slots.indices, :, slots.positions] = values[:, :, 0]
        return self.keys[: slots.rows, :, : slots.span], self.values[: slots.rows, :, : slots.span]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """[n, 1, 1, T] bool; with a window only the last `window_size` positions of each row."""
        return self._slots.mask(window_size)

    @property
    def state(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return False


class SlotCache:
    """
    Args:
        num_layers: entries of the model's cache list.
        max_rows: most sequences that decode together.
        max_positions: longest sequence.
    """

    def __init__(self, num_layers: int, max_rows: int, max_positions: int) -> None:
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self._max_rows = max_rows
        self._max_positions = max_positions
        self.row_capacity = 0
        self.position_capacity = 0
        self.rows = 0  # of the step being built
        self.span = 0  # T: positions that its attention reads
        self.positions = mx.zeros((0,), dtype=mx.int32)
        self.indices = mx.zeros((0,), dtype=mx.int32)
        self._masks: dict[int | None, mx.array] = {}

    @property
    def state(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.state]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def reserve(self, rows: int, positions: int) -> None:
        """Makes room for `rows` rows of `positions` tokens; growing copies the cache, which is rare by doubling."""
        if rows <= self.row_capacity and positions <= self.position_capacity:
            return
        assert rows <= self._max_rows and positions <= self._max_positions, f"{rows} rows of {positions} positions"
        self.row_capacity = max(self.row_capacity, min(self._max_rows, 1 << (rows - 1).bit_length()))
        while self.position_capacity < positions:
            grown = min(max(2 * self.position_capacity, FIRST_CAPACITY), self.position_capacity + DOUBLING_LIMIT)
            self.position_capacity = min(grown, self._max_positions)
        for layer in self.layers:
            # Layer by layer, so that old and new of one layer only exist at the same time.
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = self._grown(layer.keys), self._grown(layer.values)
                mx.eval(layer.keys, layer.values)

    def shrink_to(self, cached: list[int]) -> None:
        """Gives back memory when rows of these token counts need less than a quarter; row i has cached[i] and stays."""
        wanted_rows = max(2 * len(cached), 1)
        wanted_positions = max(2 * (max(cached, default=0) + 1), FIRST_CAPACITY)
        if self.row_capacity * self.position_capacity < 4 * wanted_rows * wanted_positions:
            return
        self.row_capacity = min(self.row_capacity, wanted_rows)
        self.position_capacity = min(self.position_capacity, wanted_positions)
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = self._cut(layer.keys), self._cut(layer.values)
                mx.eval(layer.keys, layer.values)

    def begin_step(self, positions: list[int]) -> None:
        """Prepares a decode step: row i writes at positions[i]. All layers share these arrays."""
        longest = max(positions) + 1
        self.reserve(len(positions), longest)
        self.rows = len(positions)
        self.span = min(self.position_capacity, -(-longest // POSITION_BLOCK) * POSITION_BLOCK)
        self.positions = mx.array(positions, dtype=mx.int32)
        if self.indices.shape[0] != self.rows:
            self.indices = mx.arange(self.rows, dtype=mx.int32)
        self._masks = {}

    def mask(self, window_size: int | None) -> mx.array:
        if window_size not in self._masks:
            columns = mx.arange(self.span, dtype=mx.int32)[None]
            last = self.positions[:, None]
            seen = columns <= last
            if window_size is not None:
                seen = seen & (columns > last - window_size)
            self._masks[window_size] = seen[:, None, None, :]
        return self._masks[window_size]

    def move_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first `length` positions of rows onto other rows. No row may be source and target at once."""
        assert max(sources) < self.row_capacity, "MLX would read beyond the array"
        self.reserve(max(targets) + 1, length)
        index = mx.array(sources, dtype=mx.int32)
        rows = [mx.take(array[:, :, :length], index, axis=0) for array in self.state]
        mx.eval(rows)  # a pending reader of the cache would make the write below copy all of it
        for layer, (keys, values) in zip(self.layers, zip(rows[::2], rows[1::2], strict=True), strict=True):
            self._write(layer, keys, values, targets, length)

    def write_prefixes(self, prefill: SequenceOf[Any], sources: tuple[int, ...], first_row: int, length: int) -> None:
        """Gives rows first_row, first_row + 1, … the first `length` positions of rows `sources` of a prefill cache."""
        self.reserve(first_row + len(sources), length + 1)
        index = None if sources == tuple(range(prefill[0].keys.shape[0])) else mx.array(sources, dtype=mx.int32)
        targets = list(range(first_row, first_row + len(sources)))
        for layer, computed in zip(self.layers, prefill, strict=True):
            keys, values = computed.keys[:, :, :length], computed.values[:, :, :length]
            if index is not None:
                keys, values = mx.take(keys, index, axis=0), mx.take(values, index, axis=0)
            self._write(layer, keys, values, targets, length)

    def scrub_row(self, row: int) -> None:
        """Zeroes a row that may hold NaN: masked positions weigh 0, and 0 × NaN is NaN for the row's next owner."""
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[row], layer.values[row] = 0, 0
        mx.eval(self.state)

    def clear(self) -> None:
        """Gives all memory back."""
        for layer in self.layers:
            layer.keys = layer.values = None
        self.row_capacity = self.position_capacity = 0
        self._masks = {}

    def allocate(self, like: mx.array) -> mx.array:
        """Zeros of the present capacity for tokens of shape [n, H, 1, D]."""
        _, heads, _, width = like.shape
        return mx.zeros((self.row_capacity, heads, self.position_capacity, width), dtype=like.dtype)

    def check_integrity(self, cached: list[int]) -> None:
        """Raises AssertionError when the arrays do not fit the rows' token counts `cached`. Cheap; for idle times."""
        assert len(cached) <= self.row_capacity or not cached, f"{len(cached)} rows, capacity {self.row_capacity}"
        assert all(0 <= count <= self.position_capacity for count in cached), f"{cached}: {self.position_capacity}"
        shapes = {array.shape[0::2] for layer in self.layers for array in layer.state}
        assert all(shape == (self.row_capacity, self.position_capacity) for shape in shapes), f"layers differ: {shapes}"

    def _grown(self, array: mx.array) -> mx.array:
        rows, _, positions, _ = array.shape
        grown = self.allocate(array)
        grown[:rows, :, :positions] = array
        return grown

    def _cut(self, array: mx.array) -> mx.array:
        return mx.contiguous(array[: self.row_capacity, :, : self.position_capacity])

    def _write(self, layer: LayerCache, keys: mx.array, values: mx.array, targets: list[int], length: int) -> None:
        if layer.keys is None or layer.values is None:
            layer.keys, layer.values = self.allocate(keys), self.allocate(values)
        first = targets[0]
        if targets == list(range(first, first + len(targets))):  # a slice is 4 times cheaper than a scatter
            layer.keys[first : first + len(targets), :, :length] = keys
            layer.values[first : first + len(targets), :, :length] = values
        else:
            index = mx.array(targets, dtype=mx.int32)
            layer.keys[index, :, :length] = keys
            layer.values[index, :, :length] = values


def new_prefill_cache(model: nn.Module, length: int) -> list[Any]:
    """mlx-lm's own caches for a prefill of `length` positions, allocated at once (their growth copies)."""
    caches = make_prompt_cache(model)
    for cache in caches:
        cache.step = length
    return list(caches)

"""Keys and values of the running sequences: one preallocated array per layer, one row per sequence,
right-padded.

`SlotCache` owns the rows, `LayerCache` is one layer's face in mlx-lm's cache protocol, so
unmodified mlx-lm models run: `model(tokens, cache=slots.layers)`. Rows are dense in [0, n). A
decode step writes each row at its own position with a scatter that MLX carries out in place (the
array has no other owner; measured: peak memory does not move, 0.1 ms a layer). A finished row is
overwritten by the last one; an admission writes one row's prefix; nothing else is copied.
"""

from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_parallm.engine.cache.sharing import PromptRows, rows_of
from mlx_parallm.engine.cache.size_classes import head_places
from mlx_parallm.models.sums import COPY, evaluated

POSITION_BLOCK = 32  # attention reads up to a multiple of this: few shapes, little padding
# positions of a fresh cache; doubles up to DOUBLING_LIMIT, then grows by that much
FIRST_CAPACITY = 128
DOUBLING_LIMIT = 2048
MOVE_BLOCK = 32  # moved rows are copied up to a multiple of this many positions


class LayerCache:
    """One layer's rows. `keys` [R, H, C, Dk] and `values` [R, H, C, Dv]; R rows and C positions
    of capacity. With a `window` each row sees the last `window` positions of itself; all of them
    are kept."""

    def __init__(self, slots: "SlotCache", window: int | None = None) -> None:
        self._slots = slots
        self._window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """[n] int32: if each row's next token goes; rope takes it per row."""
        return self._slots.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes one token per row ([n, H, 1, D] each); returns views [n, H, T, D] of the rows'
        first T positions."""
        slots = self._slots
        if self.keys is None or self.values is None:
            self.keys, self.values = slots.allocate(keys), slots.allocate(values)
        if slots.same_position is None:
            places = slots.places(keys.shape[1])
            self.keys[places] = keys[:, :, 0]
            self.values[places] = values[:, :, 0]
        else:
            rows, position = slots.rows, slots.same_position
            self.keys[:rows, :, position : position + 1] = keys
            self.values[:rows, :, position : position + 1] = values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return this step's keys and values, for layers that share another layer's."""
        assert self.keys is not None and self.values is not None
        rows, span = self._slots.rows, self._slots.span
        return self.keys[:rows, :, :span], self.values[:rows, :, :span]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """[n, 1, …, T] bool; with a window only the last `window_size` positions of each row.
        None: all are seen."""
        window = min((window for window in (window_size, self._window) if window), default=None)
        slots = self._slots
        if (
            slots.same_position is not None
            and slots.span <= (window or slots.span)
            and not return_array
        ):
            return None
        return slots.mask(window)

    @property
    def state(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)


class SlotCache:
    """
    Args:
        num_layers: entries of the model's cache list.
        max_rows: most sequences that decode together.
        max_positions: longest sequence.
        mask_axes: how many axes a mask has: all but the first and the last have length 1.
    """

    def __init__(
        self, num_layers: int, max_rows: int, max_positions: int, *, mask_axes: int = 4
    ) -> None:
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self._max_rows = max_rows
        self._max_positions = max_positions
        self._mask_axes = mask_axes
        self.row_capacity = 0
        self.position_capacity = 0
        self.rows = 0  # rows of the step being built
        self.span = 0  # T: positions that its attention reads
        self.positions = mx.zeros((0,), dtype=mx.int32)
        # for all rows at once: a slice is written 5 times faster than a scatter, no mask
        self.same_position: int | None = None
        self._indices = mx.zeros((0, 1), dtype=mx.int32)
        self._position_column = self._indices  # index of `positions`
        self._head_places: dict[int, mx.array] = {}
        self._masks: dict[int | None, mx.array] = {}

    @property
    def state(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.state]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def reserve(self, cached: SequenceOf[int], max_tokens: int | None = None) -> None:
        """Makes room for all rows that are in use, of cached[i] + 1 tokens."""
        self.make_room(len(cached), max(cached) + 1, max_tokens)

    def make_room(self, rows: int, positions: int, max_tokens: int | None = None) -> None:
        """Makes room for `rows` rows, which are all that are in use, of `positions` tokens.

        Growing copies the cache, layer by layer, and is rare by doubling. rows × positions stay
        within `max_tokens`, unless `rows` and `positions` need more: then nothing is allocated
        ahead, and the excess is given back.
        """
        assert rows <= self._max_rows and positions <= self._max_positions, (
            f"{rows} rows of {positions} positions"
        )
        row_capacity, position_capacity = self.row_capacity, self.position_capacity
        if rows > row_capacity:
            row_capacity = min(self._max_rows, 1 << (rows - 1).bit_length())
        while position_capacity < positions:
            grown = min(
                max(2 * position_capacity, FIRST_CAPACITY), position_capacity + DOUBLING_LIMIT
            )
            position_capacity = min(grown, self._max_positions)
        if max_tokens is not None and row_capacity * position_capacity > max_tokens:
            row_capacity = max(rows, min(row_capacity, max_tokens // max(positions, 1)))
            position_capacity = max(
                positions, min(position_capacity, max_tokens // max(row_capacity, 1))
            )
        if (row_capacity, position_capacity) != (self.row_capacity, self.position_capacity):
            self._resize(row_capacity, position_capacity)

    def shrink_to(self, cached: list[int]) -> None:
        """Gives back memory when rows of these token counts need less than a quarter; row i has
        cached[i] and stays."""
        wanted_rows = max(2 * len(cached), 1)
        wanted_positions = max(2 * (max(cached, default=0) + 1), FIRST_CAPACITY)
        if self.row_capacity * self.position_capacity < 4 * wanted_rows * wanted_positions:
            return
        self._resize(
            min(self.row_capacity, wanted_rows), min(self.position_capacity, wanted_positions)
        )

    def begin_step(self, positions: list[int]) -> None:
        """Prepares a decode step: row i writes at positions[i]. All layers share these arrays."""
        longest = max(positions) + 1
        self.make_room(len(positions), longest)
        self.rows = len(positions)
        self.positions = mx.array(positions, dtype=mx.int32)
        self.same_position = positions[0] if min(positions) == max(positions) else None
        blocks = min(self.position_capacity, -(-longest // POSITION_BLOCK) * POSITION_BLOCK)
        self.span = blocks if self.same_position is None else longest
        self._position_column = self.positions[:, None]
        if self._indices.shape[0] != self.rows:
            self._indices = mx.arange(self.rows, dtype=mx.int32)[:, None]
        self._masks = {}

    def places(self, heads: int) -> tuple[mx.array, mx.array, mx.array]:
        """Positions of the step's tokens, shared by all layers: rows [n, 1], heads [1, heads],
        positions [n, 1]. With a slice in a place of an array each layer would make its own."""
        of_heads = head_places(heads, self._head_places)
        return self._indices, of_heads, self._position_column

    def mask(self, window_size: int | None) -> mx.array:
        if window_size not in self._masks:
            columns = mx.arange(self.span, dtype=mx.int32)[None]
            last = self.positions[:, None]
            seen = columns <= last
            if window_size is not None:
                seen = seen & (columns > last - window_size)
            self._masks[window_size] = seen.reshape(
                self.rows, *[1] * (self._mask_axes - 2), self.span
            )
        return self._masks[window_size]

    def move_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        assert max(*sources, *targets) < self.row_capacity and length <= self.position_capacity, (
            "beyond the array"
        )
        length = min(-(-length // MOVE_BLOCK) * MOVE_BLOCK, self.position_capacity)
        index = mx.array(sources, dtype=mx.int32)
        # evaluated: a pending reader of the cache would make the write below copy all of it
        rows = evaluated(
            lambda: [mx.take(array[:, :, :length], index, axis=0) for array in self.state], COPY
        )
        for layer, (keys, values) in zip(
            self.layers, zip(rows[::2], rows[1::2], strict=True), strict=True
        ):
            self._write(layer, keys, values, targets, length)

    def write_prefixes(
        self, prefill: SequenceOf[Any], prompts: SequenceOf[PromptRows], first_row: int
    ) -> None:
        sources, length = rows_of(prompts), max(prompt.length for prompt in prompts)
        self.make_room(first_row + len(sources), length + 1)
        index = (
            None
            if sources == list(range(prefill[0].keys.shape[0]))
            else mx.array(sources, dtype=mx.int32)
        )
        targets = list(range(first_row, first_row + len(sources)))
        for layer, computed in zip(self.layers, prefill, strict=True):
            keys, values = computed.keys[:, :, :length], computed.values[:, :, :length]
            if index is not None:
                keys, values = mx.take(keys, index, axis=0), mx.take(values, index, axis=0)
            self._write(layer, keys, values, targets, length)

    def read(self, row: int, start: int, stop: int) -> list[mx.array]:
        """Keys and values by layer, [1, H, stop - start, D].

        A copy by index: a slice may be a view, and would keep all of the cache alive.
        """
        assert row < self.row_capacity and stop <= self.position_capacity, (
            "MLX would read beyond the array"
        )
        index = mx.array([row], dtype=mx.int32)
        return [mx.take(array[:, :, start:stop], index, axis=0) for array in self.state]

    def scrub_row(self, row: int) -> None:
        """Zeroes a row that may hold NaN: masked positions weigh 0, and 0 × NaN is NaN for the
        row's next owner."""
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[row], layer.values[row] = 0, 0
        mx.eval(self.state)

    def clear(self) -> None:
        for layer in self.layers:
            layer.keys = layer.values = None
        self.row_capacity = self.position_capacity = 0
        self._masks = {}

    def allocate(self, like: mx.array) -> mx.array:
        """Zeros of the present capacity for tokens of shape [n, H, 1, D]."""
        _, heads, _, width = like.shape
        return mx.zeros((self.row_capacity, heads, self.position_capacity, width), dtype=like.dtype)

    def check_integrity(self, cached: list[int]) -> None:
        assert len(cached) <= self.row_capacity or not cached, (
            f"{len(cached)} rows, capacity {self.row_capacity}"
        )
        assert all(0 <= count <= self.position_capacity for count in cached), (
            f"{cached}: {self.position_capacity}"
        )
        shapes = {array.shape[0::2] for layer in self.layers for array in layer.state}
        assert all(shape == (self.row_capacity, self.position_capacity) for shape in shapes), (
            f"layers differ: {shapes}"
        )

    def _resize(self, row_capacity: int, position_capacity: int) -> None:
        rows, positions = (
            min(self.row_capacity, row_capacity),
            min(self.position_capacity, position_capacity),
        )
        self.row_capacity, self.position_capacity = row_capacity, position_capacity
        for layer in self.layers:
            # Layer by layer, so that old and new of one layer only exist at the same time.
            if layer.keys is not None and layer.values is not None:
                pair = (layer.keys, layer.values)
                resized = partial(self._resized, pair, rows, positions)
                layer.keys, layer.values = evaluated(resized, COPY)

    def _resized(self, arrays: SequenceOf[mx.array], rows: int, positions: int) -> list[mx.array]:
        resized = [self.allocate(array) for array in arrays]
        for larger, array in zip(resized, arrays, strict=True):
            larger[:rows, :, :positions] = array[:rows, :, :positions]
        return resized

    def _write(
        self, layer: LayerCache, keys: mx.array, values: mx.array, targets: list[int], length: int
    ) -> None:
        if layer.keys is None or layer.values is None:
            layer.keys, layer.values = self.allocate(keys), self.allocate(values)
        first = targets[0]
        # a slice is 4 times cheaper than a scatter
        if targets == list(range(first, first + len(targets))):
            layer.keys[first : first + len(targets), :, :length] = keys
            layer.values[first : first + len(targets), :, :length] = values
        else:
            index = mx.array(targets, dtype=mx.int32)
            layer.keys[index, :, :length] = keys
            layer.values[index, :, :length] = values

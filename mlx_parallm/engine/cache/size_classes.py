"""Arrays of keys and values for the rows of one size class: a small rectangle, dense in [0, n).

A row that outgrows its class moves to the next one (a copy of the row, once in a quarter of its
length), a row that leaves is overwritten by the last one, and nothing else is copied.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.engine.cache.kv_format import KVFormat
from mlx_parallm.engine.cache.prefix import PrefixChunk
from mlx_parallm.models.attention import takes_rows
from mlx_parallm.models.attention_parts import NOTHING
from mlx_parallm.models.sums import COPY, evaluated

SLACK = 8  # a pool that grows has room for an eighth more rows
READ_STEP = 32  # attention reads up to a multiple of this: few shapes, little padding


def head_places(heads: int, made: dict[int, mx.array]) -> mx.array:
    """Return [1, heads] int32: 0, 1, …, one array for each number of heads."""
    if heads not in made:
        made[heads] = mx.arange(heads, dtype=mx.int32)[None]
    return made[heads]


@dataclass(slots=True, eq=False)
class Row:
    """Places of a running sequence's positions: those of `chunks` in segments, [offset, …) in
    `pool`."""

    chunks: tuple[PrefixChunk, ...] = ()
    offset: int = 0
    pool: "Pool | None" = None
    slot: int = -1


class Pool:
    """
    Args:
        layers: how many layers keep keys and values.
        size: positions of each row.
        shares: whether its rows read segments too.
        kv_format: format of keys and values.
    """

    def __init__(self, layers: int, size: int, *, shares: bool, kv_format: KVFormat) -> None:
        self.size, self.shares, self.kv_format = size, shares, kv_format
        self.rows: list[Row] = []
        self.capacity = 0  # rows
        # [capacity, H, size, ·] each, once written
        self.layers: list[list[mx.array]] = [[] for _ in range(layers)]
        self.start = 0  # the first of its rows in the batch
        self.span = 0  # positions that the step's attention reads
        # the position that all rows write; a slice is 5 times as fast as a scatter
        self.same: int | None = None
        # if each row writes, [n, 1] int32 each; the heads' places [1, H] by their number. All
        # layers share them, and none has its own Arange or AsType.
        self.positions = self.slots = mx.zeros((0, 1), dtype=mx.int32)
        self.head_places: dict[int, mx.array] = {}
        self.compiled = False  # whether the step's attention is `attention_of_rows`
        # [n or 1, 1, 1, span] bool: visible positions of each row; None: all
        self.mask: mx.array | None = None
        self.bias: mx.array | None = None  # the mask for `attention_of_rows`

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def heads(self, layer: int) -> int:
        """H of a layer: heads of keys and values."""
        return int(self.layers[layer][0].shape[1])

    @property
    def state(self) -> list[mx.array]:
        return [array for arrays in self.layers for array in arrays]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def begin_step(self, positions: list[int]) -> None:
        """Row i writes its own position positions[i]."""
        longest = max(positions)
        self.same = longest if longest == min(positions) else None
        plain = not self.shares and self.kv_format.bits is None
        self.compiled = plain and self._is_float32 and takes_rows(len(positions), longest + 1)
        # Each shape is compiled apart, so there are few shapes.
        exact = self.same is not None and plain and not self.compiled
        self.span = (
            longest + 1 if exact else min(self.size, -(-(longest + 1) // READ_STEP) * READ_STEP)
        )
        if self.same is None:
            self.positions = mx.array(positions, dtype=mx.int32)[:, None]
            if self.slots.shape[0] != len(positions):
                self.slots = mx.arange(len(positions), dtype=mx.int32)[:, None]
        self.mask = None
        if self.same is not None and self.span > longest + 1:
            self.mask = (mx.arange(self.span) <= longest)[None, None, None]
        elif self.same is None:
            self.mask = (mx.arange(self.span, dtype=mx.int32)[None] <= self.positions)[
                :, None, None
            ]
        self.bias = (
            mx.where(self.mask, 0.0, NOTHING) if self.compiled and self.mask is not None else None
        )

    def write_step(self, layer: int, arrays: SequenceOf[mx.array]) -> None:
        """Writes one token a row: [n, H, 1, ·] each."""
        rows, position = len(self.rows), self.same
        for stored, array in zip(self._of_layer(layer, arrays), arrays, strict=True):
            if position is None:
                heads = head_places(array.shape[1], self.head_places)
                stored[self.slots, heads, self.positions] = array[:, :, 0]
            else:
                stored[:rows, :, position : position + 1] = array

    def read_step(self, layer: int) -> list[mx.array]:
        """Views [n, H, span, ·] of the layer's arrays."""
        return [array[: len(self.rows), :, : self.span] for array in self.layers[layer]]

    def write(self, layer: int, slot: int, arrays: SequenceOf[mx.array]) -> None:
        """Gives rows slot, slot + 1, … their first positions, [k, H, T, ·]."""
        stop, length = slot + arrays[0].shape[0], arrays[0].shape[2]
        for stored, array in zip(self._of_layer(layer, arrays), arrays, strict=True):
            stored[slot:stop, :, :length] = array

    def add(self, rows: SequenceOf[Row]) -> None:
        for row in rows:
            row.pool, row.slot = self, len(self.rows)
            self.rows.append(row)

    def read(self, slots: list[int], start: int, stop: int) -> list[mx.array]:
        """Copies of positions of some rows, keys and values by layer: a slice may be a view, and
        would keep all of the pool alive."""
        assert max(slots) < self.capacity and stop <= self.size, "MLX would read beyond the array"
        index = mx.array(slots, dtype=mx.int32)
        return [mx.take(array[:, :, start:stop], index, axis=0) for array in self.state]

    def remove(self, leaving: SequenceOf[Row]) -> None:
        """Fills the rows that leave with the last ones."""
        gone = {row.slot for row in leaving}
        left = len(self.rows) - len(gone)
        sources = [slot for slot in range(left, len(self.rows)) if slot not in gone]
        targets = sorted(slot for slot in gone if slot < left)
        if sources and self.state:
            # evaluated: a pending reader of the pool would make the write below copy all of it
            moved = evaluated(lambda: self.read(sources, 0, self.size), COPY)
            index = mx.array(targets, dtype=mx.int32)
            for array, rows in zip(self.state, moved, strict=True):
                array[index] = rows
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
            self.rows[target].slot = target
        del self.rows[left:]
        for row in leaving:
            row.pool, row.slot = None, -1

    def resize(self, capacity: int, size: int) -> None:
        """Copies the pool, layer by layer, so that old and new of one layer only exist at the
        same time."""
        if (capacity, size) == (self.capacity, self.size):
            return
        rows, positions = min(len(self.rows), capacity, self.capacity), min(self.size, size)
        self.capacity, self.size = capacity, size
        for arrays in self.layers:
            for index, array in enumerate(arrays):

                def resized(array: mx.array = array) -> list[mx.array]:
                    larger = self._empty(array)
                    larger[:rows, :, :positions] = array[:rows, :, :positions]
                    return [larger]

                [arrays[index]] = evaluated(resized, COPY)

    def scrub(self, slot: int) -> None:
        """Zeroes a row that may hold NaN: masked positions weigh 0, and 0 × NaN is NaN for the
        row's next owner."""
        for array in self.state:
            array[slot] = 0
        mx.eval(self.state)

    def check(self) -> None:
        assert all(row.pool is self and row.slot == slot for slot, row in enumerate(self.rows)), (
            "rows are mixed up"
        )
        assert len(self.rows) <= self.capacity, f"{len(self.rows)} rows, capacity {self.capacity}"
        shapes = {array.shape[0::2] for array in self.state}
        assert all(shape == (self.capacity, self.size) for shape in shapes), (
            f"layers differ: {shapes}"
        )

    @property
    def _is_float32(self) -> bool:
        return bool(self.state) and all(array.dtype == mx.float32 for array in self.state)

    def _of_layer(self, layer: int, like: SequenceOf[mx.array]) -> list[mx.array]:
        if not self.layers[layer]:
            self.layers[layer] = [self._empty(array) for array in like]
        return self.layers[layer]

    def _empty(self, like: mx.array) -> mx.array:
        _, heads, _, width = like.shape
        return mx.zeros((self.capacity, heads, self.size, width), dtype=like.dtype)

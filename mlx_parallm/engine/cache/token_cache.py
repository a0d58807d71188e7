"""Keys and values by tokens, for plain attention: own positions in size classes, shared ones
once.

A step's batch is ordered by pool (`order`), so each pool's rows are a slice of it. Projections and
feed-forwards see all rows at once; a layer's attention is one call a pool, and one matrix product a
segment for all rows that read it, merged exactly (`models/attention_parts.py`). A step of rows of
one class without segments makes the operations of `rectangle.SlotCache`, which the tests hold this
to.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.engine.cache.kv_format import AS_COMPUTED, Factor, KVFormat
from mlx_parallm.engine.cache.prefill import (
    CannotBatchError,
    leaves,
    new_caches,
    present,
    states_of,
    token_bytes,
)
from mlx_parallm.engine.cache.prefix import PrefixChunk, Segment
from mlx_parallm.engine.cache.sharing import (
    CLASS_STEP,
    FIRST_ANSWER,
    PromptRows,
    end_of,
    rows_of,
    shared_positions,
    size_class,
)
from mlx_parallm.engine.cache.size_classes import SLACK, Pool, Row
from mlx_parallm.engine.cache.states import RowStates
from mlx_parallm.models.attention import (
    RoutedKeys,
    attend_by_heads,
    attention_of_rows,
    route_attention,
)
from mlx_parallm.models.attention_parts import (
    LOG2_E,
    NOTHING,
    Partial,
    attend_partly,
    finish,
    join,
    merge,
)
from mlx_parallm.models.mlx_lm_api import ArraysCache, CacheList, KVCache, make_prompt_cache
from mlx_parallm.models.sums import COPY, evaluated

MOST_ROOM = 1.25  # rows that a pool has room for, for each one in it; above that it shrinks
SPARE_ROWS = 8  # besides, where rows are short and come and go often


@dataclass(frozen=True, slots=True, eq=False)
class SharedPart:
    """A segment and the rows whose attention merges it. `rows`: a slice, or their numbers
    [m]. `mask` [m, T] bool, if they read different lengths of it."""

    factors: list[tuple[Factor, Factor]]  # by layer: keys [H, Dk, T], values [H, T, Dv]
    rows: slice | mx.array
    count: int
    mask: mx.array | None
    repeated: dict[int, mx.array] = field(default_factory=dict)  # the mask, by repeats

    def mask_of(self, repeats: int) -> mx.array | None:
        """Return the mask [m · repeats, T] of queries that share keys, one for all layers."""
        if self.mask is not None and repeats not in self.repeated:
            self.repeated[repeats] = mx.repeat(self.mask, repeats, axis=0)
        return self.repeated.get(repeats)


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The first segment of each row, or the second, … `places` [N]: if each row of the block
    is among those of the parts, end to end; None: in this order. A row without such a segment is
    the one after the last."""

    parts: tuple[SharedPart, ...]
    places: mx.array | None
    complete: bool


class TokenLayer(RoutedKeys):
    """One layer's face in mlx-lm's cache protocol, and the keys and values that it returns."""

    def __init__(self, cache: "TokenCache", layer: int) -> None:
        self._cache, self._layer = cache, layer

    @property
    def offset(self) -> mx.array:
        """[n] int32: the position of each row's new token."""
        return self._cache.positions

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return None: `attend` has the mask of each row. Raises NotImplementedError, which the
        check at load reads."""
        if return_array or window_size is not None:
            raise NotImplementedError("its attention has its own mask")

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple["TokenLayer", "TokenLayer"]:
        """Writes one token per row, [n, H, 1, D] each."""
        pools, arrays = self._cache.step_pools, self._cache.kv_format.pack(keys, values)
        for pool in pools:
            rows = (
                arrays if len(pools) == 1 else [array[pool.start : pool.stop] for array in arrays]
            )
            pool.write_step(self._layer, rows)
        return self, self

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        if sinks is not None:
            raise NotImplementedError("its attention has sinks of its own")
        pools, first = self._cache.step_pools, self._cache.first_merged
        outputs = []
        for pool in pools:
            if not pool.shares:
                rows = queries if len(pools) == 1 else queries[pool.start : pool.stop]
                outputs.append(self._alone(pool, rows, scale))
        if first < queries.shape[0]:
            outputs.append(self._merged(queries[first:] if first else queries, scale))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def _alone(self, pool: Pool, queries: mx.array, scale: float) -> mx.array:
        """Attention of a pool's rows, which read no segment, [n, heads, 1, D]."""
        if self._cache.kv_format.bits is None:
            keys, values = pool.read_step(self._layer)
            if pool.compiled and queries.dtype == mx.float32:
                return attention_of_rows(queries, keys, values, scale, pool.bias)
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=pool.mask
            )
        count, heads, _, width = queries.shape
        grouped = queries.reshape(count, pool.heads(self._layer), -1, 1, width)
        return (
            finish(self._over_pool(pool, grouped, scale * LOG2_E))
            .astype(queries.dtype)
            .reshape(count, heads, 1, -1)
        )

    def _over_pool(self, pool: Pool, grouped: mx.array, factor: float) -> Partial:
        """Queries [n, H, repeats, 1, D] over each row's own positions."""
        arrays, mask = pool.read_step(self._layer), pool.mask
        if self._cache.kv_format.bits is None:
            factors = self._cache.kv_format.factors([array[:, :, None] for array in arrays])
            return attend_partly(grouped, *factors, None if mask is None else mask[:, None], factor)
        # A product with quantised keys reads them once for all rows of x.
        partial = attend_partly(
            grouped[:, :, :, 0], *self._cache.kv_format.factors(arrays), mask, factor
        )
        return Partial(*(array[:, :, :, None] for array in partial))

    def _merged(self, queries: mx.array, scale: float) -> mx.array:
        """Attention of the rows that read segments, [N, heads, 1, D]."""
        count, heads, _, width = queries.shape
        first, factor = self._cache.first_merged, scale * LOG2_E
        states: list[Partial] = []
        grouped = mx.array([])
        for pool in self._cache.step_pools:
            if pool.shares:
                if not states:
                    grouped = queries.reshape(count, pool.heads(self._layer), -1, 1, width)
                states.append(
                    self._over_pool(pool, grouped[pool.start - first : pool.stop - first], factor)
                )
        state = join(states)
        for level in self._cache.levels:
            state = merge(state, self._over(level, grouped[..., 0, :], factor))
        return finish(state).astype(queries.dtype).reshape(count, heads, 1, -1)

    def _over(self, level: Level, queries: mx.array, factor: float) -> Partial:
        """queries [N, H, repeats, D] over one segment each."""
        partials = []
        _, heads, repeats, width = queries.shape
        for part in level.parts:
            rows = queries[part.rows].transpose(1, 0, 2, 3).reshape(heads, -1, width)
            mask = part.mask_of(repeats)
            partial = attend_by_heads(rows, *part.factors[self._layer], mask, factor)
            shape = (heads, part.count, repeats, 1, -1)
            partials.append(
                Partial(*(array.reshape(shape).transpose(1, 0, 2, 3, 4) for array in partial))
            )
        if not level.complete:
            empty = zip(partials[0], (0.0, NOTHING, 0.0), strict=True)
            partials.append(
                Partial(*(mx.full((1, *array.shape[1:]), fill) for array, fill in empty))
            )
        whole = join(partials)
        return (
            whole
            if level.places is None
            else Partial(*(mx.take(array, level.places, axis=0) for array in whole))
        )


class TokenCache:
    """
    Args:
        model: its attention layers are routed to this cache.
        max_rows: most sequences that decode together.
        max_positions: longest sequence.
        kv_format: of rows and segments; a prefill computes in full precision, and is quantised when
            it is written here.

    Raises:
        CannotBatchError: a layer keeps anything else than keys and values of all positions, or a
            recurrent state.
    """

    layout = "tokens"
    shares, one_by_one = True, False

    def __init__(
        self, model: nn.Module, max_rows: int, max_positions: int, kv_format: KVFormat = AS_COMPUTED
    ) -> None:
        self.kv_format = kv_format
        self.layers: list[TokenLayer] = []  # the layers with keys and values
        self._states = RowStates()
        self._model_caches = [self._served(cache) for cache in make_prompt_cache(model)]
        if not self.layers:
            raise CannotBatchError("no layer keeps keys and values")
        if not route_attention(model):
            raise CannotBatchError("its attention is not mlx-lm's")
        self._model = model
        self._max_rows, self._max_positions = max_rows, max_positions
        # by whether its rows read segments, and size
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._rows: list[Row] = []
        self._arranged = False
        self.order: list[int] = []  # row numbers in batch order
        self.positions = mx.zeros((0,), dtype=mx.int32)
        self.step_pools: list[Pool] = []
        self.first_merged = 0  # in the batch: the first row that reads segments
        self.levels: list[Level] = []
        self.saved_positions = 0

    @property
    def rewindable(self) -> bool:
        return not self._states.caches

    @property
    def unread(self) -> list[mx.array]:
        """The recurrent states; attention reads all else that a step writes."""
        return self._states.arrays

    @property
    def nbytes(self) -> int:
        shared = sum(array.nbytes for segment in self._segments() for array in segment.arrays)
        return sum(pool.nbytes for pool in self._pools.values()) + shared + self._states.nbytes

    def new_prefill(
        self, length: int, prefixes: SequenceOf[tuple[PrefixChunk, ...]] = ()
    ) -> list[Any]:
        return new_caches(self._model, length, prefixes, self.kv_format)

    def token_bytes(self) -> int:
        caches = self.new_prefill(1)
        computed = token_bytes(self._model, caches)
        if self.kv_format.bits is None:
            return computed
        return sum(
            array.nbytes
            for cache in _of_keys(caches)
            for array in self.kv_format.pack(cache.keys, cache.values)
        )

    def prefill_token_bytes(self) -> int:
        return token_bytes(self._model, self.new_prefill(1))

    def batches(self) -> list[tuple[int, int, list[Any]]]:
        return [(0, len(self._rows), self._model_caches)]

    def place(self, prompts: SequenceOf[PromptRows], first_row: int) -> None:
        """Adds rows; `reserve` gives them room, `write_prefixes` their prompt."""
        assert first_row == len(self._rows), f"{first_row} is not after {len(self._rows)} rows"
        for prompt in prompts:
            offset = end_of(prompt.chunks)
            self._rows += [Row(prompt.chunks, offset) for _ in range(prompt.count)]
        self._arranged = False

    def write_prefixes(
        self, prefill: SequenceOf[Any], prompts: SequenceOf[PromptRows], first_row: int
    ) -> None:
        lengths = [prompt.length for prompt in prompts for _ in range(prompt.count)]
        states = [cache for cache in leaves(prefill) if isinstance(cache, ArraysCache)]
        self._states.write(
            states, rows_of(prompts), self._rows[first_row : first_row + len(lengths)]
        )
        prefill = _of_keys(prefill)
        self._make_room(zip(self._rows[first_row : first_row + len(lengths)], lengths, strict=True))
        row = first_row
        whole: dict[Pool, list[tuple[PromptRows, Row]]] = {}  # copied from the first position on
        for prompt in prompts:
            self._fill_segments(prefill, prompt)
            rows, row = self._rows[row : row + prompt.count], row + prompt.count
            for held in rows:
                assert held.pool is not None
                if not held.chunks:
                    whole.setdefault(held.pool, []).append((prompt, held))
                elif held.offset < prompt.length:
                    self._write(prefill, [prompt.source], held, held.offset, prompt.length)
        for pairs in whole.values():
            length = max(prompt.length for prompt, _ in pairs)
            if length:
                self._write(prefill, [prompt.source for prompt, _ in pairs], pairs[0][1], 0, length)

    def snapshot_bytes(self) -> int | None:
        if self.rewindable:
            return None
        caches = self.new_prefill(1)
        self._model(mx.zeros((1, 1), mx.int32), cache=caches)
        return sum(array.nbytes for array in present(states_of(caches)))

    def read_states(self, row: int) -> list[mx.array | None]:
        return self._states.read(self._rows[row])

    def read_prefill(self, prefill: SequenceOf[Any], start: int, stop: int) -> list[mx.array]:
        return [
            array
            for computed in _of_keys(prefill)
            for array in self._held(computed, 0, start, stop)
        ]

    def read(self, row: int, start: int, stop: int) -> list[mx.array]:
        """Arrays by layer, [1, H, stop - start, ·] each: copies, or a segment's own arrays if
        they are all."""
        held = self._rows[row]
        pieces: list[list[mx.array]] = []
        for chunk in held.chunks:
            if (
                (chunk.start, chunk.stop)
                == (start, stop)
                == (chunk.segment.start, chunk.segment.stop)
            ):
                return chunk.segment.arrays
            first, last = max(chunk.start, start), min(chunk.stop, stop)
            if first < last:
                index = mx.arange(first - chunk.start, last - chunk.start)
                pieces.append([mx.take(array, index, axis=2) for array in chunk.segment.arrays])
        if stop > held.offset:
            assert held.pool is not None
            pieces.append(
                held.pool.read([held.slot], max(start - held.offset, 0), stop - held.offset)
            )
        return [
            mx.concatenate(list(arrays), axis=2) if len(arrays) > 1 else arrays[0]
            for arrays in zip(*pieces, strict=True)
        ]

    def move_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        """Renumber rows; `targets`' old rows are gone. Copies only to keep pools
        dense."""
        self._release([self._rows[target] for target in targets])
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = self._rows[source]
            self._rows[source] = Row()
        self._arranged = False

    def truncate(self, rows: int) -> None:
        """Drops the rows from number `rows` on."""
        if rows < len(self._rows):
            self._release(self._rows[rows:])
            del self._rows[rows:]
            self._arranged = False

    def reserve(self, cached: SequenceOf[int], max_tokens: int | None = None) -> None:
        """Gives each row room for cached[i] + 1 tokens, in a pool of its class. Room of rows
        that left goes back here and not as they leave: others often take it at once, a group
        after the other."""
        self._reach(len(cached))
        if max_tokens is not None and self._room + sum(map(size_class, cached)) > max_tokens:
            self._give_back_room()  # first: the old and the new may not fit side by side
        self._make_room(zip(self._rows, cached, strict=True), max_tokens)
        self._give_back_room()
        if max_tokens is not None and self._room > max_tokens:
            for pool in self._pools.values():
                pool.resize(len(pool.rows), pool.size)
            self._drop_empty_pools(all_of_them=True)

    def begin_step(self, positions: list[int]) -> None:
        self.reserve(positions)
        if not self._arranged:
            self._arrange()
        order = self.order
        self.positions = mx.array([positions[row] for row in order], dtype=mx.int32)
        for pool in self.step_pools:
            rows = order[pool.start : pool.stop]
            pool.begin_step([positions[row] - self._rows[row].offset for row in rows])
        self._states.begin_step(
            [self._rows[row] for row in order], [positions[row] for row in order]
        )

    def scrub_row(self, row: int) -> None:
        held = self._rows[row]
        if held.pool is not None:
            held.pool.scrub(held.slot)

    def shrink_to(self, cached: list[int]) -> None:
        """Gives back the room that pools keep for rows to come."""
        if not cached:
            self.levels = []  # the last step's: unread segments
            self._states.clear()
        for pool in self._pools.values():
            if pool.capacity > 4 * max(len(pool.rows), 1):
                pool.resize(2 * len(pool.rows), pool.size)
        self._drop_empty_pools(all_of_them=True)

    def clear(self) -> None:
        self._pools, self._rows, self.step_pools, self.levels, self.order = {}, [], [], [], []
        self._arranged, self.saved_positions = False, 0
        self._states.clear()

    def check_integrity(self, cached: list[int]) -> None:
        assert len(cached) <= len(self._rows) or not cached, (
            f"{len(cached)} rows, {len(self._rows)} places"
        )
        for pool in self._pools.values():
            pool.check()
        self._states.check()
        for row, count in zip(self._rows, cached, strict=False):
            assert row.pool is None or count - row.offset <= row.pool.size, (
                f"{count} in {row.pool.size}"
            )
            assert all(chunk.segment.arrays for chunk in row.chunks), "a segment was never filled"
        assert sum(len(pool.rows) for pool in self._pools.values()) <= len(self._rows), (
            "a row was not released"
        )

    def _served(self, cache: Any) -> Any:
        """Return the cache that the model gets in place of its own."""
        if type(cache) is CacheList:
            return CacheList(*(self._served(inner) for inner in cache.caches))
        if type(cache) is ArraysCache:
            self._states.caches.append(cache)
            return cache
        if type(cache) is KVCache:
            self.layers.append(TokenLayer(self, len(self.layers)))
            return self.layers[-1]
        raise CannotBatchError(f"a layer needs {type(cache).__name__}")

    @property
    def _room(self) -> int:
        """Positions allocated."""
        held = sum(pool.capacity * pool.size for pool in self._pools.values())
        return held + shared_positions(chunk for row in self._rows for chunk in row.chunks)

    def _segments(self) -> Iterable[Segment]:
        return {id(c.segment.arrays): c.segment for row in self._rows for c in row.chunks}.values()

    def _reach(self, rows: int) -> None:
        while len(self._rows) < rows:
            self._rows.append(Row())

    def _make_room(self, cached: Iterable[tuple[Row, int]], most: int | None = None) -> None:
        """Puts rows that need it into another pool, for one token more than they hold. None gets
        more than `most` positions that it does not need."""
        moving: dict[tuple[Pool | None, tuple[bool, int]], list[Row]] = {}
        for row, count in cached:
            pool, needed = row.pool, count + 1 - row.offset
            if pool is None or needed > pool.size:
                size = FIRST_ANSWER if row.chunks and needed <= FIRST_ANSWER else size_class(needed)
                size = min(size, self._max_positions, max(needed, most or size))
                key = (bool(row.chunks), size)
                moving.setdefault((pool, key), []).append(row)
        if not moving:
            return
        self._arranged = False
        for (source, key), rows in moving.items():
            self._move(source, key, rows)
        self._drop_empty_pools()

    def _move(self, source: Pool | None, key: tuple[bool, int], rows: list[Row]) -> None:
        """Put rows into the pool of `key`, with their content in `source`."""
        target = self._pools.get(key)
        if (
            source is not None
            and len(rows) == len(source.rows)
            and (target is None or not target.rows)
        ):
            del self._pools[source.shares, source.size]
            source.resize(_rows_kept(source), key[1])
            self._pools[key] = source
            return
        if target is None:
            target = self._pools[key] = Pool(
                len(self.layers), key[1], shares=key[0], kv_format=self.kv_format
            )
        arrays: list[mx.array] = []
        if source is not None:
            before, slots = source, [row.slot for row in rows]
            arrays = evaluated(lambda: before.read(slots, 0, before.size), COPY)
            source.remove(rows)
            source.resize(_rows_kept(source), source.size)
        first = len(target.rows)
        target.add(rows)
        if len(target.rows) > target.capacity:
            slack = len(target.rows) // SLACK if first else 0  # the first to come may be all
            target.resize(min(self._max_rows, len(target.rows) + slack), target.size)
        for layer, of_layer in enumerate(self.kv_format.layers(arrays)):
            target.write(layer, first, of_layer)

    def _release(self, rows: SequenceOf[Row]) -> None:
        leaving: dict[int, list[Row]] = {}
        for row in rows:
            if row.pool is not None:
                leaving.setdefault(id(row.pool), []).append(row)
        for of_pool in leaving.values():
            pool = of_pool[0].pool
            assert pool is not None
            pool.remove(of_pool)
        self._drop_empty_pools()

    def _give_back_room(self) -> None:
        for pool in self._pools.values():
            pool.resize(_rows_kept(pool), pool.size)

    def _drop_empty_pools(self, *, all_of_them: bool = False) -> None:
        """Gives back pools without rows; not the smallest, which the next request will want."""
        empty = [
            key
            for key, pool in self._pools.items()
            if not pool.rows and (all_of_them or pool.size > CLASS_STEP)
        ]
        for key in empty:
            del self._pools[key]
        # the last step's; they hold arrays
        self.step_pools = [pool for pool in self.step_pools if pool.rows]

    def _arrange(self) -> None:
        """The order of the batch, and who reads which segment. It holds until rows come, go or
        move."""
        self._arranged = True
        number = {id(row): index for index, row in enumerate(self._rows)}
        self.step_pools = [self._pools[key] for key in sorted(self._pools) if self._pools[key].rows]
        self.order, self.first_merged = [], len(self._rows)
        for pool in self.step_pools:
            pool.start = len(self.order)
            self.order += [number[id(row)] for row in pool.rows]
            if pool.shares:
                self.first_merged = min(self.first_merged, pool.start)
        merged = [self._rows[row] for row in self.order[self.first_merged :]]
        depth = max((len(row.chunks) for row in merged), default=0)
        self.levels = [_level(merged, level, self.kv_format) for level in range(depth)]
        read = [chunk for row in merged for chunk in row.chunks]
        self.saved_positions = max(
            0, sum(chunk.stop - chunk.start for chunk in read) - shared_positions(read)
        )

    def _fill_segments(self, prefill: SequenceOf[Any], prompt: PromptRows) -> None:
        """Fill the prompt's new segment, if any, with the prefill's keys and values."""
        for chunk in prompt.chunks:
            if not chunk.segment.arrays:
                place = (prompt.source, chunk.start, chunk.stop)
                chunk.segment.arrays = [
                    array for computed in prefill for array in self._held(computed, *place)
                ]

    def _held(self, computed: Any, row: int | None, start: int, stop: int) -> list[mx.array]:
        """Positions [start, stop) of a prefill's layer in `kv_format`: of one row, which keep
        nothing else alive, or of all rows."""
        both = (computed.keys, computed.values)
        if self.kv_format.bits is None:
            return [
                array[:, :, start:stop] if row is None else _part_of(array, row, start, stop)
                for array in both
            ]
        rows = slice(None) if row is None else slice(row, row + 1)
        stored = vars(computed).get("stored_prefix", list)()
        end = min(stored[0].shape[2], stop) if stored else start
        parts = (
            [mx.take(array[rows], mx.arange(start, end), axis=2) for array in stored]
            if end > start
            else []
        )
        if (first := max(start, end)) < stop:
            packed = self.kv_format.pack(*(array[rows, :, first:stop] for array in both))
            parts = (
                [mx.concatenate(list(pair), axis=2) for pair in zip(parts, packed, strict=True)]
                if parts
                else packed
            )
        return parts

    def _write(
        self, prefill: SequenceOf[Any], sources: list[int], first: Row, start: int, stop: int
    ) -> None:
        """Copies positions [start, stop) of rows `sources` of the prefill into `first` and the
        rows after it, which are new too."""
        assert first.pool is not None
        index = (
            None
            if sources == list(range(prefill[0].keys.shape[0]))
            else mx.array(sources, dtype=mx.int32)
        )
        for layer, computed in enumerate(prefill):
            arrays = self._held(computed, None, start, stop)
            if index is not None:
                arrays = [mx.take(array, index, axis=0) for array in arrays]
            first.pool.write(layer, first.slot, arrays)


def _rows_kept(pool: Pool) -> int:
    """How many rows the pool keeps room for: all that it has room for, or fewer if that is far
    more than it holds."""
    spare = SPARE_ROWS if pool.size <= CLASS_STEP else 0
    enough = pool.capacity <= MOST_ROOM * len(pool.rows) + spare
    return pool.capacity if enough else len(pool.rows) + spare // 2


def _of_keys(caches: Iterable[Any]) -> list[Any]:
    """The caches of a prefill that hold keys and values."""
    return [cache for cache in leaves(caches) if not isinstance(cache, ArraysCache)]


def _part_of(array: mx.array, row: int, start: int, stop: int) -> mx.array:
    """[1, H, stop - start, D]: the array itself if that is all of it, else a copy."""
    if array.shape[0] == 1 and (start, stop) == (0, array.shape[2]):
        return array
    return mx.take(array[row : row + 1], mx.arange(start, stop), axis=2)


def _level(rows: SequenceOf[Row], level: int, kv_format: KVFormat) -> Level:
    """Group the rows by the segment that they read at this level (0 is their first)."""
    readers: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if len(row.chunks) > level:
            readers.setdefault(id(row.chunks[level].segment.arrays), []).append(index)
    parts, placed = [], []
    for indices in readers.values():
        chunks = [rows[index].chunks[level] for index in indices]
        lengths = np.array([chunk.stop - chunk.start for chunk in chunks], np.int32)
        longest, arrays = int(lengths.max()), chunks[0].segment.arrays
        if longest < arrays[0].shape[2]:
            arrays = [array[:, :, :longest] for array in arrays]
        contiguous = indices == list(range(indices[0], indices[0] + len(indices)))
        chosen = (
            slice(indices[0], indices[-1] + 1) if contiguous else mx.array(indices, dtype=mx.int32)
        )
        factors = [
            kv_format.factors(of_layer)
            for of_layer in kv_format.layers([array[0] for array in arrays])
        ]
        differ = lengths.min() < longest
        mask = mx.arange(longest, dtype=mx.int32) < mx.array(lengths)[:, None] if differ else None
        parts.append(SharedPart(factors, chosen, len(indices), mask))
        placed += indices
    complete = len(placed) == len(rows)
    if placed == list(range(len(rows))):
        return Level(tuple(parts), None, complete)
    places = np.full(len(rows), len(placed), np.int32)
    places[placed] = np.arange(len(placed))
    return Level(tuple(parts), mx.array(places), complete)

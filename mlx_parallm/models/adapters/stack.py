"""Several adapters in one array for each group of layers: each row of a forward is multiplied with
its own.

    LayerGroup     adapted layers that read one array (q, k, v; gate, up): one product with all A
    AdapterStack   which adapter has which entry of the arrays
    RowPlaces      the entry of each row of a forward

Entry 0 is zero, for rows without an adapter. An adapter that changes, or comes, overwrites one
entry. The arrays grow by half, and what no row has used for a while is free.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_parallm.models.adapters.adapter import AdapterSlot, AdapterWeights, LoraPair

STACK_LIFETIME = 256  # forwards after which an entry that no row has used is free
SPARSE = 4  # a stack of more than so many times the entries in use is made anew

Parts = list[mx.array]


class RowPlaces:
    """Where each row of a forward finds its adapter: `entries` [B]; `array` holds the same."""

    def __init__(self, entries: Sequence[int]) -> None:
        self.entries = list(entries)
        self.array = mx.array(self.entries, dtype=mx.uint32)
        self._places: dict[tuple[int, ...], tuple[mx.array, mx.array]] = {}
        self._among: dict[frozenset[int], mx.array | None] = {}

    def among(self, entries: frozenset[int]) -> mx.array | None:
        """Return which rows have one of these entries, [B, 1, 1] bool; None: no row."""
        if entries not in self._among:
            rows = [entry in entries for entry in self.entries]
            self._among[entries] = mx.array(rows)[:, None, None] if any(rows) else None
        return self._among[entries]

    def of_inputs(self, count: int) -> tuple[mx.array, mx.array]:
        """Return the indices into x [B] and into A, of xA of `count` layers: by layers, then by
        rows, [count · B] uint32."""
        return self._indices((count,), [0] * count)

    def of_outputs(self, members: tuple[int, ...]) -> tuple[mx.array, mx.array]:
        """Return the indices into xA of a group, and into the B of these members of it."""
        return self._indices((-1, *members), members)

    def _indices(self, key: tuple[int, ...], left: Sequence[int]) -> tuple[mx.array, mx.array]:
        if key not in self._places:
            rows, entries = np.arange(len(self.entries)), np.array(self.entries)
            lefts = np.concatenate([member * len(rows) + rows for member in left])
            rights = np.concatenate([entries * len(left) + place for place in range(len(left))])
            self._places[key] = (
                mx.array(lefts.astype(np.uint32)),
                mx.array(rights.astype(np.uint32)),
            )
        return self._places[key]


class Entries:
    """`array` [entries · parts, ...] float32: the parts that `make` makes of each adapter. None: of
    no adapter."""

    def __init__(
        self,
        make: Callable[[AdapterWeights | None], Parts],
        adapters: Sequence[AdapterWeights],
    ) -> None:
        self._make = make
        none = make(None)
        self._parts = len(none)
        self.array = mx.stack([*none, *(part for each in adapters for part in make(each))])

    def grow(self, count: int) -> None:
        more = mx.zeros((count * self._parts, *self.array.shape[1:]))
        self.array = mx.concatenate([self.array, more])

    def write(self, entry: int, adapter: AdapterWeights) -> None:
        """MLX writes in place: nothing else holds the array once the last step has been
        evaluated."""
        start = entry * self._parts
        self.array[start : start + self._parts] = mx.stack(self._make(adapter))


class LayerGroup:
    """The stacked arrays of layers that read one array.

    `a` [entries · layers, r, in]; it lies transposed, because a row's product with it is a quarter
    faster. `b`: path → [entries · layers of this width, r, out], the scale in it. Of a layer of
    experts [entries, experts, in, r] and [entries, experts, r, out]. r is the largest rank; what an
    adapter lacks is zero. `members`: path → the layers that share its `b`, by their places in
    `paths`. `gains`: path → [entries, out] of DoRA adapters; 1 for the others, which changes no bit
    of their rows. `without`: path → the entries of adapters that lack the layer, and 0. `entries`:
    all arrays.
    """

    def __init__(self, paths: tuple[str, ...], adapters: Sequence[AdapterWeights]) -> None:
        self.paths = paths
        pairs = [(path, a.layers[path]) for a in adapters for path in paths if path in a.layers]
        self._rank = rank = max(pair.a.shape[-1] for _, pair in pairs)
        *experts, inputs, _ = pairs[0][1].a.shape
        widths = {path: pair.b.shape[-1] for path, pair in pairs}
        shape = (*experts, inputs, rank) if experts else (rank, inputs)
        self.a = Entries(partial(_a_parts, paths, shape), adapters)
        self.b: dict[str, Entries] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        for width in dict.fromkeys(widths[path] for path in paths):
            alike = tuple(path for path in paths if widths[path] == width)
            b = Entries(partial(_b_parts, alike, (*experts, rank, width)), adapters)
            self.b |= dict.fromkeys(alike, b)
            self.members |= dict.fromkeys(alike, tuple(paths.index(path) for path in alike))
        scaled = dict.fromkeys(path for path, pair in pairs if pair.gain is not None)
        self.gains = {
            path: Entries(partial(_gain_parts, path, widths[path]), adapters) for path in scaled
        }
        self.without = {
            path: frozenset({0, *(i for i, a in enumerate(adapters, 1) if path not in a.layers)})
            for path in paths
        }
        self.entries = list(dict.fromkeys([self.a, *self.b.values(), *self.gains.values()]))

    def takes(self, path: str, pair: LoraPair) -> bool:
        """Whether there is room for this part of an adapter."""
        return pair.a.shape[-1] <= self._rank and (pair.gain is None or path in self.gains)

    def grow(self, count: int) -> None:
        for each in self.entries:
            each.grow(count)

    def write(self, entry: int, adapter: AdapterWeights) -> None:
        for each in self.entries:
            each.write(entry, adapter)
        for path, without in self.without.items():
            lacks = path not in adapter.layers
            self.without[path] = without | {entry} if lacks else without - {entry}


@dataclass
class _Entry:
    place: int
    weights: AdapterWeights
    used: int  # the last forward that used it


class AdapterStack:
    """Stacked copies of the adapters that rows of the last forwards have used beside others.
    `groups`: path → the group of its layer."""

    def __init__(self) -> None:
        self.groups: dict[str, LayerGroup] = {}
        self._entries: dict[AdapterSlot, _Entry] = {}
        self._capacity = 1  # entries that the arrays have, of which the first is zero
        self._experts = False
        self._known = 0  # layers of which it was known what they read

    def forget(self, turn: int) -> None:
        """Free the entries that no row has used for a while."""
        for slot in [s for s, e in self._entries.items() if turn - e.used >= STACK_LIFETIME]:
            del self._entries[slot]
        if not self._entries:
            self.clear()

    def clear(self) -> None:
        """Drop all entries."""
        self.groups, self._entries, self._capacity, self._experts = {}, {}, 1, False

    def hold(
        self,
        slots: Sequence[AdapterSlot],
        turn: int,
        leaders: Mapping[str, str],
        *,
        experts: bool,
    ) -> dict[AdapterSlot, int]:
        """Bring the entries of these adapters up to date, and return their places. Starts what
        it writes: what no forward reads would keep the adapters that it was written from.

        Args:
            leaders: of each layer the first one that reads the same array, as far as it is known.
            experts: hold the layers of experts too.
        """
        held = self._entries
        changed = [s for s in slots if s not in held or held[s].weights is not s.weights]
        if (
            self._known != len(leaders)
            or (experts and not self._experts)
            or len(held) * SPARSE < self._capacity
            or not all(self._takes(slot.weights) for slot in changed)
        ):
            self._known, self._experts = len(leaders), experts or self._experts
            self._build(list(dict.fromkeys([*held, *slots])), leaders)
        elif changed:
            self._find_places([slot for slot in changed if slot not in held])
            for slot in changed:
                held[slot].weights = slot.weights
                for group in dict.fromkeys(self.groups.values()):
                    group.write(held[slot].place, slot.weights)
        if changed or held is not self._entries:
            groups = dict.fromkeys(self.groups.values())
            mx.async_eval([each.array for group in groups for each in group.entries])
        for slot in slots:
            self._entries[slot].used = turn
        return {slot: self._entries[slot].place for slot in slots}

    def _stacked(self, adapter: AdapterWeights) -> dict[str, LoraPair]:
        return {p: pair for p, pair in adapter.layers.items() if pair.a.ndim == 2 or self._experts}

    def _takes(self, adapter: AdapterWeights) -> bool:
        return all(
            path in self.groups and self.groups[path].takes(path, pair)
            for path, pair in self._stacked(adapter).items()
        )

    def _build(self, slots: list[AdapterSlot], leaders: Mapping[str, str]) -> None:
        adapters = [slot.weights for slot in slots]
        self._entries = {
            slot: _Entry(
                place, slot.weights, self._entries[slot].used if slot in self._entries else 0
            )
            for place, slot in enumerate(slots, start=1)
        }
        self._capacity = len(slots) + 1
        there = dict.fromkeys(path for adapter in adapters for path in self._stacked(adapter))
        together: dict[str, list[str]] = {}
        for path in [
            *(path for path in leaders if path in there),
            *(there.keys() - leaders.keys()),
        ]:
            together.setdefault(leaders.get(path, path), []).append(path)
        self.groups = {}
        for paths in together.values():
            self.groups |= dict.fromkeys(paths, LayerGroup(tuple(paths), adapters))

    def _find_places(self, slots: list[AdapterSlot]) -> None:
        taken = {entry.place for entry in self._entries.values()}
        free = [place for place in range(1, self._capacity) if place not in taken]
        if (lacking := len(slots) - len(free)) > 0:
            more = max(lacking, self._capacity // 2)
            for group in dict.fromkeys(self.groups.values()):
                group.grow(more)
            free += range(self._capacity, self._capacity + more)
            self._capacity += more
        for slot, place in zip(slots, free, strict=False):
            self._entries[slot] = _Entry(place, slot.weights, 0)


def _a_parts(paths: Sequence[str], shape: tuple[int, ...], adapter: AdapterWeights | None) -> Parts:
    pairs = [adapter.layers.get(path) if adapter else None for path in paths]
    return [
        mx.zeros(shape) if p is None else _padded(p.a.T if p.a.ndim == 2 else p.a, shape)
        for p in pairs
    ]


def _b_parts(paths: Sequence[str], shape: tuple[int, ...], adapter: AdapterWeights | None) -> Parts:
    pairs = [adapter.layers.get(path) if adapter else None for path in paths]
    return [mx.zeros(shape) if p is None else _padded(p.b * p.scale, shape) for p in pairs]


def _gain_parts(path: str, width: int, adapter: AdapterWeights | None) -> Parts:
    pair = adapter.layers.get(path) if adapter else None
    return [mx.ones((width,)) if pair is None or pair.gain is None else pair.gain]


def _padded(array: mx.array, shape: tuple[int, ...]) -> mx.array:
    if array.shape == shape:
        return array
    return mx.pad(array, [(0, want - have) for want, have in zip(shape, array.shape, strict=True)])

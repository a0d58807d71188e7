"""LoRA in the serving tree: the rows of one forward may use different adapters, or none; nothing is
merged.

    LoraContext.activate   engine thread, under the weights' read lock: which row uses which adapter
    ServedLinear           every linear layer of the tree; adds the context's adapters
    ServedSwitchLinear     every stack of experts, likewise; rows are known by the order of tokens

One adapter that all rows use is used as it was published: y + scale · (xA)B, no copy, and with DoRA
times each output's `gain` (dora.py). Rows with several, or of which some have none, use the copies
of a stack (stack.py): `gather_mm` multiplies each row with its own, so a row's sums hold nothing of
other rows' adapters: their NaN stays with them. A row whose adapter lacks the layer, or that has
none, keeps y: 0 times an infinite x would be NaN. Measured on CPU
(docs/benchmarks/serving.md), that beats a product per adapter and all adapters side by side. A
decode step of several rows on the CPU takes xA row by row for one adapter too: MKL splits so narrow
a product among its threads, by the arrays' alignment, and then waits for them (0.09 ms a layer
instead of 0.02).

A forward of one row is given matrices as batches of one. MLX has an operation for such a product
then, and otherwise three more that change shapes, which cost a small model's step as much.

Layers that read one array are a group: the first of them computes xA for all, and they share it
while they are given the very same object. Which these are is seen in the first forward, where its
numbers are compared too: MLX's in-place operators keep the object and change what it holds. A model
that changed an array between two layers in later forwards only would be served wrongly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.adapters.adapter import AdapterSlot, LoraPair
from mlx_parallm.models.adapters.linear import scaled, switch_update
from mlx_parallm.models.adapters.stack import AdapterStack, LayerGroup, RowPlaces
from mlx_parallm.models.mlx_lm_api import SwitchGLU, SwitchMLP
from mlx_parallm.models.ops import constant, fused_on_gpu
from mlx_parallm.system.device.traits import multiplies_rows_alone


class _Reduced:
    """xA of a group of layers, of one x [B, ..., in]."""

    def __init__(self, x: mx.array, group: LayerGroup, rows: RowPlaces) -> None:
        self.x, self.group = x, group
        self.left = len(group.paths)
        self._rows = rows
        self._updates: dict[str, mx.array] = {}
        count = len(rows.entries)
        # Architectures that flatten or split the positions: rows come first all the same.
        flat = x if x.ndim == 3 and x.shape[0] == count else x.reshape(count, -1, x.shape[-1])
        places = rows.of_inputs(self.left)
        self._h = mx.gather_mm(flat.astype(mx.float32), group.a.array.swapaxes(1, 2), *places)

    def update_of(self, path: str) -> mx.array:
        """Return what is added to a layer's y, [B, T, out] float32."""
        if path not in self._updates:
            members = self.group.members[path]
            places = self._rows.of_outputs(members)
            updates = mx.gather_mm(self._h, self.group.b[path].array, *places)
            if len(members) == 1:
                return updates
            paths = [self.group.paths[member] for member in members]
            self._updates |= zip(paths, mx.split(updates, len(members)), strict=True)
        return self._updates.pop(path)


class LoraContext:
    """The active adapters: the serving tree's linear layers read them while a forward's graph is
    built. Owned by the engine thread."""

    def __init__(self) -> None:
        self.batch = 0  # rows of the forward
        self.idle = False  # no row has an adapter, and nothing is to be seen
        self.pairs: Mapping[str, LoraPair] = {}  # one adapter …
        self.masked: mx.array | None = None  # … of these rows, [B] bool; None = all use it
        self.rows: RowPlaces | None = None  # of `stack`: several adapters, or some rows without
        self.stack = AdapterStack()
        self.experts: mx.array | None = None  # [..., k] of the block of experts that runs
        self.leaders: dict[str, str] = {}  # layer → the first that reads the same array
        # the last of those that were seen, with what it held
        self._last: tuple[mx.array, mx.array, str] | None = None
        self._reduced: _Reduced | None = None
        # the last x in half precision, the first layer that read it, and its cast
        self._wide: tuple[mx.array, str, mx.array] | None = None
        self._turn = 0
        self._by_rows = False  # a decode step's xA of one adapter is computed row by row

    def hold_for(self, forwards: Sequence[Sequence[AdapterSlot | None]]) -> None:
        """Bring up to date what several forwards, each of these rows, will read of the stack that
        are built before one is evaluated: a later write would copy the arrays that an earlier one
        reads."""
        mixed = [slots for slots in forwards if _is_mixed(slots)]
        if mixed:
            experts = any(len(_distinct(slots)) > 1 for slots in mixed)
            distinct = _distinct([slot for slots in mixed for slot in slots])
            self.stack.hold(distinct, self._turn, self.leaders, experts=experts)

    def activate(self, slots: Sequence[AdapterSlot | None]) -> None:
        """The adapter of each row of the next forward."""
        self._turn += 1
        self.batch = len(slots)
        self.stack.forget(self._turn)
        self._last, self._reduced, self._wide = None, None, None
        distinct = _distinct(slots)
        self.idle = not distinct and self._turn > 1
        self.pairs, self.masked = {}, None
        if len(distinct) == 1:
            self.pairs = distinct[0].weights.layers
            self._by_rows = self.batch > 1 and multiplies_rows_alone()
            if None in slots:
                self.masked = mx.array([slot is not None for slot in slots])
        if _is_mixed(slots):
            several = len(distinct) > 1
            places = self.stack.hold(distinct, self._turn, self.leaders, experts=several)
            entries = [0 if slot is None else places[slot] for slot in slots]
            if self.rows is None or self.rows.entries != entries:
                self.rows = RowPlaces(entries)
        else:
            self.rows = None

    def note_input(self, path: str, x: mx.array) -> None:
        """Note that the layer reads x, the first time that it is called. Evaluates x."""
        if (
            self._last is None
            or self._last[0] is not x
            or not mx.array_equal(self._last[1], x, equal_nan=True).item()
        ):
            self._last = x, mx.array(x), path
        self.leaders[path] = self._last[2]

    def stacked_update(self, path: str, x: mx.array) -> mx.array | None:
        """Return what is added to the layer's y, [B, T, out] float32; None: nothing."""
        reduced, rows = self._reduced, self.rows
        assert rows is not None
        if reduced is None or reduced.x is not x or path not in reduced.group.paths:
            if (group := self.stack.groups.get(path)) is None:
                return None
            reduced = self._reduced = _Reduced(x, group, rows)
        reduced.left -= 1
        if not reduced.left:
            self._reduced = None  # it would keep x
        return reduced.update_of(path)

    def widened(self, path: str, x: mx.array) -> mx.array:
        """Return x in float32, one array for all layers of a group that are called with it in
        turn."""
        leader = self.leaders[path]
        if self._wide is None or self._wide[0] is not x or self._wide[1] != leader:
            self._wide = x, leader, x.astype(mx.float32)
        return self._wide[2]

    def factors(self, pair: LoraPair, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the pair's A and B, for x [B, ..., in], in the shapes that are the cheaper ones to
        multiply with."""
        if self.batch == 1:
            return pair.batch_of_one if _is_one_row(x) else (pair.a, pair.b)
        if self._by_rows and x.ndim == 3 and x.shape[:2] == (self.batch, 1):
            return pair.batch_of_one[0], pair.b
        return pair.a, pair.b

    def rows_of(self, indices: mx.array, *, sorted_indices: bool) -> mx.array:
        """Each pair of a token and an expert's row of the batch, in the shape of `indices`, which
        lie in the order of the rows, or as mlx-lm sorts them by experts."""
        rows = mx.arange(indices.size) // (indices.size // self.batch)
        if sorted_indices:
            assert self.experts is not None, "a block of experts sorts them"
            rows = rows[mx.argsort(self.experts.flatten())]
        return rows.reshape(indices.shape)

    def release(self) -> None:
        """Drop the stack and the last forward's context."""
        self.stack.clear()
        self.pairs, self.masked, self.rows = {}, None, None
        self._last, self._reduced, self._wide = None, None, None


@fused_on_gpu
def _added(y: mx.array, update: mx.array) -> mx.array:
    return (y + update).astype(y.dtype)


@fused_on_gpu
def _added_times(y: mx.array, update: mx.array, scale: mx.array) -> mx.array:
    return (y + scale * update).astype(y.dtype)


@fused_on_gpu
def _added_beside(y: mx.array, update: mx.array, without: mx.array) -> mx.array:
    return mx.where(without, y, (y + update).astype(y.dtype))


def _distinct(slots: Sequence[AdapterSlot | None]) -> list[AdapterSlot]:
    return list(dict.fromkeys(slot for slot in slots if slot is not None))


def _is_mixed(slots: Sequence[AdapterSlot | None]) -> bool:
    return len({*slots}) > 1


def _is_one_row(x: mx.array) -> bool:
    return x.ndim == 3 and x.shape[0] == 1


TURNED = "_turned"  # in a linear layer: its weight, and the views of it that it is multiplied by


def _multiplied(linear: nn.Linear, x: mx.array) -> mx.array:
    """Return linear(x), by views of the weight that are made once."""
    weight: mx.array = linear["weight"]
    views = linear.get(TURNED)
    if views is None or views[0] is not weight:
        views = linear[TURNED] = (weight, weight.T, weight.T[None])
        mx.eval(views)  # another thread may read the one that this one does not
    turned: mx.array = views[2 if _is_one_row(x) else 1]
    return mx.addmm(linear["bias"], x, turned) if "bias" in linear else x @ turned


class _Served(nn.Module):
    """A layer of the serving tree, whose attributes are those of the layer inside."""

    def __init__(self, linear: nn.Module, path: str, context: LoraContext) -> None:
        super().__init__()
        self.linear = linear
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "_is_plain", type(linear) is nn.Linear)

    def __getattr__(self, name: str) -> Any:
        # Architectures read attributes of their projections (weight, bias, bits); the wrapper is
        # transparent.
        if name in self or "linear" not in self:
            return super().__getattr__(name)
        return getattr(self["linear"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # gemma3n clips the weights of its projections in its forward.
        if "linear" in self and name in self["linear"]:
            setattr(self["linear"], name, value)
        else:
            super().__setattr__(name, value)


class ServedLinear(_Served):
    """A linear layer, quantised or not, plus the active adapters."""

    def __call__(self, x: mx.array) -> mx.array:
        """x [B, ..., in] or [B * positions, in]."""
        context, path, linear = self._context, self._path, self["linear"]
        y: mx.array = _multiplied(linear, x) if self._is_plain else linear(x)
        if context.idle:  # most steps, and each layer of them comes here
            return y
        if path not in context.leaders:
            context.note_input(path, x)
        if context.rows is not None:
            update = context.stacked_update(path, x)
            return y if update is None else self._updated(y, update, context.rows)
        if (pair := context.pairs.get(path)) is None:
            return y
        if x.dtype != pair.a.dtype:
            x = context.widened(path, x)
        a, b = context.factors(pair, x)
        if pair.gain is not None:
            updated = mx.addmm(y, x @ a, b, pair.scale)
            return scaled(updated, pair.gain, linear).astype(y.dtype)
        if y.dtype != b.dtype:
            return _added_times(y, x @ a @ b, constant(pair.scale, mx.float32))
        return mx.addmm(y, x @ a, b, pair.scale)

    def _updated(self, y: mx.array, update: mx.array, places: RowPlaces) -> mx.array:
        """Return y with a stack's update [B, T, out] of the rows that have one."""
        context, rows = self._context, y.reshape(update.shape)
        group = context.stack.groups[self._path]
        without = places.among(group.without[self._path])
        if (gains := group.gains.get(self._path)) is not None:
            factors = gains.array[places.array][:, None]
            updated = scaled(rows + update, factors, self["linear"]).astype(y.dtype)
            updated = updated if without is None else mx.where(without, rows, updated)
        elif without is None:
            updated = _added(rows, update)
        else:
            updated = _added_beside(rows, update, without)
        return updated.reshape(y.shape)


class ServedSwitchLinear(_Served):
    """A stack of experts, quantised or not, plus the active adapters of each."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1 or k, 1, in], `indices` [..., k] → [..., k, 1, out]."""
        context = self._context
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        if pair := context.pairs.get(self._path):
            update = switch_update(x.astype(pair.a.dtype), pair.a, pair.b, indices, sorted_indices)
            updated = (y + pair.scale * update).astype(y.dtype)
            if context.masked is None:
                return updated
            # A choice, not a product with 0: other rows stay bit-equal and an adapter's NaN stays
            # in its rows.
            rows = context.rows_of(indices, sorted_indices=sorted_indices)
            return mx.where(context.masked[rows][..., None, None], updated, y)
        group = context.stack.groups.get(self._path)
        if context.rows is None or context.pairs or group is None:
            return y
        arrays = group.a.array, group.b[self._path].array
        a, b = (array.reshape(-1, *array.shape[2:]) for array in arrays)
        rows = context.rows_of(indices, sorted_indices=sorted_indices)
        places = context.rows.array[rows] * arrays[0].shape[1] + indices
        updated = (y + switch_update(x.astype(a.dtype), a, b, places, False)).astype(y.dtype)
        without = context.rows.among(group.without[self._path])
        return updated if without is None else mx.where(without[rows], y, updated)


class _ServedSwitch:
    """A block of experts of a serving tree: its layers know what order the tokens come in."""

    _lora_context: LoraContext

    def __call__(self, x: mx.array, indices: mx.array) -> Any:
        context = self._lora_context
        before, context.experts = context.experts, indices
        try:
            return super().__call__(x, indices)  # type: ignore[misc]
        finally:
            context.experts = before


_switches: dict[type, type] = {}


def serve_switches(model: nn.Module, context: LoraContext) -> None:
    """Let the blocks of experts tell the context which experts their tokens go to."""
    for module in model.modules():
        if isinstance(module, SwitchGLU | SwitchMLP):
            kind = type(module)
            module.__class__ = _switches.setdefault(
                kind, type(kind.__name__, (_ServedSwitch, kind), {"__module__": kind.__module__})
            )
            object.__setattr__(module, "_lora_context", context)

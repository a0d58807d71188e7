"""LoRA in the serving tree: the rows of one forward may use different adapters, or none; nothing is
merged.

    LoraContext.activate   engine thread, under the weights' read lock: which row uses which adapter
    ServedLinear           every linear layer of the tree; adds the context's adapters
    ServedSwitchLinear     every stack of experts, likewise; rows are known by the order of tokens
    AdapterStack           several adapters in one array a layer, for as long as rows use them
                           together

One adapter is used as it was published: y + scale · (xA)B, no copy, and with DoRA times each
output's `gain` (dora.py). Several are stacked, A [S, r, in], B [S, r, out], and `gather_mm`
multiplies each row with its own, so a row's sums hold nothing of other rows' adapters: their NaN
stays with them. Measured on CPU (docs/benchmarks/serving.md), that beats a product per adapter and
all adapters side by side. A decode step on the CPU takes xA row by row for one adapter too: MKL
splits so narrow a product among its threads, by the arrays' alignment, and then waits for them
(0.09 ms a layer instead of 0.02).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.adapters.adapter import AdapterSlot, AdapterWeights, LoraPair
from mlx_parallm.models.adapters.linear import scaled, switch_update
from mlx_parallm.models.mlx_lm_api import SwitchGLU, SwitchMLP
from mlx_parallm.system.device.traits import multiplies_rows_alone

MAX_STACKS = 2  # decoding rows and a prefill may mix different adapters
STACK_LIFETIME = 64  # forwards after which a stack that no row has used is dropped


class AdapterStack:
    """Stacked copies of several adapters; the last entry is zero, for rows without an adapter. An
    adapter that changes overwrites its own entry only.

    `arrays`: path → A [S + 1, r, in] and B [S + 1, r, out], float32, the scale in B; r is the
    path's largest rank, and missing parts of an adapter are zero. A lies transposed: a row's
    product with it is a quarter faster. Of stacked experts A [S + 1, experts, in, r], and B [S + 1,
    experts, r, out].
    `gains`: path → [S + 1, out] of DoRA adapters; 1 for the others, which changes no bit
    of their rows.
    """

    def __init__(self, slots: Sequence[AdapterSlot]) -> None:
        self.indices = {slot: index for index, slot in enumerate(slots)}
        self.arrays: dict[str, tuple[mx.array, mx.array]] = {}
        self.gains: dict[str, mx.array] = {}
        self.used = 0
        self._copied: list[AdapterWeights] = []

    def refresh(self) -> None:
        """Read the slots anew. Builds a graph, evaluates nothing."""
        present = [slot.weights for slot in self.indices]
        changed = [
            index
            for index, weights in enumerate(present)
            if not self._copied or self._copied[index] is not weights
        ]
        if any(
            not self._copied or _shapes(self._copied[index]) != _shapes(present[index])
            for index in changed
        ):
            self._build(present)
        else:
            for index in changed:
                for path, pair in present[index].layers.items():
                    self._write(path, index, pair)
        self._copied = present

    def _build(self, adapters: Sequence[AdapterWeights]) -> None:
        count = len(adapters) + 1
        self.arrays, self.gains = {}, {}
        for path in dict.fromkeys(path for adapter in adapters for path in adapter.layers):
            pairs = {
                index: adapter.layers[path]
                for index, adapter in enumerate(adapters)
                if path in adapter.layers
            }
            rank = max(pair.a.shape[-1] for pair in pairs.values())
            first = next(iter(pairs.values()))
            *experts, inputs, _ = first.a.shape
            a = mx.zeros((count, *experts, *((inputs, rank) if experts else (rank, inputs))))
            self.arrays[path] = a, mx.zeros((count, *experts, rank, first.b.shape[-1]))
            if any(pair.gain is not None for pair in pairs.values()):
                self.gains[path] = mx.ones((count, first.b.shape[1]), mx.float32)
            for index, pair in pairs.items():
                self._write(path, index, pair)

    def _write(self, path: str, index: int, pair: LoraPair) -> None:
        """MLX writes in place: nothing else holds the arrays once the last step has been
        evaluated."""
        a, b = self.arrays[path]
        rank = pair.a.shape[-1]
        if pair.a.ndim > 2:
            a[index, :, :, :rank] = pair.a
            b[index, :, :rank] = pair.b * pair.scale
            return
        a[index, :rank] = pair.a.T
        b[index, :rank] = pair.b * pair.scale
        if pair.gain is not None:
            self.gains[path][index] = pair.gain


class LoraContext:
    """The active adapters: the serving tree's linear layers read them while a forward's graph is
    built. Owned by the engine thread."""

    def __init__(self) -> None:
        self.batch = 0  # rows of the forward
        self.pairs: Mapping[str, LoraPair] = {}  # one adapter …
        self.rows: mx.array | None = None  # … of these rows, [B, 1, 1] bool; None = all use it
        self.stacked: Mapping[str, tuple[mx.array, mx.array]] = {}  # several …
        self.gains: Mapping[str, mx.array] = {}
        self.indices: mx.array | None = None  # … and each row's index, [B] uint32
        # [B] uint32: 0, 1, …; without it each product would make its own
        self.each_row: mx.array | None = None
        self.experts: mx.array | None = None  # [..., k] of the block of experts that runs
        self._stacks: list[AdapterStack] = []
        self._turn = 0
        # [batch] uint32 of 0, where rows are multiplied one by one
        self._all_first: mx.array | None = None

    def activate(self, slots: Sequence[AdapterSlot | None]) -> None:
        """The adapter of each row of the next forward."""
        self._turn += 1
        self.batch = len(slots)
        self._stacks = [stack for stack in self._stacks if self._turn - stack.used < STACK_LIFETIME]
        distinct = list(dict.fromkeys(slot for slot in slots if slot is not None))
        self.pairs, self.rows, self.stacked, self.gains, self.indices = {}, None, {}, {}, None
        if len(distinct) > 1:
            stack = self._stack(distinct)
            stack.refresh()
            indices = [
                len(stack.indices) if slot is None else stack.indices[slot] for slot in slots
            ]
            self.stacked, self.gains, self.indices = (
                stack.arrays,
                stack.gains,
                mx.array(indices, dtype=mx.uint32),
            )
            if self.each_row is None or self.each_row.shape[0] != self.batch:
                self.each_row = mx.arange(self.batch, dtype=mx.uint32)
        elif distinct:
            self.pairs = distinct[0].weights.layers
            if self._all_first is None or self._all_first.shape[0] != self.batch:
                alone = multiplies_rows_alone()
                self._all_first = mx.zeros((self.batch,), dtype=mx.uint32) if alone else None
            if None in slots:
                self.rows = mx.array([slot is not None for slot in slots])[:, None, None]

    def reduced(self, x: mx.array, a: mx.array) -> mx.array:
        """xA of the one adapter: x [B, T, in], a [in, r]."""
        if (
            self._all_first is None
            or x.ndim != 3
            or x.shape[:2] != (self.batch, 1)
            or x.dtype != a.dtype
        ):
            return x @ a
        return mx.gather_mm(x, a[None], rhs_indices=self._all_first)

    def rows_of(self, indices: mx.array, *, sorted_indices: bool) -> mx.array:
        """Each pair of a token and an expert's row of the batch, in the shape of `indices`, which
        lie in the order of the rows, or as mlx-lm sorts them by experts."""
        rows = mx.arange(indices.size) // (indices.size // self.batch)
        if sorted_indices:
            assert self.experts is not None, "a block of experts sorts them"
            rows = rows[mx.argsort(self.experts.flatten())]
        return rows.reshape(indices.shape)

    def release(self) -> None:
        """Drop the stacks and the last forward's context."""
        self._stacks, self.pairs, self.rows = [], {}, None
        self.stacked, self.gains, self.indices = {}, {}, None

    def _stack(self, slots: list[AdapterSlot]) -> AdapterStack:
        """A stack that holds these, and not many others: their rows have ended, and may come
        again."""
        fits = [
            s
            for s in self._stacks
            if s.indices.keys() >= set(slots) and len(s.indices) <= 2 * len(slots)
        ]
        stack = fits[-1] if fits else AdapterStack(slots)
        self._stacks = [*[s for s in self._stacks if s is not stack], stack][-MAX_STACKS:]
        stack.used = self._turn
        return stack


class _Served(nn.Module):
    """A layer of the serving tree, whose attributes are those of the layer inside."""

    def __init__(self, linear: nn.Module, path: str, context: LoraContext) -> None:
        super().__init__()
        self.linear = linear
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_context", context)

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
        context = self._context
        if not (context.pairs or context.stacked):  # most steps, and each layer of them comes here
            return self["linear"](x)
        mixed = context.rows is not None or context.indices is not None
        if mixed and (x.ndim != 3 or x.shape[0] != context.batch):
            # Architectures that flatten or split the positions: rows come first all the same.
            return self(x.reshape(context.batch, -1, x.shape[-1])).reshape(*x.shape[:-1], -1)
        y = self["linear"](x)
        if pair := context.pairs.get(self._path):
            updated = mx.addmm(y, context.reduced(x, pair.a), pair.b, alpha=pair.scale)
            if pair.gain is not None:
                updated = scaled(updated, pair.gain, self.linear)
            updated = updated.astype(y.dtype)
            # A choice, not a product with 0: other rows stay bit-equal and an adapter's NaN stays
            # in its rows.
            return updated if context.rows is None else mx.where(context.rows, updated, y)
        if arrays := context.stacked.get(self._path):
            a, b = arrays
            rows, slots = context.each_row, context.indices
            h = mx.gather_mm(x.astype(a.dtype), a.swapaxes(1, 2), rows, slots)
            updated = y + mx.gather_mm(h, b, rows, slots)
            if (gains := context.gains.get(self._path)) is not None:
                updated = scaled(updated, gains[context.indices][:, None], self.linear)
            return updated.astype(y.dtype)
        return y


class ServedSwitchLinear(_Served):
    """A stack of experts, quantised or not, plus the active adapters of each."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1 or k, 1, in], `indices` [..., k] → [..., k, 1, out]."""
        context = self._context
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        if pair := context.pairs.get(self._path):
            update = switch_update(x.astype(pair.a.dtype), pair.a, pair.b, indices, sorted_indices)
            updated = (y + pair.scale * update).astype(y.dtype)
            if context.rows is None:
                return updated
            rows = context.rows_of(indices, sorted_indices=sorted_indices)
            return mx.where(context.rows.flatten()[rows][..., None, None], updated, y)
        if (arrays := context.stacked.get(self._path)) and context.indices is not None:
            a, b = (array.reshape(-1, *array.shape[2:]) for array in arrays)
            slots = context.indices[context.rows_of(indices, sorted_indices=sorted_indices)]
            places = slots * arrays[0].shape[1] + indices
            return (y + switch_update(x.astype(a.dtype), a, b, places, False)).astype(y.dtype)
        return y


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


def _shapes(adapter: AdapterWeights) -> dict[str, tuple[tuple[int, ...], bool]]:
    return {path: (pair.a.shape, pair.gain is None) for path, pair in adapter.layers.items()}

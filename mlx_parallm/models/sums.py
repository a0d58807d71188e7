"""Sums of many float32 numbers that are right to some 1e-6.

MLX adds the numbers of a row on the CPU one after the other, and what is small beside the sum so
far is rounded away: of 67 million squares a fifth is lost, of a softmax over 150,000 tokens 2e-4.
Rows of `ROW` numbers first, then their sums, lose nothing that matters and cost the same
(`logsumexp`: a fifth more than MLX's own). A product of two long vectors by `@` has the same fault.
A GPU adds in a tree, which is exact enough: there MLX's own reductions stay.

And whether there is any number but 0 (`has_signal`). On a GPU an evaluation may end without an
error although a part of it was never computed (ml-explore/mlx#3979): its arrays hold zeros. A
finding that could be the truth is computed again; only if that gives other numbers the device is
wrong. A CPU computes an operation or ends the process, so nothing is looked for there
(`may_lose_results`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import mlx.core as mx
import numpy as np

from mlx_parallm.system.device.faults import wrong_numbers
from mlx_parallm.system.device.traits import adds_in_order, may_lose_results

T = TypeVar("T")
COPY = "a copy of keys or values"
NEW_ZEROS = 256
"""Weights of which more than one in so many has become exactly 0 are computed again."""
ROW = 1024
SHORTEST_ROW = 32  # least length of rows that divide a width: shorter ones would be many


def total(x: mx.array) -> mx.array:
    """The sum of all numbers: [...] → []."""
    if not adds_in_order():
        return x.sum()
    flat = x.reshape(-1)
    while flat.size > ROW:
        whole = flat.size // ROW * ROW
        rows, rest = flat[:whole].reshape(-1, ROW).sum(axis=1), flat[whole:]
        flat = mx.concatenate([rows, rest.sum(keepdims=True)]) if rest.size else rows
    return flat.sum()


def logsumexp(x: mx.array) -> mx.array:
    """log Σ exp over the last axis: [..., n] → [...]; -inf where all are."""
    if x.shape[-1] <= ROW or not adds_in_order():
        return mx.logsumexp(x, axis=-1)
    peak = mx.stop_gradient(mx.maximum(x.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min))
    return mx.log(row_sums(mx.exp(x - peak))) + peak[..., 0]


def row_sums(x: mx.array) -> mx.array:
    """The sum over the last axis: [..., n] → [...]."""
    width = x.shape[-1]
    if width <= ROW or not adds_in_order():
        return x.sum(axis=-1)
    size = math.gcd(width, ROW)
    if size >= SHORTEST_ROW:
        return x.reshape(*x.shape[:-1], -1, size).sum(axis=-1).sum(axis=-1)
    whole = width // ROW * ROW
    rows = x[..., :whole].reshape(*x.shape[:-1], -1, ROW).sum(axis=-1)
    return rows.sum(axis=-1) + x[..., whole:].sum(axis=-1)


def raise_stored_faults() -> None:
    """Wait for the default stream, so that a fault that a GPU has stored is raised here.

    A CPU stores none, and waiting for it costs milliseconds beside another thread's work.
    """
    if may_lose_results():
        mx.synchronize()


class Signals:
    """Whether each of some arrays has a number that is not 0. Those without numbers have one.

    `flags` is lazy: evaluated with something else, it makes nobody wait.
    """

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self.flags = [_flag(array) for array in arrays]

    def read(self) -> np.ndarray:
        """[n] bool, of evaluated flags."""
        return np.array([flag.item() for flag in self.flags], bool)


def has_signal(arrays: Sequence[mx.array]) -> np.ndarray:
    """Return for each array whether a number in it is not 0: [n] bool."""
    signals = Signals(arrays)
    _evaluate(signals.flags)
    return signals.read()


def _evaluate(arrays: list[mx.array]) -> None:
    if arrays:
        mx.eval(arrays)


def _flag(array: mx.array) -> mx.array:
    return mx.any(array) if array.size else mx.array(True)


def zeros_of(arrays: Mapping[str, mx.array], beside: Sequence[mx.array] = ()) -> dict[str, int]:
    """Count the zeros of each array of real numbers. `beside`: evaluated with the counts."""
    floats = {
        name: array for name, array in arrays.items() if mx.issubdtype(array.dtype, mx.floating)
    }
    # not 0: a count that is lost itself says that all are
    counts = [(array != 0).sum() for array in floats.values()]
    _evaluate([*counts, *beside])
    sizes = ((name, array.size) for name, array in floats.items())
    return {
        name: size - cast("int", count.item())
        for (name, size), count in zip(sizes, counts, strict=True)
    }


def flags_of(array: mx.array | None) -> list[mx.array]:
    """Begin to look whether an evaluated array has a number that is not 0: [flag]. Nothing waits
    for it. None, or a device that loses no results: []."""
    if array is None or not may_lose_results():
        return []
    flag = _flag(array)
    mx.async_eval(flag)  # now, so that the flag does not keep the array
    return [flag]


class PassProof:
    """Whether the hidden states that a pass through a model evaluates, and their slopes, are what
    the model gives. One thread's.

    Zeros alone may be right, of layers that are zeros at their start: then the pass is computed
    once more, and if that gives numbers the device has failed. A later pass of the same kind
    with the same zeros is taken for right.
    """

    def __init__(self) -> None:
        self._flags: list[mx.array] = []  # [] bool, one for each array of this pass
        self._beside: list[mx.array] = []
        self._right: dict[str, list[bool]] = {}

    def look(self, array: mx.array | None) -> None:
        """Take an evaluated array of the pass, or None."""
        self.keep(flags_of(array))

    def keep(self, flags: Iterable[mx.array]) -> None:
        """Take what `flags_of` returned. All flags are read at the pass's end."""
        self._flags += flags

    def read_beside(self, signals: Signals) -> None:
        """Evaluate these signals with the flags of this pass, at its end."""
        self._beside = signals.flags

    def proved(self, kind: str, compute: Callable[[], T]) -> T:
        """Return the result of the pass `compute`. Raises DeviceFaultError: an array is zeros
        alone, and is not when it is computed again."""
        result, signals = self._once(compute)
        if not all(signals) and signals != self._right.get(kind):
            again = self._once(compute)[1]
            if any(new and not old for old, new in zip(signals, again, strict=False)):
                raise wrong_numbers("a hidden state, or a gradient by one, is zeros alone")
        self._right[kind] = signals
        return result

    def _once(self, compute: Callable[[], T]) -> tuple[T, list[bool]]:
        self._flags, self._beside = [], []
        result = compute()
        flags, self._flags = self._flags, []
        _evaluate(self._beside)
        return result, [bool(flag.item()) for flag in flags]


def evaluated(compute: Callable[[], list[mx.array]], what: str) -> list[mx.array]:
    """Return the arrays that `compute` builds, evaluated. Raises DeviceFaultError: one is zeros
    alone, and is not when it is computed again."""
    arrays = compute()
    mx.eval(arrays)
    if not may_lose_results():
        return arrays
    signal = has_signal(arrays)
    if not signal.all() and (has_signal(compute()) & ~signal).any():
        raise wrong_numbers(f"{what} is zeros alone")
    return arrays

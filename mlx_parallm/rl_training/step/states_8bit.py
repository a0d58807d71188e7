"""Optimizer states in 8 bits: block-wise dynamic quantisation (Dettmers et al. 2021,
arXiv:2110.02861, as in bitsandbytes).

    quantised, dequantised    [N] float32 ↔ a code for each number, and the largest of each block
    AdamW8bit, Lion8bit       MLX's optimizers; an update computes in float32, between two updates
                              the states are codes
    in_pieces                 an update piece by piece, so that few states are float32 at a time

A block is 256 numbers: x = absmax · CODES[code]. The codes are those of bitsandbytes' dynamic map:
seven decades from 10⁻⁷ to 1, decade i (from 0) with 2^i means of equal intervals and a sign, or
2^(i+1) without one (AdamW's second moment), beside 0 and 1. Theirs ascend; here code 0 is 0, so
that zeros are zeros. A second moment above 0 never becomes 0: the update divides by its root ("the
zero-point problem", arXiv:2309.01507).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np

BLOCK = 256
SMALLEST = 4096
"""Arrays with fewer numbers keep float32 states, as in bitsandbytes (`min_8bit_size`)."""
PIECE = 1 << 22
"""Numbers of which the states are float32 at a time: 16 MiB for each intermediate array."""
STATE_BYTES = 1 + 4 / BLOCK
"""Bytes of one number of one state."""
CODES, ABSMAX = "_codes", "_absmax"
DECADES = 7
_FIRST_CELL = 127 - 24 << 7  # the upper 16 bits of 2⁻²⁴, which is below every midpoint
_CELLS = (127 << 7) - _FIRST_CELL + 1  # up to 1

State = dict[str, Any]
Update = Callable[[State, State, State], tuple[State, State]]


@dataclass(frozen=True)
class DynamicMap:
    """`codes` [256] float32. Of the absolute values, which ascend: `between` [N] the midpoint above
    each, `cells` [_CELLS] the one that is nearest to the lower end of the numbers whose upper 16
    bits are alike. No such cell has two midpoints."""

    signed: bool
    codes: np.ndarray
    between: np.ndarray
    cells: np.ndarray

    @classmethod
    def made(cls, *, signed: bool) -> "DynamicMap":
        positive = np.array(dynamic_values(DECADES, signed=signed))
        between = np.append((positive[:-1] + positive[1:]) / 2, np.inf)
        if not signed:
            between[0] = 0.0
        upper = np.arange(_FIRST_CELL, _FIRST_CELL + _CELLS, dtype=np.uint32)
        lower = (upper << 16).view(np.float32).astype(np.float64)
        lower[0] = 0.0
        cells = np.searchsorted(between.astype(np.float32), lower, side="left")
        codes = np.append(positive, -positive[1:-1]) if signed else positive
        return cls(
            signed, codes.astype(np.float32), between.astype(np.float32), cells.astype(np.uint8)
        )


def dynamic_values(decades: int, *, signed: bool) -> list[float]:
    """0, the means of the intervals of each decade, and 1, ascending."""
    values = [0.0]
    for decade in range(decades):
        ends = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        values += list((ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - decades + 1))
    return [*values, 1.0]


MAPS = {"m": DynamicMap.made(signed=True), "v": DynamicMap.made(signed=False)}
"""State of an optimizer of MLX's → its map."""


def quantised(x: mx.array, codes: DynamicMap) -> tuple[mx.array, mx.array]:
    """The nearest codes [N] uint8 of x [N] float32, N a multiple of BLOCK, and each block's largest
    absolute value [N / BLOCK] float32. Lazy."""
    blocks = x.reshape(-1, BLOCK)
    sizes = mx.abs(blocks)
    absmax = sizes.max(axis=1)
    sizes = sizes / mx.where(absmax > 0, absmax, 1.0)[:, None]
    cell = mx.maximum(mx.view(sizes, mx.int32) >> 16, _FIRST_CELL) - _FIRST_CELL
    lower = mx.array(codes.cells)[mx.minimum(cell, _CELLS - 1)]
    nearest = lower + (sizes > mx.array(codes.between)[lower]).astype(mx.uint8)
    if codes.signed:  # there is no -1
        most = len(codes.between) - 1
        negative = most + mx.minimum(nearest, most - 1)
        nearest = mx.where((blocks < 0) & (nearest > 0), negative, nearest)
    return nearest.astype(mx.uint8).reshape(-1), absmax


def dequantised(code: mx.array, absmax: mx.array, codes: DynamicMap) -> mx.array:
    """[N] float32. Lazy."""
    return (mx.array(codes.codes)[code].reshape(-1, BLOCK) * absmax[:, None]).reshape(-1)


class AdamW8bit(optimizers.AdamW):
    """AdamW over arrays [N], N a multiple of BLOCK. State: `m_codes`, `m_absmax`, `v_codes`,
    `v_absmax`."""

    def init_single(self, parameter: mx.array, state: State) -> None:
        state |= _zeros(parameter, ("m", "v"))

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        wide = _wide(state)
        updated = super().apply_single(gradient, parameter, wide)
        state |= _narrow(wide)
        return updated


class Lion8bit(optimizers.Lion):
    """Lion with 8-bit states: `m_codes`, `m_absmax`."""

    def init_single(self, parameter: mx.array, state: State) -> None:
        state |= _zeros(parameter, ("m",))

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        wide = _wide(state)
        updated = super().apply_single(gradient, parameter, wide)
        state |= _narrow(wide)
        return updated


def _zeros(parameter: mx.array, names: tuple[str, ...]) -> State:
    zeros = {name + CODES: mx.zeros(parameter.shape, mx.uint8) for name in names}
    return zeros | {name + ABSMAX: mx.zeros((parameter.size // BLOCK,)) for name in names}


def _wide(state: Mapping[str, mx.array]) -> State:
    return {
        name: dequantised(state[name + CODES], state[name + ABSMAX], codes)
        for name, codes in MAPS.items()
        if name + CODES in state
    }


def _narrow(wide: Mapping[str, mx.array]) -> State:
    state: State = {}
    for name, array in wide.items():
        state[name + CODES], state[name + ABSMAX] = quantised(array, MAPS[name])
    return state


def in_pieces(
    update: Update, gradients: State, masters: State, state: State
) -> tuple[State, State]:
    """Return `update` (gradients, masters, state → masters, state; evaluated) of all arrays, PIECE
    numbers at a time.

    `state`: of an optimizer over the masters, by their names, and its shared numbers.
    """
    shared = {name: array for name, array in state.items() if name not in masters}
    new_masters, new_state = State(), State()
    for name, master in masters.items():
        parts = []
        for piece in _pieces(master.size):
            cut = {kind: piece(array) for kind, array in state[name].items()}
            updated, after = update(
                {name: piece(gradients[name])}, {name: piece(master)}, {**shared, name: cut}
            )
            parts.append((updated[name], after.pop(name)))
            new_state |= after
        new_masters[name] = _joined([part for part, _ in parts])
        new_state[name] = {kind: _joined([cut[kind] for _, cut in parts]) for kind in state[name]}
        mx.eval(new_masters[name], new_state[name])
    return new_masters, new_state


def _pieces(size: int) -> Iterator[Callable[[mx.array], mx.array]]:
    """Yield the slices that cut an array of this size, or its blocks, into pieces."""
    for start in range(0, size, PIECE):

        def piece(array: mx.array, start: int = start) -> mx.array:
            unit = size // array.size
            return array[start // unit : (start + PIECE) // unit] if size > PIECE else array

        yield piece


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def padded(size: int) -> int:
    """Return the size rounded up to whole blocks."""
    return math.ceil(size / BLOCK) * BLOCK

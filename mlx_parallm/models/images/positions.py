"""Positions of multimodal rope (M-RoPE): a text token has one, a token of an image three, of time,
row and column (Wang et al. 2024, arXiv:2409.12191, §2.1).

An image of t × h × w tokens that begins at position p has p + (0 … t - 1, 0 … h - 1, 0 … w - 1),
and what follows it continues at p + max(t, h, w). So behind images a token's position is its place
in the sequence and a shift, which is at most 0.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.ops import plain_rope

Grid = tuple[int, int, int]  # tokens of an image: frames, rows, columns


def image_positions(
    count: int, images: Sequence[tuple[int, Grid]], begin: int = 0
) -> tuple[np.ndarray, int]:
    """Return the positions [3, count] int32 of a sequence from its place `begin` on, and the shift
    behind it.

    Args:
        images: (place of the first token, grid), in order.

    Worked: 2 texts, an image of 1 × 2 × 3 and a text: times 0 1 2 2 2 2 2 2 5, rows 0 1 2 2 2 3 3 3
    5, columns 0 1 2 3 4 2 3 4 5; shift -3.
    """
    positions = np.empty((3, count), np.int32)
    place = shift = 0
    for start, grid in images:
        positions[:, place:start] = np.arange(place, start) + shift
        size = int(np.prod(grid))
        positions[:, start : start + size] = np.indices(grid).reshape(3, -1) + start + shift
        shift += max(grid) - size
        place = start + size
    positions[:, place:] = np.arange(place, count) + shift
    return positions[:, begin:], shift


def chunked_axes(sections: Sequence[int]) -> np.ndarray:
    """Return which of the three positions turns each frequency: `sections` of them one after
    another (Qwen2-VL)."""
    return np.repeat(np.arange(3), sections)


def interleaved_axes(sections: Sequence[int]) -> np.ndarray:
    """Return the same where rows and columns have every third frequency, up to three times their
    section, and time all others (Qwen3-VL). Worked: (3, 2, 2) → 0 1 2 0 1 2 0."""
    axes = np.zeros(sum(sections), int)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


class RopePositions:
    """The positions of the next forward's tokens. One for each tree of modules; one thread.

    Attributes:
        positions: [3, B, L]; None: the positions by the cache's offset.
        shift: [B], added to a decode step's places; None: 0.
    """

    def __init__(self, axes: np.ndarray) -> None:
        self.axes = axes
        self.positions: mx.array | None = None
        self.shift: mx.array | None = None
        self._angles: dict[tuple[float, float], tuple[mx.array, mx.array]] = {}
        self._shifted: tuple[Any, mx.array] | None = None

    def use(self, positions: mx.array | None, shift: mx.array | None = None) -> None:
        """Build forwards over these positions."""
        self.positions, self.shift = positions, shift
        self._angles, self._shifted = {}, None

    def turned(self, x: mx.array, base: float, scale: float) -> mx.array:
        """Return x [B, H, L, D] turned by its positions, in halves."""
        assert self.positions is not None
        half = len(self.axes)
        if (key := (base, scale)) not in self._angles:
            frequencies = scale * base ** (-mx.arange(half, dtype=mx.float32) / half)
            chosen = self.positions[mx.array(self.axes)].astype(mx.float32)  # [D / 2, B, L]
            angles = mx.moveaxis(chosen, 0, -1)[:, None] * frequencies
            self._angles[key] = mx.cos(angles), mx.sin(angles)
        cos, sin = self._angles[key]
        first, second = x[..., :half].astype(mx.float32), x[..., half : 2 * half].astype(mx.float32)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return mx.concatenate([*(part.astype(x.dtype) for part in turned), x[..., 2 * half :]], -1)

    def places(self, offset: Any) -> Any:
        """Return a decode step's offset with the rows' shifts; the same array for the same
        offset."""
        if self.shift is None:
            return offset
        if self._shifted is None or self._shifted[0] is not offset:
            self._shifted = offset, offset + self.shift
        return self._shifted[1]


class _TurnsByAxes:
    """Mixed into a rope's class."""

    _positions: RopePositions

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        positions = self._positions
        if positions.positions is not None:
            rope: Any = plain_rope(self)
            return positions.turned(x, rope.base, rope.scale)
        turn: Any = super().__call__  # type: ignore[misc]
        turned: mx.array = turn(x, offset=positions.places(offset))
        return turned


def admit_positions(model: nn.Module, axes: np.ndarray) -> RopePositions:
    """Let the model's ropes take positions of images, in place; returns what holds them. Raises
    ModelError: it has ropes of another kind."""
    positions = RopePositions(axes)
    count = 0
    for path, module in model.named_modules():
        if path.rpartition(".")[2] != "rope" or ".rope." in path:
            continue
        rope = plain_rope(module)
        if not isinstance(rope, nn.RoPE) or rope.traditional or rope.dims != 2 * len(axes):
            raise ModelError(f"cannot read images: {path} is not a rope of {2 * len(axes)} numbers")
        if not isinstance(module, _TurnsByAxes):
            kind: Any = type(module)
            module.__class__ = type(f"{kind.__name__}ByAxes", (_TurnsByAxes, kind), {})
        object.__setattr__(module, "_positions", positions)
        count += 1
    if not count:
        raise ModelError("images cannot be read: the model has no rope")
    return positions

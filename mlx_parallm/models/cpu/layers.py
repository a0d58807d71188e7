"""Layers of mlx-lm on a CPU, made faster in place.

    use_fast_swiglu   the feed-forwards that a trial shows to be a SwiGLU
    use_fast_rope     mlx's nn.RoPE: a step's angles are computed once, not in every layer

The trainer's tree uses the first too. docs/benchmarks/serving.md.
"""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.models.cpu import kernels

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_AGREES = 1e-5  # relative to the largest output
# scales of the inputs tried: the small one shows another curve, the large one a clamp (step3p5)
_SCALES = (1.0, 1000.0)


class FastMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) over another feed-forward's projections, under their names.
    `trained`: gradients are taken."""

    def __init__(self, mlp: nn.Module, *, trained: bool) -> None:
        super().__init__()
        swiglu = kernels.swiglu_with_gradient if trained else kernels.swiglu
        object.__setattr__(self, "_swiglu", swiglu)
        for name in _PROJECTIONS:
            setattr(self, name, mlp[name])

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self._swiglu(self.gate_proj(x), self.up_proj(x)))


def use_fast_swiglu(model: nn.Module, *, trained: bool = False) -> int:
    """Replaces, in place, the feed-forwards that give what FastMLP gives; returns how many.
    Before the linear layers are wrapped. Evaluates each one once, on a few random vectors.
    `trained`: gradients are taken."""
    if not kernels.available():
        return 0
    modules = [
        (path, module) for path, module in model.named_modules() if set(module) == set(_PROJECTIONS)
    ]
    replaced = [
        (path, FastMLP(module, trained=trained)) for path, module in modules if _is_swiglu(module)
    ]
    if replaced:
        model.update_modules(tree_unflatten(replaced))
    return len(replaced)


class FastRoPE(nn.Module):
    """nn.RoPE. A decode step's `offset` is one array [B] for all layers: its cos and sin are
    computed by the first that asks. Everything else (a prefill, other types) goes to `rope`."""

    def __init__(self, rope: nn.RoPE, angles: "_Angles") -> None:
        super().__init__()
        self.rope = rope
        object.__setattr__(self, "_angles", angles)  # not a parameter

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x [B, H, T, D], at positions offset … offset + T - 1."""
        one_position = (
            isinstance(offset, mx.array) and offset.ndim == 1 and x.ndim == 4 and x.shape[2] == 1
        )
        if not one_position or x.dtype != mx.float32 or x.shape[3] != self.rope.dims:
            return self.rope(x, offset=offset)
        return _rotated(x, *self._angles.of(offset))


class _Angles:
    """cos and sin of the last positions that were asked for, [B, 1, 1, dims / 2] each."""

    def __init__(self, rope: nn.RoPE) -> None:
        half = rope.dims // 2
        self._frequencies = rope.scale * mx.exp(
            mx.arange(0.0, -half, -1.0) * (math.log(rope.base) / half)
        )
        mx.eval(self._frequencies)  # another thread will use it
        self._positions: mx.array | None = None
        self._cos_sin: tuple[mx.array, mx.array] = (self._frequencies, self._frequencies)

    def of(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        if positions is not self._positions:
            self._positions, self._cos_sin = positions, _cos_sin(positions, self._frequencies)
        return self._cos_sin


@mx.compile
def _cos_sin(positions: mx.array, frequencies: mx.array) -> tuple[mx.array, mx.array]:
    angles = positions[:, None].astype(mx.float32) * frequencies
    return mx.cos(angles)[:, None, None], mx.sin(angles)[:, None, None]


@mx.compile
def _rotated(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def plain_rope(rope: nn.Module) -> Any:
    """Return the module that `use_fast_rope` has replaced; another one as it is."""
    return rope.rope if isinstance(rope, FastRoPE) else rope


def use_fast_rope(model: nn.Module) -> int:
    """Replaces, in place, the nn.RoPE modules that turn halves (not pairs); returns how many."""
    if not kernels.available():
        return 0
    modules = [
        (path, rope)
        for path, rope in model.named_modules()
        if type(rope) is nn.RoPE and not rope.traditional
    ]
    angles = {(rope.dims, rope.base, rope.scale): _Angles(rope) for _, rope in modules}
    replaced = [
        (path, FastRoPE(rope, angles[rope.dims, rope.base, rope.scale])) for path, rope in modules
    ]
    if replaced:
        model.update_modules(tree_unflatten(replaced))
    return len(replaced)


def _is_swiglu(mlp: nn.Module) -> bool:
    gate = mlp["gate_proj"]
    if not isinstance(gate, nn.Linear) or gate.weight.dtype != mx.float32:
        return False
    x = mx.random.normal((4, gate.weight.shape[1]), key=mx.random.key(0))
    fast = FastMLP(mlp, trained=False)
    try:
        return all(_agree(mlp(scale * x), fast(scale * x)) for scale in _SCALES)
    except (ValueError, TypeError, AttributeError):
        return False


def _agree(exact: mx.array, fast: mx.array) -> bool:
    return exact.shape == fast.shape and bool(
        (mx.abs(exact - fast).max() <= _AGREES * mx.abs(exact).max()).item()
    )

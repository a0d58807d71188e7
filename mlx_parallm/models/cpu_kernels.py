"""MLX on the CPU, made faster: exp, SwiGLU, rotary positions, and products with quantised weights.

    exp_minus         exp(x - shift), for the sampler and the log-probabilities; MLX computes exp one element at a time
    use_fast_swiglu   replaces the feed-forwards of a serving tree that a trial shows to be a SwiGLU
    use_fast_rope     replaces mlx's nn.RoPE: a step's angles are computed once, not in every layer
    use_unpacking     multiplies quantised weights with several rows by unpacking the weights for the moment

The first three are MLX's own cheap operations, fused by `mx.compile`, which needs a C++ compiler; without one, and on
GPUs, MLX's functions stay. The trainer's tree uses SwiGLU too, with a gradient of its own. docs/benchmarks/serving.md.

MLX's CPU product with quantised weights works row by row; from a few rows on, unpacking the weights once and a BLAS
product is faster (55 times for 512 rows, docs/benchmarks/memory.md). Plain differentiation would keep the unpacked
weights until the backward pass: float32 of the whole model. So the gradient is written out and unpacks them again.
Experts (`SwitchLinear`) are left as they are: their products gather weights by token.
"""

import math
import shutil
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

_ROUND = 12582912.0  # 1.5 · 2²³: adding it leaves a float32 rounded to an integer
_LOWEST = -87.0  # exp below it is no normal float32
_LOWEST_POWER = -100.0  # products with 2^-125 would be subnormal numbers, which take a BLAS 30 times as long
EXP2_SHAPES = 1024  # traces that are kept
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_AGREES = 1e-5  # of the largest output
_SCALES = (1.0, 1000.0)  # of the inputs tried: the small one shows another curve, the large one a clamp (step3p5)
FEWEST_ROWS = 2  # one row is faster in MLX's product
UNPACKED = 1 << 21  # weights that are unpacked at a time: 8 MiB of float32; MLX allocates some dozens of them ahead


def on_cpu() -> bool:
    """True when MLX computes on the CPU: float32 is then 10 to 20 times faster than half precision."""
    return mx.default_device().type == mx.DeviceType.cpu


@cache
def available() -> bool:
    """True where these functions are faster than MLX's."""
    return on_cpu() and shutil.which("g++") is not None


def exp_minus(x: mx.array, shift: mx.array) -> mx.array:
    """exp(x - shift) of float32, x ≤ shift; relative error 8e-8 (MLX's own: 4e-6), exactly 0 below exp(-87), NaN stays
    NaN."""
    return _exp_minus(x, shift) if available() else mx.exp(x - shift)


@mx.compile
def _exp_minus(x: mx.array, shift: mx.array) -> mx.array:
    return _exp(x - shift)


def _exp(x: mx.array) -> mx.array:
    """2^k · exp(r) with k = round(x / ln 2) and the polynomial of Cephes' expf for exp(r), |r| ≤ ln 2 / 2."""
    bounded = mx.maximum(x, _LOWEST)
    k = (bounded * 1.4426950408889634 + _ROUND) - _ROUND
    r = bounded - k * 0.693359375 + k * 2.12194440e-4
    p = ((1.9875691500e-4 * r + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2
    p = ((p * r + 1.6666665459e-1) * r + 5.0000001201e-1) * (r * r) + r + 1.0
    power = mx.view((k.astype(mx.int32) + 127) << 23, mx.float32)
    return mx.where(x < _LOWEST, 0.0, p * power)


def exp2_minus(x: mx.array, shift: mx.array) -> mx.array:
    """2^(x - shift) of float32, x ≤ shift; relative error 2e-7, 2⁻¹⁰⁰ at the least, NaN stays NaN.

    MLX keeps a trace of a compiled function for every shape that it was called with. Here shapes are as many as there
    are texts, so the ones not used for longest are dropped.
    """
    return _exp2_of(x.shape)(x, shift) if available() else mx.exp((x - shift) * math.log(2))


@lru_cache(maxsize=EXP2_SHAPES)
def _exp2_of(shape: tuple[int, ...]) -> Callable[[mx.array, mx.array], mx.array]:
    return mx.compile(lambda x, shift: exp2(x - shift))


def exp2(x: mx.array) -> mx.array:
    """2^k · 2^r with k = round(x), and the polynomial of Cephes' exp2f for 2^r, |r| ≤ 1/2. The last bits of
    x + 1.5 · 2²³ are k: shifted, they are the exponent of 2^k less that of 1."""
    bounded = mx.maximum(x, _LOWEST_POWER)
    rounded = bounded + _ROUND
    r = bounded - (rounded - _ROUND)
    p = ((1.535336188319500e-4 * r + 1.339887440266574e-3) * r + 9.618437357674640e-3) * r + 5.550332471162809e-2
    p = ((p * r + 2.402264791363012e-1) * r + 6.931472028550421e-1) * r + 1.0
    return p * mx.view((mx.view(rounded, mx.int32) << 23) + 0x3F800000, mx.float32)


def _sigmoid(x: mx.array) -> mx.array:
    """(1 + tanh(x / 2)) / 2; tanh is Eigen's rational function: no exp."""
    t = mx.minimum(mx.maximum(x * 0.5, -7.99881172180175781), 7.99881172180175781)
    s = t * t
    p = ((-2.76076847742355e-16 * s + 2.00018790482477e-13) * s - 8.60467152213735e-11) * s + 5.12229709037114e-08
    p = ((p * s + 1.48572235717979e-05) * s + 6.37261928875436e-04) * s + 4.89352455891786e-03
    q = ((1.19825839466702e-06 * s + 1.18534705686654e-04) * s + 2.26843463243900e-03) * s + 4.89352518554385e-03
    return 0.5 + 0.5 * (t * p / q)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up in float32. σ(gate) is kept for the gradient, in which MLX fuses nothing; there is no second
    derivative."""
    return cast("tuple[mx.array, mx.array]", _swiglu_and_share(gate, up))[0]


@mx.custom_function
@partial(mx.compile, shapeless=True)
def _swiglu_and_share(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    share = _sigmoid(gate)
    return gate * share * up, share


@_swiglu_and_share.vjp
def _swiglu_slopes(
    primals: tuple[mx.array, mx.array], cotangents: tuple[mx.array, mx.array], outputs: tuple[mx.array, mx.array]
) -> tuple[mx.array, mx.array]:
    """d silu(x) / dx = σ(x) · (1 + x · (1 - σ(x)))."""
    (gate, up), (_, share) = primals, outputs
    shared = cotangents[0] * share
    return shared * up * (1.0 + gate * (1.0 - share)), shared * gate


class FastMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) over another feed-forward's projections, under their names."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        for name in _PROJECTIONS:
            setattr(self, name, mlp[name])

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def use_fast_swiglu(model: nn.Module) -> int:
    """Replaces, in place, the feed-forwards that give what FastMLP gives; returns how many. Before the linear layers
    are wrapped. Evaluates each one once, on a few random vectors."""
    if not available():
        return 0
    modules = [(path, module) for path, module in model.named_modules() if set(module) == set(_PROJECTIONS)]
    replaced = [(path, FastMLP(module)) for path, module in modules if _is_swiglu(module)]
    if replaced:
        model.update_modules(tree_unflatten(replaced))
    return len(replaced)


class FastRoPE(nn.Module):
    """nn.RoPE. A decode step's `offset` is one array [B] for all layers: its cos and sin are computed by the first that
    asks. Everything else (a prefill, other types) goes to `rope`."""

    def __init__(self, rope: nn.RoPE, angles: "_Angles") -> None:
        super().__init__()
        self.rope = rope
        object.__setattr__(self, "_angles", angles)  # not a parameter

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x [B, H, T, D], at positions offset … offset + T - 1."""
        one_position = isinstance(offset, mx.array) and offset.ndim == 1 and x.ndim == 4 and x.shape[2] == 1
        if not one_position or x.dtype != mx.float32 or x.shape[3] != self.rope.dims:
            return self.rope(x, offset=offset)
        return _rotated(x, *self._angles.of(offset))


class _Angles:
    """cos and sin of the last positions that were asked for, [B, 1, 1, dims / 2] each."""

    def __init__(self, rope: nn.RoPE) -> None:
        half = rope.dims // 2
        self._frequencies = rope.scale * mx.exp(mx.arange(0.0, -half, -1.0) * (math.log(rope.base) / half))
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


def use_fast_rope(model: nn.Module) -> int:
    """Replaces, in place, the nn.RoPE modules that turn halves (not pairs); returns how many."""
    if not available():
        return 0
    modules = [(path, rope) for path, rope in model.named_modules() if type(rope) is nn.RoPE and not rope.traditional]
    angles = {(rope.dims, rope.base, rope.scale): _Angles(rope) for _, rope in modules}
    replaced = [(path, FastRoPE(rope, angles[rope.dims, rope.base, rope.scale])) for path, rope in modules]
    if replaced:
        model.update_modules(tree_unflatten(replaced))
    return len(replaced)


def _is_swiglu(mlp: nn.Module) -> bool:
    gate = mlp["gate_proj"]
    if not isinstance(gate, nn.Linear) or gate.weight.dtype != mx.float32:
        return False
    x = mx.random.normal((4, gate.weight.shape[1]), key=mx.random.key(0))
    fast = FastMLP(mlp)
    try:
        return all(_agree(mlp(scale * x), fast(scale * x)) for scale in _SCALES)
    except (ValueError, TypeError, AttributeError):
        return False


def _agree(exact: mx.array, fast: mx.array) -> bool:
    return exact.shape == fast.shape and bool((mx.abs(exact - fast).max() <= _AGREES * mx.abs(exact).max()).item())


class UnpackingLinear(nn.QuantizedLinear):
    """nn.QuantizedLinear, whose products with FEWEST_ROWS rows and more unpack the weights."""

    def __call__(self, x: mx.array) -> mx.array:
        if _rows(x) < FEWEST_ROWS:
            return super().__call__(x)
        y = _product(x, self)
        return y + self["bias"] if "bias" in self else y


class UnpackingEmbedding(nn.QuantizedEmbedding):
    """nn.QuantizedEmbedding, which does the same as a head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return super().as_linear(x) if _rows(x) < FEWEST_ROWS else _product(x, self)


def use_unpacking(model: nn.Module) -> int:
    """Changes the quantised layers in place where MLX computes on a CPU; returns how many. Formats other than scale and
    bias a group ("affine") stay as they are."""
    if not on_cpu():
        return 0
    kinds = {nn.QuantizedLinear: UnpackingLinear, nn.QuantizedEmbedding: UnpackingEmbedding}
    modules = [module for module in model.modules() if type(module) in kinds and module.mode == "affine"]
    for module in modules:
        module.__class__ = kinds[type(module)]  # the same object: whatever holds it sees the change
    return len(modules)


def unpacks(module: nn.Module) -> bool:
    return isinstance(module, UnpackingLinear | UnpackingEmbedding)


def _rows(x: mx.array) -> int:
    return x.size // x.shape[-1]


def _product(x: mx.array, layer: Any) -> mx.array:
    """x [..., in] · Wᵀ → [..., out] in x's dtype, computed in float32."""
    outputs, groups = layer.scales.shape
    width = x.shape[-1]

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        columns = _columns(x.reshape(-1, width).astype(mx.float32), layer.bits)
        parts = [
            _sum_of_products(columns, [plane.T for plane in _planes(layer, part, slice(None))])
            for part in _slices(outputs, width)
        ]
        return _side_by_side(parts).reshape(*x.shape[:-1], outputs).astype(x.dtype)

    @product.vjp
    def gradient(x: mx.array, slope: mx.array, _: mx.array) -> mx.array:
        rows = slope.reshape(-1, outputs).astype(mx.float32)
        parts = []
        for part in _slices(groups, outputs * layer.group_size):
            columns = [rows @ plane for plane in _planes(layer, slice(None), part)]
            parts.append(columns[0] if len(columns) == 1 else mx.stack(columns, axis=-1).reshape(len(rows), -1))
        return _side_by_side(parts).reshape(x.shape).astype(x.dtype)

    y = product(x)
    assert isinstance(y, mx.array)
    return y


def _planes(layer: Any, outputs: slice, groups: slice) -> list[mx.array]:
    """The weights of some outputs and groups of inputs, float32: in 4 bits the even columns and the odd ones, as they
    lie in the two halves of a byte, [n, in / 2] each; else all, [n, in]."""
    count = layer.scales.shape[1]
    scales = layer.scales[outputs][:, groups].astype(mx.float32)
    biases = layer.biases[outputs][:, groups].astype(mx.float32)
    words = layer.weight[outputs]
    if layer.bits not in _UNPACK:
        chosen = words.reshape(len(words), count, -1)[:, groups].reshape(len(words), -1)
        return [mx.dequantize(chosen, scales, biases, layer.group_size, layer.bits)]
    packed = mx.view(words, mx.uint8).reshape(len(words), count, -1)[:, groups]
    planes = _UNPACK[layer.bits](packed, scales[..., None], biases[..., None])
    return [plane.reshape(len(words), -1) for plane in planes]


@mx.compile
def _halves(packed: mx.array, scales: mx.array, biases: mx.array) -> list[mx.array]:
    return [(q.astype(mx.float32) * scales + biases) for q in (packed & 15, packed >> 4)]


@mx.compile
def _bytes(packed: mx.array, scales: mx.array, biases: mx.array) -> list[mx.array]:
    return [packed.astype(mx.float32) * scales + biases]


_UNPACK = {4: _halves, 8: _bytes}  # fused loops, ten times as fast as mx.dequantize, and the same bits


def _columns(x: mx.array, bits: int) -> list[mx.array]:
    """Columns of x [n, in] for each of the planes."""
    if bits != 4:
        return [x]
    pairs = x.reshape(len(x), -1, 2)
    return [mx.contiguous(pairs[..., half]) for half in (0, 1)]  # else each slice's product copies its columns anew


def _sum_of_products(columns: list[mx.array], weights: list[mx.array]) -> mx.array:
    y = columns[0] @ weights[0]
    for x, w in zip(columns[1:], weights[1:], strict=True):
        y = mx.addmm(y, x, w)
    return y


def _slices(count: int, size: int) -> list[slice]:
    """Slice `count` things of `size` weights each, so that at most UNPACKED weights are unpacked at a time."""
    step = max(1, UNPACKED // size)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _side_by_side(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

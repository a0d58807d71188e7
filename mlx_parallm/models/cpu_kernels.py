"""MLX on the CPU, made faster: exp, SwiGLU, rotary positions, and products with quantised weights.

    exp_minus         exp(x - shift), for the sampler and the log-probabilities; MLX computes exp
                      one element at a time
    row_maxima        of the same; MLX compares one number at a time
    fused             a function of many numbers, such as a training step's gradient, for one call
    use_fast_swiglu   replaces the feed-forwards of a serving tree that a trial shows to be a SwiGLU
    use_fast_rope     replaces mlx's nn.RoPE: a step's angles are computed once, not in every layer
    use_unpacking     multiplies quantised weights with several rows by unpacking the weights for
                      the moment

The first five are MLX's own cheap operations, fused by `mx.compile`, which needs a C++ compiler;
without one, and on GPUs, MLX's functions stay. The trainer's tree uses SwiGLU too, with a gradient
of its own. docs/benchmarks/serving.md.

MLX's CPU product with quantised weights works row by row; from a few rows on, unpacking the weights
once and a BLAS product is faster (55 times for 512 rows, docs/benchmarks/memory.md). Plain
differentiation would keep the unpacked weights until the backward pass: float32 of the whole model.
So the gradient is written out and unpacks them again. Experts (`SwitchLinear`) are unpacked all at
once, one projection at a time, where there are more products than experts.
"""

import math
import shutil
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.models.mlx_lm_api import QuantizedSwitchLinear
from mlx_parallm.system.device.faults import raise_device_fault
from mlx_parallm.system.hardware import on_cpu as on_cpu
from mlx_parallm.system.log import get_logger

log = get_logger(__name__)
_ROUND = 12582912.0  # 1.5 · 2²³: adding it leaves a float32 rounded to an integer
_ONE, _NAN = 0x3F800000, 0x7FC00000  # bits of 1.0 and of a NaN
_UNIT = float(1 << 23)  # of the last bit of a number between 1 and 2
# below them exp and 2^x are 0 here, above them normal numbers
_LOWEST, _LOWEST_POWER = -87.0, -100.0
# (e^r - 1 - r) / r² on [-ln 2 / 2, ln 2 / 2]: Cephes' expf
_EXP = (
    5.0000001201e-1,
    1.6666665459e-1,
    4.1665795894e-2,
    8.3334519073e-3,
    1.3981999507e-3,
    1.9875691500e-4,
)
# (2^r - 1) / r on [0, 1]: interpolated at Chebyshev's nodes, error 5e-9
_EXP2 = (
    6.9314717086e-01,
    2.4022720418e-01,
    5.5496023564e-02,
    9.6521950553e-03,
    1.2692166076e-03,
    2.0817915021e-04,
)
# σ(x) = 1/2 + x · p(x²) / q(x²): Eigen's rational tanh of x / 2, where x is bounded
_BOUND = 15.997623443603516
_SHARE_P = (
    4.89352455891786e-03 / 4,
    6.37261928875436e-04 / 4**2,
    1.48572235717979e-05 / 4**3,
    5.12229709037114e-08 / 4**4,
    -8.60467152213735e-11 / 4**5,
    2.00018790482477e-13 / 4**6,
    -2.76076847742355e-16 / 4**7,
)
_SHARE_Q = (
    4.89352518554385e-03,
    2.26843463243900e-03 / 4,
    1.18534705686654e-04 / 4**2,
    1.19825839466702e-06 / 4**3,
)
TRACES = 512  # of fused functions that a thread keeps, 36 KB each: one for each function and size
FEWEST_TO_FUSE = 1 << 18  # numbers of a hidden state, or logits
LEAST_TO_FOLD = 1 << 16  # numbers: of fewer, one reduction is faster than more operations
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_AGREES = 1e-5  # of the largest output
# of the inputs tried: the small one shows another curve, the large one a clamp (step3p5)
_SCALES = (1.0, 1000.0)
FEWEST_ROWS = 2  # one row is faster in MLX's product
# weights that are unpacked at a time: 8 MiB of float32; MLX allocates some dozens of them ahead
UNPACKED = 1 << 21
UNPACKED_EXPERTS = 1 << 28  # weights of one projection of all experts: 1 GiB of float32


@cache
def available() -> bool:
    """True where these functions are faster than MLX's."""
    if not on_cpu() or shutil.which("g++") is None:
        return False
    try:
        mx.eval(mx.compile(lambda x: x * 2.0 + 1.0)(mx.zeros((2,))))
    except RuntimeError as error:
        raise_device_fault(error)
        log.warning("MLX cannot compile, so some operations are slower", reason=str(error))
        return False
    return True


class _Traces(threading.local):
    """Compiled functions, separate for each thread. MLX keeps a thread's traces by the address of
    the Python function, and drops only those of the thread that called it last. If two threads
    called one function, its trace would remain for the next function at that address."""

    def __init__(self) -> None:
        self.of = lru_cache(maxsize=TRACES)(_compiled)


def _compiled(function: Callable[..., Any], size: int) -> Callable[..., Any]:
    return mx.compile(lambda *arrays: function(*arrays))


def _fused(function: Callable[..., Any], size: int) -> Callable[..., Any]:
    """The function as one loop over flat arrays of this size. MLX keeps a trace for every shape;
    here the sizes are as many as there are texts, so the ones not used for longest are dropped.

    g++ computes four numbers at a time where nothing is broadcast, where no number is chosen
    (`mx.maximum`, `mx.where`) and where MLX does not cut the chain, which it does after 11
    operations. So bits are masked, polynomials are trees, and bounds and differences are operations
    before. `reshape` keeps those apart where all of it is fused with more (`fused`).
    """
    return _traces.of(function, size)


_traces = _Traces()


def fused(function: Callable[..., Any], size: int) -> Callable[..., Any]:
    """The function of arrays, for one call: on a CPU, and where its arrays have so many numbers
    that it pays, its operations one by one become loops of several. It must not evaluate an array.

    For a new architecture g++ makes some 30 loops, 0.4 s each, and keeps them in the directory for
    temporary files; other threads that need a loop wait for it. Part of a loop are numbers that are
    no arrays, and arrays of one number that are no arguments: those that change from call to call
    go through `as_data`, or each call would make new loops.
    """
    return mx.compile(function) if size >= FEWEST_TO_FUSE and available() else function


def as_data(number: float) -> mx.array:
    """A number as an array [], float32, that a loop of a `fused` function reads. To be called
    inside that function: MLX writes into a loop's code what has one element and is evaluated."""
    return mx.array([number, number])[0]


def exp_minus(x: mx.array, shift: mx.array) -> mx.array:
    """exp(x - shift) of float32, x ≤ shift; relative error 1.2e-7 (MLX's own: 4e-6), exactly 0
    below exp(-87), NaN stays NaN."""
    x = x - shift
    if not available():
        return mx.exp(x)
    shape, x = x.shape, x.reshape(-1)
    power = _fused(_power, x.size)(x)
    rest = mx.view(_fused(_exp_of_rest, x.size)(x, power), mx.int32)
    return mx.view(_fused(_times_power, x.size)(x, power, rest), mx.float32).reshape(shape)


def _power(x: mx.array) -> mx.array:
    """k of e^x = 2^k · e^r, |r| ≤ ln 2 / 2."""
    return (x * 1.4426950408889634 + _ROUND) - _ROUND


def _exp_of_rest(x: mx.array, k: mx.array) -> mx.array:
    r = (x - k * 0.693359375) + k * 2.12194440e-4
    r2, a = r * r, _EXP
    return (1.0 + r) + ((a[0] + a[1] * r) + ((a[2] + a[3] * r) + (a[4] + a[5] * r) * r2) * r2) * r2


def _times_power(x: mx.array, k: mx.array, bits: mx.array) -> mx.array:
    """Bits of 2^k · p, of p's."""
    mask = (x < _LOWEST).astype(mx.int32) - 1
    return (bits + (k.astype(mx.int32) << 23)) & mask


def exp2_minus(x: mx.array, shift: mx.array) -> mx.array:
    """2^(x - shift) of float32, x ≤ shift; relative error 1.2e-7, exactly 0 below 2⁻¹⁰⁰, NaN
    stays NaN. An x far above the shift gives any number."""
    x = x - shift
    if not available():
        return mx.exp(x * math.log(2))
    shape, x = x.shape, x.reshape(-1)
    return mx.view(_fused(_exp2, x.size)(x), mx.float32).reshape(shape)


def _exp2(x: mx.array) -> mx.array:
    """Bits of 2^k · p with 1 ≤ p ≤ 2: at 2 the sum carries."""
    k = ((x - 0.5) + _ROUND) - _ROUND
    r, a = x - k, [factor * _UNIT for factor in _EXP2]
    r2 = r * r
    r3 = r2 * r
    mantissa = ((a[0] + a[1] * r) * r + (a[2] + a[3] * r) * r3) + (a[4] + a[5] * r) * (r3 * r2)
    mask, nan = -(x >= _LOWEST_POWER).astype(mx.int32), -(x != x).astype(mx.int32) & _NAN
    return (mantissa.astype(mx.int32) & mask) + ((((k.astype(mx.int32) << 23) + _ONE) & mask) | nan)


def row_maxima(x: mx.array) -> mx.array:
    """`x.max(axis=-1, keepdims=True)`. MLX's reduction of rows goes one number at a time on the
    CPU, comparing two halves many."""
    while x.size >= LEAST_TO_FOLD and x.shape[-1] > 1 and on_cpu():
        half = (x.shape[-1] + 1) // 2
        x = mx.maximum(x[..., :half], x[..., -half:])
    return x.max(axis=-1, keepdims=True)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up in float32. σ(gate) is kept for the gradient; there is no second
    derivative."""
    return cast("tuple[mx.array, mx.array]", _swiglu_and_share(gate, up))[0]


@mx.custom_function
def _swiglu_and_share(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    bounded = mx.minimum(mx.maximum(gate, -_BOUND), _BOUND).reshape(-1)
    gated, share = _fused(_gated, gate.size)(bounded, gate.reshape(-1), up.reshape(-1))
    return gated.reshape(gate.shape), share.reshape(gate.shape)


def _gated(bounded: mx.array, gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    (a, b), s = (_SHARE_P, _SHARE_Q), bounded * bounded
    s2 = s * s
    p = ((a[0] + a[1] * s) + (a[2] + a[3] * s) * s2) + ((a[4] + a[5] * s) + a[6] * s2) * (s2 * s2)
    q = (b[0] + b[1] * s) + (b[2] + b[3] * s) * s2
    share = 0.5 + bounded * p / q
    return gate * share * up, share


@_swiglu_and_share.vjp
def _swiglu_slopes(
    primals: tuple[mx.array, mx.array],
    cotangents: tuple[mx.array, mx.array],
    outputs: tuple[mx.array, mx.array],
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
    """Replaces, in place, the feed-forwards that give what FastMLP gives; returns how many.
    Before the linear layers are wrapped. Evaluates each one once, on a few random vectors."""
    if not available():
        return 0
    modules = [
        (path, module) for path, module in model.named_modules() if set(module) == set(_PROJECTIONS)
    ]
    replaced = [(path, FastMLP(module)) for path, module in modules if _is_swiglu(module)]
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


def use_fast_rope(model: nn.Module) -> int:
    """Replaces, in place, the nn.RoPE modules that turn halves (not pairs); returns how many."""
    if not available():
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
    fast = FastMLP(mlp)
    try:
        return all(_agree(mlp(scale * x), fast(scale * x)) for scale in _SCALES)
    except (ValueError, TypeError, AttributeError):
        return False


def _agree(exact: mx.array, fast: mx.array) -> bool:
    return exact.shape == fast.shape and bool(
        (mx.abs(exact - fast).max() <= _AGREES * mx.abs(exact).max()).item()
    )


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


class UnpackingSwitchLinear(QuantizedSwitchLinear):
    """mlx-lm's quantised experts, whose weights are unpacked where there are more products than
    experts, and room: MLX's `gather_qmm` multiplies token by token on a CPU."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        experts, outputs, _ = self.weight.shape
        size = experts * outputs * self.input_dims
        if indices.size < experts or size > UNPACKED_EXPERTS:
            y: mx.array = super().__call__(x, indices, sorted_indices)
            return y
        y = _product_of_experts(x, indices, self, sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


def _product_of_experts(
    x: mx.array, indices: mx.array, layer: Any, sorted_indices: bool
) -> mx.array:
    """x [..., 1, in] · W[indices]ᵀ → [..., 1, out] in x's dtype, computed in float32."""

    def multiply(x: mx.array) -> mx.array:
        weights = _whole(layer).swapaxes(-1, -2)
        y = mx.gather_mm(
            x.astype(mx.float32), weights, rhs_indices=indices, sorted_indices=sorted_indices
        )
        return y.astype(x.dtype)

    product = mx.custom_function(multiply)

    @product.vjp
    def gradient(x: mx.array, slope: mx.array, _: mx.array) -> mx.array:
        return mx.vjp(multiply, [x], [slope])[1][0]  # the product itself is not evaluated again

    y = product(x)
    assert isinstance(y, mx.array)
    return y


def _whole(layer: Any) -> mx.array:
    """All weights [experts, out, in] float32."""
    experts, outputs, groups = layer.scales.shape
    if layer.bits not in _UNPACK:
        return mx.dequantize(
            layer.weight,
            layer.scales.astype(mx.float32),
            layer.biases.astype(mx.float32),
            layer.group_size,
            layer.bits,
        )
    packed = mx.view(layer.weight, mx.uint8).reshape(experts, outputs, groups, -1)
    scales, biases = (array.astype(mx.float32)[..., None] for array in (layer.scales, layer.biases))
    planes = _UNPACK[layer.bits](packed, scales, biases)
    whole = planes[0] if len(planes) == 1 else mx.stack(planes, axis=-1)
    return whole.reshape(experts, outputs, -1)


def use_unpacking(model: nn.Module) -> int:
    """Changes the quantised layers in place where MLX computes on a CPU; returns how many.
    Formats other than scale and bias a group ("affine") stay as they are."""
    if not on_cpu():
        return 0
    kinds: dict[type[nn.Module], type[nn.Module]] = {
        nn.QuantizedLinear: UnpackingLinear,
        nn.QuantizedEmbedding: UnpackingEmbedding,
        QuantizedSwitchLinear: UnpackingSwitchLinear,
    }
    modules = [
        module for module in model.modules() if type(module) in kinds and module.mode == "affine"
    ]
    for module in modules:
        module.__class__ = kinds[type(module)]  # the same object: whatever holds it sees the change
    return len(modules)


def unpacks(module: nn.Module) -> bool:
    return isinstance(module, UnpackingLinear | UnpackingEmbedding | UnpackingSwitchLinear)


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
            parts.append(
                columns[0]
                if len(columns) == 1
                else mx.stack(columns, axis=-1).reshape(len(rows), -1)
            )
        return _side_by_side(parts).reshape(x.shape).astype(x.dtype)

    y = product(x)
    assert isinstance(y, mx.array)
    return y


def _planes(layer: Any, outputs: slice, groups: slice) -> list[mx.array]:
    """The weights of some outputs and groups of inputs, float32: in 4 bits the even columns and
    the odd ones, as they lie in the two halves of a byte, [n, in / 2] each; else all, [n, in]."""
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


# fused loops, ten times as fast as mx.dequantize, and the same bits
_UNPACK = {4: _halves, 8: _bytes}


def _columns(x: mx.array, bits: int) -> list[mx.array]:
    """Columns of x [n, in] for each of the planes."""
    if bits != 4:
        return [x]
    pairs = x.reshape(len(x), -1, 2)
    # else each slice's product copies its columns anew
    return [mx.contiguous(pairs[..., half]) for half in (0, 1)]


def _sum_of_products(columns: list[mx.array], weights: list[mx.array]) -> mx.array:
    y = columns[0] @ weights[0]
    for x, w in zip(columns[1:], weights[1:], strict=True):
        y = mx.addmm(y, x, w)
    return y


def _slices(count: int, size: int) -> list[slice]:
    """Slice `count` things of `size` weights each, so that at most UNPACKED weights are unpacked
    at a time."""
    step = max(1, UNPACKED // size)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _side_by_side(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

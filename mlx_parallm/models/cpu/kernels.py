"""MLX's cheap operations on a CPU, made faster: exp, 2^x, maxima of rows, SwiGLU.

    exp_minus, exp2_minus   exp(x - shift) and 2^(x - shift); MLX computes exp one element at a time
    row_maxima              MLX compares one number at a time
    swiglu                  silu(gate) · up
    swiglu_with_gradient    the same, for training
    fused                   a function of many numbers, such as a training step's gradient, for one
                            call

They are MLX's own operations, fused by `mx.compile`, which needs a C++ compiler; without one, and
on GPUs, MLX's functions stay. docs/benchmarks/serving.md.
"""

import math
import shutil
import threading
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, cast

import mlx.core as mx

from mlx_parallm.system.device.faults import raise_device_fault
from mlx_parallm.system.device.traits import on_cpu
from mlx_parallm.system.log import get_logger

log = get_logger(__name__)
_ROUND = 12582912.0  # 1.5 · 2²³: adding it leaves a float32 rounded to an integer
_ONE, _NAN = 0x3F800000, 0x7FC00000  # bits of 1.0 and of a NaN
_UNIT = float(1 << 23)  # inverse of the last bit of a number between 1 and 2
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
TRACES = 512  # fused functions that a thread keeps, 36 KB each: one for each function and size
FEWEST_TO_FUSE = 1 << 18  # numbers of a hidden state, or logits
LEAST_TO_FOLD = 1 << 16  # numbers: of fewer, one reduction is faster than more operations


def available() -> bool:
    """True where these functions are faster than MLX's."""
    return on_cpu() and _compiles()


@cache
def _compiles() -> bool:
    if shutil.which("g++") is None:
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

    g++ computes four numbers at a time if nothing is broadcast, no number is chosen
    (`mx.maximum`, `mx.where`) and where MLX does not cut the chain, which it does after 11
    operations. So bits are masked, polynomials are trees, and bounds and differences are operations
    before. `reshape` keeps those apart where all of it is fused with more (`fused`).
    """
    return _traces.of(function, size)


_traces = _Traces()


def fused(function: Callable[..., Any], size: int) -> Callable[..., Any]:
    """The function of arrays, for one call: on a CPU, and if its arrays have so many numbers
    that it pays, its operations one by one become loops of several. It must not evaluate an array.

    For a new architecture g++ makes some 30 loops, 0.4 s each, and keeps them in the directory for
    temporary files; other threads that need a loop wait for it. Part of a loop are numbers that are
    no arrays, and arrays of one number that are not arguments: those that change from call to call
    go through `as_data`, or each call would make new loops.
    """
    return mx.compile(function) if size >= FEWEST_TO_FUSE and available() else function


def as_data(number: float) -> mx.array:
    """A number as an array [], float32, that a loop of a `fused` function reads. To be called
    inside that function: MLX writes evaluated arrays of one element into a loop's code."""
    return mx.array([number, number])[0]


def exp_minus(x: mx.array, shift: mx.array) -> mx.array:
    """exp(x - shift) of float32, x ≤ shift; relative error 1.2e-7 (MLX's own: 4e-6), exactly 0
    below exp(-87), NaN stays NaN."""
    if not on_cpu():
        return cast("mx.array", _exp_minus(x, shift))
    x = x - shift
    if not available():
        return mx.exp(x)
    shape, x = x.shape, x.reshape(-1)
    power = _fused(_power, x.size)(x)
    rest = mx.view(_fused(_exp_of_rest, x.size)(x, power), mx.int32)
    return mx.view(_fused(_times_power, x.size)(x, power, rest), mx.float32).reshape(shape)


@partial(mx.compile, shapeless=True)
def _exp_minus(x: mx.array, shift: mx.array) -> mx.array:
    return mx.exp(x - shift)


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
    """`x.max(axis=-1, keepdims=True)`. MLX's reduction of rows reads one number at a time on the
    CPU, comparing two halves many."""
    while x.size >= LEAST_TO_FOLD and x.shape[-1] > 1 and on_cpu():
        half = (x.shape[-1] + 1) // 2
        x = mx.maximum(x[..., :half], x[..., -half:])
    return x.max(axis=-1, keepdims=True)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up in float32."""
    gated = _fused(_gated_alone, gate.size)(_bounded(gate), gate.reshape(-1), up.reshape(-1))
    return cast("mx.array", gated).reshape(gate.shape)


def swiglu_with_gradient(gate: mx.array, up: mx.array) -> mx.array:
    """The same numbers. σ(gate) is kept for the gradient; there is no second derivative. One row's
    takes twice as long to build and to compute."""
    return cast("tuple[mx.array, mx.array]", _swiglu_and_share(gate, up))[0]


@mx.custom_function
def _swiglu_and_share(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    gated, share = _fused(_gated, gate.size)(_bounded(gate), gate.reshape(-1), up.reshape(-1))
    return gated.reshape(gate.shape), share.reshape(gate.shape)


def _bounded(gate: mx.array) -> mx.array:
    return mx.minimum(mx.maximum(gate, -_BOUND), _BOUND).reshape(-1)


def _gated_alone(bounded: mx.array, gate: mx.array, up: mx.array) -> mx.array:
    return _gated(bounded, gate, up)[0]


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

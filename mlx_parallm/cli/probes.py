"""Probes of MLX's own operations on the default device, against NumPy in float64.

Each `OperationProbe` computes an operation, and its gradient where training needs it, for some
numbers of rows and some types, and what it should have been. Wrong kernels have answered
without an error: for one number of rows, one direction of a quantised product, one size that is
not a multiple of 64 (docs/operations.md#a-mac names the reports). `results` tries all of them in a
few seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.system.device.traits import is_cpu
from mlx_parallm.system.hardware import float32_is_tf32

ROWS = (1, 2, 8, 16, 32, 64)
BOUNDS = {mx.float32: 1e-4, mx.float16: 0.03, mx.bfloat16: 0.2}
"""Largest |difference| as a share of the largest value. Half precision is added up one number after
the other on a CPU; a wrong kernel is off by a half and more."""
TF32_BOUND = 5e-3
DEEP = 192  # length of the sums
ODD = 96  # 64 does not divide it
BITS = 4
VOCABULARY = 262_144
LARGE = (2048, 10_240)  # from which on M5 cut products along the sum (mlx#3797); on GPUs only

Pairs = Sequence[tuple[str, mx.array, np.ndarray]]
"""(part, computed, wanted): "" is the value, others are gradients."""
Compute = Callable[[int, mx.Dtype, np.random.Generator], Pairs]


@dataclass(frozen=True)
class OperationProbe:
    """One operation. `gpu_only`: it would take a CPU minutes. `on_cpu`: the types that MLX has
    there."""

    name: str
    compute: Compute
    rows: tuple[int, ...] = ROWS
    dtypes: tuple[mx.Dtype, ...] = (mx.float32, mx.float16, mx.bfloat16)
    gpu_only: bool = False
    on_cpu: tuple[mx.Dtype, ...] | None = None


@dataclass(frozen=True)
class ProbeResult:
    """`failures`: a sentence for each number of rows and type that is wrong; `error`: the largest
    difference in float32, as a share."""

    name: str
    failures: tuple[str, ...]
    error: float


def results() -> Iterator[ProbeResult]:
    """Try every operation on the default device."""
    on_gpu = not is_cpu()
    bounds = BOUNDS | ({mx.float32: TF32_BOUND} if float32_is_tf32() else {})
    for probe in PROBES:
        if on_gpu or not probe.gpu_only:
            dtypes = probe.dtypes if on_gpu else probe.on_cpu or probe.dtypes
            yield _tried(probe, dtypes, bounds)


def _tried(
    probe: OperationProbe, dtypes: Sequence[mx.Dtype], bounds: dict[mx.Dtype, float]
) -> ProbeResult:
    failures, largest = [], 0.0
    for dtype in dtypes:
        for rows in probe.rows:
            where = f"{rows} rows, {str(dtype).removeprefix('mlx.core.')}"
            try:
                pairs = probe.compute(rows, dtype, np.random.default_rng(rows))
                errors = [(part, _difference(got, wanted)) for part, got, wanted in pairs]
            except (RuntimeError, ValueError, TypeError) as error:
                failures.append(f"{where}: {' '.join(str(error).split())[:120]}")
                continue
            largest = max([largest, *(e for _, e in errors if dtype == mx.float32)])
            failures += [
                f"{where}{f', gradient of {part}' if part else ''}: off by {error:.1e}"
                for part, error in errors
                if not error <= bounds[dtype]
            ]
    return ProbeResult(probe.name, tuple(failures), largest)


def _difference(got: mx.array, wanted: np.ndarray) -> float:
    """Largest |difference| as a share of the largest |wanted|; infinite for another shape."""
    values = np.array(got.astype(mx.float32), np.float64)
    if values.shape != wanted.shape:
        return float("inf")
    scale = float(np.abs(wanted).max(initial=0.0)) or 1.0
    difference = float(np.abs(values - wanted).max(initial=0.0)) / scale
    return difference if np.isfinite(difference) else float("inf")


def _given(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, scale: float = 1.0
) -> tuple[mx.array, np.ndarray]:
    """Normal numbers, rounded to the type: as MLX has them, and exactly in float64."""
    array = mx.array((rng.standard_normal(shape) * scale).astype(np.float32)).astype(dtype)
    return array, _exact(array)


def _exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


# ---------------------------------------------------------------------- the operations


def _products(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    (x, xs), (w, ws) = _given(rng, (rows, DEEP), dtype), _given(rng, (DEEP, 80), dtype)
    g, gs = _given(rng, (rows, 80), dtype)
    [y], [dx, dw] = mx.vjp(mx.matmul, [x, w], [g])
    return [("", y, xs @ ws), ("the input", dx, gs @ ws.T), ("the weights", dw, xs.T @ gs)]


def _large_product(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    outer, deep = LARGE
    x, w = mx.random.normal((outer, deep)), mx.random.normal((deep, outer))
    x, w = x.astype(dtype), w.astype(dtype)
    seen = mx.array(np.linspace(0, outer - 1, rows).astype(np.int32))
    return [("", mx.matmul(x, w)[seen], _exact(x[seen]) @ _exact(w))]


def _packed(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, group: int
) -> tuple[tuple[mx.array, mx.array, mx.array], np.ndarray]:
    """4-bit weights (packed, scales, biases), and what they mean: a number is
    scale · (0 … 15) + bias."""
    *outer, last = shape
    codes = rng.integers(0, 16, shape)
    scales, ss = _given(rng, (*outer, last // group), dtype, 0.1)
    biases, bs = _given(rng, (*outer, last // group), dtype, 0.1)
    words = codes.reshape(*outer, last // 8, 8) << (BITS * np.arange(8))
    packed = mx.array(words.sum(-1).astype(np.uint32))
    return (packed, scales, biases), codes * np.repeat(ss, group, -1) + np.repeat(bs, group, -1)


def _quantised(transpose: bool) -> Compute:
    def compute(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
        (packed, scales, biases), ws = _packed(rng, (128, DEEP), dtype, 64)
        ws = ws.T if transpose else ws
        (x, xs), (g, gs) = (_given(rng, (rows, size), dtype) for size in ws.shape)

        def product(x: mx.array) -> mx.array:
            return mx.quantized_matmul(
                x, packed, scales, biases, transpose=transpose, group_size=64, bits=BITS
            )

        [y], [dx] = mx.vjp(product, [x], [g])
        return [("", y, xs @ ws), ("the input", dx, gs @ ws.T)]

    return compute


def _attention(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    """Two key heads for four query heads, as many queries as rows behind 40 tokens, causal."""
    heads, shared, before, size = 4, 2, 40, 64
    q, qs = _given(rng, (1, heads, rows, size), dtype)
    k, ks = _given(rng, (1, shared, before + rows, size), dtype)
    v, vs = _given(rng, (1, shared, before + rows, size), dtype)
    g, gs = _given(rng, (1, heads, rows, size), dtype)
    scale = size**-0.5

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")

    [y], [dq, dk, dv] = mx.vjp(attend, [q, k, v], [g])
    many_k, many_v = (np.repeat(each, heads // shared, 1) for each in (ks, vs))
    scores = scale * qs @ many_k.swapaxes(-1, -2)
    ahead = np.arange(before + rows) > before + np.arange(rows)[:, None]
    scores = np.where(ahead, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    upward = gs @ many_v.swapaxes(-1, -2)
    ds = scale * weights * (upward - (weights * upward).sum(-1, keepdims=True))

    def to_shared(each: np.ndarray) -> np.ndarray:
        return each.reshape(1, shared, heads // shared, before + rows, size).sum(2)

    return [
        ("", y, weights @ many_v),
        ("the queries", dq, ds @ many_k),
        ("the keys", dk, to_shared(ds.swapaxes(-1, -2) @ qs)),
        ("the values", dv, to_shared(weights.swapaxes(-1, -2) @ gs)),
    ]


def _rope(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    """One token a row: all rows at one offset, then each at its own."""
    heads, size, base = 2, 64, 10_000.0
    x, xs = _given(rng, (rows, heads, 1, size), dtype)
    places = 3 + 5 * np.arange(rows)

    def turned(offsets: np.ndarray) -> np.ndarray:
        angles = offsets[:, None, None, None] * base ** (-np.arange(size // 2) / (size // 2))
        left, right = xs[..., : size // 2], xs[..., size // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([left * cos - right * sin, left * sin + right * cos], -1)

    def rotate(offset: Any) -> mx.array:
        return mx.fast.rope(x, size, traditional=False, base=base, scale=1.0, offset=offset)

    return [
        ("", rotate(37), turned(np.full(rows, 37))),
        ("", rotate(mx.array(places.astype(np.int32))), turned(places)),
    ]


def _experts(rows: int, rng: np.random.Generator) -> tuple[mx.array, np.ndarray]:
    chosen = np.sort(rng.integers(0, 5, rows))
    return mx.array(chosen.astype(np.uint32)), chosen


def _gathered(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    indices, chosen = _experts(rows, rng)
    (x, xs), (w, ws) = _given(rng, (rows, 1, ODD), dtype), _given(rng, (5, ODD, 80), dtype)
    y = mx.gather_mm(x, w, rhs_indices=indices, sorted_indices=True)
    return [("", y, xs @ ws[chosen])]


def _gathered_quantised(transpose: bool) -> Compute:
    def compute(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
        indices, chosen = _experts(rows, rng)
        (packed, scales, biases), ws = _packed(rng, (5, 160, ODD), dtype, 32)
        ws = ws.swapaxes(-1, -2) if transpose else ws
        x, xs = _given(rng, (rows, 1, ws.shape[1]), dtype)
        y = mx.gather_qmm(
            x,
            packed,
            scales,
            biases,
            rhs_indices=indices,
            transpose=transpose,
            group_size=32,
            bits=BITS,
            sorted_indices=True,
        )
        return [("", y, xs @ ws[chosen])]

    return compute


def _scattered(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    """The gradient of a table of embeddings, in which tokens come more than once, and the same by
    hand."""
    chosen = rng.integers(0, 7, rows)
    tokens = mx.array(chosen.astype(np.int32))
    (table, ts), (g, gs) = _given(rng, (7, DEEP), dtype), _given(rng, (rows, DEEP), dtype)
    _, [gradient] = mx.vjp(lambda table: table[tokens], [table], [g])
    summed = np.zeros_like(ts)
    np.add.at(summed, chosen, gs)
    return [("the table", gradient, summed), ("", table.at[tokens].add(g), ts + summed)]


def _argmax(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    places = rng.integers(0, VOCABULARY, rows)
    places[-1] = VOCABULARY - 1
    others = np.broadcast_to(-(np.arange(VOCABULARY) % 7.0), (rows, VOCABULARY)).copy()
    others[np.arange(rows), places] = 1.0
    logits = mx.array(others.astype(np.float32)).astype(dtype)
    return [("", mx.argmax(logits, axis=-1), places.astype(np.float64))]


def _layer_norm(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    size, eps = 320, 1e-5
    (x, xs), (w, ws), (b, bs) = (_given(rng, s, dtype) for s in ((rows, size), (size,), (size,)))
    g, gs = _given(rng, (rows, size), dtype)

    def normalise(x: mx.array, w: mx.array, b: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, w, b, eps)

    [y], [dx, dw, db] = mx.vjp(normalise, [x, w, b], [g])
    deviation = np.sqrt(xs.var(-1, keepdims=True) + eps)
    unit = (xs - xs.mean(-1, keepdims=True)) / deviation
    gw = gs * ws
    wanted = (gw - gw.mean(-1, keepdims=True) - unit * (gw * unit).mean(-1, keepdims=True)) / (
        deviation
    )
    return [
        ("", y, unit * ws + bs),
        ("the input", dx, wanted),
        ("the weights", dw, (gs * unit).sum(0)),
        ("the bias", db, gs.sum(0)),
    ]


def _convolution(rows: int, dtype: mx.Dtype, rng: np.random.Generator) -> Pairs:
    """Patches of images, and a recurrent layer's, one filter a channel."""
    (x, xs), (w, ws) = _given(rng, (rows, 8, 8, 3), dtype), _given(rng, (16, 3, 3, 3), dtype)
    patches = np.lib.stride_tricks.sliding_window_view(xs, (3, 3), (1, 2))
    (t, ts), (f, fs) = _given(rng, (rows, 12, 32), dtype), _given(rng, (32, 4, 1), dtype)
    windows = np.lib.stride_tricks.sliding_window_view(ts, 4, 1)
    return [
        ("", mx.conv2d(x, w), np.einsum("bhwcij,oijc->bhwo", patches, ws)),
        ("", mx.conv1d(t, f, groups=32), np.einsum("btck,ck->btc", windows, fs[..., 0])),
    ]


PROBES = (
    OperationProbe("matmul", _products),
    OperationProbe(
        "matmul of large matrices", _large_product, (8,), (mx.float16, mx.bfloat16), True
    ),
    OperationProbe("quantized_matmul(transpose=True), 4 bits", _quantised(True)),
    OperationProbe("quantized_matmul(transpose=False), 4 bits", _quantised(False)),
    OperationProbe("scaled_dot_product_attention", _attention),
    OperationProbe("rope at offsets", _rope),
    OperationProbe("gather_mm, sorted", _gathered, on_cpu=(mx.float32,)),
    OperationProbe("gather_qmm(transpose=True), sorted, 4 bits", _gathered_quantised(True)),
    OperationProbe("gather_qmm(transpose=False), sorted, 4 bits", _gathered_quantised(False)),
    OperationProbe("scatter-add", _scattered),
    OperationProbe("argmax over 262,144", _argmax),
    OperationProbe("layer_norm", _layer_norm),
    OperationProbe("conv2d, conv1d", _convolution),
)

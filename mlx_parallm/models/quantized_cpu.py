"""Quantised weights on the CPU: many rows are multiplied with weights that are unpacked for the moment.

MLX's CPU product with quantised weights works row by row; from a few rows on, unpacking the weights once and a BLAS
product is faster (55 times for 512 rows, docs/benchmarks/memory.md). Differentiated plainly, unpacked weights would
stay until the backward pass: float32 of the whole model. So the gradient is written out and unpacks them again.

    use_unpacking      gives a tree's quantised layers that forward; where MLX computes on a CPU

Layers keep their class's names, arrays and checks (they are subclasses of MLX's). Experts (`SwitchLinear`) are left as
they are: their products gather weights by token.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.fast_math import on_cpu

FEWEST_ROWS = 2  # one row is faster in MLX's product
UNPACKED = 1 << 21  # weights that are unpacked at a time: 8 MiB of float32; MLX allocates some dozens of them ahead


class UnpackingLinear(nn.QuantizedLinear):
    """nn.QuantizedLinear, whose products with FEWEST_ROWS rows and more unpack the weights."""

    def __call__(self, x: mx.array) -> mx.array:
        if _rows(x) < FEWEST_ROWS:
            return super().__call__(x)
        y = _product(x, self)
        return y + self["bias"] if "bias" in self else y


class UnpackingEmbedding(nn.QuantizedEmbedding):
    """The same of nn.QuantizedEmbedding as a head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return super().as_linear(x) if _rows(x) < FEWEST_ROWS else _product(x, self)


def use_unpacking(model: nn.Module) -> int:
    """Changes the quantised layers in place where MLX computes on a CPU; returns how many. Formats other than scale and
    bias a group ("affine") stay as they are."""
    if not on_cpu():
        return 0
    kinds = {nn.QuantizedLinear: UnpackingLinear, nn.QuantizedEmbedding: UnpackingEmbedding}
    found = [module for module in model.modules() if type(module) in kinds and module.mode == "affine"]
    for module in found:
        module.__class__ = kinds[type(module)]  # the same object: whatever holds it sees the change
    return len(found)


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
    """Of `count` things of `size` weights each, so that UNPACKED of them are unpacked at a time."""
    step = max(1, UNPACKED // size)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _side_by_side(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

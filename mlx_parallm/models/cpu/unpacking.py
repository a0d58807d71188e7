"""Products with quantised weights on a CPU: several rows unpack the weights for the moment.

MLX's CPU product with quantised weights works row by row; from a few rows on, unpacking the weights
once and a BLAS product is faster (55 times for 512 rows, docs/benchmarks/training.md#memory). Plain
differentiation would keep the unpacked weights until the backward pass: float32 of the whole model.
So the gradient is written out and unpacks them again. Experts (`SwitchLinear`) are unpacked all at
once, one projection at a time, if there are more products than experts.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.mlx_lm_api import QuantizedSwitchLinear
from mlx_parallm.system.device.traits import unpacks_weights

FEWEST_ROWS = 2  # one row is faster in MLX's product
# weights that are unpacked at a time: 8 MiB of float32; MLX allocates some dozens of them ahead
UNPACKED = 1 << 21
UNPACKED_EXPERTS = 1 << 28  # weights of one projection of all experts: 1 GiB of float32


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
    """mlx-lm's quantised experts, whose weights are unpacked if there are more products than
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
    if not unpacks_weights():
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


def product_of_unpacked(
    x: mx.array, packed: tuple[mx.array, mx.array, mx.array], bits: int, *, transposed: bool
) -> mx.array:
    """x times a quantised factor of attention in 8 or 4 bits, unpacked for the moment: float32.

    Args:
        x: float32, [..., rows, D] times the transposed keys, or [..., rows, T] times the values.
        packed: q [..., T, D · bits / 32] uint32, scales and biases [..., T, groups].
        transposed: the factor is [..., T, D] and multiplied as its transpose.
    """
    # Two numbers of four bits lie in one byte: the even and the odd columns are two factors.
    words, scales, biases = packed
    numbers = mx.view(words, mx.uint8).reshape(*scales.shape, -1)
    planes = [numbers] if bits == 8 else [numbers & 15, numbers >> 4]
    scales, biases = scales.astype(mx.float32)[..., None], biases.astype(mx.float32)[..., None]
    factors = [
        (plane.astype(mx.float32) * scales + biases).reshape(*words.shape[:-1], -1)
        for plane in planes
    ]
    if transposed:
        products = [
            x[..., i :: len(factors)] @ factor.swapaxes(-1, -2) for i, factor in enumerate(factors)
        ]
        return products[0] if len(products) == 1 else products[0] + products[1]
    columns = [x @ factor for factor in factors]
    if len(columns) == 1:
        return columns[0]
    return mx.stack(columns, axis=-1).reshape(*columns[0].shape[:-1], -1)

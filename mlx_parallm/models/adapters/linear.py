"""The adapted linear layers of the trainer's tree: LoRA (Hu et al. 2021, arXiv:2106.09685), and DoRA, weight-decomposed
low-rank adaptation (Liu et al. 2024, arXiv:2402.09353), whose gain the serving tree uses too.

LoRALinear is not mlx-lm's class: importing that imports its trainer and every installed tracker, half a second of a
start. DoRA:

    y = g ⊙ (Wx + s · (xA)B) + bias     g = m / ‖W + s · (AB)ᵀ‖, one number an output

m [out] is trained beside A [in, r] and B [r, out] and starts as ‖W‖, so that g = 1. The norm is a constant of the
gradient (the paper's section 4.3, as in PEFT and mlx-lm).

The rows' norms need neither W + s(AB)ᵀ nor a dequantised W:
‖w + sAb‖² = ‖w‖² + 2s · b·(Aᵀw) + s² · b·(AᵀA)b, where Aᵀw of all rows is the layer applied to r inputs.
"""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class LoRALinear(nn.Module):
    """y = Wx + bias + (s · xA) B. A [in, r] ~ U(±1/√in) and B [r, out] = 0 are float32."""

    def __init__(self, linear: nn.Module, shape: tuple[int, int], rank: int, scale: float) -> None:
        """`shape` (in, out) of `linear`. Uses this thread's MLX random state."""
        super().__init__()
        self.linear = linear
        self.scale = scale
        mx.random.uniform()  # mlx-lm's draws a layer first that it throws away: a seed gives the adapter it gave there
        bound = 1 / math.sqrt(shape[0])
        self.lora_a = mx.random.uniform(-bound, bound, (shape[0], rank))
        self.lora_b = mx.zeros((rank, shape[1]))

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + ((self.scale * (x @ self.lora_a)) @ self.lora_b).astype(x.dtype)


class DoRALinear(LoRALinear):
    """In the place of mlx-lm's class of that name, which unpacks a quantised W in each forward, and 6 bits wrongly."""

    def __init__(self, linear: nn.Module, shape: tuple[int, int], rank: int, scale: float) -> None:
        super().__init__(linear, shape, rank, scale)
        self._squares = squared_norms(linear)  # of the frozen base; the underscore keeps it out of the parameters
        self.m = mx.sqrt(self._squares)

    def __call__(self, x: mx.array) -> mx.array:
        y, bias = self.linear(x), _bias(self.linear)
        if bias is not None:
            y = y - bias
        out = (self.gain() * (y + self.scale * ((x @ self.lora_a) @ self.lora_b))).astype(x.dtype)
        return out if bias is None else out + bias

    def gain(self) -> mx.array:
        """g [out] float32, with a gradient by m only."""
        norms = adapted_norms(self.linear, self.lora_a, self.lora_b, self.scale, self._squares)
        return self.m / mx.stop_gradient(norms)


def gain(linear: nn.Module, a: mx.array, b: mx.array, scale: float, magnitude: mx.array) -> mx.array:
    """g [out] float32 of a layer as it is served. Lazy."""
    return magnitude / adapted_norms(linear, a, b, scale, squared_norms(linear))


def scaled(y: mx.array, factor: mx.array, linear: nn.Module) -> mx.array:
    """g ⊙ (y - bias) + bias of y = Wx + bias + the update: bit-equal to y where g = 1 (`factor` [..., out])."""
    bias = _bias(linear)
    return y * factor if bias is None else y * factor + (1.0 - factor) * bias


def adapted_norms(linear: nn.Module, a: mx.array, b: mx.array, scale: float, squares: mx.array) -> mx.array:
    """‖W + s(AB)ᵀ‖ [out] float32, with `squares` = ‖W‖²."""
    projected, bias = linear(a.T), _bias(linear)  # [r, out]
    if bias is not None:
        projected = projected - bias
    update = 2.0 * scale * projected + scale * scale * ((a.T @ a) @ b)
    norm = mx.sqrt(mx.maximum(squares + (b * update).sum(axis=0), 0.0))
    return mx.where(norm > 0, norm, 1.0)  # a row of zeros has no direction: its output stays 0


def squared_norms(linear: nn.Module) -> mx.array:
    """‖W‖² of each output, [out] float32. Lazy."""
    return mx.square(dense_weight(linear).astype(mx.float32)).sum(axis=1)


def dense_weight(linear: nn.Module) -> mx.array:
    """[out, in], before any rounding of a quantised layer's (affine scales in float32)."""
    if not isinstance(linear, nn.QuantizedLinear):
        return linear.weight
    if linear.mode != "affine":  # the scales are not floating point
        return mx.dequantize(linear.weight, linear.scales, None, linear.group_size, linear.bits, linear.mode)
    scales, biases = linear.scales.astype(mx.float32), linear.biases.astype(mx.float32)
    return mx.dequantize(linear.weight, scales, biases, linear.group_size, linear.bits)


def _bias(linear: Any) -> mx.array | None:
    return linear.bias if "bias" in linear else None

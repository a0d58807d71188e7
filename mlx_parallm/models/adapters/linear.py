"""The adapted linear layers of the trainer's tree: LoRA (Hu et al. 2021, arXiv:2106.09685), and
DoRA, weight-decomposed low-rank adaptation (Liu et al. 2024, arXiv:2402.09353), whose gain the
serving tree uses too.

LoRALinear is not mlx-lm's class: importing that imports its trainer and every installed tracker,
half a second of a start. DoRA:

    y = g ⊙ (Wx + s · (xA)B) + bias     g = m / ‖W + s · (AB)ᵀ‖, one number an output

m [out] is trained beside A [in, r] and B [r, out] and starts as ‖W‖, so that g = 1. The norm is a
constant of the gradient (the paper's section 4.3, as in PEFT and mlx-lm). AdaLoRA (Zhang et al.
2023, arXiv:2303.10512) has a singular value E [r] for each of the r triplets of A and B:

    y = Wx + bias + s · ((xA) ⊙ E) B     s = alpha / (r + 1e-5), PEFT's

A layer of stacked experts W [experts, out, in] has an A [experts, in, r] and a B [experts, r, out];
a token is multiplied with those of its experts.

The rows' norms need neither W + s(AB)ᵀ nor a dequantised W: ‖w + sAb‖² = ‖w‖² + 2s · b·(Aᵀw) + s² ·
b·(AᵀA)b, where Aᵀw of all rows is the layer applied to r inputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.adapters.adalora import product
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.sums import row_sums

SVD_STD = 0.02
"""Standard deviation of AdaLoRA's A and B at the start, PEFT's."""


class AdapterDropout:
    """Dropout of the inputs of a tree's adapters: a number is 0 with probability `rate`, else
    divided by 1 - rate.

    Active only within `drawn_from`. The mask is a function of the seed and the layer, so the
    forward pass of a block that is made again for its gradient drops the same numbers, and so does
    a step that is made again.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._layers = 0
        self._seed: int | None = None

    def next_layer(self) -> int:
        """Return the number of a layer that is about to be made."""
        self._layers += 1
        return self._layers - 1

    @contextmanager
    def drawn_from(self, seed: Sequence[int]) -> Iterator[None]:
        """Drop numbers for the length of the block."""
        self._seed = (
            int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
            if self._rate
            else None
        )
        try:
            yield
        finally:
            self._seed = None

    def __call__(self, x: mx.array, layer: int) -> mx.array:
        if self._seed is None:
            return x
        key = mx.random.key((self._seed + layer) % (1 << 64))
        kept = mx.random.bernoulli(1.0 - self._rate, x.shape, key=key)
        return mx.where(kept, x * (1.0 / (1.0 - self._rate)), 0.0).astype(x.dtype)


class LoRALinear(nn.Module):
    """y = Wx + bias + (s · xA) B. A [in, r] ~ U(±1/√in) and B [r, out] = 0 are float32."""

    def __init__(
        self,
        linear: nn.Module,
        shape: tuple[int, ...],
        rank: int,
        scale: float,
        dropout: AdapterDropout | None = None,
    ) -> None:
        """`shape` (in, out) of `linear`, or (experts, in, out). Uses this thread's MLX random
        state."""
        super().__init__()
        self.linear = linear
        self.scale = scale
        self._dropout = dropout
        self._number = dropout.next_layer() if dropout else 0
        # the product with the rounded sum of base and update, in its place (fake_quantized.py)
        self._rounding: Callable[..., mx.array] | None = None
        # mlx-lm's draws a layer first that it throws away: a seed gives the adapter it gave there
        mx.random.uniform()
        *experts, inputs, outputs = shape
        bound = 1 / math.sqrt(inputs)
        self.lora_a = mx.random.uniform(-bound, bound, (*experts, inputs, rank))
        self.lora_b = mx.zeros((*experts, rank, outputs))
        self._begin(shape, rank)

    def _begin(self, shape: tuple[int, ...], rank: int) -> None:
        """Make the arrays of a kind that has others. Its draws come after those of A."""

    @property
    def weight(self) -> mx.array:
        """W, for architectures that read their layers' type from it (LFM2-VL's tower)."""
        weight: mx.array = self.linear.weight
        return weight

    def __call__(self, x: mx.array) -> mx.array:
        if self._rounding is not None:
            return self._rounding(self, x)
        y = self.linear(x)  # a head's may be wider than x
        return y + self.update_of(x).astype(y.dtype)

    def pair(self) -> LoraPair:
        """The layer's update; shares the arrays that there are. Lazy."""
        return LoraPair(self.lora_a, self.lora_b, float(self.scale))

    def update_of(self, x: mx.array) -> mx.array:
        """(s · xA) B, of what dropout leaves of x."""
        return self._reduced(x) @ self.lora_b

    def _reduced(self, x: mx.array) -> mx.array:
        """s · xA [..., r]."""
        return self.scale * (self._kept(x) @ self.lora_a)

    def _kept(self, x: mx.array) -> mx.array:
        return x if self._dropout is None else self._dropout(x, self._number)


class LoRASwitchLinear(LoRALinear):
    """The same of stacked experts, of mlx-lm's SwitchLinear or QuantizedSwitchLinear."""

    def __call__(  # type: ignore[override]
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """x [..., 1 or k, 1, in] and the experts `indices` [..., k] → [..., k, 1, out]."""
        if self._rounding is not None:
            return self._rounding(self, x, indices, sorted_indices)
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        return y + self.update_of(x, indices, sorted_indices).astype(x.dtype)

    def update_of(  # type: ignore[override]
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        read = self._kept(x).astype(mx.float32)
        return switch_update(read, self.lora_a, self.scale * self.lora_b, indices, sorted_indices)


def switch_update(
    x: mx.array, a: mx.array, b: mx.array, indices: mx.array, sorted_indices: bool
) -> mx.array:
    """(xA) B of each token's experts: a [experts, in, r], b [experts, r, out]."""
    reduced = mx.gather_mm(x, a, rhs_indices=indices, sorted_indices=sorted_indices)
    return mx.gather_mm(reduced, b, rhs_indices=indices, sorted_indices=sorted_indices)


class SVDLinear(LoRALinear):
    """AdaLoRA's layer. A and B ~ N(0, 0.02), E = 0: float32."""

    def _begin(self, shape: tuple[int, ...], rank: int) -> None:
        self.lora_a = mx.random.normal((shape[0], rank), scale=SVD_STD)
        self.lora_b = mx.random.normal((rank, shape[1]), scale=SVD_STD)
        self.lora_e = mx.zeros((rank,))

    def update_of(self, x: mx.array) -> mx.array:
        """((s · xA) ⊙ E) B, of what dropout leaves of x."""
        return (self._reduced(x) * self.lora_e) @ self.lora_b

    def pair(self) -> LoraPair:
        b = product(self.lora_e, self.lora_b)
        return LoraPair(self.lora_a, b, float(self.scale))


class DoRALinear(LoRALinear):
    """A replacement of mlx-lm's class of that name, which unpacks a quantised W in each forward
    pass, and unpacks 6 bits wrongly."""

    def _begin(self, shape: tuple[int, ...], rank: int) -> None:
        # the frozen base's; the underscore keeps it out of the parameters
        self._squares = squared_norms(self.linear)
        self.m = mx.sqrt(self._squares)

    def __call__(self, x: mx.array) -> mx.array:
        y, bias = self.linear(x), _bias(self.linear)
        wide = y.dtype
        if bias is not None:
            y = y - bias
        out = (self.gain() * (y + self.update_of(x))).astype(wide)
        return out if bias is None else out + bias

    def pair(self) -> LoraPair:
        return LoraPair(self.lora_a, self.lora_b, float(self.scale), self.m, self.gain())

    def gain(self) -> mx.array:
        """g [out] float32, with a gradient by m only."""
        norms = adapted_norms(self.linear, self.lora_a, self.lora_b, self.scale, self._squares)
        return self.m / mx.stop_gradient(norms)


def gain(
    linear: nn.Module, a: mx.array, b: mx.array, scale: float, magnitude: mx.array
) -> mx.array:
    """g [out] float32 of a layer as it is served. Lazy."""
    return magnitude / adapted_norms(linear, a, b, scale, squared_norms(linear))


def scaled(y: mx.array, factor: mx.array, linear: nn.Module) -> mx.array:
    """g ⊙ (y - bias) + bias of y = Wx + bias + the update: bit-equal to y where g = 1 (`factor`
    [..., out])."""
    bias = _bias(linear)
    return y * factor if bias is None else y * factor + (1.0 - factor) * bias


def adapted_norms(
    linear: nn.Module, a: mx.array, b: mx.array, scale: float, squares: mx.array
) -> mx.array:
    """‖W + s(AB)ᵀ‖ [out] float32, with `squares` = ‖W‖²."""
    projected, bias = linear(a.T), _bias(linear)  # [r, out]
    if bias is not None:
        projected = projected - bias
    update = 2.0 * scale * projected + scale * scale * ((a.T @ a) @ b)
    norm = mx.sqrt(mx.maximum(squares + (b * update).sum(axis=0), 0.0))
    return mx.where(norm > 0, norm, 1.0)  # a row of zeros has no direction: its output stays 0


def merged_rows(weight: mx.array, pair: LoraPair, rows: mx.array | None = None) -> mx.array:
    """W + s(AB)ᵀ, with DoRA scaled to the magnitudes, summed in float32. Lazy.

    Args:
        weight: [out, in], or [experts, out, in]; or those `rows` [n] of it, in their order: [n, in]
            (of stacked experts row e · out + o is row o of expert e).
    """
    if pair.a.ndim > 2:
        return weight.astype(mx.float32) + pair.scale * _rows_of_experts(pair, rows)
    b = pair.b if rows is None else pair.b[:, rows]
    merged = weight.astype(mx.float32) + pair.scale * (pair.a @ b).T
    if pair.magnitude is None:
        return merged
    magnitude = pair.magnitude if rows is None else pair.magnitude[rows]
    norm = mx.sqrt(row_sums(mx.square(merged)))
    return merged * (magnitude / mx.where(norm > 0, norm, 1.0))[:, None]


def _rows_of_experts(pair: LoraPair, rows: mx.array | None) -> mx.array:
    if rows is None:
        return (pair.a @ pair.b).swapaxes(-1, -2)
    rank, outputs = pair.b.shape[-2:]
    b = pair.b.swapaxes(-1, -2).reshape(-1, rank)[rows]
    products = mx.gather_mm(b[:, None], pair.a.swapaxes(-1, -2), rhs_indices=rows // outputs)
    return products[:, 0]


def squared_norms(linear: nn.Module) -> mx.array:
    """‖W‖² of each output, [out] float32. Lazy."""
    return row_sums(mx.square(dense_weight(linear).astype(mx.float32)))


def dense_weight(linear: nn.Module) -> mx.array:
    """[out, in] or [experts, out, in], before any rounding of a quantised layer's (affine scales in
    float32). Raises ModelError: nvfp4 with a scale for each expert."""
    if "scales" not in linear:  # an embedding and stacked experts may be quantised too
        return linear.weight
    if linear.get("global_scale") is not None:
        raise ModelError("experts in nvfp4 with a scale for each expert cannot be unpacked here")
    if linear.mode != "affine":  # the scales are not floating point
        return mx.dequantize(
            linear.weight, linear.scales, None, linear.group_size, linear.bits, linear.mode
        )
    scales, biases = linear.scales.astype(mx.float32), linear.biases.astype(mx.float32)
    return mx.dequantize(linear.weight, scales, biases, linear.group_size, linear.bits)


def _bias(linear: Any) -> mx.array | None:
    return linear.bias if "bias" in linear else None

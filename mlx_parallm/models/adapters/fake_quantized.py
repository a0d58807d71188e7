"""Quantisation-aware training of an adapter: the trainer computes with the weights that
`mlx_parallm merge --q-bits` will write.

    rounded_layers          what an export quantises
    use_fake_quantization   gives the adapted layers of a trainer's tree a `Rounding`, and
                            quantises the others
    Rounding                W' = dequantise(quantise(W + s · (AB)ᵀ)), and y = x W'ᵀ

The gradient goes straight through the rounding (Bengio et al. 2013, arXiv:1308.3432): to A and B as
if nothing was rounded, to x through W'. It needs no array of W's size: u = s · (xA)B has the
gradients of A and B, and y = x W'ᵀ + (u - sg(u)) adds 0, where sg stops the gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.errors import ConfigError
from mlx_parallm.models.adapters.linear import (
    LoRALinear,
    LoRASwitchLinear,
    dense_weight,
    merged_rows,
)
from mlx_parallm.models.cpu_kernels import use_unpacking
from mlx_parallm.models.quantize import quantizable


@dataclass(frozen=True)
class Rounding:
    """How a layer is exported: its dtype, and the arguments of `mx.quantize`; None: it is not
    quantised."""

    dtype: mx.Dtype
    settings: Mapping[str, Any] | None

    def weight(self, layer: LoRALinear) -> mx.array:
        """W' [out, in], or [experts, out, in], float32. Lazy."""
        merged = merged_rows(dense_weight(layer.linear), layer.pair()).astype(self.dtype)
        if self.settings is None:
            return merged.astype(mx.float32)
        packed, scales, *rest = mx.quantize(merged, **self.settings)
        if not rest:  # a mode without biases has scales that are no floating-point numbers
            return mx.dequantize(packed, scales, None, **self.settings).astype(mx.float32)
        wide, biases = scales.astype(mx.float32), rest[0].astype(mx.float32)
        return mx.dequantize(packed, wide, biases, **self.settings)

    def __call__(
        self,
        layer: LoRALinear,
        x: mx.array,
        indices: mx.array | None = None,
        sorted_indices: bool = False,
    ) -> mx.array:
        """x [..., in] → [..., out] in x's dtype, with the adapter's gradients. `indices`: the
        experts, as `LoRASwitchLinear` has them."""
        weight = mx.stop_gradient(self.weight(layer)).astype(x.dtype).swapaxes(-1, -2)
        bias = layer.linear.bias if "bias" in layer.linear else None
        if indices is None:
            y = x @ weight
            update = layer.update_of(mx.stop_gradient(x))
        else:
            y = mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)
            bias = None if bias is None else bias[indices][..., None, :]
            assert isinstance(layer, LoRASwitchLinear)
            update = layer.update_of(mx.stop_gradient(x), indices, sorted_indices)
        y = y if bias is None else y + bias
        update = update.astype(x.dtype)
        return y + (update - mx.stop_gradient(update))


def rounded_layers(model: nn.Module, bits: int | None) -> dict[str, dict[str, Any]]:
    """The layers that an export in so many bits quantises, by path, and how; none without `bits`.
    Raises ConfigError: the model is quantised already."""
    if bits is None:
        return {}
    quantized = nn.QuantizedLinear | nn.QuantizedEmbedding
    if any(isinstance(module, quantized) for module in model.modules()):
        raise ConfigError(
            "rl_training.lora.qat_bits rounds base and adapter together, but this base is"
            " quantised: name the checkpoint that it was made from"
        )
    return quantizable(model, bits)


def use_fake_quantization(
    model: nn.Module, settings: Mapping[str, Mapping[str, Any]], dtype: mx.Dtype
) -> None:
    """Let the adapted layers round, and quantise every other layer in place; evaluated.

    Args:
        model: a trainer's tree, whose adapter is there.
        settings: what `rounded_layers` returned before the adapter was there.
        dtype: of the export's arrays.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, LoRALinear):
            layer._rounding = Rounding(dtype, settings.get(path))
        elif path in settings:
            width = layer.weight.dtype
            layer.weight = layer.weight.astype(dtype)
            quantized = layer.to_quantized(**settings[path])
            quantized.set_dtype(width)
            quantized.freeze()
            mx.eval(quantized.parameters())
            model.update_modules(tree_unflatten([(path, quantized)]))
    use_unpacking(model)

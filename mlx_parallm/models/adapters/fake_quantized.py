"""Quantisation-aware training of an adapter: the trainer computes with the weights that
`mlx_parallm merge --q-bits` or `mlx_parallm export --type q4_0` (q8_0) will write.

    rounded_layers          the layers that an export quantises
    use_fake_quantization   gives the adapted layers of a trainer's tree a `Rounding`, and
                            quantises the others
    Rounding                W' = dequantise(quantise(W + s · (AB)ᵀ)), and y = x W'ᵀ

The gradient goes straight through the rounding (Bengio et al. 2013, arXiv:1308.3432): to A and B as
if nothing was rounded, to x through W'. It needs no array of W's size: u = s · (xA)B has the
gradients of A and B, and y = x W'ᵀ + (u - sg(u)) adds 0, where sg stops the gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
from mlx_parallm.models.mlx_lm_api import SwitchLinear
from mlx_parallm.models.ops import use_unpacking
from mlx_parallm.models.quantize import quantizable
from mlx_parallm.system.device.traits import widens_experts

GGUF, GGUF_BLOCK = "gguf", 32
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last names of the linear layers that choose experts: float32 in a file of llama.cpp's."""


ROUNDED_COPIES = 1.5
"""float32 arrays of a block's adapted weights that rounding them holds beside its result."""


def rounding_bytes(bits: int, others: int, block: float, *, blocks: int, width: int) -> int:
    """Return the bytes of `use_fake_quantization`: layers without an adapter once more, quantised;
    of the others what waits for the backward pass, and one block's sums.

    Args:
        others: numbers of the layers without an adapter.
        block: numbers of a block's layers that have one; `blocks`: of one evaluation.
        width: bytes of a number of the model.
    """
    packed = others * (bits + 16 * width / 64) / 8  # a scale and a bias for 64
    return int(packed + block * (blocks * width + ROUNDED_COPIES * 4))


@dataclass(frozen=True)
class Rounding:
    """How a layer is exported: its dtype, and the arguments of `mx.quantize`, or {"gguf": bits};
    None: it is not quantised."""

    dtype: mx.Dtype
    settings: Mapping[str, Any] | None

    def weight(self, layer: LoRALinear) -> mx.array:
        """W' [out, in], or [experts, out, in], float32. Lazy."""
        merged = merged_rows(dense_weight(layer.linear), layer.pair()).astype(self.dtype)
        if self.settings is None:
            return merged.astype(mx.float32)
        if GGUF in self.settings:
            return gguf_rounded(merged, self.settings[GGUF])
        packed, scales, *rest = mx.quantize(merged, **self.settings)
        if not rest:  # a mode without biases has scales that are not floating-point numbers
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
        # for stacked experts in a bfloat16 model
        wide = indices is not None and widens_experts()
        read = x.astype(mx.float32) if wide else x
        weight = mx.stop_gradient(self.weight(layer)).astype(read.dtype).swapaxes(-1, -2)
        bias = layer.linear.bias if "bias" in layer.linear else None
        if indices is None:
            y = x @ weight
            update = layer.update_of(mx.stop_gradient(x))
        else:
            y = mx.gather_mm(read, weight, rhs_indices=indices, sorted_indices=sorted_indices)
            y = y.astype(x.dtype)
            bias = None if bias is None else bias[indices][..., None, :]
            assert isinstance(layer, LoRASwitchLinear)
            update = layer.update_of(mx.stop_gradient(x), indices, sorted_indices)
        y = y if bias is None else y + bias
        update = update.astype(x.dtype)
        return y + (update - mx.stop_gradient(update))


def gguf_rounded(weight: mx.array, bits: int) -> mx.array:
    """The numbers that llama.cpp's Q4_0 or Q8_0 keeps of a weight [..., in], float32
    (ggml-quants.c, `quantize_row_q4_0_ref`, `quantize_row_q8_0_ref`). Lazy.

    A block of 32 is q · d, d rounded to float16. Q4_0: d is the block's number of the largest size
    ÷ -8, q in -8 … 7. Q8_0: d is its largest size ÷ 127.
    """
    blocks = weight.astype(mx.float32).reshape(-1, GGUF_BLOCK)
    if bits == 4:
        place = mx.argmax(mx.abs(blocks), axis=1, keepdims=True)
        d = mx.take_along_axis(blocks, place, axis=1) / -8
    else:
        d = mx.abs(blocks).max(axis=1, keepdims=True) / 127
    inverse = mx.where(d == 0, 0.0, 1.0 / mx.where(d == 0, 1.0, d))
    scaled = blocks * inverse
    if bits == 4:
        q = mx.clip(mx.floor(scaled + 8.5), 0, 15) - 8
    else:
        q = mx.sign(scaled) * mx.floor(mx.abs(scaled) + 0.5)
    return (q * d.astype(mx.float16).astype(mx.float32)).reshape(weight.shape)


def _of_gguf(model: nn.Module, bits: int) -> dict[str, dict[str, Any]]:
    """The layers whose weights `mlx_parallm export` writes in blocks: not the routers of experts,
    nor rows that no block divides."""
    kinds = (nn.Linear, nn.Embedding, SwitchLinear)
    return {
        path: {GGUF: bits}
        for path, layer in model.named_modules()
        if isinstance(layer, kinds)
        and layer.weight.shape[-1] % GGUF_BLOCK == 0
        and path.rpartition(".")[2] not in ROUTERS
    }


def rounded_layers(
    model: nn.Module, bits: int | None, to: Literal["mlx", "gguf"] = "mlx"
) -> dict[str, dict[str, Any]]:
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
    return quantizable(model, bits) if to == "mlx" else _of_gguf(model, bits)


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
            chosen = settings.get(path)
            # an export to GGUF rounds the sum, and keeps unquantised weights as they are
            to_gguf = any(GGUF in each for each in settings.values())
            layer._rounding = Rounding(mx.float32 if to_gguf else dtype, chosen)
        elif path in settings:
            width = layer.weight.dtype
            if GGUF in settings[path]:
                layer.weight = gguf_rounded(layer.weight, settings[path][GGUF]).astype(width)
                mx.eval(layer.weight)
                continue
            layer.weight = layer.weight.astype(dtype)
            quantized = layer.to_quantized(**settings[path])
            quantized.set_dtype(width)
            quantized.freeze()
            mx.eval(quantized.parameters())
            model.update_modules(tree_unflatten([(path, quantized)]))
    use_unpacking(model)

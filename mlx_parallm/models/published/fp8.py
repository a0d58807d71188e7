"""FP8 checkpoints: numbers of E4M3 times the scale of their block, or of the whole tensor, as
DeepSeek, Qwen and Mistral publish them. Read here for every class: mlx-lm's know blocks of 128
alone, if they know FP8 at all, and one takes the codes themselves for numbers."""

import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_parallm.models.checkpoint_files import quantization_of
from mlx_parallm.models.published.classes import Reading, Sanitize, Weights

SCALE = "_scale_inv"
_OF_ACTIVATIONS = (".activation_scale", "_activation_scale")
_BLOCK = (128, 128)  # transformers' default
_PACKED = ("deepseek_v41",)
"""Classes of mlx-lm that keep blocks of 32 x 32 packed, as MLX's own mxfp8."""


def fp8_reading(config: Mapping[str, Any]) -> Reading | None:
    """Return what makes plain tensors of a checkpoint's; None: it is not such a one."""
    settings = quantization_of(config)
    if settings is None or str(settings.get("quant_method")).lower() != "fp8":
        return None
    block = tuple(settings.get("weight_block_size") or _BLOCK)
    if config.get("model_type") in _PACKED and block == (32, 32):
        return None
    return _reading_of(block)


@functools.cache
def _reading_of(block: tuple[int, int]) -> Reading:
    def read(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
        plain = {
            name: array
            for name, array in weights.items()
            if not name.endswith((SCALE, *_OF_ACTIVATIONS))
        }
        for name, scale in weights.items():
            weight = plain.get(name.removesuffix(SCALE))
            if name.endswith(SCALE) and weight is not None:
                plain[name.removesuffix(SCALE)] = _numbers(name, weight, scale, block)
        return sanitize(plain)

    return read


def _numbers(name: str, codes: mx.array, scale: mx.array, block: tuple[int, int]) -> mx.array:
    """Return the numbers in bfloat16, as transformers does. Lazy. Raises ValueError: the scales
    do not fit."""
    if codes.dtype != mx.uint8:
        raise ValueError(f"{name} belongs to {codes.dtype}, not to FP8")
    numbers = mx.from_fp8(codes, dtype=mx.float32)
    if scale.dtype == mx.uint8:  # E8M0, as "ue8m0" is stored: an exponent of float32 alone
        scale = (scale.astype(mx.uint32) << 23).view(mx.float32)
    shape = (1,) * (codes.ndim - scale.ndim) + scale.shape
    if len(shape) > codes.ndim or not all(
        n in (1, size) for n, size in zip(shape, codes.shape, strict=True)
    ):
        rows, columns = codes.shape[-2:]
        fitting = (*codes.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        if shape != fitting:
            raise ValueError(f"{name} is {list(shape)}; blocks of {block} need {list(fitting)}")
        scale = mx.repeat(mx.repeat(scale, block[0], -2), block[1], -1)[..., :rows, :columns]
    return (numbers * scale.astype(mx.float32)).astype(mx.bfloat16)

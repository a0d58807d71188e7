"""Blocks of a GGUF file as MLX packs quantised weights: the same integers, the same scales, nothing
rounded.

MLX has a scale and a bias for each group of 32 inputs, w = scale · q + bias with 0 ≤ q < 2^bits. So
has llama.cpp, in other words (ggml-common.h; d, m, dmin are float16):

    Q4_0   d · (q - 8)                   → scale d,        bias -8 d
    Q4_1   d · q + m                     → scale d,        bias m
    Q8_0   d · q, q signed               → scale d,        bias -128 d, q + 128
    Q4_K   (d · s) · q - dmin · t        → scale d · s,    bias -dmin · t, an eighth of 256 each

s and t have 6 bits, so Q4_K's scales need more bits than float16 has.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type

GROUP_SIZE = 32

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Integers [groups, 32] uint8, scales [groups] float32, biases [groups] float32."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix as MLX's quantised layers hold it.

    Attributes:
        weight: [..., out, in · bits / 32] uint32.
        scales, biases: [..., out, in / 32].
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def bits_of(kind: Type) -> int | None:
    """Return the bits of a type's integers; None: MLX has no such blocks."""
    return None if kind not in _READERS else 8 if kind == Type.Q8_0 else 4


def pack(data: np.ndarray, kind: Type, dtype: mx.Dtype) -> PackedMatrix | None:
    """Return the rows of a tensor; None: `dtype` would round a scale or a bias, or one is not
    finite.

    Args:
        data: bytes of a type with `bits_of`, [..., out, bytes of a row].
    """
    bits = bits_of(kind)
    assert bits is not None
    integers, *rest = _READERS[kind](data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]))
    if bits == 4:
        integers = integers[:, 0::2] | integers[:, 1::2] << 4
    rows = data.shape[:-1]
    words = np.ascontiguousarray(integers).reshape(*rows, -1).view(np.uint32)
    scales, biases = (mx.array(part.reshape(*rows, -1)).astype(dtype) for part in rest)
    for kept, part in zip((scales, biases), rest, strict=True):
        exact = np.array_equal(np.array(kept.astype(mx.float32)).reshape(-1), part)
        if not exact or not np.isfinite(part).all():
            return None
    return PackedMatrix(mx.array(words), scales, biases, bits)


def _q4_0(blocks: np.ndarray) -> Parts:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Parts:
    scales = _halves(blocks, 0)
    # two's complement: the sign bit turned is 128 more
    return blocks[:, 2:] ^ 0x80, scales, -128 * scales


def _q4_k(blocks: np.ndarray) -> Parts:
    steps, offsets = gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    scales = _halves(blocks, 0)[:, None] * steps.astype(np.float32)
    biases = -_halves(blocks, 2)[:, None] * offsets.astype(np.float32)
    # the low bits of 32 bytes are a group, the high ones the next
    pairs = blocks[:, 16:].reshape(-1, GROUP_SIZE)
    integers = np.stack([pairs & 0x0F, pairs >> 4], axis=1).reshape(-1, GROUP_SIZE)
    return integers, scales.reshape(-1), biases.reshape(-1)


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 at a place of each block, as float32."""
    return (
        np.ascontiguousarray(blocks[:, start : start + 2])
        .view(np.float16)
        .reshape(-1)
        .astype(np.float32)
    )


def _nibbles(integers: np.ndarray) -> np.ndarray:
    return np.concatenate([integers & 0x0F, integers >> 4], axis=1)


_READERS: dict[Type, Callable[[np.ndarray], Parts]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
}

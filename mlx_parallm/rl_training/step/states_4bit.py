"""Optimizer states in 4 bits: AdamW's moments, block-wise (Li et al. 2023, arXiv:2309.01507), with
the blocks and codes of torchao's AdamW4bit.

    quantised, dequantised    [N] float32 ↔ two codes a byte, and the largest of each block
    AdamW4bit                 MLX's optimizer; an update computes in float32, as `states_8bit` does

A block is 128 numbers: x = absmax · CODES[code]. The first moment's codes are the dynamic map of 8
bits with three decades, 0.0055 to 1 with a sign, and 0. The second moment's are 1/16, 2/16 … 1:
evenly spaced, and without 0, because the update divides by its root.
"""

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np

from mlx_parallm.rl_training.step.states_8bit import State, dynamic_values

BLOCK = 128
CODES, ABSMAX = "_nibbles", "_largest"
STATE_BYTES = 1 / 2 + 4 / BLOCK
"""Of one number of one state."""
DECADES = 3
_POSITIVE = np.array(dynamic_values(DECADES, signed=True))
_SIGNED = np.append(_POSITIVE, -_POSITIVE[1:-1]).astype(np.float32)
_BETWEEN = ((_POSITIVE[:-1] + _POSITIVE[1:]) / 2).astype(np.float32)
_EVEN = (np.arange(1, 17) / 16).astype(np.float32)
MAPS = {"m": _SIGNED, "v": _EVEN}
"""State of AdamW → its 16 codes, [16] float32."""


def quantised(x: mx.array, name: str) -> tuple[mx.array, mx.array]:
    """The nearest codes of x [N] float32, [N / 2] uint8, and each block's largest absolute value
    [N / BLOCK] float32; `name`: "m" or "v". N a multiple of BLOCK. Lazy.

    The first half of a block's codes are the lower four bits.
    """
    blocks = x.reshape(-1, BLOCK)
    sizes = mx.abs(blocks)
    absmax = sizes.max(axis=1)
    sizes = sizes / mx.where(absmax > 0, absmax, 1.0)[:, None]
    if name == "v":
        code = mx.clip(mx.round(sizes * 16) - 1, 0, 15).astype(mx.uint8)
    else:
        code = sum(((sizes > float(middle)).astype(mx.uint8) for middle in _BETWEEN), mx.array(0))
        most = len(_BETWEEN)  # the code of 1; there is no -1
        negative = most + mx.minimum(code, most - 1)
        code = mx.where((blocks < 0) & (code > 0), negative, code).astype(mx.uint8)
    half = BLOCK // 2
    return (code[:, :half] | (code[:, half:] << 4)).reshape(-1), absmax


def dequantised(codes: mx.array, absmax: mx.array, name: str) -> mx.array:
    """[N] float32. Lazy."""
    packed = codes.reshape(-1, BLOCK // 2)
    code = mx.concatenate([packed & 15, packed >> 4], axis=1)
    return (mx.array(MAPS[name])[code] * absmax[:, None]).reshape(-1)


class AdamW4bit(optimizers.AdamW):
    """AdamW over arrays [N], N a multiple of BLOCK. State: `m_nibbles`, `m_largest`, `v_nibbles`,
    `v_largest`."""

    def init_single(self, parameter: mx.array, state: State) -> None:
        for name in MAPS:
            state[name + CODES] = mx.zeros((parameter.size // 2,), mx.uint8)
            state[name + ABSMAX] = mx.zeros((parameter.size // BLOCK,))

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        wide: State = {
            name: dequantised(state[name + CODES], state[name + ABSMAX], name) for name in MAPS
        }
        updated = super().apply_single(gradient, parameter, wide)
        for name in MAPS:
            state[name + CODES], state[name + ABSMAX] = quantised(wide[name], name)
        return updated

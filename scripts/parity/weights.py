"""Tensors that anybody can make again from their names and shapes: those of the parity cases."""

import zlib
from typing import Any

import numpy as np


def tensor(name: str, shape: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return float32 numbers: of matrices around 0, of vectors (norms, biases) around 0.6."""
    # the one stream of numpy that never changes
    noise = np.asarray(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape))
    if len(shape) >= 2 and shape[0] > 1:
        return np.asarray(0.2 * noise, np.float32)
    return np.asarray(0.6 + 0.1 * noise, np.float32)


def direction(name: str, shape: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return what a gradient is multiplied with: one number tells a wrong one from a right one."""
    noise = np.random.RandomState(zlib.crc32(name.encode()) ^ 1).standard_normal(shape)
    return noise.astype(np.float64)

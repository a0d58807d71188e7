"""Tensors that anybody can make again from their names and shapes: those of the parity cases."""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Stored = Mapping[str, tuple[str, np.ndarray[Any, Any]]]
"""Name → safetensors' type, and numbers of that many bytes: numpy knows no float8."""


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


def write_safetensors(file: Path, tensors: Stored) -> None:
    """Write a file of safetensors, of any of its types."""
    header, blobs, end = {}, [], 0
    for name, (dtype, array) in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        offsets = [end, end + len(blob)]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        blobs.append(blob)
        end += len(blob)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))

"""SigLIP in float64, from a checkpoint's arrays: what towers are compared with."""

from pathlib import Path

import mlx.core as mx
import numpy as np

Arrays = dict[str, np.ndarray]


def float64_arrays(path: Path) -> Arrays:
    arrays = dict(mx.load(str(path / "model.safetensors")))
    return {name: np.array(array).astype(np.float64) for name, array in arrays.items()}


def layer_norm(arrays: Arrays, name: str, x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    normed: np.ndarray = scaled * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]
    return normed


def linear(arrays: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    out: np.ndarray = x @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]
    return out


def encoded(arrays: Arrays, tower: str, x: np.ndarray) -> np.ndarray:
    """Two blocks of two heads and the last norm over embedded patches [N, D]."""
    for index in range(2):
        block = f"{tower}.encoder.layers.{index}"
        normed = layer_norm(arrays, f"{block}.layer_norm1", x)
        q, k, v = (
            linear(arrays, f"{block}.self_attn.{name}_proj", normed)
            .reshape(len(x), 2, -1)
            .swapaxes(0, 1)
            for name in "qkv"
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        seen = (weights / weights.sum(-1, keepdims=True)) @ v
        seen = seen.swapaxes(0, 1).reshape(len(x), -1)
        x = x + linear(arrays, f"{block}.self_attn.out_proj", seen)
        inner = linear(arrays, f"{block}.mlp.fc1", layer_norm(arrays, f"{block}.layer_norm2", x))
        inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear(arrays, f"{block}.mlp.fc2", inner)
    return layer_norm(arrays, f"{tower}.post_layernorm", x)

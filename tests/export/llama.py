"""A real llama.cpp for the tests of the export, and models that it is given."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.deploy.export import llama_server
from mlx_parallm.deploy.export.gguf_file import write_model
from mlx_parallm.deploy.export.model import ModelSource, open_model
from mlx_parallm.deploy.export.vocabulary import read_vocabulary
from mlx_parallm.models.published.mend import load_hf_model
from tests.tiny_models import EXPERTS, QWEN3, save_checkpoint

needs_llama = pytest.mark.skipif(
    not llama_server.available(), reason="needs xllamacpp or llama-server: extra `export`"
)

LLAMA = QWEN3 | {"model_type": "llama", "num_key_value_heads": 2, "rope_theta": 5e5}
GEMMA3: dict[str, Any] = QWEN3 | {
    "model_type": "gemma3_text",
    "hidden_size": 96,  # √96 is another number in bfloat16
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 2e4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "head_dim": 32, "num_hidden_layers": 1},
    "llama with biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama 3 rope": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear rope": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "qwen2": QWEN3 | {"model_type": "qwen2"},
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3 | EXPERTS | {"model_type": "qwen3_moe"},
    "gemma3_text": GEMMA3,
}
IDS = [
    5,
    17,
    250,
    33,
    8,
    90,
    121,
    64,
    2,
    30,
    41,
    77,
    5,
    99,
    12,
    200,
    17,
    18,
    19,
    20,
    3,
    9,
    270,
    100,
]
COMPARED = 4  # prefixes of IDS, the longest first: they go beyond a window of 16


def checkpoint(path: Path, config: dict[str, Any], *, tied: bool = True, **options: Any) -> Path:
    """Random weights, norms and biases included; the shipped tokenizer."""
    save_checkpoint(path, config | {"tie_word_embeddings": tied}, **options)
    weights = dict(mx.load(str(path / "model.safetensors")))
    if tied:
        weights.pop("lm_head.weight", None)  # gemma3_text makes one
    rng = np.random.default_rng(1)
    for name, array in weights.items():
        if config["model_type"] == "gemma3_text" and "gate_proj" in name:
            # llama.cpp takes GELU from a table in float16: here it is 0 or x
            weights[name] = array * 1e6
        if array.ndim == 1:
            weights[name] = (array + mx.array(rng.normal(size=array.shape) * 0.2)).astype(
                array.dtype
            )
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
    return path


def write(
    model: Path, file: Path, kind: str = "f32", adapter: Path | None = None
) -> dict[str, int]:
    opened = open_model(ModelSource(str(model), adapter))
    return write_model(
        file, opened, read_vocabulary(opened.tokenizer, opened.config, opened.path), kind
    )


def logprobs(model: Any, ids: list[int] = IDS) -> np.ndarray:
    """[T, vocabulary] of an mlx-lm model, or of the checkpoint at a path, computed in float32."""
    if isinstance(model, Path):
        model, _ = load_hf_model(model)
    model.set_dtype(mx.float32)
    logits = np.array(model(mx.array([ids]))[0].astype(mx.float32), np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def difference(file: Path, expected: np.ndarray, adapter: Path | None = None) -> float:
    """The largest difference of a log-probability of all tokens after `COMPARED` prefixes, from
    `expected`."""
    found: list[float] = []
    with llama_server.running(file, adapter) as server:
        for place in range(len(IDS), 0, -1):
            # none where it is half a character
            values = server.next_token(IDS[:place], 10**6).logprobs
            assert len(values) in (0, expected.shape[1])
            found += (
                [max(abs(value - expected[place - 1, token]) for token, value in values.items())]
                if values
                else []
            )
            if len(found) == COMPARED:
                return max(found)
    raise AssertionError(f"only {len(found)} prefixes have log-probabilities: choose another seed")


def report(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "export.json").read_text()))

"""Tiny random models made on the spot: in memory, or checkpoints in Hugging Face layout with the
shipped tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

import mlx_parallm
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.models.loading import evaluate_module

TINY_ASSETS = Path(mlx_parallm.__file__).parent / "models" / "tiny"
VOCAB_SIZE = json.loads((TINY_ASSETS / "config.json").read_text())["vocab_size"]

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LLAMA3_ROPE: dict[str, Any] = QWEN3 | {
    "model_type": "llama",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


def lora_config(
    rank: int,
    alpha: float,
    target_modules: tuple[str, ...] | str = "all-linear",
    layers: tuple[int, int] | str = "all",
    *,
    rslora: bool = False,
    dora: bool = False,
    experts: bool = False,
) -> LoraConfig:
    settings = {
        "target_modules": target_modules,
        "layers": layers,
        "use_rslora": rslora,
        "use_dora": dora,
        "routed_experts": experts,
    }
    return LoraConfig.model_validate({"rank": rank, "alpha": alpha} | settings)


def make_model(config: dict[str, Any] = QWEN3, *, seed: int = 0, spread: float = 3.0) -> nn.Module:
    """A random model, evaluated. `spread` widens the weights so that greedy answers are not all
    one token."""
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(lambda p: p * spread if p.ndim > 1 else p, model.parameters()))
    model.freeze()
    model.eval()
    evaluate_module(model)
    return model


def save_checkpoint(
    path: Path, config: dict[str, Any] = QWEN3, *, seed: int = 0, dtype: Any = mx.float32
) -> Path:
    """Writes a random model and the shipped tokenizer in Hugging Face layout."""
    path.mkdir(parents=True)
    model = make_model(config, seed=seed)
    weights = {name: array.astype(dtype) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_ASSETS / name, path / name)
    return path

"""Random tiny models of several architectures, made on the spot."""

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.recurrent.layers import use_chunks
from tests.tiny_models import EXPERTS

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 40,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "gptj": {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 64,
        "n_positions": 128,
        "rotary_dim": 8,
    }
    | {"layer_norm_epsilon": 1e-5},
    "qwen3_next": {
        "full_attention_interval": 3,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "qwen3_moe": EXPERTS,
    "gemma3_text": {"sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8.0},
}


def make_model(architecture: str = "qwen3", seed: int = 0, **overrides: Any) -> nn.Module:
    """A random model with parameters away from their initial special values, evaluated and
    frozen."""
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    config = SHAPE | EXTRA.get(architecture, {}) | {"model_type": architecture} | overrides
    model = module.Model(module.ModelArgs.from_dict(config))
    use_chunks(model)
    model.freeze()
    mx.eval(model.parameters())
    return model

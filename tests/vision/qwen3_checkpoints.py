"""Tiny random checkpoints of Qwen's newer families, written on the spot from mlx-lm's and mlx-vlm's
own modules: as a training of full weights saves them."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.images.checkpoints import add_processor


def save_qwen3(path: Path, model_type: str, seed: int = 0) -> Path:
    """Write a checkpoint of "qwen3_vl" (DeepStack) or "qwen3_5_moe" and return its directory."""
    path.mkdir(parents=True)
    first, vocabulary = add_processor(path)
    hybrid = model_type == "qwen3_5_moe"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    rope |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1] if hybrid else [6, 5, 5]}
    text: dict[str, Any] = {
        "model_type": f"{model_type}_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4 if hybrid else 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
    }
    vision: dict[str, Any] = {
        "model_type": model_type,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    }
    if hybrid:
        rope["partial_rotary_factor"] = 0.25
        text |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
        text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        text |= {"linear_conv_kernel_dim": 4, "full_attention_interval": 2}
        text |= {"layer_types": ["linear_attention", "full_attention"] * 2}
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        text |= {"norm_topk_prob": True, "shared_expert_intermediate_size": 48}
    else:
        vision["deepstack_visual_indexes"] = [0, 1]
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: first + number for number, name in enumerate(names)}
    config = {"model_type": model_type, "text_config": text, "vision_config": vision, **ids}
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    language, seeing = (import_module(f"{of}.models.{model_type}") for of in ("mlx_lm", "mlx_vlm"))
    model = language.Model(language.ModelArgs.from_dict(config))
    tower = seeing.VisionModel(seeing.VisionConfig.from_dict(vision))
    mx.random.seed(seed)
    arrays = dict(tree_flatten(model.parameters()))
    arrays |= {f"vision_tower.{name}": a for name, a in tree_flatten(tower.parameters())}
    for name, array in arrays.items():
        if array.ndim > 1:
            spread = 1.0 if "embed_tokens" in name else 1.2 / array.shape[-1] ** 0.5
            arrays[name] = spread * mx.random.normal(array.shape)
    mx.eval(arrays)
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "mlx"})
    return path

"""A tiny random LFM2-VL, written on the spot in transformers' layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.images.checkpoints import biased, norm_arrays, spread, write_tokens
from tests.images.gemma3 import VISION_WIDTH, siglip
from tests.tiny_models import TINY_ASSETS

WIDTH, INNER, PLACES = 64, 96, 16
PATCH = 4  # pixels; 2 × 2 patches are a token
SETTINGS = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "processor_class": "Lfm2VlProcessor",
    "encoder_patch_size": PATCH,
    "tile_size": 16,
    "min_image_tokens": 2,
    "max_image_tokens": 12,
    "max_tiles": 4,
}
NAMES = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
GRID = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_lfm2_vl(path: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint and return its directory."""
    path.mkdir(parents=True)
    first, vocabulary = write_tokens(path, (*NAMES, *GRID), TEMPLATE)
    text = {
        "model_type": "lfm2",
        "hidden_size": WIDTH,
        "block_dim": WIDTH,
        "block_ff_dim": INNER,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "vocab_size": vocabulary,
    }
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": VISION_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "num_patches": PLACES,
        "vision_use_head": False,
    }
    settings = {
        "model_type": "lfm2_vl",
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "image_token_id": first,
        "projector_hidden_size": 48,
        "downsample_factor": 2,
        "text_config": text,
        "vision_config": vision,
    }
    (path / "config.json").write_text(json.dumps(settings | config))
    shutil.copy(TINY_ASSETS / "generation_config.json", path / "generation_config.json")
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    mx.random.seed(seed)
    tower = siglip("model.vision_tower.vision_model", 2, PLACES)
    patch = "model.vision_tower.vision_model.embeddings.patch_embedding.weight"
    tower[patch] = spread(VISION_WIDTH, 3 * PATCH * PATCH)
    shapes = {"linear_1": (48, 4 * VISION_WIDTH), "linear_2": (WIDTH, 48)}
    arrays = _text(text) | tower | biased("model.multi_modal_projector", shapes)
    arrays |= norm_arrays("model.multi_modal_projector.layer_norm", 4 * VISION_WIDTH, biased=True)
    mx.eval(arrays)
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return path


def _text(text: dict[str, Any]) -> dict[str, mx.array]:
    prefix = "model.language_model"
    arrays = {
        f"{prefix}.embed_tokens.weight": spread(text["vocab_size"], WIDTH, scale=0.5),
        f"{prefix}.embedding_norm.weight": 1 + 0.1 * mx.random.normal((WIDTH,)),
    }
    shapes = {"w1": (INNER, WIDTH), "w3": (INNER, WIDTH), "w2": (WIDTH, INNER)}
    for layer, kind in enumerate(text["layer_types"]):
        block = f"{prefix}.layers.{layer}"
        matrices = {f"feed_forward.{name}": shape for name, shape in shapes.items()}
        norms = {"operator_norm": WIDTH, "ffn_norm": WIDTH}
        if kind == "conv":
            matrices |= {"conv.in_proj": (3 * WIDTH, WIDTH), "conv.out_proj": (WIDTH, WIDTH)}
            arrays[f"{block}.conv.conv.weight"] = spread(WIDTH, 1, 3)
        else:
            matrices |= {f"self_attn.{name}_proj": (32, WIDTH) for name in "kv"}
            matrices |= {f"self_attn.{name}": (WIDTH, WIDTH) for name in ("q_proj", "out_proj")}
            norms |= {"self_attn.q_layernorm": 16, "self_attn.k_layernorm": 16}
        arrays |= {f"{block}.{name}.weight": spread(*shape) for name, shape in matrices.items()}
        arrays |= {
            f"{block}.{name}.weight": 1 + 0.1 * mx.random.normal((size,))
            for name, size in norms.items()
        }
    return arrays

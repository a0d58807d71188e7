"""A tiny random Gemma 3 that sees, written on the spot in the layout of the hub's checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.images.checkpoints import biased, norm_arrays, spread, write_tokens
from tests.tiny_models import TINY_ASSETS

SIDE, PATCH = 32, 4  # pixels: 8 × 8 patches
TOKENS = 16  # of a picture
WINDOW = 12  # less than a picture
WIDTH, VISION_WIDTH = 64, 32
NAMES = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_gemma3(path: Path, *, seed: int = 0, **preprocessor: Any) -> Path:
    """Write a checkpoint and return its directory. Layers 2 and 4 see everything, the others a
    window."""
    path.mkdir(parents=True)
    first, vocabulary = write_tokens(path, NAMES, TEMPLATE)
    text = {
        "model_type": "gemma3_text",
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 2048,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "vocab_size": vocabulary,
    }
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": first,
        "image_token_index": first + 1,
        "eoi_token_index": first + 2,
        "mm_tokens_per_image": TOKENS,
        "vocab_size": vocabulary,
        "text_config": text,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": VISION_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    shutil.copy(TINY_ASSETS / "generation_config.json", path / "generation_config.json")
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": SIDE, "width": SIDE},
        "do_pan_and_scan": None,
        **preprocessor,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    mx.random.seed(seed)
    arrays = _text(text) | siglip("vision_tower.vision_model", 2, (SIDE // PATCH) ** 2)
    arrays["multi_modal_projector.mm_input_projection_weight"] = spread(WIDTH, VISION_WIDTH).T
    arrays["multi_modal_projector.mm_soft_emb_norm.weight"] = 0.1 * mx.random.normal(
        (VISION_WIDTH,)
    )
    mx.eval(arrays)
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return path


def _text(text: dict[str, Any]) -> dict[str, mx.array]:
    """The arrays of the language part; its norms multiply by 1 + weight."""
    prefix, inner, head = "language_model.model", text["intermediate_size"], text["head_dim"]
    queries, keys = (head * text[f"num_{name}_heads"] for name in ("attention", "key_value"))
    arrays = {
        f"{prefix}.embed_tokens.weight": spread(text["vocab_size"], WIDTH, scale=0.2),
        f"{prefix}.norm.weight": 0.1 * mx.random.normal((WIDTH,)),
    }
    shapes = {
        "self_attn.q_proj": (queries, WIDTH),
        "self_attn.k_proj": (keys, WIDTH),
        "self_attn.v_proj": (keys, WIDTH),
        "self_attn.o_proj": (WIDTH, queries),
        "mlp.gate_proj": (inner, WIDTH),
        "mlp.up_proj": (inner, WIDTH),
        "mlp.down_proj": (WIDTH, inner),
    }
    norms = dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), head) | dict.fromkeys(
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        WIDTH,
    )
    for layer in range(text["num_hidden_layers"]):
        block = f"{prefix}.layers.{layer}"
        arrays |= {f"{block}.{name}.weight": spread(*shape) for name, shape in shapes.items()}
        arrays |= {
            f"{block}.{name}.weight": 0.1 * mx.random.normal((size,))
            for name, size in norms.items()
        }
    return arrays


def siglip(tower: str, layers: int, places: int) -> dict[str, mx.array]:
    """The arrays of a SigLIP."""
    size, inner = VISION_WIDTH, 64
    arrays = {
        f"{tower}.embeddings.patch_embedding.weight": spread(size, 3, PATCH, PATCH),
        f"{tower}.embeddings.patch_embedding.bias": 0.1 * mx.random.normal((size,)),
        f"{tower}.embeddings.position_embedding.weight": spread(places, size, scale=0.3),
    }
    for layer in range(layers):
        block = f"{tower}.encoder.layers.{layer}"
        shapes = {f"self_attn.{name}_proj": (size, size) for name in ("q", "k", "v", "out")}
        arrays |= biased(block, shapes | {"mlp.fc1": (inner, size), "mlp.fc2": (size, inner)})
        for name in ("layer_norm1", "layer_norm2"):
            arrays |= norm_arrays(f"{block}.{name}", size, biased=True)
    return arrays | norm_arrays(f"{tower}.post_layernorm", size, biased=True)

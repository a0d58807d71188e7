"""Tiny random models that see, written on the spot in transformers' layout: the arrays' names and
shapes are those of its `SmolVLMForConditionalGeneration`, the text part has the shipped tokenizer.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.tiny_models import TINY_ASSETS

IMAGE, AROUND, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
TILE = 24  # pixels of a tile's side: 4 × 4 patches, 4 tokens
SIDE = 3  # tiles of a large picture's longer side
SCALE = 2
PATCH = 6
WIDTH, VISION_WIDTH = 64, 32
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's own, with the shipped tokenizer's end of a turn."""


def save_smolvlm(path: Path, *, seed: int = 0, model_type: str = "smolvlm") -> Path:
    """Write a checkpoint and return its directory."""
    path.mkdir(parents=True)
    image_token, vocabulary = _write_tokenizer(path)
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": image_token,
        "scale_factor": SCALE,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": vocabulary,
        },
        "vision_config": {
            "model_type": "smolvlm_vision" if model_type == "smolvlm" else "idefics3_vision",
            "hidden_size": VISION_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": PATCH,
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    shutil.copy(TINY_ASSETS / "generation_config.json", path / "generation_config.json")
    kind = "SmolVLM" if model_type == "smolvlm" else "Idefics3"
    processor = {
        "image_processor_type": f"{kind}ImageProcessor",
        "processor_class": f"{kind}Processor",
        "do_image_splitting": True,
        "max_image_size": {"longest_edge": TILE},
        "size": {"longest_edge": SIDE * TILE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 1,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    length = (TILE // PATCH // SCALE) ** 2
    (path / "processor_config.json").write_text(
        json.dumps({"processor_class": f"{kind}Processor", "image_seq_len": length})
    )
    arrays = smolvlm_arrays(config, seed)
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return path


def _write_tokenizer(path: Path) -> tuple[int, int]:
    """Write the shipped tokenizer with the tokens of pictures. Return the id of `<image>`, and the
    size of the vocabulary."""
    names = [IMAGE, AROUND, GLOBAL]
    names += [f"<row_{r}_col_{c}>" for r in range(1, SIDE + 1) for c in range(1, SIDE + 1)]
    return write_tokens(path, names, TEMPLATE)


def write_tokens(path: Path, names: Sequence[str], template: str) -> tuple[int, int]:
    """Return the id of the first of the new tokens, and the size of the vocabulary."""
    tokenizer = json.loads((TINY_ASSETS / "tokenizer.json").read_text())
    first = 1 + max(
        [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    )
    for number, name in enumerate(names, first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": name, "special": True, **flags})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((TINY_ASSETS / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return first, first + len(names)


def smolvlm_arrays(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Return random arrays, spread enough that answers and features differ."""
    mx.random.seed(seed)
    text, vision = config["text_config"], config["vision_config"]
    width = text["hidden_size"]
    arrays = _llama_arrays("model.text_model", text)
    arrays["lm_head.weight"] = spread(text["vocab_size"], width)
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    tower = "model.vision_model"
    places = (vision["image_size"] // patch) ** 2
    arrays |= {
        f"{tower}.embeddings.patch_embedding.weight": spread(size, 3, patch, patch),
        f"{tower}.embeddings.patch_embedding.bias": 0.1 * mx.random.normal((size,)),
        f"{tower}.embeddings.position_embedding.weight": spread(places, size, scale=0.3),
        f"{tower}.post_layernorm.weight": 1 + 0.1 * mx.random.normal((size,)),
        f"{tower}.post_layernorm.bias": 0.1 * mx.random.normal((size,)),
        "model.connector.modality_projection.proj.weight": spread(
            width, size * config["scale_factor"] ** 2
        ),
    }
    for layer in range(vision["num_hidden_layers"]):
        block = f"{tower}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            arrays[f"{block}.self_attn.{name}.weight"] = spread(size, size)
            arrays[f"{block}.self_attn.{name}.bias"] = 0.1 * mx.random.normal((size,))
        for name, shape in {"fc1": (inner, size), "fc2": (size, inner)}.items():
            arrays[f"{block}.mlp.{name}.weight"] = spread(*shape)
            arrays[f"{block}.mlp.{name}.bias"] = 0.1 * mx.random.normal((shape[0],))
        for name in ("layer_norm1", "layer_norm2"):
            arrays[f"{block}.{name}.weight"] = 1 + 0.1 * mx.random.normal((size,))
            arrays[f"{block}.{name}.bias"] = 0.1 * mx.random.normal((size,))
    mx.eval(arrays)
    return arrays


def _llama_arrays(
    prefix: str, text: dict[str, Any], *, biases: bool = False
) -> dict[str, mx.array]:
    width, inner = text["hidden_size"], text["intermediate_size"]
    keys = width // text["num_attention_heads"] * text["num_key_value_heads"]
    arrays = {
        f"{prefix}.embed_tokens.weight": spread(text["vocab_size"], width, scale=1.0),
        f"{prefix}.norm.weight": mx.ones(width),
    }
    for layer in range(text["num_hidden_layers"]):
        block = f"{prefix}.layers.{layer}"
        shapes = {"q_proj": width, "k_proj": keys, "v_proj": keys, "o_proj": width}
        for name, outputs in shapes.items():
            arrays[f"{block}.self_attn.{name}.weight"] = spread(outputs, width)
            if biases and name != "o_proj":
                arrays[f"{block}.self_attn.{name}.bias"] = 0.1 * mx.random.normal((outputs,))
        arrays |= {
            f"{block}.mlp.gate_proj.weight": spread(inner, width),
            f"{block}.mlp.up_proj.weight": spread(inner, width),
            f"{block}.mlp.down_proj.weight": spread(width, inner),
            f"{block}.input_layernorm.weight": 1 + 0.1 * mx.random.normal((width,)),
            f"{block}.post_attention_layernorm.weight": 1 + 0.1 * mx.random.normal((width,)),
        }
    return arrays


def spread(*shape: int, scale: float | None = None) -> mx.array:
    inputs = 1
    for side in shape[1:]:
        inputs *= side
    return (1.5 / inputs**0.5 if scale is None else scale) * mx.random.normal(shape)


# ---------------------------------------------------------------------- Qwen2-VL, Qwen2.5-VL

QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_qwen_vl(path: Path, *, model_type: str = "qwen2_vl", seed: int = 0) -> Path:
    """Write a checkpoint in transformers' layout: patches of 4 pixels, 2 × 2 of them a token."""
    path.mkdir(parents=True)
    first, vocabulary = add_processor(path)
    newer = model_type == "qwen2_5_vl"
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    vision |= {"temporal_patch_size": 2, "in_channels": 3, "model_type": model_type}
    if newer:
        vision |= {"hidden_size": VISION_WIDTH, "intermediate_size": 48, "out_hidden_size": WIDTH}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1], "hidden_act": "silu"}
    else:
        vision |= {"embed_dim": VISION_WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2}
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config = {
        "model_type": model_type,
        **text,
        **{name: first + place for place, name in enumerate(names)},
        "vision_config": vision,
    }
    (path / "config.json").write_text(json.dumps(config))
    shutil.copy(TINY_ASSETS / "generation_config.json", path / "generation_config.json")
    mx.random.seed(seed)
    arrays = _llama_arrays("model.language_model", text, biases=True)
    arrays["lm_head.weight"] = spread(vocabulary, WIDTH)
    arrays |= _qwen_tower(newer)
    mx.eval(arrays)
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return path


def add_processor(path: Path) -> tuple[int, int]:
    """Write the tokenizer and the processor of pictures of a Qwen. Return the id of the first of
    the new tokens, and the size of the vocabulary."""
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 8 * 8 * 4,
        "max_pixels": 8 * 8 * 24,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return write_tokens(path, QWEN_TOKENS, QWEN_TEMPLATE)


def _qwen_tower(newer: bool) -> dict[str, mx.array]:
    size, inner = VISION_WIDTH, 48 if newer else 2 * VISION_WIDTH
    arrays = {"model.visual.patch_embed.proj.weight": spread(size, 3, 2, 4, 4)}
    for layer in range(2):
        block = f"model.visual.blocks.{layer}"
        shapes = {"attn.qkv": (3 * size, size), "attn.proj": (size, size)}
        if newer:
            shapes |= {"mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size)}
            shapes |= {"mlp.down_proj": (size, inner)}
        else:
            shapes |= {"mlp.fc1": (inner, size), "mlp.fc2": (size, inner)}
        arrays |= biased(block, shapes)
        for norm in ("norm1", "norm2"):
            arrays |= norm_arrays(f"{block}.{norm}", size, biased=not newer)
    arrays |= biased(
        "model.visual.merger", {"mlp.0": (4 * size, 4 * size), "mlp.2": (WIDTH, 4 * size)}
    )
    return arrays | norm_arrays("model.visual.merger.ln_q", size, biased=not newer)


def biased(prefix: str, shapes: dict[str, tuple[int, int]]) -> dict[str, mx.array]:
    arrays = {}
    for name, shape in shapes.items():
        arrays[f"{prefix}.{name}.weight"] = spread(*shape)
        arrays[f"{prefix}.{name}.bias"] = 0.1 * mx.random.normal((shape[0],))
    return arrays


def norm_arrays(name: str, size: int, *, biased: bool) -> dict[str, mx.array]:
    arrays = {f"{name}.weight": 1 + 0.1 * mx.random.normal((size,))}
    return arrays | ({f"{name}.bias": 0.1 * mx.random.normal((size,))} if biased else {})

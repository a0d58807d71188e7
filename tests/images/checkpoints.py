"""Tiny random models that see, written on the spot in transformers' layout: the arrays' names and
shapes are those of its `SmolVLMForConditionalGeneration`, the text part has the shipped tokenizer.
"""

import json
import shutil
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
    tokenizer = json.loads((TINY_ASSETS / "tokenizer.json").read_text())
    first = max(
        [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    )
    names = [IMAGE, AROUND, GLOBAL]
    names += [f"<row_{r}_col_{c}>" for r in range(1, SIDE + 1) for c in range(1, SIDE + 1)]
    for number, name in enumerate(names, first + 1):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": name, "special": True, **flags})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((TINY_ASSETS / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return first + 1, first + 1 + len(names)


def smolvlm_arrays(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Return random arrays, spread enough that answers and features differ."""
    mx.random.seed(seed)
    text, vision = config["text_config"], config["vision_config"]
    width, inner, heads = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    keys = width // text["num_attention_heads"] * text["num_key_value_heads"]
    arrays = {
        "model.text_model.embed_tokens.weight": _spread(heads, width, scale=1.0),
        "model.text_model.norm.weight": mx.ones(width),
        "lm_head.weight": _spread(heads, width),
    }
    for layer in range(text["num_hidden_layers"]):
        block = f"model.text_model.layers.{layer}"
        arrays |= {
            f"{block}.self_attn.q_proj.weight": _spread(width, width),
            f"{block}.self_attn.k_proj.weight": _spread(keys, width),
            f"{block}.self_attn.v_proj.weight": _spread(keys, width),
            f"{block}.self_attn.o_proj.weight": _spread(width, width),
            f"{block}.mlp.gate_proj.weight": _spread(inner, width),
            f"{block}.mlp.up_proj.weight": _spread(inner, width),
            f"{block}.mlp.down_proj.weight": _spread(width, inner),
            f"{block}.input_layernorm.weight": 1 + 0.1 * mx.random.normal((width,)),
            f"{block}.post_attention_layernorm.weight": 1 + 0.1 * mx.random.normal((width,)),
        }
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    tower = "model.vision_model"
    places = (vision["image_size"] // patch) ** 2
    arrays |= {
        f"{tower}.embeddings.patch_embedding.weight": _spread(size, 3, patch, patch),
        f"{tower}.embeddings.patch_embedding.bias": 0.1 * mx.random.normal((size,)),
        f"{tower}.embeddings.position_embedding.weight": _spread(places, size, scale=0.3),
        f"{tower}.post_layernorm.weight": 1 + 0.1 * mx.random.normal((size,)),
        f"{tower}.post_layernorm.bias": 0.1 * mx.random.normal((size,)),
        "model.connector.modality_projection.proj.weight": _spread(
            width, size * config["scale_factor"] ** 2
        ),
    }
    for layer in range(vision["num_hidden_layers"]):
        block = f"{tower}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            arrays[f"{block}.self_attn.{name}.weight"] = _spread(size, size)
            arrays[f"{block}.self_attn.{name}.bias"] = 0.1 * mx.random.normal((size,))
        for name, shape in {"fc1": (inner, size), "fc2": (size, inner)}.items():
            arrays[f"{block}.mlp.{name}.weight"] = _spread(*shape)
            arrays[f"{block}.mlp.{name}.bias"] = 0.1 * mx.random.normal((shape[0],))
        for name in ("layer_norm1", "layer_norm2"):
            arrays[f"{block}.{name}.weight"] = 1 + 0.1 * mx.random.normal((size,))
            arrays[f"{block}.{name}.bias"] = 0.1 * mx.random.normal((size,))
    mx.eval(arrays)
    return arrays


def _spread(*shape: int, scale: float | None = None) -> mx.array:
    inputs = 1
    for side in shape[1:]:
        inputs *= side
    return (1.5 / inputs**0.5 if scale is None else scale) * mx.random.normal(shape)

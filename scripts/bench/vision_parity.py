"""Logits of tiny random models that see, against transformers' own in float32: pictures at ragged places.

    .venv/bin/python scripts/bench/vision_parity.py --python /path/of/a/python/with/torch

One process computes ours, another (torch, transformers, Pillow) its. Prints the largest difference and the largest logit of
each family; exits with 1 where the difference is above 1e-4 of that.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FAMILIES = ("smolvlm", "idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
FAMILIES += ("qwen3_5_moe", "qwen3_vl_moe", "qwen3_vl_moe_by_input", "gemma3", "lfm2_vl")
MOST = 1e-4
SIZES = ((80, 50), (30, 90), (24, 24))
MAKE = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForImageTextToText
name, path = sys.argv[1], sys.argv[2]
kind = name.removesuffix("_by_input")
rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
hybrid = kind.startswith("qwen3_5")
rope |= {"mrope_section": [2, 1, 1] if hybrid else [6, 5, 5]}
rope |= {"partial_rotary_factor": 0.25} if hybrid else {}
text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
text |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 324, "max_position_embeddings": 2048}
text |= {"rope_parameters": rope}
if hybrid:
    text |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    text |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
    text |= {"layer_types": ["linear_attention", "full_attention"] * 2}
    text |= {"full_attention_interval": 2}
if kind.endswith("_moe"):
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    text |= {"norm_topk_prob": True, "shared_expert_intermediate_size": 48}
vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}
vision |= {"num_position_embeddings": 64}
if not hybrid:
    vision |= {"deepstack_visual_indexes": [0, 1]}
ids = {"vision_start_token_id": 320, "vision_end_token_id": 321, "image_token_id": 322}
config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, video_token_id=323, **ids)
torch.manual_seed(0)
model = AutoModelForImageTextToText.from_config(config).float()
with torch.no_grad():
    for name, array in model.named_parameters():
        if array.ndim > 1:
            array.normal_(0, 1.0 if "embed_tokens" in name else 1.2 / array.shape[-1] ** 0.5)
model.save_pretrained(path)
if kind.endswith("_moe"):  # the hub's files hold a layer's experts in one array
    from safetensors.torch import load_file, save_file
    file = f"{path}/model.safetensors"
    arrays = load_file(file)
    if name.endswith("_by_input"):  # … of Qwen3-VL-MoE with the inputs before the outputs
        for key in [key for key in arrays if ".experts." in key]:
            arrays[key] = arrays[key].transpose(1, 2).contiguous()
    for name in [name for name in arrays if name.endswith("experts.0.gate_proj.weight")]:
        prefix = name.removesuffix(".0.gate_proj.weight")
        def all_of(part):
            return torch.stack([arrays.pop(f"{prefix}.{i}.{part}.weight") for i in range(4)])
        arrays[f"{prefix}.gate_up_proj"] = torch.cat([all_of("gate_proj"), all_of("up_proj")], 1)
        arrays[f"{prefix}.down_proj"] = all_of("down_proj")
    save_file(arrays, file, metadata={"format": "pt"})
written = json.load(open(f"{path}/config.json"))
written["text_config"]["tie_word_embeddings"] = False  # the hub's checkpoints say it there too
json.dump(written, open(f"{path}/config.json", "w"))
"""
THEIRS = """
import sys, numpy as np, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText
path, work, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
pictures = [Image.open(f"{work}/{i}.png") for i in range(count)]
if model.config.model_type == "lfm2_vl":  # its processor is torch's; see vision_pixels.py
    read = {name: torch.tensor(array) for name, array in np.load(f"{work}/pixels.npz").items()}
else:
    reader = AutoImageProcessor.from_pretrained(path, backend="pil")
    read = reader([pictures], return_tensors="pt")
names = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "spatial_shapes")
given = {name: read[name] for name in names if name in read}
ids = torch.tensor(np.load(f"{work}/ids.npy"))[None]
if "image_grid_thw" in given:
    given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
if model.config.model_type == "gemma3":
    given["token_type_ids"] = (ids == model.config.image_token_id).int()
with torch.no_grad():
    np.save(f"{work}/theirs.npy", model(input_ids=ids, **given).logits[0].numpy())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares logits with transformers'.")
    parser.add_argument("--python", default=sys.executable, help="has torch and transformers")
    parser.add_argument("families", nargs="*", default=FAMILIES)
    arguments = parser.parse_args()
    worst = 0.0
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as work:
            if family.startswith("qwen3"):
                made = [arguments.python, "-c", MAKE, family, f"{work}/model"]
                subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
            ours, ids = our_logits(Path(work), family)
            np.save(f"{work}/ids.npy", ids)
            command = [arguments.python, "-c", THEIRS, f"{work}/model", work, str(len(SIZES))]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            theirs = np.load(f"{work}/theirs.npy")
        difference, largest = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
        print(json.dumps({"family": family, "difference": difference, "largest": largest}))
        worst = max(worst, difference / largest)
    return int(worst > MOST)


def prompt_of(work: Path, family: str) -> tuple[Any, Any, Any, list[Any], tuple[int, ...]]:
    """A checkpoint, written unless it is there, and a prompt: its configuration, the loaded model, the encoder, the pictures
    and the ids."""
    from mlx_parallm.config.load import Config
    from mlx_parallm.models.loading import load_model, load_tokenizer
    from mlx_parallm.systems.vision.leaf import image_support
    from tests.images.checkpoints import add_processor, save_qwen_vl, save_smolvlm
    from tests.images.gemma3 import save_gemma3
    from tests.images.lfm2_vl import save_lfm2_vl
    from tests.vision.drawn import noise

    path = work / "model"
    if path.exists():
        add_processor(path)
    elif family in ("gemma3", "lfm2_vl"):
        {"gemma3": save_gemma3, "lfm2_vl": save_lfm2_vl}[family](path)
    else:
        save = save_qwen_vl if family.startswith("qwen2") else save_smolvlm
        save(path, model_type=family)
    config = Config.model_validate({"model": {"base_path": str(path)}, "vision": {"enabled": True}})
    loaded = load_model(config.model)
    support = image_support(config, path, loaded.config)
    encoder = support.encoder(loaded)
    pictures = [noise(*size, seed=seed) for seed, size in enumerate(SIZES)]
    for index, picture in enumerate(pictures):
        picture.save(work / f"{index}.png")
    images = [support.reader.image_of(picture) for picture in pictures]
    begin, end = ("<|vision_start|>", "<|vision_end|>") if family.startswith("qwen") else ("", "")
    text = (
        "".join(f"Picture {i}: {begin}{image.text}{end}, " for i, image in enumerate(images))
        + "which?"
    )
    ids = tuple(load_tokenizer(path, config.model).encode(text))
    return config, loaded, encoder, images, ids


def our_logits(work: Path, family: str) -> tuple[np.ndarray, np.ndarray]:
    """[T, V] by the engine's way: ids of images, rows of the embedding's table."""
    import mlx.core as mx

    from mlx_parallm.engine.images import ImageFeatures, image_ids
    from mlx_parallm.models.images.embedding import admit_images

    _, loaded, encoder, images, ids = prompt_of(work, family)
    if family == "lfm2_vl":
        np.savez(work / "pixels.npz", **padded_views([image.arrays for image in images]))
    table = admit_images(
        loaded.model,
        encoder.rope_axes,
        encoder.levels,
        bidirectional=encoder.bidirectional,
    )
    features = ImageFeatures(encoder, table)
    numbers = image_ids(ids, images, encoder.token_id)
    inputs, rows = features.inputs([numbers], len(ids), features.prepare([(numbers, images)]))
    positions = features.positions_of(ids, images)[0]
    turned = None if positions is None else mx.array(positions[:, None])
    with table.using(rows, inputs, turned, features.numbers([numbers], len(ids))):
        return np.array(loaded.model(inputs)[0]), np.array(ids)


def padded_views(images: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """LFM2-VL's patches as transformers takes them: a row for each view, padded."""
    views, shapes = [], []
    for arrays in images:
        ends = np.cumsum(np.prod(arrays["shapes"], axis=1))
        views += np.split((arrays["patches"] / 255 - 0.5) / 0.5, ends[:-1])
        shapes += arrays["shapes"].tolist()
    longest = max(map(len, views))
    pixels = [np.pad(view, ((0, longest - len(view)), (0, 0))) for view in views]
    mask = [np.arange(longest) < len(view) for view in views]
    return {
        "pixel_values": np.array(pixels, np.float32),
        "pixel_attention_mask": np.array(mask, np.int64),
        "spatial_shapes": np.array(shapes),
    }


if __name__ == "__main__":
    sys.exit(main())

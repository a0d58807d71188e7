"""Logits and gradients of tiny random models that see, against transformers' own in float32: pictures at ragged places.

    .venv/bin/python scripts/bench/vision_parity.py --python /path/of/a/python/with/torch

One process computes ours, another (torch, transformers, Pillow) its. Prints for each family the largest difference and the
largest logit of a text with three pictures, and how far the gradients are apart: ‖ours - theirs‖ / ‖theirs‖, the worst array
of each kind. Their loss is the mean negative log-likelihood of the text's tokens in three rows, which have 1, 2 and 3
pictures; ours is that of the trainer, one micro-batch of full weights, the tower among them. Exits with 1 where anything
is above 1e-4.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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
processor = None
if model.config.model_type != "lfm2_vl":  # its processor is torch's; see vision_pixels.py
    processor = AutoImageProcessor.from_pretrained(path, backend="pil")
total, lost = 0, 0.0
for number in range(1, count + 1):
    pictures = [Image.open(f"{work}/{i}.png") for i in range(number)]
    if processor is None:
        arrays = np.load(f"{work}/pixels{number}.npz")
        read = {name: torch.tensor(array) for name, array in arrays.items()}
    else:
        read = processor([pictures], return_tensors="pt")
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "spatial_shapes")
    inputs = {name: read[name] for name in names if name in read}
    ids = torch.tensor(np.load(f"{work}/ids{number}.npy"))[None]
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    if model.config.model_type == "gemma3":
        inputs["token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, **inputs).logits[0]
    targets = ids[0, 1:]
    text = targets != model.config.image_token_id
    picked = torch.log_softmax(logits[:-1], -1).gather(1, targets[:, None])[:, 0]
    lost = lost - picked[text].sum()
    total += int(text.sum())
np.save(f"{work}/theirs.npy", logits.detach().numpy())
(lost / total).backward()
arrays = {name: array.grad for name, array in model.named_parameters()}
np.savez(f"{work}/gradients.npz", **{n: g.numpy() for n, g in arrays.items() if g is not None})
"""
THEIR_NAMES = (("vision_tower.", "model.visual."), ("", "model."))
THEIR_NAMES += (("vision_tower.vision_model.", "model.vision_tower."),)
"""Beginnings of names of the part that sees, ours and theirs; the first that is there holds."""
KINDS = {
    "embedding": ("embed_tokens.weight",),
    "q_proj": ("self_attn.q_proj.weight",),
    "v_proj": ("self_attn.v_proj.weight",),
    "mlp": (".mlp.gate_proj.weight", ".mlp.up_proj.weight", ".mlp.down_proj.weight"),
    "experts": ("switch_mlp.down_proj.weight",),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compares logits and gradients with transformers'."
    )
    parser.add_argument("--python", default=sys.executable, help="has torch and transformers")
    parser.add_argument("families", nargs="*", default=FAMILIES)
    arguments = parser.parse_args()
    worst = 0.0
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as work:
            os.environ["XDG_CACHE_HOME"] = f"{work}/cache"  # where rows' images lie
            if family.startswith("qwen3"):
                made = [arguments.python, "-c", MAKE, family, f"{work}/model"]
                subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
            ours = Ours(Path(work), family)
            command = [arguments.python, "-c", THEIRS, f"{work}/model", work, str(len(SIZES))]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            theirs = np.load(f"{work}/theirs.npy")
            difference = float(np.abs(ours.logits() - theirs).max())
            largest = float(np.abs(theirs).max())
            apart = differences(ours.gradients(), dict(np.load(f"{work}/gradients.npz")))
        line = {"family": family, "difference": difference, "largest": largest}
        print(json.dumps(line | {"gradients": {kind: f"{off:.1e}" for kind, off in apart.items()}}))
        worst = max(worst, difference / largest, *apart.values())
    return int(worst > MOST)


def differences(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Return how far the gradients are apart, the worst array of each kind."""
    apart = {}
    text = {n: g for n, g in theirs.items() if "text_model." in n or "language_model." in n}
    for kind, ends in KINDS.items():
        pairs = []
        for name in (n for n in ours if n.startswith("language_model.") and n.endswith(ends)):
            end = name.partition("model.model.")[2].replace(
                "switch_mlp.down_proj.weight", "experts.down_proj"
            )
            pairs.append((ours[name], next(g for n, g in text.items() if n.endswith(end))))
        if pairs:
            apart[kind] = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
    seeing = {}
    for name, gradient in ours.items():
        if not name.startswith(("language_model.", "model.")):
            names = [b + name.removeprefix(a) for a, b in THEIR_NAMES if name.startswith(a)]
            seeing[name] = gradient, next(theirs[each] for each in names if each in theirs)
    # the gradient by a key's bias is 0 but for rounding: it is measured by the largest one
    least = 1e-3 * max(np.linalg.norm(b) for _, b in seeing.values())
    for name, (a, b) in seeing.items():
        laid = np.moveaxis(a, -1, 1) if a.ndim > 2 else a  # patches' colours are last in MLX
        off = float(np.linalg.norm(laid - b) / max(np.linalg.norm(b), least))
        between = any(word in name for word in ("connector", "merger", "projector"))
        kind = "connector" if between else "tower"
        apart[kind] = max(off, apart.get(kind, 0.0))
    return apart


class Ours:
    """A checkpoint of a family, written into `work` where it is not there, and three texts with 1, 2 and 3 pictures."""

    def __init__(self, work: Path, family: str) -> None:
        from mlx_parallm.config.load import Config
        from mlx_parallm.models.loaded_images import with_images
        from mlx_parallm.models.loading import load_model, load_tokenizer
        from mlx_parallm.systems.vision.config import VisionConfig
        from mlx_parallm.systems.vision.leaf import image_support
        from tests.images.checkpoints import add_processor, save_qwen_vl, save_smolvlm
        from tests.images.gemma3 import save_gemma3
        from tests.images.lfm2_vl import save_lfm2_vl
        from tests.vision.drawn import noise

        save = save_qwen_vl if family.startswith("qwen2") else save_smolvlm
        path = work / "model"
        if path.exists():
            add_processor(path)
        elif family in ("gemma3", "lfm2_vl"):
            {"gemma3": save_gemma3, "lfm2_vl": save_lfm2_vl}[family](path)
        else:
            save(path, model_type=family)
        self.config = Config.model_validate(
            {
                "model": {"base_path": str(path)},
                "vision": {"enabled": True, "train": "tower"},
                "rl_training": {"lora": {"enabled": False}},
            }
        )
        loaded = load_model(self.config.model)
        support = image_support(self.config.section(VisionConfig), path, loaded.config)
        self.loaded, self.reader = with_images(loaded, support), support.reader
        pictures = [noise(*size, seed=seed) for seed, size in enumerate(SIZES)]
        for index, picture in enumerate(pictures):
            picture.save(work / f"{index}.png")
        self.names = [self.reader.keep((work / f"{i}.png").read_bytes()) for i in range(len(SIZES))]
        self.images = [self.reader.stored(name) for name in self.names]
        if family == "lfm2_vl":
            for number in range(1, len(SIZES) + 1):
                views = padded_views([image.arrays for image in self.images[:number]])
                np.savez(work / f"pixels{number}.npz", **views)
        begin, end = (
            ("<|vision_start|>", "<|vision_end|>") if family.startswith("qwen") else ("", "")
        )
        tokenizer = load_tokenizer(path, self.config.model)
        shown = [f"Picture {i}: {begin}{image.text}{end}, " for i, image in enumerate(self.images)]
        self.rows = [
            tokenizer.encode("".join(shown[: n + 1]) + "which?") for n in range(len(shown))
        ]
        for number, row in enumerate(self.rows, 1):
            np.save(work / f"ids{number}.npy", np.array(row))

    def logits(self) -> np.ndarray:
        """[T, V] of the longest row by the engine's way: ids of images, rows of the embedding's table."""
        import mlx.core as mx

        from mlx_parallm.engine.companions.companion import Carried
        from mlx_parallm.engine.companions.images import ImageFeatures, image_ids
        from mlx_parallm.engine.decoding.forward import GivenText
        from mlx_parallm.models.images.embedding import admit_images

        ids, model, encoder = (
            tuple(self.rows[-1]),
            self.loaded.model,
            self.loaded.image_parts.encoder,
        )
        table = admit_images(
            model, encoder.rope_axes, encoder.levels, bidirectional=encoder.bidirectional
        )
        features = ImageFeatures(encoder, table)
        numbers = image_ids(ids, self.images, encoder.token_id)
        features.prepare([(numbers, GivenText(carried=Carried(self.images)))])
        inputs, read = features.inputs([numbers], len(ids))
        positions = features.positions_of(ids, self.images)[0]
        turned = None if positions is None else mx.array(positions[:, None])
        spans = features.numbers([numbers], len(ids))
        with features.table.using(read, inputs, turned, spans):
            return np.array(model(inputs)[0])

    def gradients(self) -> dict[str, np.ndarray]:
        """Those of all trained arrays, by name, as the trainer computes them."""
        from mlx_parallm.rl_training.factory import build_trainer
        from mlx_parallm.rl_training.options import make_algorithm
        from mlx_parallm.rl_training.step.batch import TrainSequence
        from mlx_parallm.types import Rollout

        training = self.config.rl_training
        trainer = build_trainer(self.loaded, training, make_algorithm(training))
        sequences, trained = [], 0
        for number, row in enumerate(self.rows, 1):
            mask = [
                int(place > 0 and token != self.reader.token_id) for place, token in enumerate(row)
            ]
            names, trained = tuple(self.names[:number]), trained + sum(mask)
            rollout = Rollout(
                tuple(row), tuple(mask), None, (-1,) * len(row), 1.0, {}, images=names
            )
            sequences.append(TrainSequence(rollout, (0.0,) * len(row), fresh=False))
        gradients = None
        for part in trainer.collate(sequences, range(len(sequences))).micro_batches:
            with trainer.companions["images"].seen(part.inputs):
                _, _, gradients = trainer.model.loss_and_gradients(
                    part.token_batch(),
                    lambda logprobs, *_: (-logprobs.sum() / trained, ()),
                    gradients,
                )
                trainer.companions["images"].add_slopes(trainer.model.feature_slopes)
        for slot, gradient in trainer.companions["images"].pull_back():
            gradients[slot] = gradients[slot] + gradient
        return {n: np.array(g) for n, g in zip(trainer.policy.slots.names, gradients, strict=True)}


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

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

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MOST = 1e-4
SIZES = ((80, 50), (30, 90), (24, 24))
THEIRS = """
import sys, numpy as np, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText
path, work, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
pictures = [Image.open(f"{work}/{i}.png") for i in range(count)]
read = AutoImageProcessor.from_pretrained(path, backend="pil")([pictures], return_tensors="pt")
names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
given = {name: read[name] for name in names if name in read}
ids = torch.tensor(np.load(f"{work}/ids.npy"))[None]
with torch.no_grad():
    np.save(f"{work}/theirs.npy", model(input_ids=ids, **given).logits[0].numpy())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares logits with transformers'.")
    parser.add_argument("--python", default=sys.executable, help="has torch and transformers")
    arguments = parser.parse_args()
    worst = 0.0
    for family in ("smolvlm", "idefics3"):
        with tempfile.TemporaryDirectory() as work:
            ours, ids = our_logits(Path(work), family)
            np.save(f"{work}/ids.npy", ids)
            command = [arguments.python, "-c", THEIRS, f"{work}/model", work, str(len(SIZES))]
            subprocess.run(command, check=True, capture_output=True)
            theirs = np.load(f"{work}/theirs.npy")
        difference, largest = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
        print(json.dumps({"family": family, "difference": difference, "largest": largest}))
        worst = max(worst, difference / largest)
    return int(worst > MOST)


def our_logits(work: Path, family: str) -> tuple[np.ndarray, np.ndarray]:
    """[T, V] by the engine's way: ids of images, rows of the embedding's table."""
    from mlx_parallm.config.load import Config
    from mlx_parallm.engine.images import ImageFeatures, image_ids
    from mlx_parallm.models.images.embedding import admit_images
    from mlx_parallm.models.loading import load_model, load_tokenizer
    from mlx_parallm.systems.vision.leaf import image_support
    from tests.images.checkpoints import save_smolvlm
    from tests.vision.drawn import noise

    path = save_smolvlm(work / "model", model_type=family)
    config = Config.model_validate({"model": {"base_path": str(path)}, "vision": {"enabled": True}})
    loaded = load_model(config.model)
    support = image_support(config, path, loaded.config)
    encoder = support.encoder(loaded)
    pictures = [noise(*size, seed=seed) for seed, size in enumerate(SIZES)]
    for index, picture in enumerate(pictures):
        picture.save(work / f"{index}.png")
    images = [support.reader.image_of(picture) for picture in pictures]
    text = "".join(f"Picture {i}: {image.text}, " for i, image in enumerate(images)) + "which?"
    ids = tuple(load_tokenizer(path, config.model).encode(text))
    features = ImageFeatures(encoder, admit_images(loaded.model))
    numbers = image_ids(ids, images, encoder.token_id)
    inputs, table = features.inputs([numbers], len(ids), features.prepare([(numbers, images)]))
    with features.table.using(table):
        return np.array(loaded.model(inputs)[0]), np.array(ids)


if __name__ == "__main__":
    sys.exit(main())

"""LFM2-VL's pictures as our processor cuts them, against transformers' own, which needs torch.

    .venv/bin/python scripts/bench/vision_pixels.py --python /path/of/a/python/with/torch/and/torchvision

Compares the text, the shapes and the pixels of random and of smooth pictures of many sizes, with the hub's settings and with
small tiles. Prints how many differ; exits with 1 where a text or a shape does, or a pixel by more than one level of 256.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SMALL = {"encoder_patch_size": 4, "tile_size": 16, "min_image_tokens": 2, "max_image_tokens": 12}
SETTINGS = ({}, SMALL | {"max_tiles": 4}, SMALL | {"use_thumbnail": False})
SIZES = ((80, 50), (30, 90), (24, 24), (7, 5), (640, 480), (1200, 900), (300, 1500), (1024, 1024))
THEIRS = """
import importlib.util, json, re, sys, torch, numpy as np
work = sys.argv[1]
try:
    import torchvision
except RuntimeError:  # built for CUDA: its Python part is enough
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    [folder] = importlib.util.find_spec("torchvision").submodule_search_locations
    names = re.findall(r'register_(?:fake|meta)\\("(?:torchvision::)?(\\w+)"', open(folder + "/_meta_registrations.py").read())
    library = torch.library.Library("torchvision", "DEF")
    for name in set(names):
        library.define(f"{name}(Tensor x) -> Tensor")
from PIL import Image
from transformers import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
for case in json.load(open(f"{work}/cases.json")):
    reader = Lfm2VlImageProcessor(**case["settings"], do_rescale=False, do_normalize=False)
    read = reader([[Image.open(f"{work}/{case['picture']}")]], return_row_col_info=True)
    words = Lfm2VlProcessor.__new__(Lfm2VlProcessor)
    words.image_processor = reader
    words.image_token, words.image_thumbnail_token = "<image>", "<|img_thumbnail|>"
    words.image_start_token, words.image_end_token = "<|image_start|>", "<|image_end|>"
    text = words.replace_image_token(read, 0, use_image_special_tokens=True)
    real = read["pixel_attention_mask"].bool()
    np.savez(f"{work}/{case['name']}.npz", patches=read["pixel_values"][real].numpy(), text=text, shapes=read["spatial_shapes"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares pictures with transformers' processor.")
    parser.add_argument("--python", required=True, help="has torch, torchvision and transformers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        ours = our_images(Path(work))
        subprocess.run([arguments.python, "-c", THEIRS, work], check=True)
        theirs = {name: dict(np.load(Path(work) / f"{name}.npz")) for name in ours}
    other = pixels = differing = worst = 0
    for name, image in ours.items():
        their = theirs[name]
        if image.text != str(their["text"]) or (image.arrays["shapes"] != their["shapes"]).any():
            print(json.dumps({"case": name, "shapes": image.arrays["shapes"].tolist()}))
            other += 1
            continue
        off = np.abs(image.arrays["patches"].astype(float) - their["patches"])
        pixels, differing = pixels + off.size, differing + int((off > 0).sum())
        worst = max(worst, off.max())
    row = {"pictures": len(ours), "other text or shape": other, "numbers": pixels}
    print(json.dumps(row | {"differing": differing, "by at most": float(worst)}))
    return int(other > 0 or worst > 1)


def our_images(work: Path) -> dict:
    from mlx_parallm.systems.vision.lfm2_vl import ViewProcessor, ViewSettings
    from tests.vision.drawn import noise

    cases, images = [], {}
    for number, settings in enumerate(SETTINGS):
        processor = ViewProcessor(ViewSettings.of(settings), 0)
        for seed, size in enumerate(SIZES):
            rough = noise(*size, seed=seed)
            smooth = rough.resize((3, 3)).resize(size, Image.Resampling.BICUBIC)
            for kind, picture in {"rough": rough, "smooth": smooth}.items():
                name = f"{number}-{size[0]}x{size[1]}-{kind}"
                picture.save(work / f"{name}.png")
                cases.append({"name": name, "picture": f"{name}.png", "settings": settings})
                images[name] = processor.process(picture, low=False)
    (work / "cases.json").write_text(json.dumps(cases))
    return images


if __name__ == "__main__":
    sys.exit(main())

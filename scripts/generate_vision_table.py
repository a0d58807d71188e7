"""Write the table of docs/vision.md: which architectures that see are served and trained here, and why others are not.

    .venv/bin/python scripts/generate_vision_table.py [--python /a/python/with/torch/and/Pillow] [--only TYPE …]

Each family is tried on a tiny random checkpoint with three pictures: the engine's log-probabilities, of a prompt in chunks of
16 tokens, against one forward; and the gradient of an adapter by an answer. Checkpoints of some are written by transformers'
own model: `--python`. Without it their rows stay as they are. The others are all `model_type`s that mlx-vlm has with a
tower and whose language part mlx-lm has, by the names of their modules.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mlx_parallm.errors import ParallmError  # noqa: E402

PAGE = ROOT / "docs/vision.md"
BEGIN, END = "<!-- vision table: begin -->", "<!-- vision table: end -->"
HEAD = "| architecture | served | trained |  |\n|---|---|---|---|"
MOST = 1e-4
FAILURES = (ParallmError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError)
REASONS = {
    "gemma3n": "its tower is timm's MobileNet, and embeddings of each layer are looked up by token",
    "gemma4": "embeddings of each layer are looked up by token, and features have none; images see both ways",
    "gemma4_unified": "no tower: the language part embeds patches itself, and mlx-lm leaves that out",
    "llama4": "the smallest has 109 billion parameters; layers see chunks of the text",
    "llava": "a tower of CLIP's, of which a layer before the last is read; no family is written",
    "mistral3": "rows of a picture end with their own token; no family is written",
    "pixtral": "rows of a picture end with their own token; no family is written",
}
"""Why one was not tried, where it is known; for others a rule of `reason`."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the table of docs/vision.md.")
    parser.add_argument("--python", help="has torch, transformers and Pillow")
    parser.add_argument("--only", nargs="*", help="try these, print, and write nothing")
    arguments = parser.parse_args()
    from mlx_parallm.systems.vision.leaf import FAMILIES

    written = rows_of(PAGE.read_text(encoding="utf-8"))
    rows = {}
    for name in arguments.only or sorted({*FAMILIES, *both_have()}):
        if name not in FAMILIES:
            rows[name] = f"| `{name}` | no | no | not tried: {reason(name)} |"
            print(rows[name], flush=True)
            continue
        with tempfile.TemporaryDirectory() as work:
            row = tried(name, Path(work), arguments.python)
        rows[name] = row or written.get(name, f"| `{name}` | ? | ? | not tried: needs --python |")
        print(rows[name], flush=True)
    if not arguments.only:
        page = PAGE.read_text(encoding="utf-8")
        table = "\n".join([BEGIN, "", HEAD, *rows.values(), "", END])
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(before + table + after, encoding="utf-8")
    return int(any("| no | no | fails:" in row for row in rows.values()))


def rows_of(page: str) -> dict[str, str]:
    table = page.split(BEGIN)[1].split(END)[0]
    return {row[1]: row[0] for row in re.finditer(r"^\| `(\w+)` \|.*$", table, re.M)}


def both_have() -> set[str]:
    """Return the `model_type`s of mlx-vlm's that have a tower and whose language part mlx-lm has."""
    from mlx_parallm.models.mlx_lm_api import MODEL_REMAPPING, OWN_ARCHITECTURES

    names = {file.name.removesuffix(".py") for file in files("mlx_lm.models").iterdir()}
    names = {name.replace("-", "_") for name in names} | {*MODEL_REMAPPING, *OWN_ARCHITECTURES}
    towers = set()
    for folder in files("mlx_vlm.models").iterdir():
        config = folder / "config.py"
        if folder.is_dir() and config.is_file() and "vision_config" in config.read_text():
            towers.add(folder.name)
    return towers & names


def reason(name: str) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name in REASONS:
        return REASONS[name]
    if name not in CONFIG_MAPPING_NAMES:
        return "transformers has no such model, so its pictures and its logits have nothing to be checked against"
    folder = files("transformers.models") / name
    if not any("image_processing_pil" in file.name for file in folder.iterdir()):
        return "transformers has no processor of its pictures without torch; no family is written"
    return "no family is written"


def tried(name: str, work: Path, python: str | None) -> str | None:
    """Return a family's row; None: its checkpoint cannot be written here."""
    from scripts.bench.vision_parity import MAKE

    if name.startswith("qwen3"):
        if python is None:
            return None
        made = subprocess.run([python, "-c", MAKE, name, str(work / "model")], capture_output=True)
        if made.returncode:
            return None
    try:
        off, norm = served_and_trained(name, work)
    except FAILURES as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        return f"| `{name}` | no | no | fails: {line} |"
    remark = json.dumps({"off": float(f"{off:.1e}"), "gradient": float(f"{norm:.2g}")})
    print(name, remark, file=sys.stderr, flush=True)
    served, learns = off <= MOST, 0 < norm < float("inf")
    return f"| `{name}` | {'yes' if served else 'no'} | {'yes' if learns else 'no'} |  |"


def served_and_trained(name: str, work: Path) -> tuple[float, float]:
    """Return how far the engine's log-probabilities are from one forward's, and the norm of the
    gradient of an adapter's arrays by them."""
    from mlx_parallm.config.training import LoraConfig
    from mlx_parallm.engine.companions.images import ImageFeatures
    from mlx_parallm.engine.decoding.forward import GivenText
    from mlx_parallm.engine.engine import Engine
    from mlx_parallm.models.adapters.linear import AdapterDropout
    from mlx_parallm.models.images.embedding import admit_images
    from mlx_parallm.models.loading import load_model
    from mlx_parallm.models.logprobs import token_logprobs
    from mlx_parallm.models.lora import inject_lora, prepare_for_serving
    from mlx_parallm.types import Request, SamplingParams
    from mlx_parallm.weights import SharedWeights
    from scripts.bench.vision_parity import Ours
    from tests.engine.helpers import ByteTokenizer, engine_options, run

    os.environ["XDG_CACHE_HOME"] = str(work / "cache")  # where rows' images lie
    parts = Ours(work, name)
    config, encoder, images = parts.config, parts.loaded.image_parts.encoder, parts.images
    ids = tuple(parts.rows[-1])
    options = {"bidirectional": encoder.bidirectional}
    ids = (*ids, 1) if ids[-1] == encoder.token_id else ids

    def admitted(model: nn.Module) -> ImageFeatures:
        return ImageFeatures(
            encoder, admit_images(model, encoder.rope_axes, encoder.levels, **options)
        )

    served = load_model(config.model).model
    weights, lora = SharedWeights(served, keep_versions=1), prepare_for_serving(served)
    engine = Engine(
        served,
        ByteTokenizer(),
        weights,
        lora,
        engine_options(prefill_chunk=16, vocab_size=parts.loaded.vocab_size),
        [admitted(served)],
    )
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    request = Request("r", ids, params, images=tuple(images))
    [completion] = run(engine, [request])["r"].completions
    if completion.error:
        raise ValueError(completion.error)
    answer = list(completion.token_ids)

    model: Any = load_model(config.model).model
    inject_lora(model, LoraConfig(rank=4), AdapterDropout(0.0))
    model.train()
    features = admitted(model)
    prompt, carried = features.carry(request)
    numbers, text = (*prompt, *answer), GivenText(carried=carried)

    def logprobs(tree: nn.Module) -> mx.array:
        inputs, entered = features.read([numbers], [text], 0, len(numbers), 0)
        with entered:
            logits = tree(inputs)[0]
        return token_logprobs(logits[len(ids) - 1 : -1], mx.array(answer))

    off = mx.abs(logprobs(model) - mx.array(completion.logprobs)).max().item()
    slopes = nn.value_and_grad(model, lambda tree: logprobs(tree).sum())(model)[1]
    from mlx.utils import tree_flatten

    squares = [mx.square(array).sum() for _, array in tree_flatten(slopes)]
    return float(off), float(mx.sqrt(mx.stack(squares).sum()).item())


if __name__ == "__main__":
    sys.exit(main())

"""What texts cost on a model that sees, over the same language part alone; and what start-up costs beside another commit.

    .venv/bin/python scripts/bench/vision_text.py
    git archive COMMIT --prefix=before/ mlx_parallm | tar x -C /tmp
    .venv/bin/python scripts/bench/vision_text.py --before /tmp/before

CPU seconds (a busy machine changes them little), both ways in turns; medians and their ratio.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TURNS, ROWS, TOKENS = 3, 8, 32
HELP = "from mlx_parallm.cli import main; import sys; sys.argv = ['mlx_parallm', '--help']; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures texts on a model that sees.")
    parser.add_argument("--before", type=Path, help="holds another commit's mlx_parallm/")
    arguments = parser.parse_args()
    if arguments.before is not None:
        report("--help", lambda: child(ROOT, HELP), lambda: child(arguments.before, HELP))
        return
    report("serving", *(serving(images=images) for images in (True, False)))
    report("a gradient", *(gradient(images=images) for images in (True, False)))


def report(name: str, first: Callable[[], float], second: Callable[[], float]) -> None:
    pairs = [(first(), second()) for _ in range(TURNS)]
    now, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    row = {"case": name, "cpu_s": round(now, 4), "other": round(other, 4)}
    print(json.dumps(row | {"ratio": round(now / other, 3)}), flush=True)


def child(where: Path, code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(where)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=where, env=environment, stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        sys.exit(f"{where}: --help ended with {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def loaded():
    from mlx_parallm.config.load import Config
    from mlx_parallm.models.images.support import image_support, with_images
    from mlx_parallm.models.loading import load_model

    config = Config.model_validate({"model": {"base_path": "builtin:tiny-vision"}})
    model = load_model(config.model)
    return with_images(model, image_support(config.image_hooks(), model.path))


def serving(*, images: bool) -> Callable[[], float]:
    """ROWS texts of TOKENS tokens, without a prefix cache."""
    from mlx_parallm.engine.engine import Engine
    from mlx_parallm.engine.images import ImageFeatures
    from mlx_parallm.models.images.embedding import admit_images
    from mlx_parallm.models.lora import prepare_for_serving
    from mlx_parallm.types import Request, SamplingParams
    from mlx_parallm.weights import SharedWeights
    from tests.engine.helpers import ByteTokenizer, engine_options, run

    parts = loaded()
    features = None
    if images:
        features = ImageFeatures(parts.images.encoder, admit_images(parts.model))
    weights, lora = SharedWeights(parts.model, keep_versions=1), prepare_for_serving(parts.model)
    options = engine_options(prefix_cache_bytes=0, vocab_size=parts.vocab_size)
    engine = Engine(parts.model, ByteTokenizer(), weights, lora, options, features)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

    def once() -> float:
        begin = time.process_time()
        run(engine, [Request(str(i), (i + 1, *range(40)), params) for i in range(ROWS)])
        return time.process_time() - begin

    once()
    return once


def gradient(*, images: bool) -> Callable[[], float]:
    """The gradient of all weights by ROWS texts of TOKENS tokens."""
    import mlx.core as mx
    import mlx.nn as nn

    from mlx_parallm.models.images.embedding import admit_images

    model = loaded().model
    if images:
        admit_images(model)
    model.unfreeze()
    ids = mx.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 200

    def loss(tree: nn.Module) -> mx.array:
        return nn.losses.cross_entropy(tree(ids[:, :-1]), ids[:, 1:]).mean()

    step = nn.value_and_grad(model, loss)

    def once() -> float:
        begin = time.process_time()
        mx.eval(step(model))
        return time.process_time() - begin

    once()
    return once


if __name__ == "__main__":
    main()

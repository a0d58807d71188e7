"""Memory and time of one mini-batch with images while what makes their features is trained.

    .venv/bin/python scripts/bench/vision_training.py [--images 64] [--tokens 1024] [--train connector]

A tiny language part with three levels of features (DeepStack's), a tower of two layers, one image a row, two rows a
micro-batch. The peak is MLX's, above what is there before the step.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LEVELS, ROWS = 3, 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a step with images.")
    parser.add_argument("--images", type=int, default=64, help="of a step, one a row")
    parser.add_argument("--tokens", type=int, default=1024, help="of an image")
    parser.add_argument("--train", choices=("tower", "connector"), default="tower")
    arguments = parser.parse_args()

    import mlx.core as mx

    from tests.images import test_trained_tower as tower

    side = arguments.tokens // 32, 32
    pictures = {f"p{n}": tower.picture(f"p{n}", (1, *side)) for n in range(arguments.images)}
    tower.PICTURES.update(pictures)
    rows = [
        tower.sequence(7, (f"sha256:{name}", image), 8, answer=(20, 21, 22))
        for name, image in pictures.items()
    ]
    parts = ("eye",) if arguments.train == "tower" else ("eye.second",)
    _, trainer = tower.built(tower.SeeingEncoder(parts, levels=LEVELS), blocks_per_eval=1)
    budget = sum(part.tokens for part in trainer.collate(rows, range(ROWS)).micro_batches)
    mini_batch = trainer.collate(rows, range(len(rows)), budget)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    started = time.process_time()
    trainer.accumulate(mini_batch, tower.Likelihood())
    row = {
        "train": arguments.train,
        "images": arguments.images,
        "tokens": arguments.tokens,
        "micro_batches": len(mini_batch.micro_batches),
        "features_mb": round(arguments.images * arguments.tokens * (1 + LEVELS) * 64 * 4 / 1e6, 1),
        "peak_mb": round((mx.get_peak_memory() - before) / 1e6, 1),
        "cpu_s": round(time.process_time() - started, 2),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

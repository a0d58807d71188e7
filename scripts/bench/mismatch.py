"""How far apart are the engine's log-probabilities and the trainer's, on the same weights?

    .venv/bin/python -m scripts.bench.mismatch [--models tiny,29M,132M] [--formats "float32; bfloat16, 4-bit"]

A real engine decodes 16 ragged prompts together under a random adapter, at temperature 0.8; the
trainer scores what was sampled, block by block and packed, as in a training step. Nats a token.
`rl_training.sampler_correction` = "auto" goes by the largest mean of a format
(`MEASURED_MISMATCH`); the table is in docs/algorithms.md#before-a-step-learns.

tiny is the shipped, trained model. The others are random; their logits are scaled so that the
sampled tokens' mean log-probability is about that of a trained model: on flat distributions
rounding hardly shows. Every measurement is a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.models import LARGER, save_bench_model  # the fast BLAS comes before MLX

# isort: split
import numpy as np

from mlx_parallm.cli.contracts import Subject, sampled, subject_of
from mlx_parallm.config.load import load_config
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.prepare import (
    MISMATCH_BOUND,
    expected_mismatch,
    sampler_correction,
)
from mlx_parallm.rl_training.step.trainer import Trainer

SEQUENCES = 16
SHARPNESS = 3.7  # of random logits over 8,192 tokens: an entropy of about 2 nats
MODELS: dict[str, dict[str, Any] | None] = {"tiny": None, "29M": {}, "132M": LARGER}
FORMATS = {
    "float32": ("float32", False),
    "float32, 4-bit": ("float32", True),
    "float16": ("float16", False),
    "float16, 4-bit": ("float16", True),
    "bfloat16": ("bfloat16", False),
    "bfloat16, 4-bit": ("bfloat16", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--formats", default="; ".join(FORMATS), help="separated by semicolons")
    parser.add_argument(
        "--one", nargs=3, metavar=("PATH", "DTYPE", "QUANTIZE"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(
            json.dumps(measure(args.one[0], args.one[1], quantize=args.one[2] == "True")) + "\n"
        )
        return
    console = Console(width=120)
    columns = (
        "activations, weights",
        "model",
        "tokens",
        "mean log p",
        "mean |Δ|",
        "largest |Δ|",
        "table",
        "auto",
    )
    table = Table(*columns, title="|trainer - engine|, nats a token")
    with tempfile.TemporaryDirectory() as directory:
        for format_name in args.formats.split("; "):
            for name in args.models.split(","):
                measured = in_a_process(model(name, Path(directory)), *FORMATS[format_name])
                cells = (
                    f"{measured['tokens']}",
                    f"{measured['logprob']:.2f}",
                    f"{measured['mean']:.1e}",
                    f"{measured['max']:.1e}",
                )
                row = (format_name, name, *cells, f"{measured['table']:.1e}", measured["auto"])
                table.add_row(*row)
                console.print(*row, sep=" | ")
    console.print(table, f'"auto" corrects above {MISMATCH_BOUND:g}')


def model(name: str, directory: Path) -> str:
    """Return the value of `model.base_path`; write the model first where it is a random one."""
    shape, path = MODELS[name], directory / name
    if shape is None:
        return "builtin:tiny"
    if not path.exists():
        save_bench_model(path, endless=True, sharpness=SHARPNESS, **shape)
    return str(path)


def in_a_process(path: str, dtype: str, quantize: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.bench.mismatch", "--one", path, dtype, str(quantize)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(path: str, dtype: str, *, quantize: bool) -> dict[str, Any]:
    settings = {
        "model.base_path": json.dumps(path),
        "model.dtype": json.dumps(dtype),
        "model.quantized_cache": '"off"',
        "rl_training.lora.quantize_base": str(quantize).lower(),
    }
    with subject_of(
        load_config(None, [f"{key}={value}" for key, value in settings.items()])
    ) as subject:
        return apart(subject)


def apart(subject: Subject) -> dict[str, Any]:
    assert subject.policy is not None, subject.untrainable
    rollouts, training = sampled(subject, SEQUENCES), subject.config.rl_training
    options = training
    logprobs = np.concatenate(
        Trainer(subject.policy, options, make_algorithm(training)).logprobs(rollouts)
    )
    engine = np.array(
        [
            p
            for rollout in rollouts
            for p, mask in zip(rollout.logprobs or (), rollout.mask, strict=True)
            if mask
        ]
    )
    difference = np.abs(logprobs.astype(np.float64) - engine)
    return {
        "tokens": len(engine),
        "logprob": float(engine.mean()),
        "mean": float(difference.mean()),
        "max": float(difference.max()),
        "table": expected_mismatch(subject.policy.model),
        "auto": "tis" if sampler_correction(options, subject.policy.model) else "none",
    }


if __name__ == "__main__":
    main()

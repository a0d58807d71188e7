"""Compare an exported model in a real llama.cpp with the model here (docs/benchmarks/serving.md#export).

    .venv/bin/python -m scripts.bench.export models              every architecture, random weights: largest difference
    .venv/bin/python -m scripts.bench.export trained [--steps N]  builtin:tiny trained, exported, and asked problems
    .venv/bin/python -m scripts.bench.export memory [--layers N]  peak memory of writing a model of 151,936 tokens

Prints the rows of the page's tables.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx

from mlx_parallm.deploy.export import llama_server
from mlx_parallm.models.gguf.architectures import ARCHITECTURES
from tests.export.llama import MODELS, checkpoint, difference, logprobs, write
from tests.tiny_models import QWEN3

assert mlx_parallm
BIN = Path(sys.executable).parent
KINDS = ("f32", "f16", "q8_0", "q4_k_m")
WIDE = QWEN3 | {
    **{
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    **{"head_dim": 128, "vocab_size": 151_936},
}


def models(directory: Path) -> None:
    for name, config in MODELS.items():
        for tied in (True, False) if name in ARCHITECTURES else (True,):
            model = checkpoint(directory / f"{name}{tied}", config, tied=tied)
            write(model, directory / "model.gguf")
            distance = difference(directory / "model.gguf", logprobs(model))
            print(f"| {name} | {'tied' if tied else 'untied'} | {distance:.1e} |", flush=True)


def run(*words: object) -> str:
    result = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"{words}: {result.stderr}")
    return result.stdout


def trained(directory: Path, steps: int, problems: int) -> None:
    """Train the shipped model by the quickstart's configuration, then ask the same held-out
    problems of each file."""
    train = [
        "--config",
        "quickstart",
        "--set",
        f"rl_training.checkpoint_dir={json.dumps(str(directory))}",
    ]
    train += ["--set", 'rl_training.run_name="run"', "--set", f"rl_training.total_steps={steps}"]
    train += ["--set", "evaluation.problems=0", "--set", "server.port=0"]
    run(BIN / "mlx_parallm", "train", *train)
    ask = [
        BIN / "mlx_parallm",
        "eval",
        "--config",
        directory / "run" / "config.toml",
        "--problems",
        problems,
    ]
    run(*ask, "--lora-path", directory / "run" / "final", "--output", directory / "here")
    print(f"| here | | | | | {score(directory / 'here'):.3f} |", flush=True)
    for kind in KINDS:
        out = directory / kind
        run(BIN / "mlx_parallm", "export", directory / "run", "--type", kind, "--to", out)
        checked = json.loads((out / "export.json").read_text())["verification"]
        with llama_server.running(out / f"run-{kind}.gguf") as server:
            run(
                *ask,
                "--url",
                f"{server.url}/v1",
                "--concurrency",
                1,
                "--output",
                directory / f"{kind}-eval",
            )
        cells = [*("/".join(map(str, checked[what])) for what in ("texts", "chats", "prompts"))]
        cells += [f"{checked['difference']:.2g}", f"{score(directory / f'{kind}-eval'):.3f}"]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


def score(directory: Path) -> float:
    return float(json.loads((directory / "results.json").read_text())["score"])


def memory(directory: Path, layers: int) -> None:
    model = checkpoint(directory / "model", WIDE | {"num_hidden_layers": layers}, dtype=mx.bfloat16)
    largest = WIDE["vocab_size"] * WIDE["hidden_size"] * 2
    program = (
        "import sys, mlx_parallm\nfrom pathlib import Path\nfrom tests.export.llama import write\n"
        "def peak():\n    lines = Path('/proc/self/status').read_text().splitlines()\n    return"
        " next(int(line.split()[1]) for line in lines if line.startswith('VmHWM'))\nbefore ="
        " peak()\nwrite(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])\nprint(before, peak())\n"
    )
    for kind in ("f32", "bf16", "q8_0", "q4_k_m"):
        before, peak = map(
            int, run(sys.executable, "-c", program, model, directory / "m.gguf", kind).split()
        )
        size = (directory / "m.gguf").stat().st_size
        bound = 3 * largest / 1e9 + 1.0
        print(
            (
                f"| {kind} | {size / 1e9:.2f} | {peak * 1024 / 1e9:.2f} |"
                f" {before * 1024 / 1e9:.2f} | {bound:.2f} |"
            ),
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["models", "trained", "memory"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--problems", type=int, default=100, help="held-out ones of each task")
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.part == "models":
            models(Path(directory))
        elif args.part == "trained":
            trained(Path(directory), args.steps, args.problems)
        else:
            memory(Path(directory), args.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

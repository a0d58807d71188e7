"""Training tokens a second on texts: the real daemon with `algorithm = "sft"` against
`mlx_lm.lora`, equal settings.

    scripts/bench/setup_peers
    .venv/bin/python -m scripts.bench.sft_tokens [--rounds 3] [--steps 40] [--length 128] [--batch 8] [--mixed]

The 29 M parameter benchmark model, LoRA of rank 16 on all linear layers of all blocks, AdamW, rows
of one length whose every token is trained on, the same file. mlx_lm.lora gets the same MKL with all
cores and reports its own tokens a second (training only); ours are the tokens over `time_train_s`
of the metrics lines, with an idle server beside it. The first ten steps are not counted. "ours,
checkpointed" evaluates block by block, which is the default: less memory, and room for requests.
"ours, 2 ranks" are two processes over the loopback (docs/operations.md#several-processes), each with half of the
BLAS
threads: on one machine that shows what ranks cost, not what they bring. In a round every contender
runs once; a ratio is taken within a round.

--mixed: rows of 1/16 of the length to all of it, evenly on a logarithmic scale, as texts are;
"ours, padded" has rl_training.packing off. Tokens are those that are trained on, so padding counts
as time only.
"""

import argparse
import json
import os
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mlx_parallm.system.hardware import usable_cores
from scripts.bench.models import save_bench_model  # the fast BLAS comes before MLX
from scripts.bench.peers import PYTHON, environment
from scripts.server_process import free_port

CONTENDERS = (
    "ours",
    "ours, checkpointed",
    "ours, 2 ranks",
    "mlx_lm.lora",
    "mlx_lm.lora, checkpointed",
)
MIXED = ("ours", "ours, padded", "ours, checkpointed", "ours, padded, checkpointed", "mlx_lm.lora")
RANK, UNCOUNTED = 16, 10
OURS = """
[model]
base_path = "{directory}/model"
[server]
port = 0
[data]
path = "{directory}/data/train.jsonl"
eval_fraction = 0.0
eval_every = 0
prompt_format = "text"
[rl_training]
algorithm = "sft"
learning_rate = 1e-5
batch_size = {batch}
blocks_per_eval = {blocks}
packing = {packing}
total_steps = {steps}
checkpoint_interval = 1000000
checkpoint_dir = "{run}"
run_name = "run"
lora.rank = {rank}
lora.alpha = {rank}
[logging]
sample_every = 0
"""
THEIRS = "lora_parameters: {{rank: {rank}, dropout: 0.0, scale: 1.0}}\n"
COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
REPORT = re.compile(
    r"^ *(\d+) +[\d.]+ +(?:[^\d\s] +)?([\d,]+) +\S+ *$", re.MULTILINE
)  # "  15   9.263 ▼   1,061   1.0k"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--mixed", action="store_true")
    args = parser.parse_args()
    contenders = MIXED if args.mixed else CONTENDERS
    console, rates_of = Console(width=120), {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory, args.length, args.batch, args.mixed)
        for number in range(args.rounds):
            for contender in contenders:
                checkpointed, run = (
                    contender.endswith("checkpointed"),
                    directory / f"{contender}{number}",
                )
                if contender.startswith("ours"):
                    ranks = 2 if contender.endswith("ranks") else 1
                    packing = "padded" not in contender
                    rate = ours(
                        directory, run, args.steps, args.batch, checkpointed, ranks, packing
                    )
                else:
                    rate = theirs(directory, run, args.steps, args.batch, checkpointed)
                rates_of[contender].append(rate)
                console.print(f"round {number + 1}, {contender}: {rate:.0f} tok/s")
    lengths = f"{args.length // 16} … {args.length}" if args.mixed else f"{args.length}"
    title = (
        f"training tokens a second, {args.batch} × {lengths} tokens, LoRA rank {RANK},"
        f" {usable_cores()} cores"
    )
    table = Table(title=title)
    for column in ("contender", "tok/s", "rounds", "ours / this", "target"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, rates in rates_of.items():
        our_rates = rates_of["ours, checkpointed" if name.endswith("checkpointed") else "ours"]
        ratio = f"{statistics.median(o / t for o, t in zip(our_rates, rates, strict=True)):.2f}"
        peer = name.startswith("mlx")
        rounds = ", ".join(f"{rate:.0f}" for rate in rates)
        cells = (ratio if peer or "padded" in name else "", "≥ 1.2" if peer else "")
        table.add_row(name, f"{statistics.median(rates):.0f}", rounds, *cells)
    console.print(table)


def ours(
    directory: Path,
    run: Path,
    steps: int,
    batch: int,
    checkpointed: bool,
    ranks: int,
    packing: bool,
    command: str = str(Path(sys.executable).with_name("mlx_parallm_train")),
) -> float:
    config = directory / "ours.toml"
    values = {"directory": directory, "run": run, "steps": steps, "batch": batch, "rank": RANK}
    values["packing"] = str(packing).lower()
    config.write_text(OURS.format(blocks=int(checkpointed), **values))
    started = [command, "--config", str(config)]
    environ = os.environ | {"MKL_NUM_THREADS": str(max(1, usable_cores() // ranks))}
    if ranks > 1:  # not by mlx.launch: its threads spin while they wait (MLX 0.32.4)
        (directory / "hosts.json").write_text(
            json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)])
        )
        environ |= {"MLX_HOSTFILE": str(directory / "hosts.json")}
    others = [
        subprocess.Popen(started, env=environ | {"MLX_RANK": str(rank)}) for rank in range(1, ranks)
    ]
    first = environ | ({"MLX_RANK": "0"} if ranks > 1 else {})
    done = subprocess.run(started, capture_output=True, text=True, env=first)
    codes = [other.wait() for other in others]
    if done.returncode or any(codes):
        raise SystemExit(done.stderr)
    lines = [json.loads(line) for line in (run / "run/metrics.jsonl").read_text().splitlines()][
        UNCOUNTED:
    ]
    return float(
        sum(line["tokens"] for line in lines) / sum(line["time_train_s"] for line in lines)
    )


def theirs(directory: Path, run: Path, steps: int, batch: int, checkpointed: bool) -> float:
    (directory / "theirs.yaml").write_text(THEIRS.format(rank=RANK))
    options = {
        "model": directory / "model",
        "data": directory / "data",
        "batch-size": batch,
        "iters": steps,
    }
    options |= {
        "num-layers": -1,
        "optimizer": "adamw",
        "learning-rate": 1e-5,
        "steps-per-report": 5,
        "seed": 0,
    }
    options |= {
        "adapter-path": run,
        "config": directory / "theirs.yaml",
        "val-batches": 1,
        "steps-per-eval": 10**6,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [
        str(PYTHON),
        "-m",
        "mlx_lm",
        "lora",
        "--train",
        *flags,
        *(["--grad-checkpoint"] if checkpointed else []),
    ]
    environ = environment("mkl") | {"MKL_NUM_THREADS": str(usable_cores())}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    rates = [
        float(rate.replace(",", ""))
        for step, rate in REPORT.findall(COLOURS.sub("", done.stdout))
        if int(step) > UNCOUNTED
    ]
    if done.returncode or not rates:
        raise SystemExit(done.stdout + done.stderr)
    return len(rates) / sum(1.0 / rate for rate in rates)  # reports are of equally many tokens


def prepare(directory: Path, length: int, batch: int, mixed: bool) -> None:
    """model/ and data/{train,valid}.jsonl: rows of `length` letters (`mixed`: at most), which
    are as many tokens."""
    save_bench_model(directory / "model")
    letters = random.Random(0)
    sizes = [
        round(length * 16 ** -letters.random()) if mixed else length for _ in range(32 * batch)
    ]
    rows = [
        json.dumps({"text": "".join(letters.choices(string.ascii_letters, k=size))})
        for size in sizes
    ]
    (directory / "data").mkdir()
    for name in ("train", "valid"):
        (directory / f"data/{name}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()

"""Two environments in one trainer, one of which sleeps for ever: how much of its throughput does
the other one keep?

    python scripts/bench/two_environments.py --steps 30 --repeats 5

Runs the real `mlx_parallm_train` on the shipped model: `sort` alone; with an environment of the
same weight that awaits for ever; with one that blocks its thread for ever. Throughput is `sort`'s
trained sequences a step over the seconds of the median step (metrics.jsonl): a shared machine's bad
seconds are in the mean of few runs and not in it. The first step, which waits until the sleeper
counts as absent, is told by itself. The variants take turns. The learning rate moves nothing, so
that every step is the same work: with a policy that learns, groups without variance come to be,
sooner in one run than in the other, and are played for nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BIN = Path(sys.executable).parent
SLEEPING = Path(__file__).with_name("sleeping_environment.py")
VARIANTS = ("alone", "awaits", "blocks")
CONFIG = """
[model]
base_path = "builtin:tiny"

[server]
port = 0
batch_size = 64

[rl_training]
learning_rate = 1e-9
batch_size = 32
blocks_per_eval = 0
total_steps = {steps}
checkpoint_interval = 1000000
checkpoint_dir = "{directory}"
run_name = "run"
seed = {seed}

[rl_training.atropos]
rollout_batch_size = 64
max_token_length = 64

[logging]
sample_every = 0

[[environments]]
kind = "tasks"
name = "sort"
group_size = 8
max_tokens = 8
"""
SLEEPER = """
[[environments]]
kind = "python:{file}:Sleeping"
name = "{name}"
group_size = 8
max_tokens = 8
"""


@dataclass(frozen=True)
class Result:
    throughput: float  # sequences of `sort` a second, from the second step on
    first_s: float  # the first step
    health: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    console = Console(width=120)
    results: dict[str, list[Result]] = {variant: [] for variant in VARIANTS}
    for repeat in range(args.repeats):
        for variant in VARIANTS:
            results[variant].append(measure(variant, args.steps, seed=0))
            console.print(f"{variant}, {repeat}: {results[variant][-1]}", highlight=False)
    table = Table(
        title=f"`sort` beside one that sleeps for ever: {args.steps} steps, {args.repeats} repeats"
    )
    table.add_column("the other environment")
    for column in ("sequences/s", "of alone", "first step"):
        table.add_column(column, justify="right")
    for variant, rows in results.items():
        rate, alone = (
            statistics.median(row.throughput for row in group)
            for group in (rows, results[("alone")])
        )
        first = statistics.median(row.first_s for row in rows)
        table.add_row(variant, f"{rate:.1f}", f"{rate / alone:.1%}", f"{first:.1f} s")
    console.print(table)


def measure(variant: str, steps: int, seed: int) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        text = CONFIG.format(steps=steps, directory=directory, seed=seed)
        if variant != "alone":
            text += SLEEPER.format(file=SLEEPING, name=variant)
        config = Path(directory, "two.toml")
        config.write_text(text)
        command = [BIN / "mlx_parallm_train", "--config", config]
        run = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        if run.returncode:
            raise SystemExit(run.stdout + run.stderr)
        lines = [
            json.loads(line)
            for line in Path(directory, "run/metrics.jsonl").read_text().splitlines()
        ]
    named = f"environment {variant} delivers nothing" in run.stdout + run.stderr
    health = "named" if named else "-"
    return Result(throughput(lines[1:]), seconds(lines[0]), health)


def throughput(lines: list[dict[str, Any]]) -> float:
    sequences = sum(
        line["environments"].get("sort", {}).get("trained_sequences", 0) for line in lines
    )
    return float(sequences / len(lines) / statistics.median(map(seconds, lines)))


def seconds(line: dict[str, Any]) -> float:
    return float(line["time_rollout_s"] + line["time_train_s"] + line["time_publish_s"])


if __name__ == "__main__":
    main()

"""Measure what old rollouts cost: reward against wall time at several `max_staleness`, on the
quickstart.

    python scripts/bench/staleness.py --seeds 0 1 2 --figure docs/benchmarks/staleness.png

Runs the real `mlx_parallm_train` once for each value and seed, the values taking turns. In-process
environments run up to `max_staleness` steps ahead; where sampling is slower than training they do
not get that far, and the column `staleness` says how far. `--publish-rarely` makes rollouts as old
as they may be: it shows what age itself costs. Wall time is the sum of the steps' (metrics.jsonl):
model loading and evaluation are left out. `reward` is the mean over the last ten steps; `to 0.6`
the time until the mean over ten steps has reached 0.6 (`-`: some seed never did).
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

BIN = Path(sys.executable).parent
WINDOW = 10
GOAL = 0.6
Lines = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--config", default="train_configs/quickstart.toml")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], help="passed on to mlx_parallm_train")
    parser.add_argument(
        "--publish-rarely", action="store_true", help="new weights only every max_staleness steps"
    )
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    console = Console(width=120)
    runs: dict[int, list[Lines]] = {value: [] for value in args.staleness}
    for seed, value in itertools.product(args.seeds, args.staleness):
        rarely = (
            [(f"rl_training.weight_updates.update_every_n_steps={max(1, value)}")]
            if args.publish_rarely
            else []
        )
        runs[value].append(train(args.config, value, seed, [*rarely, *args.set]))
        console.print(
            f"max_staleness {value}, seed {seed}: {summary(runs[value][-1])}", highlight=False
        )
    table = Table(title=f"{args.config}: {len(args.seeds)} seeds, medians")
    table.add_column("max_staleness", justify="right")
    for column in (
        "staleness",
        "dropped",
        "seconds",
        "ratio off 1",
        "clipped",
        "reward",
        (f"to {GOAL}"),
    ):
        table.add_column(column, justify="right")
    for value, results in runs.items():
        rows = [summary(lines) for lines in results]
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        cells = [f"{medians[key]:.{digits}f}" for key, digits in DIGITS.items()]
        reached = f"{medians['to']:.0f} s" if all(row["to"] < float("inf") for row in rows) else "-"
        table.add_row(str(value), *cells, reached)
    console.print(table)
    if args.figure:
        draw(runs, args.figure, args.config)


DIGITS = {"staleness": 2, "dropped": 0, "seconds": 0, "ratio": 3, "clipped": 3, "reward": 3}


def train(config: str, max_staleness: int, seed: int, overrides: list[str]) -> Lines:
    with tempfile.TemporaryDirectory() as directory:
        settings = [
            f"rl_training.max_staleness={max_staleness}",
            f"rl_training.seed={seed}",
            "server.port=0",
        ]
        settings += [f"rl_training.checkpoint_dir={directory}", "rl_training.run_name=run"]
        settings += ["evaluation.problems=0", "logging.sample_every=0", *overrides]
        flags = [part for setting in settings for part in ("--set", setting)]
        command = [BIN / "mlx_parallm_train", "--config", config, *flags]
        run = subprocess.run(command, capture_output=True, text=True, timeout=7200)
        if run.returncode:
            raise SystemExit(run.stdout + run.stderr)
        return [
            json.loads(line)
            for line in Path(directory, "run/metrics.jsonl").read_text().splitlines()
        ]


def curve(lines: Lines) -> tuple[list[float], list[float]]:
    """(seconds at the end of each step, mean reward of the last steps)."""
    steps = [
        line["time_rollout_s"] + line["time_train_s"] + line["time_publish_s"] for line in lines
    ]
    rewards = [line["reward_mean"] for line in lines]
    means = [
        statistics.mean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)
    ]
    return list(itertools.accumulate(steps)), means


def summary(lines: Lines) -> dict[str, float]:
    seconds, rewards = curve(lines)
    reached = [time for time, reward in zip(seconds, rewards, strict=True) if reward >= GOAL]
    return {
        "staleness": statistics.mean(line["staleness"] for line in lines),
        "dropped": sum(line["dropped_stale"] for line in lines),
        "seconds": seconds[-1],
        "ratio": statistics.mean(
            abs(line["ratio_mean"] - 1) for line in lines if line["ratio_mean"] is not None
        ),
        "clipped": statistics.mean(
            line["clip_fraction"] for line in lines if line["clip_fraction"] is not None
        ),
        "reward": rewards[-1],
        "to": reached[0] if reached else float("inf"),
    }


def draw(runs: dict[int, list[Lines]], path: Path, config: str) -> None:
    """Mean over the seeds, step by step; the band reaches from the lowest seed to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for value, results in runs.items():
        curves = [curve(lines) for lines in results]
        seconds = np.mean([seconds for seconds, _ in curves], axis=0)
        rewards = np.array([rewards for _, rewards in curves])
        (line,) = axes.plot(
            seconds, rewards.mean(axis=0), linewidth=2, label=f"max_staleness = {value}"
        )
        axes.fill_between(
            seconds, rewards.min(axis=0), rewards.max(axis=0), color=line.get_color(), alpha=0.12
        )
    axes.set_title(
        f"{Path(config).stem}: mean reward of the last {WINDOW} steps, {len(curves)} seeds",
        loc="left",
    )
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("mean reward of the rollouts")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


if __name__ == "__main__":
    main()

"""Reward models and online DPO on the built-in tasks, with the real daemon and the tiny model.

    .venv/bin/python scripts/bench/reward_model.py [--seeds 0 1 2] [--parts model online]

model    The tiny model answers each problem twice; the task's own reward decides the pair, ties are
         left out. A reward model is trained on the pairs of some problems; what is measured is the
         accuracy on pairs of problems that it has not seen.
online   Online DPO on the same tasks: mean reward of the first and the last ten steps, and of greedy
         answers to held-out problems before and after.

All numbers are from the runs' own metrics.jsonl and evaluations.jsonl.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.load import load_config
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.faces.inference.module import InferenceModule
from mlx_parallm.types import Rollout, Trajectory

TASKS = ("sum", "sort", "reverse", "count", "largest")
HELD_OUT, HELD_OUT_FROM = 1000, 100_000  # pairs, and their first problem
ACCURACY = 0.9
MODEL_RUN = """
[model]
base_path = "builtin:tiny"

[server]
port = 0

[rl_training]
algorithm = "reward_model"
learning_rate = {rate}
lr_schedule = "linear"
warmup_steps = 10
batch_size = 64
blocks_per_eval = 0
total_steps = {steps}
checkpoint_interval = 1000
run_name = "run"
seed = {seed}

[rl_training.lora]
rank = 32
alpha = 64.0

[data]
path = "rows.jsonl"
eval_path = "heldout.jsonl"
eval_every = {every}
eval_rows = 1000
"""


def pairs(
    count: int, first: int, seed: int, without: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """`count` pairs of answers to problems from number `first` on, none to a prompt of `without`."""
    seen = {str(row["prompt"]) for row in without}
    entries = [EnvironmentConfig(kind="tasks", name=name, max_tokens=8) for name in TASKS]
    sources = build_sources(entries, seed=seed)
    rows: list[dict[str, Any]] = []
    with InferenceModule("builtin:tiny") as model:
        number = first
        while len(rows) < count:
            tasks = [s.task(n) for n in range(number, number + 100) for s in sources]
            number += 100
            prompts = [list(task.messages) for task in tasks]
            answers = model.generate(
                prompts, 8, num_return_sequences=2, temperature=1.0, seed=seed + number
            )
            for place, task in enumerate(tasks):
                two = list(answers)[2 * place : 2 * place + 2]
                rewards = asyncio.run(_rewards(task.reward, two))
                if rewards[0] == rewards[1]:
                    continue
                better = int(rewards[1] > rewards[0])
                pair = {"chosen": two[better], "rejected": two[1 - better]}
                if all(pair.values()) and str(prompts[place]) not in seen:
                    rows.append({"prompt": prompts[place], **pair})
    return rows[:count]


async def _rewards(reward: Any, texts: list[str]) -> list[float]:
    rollout = Rollout((), (), None, (), 1.0, {})
    scored = reward([Trajectory(text, rollout) for text in texts])
    parts = await scored if hasattr(scored, "__await__") else scored
    return [part["reward"] for part in parts]


def train(config: Path) -> tuple[Path, float]:
    """Run the daemon. Return the run directory and the seconds."""
    started = time.monotonic()
    command = [sys.executable, "-m", "mlx_parallm", "train", "--config", config.name]
    done = subprocess.run(command, cwd=config.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return config.parent / "checkpoints" / "run", time.monotonic() - started


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def measure_model(args: argparse.Namespace, console: Console) -> None:
    table = Table(title=f"reward model, {args.pairs} pairs, {args.steps} updates of 64 pairs")
    for name in ("seed", "held-out pairs", "before", "best", "at the end", "wanted", "seconds"):
        table.add_column(name, justify="right")
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            heldout = pairs(HELD_OUT, HELD_OUT_FROM, seed)
            made = {"rows": pairs(args.pairs, 0, seed, heldout), "heldout": heldout}
            for name, rows in made.items():
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (directory / f"{name}.jsonl").write_text(text)
            values = {"rate": args.rate, "steps": args.steps, "seed": seed, "every": 100}
            (directory / "run.toml").write_text(MODEL_RUN.format(**values))
            run, seconds = train(directory / "run.toml")
            lines = lines_of(run / "metrics.jsonl")
            scores = [line["heldout_score"] for line in lines if line.get("heldout_score")]
            before = lines[0]["eval_before/rewards/accuracies"]
            cells = (f"{before:.3f}", f"{max(scores):.3f}", f"{scores[-1]:.3f}", f"{ACCURACY}")
            table.add_row(str(seed), str(HELD_OUT), *cells, f"{seconds:.0f}")
            console.print(f"seed {seed}: {', '.join(f'{score:.3f}' for score in scores)}")
    console.print(table)


def measure_online(args: argparse.Namespace, console: Console) -> None:
    table = Table(title=f"online DPO, train_configs/online_dpo.toml, {args.online_steps} steps")
    names = ("seed", "reward, first 10", "last 10", "held-out before", "after", "ties", "seconds")
    for name in names:
        table.add_column(name, justify="right")
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(
                "online_dpo",
                [
                    f"rl_training.seed={seed}",
                    f"rl_training.total_steps={args.online_steps}",
                    "rl_training.run_name=run",
                    "server.port=0",
                    "evaluation.problems=100",
                ],
            )
            (Path(folder) / "run.toml").write_text(config.to_toml())
            run, seconds = train(Path(folder) / "run.toml")
            lines = lines_of(run / "metrics.jsonl")
            rewards = [line["reward_mean"] for line in lines]
            scores = [line["score"] for line in lines_of(run / "evaluations.jsonl")]
            ties = fmean(line["groups_without_variance"] for line in lines)
            numbers = (fmean(rewards[:10]), fmean(rewards[-10:]), scores[0], scores[-1], ties)
            table.add_row(str(seed), *(f"{number:.3f}" for number in numbers), f"{seconds:.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--parts", nargs="+", choices=("model", "online"), default=["model", "online"]
    )
    parser.add_argument("--pairs", type=int, default=12_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--online-steps", type=int, default=120)
    args = parser.parse_args()
    console = Console(width=110)
    for part in args.parts:
        {"model": measure_model, "online": measure_online}[part](args, console)


if __name__ == "__main__":
    main()

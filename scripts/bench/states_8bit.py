"""Optimizer states in 8 and 4 bits against float32: a run's loss, reward and held-out score, 2,000
steps of a small problem, bytes, time and memory of an update.

    .venv/bin/python -m scripts.bench.states_8bit steps           # some seconds
    .venv/bin/python -m scripts.bench.states_8bit updates         # some seconds
    .venv/bin/python -m scripts.bench.states_8bit runs [--seeds 3]  # minutes
    .venv/bin/python -m scripts.bench.states_8bit rewards [--seeds 3] [--steps 90]  # minutes

`runs` trains all weights of the shipped model on rows (SFT): the loss of held-out ones. `rewards` is
GRPO on the quickstart's tasks, of all weights and of an adapter of rank 32, whose matrices are the
first that are large enough for states in few bits. Tables are those of
docs/benchmarks/states_8bit.md.
"""

import argparse
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.rl_training.options import training_options
from mlx_parallm.rl_training.step.optimizer import PolicyOptimizer
from scripts.bench.short_rl import PROGRAM, train_by_rewards

assert mlx_parallm.__version__

KINDS = ("adamw", "adamw_8bit", "adamw_4bit", "lion", "lion_8bit")
ADAMS = KINDS[:3]
BY_REWARDS: dict[str, dict[str, object]] = {
    "all weights": {"rl_training.lora.enabled": "false", "rl_training.learning_rate": 1e-4},
    "adapter of rank 32": {"rl_training.lora.rank": 32, "rl_training.lora.alpha": 64},
}


class Slots:
    """`ParameterSlots` without a model."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.names = tuple(f"model.layers.{i}.weight" for i in range(len(shapes)))
        self.arrays = [0.02 * mx.random.normal(shape) for shape in shapes]
        mx.eval(self.arrays)

    def read(self, indices: Sequence[int] | None = None) -> list[mx.array]:
        return list(self.arrays)

    def write(self, arrays: Sequence[mx.array]) -> None:
        self.arrays = list(arrays)


def optimizer(slots: Slots, kind: str, **values: Any) -> PolicyOptimizer:
    keys = {"optimizer": kind, **values}
    options = training_options(RLTrainingConfig.model_validate(keys)).trainer.optimizer
    return PolicyOptimizer(slots, options)  # type: ignore[arg-type]


def steps(seeds: int) -> None:
    """Classification by a network of two layers, 64 → 256 → 16, noisy labels, batches of 64."""
    print("| seed | " + " | ".join(KINDS) + " |\n|---|" + "---|" * len(KINDS))
    for seed in range(seeds):
        losses = {kind: network_loss(kind, seed) for kind in KINDS}
        print(f"| {seed} | " + " | ".join(f"{losses[kind]:.4f}" for kind in KINDS) + " |")


def network_loss(kind: str, seed: int) -> float:
    """Of 4,096 other examples, after 2,000 steps."""
    mx.random.seed(seed)
    teacher = mx.random.normal((64, 16))
    scales = 10.0 ** mx.random.uniform(-1, 0, (64,))

    def batch(count: int) -> tuple[mx.array, mx.array]:
        x = mx.random.normal((count, 64)) * scales
        return x, mx.random.categorical(2.0 * mx.tanh(x @ teacher))

    def loss(first: mx.array, second: mx.array, x: mx.array, y: mx.array) -> mx.array:
        logits = mx.tanh(x @ first) @ second
        chosen = mx.take_along_axis(logits, y[:, None], axis=1)[:, 0]
        return (mx.logsumexp(logits, axis=1) - chosen).mean()

    slots = Slots([(64, 256), (256, 16)])
    slots.arrays = [a * 5 for a in slots.arrays]
    made = optimizer(slots, kind)
    slope = mx.grad(loss, argnums=(0, 1))
    peak = 3e-4 if kind.startswith("lion") else 3e-3
    for step in range(2000):
        made.update(list(slope(*slots.arrays, *batch(64))), peak * (1 - step / 2000))
    mx.random.seed(seed + 1000)
    return float(loss(*slots.arrays, *batch(4096)).item())  # type: ignore[arg-type]


def updates() -> None:
    shapes = {
        "67 M numbers, matrices": [(4096, 2048)] * 4 + [(32768, 1024)],
        "8 M numbers, 500 arrays of an adapter": [(1024, 16)] * 500,
    }
    print("| arrays | optimizer | state, bytes a number | peak of an update | ns a number |")
    print("|---|---|---|---|---|")
    for name, each in shapes.items():
        for kind in KINDS:
            slots = Slots(each)
            count = sum(array.size for array in slots.arrays)
            gradients = [mx.random.normal(shape) for shape in each]
            made = optimizer(slots, kind)
            mx.eval(gradients)
            made.update(gradients, 1e-4)  # compiles
            mx.reset_peak_memory()
            held, seconds = mx.get_active_memory(), []
            for _ in range(3):
                started = time.perf_counter()
                made.update(gradients, 1e-4)
                seconds.append(time.perf_counter() - started)
            state = sum(a.nbytes for n, a in made.state().items() if n != "step") / count
            above = (mx.get_peak_memory() - held) / count
            nanoseconds = 1e9 * min(seconds) / count
            print(f"| {name} | `{kind}` | {state:.2f} | {above:.1f} | {nanoseconds:.0f} |")


def runs(seeds: int) -> None:
    print("| seed | " + " | ".join(ADAMS) + " |\n|---|---|---|---|")
    for seed in range(seeds):
        losses = [sft_loss(kind, seed) for kind in ADAMS]
        print(f"| {seed} | " + " | ".join(f"{each:.4f}" for each in losses) + " |", flush=True)


def sft_loss(kind: str, seed: int) -> float:
    """Of held-out rows, after one training by the command, all weights."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        keys = {
            "rl_training.lora.enabled": "false",
            "rl_training.optimizer": kind,
            "rl_training.seed": seed,
            "rl_training.checkpoint_dir": place,
            "rl_training.run_name": "run",
            "rl_training.learning_rate": 1e-3,
            "server.port": 0,
        }
        config = place / "sft.toml"
        config.write_text(sft_config(place / "rows.jsonl"))
        settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        command = [PROGRAM, "train", "--config", str(config)]
        subprocess.run([*command, *settings], check=True, capture_output=True)
        lines = [
            json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    return float([line["eval/loss"] for line in lines if "eval/loss" in line][-1])


def rewards(seeds: int, steps: int, kinds: Sequence[str], trained_ones: Sequence[str]) -> None:
    """Held-out score and reward of each kind; within a seed the kinds follow one another."""
    print("| trained | seed | " + " | ".join(kinds) + " |\n|---|---|" + "---|" * len(kinds))
    for trained in trained_ones:
        settings = BY_REWARDS[trained]
        for seed in range(seeds):
            cells = []
            for kind in kinds:
                keys = {**settings, "rl_training.optimizer": kind}
                outcome = train_by_rewards(keys, seed=seed, steps=steps)
                cells.append(f"{outcome.after:.3f}, {outcome.reward:.3f}")
            print(f"| {trained} | {seed} | " + " | ".join(cells) + " |", flush=True)


def sft_config(rows: Path) -> str:
    """Words spelt backwards."""
    letters = random.Random(0)
    with rows.open("w") as file:
        for _ in range(1024):
            word = "".join(letters.choices("abcdefgh", k=6))
            row = {"prompt": f"Reverse: {word}", "completion": word[::-1]}
            file.write(json.dumps(row) + "\n")
    return f"""
[model]
base_path = "builtin:tiny"
[rl_training]
algorithm = "sft"
lr_schedule = "cosine"
warmup_steps = 10
batch_size = 32
total_steps = 50
[data]
path = "{rows}"
eval_fraction = 0.1
eval_every = 50
max_length = 64
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("part", choices=("steps", "updates", "runs", "rewards"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=90, help="of a run by rewards")
    parser.add_argument("--kinds", nargs="+", choices=ADAMS, default=ADAMS, help="by rewards")
    parser.add_argument("--trained", nargs="+", choices=BY_REWARDS, default=list(BY_REWARDS))
    options = parser.parse_args()
    if options.part == "steps":
        steps(options.seeds)
    elif options.part == "updates":
        updates()
    elif options.part == "runs":
        runs(options.seeds)
    else:
        rewards(options.seeds, options.steps, options.kinds, options.trained)

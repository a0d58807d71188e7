"""DPO, KTO and the others on rows whose answer depends on the prompt, with the real daemon and the
tiny model.

    .venv/bin/python scripts/bench/preference.py [--algorithms dpo kto …] [--seeds 2]

A prompt shows two words; right is the first one (the second one is rejected), so no answer is
better than another without the prompt. Held-out prompts have other words. Prints, from the run's
own metrics.jsonl: the loss of step 1, the held-out accuracy (KTO: AUC) before, the step from which
it stays at 0.95 or more, and after the last step.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

WANTED = 0.95
STEPS = 100
KTO_ROWS = 400
PAIRS = 1200
CONFIG = """
[model]
base_path = "builtin:tiny"

[server]
port = 0

[rl_training]
algorithm = "{algorithm}"
learning_rate = 2e-3
warmup_steps = 5
batch_size = 32
blocks_per_eval = 0
total_steps = {steps}
checkpoint_interval = 1000
run_name = "run"
seed = {seed}

[data]
path = "rows.jsonl"
eval_path = "heldout.jsonl"
eval_every = 5
"""


def make_rows(algorithm: str, seed: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """(trained on, held out), no prompt in both."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    rng = random.Random(seed)
    prompts = list(dict.fromkeys(tuple(rng.sample(words, 2)) for _ in range(2 * PAIRS)))
    rows: list[dict[str, object]] = []
    for first, second in prompts:
        prompt = f"Which is first: {first} or {second}?"
        if algorithm == "kto":
            label = rng.random() < 0.5
            rows.append(
                {"prompt": prompt, "completion": first if label else second, "label": label}
            )
        elif algorithm == "sft":
            rows.append({"prompt": prompt, "completion": first})
        else:
            rows.append({"prompt": prompt, "chosen": first, "rejected": second})
    count = KTO_ROWS if algorithm == "kto" else PAIRS
    return rows[:count], rows[count : count + 200]


def write_run(directory: Path, algorithm: str, seed: int, steps: int = STEPS) -> Path:
    for name, rows in zip(("rows", "heldout"), make_rows(algorithm, seed), strict=True):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "run.toml").write_text(CONFIG.format(algorithm=algorithm, seed=seed, steps=steps))
    return directory / "run.toml"


def measure(algorithm: str, seed: int) -> tuple[list[dict[str, float]], float]:
    """The run's metrics lines, and its seconds."""
    with tempfile.TemporaryDirectory() as name:
        config = write_run(Path(name), algorithm, seed)
        command = [str(Path(sys.executable).parent / "mlx_parallm_train"), "--config", str(config)]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{algorithm} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        lines = (Path(name) / "checkpoints" / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Preference training and SFT on rows, held-out numbers."
    )
    names = ["dpo", "kto", "orpo", "simpo", "cpo", "sft"]
    parser.add_argument("--algorithms", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    table = Table(
        "algorithm", "seed", "loss, step 1", "before", f"{WANTED} from step", "after", "s / run"
    )
    for algorithm in args.algorithms:
        key = {"kto": "auc", "sft": "loss"}.get(algorithm, "rewards/accuracies")
        for seed in range(args.seeds):
            lines, seconds = measure(algorithm, seed)
            curve = [
                (int(line["step"]), line[f"eval/{key}"]) for line in lines if f"eval/{key}" in line
            ]
            below = [step for step, value in curve if value < WANTED]
            reached = next((step for step, _ in curve if step > max(below, default=0)), None)
            table.add_row(
                f"{algorithm} ({'AUC' if key == 'auc' else key.rpartition('/')[2]})",
                str(seed),
                f"{lines[0]['loss']:.6f}",
                f"{lines[0][f'eval_before/{key}']:.3f}",
                "–" if reached is None or algorithm == "sft" else str(reached),
                f"{curve[-1][1]:.3f}",
                f"{seconds:.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()

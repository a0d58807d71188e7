"""A short training by rewards on the quickstart's tasks, for the benches that compare settings of
it: held-out problems before and after, and the reward of the last steps."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAM = str(Path(sys.executable).with_name("mlx_parallm"))
LAST = 10


@dataclass(frozen=True)
class Outcome:
    """`before`, `after`: share of the held-out problems that greedy answers solve, mean over the
    tasks. `reward`: of the last ten steps' rollouts."""

    before: float
    after: float
    reward: float


def train_by_rewards(
    settings: Mapping[str, object], *, seed: int, steps: int, problems: int = 100
) -> Outcome:
    """Run the command with the quickstart's configuration and these settings; `problems`: held-out
    ones of each task. A failed run ends the process with its last lines."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        everything = {
            "rl_training.seed": seed,
            "rl_training.total_steps": steps,
            "rl_training.checkpoint_dir": directory,
            "rl_training.run_name": run.name,
            "evaluation.problems": problems,
            "server.port": 0,
            **settings,
        }
        flags = [part for key, value in everything.items() for part in ("--set", f"{key}={value}")]
        command = [PROGRAM, "train", "--config", "quickstart", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
        rewards = [float(line["reward_mean"]) for line in _lines(run / "metrics.jsonl")]
        scores = [float(line["score"]) for line in _lines(run / "evaluations.jsonl")]
    return Outcome(scores[0], scores[-1], statistics.fmean(rewards[-LAST:]))


def _lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]

"""Measure credit by turn against credit by episode: tokens to the same reward, where one of five
turns decides.

    python scripts/bench/turn_credit.py --seeds 0 1 2

The tiny model is asked five things, one after another, and the third one alone is worth 1: a
digit, which has to be 3. The others are words to reverse, which nobody scores. Credit by episode
praises or blames those for the digit. Credit by turn gives the last two an advantage of 0; the first two
have the third one's reward to go, unless `turn_gamma` is 0. Each run
is `mlx_parallm train` with the same seeds and settings, the credits taking turns. `tokens to GOAL`
are the sampled tokens, those of dropped groups included, until the mean reward of the last three
steps has reached it (`-`: some seed never did); `reward` is that mean at the end.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from rich.console import Console
from rich.table import Table

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.state import BaseEnvironment, State

BIN = Path(sys.executable).parent
WINDOW = 3
TURNS, DECISIVE = 5, 2
LETTERS = 8  # of a word
DIGIT = "3"  # builtin:tiny picks it in one answer of six
CREDITS = {
    "episode": ['rl_training.credit="episode"'],
    "turn": ['rl_training.credit="turn"'],
    "turn, gamma 0": ['rl_training.credit="turn"', "rl_training.turn_gamma=0"],
}
CONFIG = f"""
[model]
base_path = "builtin:tiny"

[server]
port = 0
batch_size = 32

[rl_training]
learning_rate = 3e-4
batch_size = 32
blocks_per_eval = 0
max_staleness = 0
run_name = "run"

[rl_training.atropos]
rollout_batch_size = 32
max_token_length = 64

[evaluation]
problems = 0

[logging]
sample_every = 0

[[environments]]
kind = "python:{Path(__file__).resolve()}:OneTurnDecides"
group_size = 8
max_tokens = 10
"""
Lines = list[dict[str, Any]]


class OneTurnDecides(BaseEnvironment):
    """A digit between four words, each in a sequence of its own; the digit is worth 1, the words
    nothing."""

    rewards_turns = True

    def reset(self, seed: int = 0, split: Split = "train") -> State:
        rng = random.Random(f"{split} {seed}")
        words = ["".join(rng.choices(ascii_lowercase, k=LETTERS)) for _ in range(TURNS)]
        questions = [f"Reverse: {word}" for word in words]
        questions[DECISIVE] = "Pick a digit."
        return State(prompt=_message(questions[0]), metadata={"questions": questions})

    def update_state(self, state: State, response: str) -> State:
        turn = state.step_count
        state = super().update_state(state, response)
        state.turn_reward = float(turn == DECISIVE and response.strip() == DIGIT)
        state.done = state.step_count == TURNS
        if not state.done:
            state.prompt = _message(state.metadata["questions"][turn + 1])
        return state


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goal", type=float, default=0.8, help="mean reward of three steps")
    parser.add_argument("--credits", nargs="+", choices=CREDITS, default=list(CREDITS))
    args = parser.parse_args()
    console = Console(width=100)
    runs: dict[str, list[Lines]] = {credit: [] for credit in args.credits}
    for seed, credit in itertools.product(args.seeds, args.credits):
        runs[credit].append(train(CREDITS[credit], seed, args.steps))
        console.print(f"{credit}, seed {seed}: {summary(runs[credit][-1], args.goal)}")
    table = Table(title=f"{args.steps} steps, {len(args.seeds)} seeds, medians")
    table.add_column("credit")
    for column in (f"tokens to {args.goal:g}", "tokens", "reward", "without variance"):
        table.add_column(column, justify="right")
    for credit, results in runs.items():
        rows = [summary(lines, args.goal) for lines in results]
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        reached = all(row["to"] < float("inf") for row in rows)
        table.add_row(
            credit,
            f"{middle['to']:,.0f}" if reached else "-",
            f"{middle['tokens']:,.0f}",
            f"{middle['reward']:.3f}",
            f"{middle['without_variance']:.2f}",
        )
    console.print(table)


def train(overrides: list[str], seed: int, steps: int) -> Lines:
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "run.toml")
        config.write_text(CONFIG)
        settings = [
            f"rl_training.seed={seed}",
            f"rl_training.total_steps={steps}",
            f"rl_training.checkpoint_dir={directory}",
            *overrides,
        ]
        flags = [part for setting in settings for part in ("--set", setting)]
        command = [BIN / "mlx_parallm_train", "--config", config, *flags]
        run = subprocess.run(command, capture_output=True, text=True, timeout=7200)
        if run.returncode:
            raise SystemExit(run.stdout + run.stderr)
        metrics = Path(directory, "run/metrics.jsonl")
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def summary(lines: Lines, goal: float) -> dict[str, float]:
    sampled = list(
        itertools.accumulate(line["completion_tokens_mean"] * line["sequences"] for line in lines)
    )
    rewards = [line["reward_mean"] for line in lines]
    means = [
        statistics.mean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)
    ]
    reached = (
        tokens for tokens, mean in zip(sampled[WINDOW - 1 :], means, strict=True) if mean >= goal
    )
    return {
        "to": next(reached, float("inf")),
        "tokens": sampled[-1],
        "reward": means[-1],
        "without_variance": statistics.mean(line["groups_without_variance"] for line in lines),
    }


if __name__ == "__main__":
    main()

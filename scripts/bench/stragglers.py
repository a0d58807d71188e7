"""Steps whose longest episode is many times the median: waiting for all, and running ahead.

    .venv/bin/python -m scripts.bench.stragglers --seeds 0 1 2

128 episodes a step on `builtin:tiny`. An episode is a row of sums, each asked by itself; how many is
drawn for each rollout from a log-normal distribution (median --median, σ = 1, at most --longest), so
the longest of a step has about ten times the median. The reward is the share of right sums. With
`max_staleness = 0` a step waits for its longest episode while nothing else is sampled; with more,
episodes of later steps fill the batch, go on under new weights, and each token is weighed by the
version that sampled it. Groups are trained in the order in which they began, so none is lost for
being long: turns an episode have to agree with the true mean. Each run is the real command; the
values take turns.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.state import BaseEnvironment, Inference, State
from scripts.server_process import command

CONFIG = f"""
[model]
base_path = "builtin:tiny"
[server]
port = 0
batch_size = 128
[rl_training]
run_name = "run"
learning_rate = 1e-3
batch_size = 64
blocks_per_eval = 0
[rl_training.lora]
rank = 16
alpha = 32.0
[rl_training.atropos]
rollout_batch_size = 128
max_token_length = 2048
[evaluation]
problems = 200
[[evaluation.environments]]
kind = "tasks"
name = "sum"
max_tokens = 8
[[environments]]
kind = "python:{Path(__file__).resolve()}:Sums"
rewards = ["python:{Path(__file__).resolve()}:share_of_right_sums"]
group_size = 8
max_tokens = 8
"""
QUANTILES = 1000


def turns_of(normal: float, median: float, longest: int) -> int:
    """The turns of an episode, from a draw of the standard normal distribution."""
    return min(longest, max(1, round(median * math.exp(normal))))


class Sums(BaseEnvironment):
    def __init__(
        self,
        inference: Inference | None = None,
        median: float = 2.0,
        longest: int = 60,
        highest: int = 99,
    ) -> None:
        super().__init__(inference)
        self.median, self.longest, self.highest = median, longest, highest

    def reset(self, seed: int = 0, split: Split = "train") -> State:
        state = State(prompt="", metadata={"seed": f"{split} {seed}", "right": 0})
        return self._ask(state)

    def _ask(self, state: State) -> State:
        # a sum of its own for each turn, the same for all rollouts of a group
        rng = random.Random(f"{state.metadata['seed']} {state.step_count}")
        a, b = rng.randint(0, self.highest), rng.randint(0, self.highest)
        state.metadata["answer"] = str(a + b)
        state.prompt = [{"role": "user", "content": f"Sum: {a}+{b}"}]
        return state

    def update_state(self, state: State, response: str) -> State:
        if "turns" not in state.metadata:  # of this rollout, not of its group
            state.metadata["turns"] = turns_of(random.gauss(), self.median, self.longest)
        right = response.strip() == state.metadata["answer"]
        state = super().update_state(state, response)
        state.metadata["right"] += right
        state.done = state.step_count >= state.metadata["turns"]
        return state if state.done else self._ask(state)


def share_of_right_sums(trajectories: Sequence[Any], **_columns: Any) -> list[float]:
    return [trajectory.metadata["right"] / trajectory.step_count for trajectory in trajectories]


def true_mean(median: float, longest: int) -> float:
    normal = statistics.NormalDist()
    places = ((number + 0.5) / QUANTILES for number in range(QUANTILES))
    return statistics.fmean(turns_of(normal.inv_cdf(place), median, longest) for place in places)


def train(staleness: int, seed: int, args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        config = Path(name, "run.toml")
        config.write_text(CONFIG)
        settings = [
            f"rl_training.seed={seed}",
            f"rl_training.total_steps={args.steps}",
            f"rl_training.max_staleness={staleness}",
            f'rl_training.checkpoint_dir="{name}"',
            f"environments.0.options={{median = {args.median}, longest = {args.longest}}}",
        ]
        flags = [part for setting in settings for part in ("--set", setting)]
        run = subprocess.run(
            [command("mlx_parallm"), "train", "--config", str(config), *flags],
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise SystemExit(run.stdout + run.stderr)
        lines = Path(name, "run", "metrics.jsonl").read_text().splitlines()
    return summary([json.loads(line) for line in lines], args.skip)


def summary(lines: list[dict[str, Any]], skip: int) -> dict[str, float]:
    """`skip`: first steps, in which the pipeline fills."""
    later = lines[skip:]
    scores = [line["eval/score"] for line in lines if line.get("eval/score") is not None]
    return {
        "seconds": statistics.fmean(
            line["time_rollout_s"] + line["time_train_s"] + (line["time_publish_s"] or 0)
            for line in later
        ),
        "turns": 1 + statistics.fmean(line["extra_segments"] / line["sequences"] for line in later),
        "staleness": statistics.fmean(line["staleness"] for line in later),
        "dropped": sum(line["dropped_stale"] for line in lines),
        "score": scores[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=5)
    parser.add_argument("--median", type=float, default=2.0)
    parser.add_argument("--longest", type=int, default=60)
    args = parser.parse_args()
    runs: dict[int, list[dict[str, float]]] = {value: [] for value in args.staleness}
    for seed, value in itertools.product(args.seeds, args.staleness):
        runs[value].append(train(value, seed, args))
        print(f"max_staleness {value}, seed {seed}: {runs[value][-1]}", flush=True)
    print(f"true mean of the turns: {true_mean(args.median, args.longest):.2f}")
    print(
        "| max_staleness | seconds a step | ÷ waiting for all | turns | mean age | dropped | held out |"
    )
    print("|---|---|---|---|---|---|---|")
    waiting = statistics.fmean(row["seconds"] for row in runs[args.staleness[0]])
    for value, rows in runs.items():
        mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
        scores = ", ".join(f"{row['score']:.3f}" for row in rows)
        print(
            f"| {value} | {mean['seconds']:.2f} | {mean['seconds'] / waiting:.2f} |"
            f" {mean['turns']:.2f} | {mean['staleness']:.2f} | {mean['dropped']:.0f} | {scores} |"
        )


if __name__ == "__main__":
    main()

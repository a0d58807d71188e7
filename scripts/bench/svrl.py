"""Does a policy learn to pay for a check that pays, and to leave it when it is too dear?

    MKL_NUM_THREADS=1 .venv/bin/python -m scripts.bench.svrl [--seeds 0 1 2] [--steps 40]

The task: products of two two-digit numbers, which `builtin:tiny` cannot work out, with a real
calculator at 1.0 of a budget of 1.5 (`svrl_environment.py`). Reward: task - w · spent / budget +
0.05 · saved steps.

1. Warm start, so that the model knows the two forms: SFT on rows of each, a call and an answer
   without one in equal shares, and what to do with a result. It learns the syntax and to copy, not
   when to call.
2. GRPO by `mlx_parallm_train` from there, once with w = 0.2 (a call costs 0.13 of a right answer)
   and once with ten times that (1.33: more than the answer is worth).

Printed: of held-out products, at temperature 1 and greedily, the share answered right, calls made
for each episode, and the most that any episode spent.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.rewards.parts import final_answer_is_right
from mlx_parallm.types import Trajectory
from scripts.bench.svrl_environment import BUDGET, TASKS, HeldOutProducts, Products

TRAIN = Path(sys.executable).parent / "mlx_parallm_train"
ENVIRONMENT = Path(__file__).with_name("svrl_environment.py")
WEIGHTS = {"cheap": 0.2, "dear": 2.0}
MAX_TOKENS = 48
SFT = """
[model]
base_path = "builtin:tiny"
[server]
port = 0
[data]
path = "{directory}/rows.jsonl"
eval_fraction = 0.0
[rl_training]
algorithm = "sft"
learning_rate = 1e-3
lr_schedule = "linear"
warmup_steps = 10
batch_size = 64
total_steps = {steps}
checkpoint_interval = 100000
checkpoint_dir = "{directory}"
run_name = "sft"
blocks_per_eval = 0
seed = {seed}
lora.enabled = false         # its embeddings have hardly met capital letters and brackets
"""
RL = """
[model]
base_path = "{directory}/sft/final"
[server]
port = 0
batch_size = 128
[rl_training]
algorithm = "grpo"
learning_rate = {rate}
lr_schedule = "linear"
warmup_steps = 5
batch_size = 128
total_steps = {steps}
checkpoint_interval = 100000
checkpoint_dir = "{directory}"
run_name = "{name}"
blocks_per_eval = 0
kl_beta = 0.0
seed = {seed}
lora = {{ rank = 16, alpha = 32.0, target_modules = "all-linear" }}
atropos.rollout_batch_size = 128
atropos.max_token_length = 256
[[environments]]
kind = "python:{environment}:Products"
rewards = ["builtin:svrl"]
reward_options = {{ svrl = {{ verification_weight = {weight} }} }}
group_size = 8
max_tokens = {max_tokens}
"""


@dataclass(frozen=True)
class Measured:
    right: float
    calls: float
    most_spent: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--episodes", type=int, default=200, help="held-out ones, for each line")
    args = parser.parse_args()
    table = Table(title=f"held-out products: right, calls an episode, most spent of {BUDGET}")
    for column in ("seed", "after", "at temperature 1", "greedy", "seconds"):
        table.add_column(column)
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_rows(directory / "rows.jsonl", seed)
            stages = {"sft": SFT.format(directory=directory, steps=args.sft_steps, seed=seed)}
            for stage, weight in WEIGHTS.items():
                stages[stage] = RL.format(
                    directory=directory,
                    name=stage,
                    steps=args.steps,
                    rate=args.rate,
                    seed=seed,
                    weight=weight,
                    environment=ENVIRONMENT,
                    max_tokens=MAX_TOKENS,
                )
            for stage, text in stages.items():
                seconds = train(directory, stage, text)
                adapter = None if stage == "sft" else directory / stage / "final"
                sampled, greedy = (
                    measure(directory / "sft" / "final", adapter, args.episodes, t)
                    for t in (1.0, 0.0)
                )
                table.add_row(str(seed), stage, shown(sampled), shown(greedy), f"{seconds:.0f}")
    Console(width=120).print(table)


def write_rows(path: Path, seed: int) -> None:
    """For each training product: a call, an answer without one, and the answer to the result of
    a call."""
    environment, rng = Products(seed=seed), random.Random(seed)
    with path.open("w") as file:
        for index in range(len(TASKS) * 9 // 10):
            state = environment.reset(index=index)
            call, answer = (
                f"USE_TOOL[calc]({state.prompt})",
                f"FINAL ANSWER: {state.metadata['answer']}",
            )
            rows = [
                (environment.build_prompt(state), call),
                (environment.build_prompt(state), answer),
            ]
            rows.append(
                (environment.build_prompt(environment.update_state(state.copy(), call)), answer)
            )
            for prompt, completion in rng.sample(rows, len(rows)):
                file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def train(directory: Path, stage: str, text: str) -> float:
    """Seconds."""
    config = directory / f"{stage}.toml"
    config.write_text(text)
    started = time.perf_counter()
    done = subprocess.run(
        [TRAIN, "--config", config], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout)
    return time.perf_counter() - started


def measure(model: Path, adapter: Path | None, episodes: int, temperature: float) -> Measured:
    with InferenceModule(model, adapter_path=adapter) as inference:
        config = RolloutConfig(num_parallel=100, temperature=temperature, max_tokens=MAX_TOKENS)
        with RolloutManager(HeldOutProducts(inference), config) as manager:
            trajectories = manager.collect_rollouts(episodes)
    if failed := [trajectory.error for trajectory in trajectories if trajectory.error]:
        raise SystemExit(f"{len(failed)} episodes failed: {failed[0]}")
    return Measured(
        sum(map(final_answer_is_right, trajectories)) / episodes,
        sum(map(calls_made, trajectories)) / episodes,
        max(trajectory.metadata["spent"] for trajectory in trajectories),
    )


def calls_made(trajectory: Trajectory) -> int:
    return sum(call["cost"] > 0 for call in trajectory.metadata["tool_calls"])


def shown(measured: Measured) -> str:
    return f"{measured.right:.3f}, {measured.calls:.2f}, {measured.most_spent:g}"


if __name__ == "__main__":
    main()

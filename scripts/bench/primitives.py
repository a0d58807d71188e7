"""Do PPO, GRPO and REINFORCE learn through the Python face? SimpleText on builtin:tiny, reward =
share of one letter.

    python scripts/bench/primitives.py --seeds 0 1 2

Every seed and algorithm starts from the shipped model. Prints the reward of the first iteration,
which is sampled before anything was learned, and of the last five; the first iteration that ends
five with a mean of at least 0.9, and the time to it.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import fmean

import mlx.optimizers as optim
from rich.console import Console
from rich.table import Table

from mlx_parallm.faces.primitives import (
    AlgorithmConfig,
    BackpropConfig,
    BackpropModule,
    InferenceModule,
    RolloutConfig,
    RolloutManager,
    SimpleTextEnvironment,
    TrainingMetrics,
    Trajectory,
    create_algorithm,
)

PROMPTS = ("Sort: dbca", "Reverse: hfkdo", "Sort: xaz", "Reverse: mno")
TARGET = 0.9
WINDOW = 5


class ShareOfALetter:
    def __init__(self, letter: str) -> None:
        self.letter = letter

    def compute_rewards(
        self, trajectories: Sequence[Trajectory], method: str = "absolute"
    ) -> list[float]:
        return [t.response.count(self.letter) / max(len(t.response), 1) for t in trajectories]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=["ppo", "grpo", "reinforce"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--letter", default="q")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    console = Console(width=120)
    table = Table(
        title=(
            f"share of {args.letter!r}, {args.batch_size} trajectories an"
            f" iteration, {args.tokens} tokens"
        )
    )
    for column in (
        "algorithm",
        "seed",
        "first",
        "last 5",
        f">= {TARGET} from",
        "seconds to it",
        "seconds",
    ):
        table.add_column(column, justify="right")
    for name in args.algorithms:
        for seed in args.seeds:
            table.add_row(name, str(seed), *row(name, seed, args))
            console.print(table)


def row(name: str, seed: int, args: argparse.Namespace) -> list[str]:
    started, ends = time.perf_counter(), list[float]()
    with InferenceModule("builtin:tiny") as inference:
        env = SimpleTextEnvironment(inference, prompts=PROMPTS)
        manager = RolloutManager(
            env, RolloutConfig(num_parallel=32, max_tokens=args.tokens, seed=seed)
        )
        config = BackpropConfig(kl_coef=0.0, gamma=1.0, seed=seed)
        backprop = BackpropModule(inference, optim.AdamW(args.learning_rate), config=config)
        settings = AlgorithmConfig(batch_size=args.batch_size)
        parts = (env, manager, ShareOfALetter(args.letter), backprop, settings)
        algorithm = create_algorithm(
            name, *parts, callbacks=[lambda _, metrics: ends.append(time.perf_counter())]
        )
        metrics = algorithm.train(args.iterations, progress_bar=False)
    rewards = [line.reward_mean for line in metrics]
    reached = first_window(metrics)
    there = [f"{reached}", f"{ends[reached - 1] - started:.0f}"] if reached else ["never", "-"]
    return [
        f"{rewards[0]:.3f}",
        f"{fmean(rewards[-WINDOW:]):.3f}",
        *there,
        f"{ends[-1] - started:.0f}",
    ]


def first_window(metrics: Sequence[TrainingMetrics]) -> int | None:
    """The iteration that ends the first window whose mean reward is at least TARGET."""
    rewards = [line.reward_mean for line in metrics]
    return next(
        (
            end
            for end in range(WINDOW, len(rewards) + 1)
            if fmean(rewards[end - WINDOW : end]) >= TARGET
        ),
        None,
    )


if __name__ == "__main__":
    main()

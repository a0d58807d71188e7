"""Does every algorithm learn, with an adapter, over a quantised base, with all weights? One
reasoning-gym task.

    python scripts/bench/algorithms.py --seeds 0 1 --figure docs/benchmarks/algorithms.png
    python scripts/bench/algorithms.py --only "GRPO, QLoRA" PPO

Runs the real `mlx_parallm_train` for each variant and seed, a client asking all the while, then
serves what it learned and answers held-out problems greedily through the API (`learning.py`). Every
run is reported; exit code 1 when fewer than 90 % of them gained 0.20.
"""

import argparse
import itertools
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from learning import Result, measure

CONFIG = Path(__file__).with_name("algorithms.toml")
GAIN, SHARE = 0.20, 0.9
WINDOW = 5
VARIANTS: dict[str, list[str]] = {
    "GRPO, LoRA": [],
    "GRPO, QLoRA": ["rl_training.lora.quantize_base=true"],
    "GRPO, full weights": ["rl_training.lora.enabled=false", "rl_training.learning_rate=2e-4"],
    "Dr. GRPO": ["rl_training.algorithm=dr_grpo"],
    "GSPO": ["rl_training.algorithm=gspo"],
    "CISPO": ["rl_training.algorithm=cispo"],
    "RLOO": ["rl_training.algorithm=rloo"],
    "PPO": ["rl_training.algorithm=ppo"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--problems", type=int, default=300, help="held-out problems")
    parser.add_argument("--set", action="append", default=[], help="passed on to mlx_parallm_train")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    console = Console(width=120)
    results: dict[str, list[Result]] = {name: [] for name in args.only}
    for seed, name in itertools.product(args.seeds, args.only):
        console.print(f"{name}:", end=" ")
        results[name].append(
            measure(str(CONFIG), seed, args.problems, [*VARIANTS[name], *args.set])
        )
    gains = {name: [gain(row) for row in rows] for name, rows in results.items()}
    console.print(table(results, gains))
    flat = [value for values in gains.values() for value in values]
    learned = sum(value >= GAIN for value in flat)
    console.print(f"{learned} of {len(flat)} runs gained {GAIN} or more")
    if args.figure:
        draw(results, args.figure)
    return 0 if learned >= SHARE * len(flat) else 1


def gain(result: Result) -> float:
    [(before, after)] = result.accuracy.values()
    return after - before


def table(results: dict[str, list[Result]], gains: dict[str, list[float]]) -> Table:
    drawn = Table(title="greedy accuracy on held-out problems of chain_sum")
    drawn.add_column("variant")
    for column in (
        "seed",
        "before → after",
        "gain",
        "reward first 5 → last 10",
        "seconds",
        "requests",
        "failed",
    ):
        drawn.add_column(column, justify="right")
    for name, rows in results.items():
        for row, gained in zip(rows, gains[name], strict=True):
            [(before, after)] = row.accuracy.values()
            cells = [
                f"{before:.2f} → {after:.2f}",
                f"{gained:+.2f}",
                (f"{row.first:.2f} → {row.last:.2f}"),
            ]
            cells += [f"{row.seconds:.0f}", str(row.asked.sent), str(len(row.asked.failed))]
            drawn.add_row(name, str(row.seed), *cells)
    return drawn


def draw(results: dict[str, list[Result]], file: Path) -> None:
    """The mean reward of the last steps, every run a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    for color, (name, rows) in zip(plt.colormaps["tab10"].colors, results.items(), strict=False):
        for number, row in enumerate(rows):
            smooth = [
                sum(part) / len(part)
                for end in range(1, len(row.rewards) + 1)
                if (part := row.rewards[max(0, end - WINDOW) : end])
            ]
            axes.plot(
                range(1, len(smooth) + 1), smooth, color=color, label=None if number else name
            )
    axes.set(
        xlabel="step",
        ylabel="mean reward of the rollouts",
        title=f"chain_sum: mean of {WINDOW} steps",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, ncols=2)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())

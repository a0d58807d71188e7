"""AdaLoRA against LoRA with as many parameters at the end: held-out words after SFT of the shipped
model, as in qat.py; or held-out problems after GRPO on the quickstart's tasks.

    .venv/bin/python -m scripts.bench.adalora [--seeds 3] [--steps 150] [--rank 4]
    .venv/bin/python -m scripts.bench.adalora --rewards [--steps 90]

AdaLoRA begins with 1.5 times the rank and ends with it on average, over the middle of the run. Each
has the learning rate of `RATES` (`RATES_BY_REWARDS`) that is best on the first seed: by loss, or by
the reward of the last ten steps. LoRA at 2e-3 is far behind in SFT.
"""

import argparse
import tempfile
from pathlib import Path

from scripts.bench.qat import adapter_scores, train
from scripts.bench.short_rl import train_by_rewards

RATES = {"lora": (5e-3, 1e-2), "adalora": (1e-2, 2e-2)}
RATES_BY_REWARDS = {"lora": (1e-3, 2e-3, 4e-3), "adalora": (4e-3, 8e-3, 1.6e-2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="default: 150; 90 with --rewards")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--rewards", action="store_true", help="GRPO on the quickstart's tasks")
    options = parser.parse_args()
    if options.rewards:
        by_rewards(options.seeds, options.steps or 90, options.rank)
        return
    steps = options.steps or 150
    print("| adapter | learning rate | seed | score | loss |\n|---|---|---|---|---|")
    for kind, rates in RATES.items():
        losses = {rate: shown(kind, rate, 0, steps, options.rank) for rate in rates}
        best = min(losses, key=lambda rate: losses[rate])
        for seed in range(1, options.seeds):
            shown(kind, best, seed, steps, options.rank)


def shown(kind: str, rate: float, seed: int, steps: int, rank: int) -> float:
    """Print one training's row; return its loss."""
    lora = f"rank = {rank}\nalpha = {2.0 * rank}"
    if kind == "adalora":
        first = rank * 3 // 2
        lora = (
            f"rank = {first}\nalpha = {2.0 * first}\nuse_adalora = true\n"
            f"[rl_training.lora.adalora]\ntarget_r = {rank}\ntinit = {steps // 6}\n"
            f"tfinal = {steps // 3}\ndeltaT = 5"
        )
    with tempfile.TemporaryDirectory() as directory:
        held_out = train(Path(directory), seed, steps, lora, rate)
        score, loss = adapter_scores(Path(directory) / "run" / "final", held_out)
    print(f"| {kind} | {rate:g} | {seed} | {score:.3f} | {loss:.4f} |", flush=True)
    return loss


def by_rewards(seeds: int, steps: int, rank: int) -> None:
    print("| adapter | learning rate | seed | held out before | after | reward |")
    print("|---|---|---|---|---|---|")
    for kind, rates in RATES_BY_REWARDS.items():
        rewards = {rate: shown_by_rewards(kind, rate, 0, steps, rank) for rate in rates}
        best = max(rewards, key=lambda rate: rewards[rate])
        for seed in range(1, seeds):
            shown_by_rewards(kind, best, seed, steps, rank)


def shown_by_rewards(kind: str, rate: float, seed: int, steps: int, rank: int) -> float:
    """Print one training's row; return its reward."""
    first = rank if kind == "lora" else rank * 3 // 2
    settings: dict[str, object] = {
        "rl_training.learning_rate": rate,
        "rl_training.lora.rank": first,
        "rl_training.lora.alpha": 2.0 * first,
    }
    if kind == "adalora":
        settings["rl_training.lora.use_adalora"] = "true"
        of_adalora = {"target_r": rank, "tinit": steps // 6, "tfinal": steps // 3, "deltaT": 5}
        settings |= {f"rl_training.lora.adalora.{key}": n for key, n in of_adalora.items()}
    outcome = train_by_rewards(settings, seed=seed, steps=steps)
    numbers = f"{outcome.before:.3f} | {outcome.after:.3f} | {outcome.reward:.3f}"
    print(f"| {kind} | {rate:g} | {seed} | {numbers} |", flush=True)
    return outcome.reward


if __name__ == "__main__":
    main()

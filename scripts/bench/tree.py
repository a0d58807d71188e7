"""Training on the tree of turns against training row by row: `python -m scripts.bench.tree`.

Episodes of eight turns whose template leaves the thinking of earlier turns out, so every turn is a
row with its own history; all begin with one instruction. And single-turn groups, whose rows have
only the prompt in common. Forward and gradient of a LoRA adapter and of all weights, block by
block; micro-batches of at most --budget tokens. Ways, in turns: "rows" (what the trainer does
without trees: prompts shared or rows packed, where that pays) and "tree".
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from rich.console import Console

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.lora import inject_lora
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.collate import MiniBatch, collate
from mlx_parallm.types import Rollout
from scripts.bench.recurrent import LARGER, SHARED, model_of

INSTRUCTION, THOUGHT, ANSWER, OBSERVATION = 200, 60, 40, 40  # tokens
EPISODES, TURNS = 16, 8
PROMPT, COMPLETION = 400, 64  # of single-turn groups
LARGER["gemma3_text"] = {"sliding_window": 128, "sliding_window_pattern": 2}


def sequence(history: list[int], sampled: list[int]) -> TrainSequence:
    tokens = (*history, *sampled)
    rollout = Rollout(
        tokens=tokens,
        mask=(0,) * len(history) + (1,) * len(sampled),
        logprobs=None,
        policy_versions=(0,) * len(tokens),
        temperature=1.0,
        scores={},
    )
    return TrainSequence(rollout, (1.0,) * len(tokens), fresh=True)


def episodes(count: int = EPISODES, turns: int = TURNS) -> list[TrainSequence]:
    """One group of episodes: a row for each turn of each."""
    rng = np.random.default_rng(0)

    def words(size: int) -> list[int]:
        return rng.integers(0, 1000, size).tolist()

    instruction, rows = words(INSTRUCTION), []
    for _ in range(count):
        history = [*instruction]
        for _ in range(turns):
            thought, answer = words(THOUGHT), words(ANSWER)
            rows.append(sequence(history, [*thought, *answer]))
            history += [*answer, *words(OBSERVATION)]
    return rows


def groups(count: int = 4, answers: int = 16) -> list[TrainSequence]:
    """Single-turn groups."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        prompt = rng.integers(0, 1000, PROMPT).tolist()
        rows += [
            sequence(prompt, rng.integers(0, 1000, COMPLETION).tolist()) for _ in range(answers)
        ]
    return rows


def distinct(rows: list[TrainSequence]) -> int:
    """Tokens that differ in themselves or in what is before them."""
    seen: set[int] = set()
    for row in rows:
        key = 0
        for token in row.rollout.tokens[:-1]:
            key = hash((key, token))
            seen.add(key)
    return len(seen)


def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
    return -logprobs.sum() + 0 * entropy.sum(), ()


def step(parts: BlockwiseModel, batch: MiniBatch) -> list[mx.array]:
    """Gradients of all micro-batches, added up."""
    sums: list[mx.array] | None = None
    for micro in batch.micro_batches:
        tokens = micro.token_batch(entropy_slope=False)
        _, _, sums = parts.loss_and_gradients(tokens, objective, sums, fuse=True)
    return sums or []


def timed(function: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """The least wall seconds and CPU seconds, and the peak of memory in MB beside what was there.
    CPU seconds mean something on a shared machine, too."""
    walls, works, peak = [], [], 0.0
    for _ in range(rounds):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        started, worked = time.perf_counter(), time.process_time()
        function()
        walls.append(time.perf_counter() - started)
        works.append(time.process_time() - worked)
        peak = (mx.get_peak_memory() - before) / 1e6
    return min(walls), min(works), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--model",
        default="qwen3",
        help="gemma3_text has layers with windows, qwen3_5, kimi_linear and mamba recurrent ones",
    )
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--weights", choices=["LoRA", "all"], action="append")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--case", choices=["episodes", "groups"], action="append")
    args = parser.parse_args()
    console = Console()
    SHARED["num_hidden_layers"] = args.layers
    for case in args.case or ["episodes", "groups"]:
        rows = episodes(args.episodes) if case == "episodes" else groups()
        for kind in args.weights or ["LoRA", "all"]:
            model = model_of(args.model)
            if kind == "LoRA":
                model.freeze()
                inject_lora(model, LoraConfig())
            compare(console, f"{case}, {kind}", model, rows, args.budget, args.rounds)


def compare(
    console: Console,
    what: str,
    model: nn.Module,
    rows: list[TrainSequence],
    budget: int,
    rounds: int,
) -> None:
    parts = BlockwiseModel(model, blocks_per_eval=1)
    order, every = list(range(len(rows))), distinct(rows)
    able = {"share_prompts": parts.shares_prompts, "packing": parts.packs_rows}
    shared = partial(collate, rows, order, token_budget=budget, **able)
    batches = {"rows": shared(), "tree": shared(merging=parts.merges_rows)}
    gradients: dict[str, list[mx.array]] = {}

    def keep(name: str) -> None:
        gradients[name] = step(parts, batches[name])

    results = {name: timed(partial(keep, name), rounds) for name in batches}
    off = max(
        (mx.abs(a - b).max() / mx.maximum(mx.abs(a).max(), 1e-20)).item()
        for a, b in zip(*gradients.values(), strict=True)
    )
    base = results["rows"]
    for name, (seconds, work, peak) in results.items():
        tokens = sum(micro.tokens for micro in batches[name].micro_batches)
        console.print(
            f"{what}, {name}: {tokens} tokens, {tokens / every:.2f} of the distinct;"
            f" {seconds:.2f} s ({seconds / base[0]:.2f}), {work:.2f} CPU seconds"
            f" ({work / base[1]:.2f}), {peak:.0f} MB ({peak / base[2]:.2f}),"
            f" {len(batches[name].micro_batches)} micro-batches"
        )
    console.print(f"{what}: gradients differ by {off:.1e}")


if __name__ == "__main__":
    main()

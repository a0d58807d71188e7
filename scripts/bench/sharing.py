"""How engine and trainer share one device, for each `rl_training.serve_priority`.

    .venv/bin/python -m scripts.bench.sharing [--rounds 3] [--requests 6] [--seconds 20]

The 29 M parameter benchmark model is served by the real HTTP server to 8 clients (64-token prompts,
64 tokens out; a sender in its own process, no retries) while the main thread takes training
steps on a LoRA adapter of rank 16 (16 rollouts of 64 + 64 tokens a step, block by block), as the
daemon does. Every case is its own process; in a round all run once, in turn. A share is a rate
over the rate alone in the same round; alone, engine or trainer has all cores (the better of one and
of all BLAS threads), together the daemon's own split.
"""

import argparse
import copy
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.daemon import Serving
from mlx_parallm.losses.advantages import group_advantages, token_advantages
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.blas import blas_status, share_blas_between
from mlx_parallm.system.hardware import usable_cores
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import Rollout, RolloutGroup
from mlx_parallm.weights import SharedWeights
from scripts.bench.load import Report, send
from scripts.bench.models import bench_prompts, save_bench_model

assert mlx_parallm.__version__
CLIENTS, PROMPT, OUTPUT, ROWS = 8, 64, 64, 16
PRIORITIES = ("balanced", "serve", "train")
RATES = ("serve", "train")
ALONE = [(case, computing) for case in RATES for computing in (1, 2)]  # 1: all cores are its own


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--requests", type=int, default=6, help="of each client, one after the other"
    )
    parser.add_argument("--seconds", type=float, default=20, help="of training alone")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(**json.loads(args.case))))
        return
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as directory:
        path = str(save_bench_model(Path(directory) / "model", endless=True))
        rounds = [one_round(path, args.requests, args.seconds, console) for _ in range(args.rounds)]
    table = Table(
        title=f"{usable_cores()} cores, BLAS {blas_status().name}; medians of {args.rounds} rounds"
    )
    for column in (
        "serve_priority",
        "serve tok/s",
        "train tok/s",
        "serve share",
        "train share",
        "sum",
        "failed",
    ):
        table.add_column(column, justify="left" if column == "serve_priority" else "right")
    median = statistics.median
    table.add_row(
        "alone", *(f"{median(r['alone'][name] for r in rounds):.0f}" for name in RATES), *["-"] * 4
    )
    for priority in PRIORITIES:
        both = [r[priority] for r in rounds]
        shares = [
            [b[name] / r["alone"][name] for name in RATES]
            for b, r in zip(both, rounds, strict=True)
        ]
        rates = [f"{median(b[name] for b in both):.0f}" for name in RATES]
        parts = [f"{median(share[i] for share in shares):.2f}" for i in (0, 1)]
        failed = str(sum(b["failed"] for b in both))
        table.add_row(
            priority, *rates, *parts, f"{median(sum(share) for share in shares):.2f}", failed
        )
    console.print(table)


def one_round(path: str, requests: int, seconds: float, console: Console) -> dict[str, Any]:
    alone = dict.fromkeys(RATES, 0.0)
    for case, computing in ALONE:
        result = in_process(path=path, serve=case == "serve", train=case == "train", computing=computing,
                            requests=requests, seconds=seconds)  # fmt: skip
        console.print(
            f"{case} alone, {usable_cores() // computing or 1} BLAS"
            f" threads: {result[case]:.0f} tok/s"
        )
        alone[case] = max(alone[case], result[case])
    rates: dict[str, Any] = {"alone": alone}
    for priority in PRIORITIES:
        rates[priority] = in_process(
            path=path, serve=True, train=True, priority=priority, requests=requests
        )
        console.print(f"{priority}: {rates[priority]}")
    return rates


def in_process(**case: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.bench.sharing", "--case", json.dumps(case)]
    result: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return result


def run_case(
    path: str,
    *,
    serve: bool,
    train: bool,
    priority: str = "balanced",
    computing: int = 2,
    requests: int = 0,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Tokens a second of both, in one process as the daemon has them."""
    configure_logging(level="error")
    share_blas_between(computing, usable_cores())
    training = {
        "serve_priority": priority,
        "batch_size": ROWS,
        "token_budget": 512,
        "lora": {"rank": 16},
    }
    training |= {"atropos": {"rollout_batch_size": ROWS}}
    config = parse_config(
        {"model": {"base_path": path}, "server": {"port": 0}, "rl_training": training}
    )
    with mlx_thread():
        serving = Serving(config)
        trainer, _ = start(serving, config)
        batch = make_batch()
        trainer.train_step(batch)
        ask(serving, 1)
        report = Report()
        sender = threading.Thread(target=lambda: vars(report).update(vars(ask(serving, requests))))
        started, steps = time.perf_counter(), 0
        if serve:
            sender.start()
        finished = started
        while train and (sender.is_alive() if serve else finished - started < seconds):
            with serving.turns.training():
                trainer.train_step(batch)
            steps, finished = steps + 1, time.perf_counter()
        if serve:
            sender.join()
        serving.close()
    tokens = steps * sum(len(sequence.rollout.tokens) for sequence in batch.sequences)
    rate = tokens / (finished - started) if steps else 0.0
    return {"serve": report.rate if serve else 0.0, "train": rate, "failed": len(report.failures)}


def start(serving: Serving, config: Config) -> tuple[Trainer, SharedWeights]:
    serving.listen()
    loaded = serving.load()
    options = config.rl_training
    policy = TrainedPolicy(
        copy.deepcopy(loaded.model),
        options,
        source=loaded.path,
        model_config=loaded.config,
    )
    weights = SharedWeights(loaded.model, policy="policy", keep_versions=1)
    serving.open(loaded, weights, adapters={"policy": policy.adapter()}, main_adapter="policy")
    algorithm, between = make_algorithm(config.rl_training), serving.turns.after_evaluation
    return Trainer(policy, options, algorithm, between_blocks=between), weights


def ask(serving: Serving, requests: int) -> Report:
    letters = random.Random(0)
    prompts = [
        ["".join(letters.choices(string.ascii_letters, k=PROMPT)) for _ in range(requests)]
        for _ in range(CLIENTS)
    ]
    body = {"model": "default", "max_tokens": OUTPUT, "temperature": 1.0}
    return send(
        serving.url, [[body | {"prompt": prompt} for prompt in client] for client in prompts]
    )


def make_batch() -> TrainBatch:
    """Two groups of random rollouts with random rewards."""
    chance, groups = random.Random(0), []
    for number in range(2):
        rows = bench_prompts(ROWS // 2, PROMPT + OUTPUT, seed=number + 1)
        rollouts = tuple(
            Rollout(
                tokens=tuple(row),
                mask=(0,) * PROMPT + (1,) * OUTPUT,
                logprobs=(0.0,) * PROMPT + (-9.0,) * OUTPUT,
                policy_versions=(0,) * (PROMPT + OUTPUT),
                temperature=1.0,
                scores={"reward": chance.random()},
            )
            for row in rows
        )
        groups.append(RolloutGroup(f"g{number}", "bench", rollouts))
    sequences = []
    for group in groups:
        advantages = token_advantages(group, group_advantages)
        assert advantages is not None
        sequences += [
            TrainSequence(*pair, True) for pair in zip(group.rollouts, advantages, strict=True)
        ]
    return TrainBatch(1, tuple(groups), tuple(sequences), BatchStatistics())


if __name__ == "__main__":
    main()

"""Measure this machine's device, in one command of some minutes. Paste what it prints into an
issue, or into docs/benchmarks.

    .venv/bin/python -m scripts.bench.device [--size small|large]

A random Qwen3 (small: 29 M parameters, float32; large: 1.2 B, bfloat16, the default on a GPU) is
served and trained by the daemon's own parts in one process. Decode and prefill stand beside
mlx-lm's own forward and cache on the same weights, without a server or an engine, and beside what
memory bandwidth allows (a step reads every weight once); both sides run in turns. Then decode with
the next step started before one is read (server.async_scheduling) beside decode without, a publish
under load, a GRPO step, and the peak memory of both beside the preflight's formula.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.bench.ceiling import ceiling_rate  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.daemon import Serving
from mlx_parallm.engine.engine import Engine
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.hardware import GIB, MIB, mlx_device
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights
from scripts.bench.load import Report, send
from scripts.bench.models import bench_prompts, save_bench_model
from scripts.bench.sharing import OUTPUT, PROMPT, ROWS, make_batch, start

LARGE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
CLIENTS = (1, 8, 32)
LONG, CHUNK = 1024, 512
ROUNDS, PUBLISHES = 3, 20


def main() -> None:
    gpu = mx.default_device().type == mx.DeviceType.gpu
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--size", choices=["small", "large"], default="large" if gpu else "small")
    args = parser.parse_args()
    configure_logging(level="error")
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm", "mlx-parallm")
    )
    say(f"{platform.platform()}, {mlx_device()}, Python {platform.python_version()}, {versions}")
    with tempfile.TemporaryDirectory() as directory, mlx_thread():
        shape = LARGE if args.size == "large" else {}
        path = save_bench_model(Path(directory) / "model", endless=True, **shape)
        training: dict[str, Any] = {
            "batch_size": ROWS,
            "lora": {"rank": 16},
            "atropos": {"rollout_batch_size": ROWS},
        }
        model = {"base_path": str(path), "dtype": "bfloat16" if args.size == "large" else "float32"}
        tree = {
            "model": model,
            "server": {"port": 0, "batch_size": max(CLIENTS), "prefix_cache_bytes": 0},
            "rl_training": training,
        }
        config = parse_config(tree)
        serving = Serving(config)
        trainer, weights = start(serving, config)
        served = Served(serving.url, f"{path}:base")
        forward_rates(served, load_model(config.model).model)
        say(steps_ahead(serving, served))
        say(publishes(served, trainer, weights))
        mx.clear_cache()
        step(trainer, config, path)
        serving.close()


@dataclass(frozen=True)
class Served:
    """A server, and the name of its base model there."""

    url: str
    model: str

    def send(self, prompts: Sequence[list[int]], tokens: int) -> Report:
        body = {"model": self.model, "max_tokens": tokens, "temperature": 1.0}
        report = send(self.url, [[body | {"prompt": prompt}] for prompt in prompts])
        if report.failures:
            raise SystemExit(f"a request failed: {report.failures[0]}")
        return report

    def decode(self, prompts: Sequence[list[int]]) -> float:
        """Tokens a second, prefill included."""
        return self.send(prompts, OUTPUT).rate

    def prefill(self) -> float:
        """Tokens a second of a prompt that was not seen before."""
        return LONG / self.send(new_prompt(), 1).seconds


def forward_rates(served: Served, plain: Any) -> None:
    size = sum(array.nbytes for _, array in tree_flatten(plain.parameters()))
    rate = bandwidth()
    say(
        f"weights {size / MIB:.0f} MiB; memory {rate / 1e9:.1f} GB/s (a"
        " product of 256 MiB with a vector)"
    )
    bound = rate / size
    for clients in CLIENTS:
        prompts = bench_prompts(clients, PROMPT)
        pairs = in_turns(
            lambda p=prompts: served.decode(p), lambda p=prompts: ceiling_rate(plain, p, OUTPUT)
        )
        ours, theirs = map(statistics.median, zip(*pairs, strict=True))
        least = f"; bound {bound:.0f}, {ours / bound:.2f} of it" if clients == 1 else ""
        say(
            f"decode, {clients} at once: {ours:.0f} tok/s, mlx-lm alone {theirs:.0f}:"
            f" {ratio(pairs)}{least}"
        )
    pairs = in_turns(served.prefill, lambda: plain_prefill(plain))
    ours, theirs = map(statistics.median, zip(*pairs, strict=True))
    say(f"prefill of {LONG} tokens: {ours:.0f} tok/s, mlx-lm alone {theirs:.0f}: {ratio(pairs)}")


def steps_ahead(serving: Serving, served: Served) -> str:
    def rate(ahead: bool, prompts: list[list[int]]) -> float:
        def change(engine: Engine) -> None:
            engine.options = replace(engine.options, async_scheduling=ahead)

        serving.client.call(change).result()
        return served.decode(prompts)

    ratios = []
    for clients in CLIENTS:
        prompts = bench_prompts(clients, PROMPT)
        pairs = in_turns(lambda p=prompts: rate(True, p), lambda p=prompts: rate(False, p))
        ratios.append(f"{clients} at once {ratio(pairs)}")
    return "decode with server.async_scheduling against without: " + ", ".join(ratios)


def step(trainer: Trainer, config: Config, path: Path) -> None:
    mx.reset_peak_memory()
    batch, seconds = make_batch(), []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        trainer.train_step(batch)
        seconds.append(time.perf_counter() - began)
    peak = mx.get_peak_memory()
    tokens = sum(len(sequence.rollout.tokens) for sequence in batch.sequences)
    median = statistics.median(seconds[1:])
    say(
        f"GRPO step of {len(batch.sequences)} answers, {tokens} tokens: {median:.2f} s,"
        f" {tokens / median:.0f} tok/s"
    )
    model_config = json.loads((path / "config.json").read_text())
    formula = PlannedRun(
        config, PlannedRun.of(config, model_config).shape, Lengths(PROMPT, OUTPUT)
    ).memory.of_mlx
    say(
        f"memory at its peak {peak / GIB:.2f} GiB; the preflight says {formula / GIB:.2f}:"
        f" {formula / peak:.2f}"
    )


def in_turns(ours: Any, theirs: Any) -> list[tuple[float, float]]:
    """Rates of both, ROUNDS times, after one that is not counted."""
    return [(ours(), theirs()) for _ in range(1 + ROUNDS)][1:]


def ratio(pairs: list[tuple[float, float]]) -> str:
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def bandwidth() -> float:
    """Bytes a second that a product of a matrix with a vector reads."""
    matrix, vector, best = mx.ones((8192, 8192)), mx.ones((8192,)), 0.0
    mx.eval(matrix, vector)
    for _ in range(6):
        began = time.perf_counter()
        mx.eval(matrix @ vector)
        best = max(best, matrix.nbytes / (time.perf_counter() - began))
    return best


def new_prompt() -> list[list[int]]:
    return bench_prompts(1, LONG, seed=time.perf_counter_ns())


def plain_prefill(model: Any) -> float:
    [prompt] = new_prompt()
    began = time.perf_counter()
    cache = make_prompt_cache(model)
    for first in range(0, LONG, CHUNK):
        hidden = model.model(mx.array([prompt[first : first + CHUNK]]), cache=cache)
        mx.eval(hidden)
    mx.eval(model.model.embed_tokens.as_linear(hidden[:, -1]))
    return LONG / (time.perf_counter() - began)


def publishes(served: Served, trainer: Trainer, weights: SharedWeights) -> str:
    """Publish the trained adapter while eight clients are answered."""
    prompts = bench_prompts(8, PROMPT)
    reports = []
    load = threading.Thread(target=lambda: [served.decode(prompts) for _ in range(2)])
    load.start()
    while load.is_alive() and len(reports) < PUBLISHES:
        reports.append(weights.publish_adapter(trainer.policy.adapter()))
        time.sleep(0.05)  # a trainer computes between two publishes
    load.join()
    held, total = (
        statistics.median(getattr(each, name) for each in reports)
        for name in ("lock_held_ms", "total_ms")
    )
    return (
        f"publish under load, {len(reports)} times: {total:.2f} ms, of which"
        f" the lock is held {held:.2f} ms"
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

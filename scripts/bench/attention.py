"""Attention of several queries on a CPU, in blocks (models/cpu/attention.py) against MLX's own, in
turns.

.venv/bin/python -m scripts.bench.attention           # both tables of docs/benchmarks/serving.md#long-and-shared-texts, about
                                                      2 minutes
.venv/bin/python -m scripts.bench.attention --small   # without the longest texts, half a minute
"""

# isort: off
import mlx_parallm  # noqa: F401  before MLX: it puts the fast BLAS under it
# isort: on

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console

from mlx_parallm.models import attention as routing
from mlx_parallm.models.cpu.attention import attention
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import Request, SamplingParams
from scripts.bench.kv import CONTEXT, make_engine
from scripts.bench.models import bench_prompts, save_bench_model

# rows, queries, positions
SHAPES = ((64, 64, 64), (16, 128, 128), (8, 512, 512), (1, 2048, 2048), (1, 512, 8192))
PROMPTS = ((1, 64), (8, 64), (1, 400), (1, 3700), (1, 8000))  # how many, tokens
HEADS, KV_HEADS, WIDTH = 8, 4, 64


def least(functions: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the least milliseconds of each function; the functions take turns."""
    times_of_each: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for times, function in zip(times_of_each, functions, strict=True):
            started = time.perf_counter()
            mx.eval(function())
            times.append(1000 * (time.perf_counter() - started))
    return [min(times) for times in times_of_each]


def layer(rows: int, queries: int, positions: int, console: Console) -> None:
    shapes = [
        (rows, heads, n, WIDTH)
        for heads, n in ((HEADS, queries), (KV_HEADS, positions), (KV_HEADS, positions))
    ]
    arrays = [mx.random.normal(shape) for shape in shapes]
    slope = mx.random.normal(shapes[0])
    mx.eval(arrays, slope)

    def mlx_own(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal")

    def in_blocks(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return attention(q, k, v, 0.125, "causal")

    ways = (mlx_own, in_blocks)
    forward = least([lambda way=way: way(*arrays) for way in ways], 6)
    gradient = least([lambda way=way: mx.vjp(way, arrays, [slope])[1] for way in ways], 4)
    console.print(
        f"{rows} x {queries} x {positions}: MLX {forward[0]:.1f} ms, in blocks {forward[1]:.1f},"
        f" ratio {forward[0] / forward[1]:.2f}; with gradient {gradient[0]:.1f}, {gradient[1]:.1f},"
        f" {gradient[0] / gradient[1]:.2f}"
    )


def first_tokens(prompts: list[tuple[int, int]], console: Console) -> None:
    takes = routing.takes
    with tempfile.TemporaryDirectory() as directory:
        path = save_bench_model(
            Path(directory) / "model", endless=True, max_position_embeddings=CONTEXT
        )
        engine = make_engine(path, "auto")
        for count, length in prompts:

            def run(blocks: bool, count: int = count, length: int = length) -> None:
                routing.takes = takes if blocks else lambda *_: False  # type: ignore[assignment]  # the other way
                params = SamplingParams(max_tokens=1, temperature=1.0, ignore_eos=True, seed=1)
                for i, prompt in enumerate(bench_prompts(count, length, 1)):
                    engine.add(Request(f"r{i}", tuple(prompt), params))
                while engine.has_work:
                    engine.step()

            plain, blocks = least(
                [lambda: run(False), lambda: run(True)], 6 if length < 1000 else 1
            )
            console.print(
                f"{count} x {length} tokens to the first: MLX {plain:.0f} ms, in blocks"
                f" {blocks:.0f}, ratio {plain / blocks:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    configure_logging(level="error")
    console = Console(width=120)
    for shape in SHAPES[:2] if small else SHAPES:
        layer(*shape, console)
    first_tokens(list(PROMPTS[:3] if small else PROMPTS), console)


if __name__ == "__main__":
    main()

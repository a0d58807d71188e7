"""Measure what a 4,000-token prompt costs other requests: with chunks of prefill between decode
steps, and in one piece.

One stream runs; the long prompt comes; BESIDE_S later, while it is being computed, a 32-token
request. Measured in the same process, rounds of the two kinds alternating: the longest gap between
two tokens of the stream, the time to the first token of the short request, and that of the long one
(the price of chunking). With `builtin:tiny`, whose context ends before: what is measured is time.
The requests go through the engine thread as the server's do.

    .venv/bin/python scripts/bench/stall.py
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import mlx_parallm  # noqa: F401 - puts a fast BLAS under MLX before MLX is imported

# isort: split
from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.starting import engine_options
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.types import Request, SamplingParams
from mlx_parallm.weights import SharedWeights

LONG, SHORT = 4000, 32
BESIDE_S = 0.05
TINY = ModelConfig(base_path="builtin:tiny")
names = itertools.count()


def start(prefill_chunk: int) -> EngineThread:
    """An engine of its own; without a prefix cache, or the second round would compute nothing."""
    loaded = load_model(TINY)
    weights = SharedWeights(loaded.model, keep_versions=1)
    lora = prepare_for_serving(loaded.model)
    plain = engine_options(ServerConfig(), loaded, deterministic=False)
    options = replace(
        plain, max_model_len=2 * LONG, prefill_chunk=prefill_chunk, prefix_cache_bytes=0
    )
    tokenizer = load_tokenizer(loaded.path, TINY)
    models = ServedModels("tiny", adapter_versions=dict, version=lambda: 0)
    thread = EngineThread(lambda: Engine(loaded.model, tokenizer, weights, lora, options), models)
    thread.start()
    return thread


async def times(client: EngineClient, prompt_tokens: int, tokens: int) -> list[float]:
    """When it was asked, then when each token came."""
    prompt = tuple(random.randrange(90) for _ in range(prompt_tokens))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    moments = [time.perf_counter()]
    async for delta in client.stream(Request(f"r{next(names)}", prompt, params)):
        moments += [time.perf_counter()] * len(delta.token_ids)
    return moments


async def one_round(client: EngineClient, chunks: int) -> tuple[float, float, float]:
    """Seconds: longest gap of the stream, first token of the short request, of the long one."""
    stream = asyncio.create_task(times(client, SHORT, 60 + 2 * chunks))
    await asyncio.sleep(BESIDE_S)
    long = asyncio.create_task(times(client, LONG, 1))
    await asyncio.sleep(BESIDE_S)
    sent, first, *_ = await times(client, SHORT, 2)
    began, ended = await long
    moments = (await stream)[1:]
    gap = max(later - earlier for earlier, later in itertools.pairwise(moments))
    return gap, first - sent, ended - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    kinds = {arguments.chunk: start(arguments.chunk), LONG + 96: start(LONG + 96)}
    results: dict[int, list[tuple[float, float, float]]] = {chunk: [] for chunk in kinds}
    for turn in range(arguments.rounds + 1):
        for chunk, thread in kinds.items():
            measured = asyncio.run(one_round(thread.client, LONG // chunk))
            if turn:  # the first round warms up
                results[chunk].append(measured)
    for thread in kinds.values():
        thread.stop()
    chunked, whole = (list(zip(*rounds, strict=True)) for rounds in results.values())
    texts = (
        "longest gap of a stream",
        f"first token, {SHORT} tokens beside it",
        f"first token, {LONG} tokens",
    )
    for text, with_chunks, without in zip(texts, chunked, whole, strict=True):
        print(f"{text}: {_report(with_chunks, without, arguments.chunk)}")


def _report(with_chunks: Sequence[float], without: Sequence[float], chunk: int) -> str:
    ratios = [b / a for a, b in zip(with_chunks, without, strict=True)]
    rounds = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    a, b = statistics.median(with_chunks), statistics.median(without)
    median = statistics.median(ratios)
    return (
        f"{a:.2f} s with chunks of {chunk}, {b:.2f} s in one piece:"
        f" {median:.1f} times (rounds {rounds})"
    )


if __name__ == "__main__":
    main()

"""Many adapters at once on a real server: speed against one adapter and the base alone, loads and
unloads under load, memory, and whether each answers as it does alone.

    .venv/bin/python -m scripts.bench.adapters --model builtin:tiny --model build/smollm2/float32

One `mlx_parallm serve` a model, on an idle machine. Adapters of rank 8 on all linear layers are
drawn, written, and loaded over HTTP. Greedy answers to prompts of 16 tokens.

    speed      N rows under N adapters, under one, and under none, in turns; ratios within a round
    exactness  the ids of the largest batch against those of each request alone
    loads      streams, quiet and then while adapters are loaded and unloaded without pause: tokens a
               second, and the longest time between two tokens of a stream
    memory     the process's, by adapter: loaded, and after all of them were in one batch
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx

from mlx_parallm.config.load import load_config
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.lora import linear_shapes, save_adapter
from tests.soak.attack_target import PORT, Server

assert mlx_parallm.__version__

MB = 1 << 20
PROMPT = 16
STREAMS = 8
Answer = tuple[int, ...]


@dataclass
class Loads:
    """What streams and loads saw: seconds between tokens, and seconds of each load."""

    gaps: list[float]
    tokens_per_s: float
    loads: list[float]


def write_adapters(model: str, folder: Path, count: int, rank: int) -> int:
    """Write `count` adapters into folders of their numbers; return the bytes of one's arrays."""
    loaded = load_model(load_config(None, [f"model.base_path={model}"]).model).model
    shapes = {path: shape for path, shape in linear_shapes(loaded).items() if len(shape) == 2}
    del loaded
    size = 0
    for number in range(count):
        keys = iter(mx.random.split(mx.random.key(number), 2 * len(shapes)))
        layers = {
            path: LoraPair(
                mx.random.normal((inputs, rank), key=next(keys)) * inputs**-0.5,
                mx.random.normal((rank, outputs), key=next(keys)) * 0.05,
                2.0,
            )
            for path, (inputs, outputs) in shapes.items()
        }
        (folder / str(number)).mkdir(parents=True)
        save_adapter(folder / str(number), layers, num_layers=len(shapes))
        size = sum(pair.a.nbytes + pair.b.nbytes for pair in layers.values())
    return size


class Bench:
    """A server whose adapters are called a0, a1, …, and its clients."""

    def __init__(self, server: Server, http: httpx.AsyncClient, tokens: int) -> None:
        self.server, self._http, self._tokens = server, http, tokens
        self._process = psutil.Process(server.process.pid)

    @property
    def held(self) -> int:
        """MB of the process."""
        return int(self._process.memory_info().rss) // MB

    async def load(self, name: str, number: int) -> float:
        """Return the seconds that it took."""
        began = time.perf_counter()
        body = {"lora_name": name, "lora_path": str(self.server.roots / str(number))}
        (await self._http.post("/v1/load_lora_adapter", json=body)).raise_for_status()
        return time.perf_counter() - began

    async def unload(self, name: str) -> None:
        body = {"lora_name": name}
        (await self._http.post("/v1/unload_lora_adapter", json=body)).raise_for_status()

    async def answer(self, model: str, prompt: Sequence[int]) -> Answer:
        body = self._body(model, prompt) | {"return_token_ids": True}
        reply = (await self._http.post("/v1/completions", json=body)).raise_for_status().json()
        return tuple(reply["choices"][0]["token_ids"])

    async def answers(
        self, models: Sequence[str], prompts: Sequence[Sequence[int]]
    ) -> tuple[list[Answer], float]:
        """Return the answers of one batch, and its tokens a second."""
        began = time.perf_counter()
        asked = [self.answer(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
        answers = list(await asyncio.gather(*asked))
        return answers, len(answers) * self._tokens / (time.perf_counter() - began)

    async def stream(self, model: str, prompt: Sequence[int]) -> list[float]:
        """Return when each token came."""
        times = []
        body = self._body(model, prompt) | {"stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return times

    def _body(self, model: str, prompt: Sequence[int]) -> dict[str, Any]:
        common = {"max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        return common | {"model": model, "prompt": list(prompt)}


def drawn(count: int, draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(3, 50) for _ in range(PROMPT)] for _ in range(count)]


async def speed(bench: Bench, count: int, rounds: int, draw: random.Random) -> str:
    """A line of the table."""
    contenders = {
        "adapters": [f"a{number}" for number in range(count)],
        "one": ["a0"] * count,
        "base": ["default"] * count,
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        prompts = drawn(count, draw)
        for name, models in contenders.items():
            _, rate = await bench.answers(models, prompts)
            if turn:  # the first warms up
                rates[name].append(rate)

    def ratio(over: str, under: str) -> str:
        each = [a / b for a, b in zip(rates[over], rates[under], strict=True)]
        return f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"

    numbers = " | ".join(f"{statistics.median(rates[name]):.0f}" for name in contenders)
    ratios = (ratio("adapters", "one"), ratio("adapters", "base"), ratio("one", "base"))
    return f"| {count} | {numbers} | {' | '.join(ratios)} |"


async def exactness(bench: Bench, count: int, draw: random.Random) -> str:
    """How many of the answers of one batch are those of each request alone."""
    names, prompts = [f"a{number}" for number in range(count)], drawn(count, draw)
    together, _ = await bench.answers(names, prompts)
    alone = [await bench.answer(n, prompt) for n, prompt in zip(names, prompts, strict=True)]
    base = [await bench.answer("default", prompt) for prompt in prompts]
    equal = sum(a == b for a, b in zip(together, alone, strict=True))
    unlike = sum(a != b for a, b in zip(together, base, strict=True))
    return f"exactness: {equal} of {count} answers are those alone; {unlike} are not the base's"


async def loads(
    bench: Bench, count: int, seconds: float, draw: random.Random, *, busy: bool
) -> Loads:
    """Streams under adapters, one after the other, and with `busy` others that come and go."""
    until = time.perf_counter() + seconds

    async def client(number: int) -> list[list[float]]:
        times = []
        while time.perf_counter() < until:
            [prompt] = drawn(1, draw)
            times.append(await bench.stream(f"a{number % count}", prompt))
        return times

    clients = [asyncio.create_task(client(number)) for number in range(STREAMS)]
    taken: list[float] = []
    while busy and time.perf_counter() < until:
        taken.append(await bench.load("passing", len(taken) % count))
        await bench.answer("passing", drawn(1, draw)[0])
        await bench.unload("passing")
    times = [each for client in clients for each in await client]
    gaps = [after - before for each in times for before, after in pairwise(each)]
    whole = max(each[-1] for each in times) - min(each[0] for each in times)
    return Loads(gaps, sum(map(len, times)) / whole, taken)


async def measure(arguments: argparse.Namespace, model: str, folder: Path) -> None:
    most, draw = max(arguments.adapters), random.Random(0)
    size = write_adapters(model, folder / "adapters", most, arguments.rank)
    command = ("mlx_parallm", "serve", "--model-path", model, "--port", PORT)
    settings = (
        f"server.batch_size={most + 1}",
        f"server.max_loaded_adapters={most + 1}",
        "server.prefix_cache_bytes=0",
    )
    server = Server(folder, *settings, command=command)
    limits = httpx.Limits(max_connections=most + STREAMS + 2)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=900, limits=limits) as http:
            bench = Bench(server, http, arguments.tokens)
            await bench.answers(["default"] * most, drawn(most, draw))
            memory = [bench.held]
            took = [await bench.load(f"a{number}", number) for number in range(most)]
            memory.append(bench.held)
            await bench.answers([f"a{number}" for number in range(most)], drawn(most, draw))
            memory.append(bench.held)
            print(f"\n## {model}, rank {arguments.rank}, {arguments.tokens} tokens\n")
            print("| rows | tok/s, an adapter each | one adapter | base | each / one | each / base"
                  " | one / base |\n|---|---|---|---|---|---|---|")  # fmt: skip
            for count in arguments.adapters:
                print(await speed(bench, count, arguments.rounds, draw), flush=True)
            print("\n" + await exactness(bench, most, draw), flush=True)
            quiet, busy = [
                await loads(bench, most, arguments.seconds, draw, busy=busy)
                for busy in (False, True)
            ]
            for name, seen in (("quiet", quiet), ("adapters come and go", busy)):
                middle, longest = statistics.median(seen.gaps), max(seen.gaps)
                print(
                    f"{STREAMS} streams, {name}: {seen.tokens_per_s:.0f} tok/s, between two tokens"
                    f" {1e3 * middle:.0f} ms (median), {1e3 * longest:.0f} (longest);"
                    f" {len(seen.loads)} loads"
                    + (f", {1e3 * statistics.median(seen.loads):.0f} ms each" if seen.loads else "")
                )
            loaded, stacked = memory[1] - memory[0], memory[2] - memory[1]
            print(
                f"memory: {memory[0]} MB; {most} adapters of {size / MB:.1f} MB:"
                f" {loaded / most:.1f} MB each loaded ({1e3 * statistics.median(took):.0f} ms),"
                f" {stacked / most:.1f} MB each more once all were in one batch"
            )
    finally:
        server.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32, 100])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15, help="of streams, quiet and busy")
    arguments = parser.parse_args()
    for model in arguments.model:
        with tempfile.TemporaryDirectory(prefix="adapters_") as name:
            asyncio.run(measure(arguments, model, Path(name)))


if __name__ == "__main__":
    main()

"""Scored groups a second that /atropos/scored_data takes while the engine serves, and what that
costs the engine.

    .venv/bin/python -m scripts.bench.ingest --rounds 3

Groups are 8 sequences of 256 tokens, gzip as BaseEnv sends them, over four connections of a process
of its own; each is on the disk (synchronous=FULL) before its answer. The load on the engine is
eight completions at a time, from another process. Each round: the load alone, the load and groups
at --rate, the load and groups as fast as they are taken, groups alone. Then one group's way through
the server, stage by stage, on an idle machine.
"""

import argparse
import gzip
import http.client
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx

import mlx_parallm  # the fast BLAS comes before MLX
from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import Serving
from mlx_parallm.faces.atropos.queue import AtroposQueue, AtroposSettings
from mlx_parallm.faces.atropos.routes import create_atropos_router
from mlx_parallm.faces.atropos.wire import ScoredData, from_scored_data
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.rollout_store.payload import encode_group
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights
from scripts.bench.models import VOCAB, save_bench_model

assert mlx_parallm.__version__

GROUP, TOKENS, PROMPT = 8, 256, 64
CONNECTIONS, CLIENTS = 4, 8
SHAPES = 20
"""Groups that are different all through; what is sent differs from the others of its shape in
the scores."""


@dataclass(frozen=True)
class Taken:
    """The counts of the senders of groups: groups answered "received", and milliseconds until
    each answer."""

    groups: int
    seconds: float
    waits_ms: list[float]

    @property
    def rate(self) -> float:
        return self.groups / self.seconds


def unfinished_group(generator: random.Random) -> bytes:
    """The JSON of a group but for its scores."""
    tokens = [[generator.randrange(VOCAB) for _ in range(TOKENS)] for _ in range(GROUP)]
    masked = [-100] * PROMPT
    data = {
        "tokens": tokens,
        "masks": [masked + row[PROMPT:] for row in tokens],
        "inference_logprobs": [
            [1.0] * PROMPT + [-generator.expovariate(1.0) for _ in range(TOKENS - PROMPT)]
            for _ in range(GROUP)
        ],
        "env_id": None,
    }
    return json.dumps(data).encode()[:-1]


def bodies(seed: int, count: int) -> list[bytes]:
    """So many different groups, packed."""
    generator = random.Random(seed)
    shapes = [unfinished_group(generator) for _ in range(SHAPES)]
    scores = [json.dumps([generator.random() for _ in range(GROUP)]).encode() for _ in range(count)]
    return [
        gzip.compress(generator.choice(shapes) + b', "scores": ' + row + b"}", 1) for row in scores
    ]


def send_groups(
    url: str, seed: int, seconds: float, rate: float, ready: Event, results: Any
) -> None:
    """A process: CONNECTIONS threads that send one group after the other; `rate` groups a
    second, 0 = at once."""
    prepared = bodies(seed, int(seconds * (rate or 400)))
    todo, lock, waits = iter(prepared), threading.Lock(), list[float]()
    deadline = 0.0

    def work() -> None:
        parts = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        due = time.perf_counter()
        while time.perf_counter() < deadline:
            with lock:
                content = next(todo, None)
            if content is None:
                return
            started = time.perf_counter()
            connection.request("POST", "/atropos/scored_data", content, headers)
            reply = connection.getresponse()
            answer = reply.read()
            assert reply.status == 200 and json.loads(answer)["status"] == "received", answer
            waits.append(1e3 * (time.perf_counter() - started))
            if rate:
                due += CONNECTIONS / rate
                time.sleep(max(0.0, due - time.perf_counter()))

    ready.set()
    started = time.perf_counter()
    deadline = started + seconds
    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((len(waits), time.perf_counter() - started, waits))


def ask_until(url: str, stop: Event) -> None:
    """A process: CLIENTS completions at a time, all the while."""

    def work(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not stop.is_set():
                body = {"prompt": [number + 1] * 32, "max_tokens": 64, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Bench:
    def __init__(self, serving: Serving, seconds: float) -> None:
        self._serving, self._seconds = serving, seconds
        self._context = multiprocessing.get_context("spawn")
        self._seeds = iter(range(1_000_000))

    @contextmanager
    def load(self) -> Iterator[None]:
        stop = self._context.Event()
        process = self._context.Process(
            target=ask_until, args=(self._serving.url, stop), daemon=True
        )
        process.start()
        try:
            while self._serving.client.stats().running < CLIENTS:
                assert process.is_alive(), "the load's process has ended"
                time.sleep(0.05)
            yield
        finally:
            stop.set()
            process.join()

    def engine_rate(self) -> float:
        """Tokens a second over the window."""
        before, started = self._serving.client.stats().generation_tokens, time.perf_counter()
        time.sleep(self._seconds)
        return (self._serving.client.stats().generation_tokens - before) / (
            time.perf_counter() - started
        )

    def groups(self, rate: float) -> tuple[Taken, float]:
        """Send groups at a rate. Return what was taken, and the engine's tokens a second
        meanwhile."""
        ready, results = self._context.Event(), self._context.Queue()
        arguments = (self._serving.url, next(self._seeds), self._seconds, rate, ready, results)
        process = self._context.Process(target=send_groups, args=arguments, daemon=True)
        process.start()
        while not ready.wait(1.0):
            assert process.is_alive(), "the senders' process has ended"
        tokens = self.engine_rate()
        taken = Taken(*results.get(timeout=60))
        process.join()
        return taken, tokens


@contextmanager
def server(model: str, directory: Path) -> Iterator[tuple[Serving, RolloutStore]]:
    options = [f"model.base_path={model}", "server.port=0", "server.request_timeout_s=0"]
    serving = Serving(load_config(None, options))
    store = RolloutStore(directory / "rollouts.sqlite")
    settings = AtroposSettings(
        1024, TOKENS, VOCAB, "checkpoints", 1, 100, None, None, 1.0, "reject"
    )
    queue = AtroposQueue(store, settings, current_step=lambda: 0, policy_version=lambda: 0)
    try:
        serving.listen(routers=[create_atropos_router(queue)])
        loaded = serving.load()
        serving.open(
            loaded, SharedWeights(loaded.model, keep_versions=1), adapters={}, main_adapter=None
        )
        yield serving, store
    finally:
        serving.close()
        store.close()


def stages(store: RolloutStore, times: int = 40) -> dict[str, float]:
    """Median milliseconds of each stage of one group's way, in one thread."""
    packed = bodies(-1, times)
    unpacked = [zlib.decompress(body, zlib.MAX_WBITS | 16) for body in packed]
    values = [json.loads(body) for body in unpacked]
    groups = [from_scored_data(value, policy_version=0, environment="bench") for value in values]

    def timed(function: Callable[[Any], Any], arguments: list[Any]) -> float:
        measured = []
        for argument in arguments:
            started = time.perf_counter()
            function(argument)
            measured.append(1e3 * (time.perf_counter() - started))
        return statistics.median(measured)

    return {
        "gunzip": timed(lambda body: zlib.decompress(body, zlib.MAX_WBITS | 16), packed),
        "JSON": timed(json.loads, unpacked),
        "wire → group": timed(
            lambda value: from_scored_data(value, policy_version=0, environment="bench"), values
        ),
        "  of that pydantic": timed(ScoredData.model_validate, values),
        "checks": timed(
            lambda group: check_group(group, vocab_size=VOCAB, max_token_length=TOKENS), groups
        ),
        "store (packed, fsynced)": timed(lambda group: store.add(group, source="bench"), groups),
        "  of that packing": timed(encode_group, groups),
    }


def fsync_ms(directory: Path, size: int = 32 << 10, times: int = 40) -> float:
    """Median of a write of a group's size and its fsync, in this directory."""
    measured = []
    with (directory / "probe").open("wb", buffering=0) as file:
        for _ in range(times):
            started = time.perf_counter()
            file.write(os.urandom(size))
            os.fsync(file.fileno())
            measured.append(1e3 * (time.perf_counter() - started))
    return statistics.median(measured)


def show(name: str, taken: list[Taken], shares: list[float]) -> None:
    waits = sorted(wait for one in taken for wait in one.waits_ms)
    rates = [one.rate for one in taken]
    text = (
        f"{name}: {statistics.median(rates):.0f} groups/s (rounds"
        f" {', '.join(f'{rate:.0f}' for rate in rates)})"
    )
    text += (
        f", answer after {statistics.median(waits):.1f} ms, p99 {waits[int(0.99 * len(waits))]:.1f}"
    )
    if shares:
        listed = ", ".join(f"{share:.2f}" for share in shares)
        text += (
            f"; the engine keeps {statistics.median(shares):.2f} of its tokens/s (rounds {listed})"
        )
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the benchmarks' random model of 29 M parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rate", type=float, default=50)
    args = parser.parse_args()
    configure_logging(level="warning")
    # on a disk, which /tmp may not be
    with tempfile.TemporaryDirectory(dir="checkpoints") as name, mlx_thread():
        directory = Path(name)
        model = args.model or str(save_bench_model(directory / "model", endless=True))
        with server(model, directory) as (serving, store):
            bench = Bench(serving, args.seconds)
            alone, slow, fast, idle = list[float](), list[Any](), list[Any](), list[Any]()
            for _ in range(args.rounds):
                with bench.load():
                    alone.append(bench.engine_rate())
                    slow.append(bench.groups(args.rate))
                    fast.append(bench.groups(0))
                    alone[-1] = (alone[-1] + bench.engine_rate()) / 2
                idle.append(bench.groups(0))
            print(f"engine alone: {', '.join(f'{rate:.0f}' for rate in alone)} tokens/s")
            for text, runs in ((f"asked for {args.rate:g}/s", slow), ("flat out", fast)):
                shares = [tokens / whole for (_, tokens), whole in zip(runs, alone, strict=True)]
                show(text, [taken for taken, _ in runs], shares)
            show("flat out, engine idle", [taken for taken, _ in idle], [])
            print(
                "write + fsync of 32 KiB here:"
                f" {fsync_ms(directory):.2f} ms; one group, one thread:"
            )
            for stage, milliseconds in stages(store).items():
                print(f"  {milliseconds:6.2f} ms  {stage}")


if __name__ == "__main__":
    main()

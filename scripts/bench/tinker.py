"""Eight models at once against one, and 2,000 samples in flight, over Tinker's routes on `builtin:tiny`.

    .venv/bin/python -m scripts.bench.tinker models     tokens/s of 8 models together / of one; each equals itself alone
    .venv/bin/python -m scripts.bench.tinker samples    none lost; how long GET /api/v1/healthz takes meanwhile

The server is a process of its own. Both sides of a ratio are measured in turns.
"""

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from scripts.tinker.recipes import server
from tests.tinker.serving import API, WireClient

MODELS, STEPS, ROUNDS = 8, 3, 3
SAMPLES = 2000


def data(seed):
    rng = np.random.default_rng(seed)
    made = []
    for count in rng.integers(40, 120, 16):
        tokens, targets = rng.integers(3, 300, (2, count))
        made.append({"tokens": tokens, "target_tokens": targets, "weights": np.full(count, 0.01)})
    return made


def train(client, jobs):
    """Steps of (model, first seq_id, seed), all sent before any result is asked for. Returns tokens/s."""
    started, promises, tokens = time.perf_counter(), [], 0
    for step in range(STEPS):
        for model, first, seed in jobs:
            batch = data(seed + step)
            tokens += sum(len(each["tokens"]) for each in batch)
            promises.append(client.send(model, first + 2 * step, batch, "cross_entropy"))
            promises.append(client.optim_step(model, first + 2 * step + 1, learning_rate=1e-3))
    for promise in promises:
        client.result(promise)
    return tokens / (time.perf_counter() - started)


def final_loss(client, model, seq_id):
    return client.output(client.send(model, seq_id, data(0), "cross_entropy", forward_only=True)).metrics["loss:sum"]


def models(url):
    with httpx.Client(base_url=url, timeout=120) as http:
        client = WireClient(http)
        ranks = [4, 8, 16, 4, 8, 16, 4, 8]
        together = [client.create_model(i, rank=ranks[i], seed=i) for i in range(MODELS)]
        alone = client.create_model(99, rank=8, seed=99)
        warm = client.create_model(98, rank=8, seed=98)
        train(client, [(warm, 1, 0)])
        one, many, width = [], [], 2 * STEPS
        for number in range(ROUNDS):
            one += [train(client, [(alone, 1 + width * number, 0)])]
            many += [train(client, [(m, 1 + width * number, 100 * i) for i, m in enumerate(together)])]
        ratio = statistics.median(many) / statistics.median(one)
        print(f"tokens/s: one model {statistics.median(one):.0f}, eight {statistics.median(many):.0f}: {ratio:.2f}")
        worst = 0.0
        for i, model in enumerate(together):
            twin = client.create_model(200 + i, rank=ranks[i], seed=i)
            for number in range(ROUNDS):
                train(client, [(twin, 1 + width * number, 100 * i)])
            seq_id = 1 + width * ROUNDS
            a, b = final_loss(client, model, seq_id), final_loss(client, twin, seq_id)
            worst = max(worst, abs(a - b) / abs(b))
            client.post("unload_model", model_id=twin)
        print(f"each against itself trained alone: losses apart by {worst:.1e} (relative)")
        return int(worst > 1e-5)


def healthz(url, done, longest):
    """In a process of its own: a client that is busy would measure itself."""
    seconds = []
    with httpx.Client(base_url=url, timeout=120) as http:
        while not done.is_set():
            started = time.perf_counter()
            http.get(f"{API}/healthz")
            seconds.append(time.perf_counter() - started)
            time.sleep(0.02)  # the pace at which it looks
    ordered = sorted(1e3 * each for each in seconds)
    longest.put((ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1]))


async def collect(http, sampler):
    """Begin all samples, then fetch each when `retrieve_futures` says that it is there. Returns how many came."""

    places = asyncio.Semaphore(100)  # as many requests as connections: httpx's queue costs the square of its length

    async def begin(number):
        body = {"sampling_session_id": sampler, "seq_id": number, "sampling_params": {"max_tokens": 24, "stop": []}}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [1, *range(40, 60), 40 + number % 200]}]}
        async with places:
            return (await http.post(f"{API}/asample", json=body)).json()["request_id"]

    async def fetch(request_id):
        async with places:
            answer = await http.post(f"{API}/retrieve_future", json={"request_id": request_id})
        return answer.headers["content-type"] == "application/x-protobuf"

    waiting = set(await asyncio.gather(*(begin(number) for number in range(SAMPLES))))
    begun, cursor, came = len(waiting), 0, 0
    while waiting:
        body = {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor}
        answer = (await http.post(f"{API}/retrieve_futures", json=body)).json()
        cursor = answer["cursor"]
        ready = [each["request_id"] for each in answer["completions"]]
        came += sum(await asyncio.gather(*map(fetch, ready)))
        waiting -= set(ready)
    return begun, came


async def samples(url):
    with httpx.Client(base_url=url, timeout=120) as plain:
        client = WireClient(plain)
        sampler = client.live_sampler(client.create_model(), 1, 0)
    context = multiprocessing.get_context("spawn")
    done, longest = context.Event(), context.Queue()
    watch = context.Process(target=healthz, args=(url, done, longest))
    watch.start()
    limits = httpx.Limits(max_connections=101)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        started = time.perf_counter()
        begun, came = await collect(http, sampler)
        wall = time.perf_counter() - started
    done.set()
    middle, high, most = longest.get()
    watch.join()
    print(
        f"{came} of {begun} samples in {wall:.1f} s; healthz median {middle:.0f} ms, 99 % {high:.0f} ms, {most:.0f} ms"
    )
    return int(came != SAMPLES)


def main(what):
    with tempfile.TemporaryDirectory() as scratch:
        process, url = server(Path(scratch))
        try:
            return models(url) if what == "models" else asyncio.run(samples(url))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Mixed load for minutes, an adapter published every second: failed requests, and whether memory stays where it was.

    .venv/bin/python -m scripts.soak.soak --minutes 20 --figure docs/benchmarks/soak.png

The real HTTP server on the shipped tiny model (or --model) in this process; clients in processes of their own ask
everything at once (streams, groups, chats, long texts, scores, stop strings, hang-ups) with max_retries=0 and count
what they got. The main thread plays the trainer. Resident memory, MLX's active and cached memory are sampled every
second; the slope is a least-squares line over all but the first fifth, its uncertainty from the means of 20 blocks
(seconds that follow each other are not independent).
"""

import argparse
import copy
import multiprocessing
import random
import time
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil

import mlx_parallm  # the fast BLAS comes before MLX
from mlx_parallm.config.load import load_config
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.daemon import Serving
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import adapter_layers, inject_lora
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights

assert mlx_parallm.__version__

MB = 1 << 20
SERIES = ("resident", "active", "cached")
BLOCKS = 20
Counts = dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--set", nargs="*", default=["server.prefix_cache_bytes=16777216"], help="full within a minute")
    args = parser.parse_args()
    import mlx.core as mx

    configure_logging(level="warning")
    serving = Serving(load_config(None, [f"model.base_path={args.model}", "server.port=0", *args.set]))
    serving.listen()
    loaded = serving.load()
    trainer = copy.deepcopy(loaded.model)
    inject_lora(trainer, LoraConfig(rank=8, alpha=16.0))
    layers = adapter_layers(trainer)
    weights = SharedWeights(loaded.model, policy="policy", keep_versions=1)
    serving.open(loaded, weights, adapters={"policy": layers}, main_adapter="policy")
    context = multiprocessing.get_context("spawn")
    stop, results, ready = context.Event(), context.Queue(), context.Barrier(args.clients + 1)
    clients = [
        context.Process(target=ask_until, args=(serving.url, seed, ready, stop, results))
        for seed in range(args.clients)
    ]
    for client in clients:
        client.start()
    try:
        ready.wait(300)  # they have imported what they need
        samples = publish_and_sample(weights, layers, args.minutes * 60)
        stop.set()
        counts = [results.get(timeout=120) for _ in clients]
        check_at_rest(serving)
    finally:
        stop.set()
        for client in clients:
            client.join()
        serving.close()
        mx.synchronize()
        mx.clear_streams()
    report(args, samples, counts, weights.version)


def publish_and_sample(
    weights: SharedWeights, layers: dict[str, LoraPair], seconds: float
) -> list[tuple[float, float, float, float]]:
    """(seconds, resident, active, cached) in MB, one a publish."""
    import mlx.core as mx

    process, begun, samples = psutil.Process(), time.monotonic(), []
    while (now := time.monotonic() - begun) < seconds:
        changed = {
            path: LoraPair(pair.a, mx.random.normal(pair.b.shape) * 0.02, pair.scale) for path, pair in layers.items()
        }
        mx.eval([pair.b for pair in changed.values()])
        weights.publish_adapter(changed)
        memory = (process.memory_info().rss, mx.get_active_memory(), mx.get_cache_memory())
        samples.append((now, memory[0] / MB, memory[1] / MB, memory[2] / MB))
        time.sleep(max(0.0, begun + len(samples) - time.monotonic()))
    return samples


def check_at_rest(serving: Serving) -> None:
    """Nothing runs, waits or is left over."""
    assert serving.client.wait_idle(60)
    serving.client.call(lambda engine: engine.check_integrity()).result(60)
    stats = serving.client.stats()
    assert (stats.alive, stats.running, stats.waiting) == (True, 0, 0), stats
    assert httpx.get(serving.url + "/health").status_code == 200


def ask_until(url: str, seed: int, ready: Barrier, stop: Event, results: "multiprocessing.Queue[Counts]") -> None:
    """One client: request after request of a random kind."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    generator, counts = random.Random(seed), {"asked": 0, "failed": 0, "hung up": 0, "tokens": 0}
    ready.wait(300)
    while not stop.is_set():
        counts["asked"] += 1
        try:
            ask(client, generator, counts)
        except openai.OpenAIError as error:
            counts["failed"] += 1
            print("failed:", repr(error)[:300], flush=True)
    results.put(counts)


def ask(client: openai.OpenAI, generator: random.Random, counts: Counts) -> None:
    words = " ".join(generator.choice(["Sort: hgfa", "Reverse: abc", "1 + 2 =", "é🙂"]) for _ in range(4))
    model = generator.choice(["policy", "builtin:tiny:base", "default"])
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": generator.randint(1, 48),
        "extra_body": {"ignore_eos": True},
    }
    messages: Any = [{"role": "user", "content": words * generator.choice([1, 1, 1, 12])}]
    kind = generator.choice(["stream", "stream", "hang up", "group", "chat", "score", "stop", "long"])
    if kind in ("stream", "hang up"):
        stream = client.chat.completions.create(messages=messages, stream=True, **common)
        for number, _ in enumerate(stream):
            counts["tokens"] += 1
            if kind == "hang up" and number == 3:
                counts["hung up"] += 1
                stream.close()
                return
        return
    if kind == "chat":
        answer: Any = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **common)
    elif kind == "group":
        answer = client.completions.create(prompt=words, n=8, seed=generator.randrange(99), logprobs=1, **common)
    elif kind == "long":  # 50 to 1,800 tokens, of which others have sent the first ones too
        text = "abcdefgh" * round(7 * 32 ** generator.random()) + words
        answer = client.completions.create(prompt=text, n=generator.choice([1, 4, 8]), **common)
    elif kind == "score":
        answer = client.completions.create(prompt=words, echo=True, logprobs=1, **(common | {"max_tokens": 0}))
    else:
        answer = client.completions.create(prompt=[words, "a b"], stop=["a", "1"], temperature=0.7, **common)
    counts["tokens"] += answer.usage.completion_tokens


def slope(times: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """MB an hour: the least-squares line through the means of BLOCKS blocks, and its standard error."""
    x = np.array([block.mean() for block in np.array_split(times, BLOCKS)]) / 3600
    y = np.array([block.mean() for block in np.array_split(values, BLOCKS)])
    centred = x - x.mean()
    rise = float(centred @ y / (centred @ centred))
    left = y - y.mean() - rise * centred
    return rise, float(np.sqrt(left @ left / (BLOCKS - 2) / (centred @ centred)))


def report(
    args: argparse.Namespace, samples: list[tuple[float, float, float, float]], counts: list[Counts], version: int
) -> None:
    total = {key: sum(each[key] for each in counts) for key in counts[0]}
    print(
        f"{args.minutes:g} minutes, {args.clients} clients on {args.model}: "
        f"{total['asked']} requests, {total['failed']} failed, {total['hung up']} hung up on purpose, "
        f"{total['tokens']} tokens, {version} versions published"
    )
    table = np.array(samples)
    steady = table[len(table) // 5 :]
    lines = []
    for column, name in enumerate(SERIES, 1):
        rise, error = slope(steady[:, 0], steady[:, column])
        spread = steady[:, column].std()
        lines.append(f"{name}: {steady[:, column].mean():.0f} MB, {rise:+.1f} ± {2 * error:.1f} MB/h (95 %)")
        print(f"{lines[-1]}, standard deviation {spread:.1f} MB")
    if args.figure:
        draw(args, table, lines, total["failed"])
    raise SystemExit(bool(total["failed"]))


def draw(args: argparse.Namespace, table: np.ndarray, lines: list[str], failed: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for column, label in enumerate(lines, 1):
        axes.plot(table[:, 0] / 60, table[:, column], label=label, linewidth=1)
    axes.set(xlabel="minutes", ylabel="MB", ylim=(0, None))
    axes.set_title(f"{args.model}, {args.clients} clients, a publish every second: {failed} failed requests")
    axes.legend(loc="center right")
    figure.savefig(args.figure, dpi=110)


if __name__ == "__main__":
    main()

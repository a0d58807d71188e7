"""Mixed load for minutes, an adapter published every second: failed requests, and whether memory
stays where it was.

    .venv/bin/python -m tests.soak.soak --minutes 20 --figure docs/benchmarks/soak.png

The real HTTP server in this process, on the shipped tiny weights with a context of 8,192 tokens (or
on --model); clients in processes of their own ask everything at once (streams, groups, chats, texts
of 50 to 7,000 tokens, scores, stop strings, hang-ups) with max_retries=0 and count what they got.
The main thread plays the trainer. Twice a minute all clients rest: then nothing may run, wait or be
left over (`check_integrity`, no keys and values held), and the memory at rest is noted. Resident
memory, MLX's active and cached memory are sampled every second; the slope is a least-squares line
over all but the first fifth, its uncertainty from the means of 20 blocks (seconds that follow each
other are not independent).
"""

import argparse
import copy
import json
import multiprocessing
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
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
CONTEXT = 8192
REST_EVERY_S = 30.0
Counts = dict[str, int]
Sample = tuple[float, float, float, float]  # seconds, and the megabytes of SERIES


@dataclass(frozen=True)
class Signals:
    """Between this process and its clients."""

    ready: Barrier  # all processes have started; later: all clients rest, and all continue
    rest: Event
    stop: Event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--model", help="a directory or hub id with a context of 8,192 tokens")
    parser.add_argument("--figure", type=Path)
    parser.add_argument(
        "--set",
        nargs="*",
        default=["server.prefix_cache_bytes=16777216"],
        help="full within a minute",
    )
    args = parser.parse_args()
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory() as directory:
        args.model = args.model or long_context_model(Path(directory) / "tiny")
        soak(args)


def long_context_model(directory: Path) -> str:
    """The shipped weights under a longer context: their texts make no sense there, which nobody
    reads."""
    shutil.copytree(Path(mlx_parallm.__file__).parent / "models" / "tiny", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": CONTEXT})
    )
    return str(directory)


def soak(args: argparse.Namespace) -> None:
    import mlx.core as mx

    serving = Serving(
        load_config(None, [f"model.base_path={args.model}", "server.port=0", *args.set])
    )
    serving.listen()
    loaded = serving.load()
    trainer = copy.deepcopy(loaded.model)
    inject_lora(trainer, LoraConfig(rank=8, alpha=16.0))
    layers = adapter_layers(trainer)
    weights = SharedWeights(loaded.model, policy="policy", keep_versions=1)
    serving.open(loaded, weights, adapters={"policy": layers}, main_adapter="policy")
    context = multiprocessing.get_context("spawn")
    signals = Signals(context.Barrier(args.clients + 1), context.Event(), context.Event())
    results = context.Queue()
    clients = [
        context.Process(target=ask_until, args=(serving.url, args.model, seed, signals, results))
        for seed in range(args.clients)
    ]
    for client in clients:
        client.start()
    try:
        signals.ready.wait(300)  # they have imported what they need
        samples, at_rest = publish_and_sample(serving, weights, layers, args.minutes * 60, signals)
        signals.stop.set()
        counts = [results.get(timeout=120) for _ in clients]
        check_at_rest(serving)
    finally:
        signals.stop.set()
        signals.ready.abort()
        for client in clients:
            client.join()
        serving.close()
        mx.synchronize()
        mx.clear_streams()
    report(args, samples, at_rest, counts, weights.version)


def publish_and_sample(
    serving: Serving,
    weights: SharedWeights,
    layers: dict[str, LoraPair],
    seconds: float,
    signals: Signals,
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples of the load, one a publish, and those at rest."""
    import mlx.core as mx

    begun = time.monotonic()
    samples: list[Sample] = []
    at_rest: list[Sample] = []
    next_rest, next_publish = REST_EVERY_S, 0.0
    while (now := time.monotonic() - begun) < seconds:
        changed = {
            path: LoraPair(pair.a, mx.random.normal(pair.b.shape) * 0.02, pair.scale)
            for path, pair in layers.items()
        }
        mx.eval([pair.b for pair in changed.values()])
        weights.publish_adapter(changed)
        samples.append(sample(now))
        if now >= next_rest:
            signals.rest.set()
            signals.ready.wait(300)
            check_at_rest(serving)
            at_rest.append(sample(time.monotonic() - begun))
            signals.rest.clear()
            signals.ready.wait(300)
            next_rest = next_publish = time.monotonic() - begun
            next_rest += REST_EVERY_S
        next_publish += 1.0
        time.sleep(max(0.0, begun + next_publish - time.monotonic()))  # the pace of the publishes
    return samples, at_rest


def sample(seconds: float) -> Sample:
    import mlx.core as mx

    resident = psutil.Process().memory_info().rss
    return seconds, resident / MB, mx.get_active_memory() / MB, mx.get_cache_memory() / MB


def check_at_rest(serving: Serving) -> None:
    """Nothing runs, waits or is left over, and no memory of keys and values is held once the
    engine has gone idle."""
    assert serving.client.wait_idle(60)
    serving.client.call(lambda engine: engine.check_integrity(), each=True).result(60)
    stats = serving.client.stats()
    assert (stats.alive, stats.running, stats.waiting) == (True, 0, 0), stats
    assert httpx.get(serving.url + "/health").status_code == 200
    serving.client.call(lambda engine: engine.release_memory(), each=True).result(60)
    assert not serving.client.stats().kv_bytes, "keys and values of no sequence"


def ask_until(
    url: str, model: str, seed: int, signals: Signals, results: "multiprocessing.Queue[Counts]"
) -> None:
    """One client: request after request of a random kind."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    generator, counts = random.Random(seed), {"asked": 0, "failed": 0, "hung up": 0, "tokens": 0}
    signals.ready.wait(300)
    while not signals.stop.is_set():
        if signals.rest.is_set():
            signals.ready.wait(300)  # all rest
            signals.ready.wait(300)  # all continue
        counts["asked"] += 1
        try:
            ask(client, model, generator, counts)
        except openai.OpenAIError as error:
            counts["failed"] += 1
            print("failed:", repr(error)[:300], flush=True)
    results.put(counts)


def ask(client: openai.OpenAI, base: str, generator: random.Random, counts: Counts) -> None:
    words = " ".join(
        generator.choice(["Sort: hgfa", "Reverse: abc", "1 + 2 =", "é🙂"]) for _ in range(4)
    )
    model = generator.choice(["policy", f"{base}:base", "default"])
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": generator.randint(1, 48),
        "extra_body": {"ignore_eos": True},
    }
    messages: Any = [{"role": "user", "content": words * generator.choice([1, 1, 1, 12])}]
    kind = generator.choice(
        ["stream", "stream", "hang up", "group", "chat", "score", "stop", "long"]
    )
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
        answer: Any = client.chat.completions.create(
            messages=messages, logprobs=True, top_logprobs=3, **common
        )
    elif kind == "group":
        answer = client.completions.create(
            prompt=words, n=8, seed=generator.randrange(99), logprobs=1, **common
        )
    elif kind == "long":  # 50 to 7,000 tokens, of which others have sent the first ones too
        text = "abcdefgh" * round(7 * 125 ** generator.random()) + words
        common["max_tokens"] = round(400 ** generator.random())
        answer = client.completions.create(prompt=text, n=generator.choice([1, 4, 8]), **common)
    elif kind == "score":
        answer = client.completions.create(
            prompt=words, echo=True, logprobs=1, **(common | {"max_tokens": 0})
        )
    else:
        answer = client.completions.create(
            prompt=[words, "a b"], stop=["a", "1"], temperature=0.7, **common
        )
    counts["tokens"] += answer.usage.completion_tokens


def slope(times: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """MB an hour: the least-squares line through the means of BLOCKS blocks, and its standard
    error."""
    blocks = min(BLOCKS, len(times))
    x = np.array([block.mean() for block in np.array_split(times, blocks)]) / 3600
    y = np.array([block.mean() for block in np.array_split(values, blocks)])
    centred = x - x.mean()
    rise = float(centred @ y / (centred @ centred))
    left = y - y.mean() - rise * centred
    return rise, float(np.sqrt(left @ left / (blocks - 2) / (centred @ centred)))


def report(
    args: argparse.Namespace,
    samples: list[Sample],
    at_rest: list[Sample],
    counts: list[Counts],
    version: int,
) -> None:
    total = {key: sum(each[key] for each in counts) for key in counts[0]}
    print(
        f"{args.minutes:g} minutes, {args.clients} clients on {args.model}: {total['asked']}"
        f" requests, {total['failed']} failed, {total['hung up']} hung up on purpose, "
        f"{total['tokens']} tokens, {version} versions published, {len(at_rest)} rests checked"
    )
    table = np.array(samples)
    lines = trends(table)
    if len(at_rest) > 4:
        trends(np.array(at_rest), "at rest, ")
    if args.figure:
        draw(args, table, lines, total["failed"])
    raise SystemExit(bool(total["failed"]))


def trends(table: np.ndarray, state: str = "") -> list[str]:
    """Print a line for each of SERIES; return them without the deviation."""
    steady = table[len(table) // 5 :]
    lines = []
    for column, name in enumerate(SERIES, 1):
        rise, error = slope(steady[:, 0], steady[:, column])
        spread = steady[:, column].std()
        lines.append(
            f"{state}{name}: {steady[:, column].mean():.0f} MB, {rise:+.1f}"
            f" ± {2 * error:.1f} MB/h (95 %)"
        )
        print(f"{lines[-1]}, standard deviation {spread:.1f} MB")
    return lines


def draw(args: argparse.Namespace, table: np.ndarray, lines: list[str], failed: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for column, label in enumerate(lines, 1):
        axes.plot(table[:, 0] / 60, table[:, column], label=label, linewidth=1)
    axes.set(xlabel="minutes", ylabel="MB", ylim=(0, None))
    axes.set_title(
        f"{args.model}, {args.clients} clients, a publish every second: {failed} failed requests"
    )
    axes.legend(loc="center right")
    figure.savefig(args.figure, dpi=110)


if __name__ == "__main__":
    main()

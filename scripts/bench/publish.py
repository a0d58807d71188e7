"""Measure what a publish costs while the server streams: lock times, bytes copied, failed requests.

    .venv/bin/python -m scripts.bench.publish --publishes 200 --clients 8

A 30 M parameter random model with an all-linear rank-16 adapter, served by the real HTTP server in
this process; clients in processes of their own stream answers all the while and count what they
got. The main thread plays the
trainer: new adapter arrays, evaluated, published.
"""

import argparse
import copy
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
import openai

import mlx_parallm  # the fast BLAS comes before MLX
from mlx_parallm.config.load import load_config
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.daemon import Serving
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import adapter_layers, inject_lora
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights
from scripts.bench.models import save_bench_model

assert mlx_parallm.__version__


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--publishes", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    import mlx.core as mx

    configure_logging(level="warning")
    with tempfile.TemporaryDirectory() as directory:
        path = save_bench_model(Path(directory) / "model")
        serving = Serving(load_config(None, [f"model.base_path={path}", "server.port=0"]))
        serving.listen()
        loaded = serving.load()
        trainer = copy.deepcopy(loaded.model)
        inject_lora(trainer, LoraConfig(rank=args.rank, alpha=2.0 * args.rank))
        layers = adapter_layers(trainer)
        mx.eval([array for pair in layers.values() for array in (pair.a, pair.b)])
        weights = SharedWeights(loaded.model, policy="policy", keep_versions=1)
        serving.open(loaded, weights, adapters={"policy": layers}, main_adapter="policy")
        context = multiprocessing.get_context("spawn")
        stop, counts = context.Event(), context.Queue()
        clients = [
            context.Process(target=stream_until, args=(serving.url, stop, counts))
            for _ in range(args.clients)
        ]
        for client in clients:
            client.start()
        while httpx.get(serving.url + "/metrics").text.count(
            "mlx_parallm_generation_tokens_total 0.0"
        ):
            time.sleep(0.1)
        reports, grown = [], []
        for number in range(args.publishes):
            layers = {
                path: LoraPair(pair.a, pair.b + 1e-4, pair.scale) for path, pair in layers.items()
            }
            mx.eval([pair.b for pair in layers.values()])
            before = mx.get_active_memory()
            reports.append(weights.publish_adapter(layers))
            grown.append(mx.get_active_memory() - before)
            time.sleep(0.02 if number % 2 else 0.05)
        stop.set()
        results = [counts.get() for _ in clients]
        for client in clients:
            client.join()
        serving.close()
        mx.synchronize()
        mx.clear_streams()
    arrays, size = 2 * len(layers), sum(pair.a.nbytes + pair.b.nbytes for pair in layers.values())
    print(
        f"{args.publishes} publishes of {arrays} arrays, {size / 1e6:.1f} MB, {args.clients}"
        " streaming clients"
    )
    for name in ("lock_wait_ms", "lock_held_ms", "total_ms"):
        values = sorted(getattr(report, name) for report in reports)
        p99 = values[int(0.99 * len(values))]
        print(f"{name:13} p50 {statistics.median(values):.3f}  p99 {p99:.3f}  max {values[-1]:.3f}")
    # Serving allocates and frees meanwhile, so single differences move both ways; a copy would show
    # in the median.
    print(
        f"active memory over a publish: median {statistics.median(grown):+.0f}"
        f" bytes (a copy would be {size:+d})"
    )
    answered, failed = sum(r[0] for r in results), sum(r[1] for r in results)
    versions = sorted(v for r in results for v in r[2])
    print(
        f"requests {answered}, failed {failed}, policy versions seen {versions[0]} … {versions[-1]}"
    )


def stream_until(
    url: str, stop: Event, counts: "multiprocessing.Queue[tuple[int, int, list[int]]]"
) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answered, failed, versions = 0, 0, []
    while not stop.is_set():
        try:
            stream = client.completions.create(
                model="default", prompt="hello", max_tokens=32, stream=True
            )
            spans = [(chunk.model_extra or {}).get("policy_version") for chunk in stream]
            versions += [span for span in spans if span is not None]
            answered += 1
        except openai.OpenAIError as error:
            print(error)
            failed += 1
    counts.put((answered, failed, versions))


if __name__ == "__main__":
    main()

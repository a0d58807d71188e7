"""Tokens a second through the real HTTP server, divided by the ceiling loop (`ceiling.py`) at the same batch.

A random 29 M parameter Qwen3 is written in Hugging Face layout with a byte-pair tokenizer of its 8192 ids and served as
the daemon serves it. The clients are a process of their own: each of `--clients` keeps one connection and sends its
requests one after the other. Rounds of ceiling and server alternate, so that a busy neighbour hits both.

    .venv/bin/python scripts/bench/serving.py --clients 8 --clients 32
    .venv/bin/python scripts/bench/serving.py --clients 16 --group 16 --prompt 400     # identical prompts
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

import mlx_parallm  # noqa: F401 - puts a fast BLAS under MLX before MLX is imported

OUTPUT = 64


async def client_main(url: str, prompts: list[list[int]], requests: int, stream: bool) -> dict[str, float]:
    """One task a prompt; returns seconds and tokens received, as counted here."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        (await http.get("/health")).raise_for_status()
        started = time.perf_counter()
        counts = await asyncio.gather(*[_one_client(http, prompt, requests, stream) for prompt in prompts])
        return {"seconds": time.perf_counter() - started, "tokens": sum(counts)}


async def _one_client(http: httpx.AsyncClient, prompt: list[int], requests: int, stream: bool) -> int:
    received = 0
    for turn in range(requests):
        body = {
            "model": "default",
            "prompt": [turn, *prompt[1:]],
            "max_tokens": OUTPUT,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": stream,
        }
        if stream:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            received += len(choice.get("token_ids") or ())
        else:
            response = await http.post("/v1/completions", json=body)
            response.raise_for_status()
            received += len(response.json()["choices"][0]["token_ids"])
    return received


def measure(clients: int, arguments: argparse.Namespace, directory: Path) -> None:
    from mlx_parallm.config import parse_config
    from mlx_parallm.models.loading import load_model
    from mlx_parallm.serving import Serving
    from mlx_parallm.weights import SharedWeights
    from scripts.bench.ceiling import ceiling_rate
    from scripts.bench.models import bench_prompts

    config = parse_config(
        {"server": {"port": 0, "batch_size": max(clients, 8)}, "model": {"base_path": str(directory)}}
    )
    plain = load_model(config.model).model
    distinct = bench_prompts(clients // arguments.group, arguments.prompt)
    prompts = [prompt for prompt in distinct for _ in range(arguments.group)]
    serving = Serving(config)
    try:
        serving.listen()
        loaded = serving.load()
        serving.open(loaded, SharedWeights(loaded.model), adapters={}, main_adapter=None)
        ceilings, served = [], []
        for turn in range(arguments.rounds + 1):
            ceiling = ceiling_rate(plain, prompts, OUTPUT)
            rate = _served_rate(serving.url, prompts, arguments)
            if turn:  # the first round warms up
                ceilings.append(ceiling)
                served.append(rate)
        stats = serving.client.stats()
    finally:
        serving.close()
    ratios = [rate / ceiling for rate, ceiling in zip(served, ceilings, strict=True)]
    print(
        f"{clients} clients: ceiling {statistics.median(ceilings):.0f} tok/s, served {statistics.median(served):.0f},"
        f" ratio {statistics.median(ratios):.3f} (rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)});"
        f" prefill tokens {stats.prefill_tokens} of {stats.prompt_tokens}"
    )


def _served_rate(url: str, prompts: list[list[int]], arguments: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--client", url, "--requests", str(arguments.requests)]
    command += ["--stream"] if arguments.stream else []
    result = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=True)
    report = json.loads(result.stdout)
    assert report["tokens"] == len(prompts) * arguments.requests * OUTPUT, "tokens were lost"
    return float(report["tokens"] / report["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, action="append", help="may be given several times (8, 32)")
    parser.add_argument("--requests", type=int, default=2, help="of each client, one after the other")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=51, help="tokens of a prompt")
    parser.add_argument("--group", type=int, default=1, help="clients that send the same prompt")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)  # the child process
    arguments = parser.parse_args()
    if arguments.client:
        prompts = json.load(sys.stdin)
        report = asyncio.run(client_main(arguments.client, prompts, arguments.requests, arguments.stream))
        print(json.dumps(report))
        return
    from mlx_parallm.log import configure_logging
    from scripts.bench.models import save_bench_model

    configure_logging(level="warning")
    with tempfile.TemporaryDirectory() as directory:
        save_bench_model(Path(directory))
        for clients in arguments.clients or [8, 32]:
            measure(clients, arguments, Path(directory))


if __name__ == "__main__":
    main()

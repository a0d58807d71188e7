"""Tokens a second of /v1/responses and /v1/messages over /v1/chat/completions, the same work
through each in turns.

    .venv/bin/python -m scripts.bench.apis            # about 3 minutes

A random 29 M parameter Qwen3 answers 16 clients at once, whole and streamed, 64 tokens each time.
Server and clients are one process, so what a client reads costs the server too. In every round each
API runs once, in another order each time; the ratio of a round is within the round. Round 0 warms
up and is not counted.
"""

import argparse
import asyncio
import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from scripts.bench.models import save_bench_model  # the fast BLAS comes before MLX
from scripts.bench.serving import our_server

# isort: split
from mlx_parallm.system.log import configure_logging

WANTED = 0.97  # of the chat route
CLIENTS, ANSWERS, TOKENS, WORDS = 16, 2, 64, 10
Body = dict[str, Any]


def chat(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}


def responses(text: str) -> Body:
    return {"input": text, "max_output_tokens": TOKENS}


def messages(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}


APIS: dict[str, Callable[[str], Body]] = {
    "chat/completions": chat,
    "responses": responses,
    "messages": messages,
}


async def rate(url: str, api: str, texts: list[str], streamed: bool) -> float:
    """Tokens a second. Raises AssertionError: an answer is not whole."""
    shared: Body = {"model": "default", "ignore_eos": True, "stream": streamed}
    if streamed and api == "chat/completions":
        shared["stream_options"] = {"include_usage": True}
    bodies = [json.dumps(APIS[api](text) | shared).encode() for text in texts]
    queue = iter(bodies)
    limits = httpx.Limits(max_connections=CLIENTS)
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, headers=headers) as http:

        async def client() -> None:
            for body in queue:
                answer = await http.post(f"/v1/{api}", content=body)
                assert answer.status_code == 200, answer.text
                assert f'_tokens":{TOKENS}' in answer.text.replace(" ", ""), answer.text[-300:]

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return len(bodies) * TOKENS / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    configure_logging(level="error")
    source = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        save_bench_model(Path(directory) / "model", endless=True)
        with our_server(Path(directory) / "model") as url:
            lowest = 1.0
            for streamed in (False, True):
                rates: dict[str, list[float]] = {api: [] for api in APIS}
                for turn in range(args.rounds + 1):
                    order = sorted(APIS, key=lambda _: source.random())
                    for api in order:
                        texts = [
                            " ".join(
                                "".join(source.choices(string.ascii_lowercase, k=5))
                                for _ in range(WORDS)
                            )
                            for _ in range(CLIENTS * ANSWERS)
                        ]
                        measured = asyncio.run(rate(url, api, texts, streamed))
                        if turn:
                            rates[api].append(measured)
                base = rates["chat/completions"]
                for api, values in rates.items():
                    ratios = [value / other for value, other in zip(values, base, strict=True)]
                    print(
                        f"{'streamed' if streamed else 'whole':9}{api:18}{statistics.median(values):8.0f} tok/s"
                        f"   {statistics.median(ratios):.3f} of chat ({min(ratios):.3f} to"
                        f" {max(ratios):.3f})",
                        flush=True,
                    )
                    lowest = min(lowest, statistics.median(ratios))
    if lowest < WANTED:
        raise SystemExit(f"wanted: {WANTED} of chat")


if __name__ == "__main__":
    main()

"""Time to the first token of a long prompt after a restart, with prefixes on disk and without, and
what writing them costs a decode.

    .venv/bin/python -m scripts.bench.prefix_disk --model build/smollm2/float32 --tokens 4000 --rounds 3

Real servers (`mlx_parallm serve`), one at a time on an idle machine; the prompt's tokens are drawn
anew for each round. The first server computes the prompt and is killed; the second reads it. The
cost of writing: tokens a second of one stream while prompts of others are written, with a disk and
without, in turns.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.soak.attack_target import PORT, Server

WARM = [1] * 8  # a prompt that warms the server up
OFF = "server.prefix_disk_bytes=0"


@contextmanager
def serving(model: str, folder: Path, *settings: str) -> Iterator[Server]:
    command = ("mlx_parallm", "serve", "--model-path", model, "--port", PORT)
    server = Server(folder, *settings, command=command)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def first_token(server: Server, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and how many of the prompt's were computed."""
    body = {"model": "default", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    began, took, usage = time.perf_counter(), 0.0, {}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if event["choices"] and not took:
                    took = time.perf_counter() - began
                usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return took, usage["prompt_tokens"] - cached


def decode_rate(server: Server, vocabulary: int, draw: random.Random, tokens: int) -> float:
    """Tokens a second of one stream, from its first token on."""
    prompt = [draw.randrange(vocabulary) for _ in range(16)]
    body: dict[str, Any] = {"model": "default", "prompt": prompt, "max_tokens": tokens,
                            "ignore_eos": True, "stream": True}  # fmt: skip
    times = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return (tokens - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decoded", type=int, default=400, help="tokens of the decode's stream")
    chosen = parser.parse_args()
    config = json.loads((Path(chosen.model) / "config.json").read_text())
    draw, vocabulary = random.Random(0), int(config["vocab_size"]) - 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        disk = ("server.prefix_disk_bytes=20000000000", f"server.prefix_disk='{folder / 'disk'}'")
        ratios = []
        for number in range(chosen.rounds):
            prompt = [draw.randrange(vocabulary) for _ in range(chosen.tokens)]
            with serving(chosen.model, folder, *disk) as server:
                first_token(server, WARM)
                computed, all_tokens = first_token(server, prompt)
                first_token(server, WARM)  # its blocks are written behind it
                written = _settled(folder / "disk")
            with serving(chosen.model, folder, *disk) as server:
                first_token(server, WARM)
                read, left = first_token(server, prompt)
            ratios.append(read / computed)
            print(
                f"round {number}: computed {computed:.2f} s ({all_tokens} tokens), read"
                f" {read:.3f} s ({left} computed): {ratios[-1]:.3f}; {written / 1e6:.0f} MB",
                flush=True,
            )
        print(f"time to the first token, read / computed: {statistics.median(ratios):.3f}")
        rates: dict[str, list[float]] = {"disk": [], "without": []}
        with (
            serving(chosen.model, folder / "a", *disk) as on,
            serving(chosen.model, folder / "b", OFF) as off,
        ):
            for _ in range(2 * chosen.rounds + 1):
                rates["disk"].append(decode_rate(on, vocabulary, draw, chosen.decoded))
                rates["without"].append(decode_rate(off, vocabulary, draw, chosen.decoded))
        pairs = [a / b for a, b in zip(rates["disk"][1:], rates["without"][1:], strict=True)]
        print(f"decode, with / without: {statistics.median(pairs):.3f} ({pairs})")


def _settled(folder: Path) -> int:
    """Return the bytes of the files once no more are written."""
    before = -1
    while (size := sum(path.stat().st_size for path in folder.rglob("*.safetensors"))) != before:
        before = size
        time.sleep(0.5)
    return size


if __name__ == "__main__":
    main()

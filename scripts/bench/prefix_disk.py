"""Time to the first token of a long prompt after a restart, with prefixes on disk and without, and
what writing them costs a decode.

    .venv/bin/python -m scripts.bench.prefix_disk --model build/smollm2/float32 --tokens 4000 --rounds 3

Real servers (`mlx_parallm serve`), one at a time on an idle machine; the prompt's tokens are drawn
anew for each round. The first server computes the prompt and is killed; the second reads it.

    .venv/bin/python -m scripts.bench.prefix_disk --model build/smollm2/float32 --only writing --rounds 6

What writing costs: the time of one stream beside a client that sends eight prompts one after the
other, so that blocks are written all the while; a server with a disk and one without have the same
work, in turns, and each pair begins with the other one.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from tests.soak.attack_target import PORT, Server

WARM = [1] * 8  # a prompt that warms the server up
OFF = "server.prefix_disk_bytes=0"
LOST = ("prefix_disk_dropped_bytes_total", "prefix_disk_refused_files_total")


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


@dataclass
class Load:
    """One stream, and prompts beside it, which are computed before it ends."""

    stream: list[int]
    tokens: int  # of the stream's answer
    prompts: list[list[int]]

    def seconds(self, server: Server) -> tuple[float, float]:
        """Return the seconds from the stream's first token to its last one, and what of them was
        left when the last prompt was computed."""
        times: list[float] = []
        ended = 0.0
        feeding = Thread(target=lambda: self._feed(server))
        body: dict[str, Any] = {"model": "default", "prompt": self.stream,
                                "max_tokens": self.tokens, "ignore_eos": True,
                                "stream": True}  # fmt: skip
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=3600) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                times.append(time.perf_counter())
                if len(times) == 1:
                    feeding.start()
                if not ended and not feeding.is_alive():
                    ended = times[-1]
        feeding.join()
        return times[-1] - times[0], times[-1] - ended if ended else 0.0

    def _feed(self, server: Server) -> None:
        for prompt in self.prompts:
            body = {"model": "default", "prompt": prompt, "max_tokens": 1}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=3600).raise_for_status()


def writing(chosen: argparse.Namespace, folder: Path, disk: Sequence[str]) -> None:
    """Print the time of a stream without a disk ÷ with one, in pairs."""
    draw, vocabulary = random.Random(1), _vocabulary(chosen.model)
    pairs = []
    with (
        serving(chosen.model, folder / "a", *disk) as on,
        serving(chosen.model, folder / "b", OFF) as off,
    ):
        for number in range(chosen.rounds + 1):
            prompts = [
                [draw.randrange(vocabulary) for _ in range(chosen.beside)]
                for _ in range(chosen.prompts)
            ]
            stream = [draw.randrange(vocabulary) for _ in range(16)]
            load = Load(stream, chosen.decoded, prompts)
            before = on.metric("prefix_disk_used_bytes")
            order = [on, off] if number % 2 else [off, on]
            found = {id(server): load.seconds(server) for server in order}
            written = (on.metric("prefix_disk_used_bytes") - before) / 1e6
            (with_disk, left), (without, _) = found[id(on)], found[id(off)]
            if not number:
                continue  # both warm up
            pairs.append(without / with_disk)
            print(
                f"pair {number}: {with_disk:.2f} s with a disk ({written:.0f} MB written, the last"
                f" {left:.1f} s beside no prompt), {without:.2f} s without: {pairs[-1]:.3f}",
                flush=True,
            )
        lost = {name: on.metric(name) for name in LOST}
    print(f"decode while blocks are written, with / without: {statistics.median(pairs):.3f}")
    print("not written:", ", ".join(f"{name} {count:.0f}" for name, count in lost.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("reading", "writing"))
    parser.add_argument("--decoded", type=int, default=400, help="tokens of the timed stream")
    parser.add_argument("--prompts", type=int, default=8, help="of a client beside it")
    parser.add_argument("--beside", type=int, default=1056, help="tokens of each")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        disk = ("server.prefix_disk_bytes=20000000000", f"server.prefix_disk='{folder / 'disk'}'")
        if chosen.only != "writing":
            reading(chosen, folder, disk)
        if chosen.only != "reading":
            writing(chosen, folder, disk)


def reading(chosen: argparse.Namespace, folder: Path, disk: Sequence[str]) -> None:
    """Print the time to the first token after a restart ÷ that of computing the prompt."""
    draw, vocabulary, ratios = random.Random(0), _vocabulary(chosen.model), []
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


def _vocabulary(model: str) -> int:
    config = json.loads((Path(model) / "config.json").read_text())
    return int(config["vocab_size"]) - 1


def _settled(folder: Path) -> int:
    """Return the bytes of the files once no more are written."""
    before = -1
    while (size := sum(path.stat().st_size for path in folder.rglob("*.safetensors"))) != before:
        before = size
        time.sleep(0.5)
    return size


if __name__ == "__main__":
    main()

"""Conversations of an agent with a server that is killed again and again: the answers are those of a
server without any prefix cache, and most tokens of the prompts are read from memory or disk.

    .venv/bin/python -m tests.soak.prefix_disk --conversations 200 --turns 8 --kills 20

Real processes of `mlx_parallm serve` with the shipped tiny model, or `--model`, kill -9 while a turn is answered, read or
written; the client asks again. Each turn's prompt is the whole conversation so far. An answer counts as equal if its ids are, up to a place where the two best
log-probabilities are within the engine's contract of each other (1e-4, docs/serving.md).
"""

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.progress import track

from tests.soak.attack_target import PORT, Server

TIE = 2e-4
SYSTEM = 150  # tokens that all conversations of one agent begin with
AGENTS = 8
ANSWER = 12


@dataclass
class Counts:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    differing: list[str] = field(default_factory=list)
    kills: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


def ask(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def first_difference(mine: dict[str, Any], its: dict[str, Any]) -> str | None:
    """Return what differs between two answers; None: nothing, or one of two tied tokens."""
    [a], [b] = mine["choices"], its["choices"]
    for place, (x, y) in enumerate(zip(a["token_ids"], b["token_ids"], strict=True)):
        if x != y:
            best = sorted(b["logprobs"]["top_logprobs"][place].values())[-2:]
            gap = best[1] - best[0]
            return None if gap <= TIE else f"token {place}: {x}, and {y} without ({gap:.1e})"
    return None


def converse(
    servers: "Servers", conversations: int, turns: int, kills: int, seed: int = 0
) -> Counts:
    draw, counts = random.Random(seed), Counts()
    most = servers.vocabulary
    agents = [[draw.randrange(3, most) for _ in range(SYSTEM)] for _ in range(AGENTS)]
    dying = set(draw.sample(range(conversations * turns), kills))
    texts = [list(draw.choice(agents)) for _ in range(conversations)]
    schedule = [number for number in range(conversations) for _ in range(turns)]
    order = sorted(range(len(schedule)), key=lambda i: (i % turns, draw.random()))
    for step, index in enumerate(track(order, "turns")):
        text = texts[schedule[index]]
        text += [draw.randrange(3, most) for _ in range(draw.randrange(4, 20))]
        began = time.monotonic()
        plain = ask(servers.plain.url, text)
        if step in dying:
            servers.kill_amid(text, draw.random() * 1.2 * (time.monotonic() - began))
            counts.kills += 1
        answer = ask(servers.cached.url, text)
        if (difference := first_difference(answer, plain)) is not None:
            counts.differing.append(f"conversation {schedule[index]}, {difference}")
        usage = answer["usage"]
        counts.prompt_tokens += usage["prompt_tokens"]
        counts.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        text += answer["choices"][0]["token_ids"]
    return counts


class Servers:
    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self.killed_amid = 0  # before the answer had come
        self._command = ("mlx_parallm_serve", "--model-path", model, "--port", PORT)
        config = Path(model) / "config.json"
        self.vocabulary = json.loads(config.read_text())["vocab_size"] if config.exists() else 280
        self.plain = Server(folder / "plain", "server.prefix_cache_bytes=0", command=self._command)
        try:
            self.cached = self._start()
        except BaseException:
            self.plain.end()
            raise

    def _start(self) -> Server:
        disk = self._folder / "prefixes"
        return Server(
            self._folder / "cached",
            "server.prefix_disk_bytes=2000000000",
            f"server.prefix_disk='{disk}'",
            command=self._command,
        )

    def kill_amid(self, prompt: list[int], seconds: float) -> None:
        """Kill the server so long after a prompt was sent, whether it was answered or not."""
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(ask, self.cached.url, prompt)
            wait([asked], seconds)
            self.killed_amid += not asked.done()
            self.cached.process.kill()
            self.cached.process.wait()
            if (error := asked.exception()) is not None and not isinstance(error, httpx.HTTPError):
                raise error
        self.cached = self._start()

    def end(self) -> None:
        self.cached.end()
        self.plain.end()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", default="builtin:tiny")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder), chosen.model)
        try:
            counts = converse(servers, chosen.conversations, chosen.turns, chosen.kills)
            corrupt = servers.cached.metric("prefix_disk_corrupt_files")
            on_disk = servers.cached.metric("prefix_disk_used_bytes") / 1e6
        finally:
            servers.end()
    print(
        f"{chosen.conversations * chosen.turns} turns, {counts.kills} kills, {servers.killed_amid} before the answer had come:"
        f" {100 * counts.hit_rate:.1f} % of {counts.prompt_tokens} prompt tokens were not computed;"
        f" {on_disk:.1f} MB on disk, {corrupt:.0f} damaged files;"
        f" {len(counts.differing)} answers differ"
    )
    print(*counts.differing[:20], sep="\n")
    return int(bool(counts.differing))


if __name__ == "__main__":
    sys.exit(main())

"""GRPO on recorded sessions: agents of two turns, scored by the feedback route; the held-out gain
over the base.

    .venv/bin/python -m scripts.bench.sessions_grpo --seeds 0 1 2 --steps 30

The agent is openai's client with `base_url=…/sessions/NAME/v1`: it asks the tiny model to reverse
four letters, then another four, and scores the session by the share of right answers. Eight
sessions of one opening are a group. Held out are 200 words that no session has; they are answered
greedily by the base and by the policy at the end.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from scripts.server_process import command, server_process

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT = 200
GROUP = 8

CONFIG = """
[server]
port = {port}
batch_size = 64
[model]
base_path = "builtin:tiny"
[traces]
directory = "{directory}/traces"
group_size = 8
[rl_training]
total_steps = {steps}
seed = {seed}
learning_rate = 2e-3
warmup_steps = 3
batch_size = 32
blocks_per_eval = 0
max_staleness = 4
checkpoint_dir = "{directory}/runs"
[rl_training.atropos]
rollout_batch_size = 64
max_token_length = 128
[logging]
level = "warning"
"""


def word(source: random.Random, held_out: bool) -> str:
    """Four letters; a held-out word ends with a vowel, one that is trained on does not."""
    while True:
        letters = "".join(source.choices(LETTERS, k=4))
        if (letters[-1] in "aeiou") == held_out:
            return letters


def question(letters: str) -> Any:
    return {"role": "user", "content": f"Reverse: {letters}"}


class Run:
    """One training run: a daemon, and agents that play until it has made its steps."""

    def __init__(self, seed: int, steps: int) -> None:
        self.source = random.Random(seed)
        self.steps, self.seed = steps, seed
        self.version = 0
        self.scores: list[float] = []

    async def accuracy(self, url: str, model: str) -> float:
        source, room = random.Random(1), asyncio.Semaphore(32)
        words = [word(source, held_out=True) for _ in range(HELD_OUT)]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:

            async def right(letters: str) -> bool:
                async with room:
                    answer = await client.chat.completions.create(
                        model=model, messages=[question(letters)], temperature=0, max_tokens=8
                    )
                return answer.choices[0].message.content == letters[::-1]

            return statistics.fmean(await asyncio.gather(*map(right, words)))

    async def session(self, url: str, name: str, words: list[str]) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/sessions/{name}/v1", api_key="none", timeout=120
        ) as client:
            messages: list[Any] = []
            right = 0
            for letters in words:
                messages.append(question(letters))
                answer: Any = await client.chat.completions.create(
                    model="default", messages=messages, max_tokens=8
                )
                content = answer.choices[0].message.content or ""
                self.version = max(self.version, answer.policy_version)
                right += content == letters[::-1]
                messages.append({"role": "assistant", "content": content})
        score = right / len(words)
        self.scores.append(score)
        async with httpx.AsyncClient(timeout=120) as http:
            (
                await http.post(f"{url}/sessions/{name}/feedback", json={"score": score})
            ).raise_for_status()

    async def play(self, url: str) -> tuple[float, float]:
        before = await self.accuracy(url, "builtin:tiny:base")
        number = 0

        async def group(number: int) -> None:
            words = [word(self.source, held_out=False) for _ in range(2)]
            await asyncio.gather(
                *(self.session(url, f"g{number}-{i}", words) for i in range(GROUP))
            )

        running: set[asyncio.Task[None]] = set()
        # one step before the end: then the server would be gone
        while self.version < self.steps - 1:
            while len(running) < 6:
                running.add(asyncio.create_task(group(number)))
                number += 1
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.gather(*running, return_exceptions=True)
        return before, await self.accuracy(url, "policy")

    def execute(self, directory: Path) -> None:
        config = directory / "train.toml"
        steps = self.steps + 20  # the server must be there for the last look

        def words(port: int) -> list[str]:
            config.write_text(
                CONFIG.format(port=port, directory=directory, steps=steps, seed=self.seed)
            )
            return [command("mlx_parallm"), "train", "--config", str(config)]

        began = time.perf_counter()
        with server_process(words, directory / "train.log") as (url, _):
            before, after = asyncio.run(self.play(url))
        first, last = statistics.fmean(self.scores[:128]), statistics.fmean(self.scores[-128:])
        print(
            f"seed {self.seed}: held out {before:.3f} → {after:.3f} ({after - before:+.3f}), score"
            " of the first 128"
            f" sessions {first:.3f}, of the last {last:.3f}, {len(self.scores)} sessions,"
            f" {time.perf_counter() - began:.0f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as directory:
            Run(seed, args.steps).execute(Path(directory))


if __name__ == "__main__":
    main()

"""The loop closed on the Responses API: an agent's runs are scored by a test command, and the
reward rises in 40 steps.

    .venv/bin/python -m scripts.bench.responses_loop --seeds 0 1 2

The agent asks the model that is being trained for a word backwards, keeps the conversation by
`previous_response_id`, and asks for a second one. What eight runs of one task were answered stands
in a file; the test is a program of its own that reads the file and prints a score for each, which
the run's session gets. Held out are 200 words that no run has; they are answered greedily by the
base and by the policy at the end.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai

from scripts.bench.sessions_grpo import CONFIG, GROUP, HELD_OUT, word
from scripts.server_process import command, server_process

TEST = (
    "import json, sys; [print(sum(a == q[::-1] for q, a in run) / len(run)) for run in"
    " json.load(open(sys.argv[1]))]"
)


async def tested(file: Path) -> list[float]:
    """The share of right answers of each run, by the test command. Raises CalledProcessError."""
    command = (sys.executable, "-I", "-S", "-c", TEST, str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return [float(line) for line in output.split()]


class Loop:
    """One training run: a daemon, and agents that work until it has made its steps."""

    def __init__(self, seed: int, steps: int, directory: Path) -> None:
        self.source = random.Random(seed)
        self.seed, self.steps, self.directory = seed, steps, directory
        self.version = 0
        self.scores: list[tuple[int, float]] = []  # version at the end, score

    async def agent(self, client: openai.AsyncOpenAI, words: list[str]) -> list[tuple[str, str]]:
        """The words that it asked for, and what it was answered."""
        turns: list[tuple[str, str]] = []
        previous: str | None = None
        for letters in words:
            answer = await client.responses.create(
                model="default",
                input=f"Reverse: {letters}",
                previous_response_id=previous,
                max_output_tokens=8,
            )
            previous = answer.id
            self.version = max(self.version, (answer.model_extra or {})["policy_version"])
            turns.append((letters, answer.output_text))
        return turns

    async def group(self, client: openai.AsyncOpenAI, url: str, number: int) -> None:
        """Eight runs of one task and their test; each score goes to its session."""
        words = [word(self.source, held_out=False) for _ in range(2)]
        names = [f"g{number}-{run}" for run in range(GROUP)]
        agents = [
            self.agent(client.with_options(base_url=f"{url}/sessions/{name}/v1"), words)
            for name in names
        ]
        file = self.directory / f"g{number}.json"
        file.write_text(json.dumps(await asyncio.gather(*agents)))
        scores = await tested(file)
        self.scores += [(self.version, score) for score in scores]

        async def give(name: str, score: float) -> None:
            await client.post(
                f"{url}/sessions/{name}/feedback", body={"score": score}, cast_to=object
            )

        await asyncio.gather(*map(give, names, scores))

    async def accuracy(self, url: str, model: str) -> float:
        source, room = random.Random(1), asyncio.Semaphore(32)
        words = [word(source, held_out=True) for _ in range(HELD_OUT)]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:

            async def right(letters: str) -> bool:
                async with room:
                    answer = await client.responses.create(
                        model=model,
                        input=f"Reverse: {letters}",
                        temperature=0,
                        max_output_tokens=8,
                        store=False,
                    )
                return answer.output_text == letters[::-1]

            return statistics.fmean(await asyncio.gather(*map(right, words)))

    async def work(self, url: str) -> tuple[float, float]:
        before = await self.accuracy(url, "builtin:tiny:base")

        number, running = 0, set[asyncio.Task[None]]()
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=120) as client:
            while self.version < self.steps:
                while len(running) < 6:
                    running.add(asyncio.create_task(self.group(client, url, number)))
                    number += 1
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            await asyncio.gather(*running, return_exceptions=True)
        return before, await self.accuracy(url, "policy")

    def execute(self) -> None:
        config = self.directory / "train.toml"
        steps = self.steps + 20  # the server must be there for the last look

        def words(port: int) -> list[str]:
            config.write_text(
                CONFIG.format(port=port, directory=self.directory, steps=steps, seed=self.seed)
            )
            return [command("mlx_parallm"), "train", "--config", str(config)]

        began = time.perf_counter()
        with server_process(words, self.directory / "train.log") as (url, _):
            before, after = asyncio.run(self.work(url))
        first = statistics.fmean(
            score for version, score in self.scores if version <= self.steps // 10
        )
        last = statistics.fmean(
            score for version, score in self.scores if version > self.steps - self.steps // 10
        )
        print(
            f"seed {self.seed}: reward of the first tenth of {self.steps} steps {first:.3f}, of"
            f" the last {last:.3f};"
            f" held out {before:.3f} → {after:.3f}; {len(self.scores)} runs,"
            f" {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        if last <= first or after <= before:
            raise SystemExit(f"seed {self.seed}: the reward did not rise")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as directory:
            Loop(seed, args.steps, Path(directory)).execute()


if __name__ == "__main__":
    main()

"""The loop closed on the Responses API: an agent's runs are scored by a test command, and the reward rises in 40 steps.

    .venv/bin/python -m scripts.bench.responses_loop --seeds 0 1 2

The agent asks the model that is being trained for a word backwards, keeps the conversation by `previous_response_id`,
and asks for a second one. What it was answered stands in a file; the test is a program of its own that reads the file
and prints which answers are right. Eight runs of one opening are a group, rewarded by their sessions. Held out are 200
words that no run has; they are answered greedily by the base and by the policy at the end.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai

from scripts.bench.sessions_grpo import CONFIG, GROUP, HELD_OUT, word

TEST = "import json, sys; turns = json.load(open(sys.argv[1])); print(json.dumps([a == q[::-1] for q, a in turns]))"


async def tested(file: Path) -> float:
    """The share of right answers, by the test command. Raises CalledProcessError."""
    command = (sys.executable, "-I", "-S", "-c", TEST, str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return statistics.fmean(json.loads(output))


class Loop:
    """One training run: a daemon, and agents that work until it has made its steps."""

    def __init__(self, seed: int, steps: int, directory: Path) -> None:
        self.source = random.Random(seed)
        self.seed, self.steps, self.directory = seed, steps, directory
        self.version = 0
        self.scores: list[tuple[int, float]] = []  # version at the end, score
        self.testing = asyncio.Semaphore(2)

    async def agent(self, url: str, name: str, words: list[str]) -> None:
        """Two turns and their test; the score goes to the session."""
        turns: list[tuple[str, str]] = []
        previous: str | None = None
        async with openai.AsyncOpenAI(base_url=f"{url}/sessions/{name}/v1", api_key="none", timeout=120) as client:
            for letters in words:
                answer = await client.responses.create(
                    model="default", input=f"Reverse: {letters}", previous_response_id=previous, max_output_tokens=8
                )
                previous = answer.id
                self.version = max(self.version, (answer.model_extra or {})["policy_version"])
                turns.append((letters, answer.output_text))
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps(turns))
        async with self.testing:
            score = await tested(file)
        self.scores.append((self.version, score))
        async with httpx.AsyncClient(timeout=120) as http:
            (await http.post(f"{url}/sessions/{name}/feedback", json={"score": score})).raise_for_status()

    async def accuracy(self, url: str, model: str) -> float:
        source, room = random.Random(1), asyncio.Semaphore(32)
        words = [word(source, held_out=True) for _ in range(HELD_OUT)]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:

            async def right(letters: str) -> bool:
                asked = {"input": f"Reverse: {letters}", "temperature": 0, "max_output_tokens": 8, "store": False}
                async with room:
                    answer = await client.responses.create(model=model, **asked)  # type: ignore[call-overload]
                return bool(answer.output_text == letters[::-1])

            return statistics.fmean(await asyncio.gather(*map(right, words)))

    async def work(self, url: str) -> tuple[float, float]:
        before = await self.accuracy(url, "builtin:tiny:base")

        async def group(number: int) -> None:
            words = [word(self.source, held_out=False) for _ in range(2)]
            await asyncio.gather(*(self.agent(url, f"g{number}-{i}", words) for i in range(GROUP)))

        number, running = 0, set[asyncio.Task[None]]()
        while self.version < self.steps:
            while len(running) < 6:
                running.add(asyncio.create_task(group(number)))
                number += 1
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.gather(*running, return_exceptions=True)
        return before, await self.accuracy(url, "policy")

    def execute(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = self.directory / "train.toml"
        steps = self.steps + 20  # the server must be there for the last look
        config.write_text(CONFIG.format(port=port, directory=self.directory, steps=steps, seed=self.seed))
        command = [str(Path(sys.executable).with_name("mlx_parallm")), "train", "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        url, began = f"http://127.0.0.1:{port}", time.perf_counter()
        try:
            while time.perf_counter() - began < 120:
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
            before, after = asyncio.run(self.work(url))
        finally:
            process.terminate()
            process.wait()
        first = statistics.fmean(score for version, score in self.scores if version <= self.steps // 10)
        last = statistics.fmean(score for version, score in self.scores if version > self.steps - self.steps // 10)
        print(
            f"seed {self.seed}: reward of the first tenth of {self.steps} steps {first:.3f}, of the last {last:.3f};"
            f" held out {before:.3f} → {after:.3f}; {len(self.scores)} runs, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        if last <= first or after <= before:
            raise SystemExit(f"seed {self.seed}: the reward did not rise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as directory:
            Loop(seed, args.steps, Path(directory)).execute()


if __name__ == "__main__":
    main()

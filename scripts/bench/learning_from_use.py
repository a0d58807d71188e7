"""Learning from use: simulated people chat with a training daemon, and say what they think of it.

    .venv/bin/python -m scripts.bench.learning_from_use --seeds 0 1 2
    .venv/bin/python -m scripts.bench.learning_from_use --seeds 0 1 2 --reversed 0.3

`builtin:tiny` is asked small things over /v1 with the header X-Feedback: learn. The person knows the
answer, and writes back: thanks, a complaint, or, in a fifth of the chats, something that says
neither. A Python function reads the replies, as a judge. `--reversed`: of so many replies a liar
writes the opposite. Satisfied is who got the right answer.

Before and after the chats the same held-out questions are asked at temperature 1 without consent, so
nothing is learned from them; p is McNemar's exact one, two-sided. The latency of a chat is taken
while the daemon learns, and in chats without consent before it does.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts.server_process import command, server_process

LETTERS = "abcdefghijklmnopqrstuvwxyz"
AT_ONCE = 8  # people
LONGEST_WAIT_S = 600.0
QUIET_CHATS = 150
THANKS = ("thanks", "great, thank you", "perfect, thanks a lot")
COMPLAINTS = ("no, that's wrong", "wrong again", "no, not at all")
NEITHER = ("and what else?", "I see", "let us go on", "hm")
JUDGE = '''
def judge(question, answer, reply):
    """A reader of replies who knows words, and says nothing where he cannot tell."""
    words = reply.lower().replace(",", " ").split()
    if "thanks" in words or "thank" in words:
        return 1.0
    return -1.0 if "no" in words or "wrong" in words else None
'''
CONFIG = """
[server]
port = {port}
batch_size = 32
[model]
base_path = "builtin:tiny"
[rl_training]
algorithm = "{algorithm}"
total_steps = 100000
seed = {seed}
learning_rate = {learning_rate}
batch_size = {batch}
update_epochs = {epochs}
blocks_per_eval = 0
max_staleness = 1000
max_grad_norm = 1.0
serve_priority = "{priority}"
checkpoint_interval = 1000
checkpoint_dir = "{directory}/runs"
run_name = "use"
[rl_training.atropos]
rollout_batch_size = {batch}
max_token_length = 128
[feedback]
enabled = true
settle_s = 0
judge = "python:{directory}/judge.py:judge"
{mean}
{guard}
[logging]
level = "warning"
"""
GUARD = """
[evaluation]
problems = 100
every = 10
max_fall = 0.05
[[evaluation.environments]]
kind = "tasks"
name = "{task}"
"""


@dataclass(frozen=True)
class Task:
    """Questions and their answers. A held-out one begins with a letter or digit that no other
    has."""

    make: Callable[[random.Random], tuple[str, str]]
    is_held_out: Callable[[str], bool]

    def question(self, source: random.Random, *, held_out: bool) -> tuple[str, str]:
        while True:
            question, answer = self.make(source)
            if self.is_held_out(question) == held_out:
                return question, answer


def _letters(source: random.Random, count: int) -> str:
    return "".join(source.choices(LETTERS, k=count))


def _reverse(source: random.Random) -> tuple[str, str]:
    letters = _letters(source, 4)
    return f"Reverse: {letters}", letters[::-1]


def _sort(source: random.Random) -> tuple[str, str]:
    letters = "".join(source.sample(LETTERS, 4))
    return f"Sort: {letters}", "".join(sorted(letters))


def _ends_with_vowel(question: str) -> bool:
    return question[-1] in "aeiou"


TASKS = {"reverse": Task(_reverse, _ends_with_vowel), "sort": Task(_sort, _ends_with_vowel)}


@dataclass
class Use:
    """One daemon, and the people who talk to it."""

    task: Task
    source: random.Random
    reversed: float
    ambiguous: float
    client: httpx.AsyncClient
    satisfied: list[bool] = field(default_factory=list)

    async def ask(
        self, messages: Sequence[Any], user: str | None, **body: Any
    ) -> tuple[str, float]:
        """Return the answer's text, and its seconds. `user` None: without consent."""
        headers = {} if user is None else {"X-Feedback": "learn", "X-Feedback-User": user}
        began = time.perf_counter()
        reply = await self.client.post(
            "/v1/chat/completions",
            json={
                "model": "default",
                "messages": list(messages),
                "max_tokens": 8,
                "priority": -1,  # which only serve_priority = "chat" heeds: all requests are chats
                **body,
            },
            headers=headers,
        )
        seconds = time.perf_counter() - began
        reply.raise_for_status()
        return reply.json()["choices"][0]["message"]["content"] or "", seconds

    async def chat(self, user: str | None) -> float:
        """One question, and what the person says to the answer; return the latency."""
        question, right = self.task.question(self.source, held_out=False)
        ask = {"role": "user", "content": question}
        text, seconds = await self.ask([ask], user)
        content = text.strip() == right
        self.satisfied.append(content)
        says_content = content != (self.source.random() < self.reversed)
        choices = THANKS if says_content else COMPLAINTS
        if self.source.random() < self.ambiguous:
            choices = NEITHER
        reply = {"role": "user", "content": self.source.choice(choices)}
        answer = {"role": "assistant", "content": text}
        await self.ask([ask, answer, reply], user, max_tokens=1)
        return seconds

    async def chats(self, number: int, *, consent: bool = True) -> list[float]:
        """Let AT_ONCE people have `number` chats together; return the latencies."""
        left = iter(range(number))
        seconds: list[float] = []

        async def person(name: str) -> None:
            for _ in left:
                seconds.append(await self.chat(name if consent else None))

        await asyncio.gather(*(person(f"user-{number}") for number in range(AT_ONCE)))
        return seconds

    async def held_out(self, number: int) -> list[bool]:
        """Ask the held-out questions; return who was satisfied."""
        source = random.Random(1)
        questions = [self.task.question(source, held_out=True) for _ in range(number)]
        room = asyncio.Semaphore(AT_ONCE)

        async def satisfied(at: int) -> bool:
            question, right = questions[at]
            async with room:
                text, _ = await self.ask([{"role": "user", "content": question}], None, seed=at)
            return text.strip() == right

        return list(await asyncio.gather(*map(satisfied, range(number))))

    async def settled(self, batch: int, run: Path) -> dict[str, Any]:
        """Wait until everything that was said has been handed over and trained on; return the
        status. Raises TimeoutError."""
        async with asyncio.timeout(LONGEST_WAIT_S):
            while True:
                status = (await self.client.get("/v1/feedback/status")).json()
                answers = status["answers"]
                trained = (run / "metrics.jsonl").read_text().count("\n") * batch
                if answers.get("ready", 0) < batch and trained >= answers.get("released", 0):
                    return dict(status)
                await asyncio.sleep(0.5)


def p_value(before: Sequence[bool], after: Sequence[bool]) -> float:
    """McNemar's exact test, two-sided: 2 · P(X <= the fewer of the pairs that changed),
    X binomial with p = 1/2. Worked: 1 worse, 5 better: 2 · (1 + 6) / 64 = 0.21875."""
    worse = sum(b and not a for b, a in zip(before, after, strict=True))
    better = sum(a and not b for b, a in zip(before, after, strict=True))
    changed = worse + better
    tail = sum(math.comb(changed, k) for k in range(min(worse, better) + 1))
    return min(1.0, 2 * tail / 2**changed)


def p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1] * 1e3


async def use(url: str, seed: int, args: argparse.Namespace, run: Path) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        people = Use(TASKS[args.task], random.Random(seed), args.reversed, args.ambiguous, client)
        before = await people.held_out(args.held_out)
        quiet = await people.chats(QUIET_CHATS, consent=False)
        people.satisfied.clear()
        began = time.perf_counter()
        learning = await people.chats(args.chats)
        took = time.perf_counter() - began
        status = await people.settled(args.batch, run)
        after = await people.held_out(args.held_out)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    back = [line["rolled_back_to"] for line in lines if line["rolled_back_to"]]
    first, last = people.satisfied[:100], people.satisfied[-100:]
    rise = statistics.fmean(after) - statistics.fmean(before)
    signals = status["signals"].get("message", {})
    return (
        f"seed {seed}: held out {statistics.fmean(before):.3f} → {statistics.fmean(after):.3f}"
        f" ({rise:+.3f}, p {p_value(before, after):.1e}); first 100 chats"
        f" {statistics.fmean(first):.2f}, last 100 {statistics.fmean(last):.2f}; {len(lines)}"
        f" updates in {took:.0f} s of chats, {len(back)} rollbacks; replies: {signals};"
        f" p95 of a chat {p95(quiet):.0f} ms before it learns, {p95(learning):.0f} ms while"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", choices=sorted(TASKS), default="reverse")
    parser.add_argument("--chats", type=int, default=500)
    parser.add_argument("--held-out", type=int, default=300)
    parser.add_argument("--ambiguous", type=float, default=0.2)
    parser.add_argument("--reversed", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument(
        "--serve-priority", choices=("balanced", "serve", "train", "chat"), default="balanced"
    )
    parser.add_argument("--epochs", type=int, default=1, help="passes over a batch")
    parser.add_argument("--guard", action="store_true", help="evaluation.max_fall")
    args = parser.parse_args()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "judge.py").write_text(JUDGE)

            def words(port: int, directory: Path = directory, seed: int = seed) -> list[str]:
                text = CONFIG.format(
                    port=port,
                    directory=directory,
                    seed=seed,
                    batch=args.batch,
                    learning_rate=args.learning_rate,
                    algorithm=args.algorithm,
                    priority=args.serve_priority,
                    epochs=args.epochs,
                    mean="" if args.algorithm == "online_kto" else "baseline_decay = 0.98",
                    guard=GUARD.format(task=args.task) if args.guard else "",
                )
                (directory / "use.toml").write_text(text)
                return [command("mlx_parallm"), "train", "--config", str(directory / "use.toml")]

            with server_process(words, directory / "train.log") as (url, _):
                print(asyncio.run(use(url, seed, args, directory / "runs" / "use")), flush=True)


if __name__ == "__main__":
    main()

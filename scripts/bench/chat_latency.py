"""A person's chat beside a training run: time to the first token, between tokens, and what it costs
the run.

    .venv/bin/python -m scripts.bench.chat_latency                       # and with a larger teacher
    .venv/bin/python -m scripts.bench.chat_latency --prompt-tokens 2000 --rollouts 16

One person at a time streams answers of --tokens tokens with a `priority` before the rollouts', and
waits --pause seconds between two. Cases, --rounds times in turns, each a process of its own:
`mlx_parallm serve` alone; the quickstart run by each `serve_priority`; the same with a teacher of four
times the student's parameters that scores every rollout (docs/distillation.md). A run's speed is its
tokens trained a second, with the person and, before they come, without.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_model
from scripts.server_process import command, server_process
from tests.tiny_models import QWEN3, save_checkpoint

ROOT = Path(__file__).parents[2]
SERVE, TAUGHT, TAUGHT_CHAT = "alone", "taught", "taught, chat"
PRIORITIES = {TAUGHT: "balanced", TAUGHT_CHAT: "chat"}
LONGEST_STEP_S = 300
WARM_STEPS = 3  # of a run, before anything is measured


@dataclass
class Measured:
    """Seconds of one case, over all its rounds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    speed_alone: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)


def four_times(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Qwen3's shape, twice as wide as the student's."""
    wide = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    kept = ("head_dim", "num_hidden_layers", "vocab_size")
    return {key: 2 * shape[key] for key in wide} | {key: shape[key] for key in kept}


def p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1] * 1e3


def words(case: str, port: int, place: Path, args: argparse.Namespace) -> list[str]:
    if case == SERVE:
        return [command("mlx_parallm"), "serve", "--model-path", args.model, "--port", str(port)]
    values = [
        f"model.base_path={json.dumps(args.model)}",
        f"server.port={port}",
        f'rl_training.checkpoint_dir="{place}"',
        'rl_training.run_name="run"',
        "rl_training.total_steps=100000",
        f"rl_training.atropos.rollout_batch_size={args.rollouts}",
        f"rl_training.batch_size={min(32, args.rollouts)}",
        "evaluation.problems=0",
        f'rl_training.serve_priority="{PRIORITIES.get(case, case)}"',
    ]
    if case in PRIORITIES:
        teacher = f'[{{name = "large", kind = "model", path = "{args.teacher}"}}]'
        values.append(f"rl_training.distillation.teachers={teacher}")
    values += args.set
    settings = [part for value in values for part in ("--set", value)]
    config = str(ROOT / "train_configs" / "quickstart.toml")
    return [command("mlx_parallm"), "train", "--config", config, *settings]


def steps(place: Path) -> list[dict[str, Any]]:
    log = place / "run" / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []


def trained_tokens(place: Path) -> float:
    return sum(line["sequences"] * line["completion_tokens_mean"] for line in steps(place))


def wait_for_steps(place: Path, number: int) -> None:
    deadline = time.monotonic() + LONGEST_STEP_S
    while len(steps(place)) < number:
        if time.monotonic() > deadline:
            raise SystemExit(f"no step in {LONGEST_STEP_S} s:\n{(place / 'log').read_text()}")
        time.sleep(0.05)  # another process's file


class Speed:
    """Tokens trained a second from a step's end to a later step's end."""

    def __init__(self, place: Path) -> None:
        self._place = place
        wait_for_steps(place, len(steps(place)) + 1)
        self._began, self._tokens = time.perf_counter(), trained_tokens(place)

    def measured(self) -> float:
        wait_for_steps(self._place, len(steps(self._place)) + 1)
        seconds = time.perf_counter() - self._began
        return (trained_tokens(self._place) - self._tokens) / seconds


async def chats(url: str, args: argparse.Namespace, case: Measured) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for number in range(args.chats + 1):
            times = [time.perf_counter()]
            async for moment in stream(client, number, args):
                times.append(moment)
            gaps = [after - before for before, after in itertools.pairwise(times)]
            if number:  # the first one compiles
                case.first.append(gaps[0])
                case.between += gaps[1:]
                case.answers.append(times[-1] - times[0])
            await asyncio.sleep(args.pause)


async def stream(client: httpx.AsyncClient, number: int, args: argparse.Namespace) -> Any:
    """Yield the moment of each token."""
    filler = "a b c d e f g h " * (args.prompt_tokens // 16)  # two tokens a letter and space
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": f"{number}: {filler}"}],
        "max_tokens": args.tokens,
        "ignore_eos": True,
        "priority": -10,
        "stream": True,
        "seed": number,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                yield time.perf_counter()


def measure(case: str, measured: Measured, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)

        def start(port: int) -> list[str]:
            return words(case, port, place, args)

        with server_process(start, place / "log") as (url, _):
            if case == SERVE:
                asyncio.run(chats(url, args, measured))
                return
            wait_for_steps(place, WARM_STEPS)
            alone = Speed(place)
            time.sleep(args.quiet)
            measured.speed_alone.append(alone.measured())
            beside = Speed(place)
            asyncio.run(chats(url, args, measured))
            measured.speed.append(beside.measured())


def report(cases: dict[str, Measured]) -> Iterator[str]:
    yield (
        "| case | p95 to the first token, ms | ÷ alone | p95 between tokens, ms | ÷ alone |"
        " p95 of an answer ÷ alone | tokens trained a second, with the person ÷ without |"
    )
    yield "|---|---|---|---|---|---|---|"
    base = cases[SERVE]
    for name, case in cases.items():
        first, between, whole = p95(case.first), p95(case.between), p95(case.answers)
        speed = "–"
        if case.speed:
            before, beside = map(statistics.fmean, (case.speed_alone, case.speed))
            speed = f"{beside:.0f} ÷ {before:.0f} = {beside / before:.2f}"
        yield (
            f"| {name} | {first:.0f} | {first / p95(base.first):.2f} | {between:.1f} |"
            f" {between / p95(base.between):.2f} | {whole / p95(base.answers):.2f} | {speed} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=128, help="of a training step")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.2)
    parser.add_argument("--quiet", type=float, default=10, help="seconds without the person")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="of the run: KEY=VALUE")
    kinds = (SERVE, "balanced", "serve", "train", "chat", TAUGHT, TAUGHT_CHAT)
    parser.add_argument("--cases", nargs="+", choices=kinds, default=kinds)
    args = parser.parse_args()
    cases: dict[str, Measured] = defaultdict(Measured)
    with tempfile.TemporaryDirectory() as name:
        args.teacher = Path(name) / "teacher"
        save_checkpoint(
            args.teacher, QWEN3 | four_times(load_model(ModelConfig(base_path=args.model)).config)
        )
        for _ in range(args.rounds):
            for case in dict.fromkeys([SERVE, *args.cases]):
                measure(case, cases[case], args)
    print("\n".join(report(cases)))


if __name__ == "__main__":
    main()

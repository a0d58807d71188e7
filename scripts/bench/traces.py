"""Measure what recording costs, and check that it keeps every turn: agents with three tools against
a real server.

    .venv/bin/python -m scripts.bench.traces speed --rounds 5      tokens/s recorded and not, in turns, and their ratio
    .venv/bin/python -m scripts.bench.traces agents                200 runs, 50 at once, some aborted; then checks
    .venv/bin/python -m scripts.bench.traces kill                  kill -9 under load: every acknowledged turn is there

The server is `mlx_parallm serve` on the tiny model, in a process of its own, with a template that
takes tools; the client is openai's.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from mlx_parallm.systems.traces.session import ABORTED, COMPLETE, Session, read_sessions
from scripts.server_process import command, server_process

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }} {% endfor"
    " %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{%"
    ' for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}",'
    ' "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{%'
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DIGIT = {
    "type": "object",
    "properties": {"n": {"enum": list(range(10))}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": n, "parameters": DIGIT}}
    for n in ("look", "add", "save")
]
EXACT: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True}


@dataclass
class Seen:
    """The answers that one client got: session → response id → token ids and log-probabilities."""

    turns: dict[str, dict[str, tuple[list[int], list[float]]]] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    aborted: int = 0

    def add(self, session: str, answer_id: str, ids: list[int], logprobs: list[float]) -> None:
        self.turns.setdefault(session, {})[answer_id] = (ids, logprobs)


@contextmanager
def serving(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    config = directory / "serve.toml"

    def words(port: int) -> list[str]:
        config.write_text(
            f"[server]\nport = {port}\nbatch_size = 64\n[traces]\ndirectory ="
            f' "{directory / "traces"}"\n'
            f"[model]\nchat_template = {json.dumps(TEMPLATE)}\ntool_parser ="
            ' "json_tools"\n[logging]\nlevel = "error"\n'
        )
        return [command("mlx_parallm"), "serve", "--config", str(config)]

    with server_process(words, directory / "serve.log") as running:
        yield running


def client(base_url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=base_url, api_key="sk-none-000000000000", max_retries=0, timeout=300
    )


async def turn(
    ask: openai.AsyncOpenAI, messages: list[Any], streamed: bool, **options: Any
) -> tuple[Any, str, Any, Any]:
    """One exact call: message, response id, token ids, log-probabilities."""
    options = {
        "model": "default",
        "messages": messages,
        "logprobs": True,
        "extra_body": EXACT,
    } | options
    if not streamed:
        answer = await ask.chat.completions.create(**options)
        choice: Any = answer.choices[0]
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        return choice.message.model_dump(exclude_none=True), answer.id, choice.token_ids, logprobs
    text, calls, ids, logprobs, answer_id = "", {}, [], [], ""
    async with await ask.chat.completions.create(stream=True, **options) as stream:
        async for chunk in stream:
            part: Any = chunk.choices[0]
            answer_id = chunk.id
            text += part.delta.content or ""
            ids += getattr(part, "token_ids", None) or []
            logprobs += [
                entry.logprob for entry in (part.logprobs.content if part.logprobs else [])
            ]
            for call in part.delta.tool_calls or []:
                kept = calls.setdefault(
                    call.index,
                    {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
                )
                kept["id"] = call.id or kept["id"]
                kept["function"]["name"] += call.function.name or ""
                kept["function"]["arguments"] += call.function.arguments or ""
    message = {"role": "assistant", "content": text or None} | (
        {"tool_calls": list(calls.values())} if calls else {}
    )
    return message, answer_id, ids, logprobs


async def agent(url: str, number: int, seen: Seen, abort: bool) -> None:
    """Ask, call each of three tools, answer. An agent that aborts hangs up in the middle of its
    last answer."""
    random_of_run = random.Random(number)
    session = f"run-{number}"
    async with client(f"{url}/sessions/{session}/v1") as ask:
        messages: list[Any] = [
            {"role": "user", "content": f"Sum: {number % 10}+{random_of_run.randrange(10)}"}
        ]
        for tool in TOOLS:
            forced = {"type": "function", "function": {"name": tool["function"]["name"]}}
            message, answer_id, ids, logprobs = await turn(
                ask,
                messages,
                random_of_run.random() < 0.5,
                tools=TOOLS,
                tool_choice=forced,
                max_tokens=120,
            )
            seen.add(session, answer_id, ids, logprobs)
            messages.append(message)
            for call in message.get("tool_calls", []):
                result = json.dumps({"ok": json.loads(call["function"]["arguments"])["n"] + 1})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        messages.append({"role": "user", "content": "Answer"})
        if abort:
            options: Any = {
                "model": "default",
                "messages": messages,
                "tools": TOOLS,
                "max_tokens": 400,
            }
            async with await ask.chat.completions.create(
                stream=True, extra_body={"ignore_eos": True}, **options
            ) as stream:
                async for _ in stream:
                    break
            seen.aborted += 1
            return
        message, answer_id, ids, logprobs = await turn(
            ask, messages, number % 2 == 0, tools=TOOLS, max_tokens=16
        )
        seen.add(session, answer_id, ids, logprobs)
    async with httpx.AsyncClient() as http:
        await http.post(f"{url}/sessions/{session}/feedback", json={"score": number % 2})


async def agents(url: str, runs: int, at_once: int, seen: Seen) -> None:
    room = asyncio.Semaphore(at_once)

    async def run(number: int) -> None:
        async with room:
            await agent(url, number, seen, abort=number % 10 == 3)

    await asyncio.gather(*map(run, range(runs)))


def compare(directory: Path, seen: Seen) -> dict[str, int]:
    """Count what is on the disk against what the clients saw."""
    counts = dict.fromkeys(
        ("sessions", "turns", "equal", "twice", "missing", "different", "aborted"), 0
    )
    sessions: dict[str, Session] = {session.name: session for session in read_sessions(directory)}
    for name, answers in seen.turns.items():
        recorded: dict[str, list[Any]] = {}
        counts["sessions"] += 1
        for each in sessions[name].turns.values() if name in sessions else ():
            if each.status == COMPLETE:
                recorded.setdefault(str(each.response_id), []).append(each)
            counts["aborted"] += each.status == ABORTED
        for answer_id, (ids, logprobs) in answers.items():
            counts["turns"] += 1
            turns = recorded.get(answer_id, [])
            counts["missing"] += not turns
            counts["twice"] += len(turns) > 1
            if turns:
                tokens = turns[0].tokens
                same = (
                    tokens is not None
                    and list(tokens.completion) == ids
                    and list(tokens.logprobs) == logprobs
                )
                counts["equal" if same else "different"] += 1
    return counts


def run_agents(args: argparse.Namespace) -> None:
    seen = Seen()
    with tempfile.TemporaryDirectory() as place, serving(Path(place)) as (url, _):
        began = time.perf_counter()
        asyncio.run(agents(url, args.runs, args.at_once, seen))
        seconds = time.perf_counter() - began
        for _ in range(100):  # an aborted call is written when the server has noticed
            counts = compare(Path(place) / "traces", seen)
            if counts["aborted"] >= seen.aborted:
                break
            time.sleep(0.1)
        sessions = list(read_sessions(Path(place) / "traces"))
        traces = [trace for session in sessions for trace in session.traces()]
    print(f"{args.runs} runs, {args.at_once} at once, {seconds:.1f} s; hung up: {seen.aborted}")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    joined = sum(len(trace.messages) >= 8 and not trace.get("aborted") for trace in traces)
    print(f"traces: {len(traces)}; whole runs of four turns in one trace: {joined}")


def run_kill(args: argparse.Namespace) -> None:
    lost = acknowledged = 0
    for round_number in range(args.rounds):
        seen = Seen()
        with tempfile.TemporaryDirectory() as place:
            with serving(Path(place)) as (url, process):

                async def until_killed(url: str, process: Any, seen: Seen, seconds: float) -> None:
                    work = asyncio.ensure_future(
                        asyncio.wait_for(agents(url, args.runs, args.at_once, seen), 60)
                    )
                    await asyncio.sleep(seconds)
                    os.kill(process.pid, signal.SIGKILL)
                    await asyncio.gather(work, return_exceptions=True)

                asyncio.run(until_killed(url, process, seen, 2 + 0.7 * round_number))
            counts = compare(Path(place) / "traces", seen)
        acknowledged += counts["turns"]
        lost += counts["missing"] + counts["different"] + counts["twice"]
        print(
            f"kill {round_number + 1}: {counts['turns']} acknowledged"
            f" turns, {counts['missing']} missing"
        )
    print(f"{acknowledged} acknowledged turns over {args.rounds} kills, {lost} lost or damaged")


def run_speed(args: argparse.Namespace) -> None:
    """Both sides ask the same of the same server, in turns; a round's ratio is of their tokens a
    second."""

    async def load(url: str, recorded: bool, round_number: int) -> tuple[float, float]:
        async def talk(number: int) -> int:
            name = f"s{round_number}-{number}"
            base = f"{url}/sessions/{name}/v1" if recorded else f"{url}/v1"
            tokens, messages = 0, [{"role": "user", "content": f"Reverse: {number:04d}"}]
            async with client(base) as ask:
                for turn_number in range(args.turns):
                    options: Any = {
                        "model": "default",
                        "messages": messages,
                        "max_tokens": args.tokens,
                    }
                    streamed = bool((number + turn_number) % 2)
                    if streamed:
                        text, used = "", 0
                        async with await ask.chat.completions.create(
                            stream=True,
                            stream_options={"include_usage": True},
                            extra_body={"ignore_eos": True},
                            **options,
                        ) as stream:
                            async for chunk in stream:
                                if chunk.choices:
                                    text += chunk.choices[0].delta.content or ""
                                used = chunk.usage.completion_tokens if chunk.usage else used
                    else:
                        answer = await ask.chat.completions.create(
                            extra_body={"ignore_eos": True}, **options
                        )
                        text, used = (
                            answer.choices[0].message.content or "",
                            answer.usage.completion_tokens,
                        )
                    tokens += used
                    clean = re.sub(r"[^\x20-\x7e]", "", text)
                    messages += [
                        {"role": "assistant", "content": clean},
                        {"role": "user", "content": "Go on"},
                    ]
            return tokens

        began, spent = time.perf_counter(), processor_seconds()
        tokens = sum(await asyncio.gather(*map(talk, range(args.at_once))))
        return tokens / (time.perf_counter() - began), (processor_seconds() - spent) / tokens * 1e6

    with tempfile.TemporaryDirectory() as place, serving(Path(place)) as (url, process):
        server = psutil.Process(process.pid)

        def processor_seconds() -> float:
            return sum(server.cpu_times()[:2])

        asyncio.run(load(url, False, -2))
        asyncio.run(load(url, True, -1))
        ratios, costs = [], []
        for number in range(args.rounds):
            order = (False, True) if number % 2 else (True, False)
            speed = {recorded: asyncio.run(load(url, recorded, number)) for recorded in order}
            (fast, dear), (plain, cheap) = speed[True], speed[False]
            ratios.append(fast / plain)
            costs.append(dear / cheap)
            print(
                f"round {number + 1}: recorded {fast:.0f}, not {plain:.0f} tokens/s:"
                f" {ratios[-1]:.3f};"
                f" processor {dear:.0f} and {cheap:.0f} µs a token: {costs[-1]:.3f}"
            )
    print(
        f"median ratio {statistics.median(ratios):.3f} of tokens/s, {statistics.median(costs):.3f}"
        " of processor time"
        f" ({args.at_once} clients, {args.turns} turns of {args.tokens} tokens)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "agents", "kill"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument(
        "--at-once", type=int, default=None, help="default: 50 agents, 16 clients for speed"
    )
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    args.at_once = args.at_once or (16 if args.what == "speed" else 50)
    {"speed": run_speed, "agents": run_agents, "kill": run_kill}[args.what](args)


if __name__ == "__main__":
    main()

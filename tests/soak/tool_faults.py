"""Episodes whose tools are real MCP servers that die, hang, answer garbage or 10 MB, start slowly,
or are killed.

    .venv/bin/python -m tests.soak.tool_faults --episodes 1000

The policy is scripted, so that each episode makes the calls that its prompt names; all else is
real: scheduler, episodes, tool client, server processes. Prints a table; exit code 1 when an
episode is lost or takes longer than its time-outs allow, a fault is not an error reward, or a process
is left.
"""

import argparse
import asyncio
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.execution.tool_client import MCPServer, ToolClient
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import Completion, Request, RequestOutput

PROGRAM = Path(__file__).with_name("faulty_mcp_server.py")
TIMEOUT_S, START_TIMEOUT_S, SLACK_S = 3.0, 30.0, 2.0
SLOW_START_S = 3.0
YOUNG_S = 6.0  # a server younger than this is not killed: else none would ever answer
KINDS = {  # kind → (its call, its share, whether the call must fail)
    "fine": ("steady_echo(n=1)", 40, False),
    "server dies": ("dying_die()", 3, True),
    "server hangs": ("hanging_hang()", 1, True),
    "garbage": ("noisy_garbage()", 8, None),
    "10 MB": ("large_huge()", 3, True),
    "killed at random": ("killed_echo(n=2)", 35, None),
    "killed, slow start": ("slow_echo(n=3)", 10, None),
}


class ScriptedPolicy:
    """Writes the calls that the prompt names, one turn each, then "done"."""

    max_model_len = 8192

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        [self.end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)

    async def generate(self, request: Request) -> RequestOutput:
        text = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        turns = text.partition("\nCalls: ")[2].partition("<|im_end|>")[0].split(" | ")
        number = text.count("<|im_start|>assistant\n") - 1
        answer = turns[number].replace(";", "\n") if number < len(turns) else "done"
        ids = (*self.tokenizer.encode(answer, add_special_tokens=False), self.end)
        scores = (-0.5,) * len(ids)
        completions = tuple(
            Completion(
                n, answer, ids, scores, None, None, (0,) * len(ids), "stop", prompt_version=0
            )
            for n in range(request.params.n)
        )
        return RequestOutput(request.request_id, request.prompt_token_ids, completions)

    async def generate_many(self, requests: Sequence[Request]) -> list[RequestOutput]:
        return list(await asyncio.gather(*map(self.generate, requests)))


class Calling(BaseEnvironment):
    """Task i makes the calls of `prompts[i]`; an episode's seconds are in its metadata."""

    def __init__(self, prompts: Sequence[tuple[str, str]], tools: EpisodeTools) -> None:
        super().__init__()
        self.prompts, self.episode_tools = prompts, tools

    def reset(self, index: int = 0) -> State:
        kind, calls = self.prompts[index % len(self.prompts)]
        return State([{"role": "user", "content": f"\nCalls: {calls}"}], metadata={"kind": kind})

    def build_prompt(self, state: State) -> Any:
        state.metadata.setdefault("began", time.perf_counter())
        return state.prompt

    def update_state(self, state: State, response: str) -> State:
        state = super().update_state(state, response)
        state.metadata["seconds"] = time.perf_counter() - state.metadata["began"]
        state.done = True
        return state


def server(name: str, *more: str) -> MCPServer:
    return MCPServer(
        name,
        command=[sys.executable, str(PROGRAM), name, *more],
        timeout_s=5 * TIMEOUT_S if name == "large" else TIMEOUT_S,  # 10 MB take a while
        start_timeout_s=START_TIMEOUT_S,
        max_concurrent=64,
    )


def processes() -> list[psutil.Process]:
    children = []
    for child in psutil.Process().children(recursive=True):
        try:
            if str(PROGRAM) in child.cmdline():
                children.append(child)
        except psutil.Error:  # it has ended meanwhile
            continue
    return children


def kill_at_random(over: threading.Event, kills: Counter[str]) -> None:
    rng = random.Random(0)
    while not over.wait(rng.uniform(0.5, 3.0)):
        for process in processes():
            name, age = process.cmdline()[2], time.time() - process.create_time()
            if age > YOUNG_S and (name == "killed" or (name == "slow" and rng.random() < 0.2)):
                process.kill()
                kills[name] += 1


def tokenizer() -> Tokenizer:
    config = ModelConfig(base_path="builtin:tiny")
    return load_tokenizer(resolve_model_path(config.base_path), config)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--parallel", type=int, default=32)
    arguments = parser.parse_args()
    rng = random.Random(1)
    shares = [share for _, share, _ in KINDS.values()]
    kinds = rng.choices(list(KINDS), shares, k=arguments.episodes)
    prompts = [(kind, f"TOOL: {KINDS[kind][0]}") for kind in kinds]
    names = ("steady", "dying", "hanging", "noisy", "large", "killed")
    servers = [*map(server, names), server("slow", str(SLOW_START_S))]
    over, kills = threading.Event(), Counter[str]()
    seconds, errors, failed = (
        defaultdict[str, list[float]](list),
        defaultdict[str, Counter[str]](Counter),
        0,
    )
    began = time.perf_counter()
    with ToolClient(servers) as client:
        environment = Calling(prompts, EpisodeTools.of(client, formats=("tool_line",)))
        killer = threading.Thread(target=kill_at_random, args=(over, kills))
        killer.start()
        texts = tokenizer()
        settings = RolloutConfig(num_parallel=arguments.parallel, prompt_format="chat")
        try:
            with RolloutManager(
                environment, settings, client=ScriptedPolicy(texts), tokenizer=texts
            ) as manager:
                for trajectory in manager.iterate_rollouts(arguments.episodes):
                    failed += trajectory.error is not None
                    kind, [call] = trajectory.metadata["kind"], trajectory.metadata["tool_calls"]
                    seconds[kind].append(trajectory.metadata["seconds"])
                    errors[kind][str(call["error"])] += 1
        finally:
            over.set()
            killer.join()
        took, counts = time.perf_counter() - began, client.metrics()
    left = processes()
    print("| episodes | number | longest, s | what their calls gave |\n|---|---|---|---|")
    problems = [] if not failed else [f"{failed} episodes failed"]
    for kind, (_, _, must_fail) in KINDS.items():
        longest = max(seconds[kind], default=0.0)
        allowed = 5 * TIMEOUT_S + START_TIMEOUT_S + SLACK_S
        error_counts = ", ".join(f"{name}: {n}" for name, n in errors[kind].most_common())
        print(f"| {kind} | {len(seconds[kind])} | {longest:.1f} | {error_counts} |")
        problems += [f"{kind}: {longest:.1f} s"] if longest > allowed else []
        problems += [f"{kind}: no error"] if must_fail and errors[kind]["None"] else []
        problems += (
            [f"{kind}: an error"] if must_fail is False and set(errors[kind]) != {"None"} else []
        )
    finished = sum(map(len, seconds.values()))
    problems += (
        [f"{finished} of {arguments.episodes} finished"] if finished < arguments.episodes else []
    )
    problems += [f"processes left: {left}"] if left else []
    memory = psutil.Process().memory_info().rss / 2**20
    print(
        f"\n{finished} episodes in {took:.0f} s; {sum(kills.values())} kills,"
        f" {counts['restarts']:.0f} restarts"
    )
    print(
        f"{counts['calls']:.0f} calls, {counts['errors']:.0f} errors; {len(left)}"
        f" processes left; {memory:.0f} MB"
    )
    print("problems: " + ("; ".join(problems) or "none"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

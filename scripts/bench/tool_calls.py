"""Calls of tools in episodes: how many a second over stdio, and a step's wall time beside its
longest episode.

    .venv/bin/python -m scripts.bench.tool_calls

The policy is scripted (scripts/soak/tool_faults.py), so nothing but tools, episodes and scheduler
takes time.
"""

import argparse
import sys
import time

from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.execution.tool_client import MCPServer, ToolClient
from scripts.soak.tool_faults import PROGRAM, Calling, ScriptedPolicy, tokenizer


def played(client: ToolClient, prompts: list[tuple[str, str]]) -> tuple[float, list[float]]:
    """Play an episode for each prompt, all at once; return the wall seconds, and those of each
    episode."""
    texts = tokenizer()
    environment = Calling(prompts, EpisodeTools.of(client, formats=("tool_line",)))
    settings = RolloutConfig(num_parallel=len(prompts), prompt_format="chat")
    with RolloutManager(
        environment, settings, client=ScriptedPolicy(texts), tokenizer=texts
    ) as manager:
        manager.start()
        began = time.perf_counter()
        trajectories = manager.collect_rollouts(len(prompts))
        took = time.perf_counter() - began
    assert all(call["ok"] for each in trajectories for call in each.metadata["tool_calls"]), (
        "a call failed"
    )
    return took, [each.metadata["seconds"] for each in trajectories]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    python = [sys.executable, str(PROGRAM)]
    # the prompt lists the tools, and few keep it short
    used = {"fast": "fast_echo", "slow": "slow_nap"}
    servers = [
        MCPServer(name, command=[*python, name], max_concurrent=256, tools=[tool])
        for name, tool in used.items()
    ]
    with ToolClient(servers) as client:
        client.definitions()
        print("| | episodes | calls | seconds | |\n|---|---|---|---|---|")
        for _ in range(repeats):
            turns = " | ".join(["TOOL: fast_echo(n=1);TOOL: fast_echo(n=2)"] * 5)
            took, _ = played(client, [("", turns)] * 64)
            print(
                f"| 10 calls in 5 turns | 64 | 640 | {took:.2f} | {640 / took:.0f} calls/s |",
                flush=True,
            )
        for _ in range(repeats):
            took, _ = played(client, [("", "TOOL: fast_echo(n=1)")] * 64)
            print(f"| one call | 64 | 64 | {took:.2f} | {64 / took:.0f} calls/s |", flush=True)
        for _ in range(repeats):
            prompts = [("", f"TOOL: slow_nap(seconds={2.0 + (n % 8) / 4})") for n in range(128)]
            took, seconds = played(client, prompts)
            print(
                f"| naps of 2 to 3.75 s | 128 | 128 | {took:.2f} |"
                f" {took / max(seconds):.3f} × the longest episode |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

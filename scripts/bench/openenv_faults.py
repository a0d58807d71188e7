"""Measure OpenEnv episodes at 64 at once, with and without a server that hangs and one that dies.

    python -m scripts.bench.openenv_faults

Real sockets, a scripted policy, and servers of the protocol that take 0.4 s for each step. First
three servers play 512 episodes in groups of one; then the same beside a server that never answers
a step and one that drops every connection in its second step. Printed: episodes that the three
played in a second, the share of that speed that is kept, and the reasons of those that were lost.
"""

import asyncio
import collections
import json
import socket
import threading
import time
from pathlib import Path

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.environments.episode import EpisodePolicy
from mlx_parallm.environments.openenv.source import OpenEnvSource
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult
from mlx_parallm.models import loading
from tests.environments.openenv.protocol_server import Count, ProtocolServer
from tests.environments.scripted_client import ScriptedClient

AT_ONCE, EPISODES, STEP_S, TIMEOUT_S = 64, 512, 0.4, 2.0


class Slow(Count):
    """A step takes a while, as a simulation does."""

    def step(self, data: dict[str, int]) -> object:
        time.sleep(STEP_S)
        return super().step(data)


async def play(urls: list[str]) -> tuple[float, list[GroupResult]]:
    """Return the seconds until the last episode that was played to its end, and all results."""
    options = {"url": urls, "message_timeout_s": TIMEOUT_S}
    source = OpenEnvSource(EnvironmentConfig(kind="openenv", options=options), seed=0)
    tiny = Path(loading.__file__).with_name("tiny")
    tokenizer = loading.load_tokenizer(tiny, ModelConfig(base_path="builtin:tiny"))
    client = ScriptedClient(tokenizer, lambda *_: '{"number": 3}')
    runner = EpisodeRunner(EpisodePolicy(client, tokenizer, 1.0, 2000))
    places, began, ends = asyncio.Semaphore(AT_ONCE), time.monotonic(), [0.0]

    async def one(index: int) -> GroupResult:
        async with places:
            [result] = await runner.run([GroupPlan(f"g{index}", source, index, 1, seed=index)])
        if result.failure is None:
            ends.append(time.monotonic() - began)
        return result

    results = await asyncio.gather(*map(one, range(EPISODES)))
    return max(ends), list(results)


def main() -> None:
    released = threading.Event()

    def hangs(connection: object, message: dict[str, object]) -> None:
        if message["type"] == "step":
            released.wait(60)

    def dies(connection: object, message: dict[str, object]) -> None:
        if message["type"] == "step":
            connection.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]

    servers = [ProtocolServer(Slow) for _ in range(3)]
    broken = [ProtocolServer(Slow, before=hangs), ProtocolServer(Slow, before=dies)]
    healthy = [server.url for server in servers]
    asyncio.run(play(healthy))  # everything is imported and warm
    speeds = {}
    for name, urls in {"three servers": healthy, "and two that fail": healthy}.items():
        both = urls if name == "three servers" else [*urls, *(server.url for server in broken)]
        seconds, results = asyncio.run(play(both))
        whole = [result for result in results if result.failure is None]
        speeds[name] = len(whole) / seconds
        reasons = collections.Counter(
            str(result.failure).partition(": ")[2] for result in results if result.failure
        )
        line = {"played": len(whole), "episodes a second": round(speeds[name], 1)}
        print(name, json.dumps(line | {"lost": dict(reasons)}))
    released.set()
    before, after = speeds.values()
    print(f"kept: {after / before:.2f}")
    for server in (*servers, *broken):
        server.close()


if __name__ == "__main__":
    main()

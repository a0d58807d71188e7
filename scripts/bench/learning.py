"""Does a shipped configuration learn, how fast, and does the server answer all the while?

    python scripts/bench/learning.py --config train_configs/quickstart.toml --seeds 0 1 2 --problems 500

For each seed: runs the real `mlx_parallm_train` with a client that asks /v1/chat/completions (every
second request streamed) from the first answer to the last step; then serves base and adapter with
the real `mlx_parallm_serve` and answers held-out problems of every environment, greedily, through
the API. Prints one line a seed and a table.
"""

import argparse
import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
from rich.console import Console
from rich.table import Table

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.environments.base import Task
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.types import Rollout, Trajectory

BIN = Path(sys.executable).parent
CLIENTS = 16
console = Console(width=120)


@dataclass
class ClientRequests:
    """The requests of the client, which counts them itself and retries none."""

    sent: int = 0
    failed: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    seed: int
    first: float
    last: float
    seconds: float
    steps: int
    requests: ClientRequests
    accuracy: dict[str, tuple[float, float]]
    rewards: list[float]  # of each step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--config", default="train_configs/quickstart.toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--problems", type=int, default=500, help="held-out problems in all")
    parser.add_argument("--set", action="append", default=[], help="passed on to mlx_parallm_train")
    args = parser.parse_args()
    results = [measure(args.config, seed, args.problems, args.set) for seed in args.seeds]
    table = Table(title=f"{args.config}: greedy accuracy on held-out problems, base → adapter")
    table.add_column("seed")
    for column in ("reward first 5", "reward last 10", "seconds", "requests", "failed", "versions"):
        table.add_column(column, justify="right")
    for name in results[0].accuracy:
        table.add_column(name, justify="right")
    for row in results:
        seen = row.asked.versions
        span = f"{seen[0]} → {seen[-1]}" if seen else "-"
        cells = [f"{row.first:.3f}", f"{row.last:.3f}", f"{row.seconds:.1f}", str(row.asked.sent)]
        cells += [str(len(row.asked.failed)), span]
        cells += [f"{before:.2f} → {after:.2f}" for before, after in row.accuracy.values()]
        table.add_row(str(row.seed), *cells)
    console.print(table)


def measure(config: str, seed: int, problems: int, overrides: list[str]) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        settings = [
            f"rl_training.seed={seed}",
            f"rl_training.checkpoint_dir={directory}",
            "rl_training.run_name=run",
        ]
        settings += [f"server.port={port}", *overrides]
        flags = [part for setting in settings for part in ("--set", setting)]
        run = Path(directory) / "run"
        started = time.time()
        with Path(directory, "log").open("w") as log:
            process = subprocess.Popen(
                [BIN / "mlx_parallm_train", "--config", config, *flags], stdout=log, stderr=log
            )
            requests = ClientRequests()
            client = threading.Thread(target=ask_until_exit, args=(process, port, requests))
            client.start()
            code = process.wait()
        client.join()
        if code != 0:
            raise SystemExit(Path(directory, "log").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = (run / "metrics.jsonl").stat().st_mtime - started
        rewards = [line["reward_mean"] for line in lines]
        first, last = sum(rewards[:5]) / 5, sum(rewards[-10:]) / 10
        console.print(
            f"seed {seed}: reward {first:.3f} → {last:.3f} in {seconds:.1f} s, {len(lines)} steps"
        )
        if requests.failed:
            console.print(
                f"  {len(requests.failed)} of {requests.sent} requests failed, the first:"
                f" {requests.failed[0]}"
            )
        accuracy = held_out(load_config(config, settings), run / "final", problems)
        return Result(seed, first, last, seconds, len(lines), requests, accuracy, rewards)


def ask_until_exit(process: subprocess.Popen[bytes], port: int, requests: ClientRequests) -> None:
    """Ask from the first healthy answer of the server until the process begins to end."""
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None and not healthy(url):
        time.sleep(0.1)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    while process.poll() is None:
        requests.sent += 1
        try:
            requests.versions.append(one_answer(client, stream=requests.sent % 2 == 0))
        except openai.OpenAIError as error:
            if type(error.__cause__).__name__ == "ConnectError":  # httpx or httpx2: nothing listens
                try:
                    process.wait(30)  # the run is over, and this one was never accepted
                    requests.sent -= 1
                    return
                except subprocess.TimeoutExpired:
                    pass  # it continues without listening: a failed request
            requests.failed.append(f"{error!r} from {error.__cause__!r}, request {requests.sent}")
        time.sleep(0.2)


def one_answer(client: openai.OpenAI, *, stream: bool) -> int:
    """The policy version of one answer."""
    messages = [{"role": "user", "content": "Sort: hello"}]
    if not stream:
        answer = client.chat.completions.create(model="default", messages=messages, max_tokens=12)
        return int(answer.model_extra["policy_version"])
    version = None
    for chunk in client.chat.completions.create(
        model="default", messages=messages, max_tokens=12, stream=True
    ):
        version = (chunk.model_extra or {}).get("policy_version", version)
    if version is None:
        raise openai.OpenAIError("a stream ended without a policy version")
    return int(version)


def held_out(config: Config, final: Path, problems: int) -> dict[str, tuple[float, float]]:
    """Greedy accuracy of the base and of what was trained, by environment, through real servers."""
    base = ["--model-path", config.model.base_path]
    base += [
        "--set",
        f"rl_training.lora.quantize_base={str(config.rl_training.lora.quantize_base).lower()}",
    ]
    if (final / "adapters.safetensors").exists():
        tuned, model = [*base, "--lora-path", f"tuned={final}"], "tuned"
    else:
        tuned, model = ["--model-path", str(final)], "default"
    before = answers(config, base, "default", problems)
    after = answers(config, tuned, model, problems)
    return {name: (before[name], after[name]) for name in before}


def answers(config: Config, flags: list[str], model: str, problems: int) -> dict[str, float]:
    sources = build_sources(config.environments, seed=config.rl_training.seed)
    port = free_port()
    command = [
        BIN / "mlx_parallm_serve",
        *flags,
        "--port",
        str(port),
        "--set",
        "server.batch_size=64",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while not healthy(url):
            time.sleep(0.1)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            accuracy = {}
            for source in sources:
                tasks = source.heldout(problems // len(sources))
                jobs = [(client, model, task, source.config.max_tokens) for task in tasks]
                accuracy[source.name] = sum(pool.map(lambda job: solved(*job), jobs)) / len(tasks)
            return accuracy
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def solved(client: openai.OpenAI, model: str, task: Task, max_tokens: int) -> bool:
    answer = client.chat.completions.create(
        model=model,
        messages=[dict(message) for message in task.messages],
        temperature=0,
        max_tokens=max_tokens,
    )
    text = answer.choices[0].message.content or ""
    nothing = Rollout((), (), (), (), 1.0, {})
    return task.reward([Trajectory(text, nothing)])[0]["reward"] >= 1.0 - 1e-9


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()

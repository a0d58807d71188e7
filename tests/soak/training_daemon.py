"""Parts that kill_rollouts and malformed_groups share: a training daemon whose groups come over
HTTP, and groups for it.

The policy hardly moves (learning rate 1e-6), so that answers sampled once are worth sending again
with other scores.
"""

import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from mlx_parallm.environments.kinds.tasks import make_problem

BATCH_SIZE, GROUP_SIZE = 16, 4  # sequences of a step and of a group
CONFIG = """
[model]
base_path = "builtin:tiny"

[server]
port = {port}

[rl_training]
total_steps = 1000000
checkpoint_interval = 3
checkpoint_dir = "{directory}/checkpoints"
run_name = "run"
learning_rate = 1e-6
batch_size = 16
blocks_per_eval = 0
max_staleness = 4

[rl_training.lora]
rank = 4

[rl_training.atropos]
api_url = "embedded"
rollout_batch_size = 16
max_token_length = 64
"""

Body = dict[str, Any]


class TrainingDaemon:
    """One `mlx_parallm_train --resume auto` after the other over one run directory; what they
    print is appended."""

    def __init__(self, directory: Path, *settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self.run = directory / "checkpoints" / "run"
        self.output = directory / "output.txt"
        self._config = directory / "run.toml"
        self._config.write_text(CONFIG.format(port=port, directory=directory))
        self._settings = [part for setting in settings for part in ("--set", setting)]
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        command = [
            str(Path(sys.executable).parent / "mlx_parallm_train"),
            "--config",
            str(self._config),
        ]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--resume", "auto", *self._settings],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self.process

    def wait_until_ready(self, timeout_s: float = 120) -> None:
        """Raises AssertionError when it ends before, or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            self.check()
            assert time.monotonic() < deadline, "the daemon is not ready in time"
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            return httpx.get(self.url + "/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def check(self) -> None:
        ended, output = self.process.poll(), self.output.read_text()[-2000:]
        assert ended is None, f"the daemon ended with {ended}:\n{output}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=120)


def sampled_groups(url: str, count: int, generator: random.Random) -> list[Body]:
    """Groups as an environment sends them, token ids and log-probabilities the server's own;
    scores to be filled in."""
    groups = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in range(count):
            problem = make_problem(
                generator.choice(["sort", "reverse", "sum"]), number, seed=1, split="train"
            )
            tokenized = client.post(
                "/tokenize", json={"messages": list(problem.messages)}
            ).raise_for_status()
            ids = tokenized.json()["tokens"]
            body = {
                "prompt": {"prompt_token_ids": ids},
                "n": GROUP_SIZE,
                "max_tokens": 12,
                "logprobs": 0,
            }
            answer = client.post("/generate", json=body).raise_for_status().json()
            groups.append(_group(ids, answer["logprobs"]))
    return groups


def _group(ids: list[int], completions: list[list[list[dict[str, float]]]]) -> Body:
    data: Body = {"tokens": [], "masks": [], "inference_logprobs": []}
    for positions in completions:
        pairs = [next(iter(position[0].items())) for position in positions]
        output = [int(token) for token, _ in pairs]
        data["tokens"].append(ids + output)
        data["masks"].append([-100] * len(ids) + output)
        data["inference_logprobs"].append([1.0] * len(ids) + [logprob for _, logprob in pairs])
    return data

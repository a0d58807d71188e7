"""Real daemons in subprocesses: started on a free port, watched through their own /health, ended
by signal."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from scripts.server_process import free_port
from tests.signals_reset import default_signals

BIN = Path(sys.executable).parent

BASE = """
[server]
port = {port}
batch_size = 64

[rl_training]
learning_rate = 2e-3
batch_size = 32
token_budget = 4096
blocks_per_eval = 0
total_steps = {steps}
checkpoint_interval = {interval}
checkpoint_dir = "{directory}"
run_name = "run"
max_staleness = 0
seed = 5
{training}

[rl_training.lora]
rank = 4
alpha = 8

[rl_training.atropos]
rollout_batch_size = 32
max_token_length = 256
{atropos}

[[environments]]
kind = "tasks"
name = "reverse"
group_size = 8
max_tokens = 16

[[environments]]
kind = "tasks"
name = "sort"
group_size = 8
max_tokens = 16
"""


def write_config(
    tmp_path: Path,
    *,
    steps: int,
    interval: int = 2,
    training: str = "",
    atropos: str = "",
    directory: Path | None = None,
) -> Path:
    file = tmp_path / "run.toml"
    text = BASE.format(
        port=free_port(),
        steps=steps,
        interval=interval,
        directory=directory or tmp_path / "checkpoints",
        training=training,
        atropos=atropos,
    )
    file.write_text(text)
    return file


class Daemon:
    """One `mlx_parallm_train` or `mlx_parallm_serve` process. As a context manager it is killed
    on the way out."""

    def __init__(
        self, command: str, *arguments: str, port: int, env: dict[str, str] | None = None
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [str(BIN / command), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=default_signals,
            env=os.environ | (env or {}),
        )
        self.output = ""

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def wait(self, timeout: float = 120) -> int:
        """The exit code; `output` holds what was printed."""
        text, _ = self.process.communicate(timeout=timeout)
        self.output = text or self.output  # a second call returns the same text again
        return self.process.returncode

    def wait_until_ready(self, timeout: float = 60) -> "Daemon":
        deadline = time.monotonic() + timeout
        # one for all: a new one takes 25 ms of a core that the daemon wants
        with httpx.Client(verify=False) as http:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    self.wait()
                    raise AssertionError(
                        f"ended with {self.process.returncode} before it was ready:\n{self.output}"
                    )
                with contextlib.suppress(httpx.TransportError):
                    if http.get(self.url + "/health").status_code == 200:
                        return self
                time.sleep(0.05)
        raise AssertionError("not ready in time")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)


def train(config: Path, *arguments: str) -> Daemon:
    port = next(
        int(line.split("=")[1])
        for line in config.read_text().splitlines()
        if line.startswith("port")
    )
    return Daemon("mlx_parallm_train", "--config", str(config), *arguments, port=port)


def train_example(config: Path, tmp_path: Path, **settings: object) -> Daemon:
    """The daemon with an example's configuration; the run's directory is tmp_path/run."""
    port = free_port()
    place = {
        "server.port": port,
        "rl_training.checkpoint_dir": tmp_path,
        "rl_training.run_name": "run",
    }
    flags = [
        part for key, value in (place | settings).items() for part in ("--set", f"{key}={value}")
    ]
    return Daemon("mlx_parallm_train", "--config", str(config), *flags, port=port)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of the run's steps, without one that is being written."""
    return list(MetricsFile(run / METRICS_FILE).read())


def wait_for_step(daemon: Daemon, run: Path, step: int, timeout: float = 90) -> None:
    """Until the run has recorded `step`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if any(line["step"] >= step for line in metrics(run)):
            return
        if daemon.process.poll() is not None:
            daemon.wait()
            raise AssertionError(
                f"ended with {daemon.process.returncode} before step {step}:\n{daemon.output}"
            )
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in time")

"""A run with a teacher over HTTP that is killed in mid-run: steps wait for it, or continue without."""

import json
import math
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import (
    Daemon,
    free_port,
    metrics,
    train,
    wait_for_step,
    write_config,
)

SECTION = """
[rl_training.distillation]
on_teacher_lost = "{lost}"
weight = 0.1

[[rl_training.distillation.teachers]]
name = "big"
kind = "http"
url = "http://127.0.0.1:{port}/v1"
tries = 1
timeout_s = 20
"""


def teacher(port: int) -> Daemon:
    """Our own server, which has vLLM's `prompt_logprobs`."""
    arguments = ("--model-path", "builtin:tiny", "--port", str(port))
    return Daemon("mlx_parallm_serve", *arguments, port=port)


def wait_for(what: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def lost(run: Path) -> bool:
    log = run / "run.log"
    return log.is_file() and any(
        json.loads(line)["event"] == "a teacher does not answer"
        for line in log.read_text().splitlines()
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", [pytest.param("skip", marks=pytest.mark.long), "wait"])
def test_a_teacher_is_killed_in_mid_run(tmp_path: Path, mode: str) -> None:
    port = free_port()
    config = write_config(tmp_path, steps=500, interval=50)
    config.write_text(config.read_text() + SECTION.format(lost=mode, port=port))
    with teacher(port) as first:
        first.wait_until_ready()
        with train(config) as daemon:
            daemon.wait_until_ready()
            [run] = (tmp_path / "checkpoints").glob("[!fl]*")
            wait_for_step(daemon, run, 3)
            first.send(signal.SIGKILL)
            wait_for(lambda: lost(run))
            at = metrics(run)[-1]["step"]
            if mode == "wait":
                with teacher(port) as second:
                    second.wait_until_ready()
                    wait_for_step(daemon, run, at + 3)
                    daemon.send(signal.SIGTERM)
                    daemon.wait()
            else:
                wait_for_step(daemon, run, at + 3)
                daemon.send(signal.SIGTERM)
                daemon.wait()
            assert daemon.process.returncode == 0, daemon.output
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    numbers = [value for line in lines for value in line.values() if isinstance(value, float)]
    assert all(map(math.isfinite, numbers))
    assert all(line["skipped_steps"] == 0 for line in lines)
    unscored = [line["teacher_unscored"] for line in lines]
    assert unscored[:3] == [0, 0, 0]
    assert any(unscored) == (mode == "skip")
    with closing(sqlite3.connect(run / "rollouts.sqlite")) as store:
        used = store.execute(
            "SELECT COUNT(*) FROM groups WHERE state != 'waiting' AND step <= ?", (len(lines),)
        ).fetchone()[0]
    assert used == sum(line["groups"] for line in lines), "every group is in a step's line"

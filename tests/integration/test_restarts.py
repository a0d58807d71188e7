"""`--restarts` with a real daemon; tests/cli/test_supervisor.py has the aborts."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.processes import train, wait_for_step, write_config

pytestmark = pytest.mark.slow


def test_a_signal_to_the_parent_ends_both_with_a_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=500, interval=400)
    run = tmp_path / "checkpoints" / "run"
    with train(config, "--restarts", "2") as daemon:
        daemon.wait_until_ready()
        wait_for_step(daemon, run, 1)
        [child] = psutil.Process(daemon.process.pid).children()
        daemon.send(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0, daemon.output
    assert not child.is_running()
    assert (run / "latest").exists()
    assert "died" not in daemon.output

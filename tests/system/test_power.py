"""The power assertion of a Mac, with a `caffeinate` of our own on PATH."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from mlx_parallm.system import power
from mlx_parallm.system.log import configure_logging
from mlx_parallm.system.power import kept_awake
from tests.altered import Altered


@pytest.fixture
def caffeinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes its pid and arguments, then sleeps like the real one."""
    program = tmp_path / "caffeinate"
    record = tmp_path / "called"
    program.write_text(
        f'#!/bin/sh\necho "$$ $*" > {record}.tmp && mv {record}.tmp {record}\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return record


def test_is_held_for_the_block_on_a_mac(caffeinate: Path) -> None:
    with pytest.raises(RuntimeError), kept_awake("darwin"):
        deadline = time.monotonic() + 10
        while not caffeinate.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        pid, *arguments = caffeinate.read_text().split()
        assert arguments == ["-i", "-w", str(os.getpid())]
        assert psutil.pid_exists(int(pid))
        raise RuntimeError
    assert not psutil.pid_exists(int(pid))


def test_nothing_is_started_elsewhere(caffeinate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "subprocess", Altered(subprocess, Popen=None))
    with kept_awake("linux"):
        pass


def test_a_mac_without_it_trains_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure_logging(level="warning")
    monkeypatch.setenv("PATH", str(tmp_path))
    with capture_logs() as logs, kept_awake("darwin"):
        pass
    assert "sleep during training" in logs[0]["event"]

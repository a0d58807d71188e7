"""Trackers get every line, and never hold up or end a run. The real services:
tests/integration/test_logging.py."""

import json
import sqlite3
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.training import LoggingConfig
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.rl_training.monitor import trackers as module
from mlx_parallm.rl_training.monitor.trackers import (
    MAKERS,
    TrackedRun,
    Trackers,
    check_installed,
    flat,
)
from mlx_parallm.run_files.samples import Sample
from mlx_parallm.system import packages
from mlx_parallm.system.log import configure_logging

LINE = {
    "step": 3,
    "loss": 0.5,
    "kl": None,
    "gave_up": "why",
    "reward_by_environment": {"sort": 0.25},
}


class Recorder:
    def __init__(self) -> None:
        self.lines: list[int] = []
        self.closed = 0

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        self.lines.append(step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self.lines.append(-step)

    def close(self) -> None:
        self.closed += 1


class Failing(Recorder):
    def log(self, step: int, line: Mapping[str, Any]) -> None:
        raise OSError(f"no network at step {step}")


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    configure_logging(level="warning")
    return TrackedRun(tmp_path / "run", "project", {"a": 1})


def test_the_names_are_those_of_the_metrics_line() -> None:
    assert dict(flat(LINE)) == {
        "step": 3,
        "loss": 0.5,
        "gave_up": "why",
        "reward_by_environment/sort": 0.25,
    }


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_a_missing_package_is_named_with_its_extra(
    name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=rf"pip install '\.\[{name}\]' in the clone"):
        check_installed(LoggingConfig(trackers=(name,)))


def test_a_failing_tracker_is_one_warning_and_the_others_go_on(run: TrackedRun) -> None:
    def broken(_: TrackedRun) -> Recorder:
        raise RuntimeError("not logged in")

    good, bad = Recorder(), Failing()
    makers = {"good": lambda _: good, "bad": lambda _: bad, "broken": broken}
    with capture_logs() as logs:
        trackers = Trackers(("bad", "broken", "good"), run, makers=makers)
        for step in (1, 2, 3):
            trackers.log(LINE | {"step": step})
        trackers.samples(3, [])
        trackers.close()
        trackers.close()
    assert good.lines == [1, 2, 3, -3]
    assert (good.closed, bad.closed, bad.lines) == (1, 1, [-3])
    assert [(entry["tracker"], entry["problem"]) for entry in logs] == [
        ("broken", "RuntimeError: not logged in"),
        ("bad", "OSError: no network at step 1"),
    ]


def test_a_tracker_that_hangs_holds_nobody_up(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_LINES", 3)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    answer = threading.Event()

    def slow(_: TrackedRun) -> Recorder:
        answer.wait()
        return Recorder()

    with capture_logs() as logs:
        trackers = Trackers(("slow",), run, makers={"slow": slow})
        for step in range(10):
            trackers.log(LINE | {"step": step})
        trackers.close()
    answer.set()
    assert len(logs) == 1 and "behind" in logs[0]["problem"]


def test_none_starts_no_thread(run: TrackedRun) -> None:
    before = threading.active_count()
    trackers = Trackers((), run)
    trackers.log(LINE)
    trackers.close()
    assert threading.active_count() == before


def test_trackio_names_the_columns_of_samples(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trackio.Table` ignores `columns`: it takes their names from rows that are objects."""
    trackio = MagicMock()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    run.directory.mkdir()
    sample = Sample(1, "best", "sort", "g1", 0.5, "stop", 3, 1, None, {}, "prompt", "answer")
    MAKERS["trackio"](run).samples(1, [sample])
    [row] = trackio.Table.call_args.kwargs["data"]
    assert (row["which"], row["reward"], row["completion"]) == ("best", "0.5", "answer")


def test_trackio_has_every_key_and_a_resume_goes_on(
    run: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    run.directory.mkdir()
    for step in (1, 2):
        trackers = Trackers(("trackio",), run)
        trackers.log(LINE | {"step": step})
        trackers.close()
    with sqlite3.connect(tmp_path / "trackio" / "project.db") as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
    assert [step for _, step, _ in rows] == [1, 2]
    assert len({name for name, _, _ in rows}) == 1
    assert set(json.loads(rows[0][2])) == {"loss", "gave_up", "reward_by_environment/sort"}


@pytest.mark.parametrize("text", ["{broken", '{"wandb": 5}', "[]"])
def test_a_damaged_file_of_ids_is_named(text: str, tmp_path: Path) -> None:
    """The warning had the parser's words alone."""
    (tmp_path / "trackers.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"trackers\.json"):
        module._kept_id(tmp_path, "wandb")
    (tmp_path / "trackers.json").unlink()
    assert module._kept_id(tmp_path, "wandb") == module._kept_id(tmp_path, "wandb")

"""Orders of people to a run that continues: who may change what, where it is written, what a
resume makes of it."""

import threading
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.errors import CheckpointError, RefusedError, RequestError
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.run_files.directory import MARKS_FILE
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.run_files.resume import overridden_settings, restored_settings


class Loop:
    """Records what it is ordered to do; with a full disk, it cannot."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.changes = full, list[dict[str, Any]]()

    def save_now(self) -> str:
        if self.full:
            raise CheckpointError("no space left")
        return "step_000007"

    def change_settings(self, changes: Any) -> None:
        self.changes.append(dict(changes))


class Run:
    def __init__(self, path: Path, *, alone: bool = True, **training: Any) -> None:
        self.config = parse_config({"rl_training": training})
        self.stop, self.loop, self.path = threading.Event(), Loop(), path
        self.commands = RunCommands(path, self.stop, self.config, step=lambda: 7, alone=alone)

    def perform(self) -> None:
        self.commands.perform(self.loop, self.commands.keep)

    def marks(self) -> list[tuple[int, str, str]]:
        return [
            (line["step"], line["kind"], line["text"])
            for line in MetricsFile(self.path / MARKS_FILE).read()
        ]


def test_orders_wait_for_the_trainer_and_become_marks(tmp_path: Path) -> None:
    run = Run(tmp_path, learning_rate=1e-3)
    saved = run.commands.checkpoint()
    changed = run.commands.change({"learning_rate": 5e-4, "temperature": 1.0})
    run.commands.mark("note", "so far so good")
    assert (
        not saved.done() and not changed.done() and run.commands.settings()["learning_rate"] == 1e-3
    )
    run.perform()
    assert saved.result() == {"checkpoint": "step_000007"}
    assert changed.result() == {"learning_rate": [1e-3, 5e-4]}, "what stays is not a change"
    assert run.loop.changes == [{"learning_rate": [1e-3, 5e-4]}]
    assert run.commands.settings() == {"learning_rate": 5e-4, "kl_beta": 0.0, "temperature": 1.0}
    run.commands.stop()
    assert run.stop.is_set()
    assert run.marks() == [
        (7, "note", "so far so good"),
        (7, "checkpoint", "checkpoint step_000007"),
        (7, "settings", "learning_rate 0.001 → 0.0005"),
        (7, "stop", "stopped, with a checkpoint"),
    ]


def test_what_may_not_change(tmp_path: Path) -> None:
    same = {"deterministic": True, "max_staleness": 0}
    for training, alone, why in ((same, True, "bit for bit"), ({}, False, "other processes")):
        with pytest.raises(RefusedError, match=why):
            Run(tmp_path, alone=alone, **training).commands.change({"learning_rate": 1e-4})
    refused: list[tuple[dict[str, Any], dict[str, float], str]] = [
        ({}, {"seed": 3}, "only learning_rate, kl_beta, temperature can change"),
        ({}, {"learning_rate": 0.0}, "rl_training.learning_rate"),
        ({"algorithm": "ppo"}, {"learning_rate": 1e-4}, "the value head's rate"),
        ({}, {"kl_beta": 0.1}, "has no reference"),
        ({"kl_beta": 0.1}, {"kl_beta": 0.0}, "would lose its reference"),
        ({"kl_beta": 0.1, "kl_target": 0.05}, {"kl_beta": 0.2}, "kl_target steers"),
    ]
    for training, values, why in refused:
        with pytest.raises(RequestError, match=why):
            Run(tmp_path, **training).commands.change(values)
    run = Run(tmp_path, kl_beta=0.1)
    answer = run.commands.change({"kl_beta": 0.2})
    run.perform()
    assert answer.result() == {"kl_beta": [0.1, 0.2]}


def test_a_full_disk_ends_the_run_and_an_ended_run_refuses(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.loop.full = True
    saved, later = run.commands.checkpoint(), run.commands.checkpoint()
    with pytest.raises(CheckpointError):
        run.perform()
    assert isinstance(saved.exception(), CheckpointError)
    run.commands.close()
    assert isinstance(later.exception(), RefusedError)
    for order in (run.commands.checkpoint, run.commands.stop):
        with pytest.raises(RefusedError, match="has ended"):
            order()
    assert not run.stop.is_set() and run.marks() == []


def test_a_resume_goes_on_with_what_was_changed() -> None:
    changes = [
        {"step": 3, "settings": {"learning_rate": [1e-3, 5e-4]}},
        {"step": 5, "settings": {"learning_rate": [5e-4, 2e-4], "temperature": [1.0, 0.8]}},
    ]

    def config(**training: Any) -> Config:
        return parse_config({"rl_training": training})

    assert restored_settings(config(learning_rate=1e-3).rl_training.changeable(), changes) == {
        "learning_rate": 2e-4,
        "temperature": 0.8,
    }
    assert (
        restored_settings(
            config(learning_rate=2e-4, temperature=0.8).rl_training.changeable(), changes
        )
        == {}
    ), "the saved configuration"
    on_purpose = config(learning_rate=7e-4)
    assert restored_settings(on_purpose.rl_training.changeable(), changes) == {"temperature": 0.8}
    overridden = overridden_settings(on_purpose.rl_training.changeable(), changes)
    assert overridden == {"learning_rate": [2e-4, 7e-4]}
    assert (
        overridden_settings(config(learning_rate=1e-3).rl_training.changeable(), changes) == {}
    ), "the file that the run began with"
    changes.append({"step": 8, "settings": overridden})
    assert (
        restored_settings(config(learning_rate=1e-3).rl_training.changeable(), changes)[
            "learning_rate"
        ]
        == 7e-4
    ), "also from the old file"
    assert overridden_settings(config(learning_rate=7e-4).rl_training.changeable(), changes) == {}
    with_kl = [{"step": 3, "settings": {"kl_beta": [0.1, 0.2]}}]
    assert overridden_settings(config(kl_beta=0.3).rl_training.changeable(), with_kl) == {
        "kl_beta": [0.2, 0.3]
    }
    assert overridden_settings(config(kl_beta=0.0).rl_training.changeable(), with_kl) == {}, (
        "its file says whether there is a reference"
    )

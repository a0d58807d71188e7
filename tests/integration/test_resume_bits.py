"""A deterministic run that was killed and resumed writes the numbers of one that never was, and
so does a replay of it. Long form: tests/soak/resume_bits.py."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from tests.soak.resume_bits import Run, differences, kill_once, without_times

STEPS = 3
TRAINED = (
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "clip_fraction",
    "ratio_mean",
    "update_norm",
    "tokens",
    "reward_mean",
)
REPLAYS = """
import sys
from mlx_parallm.cli import replay
sys.exit(replay([sys.argv[1]]) or replay([sys.argv[1], "--from", "step_000002"]))
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("reference"), steps=STEPS)
    run.finish()
    return run


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_step_changes_no_bit(reference: Run, tmp_path: Path) -> None:
    killed = Run(tmp_path, steps=STEPS)
    _, step = kill_once(killed, "in a step", random.Random(3), steps=STEPS)
    assert step < STEPS
    killed.finish()
    assert differences(killed.lines(), reference.lines()) == []
    assert [line["step"] for line in killed.lines()] == list(range(1, STEPS + 1))
    assert all(line["loss"] is not None for line in killed.lines())
    assert killed.draws() == reference.draws() != {}
    assert killed.lines()[-1]["rows_unseen"] < 27


@pytest.mark.slow
def test_a_replay_with_the_settings_of_a_deterministic_run_repeats_it_bit_for_bit(
    reference: Run,
) -> None:
    subprocess.run([sys.executable, "-c", REPLAYS, str(reference.path)], check=True, timeout=120)
    again, later = (
        trained(list(MetricsFile(reference.path.with_name(name) / METRICS_FILE).read()))
        for name in ("run-replay", "run-replay-2")
    )
    assert again == trained(reference.lines())
    assert later == again[2:]
    assert len(later) == STEPS - 2


def trained(lines: list[dict[str, Any]]) -> list[list[Any]]:
    return [[line[key] for key in TRAINED] for line in lines]


def test_a_difference_of_one_bit_is_a_difference() -> None:
    line = {"step": 1, "loss": 0.1, "time_train_s": 1.0}
    other = line | {"loss": 0.10000000000000002, "time_train_s": 2.0}
    assert differences([line], [line | {"time_train_s": 3.0}]) == []
    assert differences([line], [other]) == ["1: loss 0.1 0.10000000000000002"]
    assert differences([line], [line | {"step": 2}]) == ["steps [1]"]
    assert without_times([line]) == [{"step": 1, "loss": 0.1}]

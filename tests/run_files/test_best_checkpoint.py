"""The best checkpoint is kept however old it is, and `best` points at it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.rl_training.checkpoint import Checkpointer
from mlx_parallm.rl_training.data.heldout_rows import SCORE
from mlx_parallm.run_files.best_checkpoint import score
from mlx_parallm.run_files.directory import find_checkpoint
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.run_files.trainer_state import TrainerState
from tests.rl_training.test_checkpoint import NoStore, in_progress, state_at, trained

BEST_AT = 20


def write_lines(run: Path, steps: range, rewards: dict[int, float], **values: Any) -> MetricsFile:
    metrics = MetricsFile(run / "metrics.jsonl")
    run.mkdir(exist_ok=True)
    for step in steps:
        metrics.append({"step": step, "reward_mean": rewards.get(step, 0.1), **values})
    return metrics


def test_the_score_is_the_mean_reward_of_ten_lines(tmp_path: Path) -> None:
    metrics = write_lines(tmp_path, range(1, 26), {step: step / 10 for step in range(1, 26)})
    assert score(metrics.path, 25) == pytest.approx(sum(range(16, 26)) / 100)
    assert score(tmp_path / "nothing.jsonl", 5) is None
    short = write_lines(tmp_path / "short", range(1, 10), {})
    assert score(short.path, 9) is None, "one lucky step is not a score"
    short.append({"step": 10, "reward_mean": None})
    assert score(short.path, 10) is None


def test_a_held_out_number_comes_first(tmp_path: Path) -> None:
    metrics = write_lines(tmp_path, range(1, 12), {})
    metrics.append({"step": 12, "reward_mean": 0.1, SCORE: 0.7, "eval/loss": 1.5})
    metrics.append({"step": 13, "reward_mean": 0.1, SCORE: None})
    assert score(metrics.path, 13) == 0.7


def test_lines_of_weights_that_a_rollback_left_are_no_score_of_those_that_are_back(
    tmp_path: Path,
) -> None:
    metrics = write_lines(tmp_path, range(1, 26), dict.fromkeys(range(16, 26), 0.5))
    assert score(metrics.path, 25, after=15) == 0.5
    assert score(metrics.path, 25, after=16) is None
    trainer = trained(steps=0)
    state = replace(
        state_at(25), rollbacks=[{"step": 25, "to": "version 1", "to_step": 1, "version": 26}]
    )
    saved = Checkpointer(tmp_path, trainer.policy, trainer.optimizer, keep=2, keep_best=True).save(
        state
    )
    assert TrainerState.read(saved).score is None


def saved_run(
    run: Path, keep: int = 2, *, keep_best: bool = True
) -> tuple[Checkpointer, MetricsFile]:
    """Checkpoints every ten steps up to 60; step 20 has the best ten rewards."""
    trainer = trained(steps=0)
    checkpointer = Checkpointer(
        run, trainer.policy, trainer.optimizer, keep=keep, keep_best=keep_best
    )
    for end in range(10, 61, 10):
        steps = range(end - 9, end + 1)
        metrics = write_lines(
            run, steps, dict.fromkeys(steps, 0.9 if end == BEST_AT else end / 100)
        )
        checkpointer.save(state_at(end))
    return checkpointer, metrics


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step_*"))


def test_it_is_never_pruned(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved_run(run)
    assert names(run) == ["step_000020", "step_000050", "step_000060"]
    assert (run / "best").readlink() == Path("step_000020")
    assert (run / "latest").resolve().name == "step_000060"
    assert TrainerState.read(run / "best").score == pytest.approx(0.9)
    assert find_checkpoint(str(run / "best"), tmp_path, None) == run / "step_000020"
    assert not list(run.glob("*.tmp-*"))


def test_a_better_one_takes_its_place_and_a_tie_goes_to_the_newer(tmp_path: Path) -> None:
    checkpointer, _ = saved_run(tmp_path)
    write_lines(tmp_path, range(61, 71), dict.fromkeys(range(61, 71), 0.9))
    checkpointer.save(state_at(70))
    assert names(tmp_path) == ["step_000060", "step_000070"]
    assert (tmp_path / "best").resolve().name == "step_000070"


def test_a_step_that_is_not_finished_is_no_candidate(tmp_path: Path) -> None:
    checkpointer, _ = saved_run(tmp_path)
    write_lines(tmp_path, range(61, 71), dict.fromkeys(range(61, 71), 1.0))
    checkpointer.save(state_at(70, in_progress=in_progress(2)))
    assert (tmp_path / "best").resolve().name == "step_000020"


def test_without_keep_best_the_oldest_go(tmp_path: Path) -> None:
    saved_run(tmp_path, keep_best=False)
    assert names(tmp_path) == ["step_000050", "step_000060"]
    assert not (tmp_path / "best").exists()


def test_a_best_of_a_timeline_that_was_left_is_the_best_no_more(tmp_path: Path) -> None:
    checkpointer, metrics = saved_run(tmp_path, keep=6)
    assert (tmp_path / "best").resolve().name == "step_000020"
    checkpointer.resume(tmp_path / "step_000010", NoStore(), metrics)
    assert (tmp_path / "best").resolve().name == "step_000010"
    assert names(tmp_path) == ["step_000010"]
    other = Checkpointer(tmp_path, checkpointer._policy, checkpointer._optimizer, keep=6)
    other.resume(tmp_path / "step_000010", NoStore(), metrics)
    assert not (tmp_path / "best").is_symlink(), "keep_best was switched off"

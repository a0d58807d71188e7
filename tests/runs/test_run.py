"""`Run`: what each part of a run directory is read as, whole, missing, cut short or damaged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_parallm.errors import CheckpointError, ConfigError, StoreError
from mlx_parallm.runs.run import FILES, Run, open_run

TWO_STEPS = Path(__file__).parents[1] / "data" / "two_steps"
HALF = '{"step": 2, "rew'


def test_a_step_leads_to_its_run(tmp_path: Path) -> None:
    assert (
        open_run(TWO_STEPS / "step_000002").path == open_run(TWO_STEPS).path == TWO_STEPS.resolve()
    )
    with pytest.raises(ConfigError, match="is not a run directory"):
        open_run(tmp_path)


def test_an_empty_directory_has_no_parts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [part for part in FILES if run.has(part) or run.version(part).strip("+")] == []
    assert (run.steps, run.total_steps, run.config, run.checkpoint()) == (0, None, None, None)
    assert (run.metrics, run.evaluations, run.marks(9), run.checkpoints()) == ([], [], [], [])
    assert list(run.spans(1, 9)) == list(run.events("paused")) == list(run.links(tmp_path)) == []
    assert run.token_values("g", 0, 0) == {}
    assert (run.running, run.state, run.waits) == (False, "stopped or killed", True)


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    for part in ("metrics", "evaluations", "marks", "spans", "log"):
        line = {"step": 1, "name": "rl.train", "event": "paused"}
        if part == "evaluations":
            line |= {"version": 1, "seconds": 0.5, "score": None, "environments": {}}
        Run(tmp_path).file(part).write_text(json.dumps(line) + "\n" + HALF)
    run = Run(tmp_path)
    parts = (
        run.metrics,
        run.evaluations,
        run.marks(9),
        [*run.spans(1, 9)],
        [*run.events("paused")],
    )
    assert [[line["step"] for line in lines] for lines in parts] == [[1]] * len(parts)


@pytest.mark.parametrize(
    ("part", "text", "read", "error"),
    [
        ("metrics", HALF + "\n{}\n", lambda run: run.metrics, CheckpointError),
        ("evaluations", HALF + "\n{}\n", lambda run: run.evaluations, CheckpointError),
        ("marks", HALF + "\n", lambda run: run.marks(9), CheckpointError),
        ("config", "[rl_training]\nalgorithm = 7\n", Run.load_config, ConfigError),
        ("config", None, Run.load_config, ConfigError),
        ("rollouts", None, Run.open_rollouts, StoreError),
        ("rollouts", "rubbish" * 100, Run.open_rollouts, StoreError),
    ],
)
def test_a_missing_or_damaged_file_is_named(
    tmp_path: Path,
    part: str,
    text: str | None,
    read: Callable[[Run], object],
    error: type[Exception],
) -> None:
    if text is not None:
        (tmp_path / FILES[part]).write_text(text)
    with pytest.raises(error, match=FILES[part]):
        read(Run(tmp_path))


def test_a_configuration_that_is_not_valid_any_more_still_says_how_many_steps(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.toml").write_text("[rl_training]\ntotal_steps = 9\nremoved_key = 1\n")
    assert (Run(tmp_path).config, Run(tmp_path).total_steps) == (None, 9)


def test_a_run_shows_one_moment_and_fresh_a_later_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.steps == 0 and run.version("metrics") == ""
    run.file("metrics").write_text('{"step": 1}\n')
    assert run.steps == 0 and run.version("metrics") != ""
    assert run.fresh().steps == 1

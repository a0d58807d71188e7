"""A run's disk: what is pruned after a checkpoint, and the end before it is full."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.load import parse_config
from mlx_parallm.config.training import RolloutsConfig
from mlx_parallm.errors import CheckpointError, ConfigError, StoreError
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.directory import DiskUse, RunDirectory
from mlx_parallm.run_files.spans import SpanLog
from mlx_parallm.system import files
from mlx_parallm.system.log import configure_logging
from tests.rollout_store.groups import make_group


def run_with(
    directory: Path, checkpoints: list[str], steps: int, **rollouts: Any
) -> tuple[RolloutStore, DiskUse]:
    """A run that took one group a step, named after it, and has these checkpoints."""
    store = RolloutStore(directory / "rollouts.sqlite")
    for step in range(1, steps + 1):
        store.add(make_group(f"g{step}"), source="test")
        store.take([f"g{step}"], step)
    for name in checkpoints:
        (directory / name).mkdir()
    return store, DiskUse(RunDirectory.hold(directory), store, RolloutsConfig(**rollouts), keep=3)


def whole(store: RolloutStore) -> list[int]:
    """Steps whose group still has its tokens."""
    found = []
    for step in range(1, store.counts().taken + 1):
        try:
            store.groups([f"g{step}"])
        except StoreError:
            continue
        found.append(step)
    return found


@pytest.mark.parametrize(
    ("checkpoints", "keep", "expected"),
    [
        (["step_000006", "step_000008"], 0, [7, 8, 9]),  # a resume from step 6 trains 7 to 9 again
        # the last four before the newest checkpoint
        (["step_000006", "step_000008"], 4, [5, 6, 7, 8, 9]),
        (["step_000006_mb0002", "step_000008"], 0, [7, 8, 9]),  # step 7 is half-trained
        (["step_000008", "superseded_step_000002"], 0, [9]),  # of a timeline that was left
        (["step_000008", "final"], "all", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ([], 0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_only_what_no_checkpoint_can_bring_back_is_pruned(
    tmp_path: Path, checkpoints: list[str], keep: Any, expected: list[int]
) -> None:
    store, use = run_with(tmp_path, checkpoints, 9, keep=keep)
    use.prune()
    assert whole(store) == expected
    store.close()


def test_a_file_above_its_size_that_cannot_be_pruned_is_warned_about_once(tmp_path: Path) -> None:
    store, use = run_with(tmp_path, ["step_000000"], 3, max_gb=1e-5)
    configure_logging(level="warning")
    with capture_logs() as logs:
        use.prune()
        use.prune()
    assert whole(store) == [1, 2, 3]
    assert len(logs) == 1
    assert logs[0]["event"].startswith("rollouts.sqlite is larger than rollouts.max_gb")
    store.close()


def test_a_disk_below_the_reserve_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RolloutStore(tmp_path / "rollouts.sqlite", min_free_bytes=10**9)
    use = DiskUse(RunDirectory.hold(tmp_path), store, RolloutsConfig(), keep=3)
    monkeypatch.setattr(files, "free_bytes", lambda directory: 10**9)
    use.check()
    monkeypatch.setattr(files, "free_bytes", lambda directory: 10**9 // 2)
    with pytest.raises(CheckpointError, match=r"0\.50 GB .*--resume"):
        use.check()
    store.close()


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_a_directory_that_was_removed_ends_the_training(tmp_path: Path, again: bool) -> None:
    """The store would take groups that nobody finds again; and spans, which a run does not end
    for."""
    run = tmp_path / "run"
    store, use = run_with_new(run)
    use.check()
    spans = SpanLog(run)
    shutil.rmtree(run)
    if again:
        RunDirectory.hold(run)
    with pytest.raises(CheckpointError, match="removed or replaced"):
        use.check()
    spans._lines.append("{}\n")
    spans.flush()
    store.close()


def run_with_new(run: Path) -> tuple[RolloutStore, DiskUse]:
    run.mkdir()
    return run_with(run, [], 0)


@pytest.mark.parametrize(
    "values", [{"keep": -1}, {"keep": "some"}, {"max_gb": -1}, {"min_free_gb": -0.1}]
)
def test_bad_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"rollouts\.{next(iter(values))}"):
        parse_config({"rollouts": values})

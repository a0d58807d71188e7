"""Whatever is renamed and removed, there is a checkpoint to go on from."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.system import files
from mlx_parallm.rl_training.checkpoint import OPTIMIZER_FILE, find_checkpoint
from mlx_parallm.rl_training.checkpoints.trainer_state import STATE_FILE, TrainerState
from tests.rl_training.checkpoints.test_checkpoint import make_checkpointer, state_at, trained


@pytest.mark.parametrize("step", [2, 5])
def test_one_kept_checkpoint_is_always_there(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep = 1: before and after every rename and removal a resume finds one. Step 2 is saved again, as after a
    rollback; step 5 takes its place."""
    run, found = tmp_path / "run", []
    checkpointer = make_checkpointer(run, trained(steps=0), keep=1)
    checkpointer.save(state_at(1))
    checkpointer.save(state_at(2))

    def watched(original: Any) -> Any:
        def call(*args: Any, **others: Any) -> Any:
            for moment in ("before", "after"):
                checkpoint = find_checkpoint(str(run), tmp_path, None)
                assert checkpoint is not None
                there = {path.name for path in checkpoint.iterdir()}
                assert {STATE_FILE, OPTIMIZER_FILE, "adapters.safetensors"} <= there
                found.append(TrainerState.read(checkpoint).policy_version)
                if moment == "before":
                    result = original(*args, **others)
            return result

        return call

    for owner, name in ((shutil, "rmtree"), (Path, "rename"), (Path, "replace"), (files, "_exchanged")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    checkpointer.save(replace(state_at(step), policy_version=9))
    monkeypatch.undo()
    assert (found[0], found[-1]) == (2, 9)
    assert sorted(path.name for path in run.iterdir()) == ["latest", f"step_{step:06d}"]

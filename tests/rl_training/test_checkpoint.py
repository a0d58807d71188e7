"""Checkpoints: complete, atomic, found again. Kills and full disks are real ones, in processes
of their own."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from structlog.testing import capture_logs

from mlx_parallm.errors import AdapterError, CheckpointError
from mlx_parallm.models.lora import find_adapter_file, load_adapter
from mlx_parallm.rl_training import checkpoint as checkpoint_module
from mlx_parallm.rl_training.checkpoint import OPTIMIZER_FILE, Checkpointer, CheckpointVersions
from mlx_parallm.rl_training.step.prepare import StepPosition
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.directory import find_checkpoint
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.run_files.trainer_state import (
    STATE_FILE,
    StepInProgress,
    TrainerState,
)
from mlx_parallm.run_files.versions import VersionNumbers
from mlx_parallm.system import files
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights
from tests.clock import Clock
from tests.rl_training.making import (
    adapter_arrays,
    assert_same_training,
    make_config,
    make_trainer,
    weights,
)
from tests.rl_training.rollouts import make_batch, random_groups
from tests.rl_training.scoring import assert_same_metrics
from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[2]


class NoStore:
    def __init__(self) -> None:
        self.restored: list[int] = []

    def restore(self, consumed_up_to_step: int, *, keep_drops_of: int | None = None) -> int:
        self.restored.append(consumed_up_to_step)
        return 0


def make_checkpointer(run: Path, trainer: Trainer, keep: int = 3) -> Checkpointer:
    return Checkpointer(run, trainer.policy, trainer.optimizer, keep=keep)


def state_at(step: int, **values: Any) -> TrainerState:
    return TrainerState(
        step=step, policy_version=step, versions=[[0, 0], [step or 1, step]], **values
    )


def trained(steps: int = 2, **values: Any) -> Trainer:
    trainer = make_trainer(make_config(**values))
    for step in range(1, steps + 1):
        trainer.train_step(make_batch(random_groups(4, seed=step), step=step))
    return trainer


@pytest.mark.parametrize("lora", [True, False])
def test_everything_comes_back(lora: bool, tmp_path: Path) -> None:
    """Trained on from the checkpoint = trained on without a break; the same random numbers
    follow."""
    trainer = trained(lora=lora)
    metrics = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    checkpointer = make_checkpointer(tmp_path / "run", trainer)
    for step in (1, 2):
        metrics.append({"step": step})
    saved = state_at(
        2, sources={"environments": {"next_group": 17}}, optimizer_updates=4, metrics={"step": 2}
    )
    mx.random.seed(3)
    np.random.seed(4)
    random.seed(5)
    path = checkpointer.save(saved)
    drawn = (mx.random.uniform(shape=(3,)).tolist(), np.random.rand(), random.random())
    metrics.append({"step": 3})

    other = make_trainer(make_config(lora=lora))
    store = NoStore()
    configure_logging(level="info")
    with capture_logs() as logs:
        state = make_checkpointer(tmp_path / "run", other).resume(path, store, metrics)
    assert [(line["event"], line["checkpoint"], line["steps"]) for line in logs] == [
        ("resumed", "step_000002", 2)
    ]
    assert (mx.random.uniform(shape=(3,)).tolist(), np.random.rand(), random.random()) == drawn
    assert replace(state, random_state={}) == saved
    assert store.restored == [2]
    assert [line["step"] for line in metrics.read()] == [1, 2]
    batch = make_batch(random_groups(4, seed=9), step=3)
    for name, array in weights(trainer).items():
        np.testing.assert_array_equal(weights(other)[name], array)
    trainer.train_step(batch)
    other.train_step(batch)
    assert_same_training(weights(other), weights(trainer))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint of step 2."""
    run = tmp_path_factory.mktemp("sound") / "run"
    make_checkpointer(run, trained(1)).save(state_at(2))
    return run


def damaged(
    sound: Path, place: Path, change: Callable[[Path], object]
) -> tuple[str, NoStore, list[int]]:
    """Resume a copy of the run after `change` of its checkpoint. Return the error and what it
    has done meanwhile."""
    shutil.copytree(sound, place, symlinks=True)
    change(place / "step_000002")
    metrics, store = MetricsFile(place / "metrics.jsonl"), NoStore()
    for step in (1, 2, 3):
        metrics.append({"step": step})
    with pytest.raises(CheckpointError) as error:
        make_checkpointer(place, make_trainer(make_config())).resume(
            place / "step_000002", store, metrics
        )
    return str(error.value), store, [line["step"] for line in metrics.read()]


def flip(file: Path) -> None:
    """Change a few bytes in the middle."""
    content = bytearray(file.read_bytes())
    middle = len(content) * 3 // 4
    content[middle : middle + 4] = bytes(byte ^ 1 for byte in content[middle : middle + 4])
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["adapters.safetensors", OPTIMIZER_FILE])
def test_a_file_of_a_checkpoint_that_changed_is_told(
    name: str, sound: Path, tmp_path: Path
) -> None:
    error, store, steps = damaged(
        sound, tmp_path / "run", lambda checkpoint: flip(checkpoint / name)
    )
    assert f"damaged: {name}" in error and "remove SHA256SUMS" in error
    assert store.restored == [] and steps == [1, 2, 3]


def edited(**values: Any) -> Callable[[Path], None]:
    """Change keys of trainer_state.json by hand: the checksums are removed too."""

    def change(checkpoint: Path) -> None:
        (checkpoint / "SHA256SUMS").unlink()
        file = checkpoint / STATE_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": -5}, "step: .*greater than or equal to 0"),
        ({"step": "2"}, "step: .*valid integer"),
        ({"step": 10**20}, "step: .*"),
        ({"versions": [[1, "x"]]}, "versions.0.1: "),
        ({"in_progress": {"step": 3}}, "in_progress.group_ids: .*required"),
        ({"random_state": {"mlx": 3}}, "damaged: random_state: "),
        ({"random_state": {}}, "damaged: random_state: "),
        (
            {"random_state": {"mlx": [[0, 1]], "numpy": ["MT19937", [1, 2], 0, 0, 0.0]}},
            "IndexError",
        ),
        ({"versions": []}, "versions: "),
        ({"versions": [[1]]}, "versions.0: "),
        ({"versions": [[2, 1], [1, 2]]}, "versions: .*count upwards"),
        ({"changes": [{"step": 1}]}, "changes.0.settings: "),
        ({"changes": [{"step": 1, "settings": {"learning_rate": 5}}]}, "changes.0.settings"),
        ({"changes": [{"step": 1, "settings": {"seed": [1, 2]}}]}, "only learning_rate, "),
        ({"rollbacks": [{"step": 1}]}, "rollbacks.0.to: "),
        (
            {"in_progress": {"step": 3, "group_ids": [], "position": {}, "statistics": {}}},
            "in_progress.position: ",
        ),
        ({"more": 1}, "unknown keys more"),
    ],
)
def test_a_state_that_no_run_can_have_changes_nothing(
    values: dict[str, Any], message: str, sound: Path, tmp_path: Path
) -> None:
    """A step of -5 had cut metrics.jsonl to nothing and put all groups back before the error."""
    error, store, steps = damaged(sound, tmp_path / "run", edited(**values))
    assert re.search(message, error) and STATE_FILE in error and "\n" not in error
    assert store.restored == [] and steps == [1, 2, 3]


def test_metrics_that_cannot_be_read_change_nothing(sound: Path, tmp_path: Path) -> None:
    def change(checkpoint: Path) -> None:
        (checkpoint.parent / "metrics.jsonl").write_bytes(b'{"step": 1, "x": "\xff"}\n')

    shutil.copytree(sound, tmp_path / "run", symlinks=True)
    change(tmp_path / "run" / "step_000002")
    metrics, store = MetricsFile(tmp_path / "run" / "metrics.jsonl"), NoStore()
    metrics.append({"step": 2})
    with pytest.raises(CheckpointError, match="line 1: not JSON: 'utf-8'"):
        make_checkpointer(tmp_path / "run", make_trainer(make_config())).resume(
            tmp_path / "run" / "step_000002", store, metrics
        )
    assert store.restored == []


def test_missing_lines_of_metrics_are_told(sound: Path, tmp_path: Path) -> None:
    """A metrics.jsonl that was lost began again at the checkpoint, without a word."""
    shutil.copytree(sound, tmp_path / "run", symlinks=True)
    metrics = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    metrics.append({"step": 2})
    configure_logging(level="info")
    with capture_logs() as logged:
        make_checkpointer(tmp_path / "run", make_trainer(make_config())).resume(
            tmp_path / "run" / "step_000002", NoStore(), metrics
        )
    (warning,) = [line for line in logged if line["log_level"] == "warning"]
    assert (warning["lines"], warning["steps"]) == (1, 2)


def test_a_checkpoint_without_checksums_is_resumed(sound: Path, tmp_path: Path) -> None:
    """Versions before had none."""
    shutil.copytree(sound, tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / "step_000002"
    listed = (path / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in listed} == {file.name for file in path.iterdir()} - {
        "SHA256SUMS"
    }
    first = (path / STATE_FILE).read_bytes()
    assert f"{hashlib.sha256(first).hexdigest()}  {STATE_FILE}" in listed
    (path / "SHA256SUMS").unlink()
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    state = make_checkpointer(tmp_path / "run", make_trainer(make_config())).resume(
        path, NoStore(), metrics
    )
    assert state.step == 2


def test_an_initial_reference_comes_back(tmp_path: Path) -> None:
    values = {"kl_beta": 0.1, "reference": "initial"}
    trainer = trained(**values)
    path = make_checkpointer(tmp_path, trainer).save(state_at(2))
    other = make_trainer(make_config(**values))
    # another start
    other.policy.reference_arrays = [mx.ones(array.shape) for array in other.policy.slots.read()]
    make_checkpointer(tmp_path, other).resume(
        path, NoStore(), MetricsFile(tmp_path / "metrics.jsonl")
    )
    batch = make_batch(random_groups(4, seed=9), step=3)
    expected = trainer.train_step(batch).metrics
    assert expected["kl"] > 1e-4
    assert_same_metrics(other.train_step(batch).metrics, expected)


def test_copies_for_a_fault_of_the_gpu_take_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that takes a second is made again after 200 s; one that a checkpoint has overtaken is
    dropped, and made again at once."""
    trainer, clock = trained(), Clock(1000.0)
    checkpointer, copy = make_checkpointer(tmp_path, trainer), trainer.optimizer.host_copy
    steps = list[int]()

    def slowly(most_bytes: int) -> Any:
        steps.append(step)
        clock.now += 1.0
        return copy(most_bytes)

    monkeypatch.setattr(checkpoint_module, "time", clock)
    monkeypatch.setattr(trainer.optimizer, "host_copy", slowly)
    for step in range(1, 9):
        checkpointer.keep(state_at(step), None)
        if step == 6:
            checkpointer.save(state_at(step))
        clock.now += 79.0
    assert steps == [1, 4, 7]
    device = mx.default_device()
    try:
        saved = checkpointer.save_kept()
    finally:
        mx.set_default_device(device)
    assert saved is not None and saved.name == "step_000007"
    assert checkpointer.save_kept() is None


def test_adapters_are_mlx_lms(tmp_path: Path) -> None:
    from mlx_lm.tuner.utils import load_adapters

    from tests.rl_training.tiny_models import make_model

    trainer = trained()
    path = make_checkpointer(tmp_path / "run", trainer).save(state_at(2), final=True)
    model = load_adapters(make_model(), str(path))
    tokens = mx.array([[1, 5, 9, 3]])
    assert mx.allclose(model(tokens), trainer.policy.model(tokens), atol=1e-5).item()
    for place in ("run/final", "final", "latest"):  # the last two are the specification's
        read = load_adapter(tmp_path / place / "lora_weights.safetensors")
        for name, array in adapter_arrays(dict(read.layers)).items():
            np.testing.assert_array_equal(array, adapter_arrays(trainer.policy.adapter())[name])


def test_full_weights_are_a_model_directory(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    trainer = trained(lora=False)
    path = make_checkpointer(tmp_path / "run", trainer).save(state_at(2), final=True)
    model, _ = load_model(path)
    tokens = mx.array([[1, 5, 9, 3]])
    assert mx.allclose(model(tokens), trainer.policy.model(tokens), atol=1e-6).item()
    size = (tmp_path / "run" / "final" / "model.safetensors").stat()
    assert size.st_nlink == 2, "final shares its files with the step"


@pytest.mark.parametrize("name", ["free_bytes", "point"])
def test_a_run_directory_that_is_removed_during_a_save_is_a_clear_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the room is measured, and before `latest` is written. Looked at besides:
    `write_directory` (makes it again, and `DiskUse.check` ends the run), metrics.jsonl (its
    append says so), spans.jsonl (left out, a warning)."""
    run = tmp_path / "run"
    checkpointer = make_checkpointer(run, trained(1), keep=1)
    checkpointer.save(state_at(1))
    call = getattr(checkpoint_module, name)

    def gone(*args: Any, **options: Any) -> Any:
        shutil.rmtree(run, ignore_errors=True)
        return call(*args, **options)

    monkeypatch.setattr(checkpoint_module, name, gone)
    with pytest.raises(
        CheckpointError,
        match=r"(step_000002|latest) cannot be written: .*No such file or directory",
    ):
        checkpointer.save(state_at(2))


def test_old_ones_go_and_latest_follows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpointer = make_checkpointer(run, trained(steps=0), keep=2)
    for step in (9, 99, 1000):
        checkpointer.save(state_at(step))
        assert (run / "latest").resolve().name == f"step_{step:06d}"
    assert sorted(p.name for p in run.iterdir()) == ["latest", "step_000099", "step_001000"]
    assert (tmp_path / "latest").resolve() == run / "step_001000"


@pytest.mark.parametrize(
    ("target", "then"), [("data", "data"), ("data/x", "data/x"), ("other/latest", "run/latest")]
)
def test_a_link_of_the_users_beside_the_run_stays(tmp_path: Path, target: str, then: str) -> None:
    (tmp_path / "latest").symlink_to(target)
    make_checkpointer(tmp_path / "run", trained(steps=0)).save(state_at(1))
    assert (tmp_path / "latest").readlink() == Path(then)


def in_progress(mini_batches: int) -> StepInProgress:
    position = StepPosition(
        next_mini_batch=mini_batches, updates=mini_batches, order=(1, 0)
    ).to_json()
    return StepInProgress(3, ("a", "b"), position, {"groups": 2})


def test_a_step_in_progress_has_a_name_of_its_own(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, trained(steps=0))
    checkpointer.save(state_at(2))
    path = checkpointer.save(state_at(2, in_progress=in_progress(3)))
    assert path.name == "step_000002_mb0003"
    assert find_checkpoint(str(tmp_path), tmp_path.parent, None) == path
    state = TrainerState.read(path)
    assert state.in_progress == replace(
        in_progress(3), position=json.loads(json.dumps(in_progress(3).position))
    )
    assert StepPosition.from_json(state.in_progress.position).order == (1, 0)


def test_weights_that_were_never_served_get_a_version_of_their_own() -> None:
    state = state_at(4, unpublished=True)
    assert state.restored_versions(VersionNumbers()).newest == (5, 4)
    assert state_at(4).restored_versions(VersionNumbers()).newest == (4, 4)


def test_going_back_sets_the_newest_later_checkpoint_aside(tmp_path: Path) -> None:
    trainer = trained(steps=0)
    checkpointer = make_checkpointer(tmp_path, trainer)
    for step in (1, 2, 3):
        checkpointer.save(state_at(step))
    checkpointer.resume(
        tmp_path / "step_000001", NoStore(), MetricsFile(tmp_path / "metrics.jsonl")
    )
    assert sorted(p.name for p in tmp_path.glob("*step_*")) == [
        "step_000001",
        "superseded_step_000003",
    ]
    assert (tmp_path / "latest").resolve().name == "step_000001"
    assert checkpointer.save(state_at(2)).name == "step_000002"


def test_only_the_newest_timeline_that_ended_is_kept(tmp_path: Path) -> None:
    """… and one that is gone back to, although it had been set aside."""
    checkpointer = make_checkpointer(tmp_path, trained(steps=0))
    metrics = MetricsFile(tmp_path / "metrics.jsonl")

    def go_back(name: str) -> list[str]:
        checkpointer.resume(tmp_path / name, NoStore(), metrics)
        return sorted(p.name for p in tmp_path.glob("*step_*"))

    for step in (1, 4):
        checkpointer.save(state_at(step))
    assert go_back("step_000001") == ["step_000001", "superseded_step_000004"]
    assert go_back("step_000001") == ["step_000001", "superseded_step_000004"], (
        "nothing new was set aside"
    )
    checkpointer.save(state_at(2))
    assert go_back("step_000001") == ["step_000001", "superseded_step_000002"]
    for step in (3, 5):
        checkpointer.save(state_at(step))
    found = go_back("superseded_step_000002")
    assert found == ["step_000001", "superseded_step_000002", "superseded_step_000005"]


# ---------------------------------------------------------------------- what --resume means


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """checkpoints/old (step 5000) and checkpoints/new (steps 2 and 5000; saved last)."""
    trainer = trained(steps=0)
    make_checkpointer(tmp_path / "old", trainer).save(state_at(5000))
    new = make_checkpointer(tmp_path / "new", trainer)
    new.save(state_at(2))
    new.save(state_at(5000), final=True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}/new", "new/step_005000"),
        ("{}/new/", "new/step_005000"),
        ("{}/new/step_000002", "new/step_000002"),
        ("{}/new/step_2/", "new/step_000002"),
        ("{}/old/latest", "old/step_005000"),
        ("{}/new/final", "new/final"),
        ("{}/latest", "new/step_005000"),
        ("{}/step_5000/", "new/step_005000"),
        ("{}/step_2", "new/step_000002"),
        ("new", "new/step_005000"),
        ("step_5000", "new/step_005000"),
    ],
)
def test_what_resume_means(runs: Path, text: str, found: str) -> None:
    assert find_checkpoint(text.format(runs), runs, None) == (runs / found).resolve()


def test_the_runs_own_name_comes_first(runs: Path) -> None:
    assert find_checkpoint(f"{runs}/step_5000/", runs, "old") == runs / "old" / "step_005000"
    assert find_checkpoint("auto", runs, "old") == runs / "old" / "step_005000"
    assert find_checkpoint("auto", runs, "another") is None
    assert find_checkpoint("auto", runs, None) is None


def test_auto_survives_a_latest_that_points_nowhere(runs: Path) -> None:
    shutil.rmtree(runs / "new" / "step_005000")
    assert find_checkpoint("auto", runs, "new") == runs / "new" / "step_000002"


@pytest.mark.parametrize("text", ["{}/nothing", "{}/step_7", "step_7"])
def test_nothing_there_says_what_there_is(runs: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match="new, old"):
        find_checkpoint(text.format(runs), runs, None)


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("content", ["", "{", '{"step": 1}', '{"schema_version": 99}'])
def test_a_damaged_state_is_a_clear_error(content: str, tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        TrainerState.read(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = make_checkpointer(tmp_path, make_trainer(make_config(rank=2))).save(state_at(1))
    other = make_trainer(make_config(rank=4))
    with pytest.raises(AdapterError, match="configuration"):
        make_checkpointer(tmp_path, other).resume(
            path, NoStore(), MetricsFile(tmp_path / "metrics.jsonl")
        )


def test_a_failed_save_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = make_checkpointer(tmp_path, trained(steps=0))
    checkpointer.save(state_at(1))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module.mx, "save_safetensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.save(state_at(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001"]


SAVE = """
import sys
from pathlib import Path
from tests.rl_training.test_checkpoint import make_checkpointer, state_at, trained
{prepare}
checkpointer = make_checkpointer(Path(sys.argv[1]), trained(steps=1))
{act}
"""


def run_saver(run: Path, *, prepare: str = "", act: str) -> subprocess.CompletedProcess[str]:
    program = SAVE.format(prepare=prepare, act=act)
    return subprocess.run(
        [sys.executable, "-c", program, str(run)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


KILLER = """
import os, signal
from mlx_parallm.rl_training import checkpoint
from mlx_parallm.system import files
calls = []
def die(*arguments, at={at}, **keywords):
    calls.append(1)
    if len(calls) > at:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **keywords)
original = {name}
{name} = die
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at"),
    [
        # adapter, optimizer; adapter | optimizer of the second save
        ("checkpoint.mx.save_safetensors", 3),
        ("files.sync", 10),  # between two files of the second save
        ("checkpoint.point", 2),  # renamed, `latest` not yet moved
    ],
)
def test_kill_9_in_the_middle_of_a_save_leaves_the_one_before(
    name: str, at: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = run_saver(
        run,
        prepare=KILLER.format(name=name, at=at),
        act=(
            "checkpointer.save(state_at(1)); print('first saved', flush=True);"
            " checkpointer.save(state_at(2))"
        ),
    )
    assert result.returncode == -9, result.stderr
    assert "first saved" in result.stdout
    found = find_checkpoint(str(run), tmp_path, None)
    assert found is not None
    other = make_trainer(make_config())
    checkpointer = make_checkpointer(run, other)
    checkpointer.resume(found, NoStore(), MetricsFile(run / "metrics.jsonl"))
    assert not list(run.glob("*.tmp-*")), "what was half-written is removed at the next start"
    assert_same_training(weights(other), weights(trained(steps=1)))


def test_kill_9_while_a_checkpoint_is_replaced_leaves_the_old_one(tmp_path: Path) -> None:
    """Where names cannot be exchanged, there is a moment when neither is there: moved away, not
    yet replaced."""
    trainer = trained(steps=0)
    path = make_checkpointer(tmp_path, trainer).save(state_at(1))
    path.rename(tmp_path / "step_000001.tmp-old")
    (tmp_path / "step_000001.tmp-123").mkdir()
    make_checkpointer(tmp_path, trainer)
    assert find_checkpoint(str(tmp_path), tmp_path.parent, None) == path
    assert not (tmp_path / "step_000001.tmp-123").exists()


@pytest.mark.slow
def test_a_disk_that_fills_up_is_a_clear_error(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse the bytes of the second save's optimizer file."""
    run = tmp_path / "run"
    result = run_saver(
        run,
        prepare="import resource, signal; from mlx_parallm.errors import CheckpointError",
        act=(
            "checkpointer.save(state_at(1)); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
            "try:\n    checkpointer.save(state_at(2))\n"
            "except CheckpointError as error:\n    print('refused:', error)"
        ),
    )
    assert "refused:" in result.stdout, result.stderr
    assert "step_000002 cannot be written" in result.stdout
    assert sorted(p.name for p in run.iterdir()) == ["latest", "step_000001"]
    assert find_adapter_file(run / "latest").is_file()


@pytest.mark.slow
@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="mounting a small file system needs root"
)
def test_a_small_file_system_that_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        checkpointer = make_checkpointer(disk / "run", trained(steps=0), keep=9)
        saved = []
        with pytest.raises(
            CheckpointError,
            match=r"0\.\d\d MB .*step_000001",
        ):
            for step in range(1, 9):
                saved.append(checkpointer.save(state_at(step)).name)
        assert saved
        assert sorted(p.name for p in (disk / "run").iterdir()) == ["latest", *saved]
        assert (disk / "run" / "latest").resolve().name == saved[-1]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_checkpoints_whose_weights_were_served_have_their_version(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, make_trainer(make_config()), keep=3)
    archive = CheckpointVersions(tmp_path)
    assert archive.versions() == []
    for step in (1, 2, 3, 4):
        checkpointer.save(state_at(step, unpublished=step == 3))
    assert archive.versions() == [2, 4], "the first is gone, the third was never served"
    with pytest.raises(AdapterError, match="version 3"):
        archive.load(3)
    saved = load_adapter(tmp_path / "step_000002").layers
    weights = SharedWeights(
        make_model(), policy="policy", version=5, keep_versions=2, archive=archive
    )
    weights.add_adapter("policy", saved)
    assert weights.history.versions() == [2, 4, 5]
    load = weights.loader("policy@2")
    assert load is not None
    load()
    place = weights.find("policy@2")
    assert place is not None and place.pinned and place.weights.version == 2
    assert all(mx.array_equal(place.weights.layers[path].a, pair.a) for path, pair in saved.items())


@pytest.mark.parametrize("step", [2, 5])
def test_one_kept_checkpoint_is_always_there(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """keep = 1: before and after every rename and removal a resume finds one. Step 2 is saved
    again, as after a rollback; step 5 takes its place."""
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

    for owner, name in (
        (shutil, "rmtree"),
        (Path, "rename"),
        (Path, "replace"),
        (files, "_exchanged"),
    ):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    checkpointer.save(replace(state_at(step), policy_version=9))
    monkeypatch.undo()
    assert (found[0], found[-1]) == (2, 9)
    assert sorted(path.name for path in run.iterdir()) == ["latest", f"step_{step:06d}"]

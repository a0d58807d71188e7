"""Going back between two steps: weights and optimizer of then, a new number, stale rollouts of
what was left."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.errors import CheckpointError, RefusedError
from mlx_parallm.rl_training.loop import RunControl
from mlx_parallm.rl_training.publish.rollback import RollbackTarget
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.trainer_state import TrainerState
from tests.rl_training.bandit_run import Run, running
from tests.rl_training.making import weights
from tests.rl_training.rollouts import make_group


class Asking:
    """Asks for a rollback when a step has ended; notes weights and optimizer after every step."""

    def __init__(self, step: int, target: RollbackTarget) -> None:
        self.step, self.target = step, target
        self.run: Run | None = None
        self.future: Future[dict[str, Any]] | None = None
        self.weights: dict[int, dict[str, np.ndarray]] = {}
        self.optimizer: dict[int, dict[str, np.ndarray]] = {}

    def __call__(self, line: dict[str, Any]) -> None:
        assert self.run is not None
        trainer = self.run.parts.trainer
        self.weights[line["step"]] = weights(trainer)
        self.optimizer[line["step"]] = {
            name: np.array(a) for name, a in trainer.optimizer.state().items()
        }
        if line["step"] == self.step:
            service, target = self.run.rollback_service, self.target
            self.future = service.request(
                version=target.version, checkpoint=target.checkpoint
            ).result


def roll_back(
    tmp_path: Path, step: int, target: RollbackTarget, **values: Any
) -> tuple[Asking, Run]:
    """A run of 5 steps with a rollback after `step`; stopped right after it was done."""
    asking = Asking(step, target)
    stopping: list[bool] = []
    control = RunControl(after_step=asking, should_stop=lambda: bool(stopping))
    with running(
        tmp_path / "run", control=control, **{"total_steps": 5, "checkpoint_interval": 9} | values
    ) as run:
        asking.run = run
        request = run.parts.buffer.choose_again
        run.parts.buffer.choose_again = lambda: (request(), stopping.append(True))[0]  # type: ignore[method-assign]
        run.loop.run()
    return asking, run


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(array, other[name]) for name, array in one.items()
    )


@pytest.mark.parametrize(
    ("target", "values"),
    [
        (RollbackTarget(version=2), {"weight_updates": {"rollback_versions": 3}}),
        (RollbackTarget(version=2), {"checkpoint_interval": 2}),
        (RollbackTarget(checkpoint="step_000002"), {"checkpoint_interval": 2}),
    ],
)
def test_weights_and_optimizer_are_those_of_then_under_a_new_number(
    tmp_path: Path, target: RollbackTarget, values: dict[str, Any]
) -> None:
    asking, run = roll_back(tmp_path, 3, target, **values)
    assert asking.future is not None
    told = asking.future.result(timeout=0)
    assert told == {"to": str(target), "to_step": 2, "step": 3, "policy_version": 4}
    trainer = run.parts.trainer
    assert same(weights(trainer), asking.weights[2])
    assert not same(weights(trainer), asking.weights[3])
    now = {name: np.array(array) for name, array in trainer.optimizer.state().items()}
    assert same(now, asking.optimizer[2])
    assert run.shared.version == 4
    served = run.shared.adapters()["policy"]
    assert all(
        mx.array_equal(served.layers[path].b, pair.b).item()
        for path, pair in trainer.policy.adapter().items()
    )
    state = TrainerState.read(run.directory / "latest")
    assert (state.step, state.policy_version, len(state.rollbacks)) == (3, 4, 1)
    assert state.rollbacks[0]["to"] == str(target)
    assert run.parts.versions.staleness((2,), 4) == run.parts.versions.staleness((4,), 4) == 0
    assert run.parts.versions.staleness((1,), 4) == 1
    assert run.parts.versions.staleness((3,), 4) > 10**9


def test_the_run_goes_on_and_says_so_once(tmp_path: Path) -> None:
    asking = Asking(3, RollbackTarget(version=2))
    values = {
        "weight_updates": {"rollback_versions": 3},
        "total_steps": 5,
        "checkpoint_interval": 9,
    }
    with running(tmp_path / "run", control=RunControl(after_step=asking), **values) as run:
        asking.run = run
        assert run.loop.run() == "finished"
        assert [line["step"] for line in run.lines] == [1, 2, 3, 4, 5]
        assert [line["policy_version"] for line in run.lines] == [1, 2, 3, 5, 6]
        assert [line["rolled_back_to"] for line in run.lines] == [
            None,
            None,
            None,
            "version 2",
            None,
        ]
        assert {line["staleness"] for line in run.lines} == {0.0}
        assert (
            json.loads((run.directory / "final/trainer_state.json").read_text())["rollbacks"][0][
                "version"
            ]
            == 4
        )


def test_a_kill_right_after_the_answer_does_not_undo_it(tmp_path: Path) -> None:
    """The resumed run has the weights that are back, and its next line says so."""
    asking, first = roll_back(
        tmp_path, 3, RollbackTarget(version=2), weight_updates={"rollback_versions": 3}
    )
    with running(tmp_path / "run", resume=True, total_steps=4, checkpoint_interval=9) as run:
        assert same(weights(run.parts.trainer), asking.weights[2])
        assert run.loop.run() == "finished"
        assert run.lines[-1]["rolled_back_to"] == "version 2"
        assert run.lines[-1]["policy_version"] == first.shared.version + 1


def test_the_checkpoint_of_the_same_step_is_set_aside(tmp_path: Path) -> None:
    """`policy@3` must not be answered with the weights of version 4 afterwards."""
    target = RollbackTarget(checkpoint="step_000002")
    _, run = roll_back(tmp_path, 3, target, checkpoint_interval=1)
    assert TrainerState.read(run.directory / "superseded_step_000003").policy_version == 3
    assert TrainerState.read(run.directory / "step_000003").policy_version == 4
    archive = run.parts.rollbacks
    assert archive is not None
    assert archive._archive.path(4) == run.directory / "step_000003"
    assert archive._archive.path(3) is None


def test_until_the_new_checkpoint_is_there_the_old_one_can_be_resumed(tmp_path: Path) -> None:
    """With keep_checkpoints = 1 it is the only one: a kill -9 or a full disk must not cost the
    run."""
    asking = Asking(3, RollbackTarget(version=2))
    values = {
        "weight_updates": {"rollback_versions": 3},
        "checkpoint_interval": 1,
        "keep_checkpoints": 1,
    }
    with running(
        tmp_path / "run", control=RunControl(after_step=asking), total_steps=4, **values
    ) as run:
        asking.run, save = run, run.parts.checkpointer.save

        def fails(state: TrainerState, **options: Any) -> Path:
            if state.rollbacks:
                raise CheckpointError("the disk is full")
            return save(state, **options)

        run.parts.checkpointer.save = fails  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match="the disk is full"):
            run.loop.run()
        assert TrainerState.read(run.directory / "latest").policy_version == 3
        assert asking.future is not None
        run.rollback_service.close()
        with pytest.raises(RefusedError, match="ended"):
            asking.future.result(timeout=0)


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        (RollbackTarget(version=1), 404, "version 1 is not kept. Kept: 3; see"),
        (RollbackTarget(version=77), 404, "version 77 is not kept"),
        (
            RollbackTarget(checkpoint="step_000001"),
            404,
            "no checkpoint 'step_000001'. There are: none",
        ),
        (RollbackTarget(checkpoint="../run"), 404, "no checkpoint '../run'"),
    ],
)
def test_what_is_not_kept_is_refused_and_nothing_changes(
    tmp_path: Path, target: RollbackTarget, status: int, message: str
) -> None:
    asking = Asking(3, target)
    with running(
        tmp_path / "run",
        control=RunControl(after_step=asking),
        total_steps=4,
        checkpoint_interval=9,
    ) as run:
        asking.run = run
        assert run.loop.run() == "finished"
        assert asking.future is not None
        with pytest.raises(RefusedError) as refused:
            asking.future.result(timeout=0)
        assert refused.value.status == status
        assert message in str(refused.value)
        assert [line["policy_version"] for line in run.lines] == [1, 2, 3, 4]
        assert {line["rolled_back_to"] for line in run.lines} == {None}


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    asking = Asking(3, RollbackTarget(checkpoint="step_000002"))

    def on_step(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            file = tmp_path / "run" / "step_000002" / "optimizer.safetensors"
            file.write_bytes(file.read_bytes()[:200])
        asking(line)

    with running(
        tmp_path / "run",
        control=RunControl(after_step=on_step),
        total_steps=3,
        checkpoint_interval=2,
    ) as run:
        asking.run = run
        run.loop.run()  # the step that asks is the last: the loop has no turn for it any more
        done = run.parts.rollbacks
        assert done is not None
        assert done.perform(3) is None
        assert asking.future is not None
        assert "optimizer.safetensors" in str(asking.future.exception(timeout=0))
        assert same(weights(run.parts.trainer), asking.weights[3])
        now = {name: np.array(array) for name, array in run.parts.trainer.optimizer.state().items()}
        assert same(now, asking.optimizer[3])


def test_a_resume_from_an_older_checkpoint_uses_no_number_again_and_no_group_of_what_it_left(
    tmp_path: Path,
) -> None:
    values = {"total_steps": 4, "checkpoint_interval": 1, "keep_checkpoints": 9, "max_staleness": 1}
    with running(tmp_path / "run", **values) as run:
        run.loop.run()
        assert run.shared.version == 4
    store = RolloutStore(tmp_path / "run" / "rollouts.sqlite")
    rewards = [float(number % 2) for number in range(8)]
    store.add(make_group("of version 3", rewards, index=900, version=3), source="bandit")
    store.add(make_group("of version 1", rewards, index=901, version=1), source="bandit")
    store.close()
    with running(tmp_path / "run", resume="step_000001", **values) as run:
        assert run.shared.version == 1
        run.loop.run()
        assert [line["policy_version"] for line in run.lines] == [1, 5, 6, 7]
        assert "of version 3" not in run.store.waiting_ids()
        [state] = run.store.database.connection.execute(  # type: ignore[union-attr]
            "SELECT state, reason FROM groups WHERE group_id = 'of version 3'"
        ).fetchall()
        assert state[0] == "dropped"
        assert state[1].startswith("too old")
        assert max(line["staleness_max"] for line in run.lines) <= 1

"""What is not fit to be served is taken back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from pydantic import ValidationError

from mlx_parallm.errors import CheckpointError
from mlx_parallm.models.heads.value_head import is_value_head
from mlx_parallm.rl_training.loop import RunControl
from mlx_parallm.rl_training.monitor.health import find
from mlx_parallm.rl_training.publish.guard import NOT_FINITE, PublishGuard, Verdict, kl_from_served
from tests.rl_training.bandit_run import PROMPT, Run, running
from tests.rl_training.making import make_config, make_policy, weights
from tests.rl_training.rollouts import make_rollout


def test_kl_by_hand() -> None:
    """ln r = -0.5 and 0.5: e^-0.5 - 1 + 0.5 = 0.10653, e^0.5 - 1 - 0.5 = 0.14872; their mean is
    0.12763."""
    rollout = make_rollout((5, 6), logprob=-1.0)
    assert kl_from_served([np.array([-1.5, -0.5])], [rollout]) == pytest.approx(0.127626, abs=1e-6)
    assert kl_from_served([np.array([-1.0, -1.0])], [rollout]) == 0.0
    assert kl_from_served([np.array([-1.0, np.nan])], [rollout]) == float("inf")
    assert kl_from_served([np.array([-1.0, 1e5])], [rollout]) == float("inf")


def test_the_first_token_of_a_sequence_without_prompt_has_no_score() -> None:
    rollout = make_rollout((5, 6), prompt=(), logprob=-1.0)
    assert kl_from_served([np.array([-0.5])], [rollout]) == pytest.approx(0.148721, abs=1e-6)


def test_a_bound_needs_something_to_go_back_to() -> None:
    bound = {"max_publish_kl": 1.0}
    make_config(weight_updates=bound)
    with pytest.raises(ValidationError, match="rollback_versions"):
        make_config(weight_updates=bound | {"rollback_versions": 0})
    with pytest.raises(ValidationError, match="rollback_versions"):
        make_config(lora=False, weight_updates=bound)


def test_the_measured_kl_is_that_of_the_policies(tmp_path: Path) -> None:
    """Against probabilities of the plain model over the bandit's one-token answers."""
    expected: list[float] = []

    def on_step(line: dict[str, float]) -> None:
        now = mx.log(
            mx.softmax(run.parts.trainer.policy.model(mx.array([PROMPT]))[0, -1].astype(mx.float32))
        )
        groups = run.store.groups([f"g{number}" for number in range(run.bandit.next)])
        ratios = [
            float(now[rollout.tokens[-1]].item()) - rollout.logprobs[-1]
            for group in groups
            for rollout in group.rollouts
            if rollout.logprobs and rollout.policy_versions[-1] == line["step"] - 1
        ]
        expected.append(float(np.mean(np.expm1(ratios) - np.array(ratios))))

    values = {"weight_updates": {"max_publish_kl": 50.0}, "total_steps": 3}
    with running(tmp_path / "run", control=RunControl(after_step=on_step), **values) as run:
        run.loop.run()
        assert [line["policy_version"] for line in run.lines] == [1, 2, 3]
        measured = [line["publish_kl"] for line in run.lines]
        assert [line["publishes_refused"] for line in run.lines] == [0, 0, 0]
    assert min(measured) > 1e-3
    assert measured == pytest.approx(expected, rel=1e-3)


def test_updates_beyond_the_bound_are_taken_back_and_the_run_goes_on(tmp_path: Path) -> None:
    """On-policy: nothing may wait for a publish that never comes."""
    with running(tmp_path / "run", weight_updates={"max_publish_kl": 1e-9}, total_steps=3) as run:
        before = weights(run.parts.trainer)
        assert run.loop.run() == "finished"
        assert run.shared.version == 0
        assert all(
            np.array_equal(array, before[name])
            for name, array in weights(run.parts.trainer).items()
        )
        assert run.parts.trainer.optimizer.updates == 0
        lines = run.lines
        assert [line["publishes_refused"] for line in lines] == [1, 1, 1]
        assert min(line["publish_kl"] for line in lines) > 1e-9
        assert {line["staleness"] for line in lines} == {0.0}
        assert {line["optimizer_updates"] for line in lines} == {2}
        [found] = [diagnosis for diagnosis in find(lines) if diagnosis.name == "update-refused"]
        assert "3 in 3 steps were taken back and not published, KL up to" in found.sentence


def after_training(run: Run, change: Callable[[int], None]) -> None:
    """Calls `change(step)` when a step's training has ended, before its publish."""
    train_step = run.parts.trainer.train_step

    def changed(batch, **others):
        result = train_step(batch, **others)
        change(batch.step)
        return result

    run.parts.trainer.train_step = changed  # type: ignore[method-assign]


def poison(run: Run, *, step: int) -> None:
    def change(now: int) -> None:
        if now == step:
            slots = run.parts.trainer.policy.slots
            slots.write([*slots.read()[:-1], slots.read()[-1] * float("nan")])

    after_training(run, change)


def test_weights_that_are_not_finite_are_never_served(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=4) as run:
        poison(run, step=2)
        assert run.loop.run() == "finished"
        assert [line["policy_version"] for line in run.lines] == [1, 1, 2, 3]
        assert [line["publishes_refused"] for line in run.lines] == [0, 1, 0, 0]
        assert {line["staleness"] for line in run.lines} == {0.0}
        assert all(np.isfinite(array).all() for array in weights(run.parts.trainer).values())
        [found] = [diagnosis for diagnosis in find(run.lines) if diagnosis.name == "update-refused"]
        assert "the weights were not finite" in found.sentence


def test_finite_weights_whose_answers_are_not_finite_are_never_served(tmp_path: Path) -> None:
    """They were served, and answered nearly every request with an error."""
    with running(tmp_path / "run", total_steps=3) as run:

        def change(step: int) -> None:
            if step == 2:
                slots = run.parts.trainer.policy.slots
                slots.write([array + 1e30 for array in slots.read()])

        after_training(run, change)
        assert run.loop.run() == "finished"
        assert [line["publishes_refused"] for line in run.lines] == [0, 1, 0]
        assert [line["policy_version"] for line in run.lines] == [1, 1, 2]


def test_with_nothing_kept_weights_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=4, weight_updates={"rollback_versions": 0}) as run:
        poison(run, step=3)
        with pytest.raises(CheckpointError, match=r"step 3 .*finite"):
            run.loop.run()
        assert run.shared.version == 2
        assert [path.name for path in sorted(run.directory.glob("step_*"))] == ["step_000002"]


def test_a_publish_without_a_difference_is_none(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=2) as run:
        slots = run.parts.trainer.policy.slots
        first = slots.read()
        after_training(run, lambda step: slots.write([mx.array(array) for array in first]))
        assert run.loop.run() == "finished"
        assert [line["policy_version"] for line in run.lines] == [0, 0]
        assert {line["publishes_refused"] for line in run.lines} == {0}
        assert {line["staleness"] for line in run.lines} == {0.0}


def test_rollouts_of_unknown_versions_are_not_measured_with(tmp_path: Path) -> None:
    with running(tmp_path / "run", weight_updates={"max_publish_kl": 1e-9}, total_steps=1) as run:
        known = make_rollout(version=0)
        unknown = replace(known, policy_versions=(-1,) * len(known.tokens))
        after = run.parts.updater
        slots = run.parts.trainer.policy.slots
        slots.write([array + 0.01 for array in slots.read()])
        assert after.after_step(1, updates=1, rollouts=[unknown]) is not None
        slots.write([array + 0.01 for array in slots.read()])
        assert after.after_step(2, updates=1, rollouts=[unknown, known]) is None
        assert after.refused == 1


def test_a_critic_that_moves_alone_is_no_new_version() -> None:
    policy = make_policy(make_config(), needs_values=True)
    guard = PublishGuard(policy, lambda _: [], None)
    guard.published()
    of_critic = [slot for slot, name in enumerate(policy.slots.names) if is_value_head(name)]
    others = [slot for slot in range(len(policy.slots)) if slot not in of_critic]
    policy.slots.write([array + 1 for array in policy.slots.read(of_critic)], of_critic)
    assert guard.judge([]) == Verdict(moved=False)
    policy.slots.write([policy.slots.read(others)[0] + 1], others[:1])
    assert guard.judge([]) == Verdict(moved=True)
    policy.slots.write([array * float("nan") for array in policy.slots.read(of_critic)], of_critic)
    assert guard.judge([]).reason == NOT_FINITE

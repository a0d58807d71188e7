"""The training loop: the order of things, what is published, stops and resumes."""

import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from mlx_parallm.config.load import parse_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rl_training.events import Noted, Waiting, Warned
from mlx_parallm.rl_training.loop import RunControl
from mlx_parallm.rl_training.publish.weight_updater import UpdaterState
from mlx_parallm.rl_training.step.ranks import HasArrays, Ranks
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rl_training.until import check_until
from mlx_parallm.run_files.metrics import KEYS, TIMES, number_of
from mlx_parallm.system.log import configure_logging
from tests.rl_training.bandit_run import Run, running
from tests.rl_training.making import assert_same_training, weights


def test_a_run_learns_and_leaves_everything_behind(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=12, checkpoint_interval=5, kl_beta=0.01) as run:
        assert run.loop.run() == "finished"
        lines = run.lines
        assert [line["step"] for line in lines] == list(range(1, 13))
        assert [line["policy_version"] for line in lines] == list(range(1, 13))
        assert run.shared.version == 12
        assert all(list(line) == [*KEYS, "unscored_fraction", "policy_loss"] for line in lines)
        rewards = [line["reward_mean"] for line in lines]
        assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
        first = lines[0]
        assert first["logprob_diff_max"] < 1e-5
        assert lines[-1]["kl"] > first["kl"] > 0
        assert {line["staleness"] for line in lines} == {0.0}
        assert {line["optimizer_updates"] for line in lines} == {2}
        assert all(line["publish_ms"] > 0 and line["time_train_s"] > 0 for line in lines)
        names = sorted(path.name for path in run.directory.glob("step_*"))
        assert names == ["step_000005", "step_000010", "step_000012"]
        assert (run.directory / "final" / "adapters.safetensors").is_file()
        served = run.shared.adapters()["policy"]
        for path, pair in run.parts.trainer.policy.adapter().items():
            assert mx.array_equal(served.layers[path].b, pair.b).item()


def test_on_policy_order(tmp_path: Path) -> None:
    """Rollouts of step n + 1 start after publish, metrics line and checkpoint of step n."""
    with running(tmp_path / "run", total_steps=3) as run:
        run.loop.run()
        asks = [
            event for event in run.events if not (event.startswith("ask") and "ask 2" not in event)
        ]
        assert asks == [
            "ask 2 of v0", "line 1", "ask 2 of v1", "line 2", "saved step_000002", "ask 2 of v2", "line 3",
            "saved step_000003",
        ]  # fmt: skip


def test_overlapping_order(tmp_path: Path) -> None:
    """With one step of staleness the next step's groups are asked for before this one is
    trained."""
    with running(tmp_path / "run", total_steps=3, max_staleness=1, checkpoint_interval=9) as run:
        run.loop.run()
        asks = [
            event for event in run.events if not (event.startswith("ask") and "ask 2" not in event)
        ]
        assert asks == [
            "ask 2 of v0",
            "ask 2 of v0",
            "line 1",
            "ask 2 of v1",
            "line 2",
            "line 3",
            "saved step_000003",
        ]
        assert [line["staleness"] for line in run.lines] == [0, 1, 1]
        assert [line["mismatch_fresh"] for line in run.lines] == [True, False, False]


def test_environments_run_as_many_steps_ahead_as_they_may_lag_behind(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=7, max_staleness=3, checkpoint_interval=9) as run:
        assert run.loop.run() == "finished"
    lines = run.lines
    assert [line["staleness_max"] for line in lines] == [0, 1, 2, 3, 3, 3, 3]
    assert sum(line["dropped_stale"] for line in lines) == 0
    asked = [int(event.split()[1]) for event in run.events if event.startswith("ask")]
    assert sum(asked) == 7 * 2, "nothing beyond the last step"


def test_publishing_every_second_step(tmp_path: Path) -> None:
    values = {"weight_updates": {"update_every_n_steps": 2}, "max_staleness": 1, "total_steps": 5}
    with running(tmp_path / "run", **values) as run:
        run.loop.run()
        assert [line["policy_version"] for line in run.lines] == [0, 1, 1, 2, 3]
        assert [line["publish_ms"] is None for line in run.lines] == [
            True,
            False,
            True,
            False,
            False,
        ]
        assert sum(line["dropped_stale"] for line in run.lines) == 0


def test_publishing_too_rarely_for_the_staleness_limit_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValidationError, match=r"update_every_n_steps.*max_staleness"),
        running(tmp_path / "run", weight_updates={"update_every_n_steps": 3}, max_staleness=1),
    ):
        pass


def test_a_busy_lock_keeps_the_old_weights_and_is_tried_again(tmp_path: Path) -> None:
    """On-policy rollouts can only come after the publish, so it is tried again while waiting for
    them."""
    entered, leave = threading.Event(), threading.Event()

    def hold(run: Run) -> None:
        with run.shared.lock.read():
            entered.set()
            leave.wait(30)

    told: list[tuple[int, int]] = []

    class Watched(Ranks):
        def publish(self, version: int, trainer: HasArrays) -> None:
            told.append((version, run.shared.version))

    waits: list[float] = []
    control = RunControl(while_waiting=leave.set)
    values = {"weight_updates": {"lock_timeout_ms": 20}, "total_steps": 2, "control": control}
    with running(tmp_path / "run", **values) as run:
        run.parts.trainer.ranks = Watched()
        run.stream.subscribe(Waiting, lambda event: waits.append(event.seconds))
        reader = threading.Thread(target=hold, args=(run,))
        reader.start()
        entered.wait(30)
        run.loop.run()
        reader.join()
        first, second = run.lines
        assert (first["policy_version"], first["publish_ms"], first["publish_timeouts"]) == (
            0,
            None,
            1,
        )
        assert second["policy_version"] == 2
        assert [report.version for report in run.published] == [1, 2], (
            "the publish that was tried again too"
        )
        assert told == [(1, 1), (2, 2)], "the other ranks are told once rank 0 serves it"
        assert (second["staleness"], second["dropped_stale"]) == (0, 0)
        assert waits


def poisoned_from(step_calls: int) -> Any:
    def wrap(loss: Callable[[LossInputs], LossOutputs]) -> Callable[[LossInputs], LossOutputs]:
        calls: list[int] = []

        def poisoned(inputs: LossInputs) -> LossOutputs:
            calls.append(1)
            outputs = loss(inputs)
            return (
                outputs
                if len(calls) <= step_calls
                else LossOutputs(outputs.loss * float("nan"), outputs.metrics)
            )

        return poisoned

    return wrap


def test_weights_that_did_not_change_are_not_published(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=3, poison=poisoned_from(2)) as run:
        run.loop.run()
        assert [line["policy_version"] for line in run.lines] == [1, 1, 1]
        assert [line["skipped_steps"] for line in run.lines] == [0, 2, 2]
        assert [line["loss"] is None for line in run.lines] == [False, True, True]


def test_a_solved_task_does_not_hang(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=2, max_empty_rounds=2) as run:
        run.bandit.reward = lambda token: 1.0
        configure_logging(level="warning")
        with capture_logs() as logs:
            assert run.loop.run() == "finished"
        warned = [entry for entry in logs if entry["event"] == "step with fewer rollouts"]
        assert [entry["step"] for entry in warned] == [1], "the same reason is told once"
        for line in run.lines:
            assert (
                "16 sequences short: of 8 groups with one reward for all answers 8 were all right"
                in line["gave_up"]
            )
            assert (line["loss"], line["reward_mean"], line["groups_without_variance"]) == (
                None,
                1.0,
                1.0,
            )
        assert run.shared.version == 0


class Interrupt(Exception):
    """As good as a kill -9 for everything that is on the disk."""


def interrupt_at(step: int) -> RunControl:
    def after_step(line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise Interrupt

    return RunControl(after_step=after_step)


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def test_two_resumes_from_copies_write_the_same(tmp_path: Path) -> None:
    values = {"deterministic": True, "total_steps": 6, "checkpoint_interval": 2}
    with (
        pytest.raises(Interrupt),
        running(tmp_path / "a", control=interrupt_at(3), **values) as run,
    ):
        run.loop.run()
    assert [line["step"] for line in run.lines] == [1, 2, 3]
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    resumed = []
    for name in ("a", "b"):
        with running(tmp_path / name, resume=True, **values) as run:
            assert run.loop.step == 2
            assert run.loop.run() == "finished"
            resumed.append(run)
    a, b = resumed
    assert [line["step"] for line in a.lines] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(without_times(a.lines), without_times(b.lines), strict=True):
        assert one["reward_mean"] == other["reward_mean"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert_same_training(weights(a.parts.trainer), weights(b.parts.trainer))
    with running(tmp_path / "straight", **values) as straight:
        straight.loop.run()
    assert_same_training(weights(a.parts.trainer), weights(straight.parts.trainer))
    assert [line["reward_mean"] for line in straight.lines] == [
        line["reward_mean"] for line in a.lines
    ]


class StopAt:
    """Asks to stop at the n-th time it is asked."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.mark.slow
def test_stopping_inside_a_step_saves_the_place_and_goes_on_there(tmp_path: Path) -> None:
    values = {
        "total_steps": 4,
        "checkpoint_interval": 9,
        "token_budget": 32,
        "update_epochs": 2,
        "packing": False,
    }
    with running(tmp_path / "whole", **values) as whole:
        whole.loop.run()
    # it asks before each batch and each micro-batch: 1 + 8 times in a step of 2 epochs, 2
    # mini-batches of 2 of 4 rows
    with running(
        tmp_path / "run", control=RunControl(should_stop=StopAt(9 + 1 + 3)), **values
    ) as run:
        assert run.loop.run() == "stopped"
        assert [line["step"] for line in run.lines] == [1]
        assert (run.directory / "latest").resolve().name == "step_000001_mb0001"
        assert run.store.counts().taken > 2
        served = run.parts.updater.served()
    older = shutil.copytree(tmp_path / "run", tmp_path / "older", symlinks=True)
    with running(tmp_path / "run", resume=True, **values) as run:
        assert run.parts.updater.served().keys() == served.keys()
        assert all(
            mx.array_equal(array, served[name])
            for name, array in run.parts.updater.served().items()
        )
        assert run.parts.updater.state() == UpdaterState(dirty=True)
        assert run.loop.run() == "finished"
        for one, other in zip(run.lines, whole.lines, strict=True):
            for key in ("step", "reward_mean", "optimizer_updates", "policy_version"):
                assert one[key] == other[key]
        assert_same_training(weights(run.parts.trainer), weights(whole.parts.trainer))
        assert run.shared.version == whole.shared.version, (
            "what was served before is served on until the step ends"
        )
    for name in ("served.safetensors", "SHA256SUMS"):
        (older / "step_000001_mb0001" / name).unlink()
    with running(older, resume=True, **values) as run:
        assert run.loop.run() == "finished"
        assert run.shared.version == whole.shared.version + 1, (
            "half-trained weights have their own version"
        )


def test_a_publish_that_was_due_is_made_after_a_resume(tmp_path: Path) -> None:
    """The lock was busy at the end of the step that the checkpoint is of; on-policy rollouts can
    only come after it."""
    stop = threading.Event()
    control = RunControl(should_stop=stop.is_set, while_waiting=stop.set)
    values: dict[str, Any] = {"weight_updates": {"lock_timeout_ms": 1}, "total_steps": 2}
    with running(tmp_path / "run", control=control, **values) as run:
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with run.shared.lock.read():
                entered.set()
                leave.wait(30)

        reader = threading.Thread(target=hold)
        reader.start()
        entered.wait(30)
        assert run.loop.run() == "stopped"
        leave.set()
        reader.join()
        assert (run.directory / "latest" / "served.safetensors").is_file()
    with running(tmp_path / "run", resume=True, **values) as run:
        assert run.parts.updater.state() == UpdaterState(dirty=True, due=True)
        assert run.loop.run() == "finished"
        assert [report.version for report in run.published] == [2, 3], (
            "1 was given out, and perhaps served"
        )
        assert run.lines[1]["staleness_max"] == 0


def test_scores_and_the_adaptive_coefficient_go_on_too(tmp_path: Path) -> None:
    """Stopped after the first of the second step's four updates."""
    values = {
        "total_steps": 4,
        "checkpoint_interval": 9,
        "token_budget": 32,
        "update_epochs": 2,
        "packing": False,
    }
    values |= {"kl_beta": 0.1, "kl_target": 0.01, "kl_horizon": 64, "sampler_correction": "tis"}
    with running(tmp_path / "whole", **values) as whole:
        whole.loop.run()
    coefficients = [line["kl_coefficient"] for line in whole.lines]
    assert len(set(coefficients)) == 4
    trainers: list[Trainer] = []
    control = RunControl(should_stop=lambda: trainers[0].optimizer.updates == 5)
    with running(tmp_path / "run", control=control, **values) as run:
        trainers.append(run.parts.trainer)
        assert run.loop.run() == "stopped"
        assert (run.directory / "latest").resolve().name == "step_000001_mb0001"
    with running(tmp_path / "run", resume=True, **values) as run:
        assert run.loop.run() == "finished"
        assert [line["kl_coefficient"] for line in run.lines] == coefficients
        assert_same_training(weights(run.parts.trainer), weights(whole.parts.trainer))


def test_a_step_that_goes_on_keeps_the_reason_why_it_is_small(tmp_path: Path) -> None:
    """Its second group is dropped; stopped after the first of its two updates."""
    values = {
        "total_steps": 2,
        "checkpoint_interval": 9,
        "update_epochs": 2,
        "max_oversampling": 1.0,
    }
    trainers: list[Trainer] = []
    control = RunControl(should_stop=lambda: trainers[0].optimizer.updates == 5)
    with running(tmp_path / "run", control=control, **values) as run:
        trainers.append(run.parts.trainer)
        run.bandit.reward = lambda token: 1.0 if run.bandit.next == 3 else float(token < 20)
        assert run.loop.run() == "stopped"
        assert (run.directory / "latest").resolve().name == "step_000001_mb0001"
    with running(tmp_path / "run", resume=True, **values) as run:
        assert run.loop.run() == "finished"
        assert (
            "of 1 groups with one reward for all answers 1 were all right"
            in run.lines[1]["gave_up"]
        )
        assert (run.lines[1]["groups"], run.lines[1]["dropped_without_variance"]) == (2, 1)


def test_stopping_while_waiting_saves_the_last_step(tmp_path: Path) -> None:
    stop = threading.Event()
    with running(
        tmp_path / "run",
        control=RunControl(should_stop=stop.is_set, while_waiting=stop.set),
        total_steps=9,
    ) as run:
        ask = run.bandit.__call__
        run.parts.buffer._request_groups = lambda n: ask(n) if run.loop.step < 3 else None
        assert run.loop.run() == "stopped"
        assert run.loop.step == 3
        assert run.events[-1] == "saved step_000003"
    with running(tmp_path / "run", resume=True, total_steps=4) as run:
        assert run.loop.run() == "finished"
        assert [line["step"] for line in run.lines] == [1, 2, 3, 4]


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=2) as run:
        run.loop.run()
    with running(tmp_path / "run", resume=True, total_steps=2) as run:
        assert run.loop.run() == "finished"
        assert not any(event.startswith(("ask", "line")) for event in run.events)
    with running(tmp_path / "run", resume=True, total_steps=3) as run:
        assert run.loop.run() == "finished"
        assert [line["step"] for line in run.lines] == [1, 2, 3]


def test_a_run_ends_at_the_first_line_that_meets_its_condition(tmp_path: Path) -> None:
    """The step is the last one in every way: served though no publish was due, measured, and saved
    as final. A resume makes no step; with another condition it goes on."""
    measured: list[int] = []

    def measure_end(step: int) -> dict[str, Any]:
        measured.append(step)
        return {"eval/score": 0.5}

    control = RunControl(
        measure=lambda step: {"score": step / 10 if step != 2 else None}, measure_end=measure_end
    )
    values = {
        "total_steps": 6,
        "weight_updates": {"update_every_n_steps": 2},
        "max_staleness": 1,
        "control": control,
    }
    told: list[str] = []
    with running(tmp_path / "run", until="score > 0.25", **values) as run:
        run.stream.subscribe(Noted, lambda event: told.append(event.text))
        assert run.loop.run() == "finished"
        last = run.lines[-1]
        assert (run.loop.step, measured, last["eval/score"]) == (3, [3], 0.5)
        assert last["ended"] == "score > 0.25: 0.3" and "ended" not in run.lines[0]
        assert last["policy_version"] == run.shared.version == 2
        assert (run.directory / "final" / "adapters.safetensors").is_file()
        assert told == ["the run has ended at step 3: rl_training.until is met, score > 0.25: 0.3"]
    with running(tmp_path / "run", resume=True, until="score > 0.25", **values) as run:
        run.stream.subscribe(Noted, lambda event: told.append(event.text))
        assert run.loop.run() == "finished" and run.loop.step == 3
        assert told[1] == told[0], "a resume says so too"
    with running(tmp_path / "run", resume=True, until="never > 1", **values) as run:
        warned: list[Any] = []
        run.stream.subscribe(Warned, lambda event: warned.append(event.numbers))
        assert run.loop.run() == "finished"
        assert run.loop.step == 6 and "ended" not in run.lines[-1]
        assert [numbers.get("metric") for numbers in warned] == ["never"]
    with running(tmp_path / "run", resume=True, until="score > 9", **values) as run:
        run.stream.subscribe(Noted, lambda event: told.append(event.text))
        run.stream.subscribe(Warned, lambda event: warned.append(event.numbers))
        assert run.loop.run() == "finished" and len(warned) == 1
        assert told[2] == "rl_training.until was not met: score > 9", "it came before the resume"
    values["total_steps"] = 7
    with running(tmp_path / "run", resume=True, until="score > 0.65", **values) as run:
        assert run.loop.run() == "finished" and measured == [3]
        assert run.lines[-1]["ended"] == "score > 0.65: 0.7", "the last step may meet it too"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rl_training.until": "reward_men >= 1"}, "did you mean 'reward_mean'"),
        ({"rl_training.until": "heldout_score >= 1"}, "eval/score"),
        ({"rl_training.until": "eval/score >= 1"}, "evaluation.every"),
        ({"rl_training.until": "environments >= 1"}, "no number"),
        ({"rl_training.until": "policy_loss < 1"}, None),
        ({"rl_training.until": "environments/a/reward_mean < 1"}, None),
        (
            {
                "rl_training.until": "eval/score < 1",
                "evaluation.every": 1,
                "evaluation.problems": 1,
                "environments": [{"kind": "simple_text"}],
            },
            None,
        ),
        ({"rl_training.until": "heldout_score >= 1", "rl_training.algorithm": "sft"}, None),
    ],
)
def test_a_condition_that_no_line_can_meet_is_refused(
    keys: dict[str, Any], words: str | None
) -> None:
    data: dict[str, Any] = {"data": {"path": "rows.jsonl"}} if len(keys) == 2 else {}
    for key, value in keys.items():
        section, _, leaf = key.partition(".")
        data = data | {section: {**data.get(section, {}), leaf: value} if leaf else value}
    config = parse_config(data)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        rows = config.rl_training.learns_from_rows
        check_until(config.rl_training.until, config.evaluation, rows=rows)


def test_a_number_of_a_line_is_a_key_or_a_path() -> None:
    line = {"a": 1.0, "b/c": 2, "e": {"x/y": {"z": 3}}, "t": True, "w": "7", "n": None}
    names = ["a", "b/c", "e/x/y/z", "t", "w", "n", "e", "a/b", "none"]
    assert [number_of(line, name) for name in names] == [1.0, 2, 3, *[None] * 6]

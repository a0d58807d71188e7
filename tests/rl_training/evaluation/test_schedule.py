"""When a run evaluates, which version, what becomes of the result; with a client that answers
from a script."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.checkpoint import Checkpointer
from mlx_parallm.rl_training.evaluation import schedule as evaluation_module
from mlx_parallm.rl_training.evaluation.schedule import (
    Evaluations,
    evaluation_sources,
)
from mlx_parallm.rl_training.events import EvaluationFinished, RunEvents
from mlx_parallm.run_files.best_checkpoint import best_by
from mlx_parallm.run_files.evaluations import EvaluationLog, flat, sentence
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.run_files.trainer_state import STATE_FILE, TrainerState
from mlx_parallm.run_files.versions import VersionSteps
from tests.environments.scripted_client import ScriptedClient
from tests.rl_training.test_checkpoint import NoStore, state_at, trained

LATER_S = 10.0
FIRST_VERSION = 10  # of the weights before training; step n publishes FIRST_VERSION + n


class Client(ScriptedClient):
    """Answers while `go` is set."""

    def __init__(self, tokenizer: Tokenizer, answer: Any = lambda *_: "0") -> None:
        super().__init__(tokenizer, answer)
        self.go = threading.Event()
        self.go.set()

    async def _one(self, request: Any) -> Any:
        while not self.go.is_set():  # noqa: ASYNC110  set by another thread
            await asyncio.sleep(0.002)
        return await super()._one(request)


class Weights:
    """What is asked of `SharedWeights.history`."""

    def __init__(self) -> None:
        self.history = self
        self.calls: list[tuple[str, int]] = []
        self.kept = list(range(100))

    def hold(self, version: int) -> None:
        self.calls.append(("hold", version))

    def release(self, version: int) -> None:
        self.calls.append(("release", version))

    def versions(self) -> list[int]:
        return self.kept


class Run:
    """A run's evaluations, and the steps that a loop would make."""

    def __init__(
        self, directory: Path, client: Client, *, policy: str | None = "policy", **options: Any
    ) -> None:
        settings = {"problems": 2, "every": 2, **options.pop("evaluation", {})}
        stop: Callable[[], bool] = options.pop("should_stop", lambda: False)
        training = {"total_steps": 6, **options}
        environments = [{"kind": "tasks", "name": "reverse"}]
        parsed = {"rl_training": training, "evaluation": settings, "environments": environments}
        self.config = parse_config(parsed)
        sources = build_sources(self.config.environments, seed=0)
        self.client, self.weights, self.versions = client, Weights(), VersionSteps(FIRST_VERSION)
        self.finished: list[Any] = []
        events = RunEvents()
        events.subscribe(EvaluationFinished, lambda event: self.finished.append(event.line))
        self.log = EvaluationLog(
            directory, best_by(self.config.rl_training.keep_best, self.config.evaluation)
        )
        evaluation, kinds = self.config.evaluation, self.config.environments
        evaluated = evaluation_sources(evaluation, kinds, sources, lambda: None, seed=0)  # type: ignore[arg-type,return-value]
        training = self.config.rl_training
        self.evaluations = Evaluations(
            evaluation,
            training,
            self.config.model,
            directory,
            self.log,
            (evaluated, sources),
            client=client,
            tokenizer=client.tokenizer,
            weights=self.weights,  # type: ignore[arg-type]
            versions=self.versions,
            policy=policy,
            events=events,
            should_stop=stop,
        )

    def step(self, number: int, *, served: bool = True) -> dict[str, float]:
        """Trains, publishes (where it does) and measures."""
        if served:
            self.versions.record(FIRST_VERSION + number, number)
        return self.evaluations.measure(number)

    def settle(self) -> None:
        """Until what runs has come to its end."""
        running = self.evaluations._running
        if running is not None:
            assert wait([running.future], LATER_S).done

    @property
    def steps(self) -> list[tuple[int, str]]:
        return [
            (line["step"], "skipped" if "skipped" in line else f"v{line['version']}")
            for line in self.log.lines
        ]


@pytest.fixture
def client(tiny_tokenizer: Tokenizer) -> Client:
    return Client(tiny_tokenizer)


def adapters(client: Client) -> list[str | None]:
    return [request.adapter for request in client.requests]


def test_each_is_of_the_version_of_its_step_however_many_follow(
    tmp_path: Path, client: Client
) -> None:
    run = Run(tmp_path, client, evaluation={"at_start": True})
    run.evaluations.begin(None)
    run.settle()
    assert run.step(1)["eval/step"] == 0
    client.go.clear()
    assert "eval/step" not in run.step(2)
    assert run.evaluations.wants_checkpoint(2)
    assert not run.evaluations.wants_checkpoint(1)
    assert run.log.awaited(2)
    assert "eval/step" not in run.step(3), "training continued"
    client.go.set()
    run.settle()
    told = run.step(4)
    assert (told["eval/step"], told["eval/version"]) == (2, FIRST_VERSION + 2)
    assert run.weights.calls == [
        ("hold", 10),
        ("release", 10),
        ("hold", 12),
        ("release", 12),
        ("hold", 14),
    ]
    assert adapters(client)[:4] == ["policy@10"] * 2 + ["policy@12"] * 2
    assert {request.priority for request in client.requests} == {1}
    run.step(5)
    assert run.step(6)["eval/step"] == 6, "the last one is waited for"
    assert run.steps == [(0, "v10"), (2, "v12"), (4, "v14"), (6, "v16")]
    assert run.finished == run.log.lines
    run.evaluations.stop()


def test_one_that_is_due_while_another_runs_is_skipped_but_for_the_last(
    tmp_path: Path, client: Client
) -> None:
    client.go.clear()
    run = Run(tmp_path, client, evaluation={"at_start": False})
    run.evaluations.begin(None)
    told = [run.step(step) for step in (1, 2, 3, 4, 5)]
    assert told == [{}, {}, {}, {"eval/skipped": 1}, {}]
    threading.Timer(0.2, client.go.set).start()
    assert run.step(6)["eval/step"] == 6
    assert run.steps == [(4, "skipped"), (2, "v12"), (6, "v16")]
    assert run.log.lines[0]["skipped"] == "that of step 2 was still running"
    run.evaluations.stop()


@pytest.mark.parametrize("why", ["deterministic", "full weights"])
def test_where_training_waits(why: str, tmp_path: Path, client: Client) -> None:
    deterministic = {"deterministic": True, "max_staleness": 0} if why == "deterministic" else {}
    run = Run(tmp_path, client, policy=None if why == "full weights" else "policy", **deterministic)
    run.evaluations.begin(None)
    assert run.step(1)["eval/step"] == 0
    assert run.step(2)["eval/step"] == 2
    assert run.step(3) == {}
    assert set(adapters(client)) == (
        {None} if why == "full weights" else {"policy@10", "policy@12"}
    )
    run.evaluations.stop()


def test_weights_that_are_not_served_are_not_evaluated(tmp_path: Path, client: Client) -> None:
    """Published every third step: what is due at step 2 is done at 3, of the weights of 3."""
    run = Run(tmp_path, client, evaluation={"at_start": False})
    run.evaluations.begin(None)
    run.step(1, served=False)
    run.step(2, served=False)
    assert client.requests == []
    run.step(3)
    run.settle()
    told = run.step(4, served=False)
    assert (told["eval/step"], told["eval/version"]) == (3, FIRST_VERSION + 3)
    run.step(5, served=False)
    run.step(6, served=False)
    assert run.steps == [(3, "v13"), (6, "skipped")]
    run.evaluations.stop()


def test_a_stop_gives_up_and_a_resume_makes_up_for_it_once(tmp_path: Path, client: Client) -> None:
    client.go.clear()
    stop = threading.Event()
    run = Run(tmp_path, client, evaluation={"at_start": False}, should_stop=stop.is_set)
    run.evaluations.begin(None)
    run.step(1)
    run.step(2)
    threading.Timer(0.1, stop.set).start()
    run.evaluations.finish()
    run.evaluations.stop()
    assert run.steps == []
    assert run.weights.calls == [("hold", 12), ("release", 12)]

    checkpoint = tmp_path / "step_000002"
    checkpoint.mkdir()
    state = replace(state_at(2), policy_version=FIRST_VERSION + 2)
    (checkpoint / STATE_FILE).write_text(state.to_text())
    client.go.set()
    resumed = Run(tmp_path, client, evaluation={"at_start": False})
    resumed.versions.record(40, 3)
    resumed.evaluations.begin(replace(state, step=3))
    resumed.settle()
    assert adapters(client)[-1] == f"policy@{FIRST_VERSION + 2}"
    assert resumed.evaluations.measure(3)["eval/step"] == 2
    resumed.evaluations.stop()

    again = Run(tmp_path, client, evaluation={"at_start": False})
    asked = len(client.requests)
    again.evaluations.begin(replace(state, step=3), [{"step": 3, "eval/step": 2}])
    assert again.evaluations.measure(3) == {}
    untold = Run(tmp_path, client, evaluation={"at_start": False})
    untold.evaluations.begin(replace(state, step=2), [{"step": 2}])
    assert untold.evaluations.measure(3)["eval/step"] == 2, "its line was cut: it is told again"
    assert len(client.requests) == asked, "and not asked again"


def test_what_a_kill_before_the_first_checkpoint_left_is_the_bases(
    tmp_path: Path, client: Client
) -> None:
    run = Run(tmp_path, client)
    run.evaluations.begin(replace(state_at(1)))
    run.settle()
    assert run.step(2)["eval/step"] == 0
    assert adapters(client)[:2] == [None, None]
    run.evaluations.stop()


def test_weights_that_are_not_kept_are_said_to_be(tmp_path: Path, client: Client) -> None:
    run = Run(tmp_path, client)
    run.evaluations.begin(state_at(5))
    assert run.log.lines == [
        {"step": 4, "skipped": "it was interrupted, and its weights are not kept"}
    ]


def test_an_environment_that_blocks_its_thread_does_not_hold_up_the_end(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # beside the environment's timeout_s of 600
    monkeypatch.setattr(evaluation_module, "PATIENCE_S", -599.8)
    monkeypatch.setattr(evaluation_module, "JOIN_S", 0.1)
    client.go.clear()
    run = Run(tmp_path, client, evaluation={"at_start": True, "every": 0})
    run.evaluations.begin(None)
    run.step(5)
    run.step(6)
    assert run.steps == [(0, "skipped"), (6, "skipped")]
    assert "does an environment block?" in run.log.lines[0]["skipped"]
    client.go.set()
    run.evaluations.stop()


def test_without_evaluation_there_is_nothing_to_do(tmp_path: Path, client: Client) -> None:
    run = Run(tmp_path, client, evaluation={"problems": 0})
    run.evaluations.begin(None)
    assert [run.step(step) for step in range(1, 7)] == [{}] * 6
    run.evaluations.finish()
    run.evaluations.stop()
    assert (run.log.lines, client.requests) == ([], [])


def test_the_log_is_cut_and_speaks_flat(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path, "eval/sum/accuracy", lambda line: line | {"hidden": True})
    for step in (10, 20):
        numbers = {
            "accuracy": step / 100,
            "accuracy_low": 0.0,
            "accuracy_high": 1.0,
            "reward": 0.5,
            "problems": 3,
        }
        part = {"numbers": numbers, "problems": [], "examples": []}
        environments = {"sum": part}
        log.add(
            {
                "step": step,
                "version": step,
                "seconds": 1.0,
                "score": 0.5,
                "environments": environments,
            }
        )
    log.add({"step": 30, "skipped": "…"})
    assert (log.score(10, 10), log.score(10, 9), log.score(30, 30)) == (0.1, None, None)
    assert flat(log.done()[0])["eval/sum/accuracy"] == 0.1
    assert (
        sentence(log.done()[1])
        == "evaluation of step 20 (version 20): sum: accuracy 0.200 [0.000, 1.000]"
    )
    again = EvaluationLog(tmp_path)
    again.cut(10)
    assert [(line["step"], line["hidden"]) for line in EvaluationLog(tmp_path).lines] == [
        (10, True)
    ]


def test_best_is_the_checkpoint_whose_own_weights_were_evaluated_best(tmp_path: Path) -> None:
    """Rewards rise to the end, the evaluation peaks at step 20; the one of step 50 is still
    running."""
    log, trainer = EvaluationLog(tmp_path, "eval/score"), trained(steps=0)
    checkpointer = Checkpointer(
        tmp_path, trainer.policy, trainer.optimizer, keep=1, keep_best=True, judge=log
    )
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    scores = {10: 0.4, 20: 0.9, 30: 0.7}

    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("step_*"))

    for step in range(1, 61):
        metrics.append({"step": step, "reward_mean": step / 60})
        if step % 5 == 0:
            log.running = 50 if step == 50 else log.running
            checkpointer.save(state_at(step))
        if step in scores:
            log.add(
                {
                    "step": step,
                    "version": step,
                    "seconds": 1.0,
                    "score": scores[step],
                    "environments": {},
                }
            )
            checkpointer.point_at_best()
    assert names() == ["step_000020", "step_000050", "step_000060"]
    assert (tmp_path / "best").resolve().name == "step_000020"
    log.running = None
    log.add({"step": 50, "version": 50, "seconds": 1.0, "score": 0.95, "environments": {}})
    checkpointer.point_at_best()
    assert (tmp_path / "best").resolve().name == "step_000050"
    log.add({"step": 60, "version": 59, "seconds": 1.0, "score": 1.0, "environments": {}})
    checkpointer.point_at_best()
    assert (tmp_path / "best").resolve().name == "step_000050", (
        "version 59 was never a checkpoint's"
    )
    checkpointer.resume(tmp_path / "step_000050", NoStore(), metrics)
    log.cut(50)
    assert TrainerState.read(tmp_path / "best").step == 50


KEEP = "rl_training.keep_best"
DATASET = {"kind": "dataset", "data": "rows.jsonl", "rewards": ["python:score.py:right"]}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"evaluation": {"every": 5}}, "problems is not set"),
        ({"evaluation": {"problems": 3, "greedy": False}}, "neither greedy answers nor samples"),
        (
            {"evaluation": {"problems": 3}, "environments": []},
            "there is no environment to evaluate",
        ),
        ({"rl_training": {"keep_best": "eval/score"}}, f"{KEEP} = 'eval/score' needs"),
        (
            {
                "rl_training": {"keep_best": "eval/sum/acuracy"},
                "evaluation": {"problems": 3, "every": 2},
            },
            "is not measured; there are eval/score, eval/sum/accuracy, eval/sum/reward",
        ),
        (
            {
                "evaluation": {
                    "problems": 3,
                    "environments": [{"kind": "tasks", "name": "sum", "weight": 2.0}],
                }
            },
            "weight is about training",
        ),
        (
            {"environments": [DATASET | {"heldout_fraction": 1.0}]},
            "heldout_fraction = 1 leaves no rows to train on",
        ),
        ({"evaluation": {"problem": 3}}, "did you mean 'evaluation.problems'"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(sections: dict[str, Any], words: str) -> None:
    usual = {"environments": [{"kind": "tasks", "name": "sum"}]}
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        parse_config(usual | sections)


def test_what_decides_the_best() -> None:
    def decides(keep: bool | str, **evaluation: Any) -> str | None:
        environments = [{"kind": "tasks", "name": "sum"}]
        sections = {
            "rl_training": {"keep_best": keep},
            "evaluation": evaluation,
            "environments": environments,
        }
        config = parse_config(sections)
        return best_by(config.rl_training.keep_best, config.evaluation)

    assert decides(True, problems=3, every=5) == "eval/score"
    assert decides(True, problems=3) is None, "only at the end: nothing to choose from"
    assert decides("eval/sum/accuracy", problems=3, every=5) == "eval/sum/accuracy"
    assert decides(False, problems=3, every=5) is None

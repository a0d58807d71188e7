"""The files of a run that a client trains, written beside its requests, as the readers of a
training run read them."""

import json
import math
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.config.training import RolloutsConfig
from mlx_parallm.errors import ConfigError, StoreError
from mlx_parallm.faces.tinker import recorder
from mlx_parallm.faces.tinker.checkpoints import Checkpoints
from mlx_parallm.faces.tinker.data import DatumLimits, read_batch
from mlx_parallm.faces.tinker.groups import LIVE_STEPS, DrawnAnswer, LiveGroups
from mlx_parallm.faces.tinker.learner import Applied, Output
from mlx_parallm.faces.tinker.recorder import (
    Drawn,
    RecordedRun,
    RunRecorder,
    Stepped,
    TrainedRequest,
)
from mlx_parallm.faces.tinker.run_log import SampleRecords, TinkerRunLog
from mlx_parallm.faces.tinker.wire import read_forward_backward
from mlx_parallm.rl_training import events
from mlx_parallm.rl_training.metrics import KEYS, METRICS_FILE, MetricsFile
from mlx_parallm.rl_training.monitor.tokens import read_tokens
from mlx_parallm.rl_training.run_directory import RunDirectory
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.runs.explain import explain
from mlx_parallm.runs.rollouts import Answers, Wanted
from mlx_parallm.runs.run import open_run
from tests.tinker.serving import WireClient, request_of, tinker_server
from tests.tinker.test_groups import policy, read
from tests.waiting import until

PROMPT = [1, 40, 41, 42]
SFT = {"tokens": PROMPT, "target_tokens": [40, 41, 42, 2], "weights": [0.0, 0.0, 1.0, 1.0]}
TIMES = {"max_tokens": 5, "stop": []}


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[WireClient]:
    with tinker_server(root) as server, server.http() as http:
        yield WireClient(http)


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)


def lines(run: Path, count: int) -> list[dict[str, Any]]:
    until(lambda: len(MetricsFile(run / METRICS_FILE).last(99)) == count)
    return MetricsFile(run / METRICS_FILE).last(99)


def rows(run: Path, state: str | None, **wanted: Any) -> list[dict[str, Any]]:
    try:
        answers = Answers(open_run(run))
    except (ConfigError, StoreError):  # the directory, or its database, is being made
        return []
    try:
        return list(answers.rows(Wanted(state=state, **wanted)))
    finally:
        answers.close()


def drawn(
    client: WireClient, sampler: str, count: int, advantages: list[float]
) -> list[dict[str, Any]]:
    """Datums of single samples, as the cookbook makes them."""
    data = []
    for number in range(count):
        promise = client.sample(sampler, number, PROMPT, params=TIMES)
        [sequence] = client.samples(promise).sequences
        tokens = np.frombuffer(sequence.tokens, "<i4").tolist()
        data.append(
            {
                "tokens": [*PROMPT, *tokens[:-1]],
                "target_tokens": [*PROMPT[1:], *tokens],
                "logprobs": [0.0] * 3 + np.frombuffer(sequence.logprobs, "<f4").tolist(),
                "advantages": [0.0] * 3 + [advantages[number]] * 5,
                "spans": [("", 0, 3), (promise["sample_sequence_ids"][0], 0, 5)],
            }
        )
    return data


def test_samples_wait_and_are_the_groups_of_the_step_that_takes_them(
    client: WireClient, root: Path
) -> None:
    model = client.create_model(0)
    run = root / model.replace(":", "_")
    data = drawn(client, client.live_sampler(model, 1, 0), 4, [0.75, -0.25, -0.25, -0.25])
    until(lambda: len(rows(run, "waiting")) == 4)
    live = rows(run, "waiting")
    assert (
        len({row["group_id"] for row in live}) == 1
        and live[0]["prompt"]
        and live[0]["completion"] is not None
    )
    assert all((row["reward"], row["advantage"]) == (None, None) for row in live)
    assert (
        live[0]["why"] == "sampled; no step has trained on it yet"
        and live[0]["stop_reason"] == "length"
    )
    assert RunDirectory.in_use(run)

    answered = client.output(client.send(model, 2, data[:3], "importance_sampling")).metrics
    applied = client.result(client.optim_step(model, 3, learning_rate=1e-2))["metrics"]
    [line] = lines(run, 1)
    assert set(KEYS) < set(line) and line["judged_by"] == "inferred_reward"
    assert (line["step"], line["policy_version"]) == (1, 1)
    assert line["loss"] == answered["loss:sum"] and line["grad_norm"] == applied["grad_norm:mean"]
    assert line["inferred_reward"] == pytest.approx(1 / 3) and (
        line["groups"],
        line["sequences"],
    ) == (1, 3)
    assert line["logprob_diff_max"] <= 1e-4 and line["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert (
        line["trained_tokens"] == 15 and line["completion_tokens_mean"] == 5 and line["entropy"] > 0
    )
    assert (line["staleness"], line["truncated_fraction"], line["reward_mean"]) == (0, 1, None)
    taken = rows(run, "taken")
    assert [row["reward"] for row in taken] == [1, 0, 0] and [
        row["advantage"] for row in taken
    ] == [0.75, -0.25, -0.25]
    assert {(row["step"], row["version"], row["why"]) for row in taken} == {
        (1, 0, "used by step 1")
    }
    assert [row["reward"] for row in rows(run, None, order="best", rewards=(0.5, None))] == [1]
    assert rows(run, None, order="worst")[0]["reward"] == 0
    until(lambda: len(rows(run, "waiting")) == 1)
    assert rows(run, None, order="worst")[-1]["reward"] is None, "one that is not known comes last"
    [left] = rows(run, "waiting")
    assert left["group_id"] == live[0]["group_id"] != taken[0]["group_id"], (
        "what is left keeps its place"
    )

    kept = read_tokens(run, taken[0]["group_id"], 0, 0)
    sampled = slice(len(PROMPT), None)
    np.testing.assert_allclose(kept["logprobs"][sampled], data[0]["logprobs"][3:], atol=1e-7)
    np.testing.assert_allclose(
        kept["trainer_logprobs"][sampled], kept["logprobs"][sampled], atol=1e-4
    )
    assert (kept["advantages"][sampled] == 0.75).all() and (kept["entropies"][sampled] > 0).all()
    assert np.isnan(kept["trainer_logprobs"][: len(PROMPT)]).all()
    names = {json.loads(text)["name"] for text in (run / "spans.jsonl").read_text().splitlines()}
    assert names == {"rl.train", "rl.sample", "versions"}
    found = explain(open_run(run))
    assert found.total_steps is None and not [
        f for f in found.findings if "reward" in f.diagnosis.name
    ]

    client.output(client.send(model, 4, data[:3], "ppo"))  # once more: a group of its own
    client.result(client.optim_step(model, 5, learning_rate=1e-2))
    assert lines(run, 2)[1]["staleness"] == 1
    assert len({row["group_id"] for row in rows(run, "taken")}) == 2
    client.post("unload_model", model_id=model)
    until(lambda: not RunDirectory.in_use(run))
    [unused] = rows(run, "dropped")
    assert unused["reason"] == recorder.UNUSED and rows(run, "waiting") == []


def test_a_model_without_samples_is_judged_by_its_loss_and_counts_on_after_a_load(
    client: WireClient, root: Path
) -> None:
    model = client.create_model(1)
    run = root / model.replace(":", "_")
    state = client.result(client.post("save_weights", model_id=model, path="begin", seq_id=1))[
        "path"
    ]
    for seq_id in (2, 4):
        client.output(client.send(model, seq_id, [SFT], "cross_entropy"))
        client.result(client.optim_step(model, seq_id + 1, learning_rate=1e-2))
    client.result(client.post("load_weights", model_id=model, seq_id=6, path=state, optimizer=True))
    client.output(client.send(model, 7, [SFT] * 2, "cross_entropy"))
    assert client.result(client.optim_step(model, 8))["metrics"]["step:max"] == 1
    written = lines(run, 3)
    assert [(line["step"], line["policy_version"], line["judged_by"]) for line in written] == [
        (1, 1, "loss"),
        (2, 2, "loss"),
        (3, 1, "loss"),
    ]
    assert [line["rolled_back_to"] for line in written] == [None, None, state]
    assert written[2]["loss"] == pytest.approx(2 * written[0]["loss"], rel=1e-6), (
        "of what came since the last step"
    )
    assert not (run / "rollouts.sqlite").exists()


def test_a_file_that_cannot_be_written_costs_one_warning(
    client: WireClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(
        events.log, "warning", lambda text, **fields: said.append(fields["subscriber"])
    )
    model = client.create_model(2)
    run = root / model.replace(":", "_")
    until(lambda: (run / "config.toml").is_file())
    (run / "rollouts.sqlite").mkdir()  # no database
    data = drawn(client, client.live_sampler(model, 1, 0), 2, [0.5, -0.5])
    for seq_id in (2, 4):
        client.output(client.send(model, seq_id, data, "importance_sampling"))
        client.result(client.optim_step(model, seq_id + 1))
    assert [line["inferred_reward"] for line in lines(run, 2)] == [0.5, 0.5]
    assert [name for name in said if "_write_groups" in name] == ["RecordedRun._write_groups"]


def test_what_the_disk_is_too_slow_for_is_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    go, done = threading.Event(), list[str]()
    made = recorder.RunRecorder(OPTIONS, Checkpoints(root))
    made.post(lambda: done.append("waits") if go.wait(10) else None, 8)
    made.post(lambda: done.append("too much"), 8)
    made.post(lambda: done.append("a line"))
    go.set()
    made.close()
    assert done == ["waits", "a line"]


OPTIONS = recorder.RecorderOptions(RolloutsConfig(), 1.0, lambda name, settings: "")


class Recorded:
    """A run's files without a server: what is drawn and trained is made up."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.recorder = RunRecorder(OPTIONS, Checkpoints(directory.parent))
        self.run = RecordedRun(
            self.recorder,
            directory,
            load_config(None, text="").to_toml(),
            OPTIONS,
            lambda name: None,
        )

    def sample(self, *names: str, prompt: int = 1, step: int = 0, first: int = 5) -> None:
        answers = [
            DrawnAnswer(name, (prompt,), (first + number, 2), (-0.5, -0.5), 1.0, step, stopped=True)
            for number, name in enumerate(names)
        ]
        self.run.drawn(Drawn(tuple(answers), 1.0, 2.0))
        self.settle()

    def train(self, line: int, *tokens: int, prompt: int = 1, weights: int = 0) -> None:
        """A step on the samples that begin with these tokens, of a client that sends no ids."""
        batch, output = read([policy([prompt], [token, 2], 0.5) for token in tokens])
        request = TrainedRequest("importance_sampling", batch, output)
        self.run.stepped(Stepped(line, weights, {}, (request,), ()))
        self.settle()

    def settle(self) -> None:
        """Wait until all is written that was posted and is due."""
        for _ in range(2):
            done = threading.Event()
            self.recorder.post(done.set)
            assert done.wait(10)

    def rows(self) -> list[tuple[str, int]]:
        """State and number of answers of each group, the oldest first."""
        store = RolloutStore(self.directory / "rollouts.sqlite", read_only=True)
        try:
            return [
                (row.state, len(row.group.rollouts) if row.group else 0) for row in store.records()
            ][::-1]
        finally:
            store.close()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    made = Recorded(tmp_path / "run")
    yield made
    made.recorder.close()


def short_disk(monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    monkeypatch.setattr(
        "mlx_parallm.rollout_store.store.shortage",
        lambda path, reserve: "full" if short else None,
    )


def test_a_disk_that_gets_short_keeps_what_is_written(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.sample("a")
    recorded.sample("other", prompt=9)
    assert recorded.rows() == [("waiting", 1), ("waiting", 1)]
    short_disk(monkeypatch, True)
    recorded.sample("b", first=6)
    assert sorted(recorded.rows()) == [("waiting", 1), ("waiting", 1)]
    short_disk(monkeypatch, False)
    recorded.sample("c", prompt=8)
    assert sorted(recorded.rows()) == [("waiting", 1), ("waiting", 1), ("waiting", 2)], (
        "what failed is tried again"
    )
    short_disk(monkeypatch, True)
    recorded.train(1, 5, 6)
    assert sorted(recorded.rows()) == [("waiting", 1), ("waiting", 1), ("waiting", 2)], (
        "the step is not written"
    )
    recorded.run.end()
    recorded.settle()
    store = RolloutStore(recorded.directory / "rollouts.sqlite", read_only=True)
    assert store.drop_reasons() == {recorder.MISSED: 1, recorder.UNUSED: 2}
    store.close()


def test_a_sample_is_in_the_store_once_however_long_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are forgotten here long before a step trains on it, or it was dropped before
    that."""
    monkeypatch.setattr(recorder, "LiveGroups", partial(LiveGroups, most_bytes=1500))
    recorded = Recorded(tmp_path / "run")
    recorded.sample("a", "b", "c")
    for number in range(2, 7):
        recorded.sample(str(number), prompt=number)
    assert recorded.rows() == [("waiting", 3)] + [("waiting", 1)] * 5
    recorded.train(1, 6)
    assert sorted(recorded.rows()) == [("taken", 1)] + [("waiting", 1)] * 5 + [("waiting", 2)]
    recorded.train(1 + LIVE_STEPS, 5, prompt=2)
    recorded.sample("last", prompt=8)
    assert sorted(recorded.rows()) == [("dropped", 1)] * 4 + [("dropped", 2)] + [
        ("taken", 1)
    ] * 2 + [("waiting", 1)]
    recorded.train(2 + LIVE_STEPS, 5)
    recorded.train(3 + LIVE_STEPS, 5, prompt=3)
    assert sorted(recorded.rows()) == [("dropped", 1)] * 4 + [("taken", 1)] * 4 + [("waiting", 1)]
    recorded.recorder.close()


def test_samples_of_an_earlier_checkpoint_are_not_old(recorded: Recorded) -> None:
    """The lines are numbered upwards when a client goes back to step 0; its samples are of now."""
    recorded.train(100, 90, prompt=9)
    recorded.sample("a", step=0)
    recorded.sample("b", prompt=2, step=0)
    assert recorded.rows() == [("taken", 1), ("waiting", 1), ("waiting", 1)]
    recorded.train(101, 5)
    assert sorted(recorded.rows()) == [("taken", 1), ("taken", 1), ("waiting", 1)]


def test_a_step_says_how_often_a_checkpoint_was_loaded_before() -> None:
    steps = list[Stepped]()
    run_log = TinkerRunLog(cast(Any, SimpleNamespace(stepped=steps.append)), "run", 0)
    run_log.applied(Applied(1, 0.5), 1e-3, 0.0)
    run_log.loaded("tinker://run/weights/a")
    run_log.applied(Applied(1, 0.5), 1e-3, 0.0)
    assert [(step.step, step.weights, step.generation) for step in steps] == [(1, 0, 0), (2, 0, 1)]


def test_the_files_are_closed_at_the_end_whatever_fails(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.sample("a")
    monkeypatch.setattr(recorder, "FLUSH_S", 100.0)
    recorded.sample("b", first=6)
    short_disk(monkeypatch, True)
    assert RunDirectory.in_use(recorded.directory)
    recorded.run.end()
    recorded.settle()
    assert not RunDirectory.in_use(recorded.directory)
    assert not (recorded.directory / "rollouts.sqlite-wal").exists(), "the database is closed"
    assert recorded.rows() == [("dropped", 1)]


def test_a_step_that_the_disk_is_too_slow_for_has_a_line_and_one_warning(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = list[str]()
    monkeypatch.setattr(recorder.log, "warning", lambda text: warned.append(text))
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    batch, output = read([policy([1], [5, 2], 0.5)])
    for step in (1, 2):
        recorded.run.stepped(
            Stepped(step, 0, {"loss": 0.5}, (TrainedRequest("ppo", batch, output),), (), 11)
        )
    recorded.settle()
    found = MetricsFile(recorded.directory / METRICS_FILE).last(9)
    assert [(line["step"], line["loss"], line["groups"]) for line in found] == [
        (1, 0.5, None),
        (2, 0.5, None),
    ]
    assert len(warned) == 1 and not (recorded.directory / "rollouts.sqlite").exists()


def test_a_lines_means_are_over_tokens() -> None:
    """One token of ratio 1/e and three of ratio 1, sent in two requests."""
    steps = list[Stepped]()
    run_log = TinkerRunLog(cast(Any, SimpleNamespace(stepped=steps.append)), "run", 0)
    for tokens, logprob in (([9], -1.5), ([9, 2, 3], -0.5)):
        entry = policy([1], tokens, 0.5)
        request = read_forward_backward(request_of([entry], "importance_sampling"))
        batch = read_batch(request, DatumLimits(64, 300))
        output = Output([np.full(len(tokens), logprob, np.float32)], 0.0)
        run_log.note(request, batch, output, 0, SampleRecords(), 0.0)
    run_log.applied(Applied(1, 0.5), 1e-3, 0.0)
    assert steps[0].values["ratio_mean"] == pytest.approx((math.exp(-1) + 3) / 4)

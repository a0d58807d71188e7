"""The files of a run that a client trains, as the readers of a training run read them."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mlx_parallm.errors import StoreError
from mlx_parallm.faces.tinker.data import DatumLimits, read_batch
from mlx_parallm.faces.tinker.learner import Applied, Output
from mlx_parallm.faces.tinker.run_log import SampleRecords, TinkerRunLog
from mlx_parallm.faces.tinker.wire import read_forward_backward
from mlx_parallm.rl_training import events
from mlx_parallm.run_files.directory import RunDirectory
from mlx_parallm.run_files.metrics import KEYS, METRICS_FILE, MetricsFile
from mlx_parallm.runs.explain import explain
from mlx_parallm.runs.rollouts import Answers
from mlx_parallm.runs.run import open_run
from tests.tinker.serving import WireClient, request_of, tinker_server
from tests.waiting import until

PROMPT = [1, 40, 41, 42]
SFT = {"tokens": PROMPT, "target_tokens": [40, 41, 42, 2], "weights": [0.0, 0.0, 1.0, 1.0]}
TIMES = {"max_tokens": 5, "stop": []}


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[WireClient]:
    with tinker_server(root) as server, server.http() as http:
        yield WireClient(http)


def lines(run: Path) -> list[dict[str, Any]]:
    """A line is written before its step is answered."""
    return MetricsFile(run / METRICS_FILE).last(99)


def drawn(client: WireClient, sampler: str, advantages: list[float]) -> list[dict[str, Any]]:
    """Datums of single samples, as the cookbook makes them."""
    data = []
    for number, advantage in enumerate(advantages):
        promise = client.sample(sampler, number, PROMPT, params=TIMES)
        [sequence] = client.samples(promise).sequences
        tokens = np.frombuffer(sequence.tokens, "<i4").tolist()
        data.append(
            {
                "tokens": [*PROMPT, *tokens[:-1]],
                "target_tokens": [*PROMPT[1:], *tokens],
                "logprobs": [0.0] * 3 + np.frombuffer(sequence.logprobs, "<f4").tolist(),
                "advantages": [0.0] * 3 + [advantage] * 5,
                "spans": [("", 0, 3), (promise["sample_sequence_ids"][0], 0, 5)],
            }
        )
    return data


def test_each_optimizer_step_is_a_line_and_its_times(client: WireClient, root: Path) -> None:
    model = client.create_model(0)
    run = root / model.replace(":", "_")
    assert RunDirectory.in_use(run)
    data = drawn(client, client.live_sampler(model, 1, 0), [0.75, -0.25, -0.25])

    answered = client.output(client.send(model, 2, data, "importance_sampling")).metrics
    applied = client.result(client.optim_step(model, 3, learning_rate=1e-2))["metrics"]
    [line] = lines(run)
    assert set(KEYS) < set(line) and line["judged_by"] == "loss"
    assert (line["step"], line["policy_version"], line["sequences"]) == (1, 1, 3)
    assert line["loss"] == answered["loss:sum"] and line["grad_norm"] == applied["grad_norm:mean"]
    assert line["logprob_diff_max"] <= 1e-4 and line["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert (line["trained_tokens"], line["completion_tokens_mean"]) == (15, 5)
    assert line["entropy"] > 0 and line["rollout_entropy"] > 0
    assert (line["staleness"], line["truncated_fraction"], line["reward_mean"]) == (0, 1, None)
    names = {json.loads(text)["name"] for text in (run / "spans.jsonl").read_text().splitlines()}
    assert names == {"rl.train", "rl.sample"}
    found = explain(open_run(run))
    assert found.total_steps is None and not [
        finding for finding in found.findings if "reward" in finding.diagnosis.name
    ]
    with pytest.raises(StoreError, match="groups nor rewards"):
        Answers(open_run(run))

    client.output(client.send(model, 4, data, "ppo"))
    client.result(client.optim_step(model, 5, learning_rate=1e-2))
    assert lines(run)[1]["staleness"] == 1
    client.post("unload_model", model_id=model)
    until(lambda: not RunDirectory.in_use(run))


def test_lines_count_on_after_a_load(client: WireClient, root: Path) -> None:
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
    written = lines(run)
    assert [(line["step"], line["policy_version"]) for line in written] == [(1, 1), (2, 2), (3, 1)]
    assert [line["rolled_back_to"] for line in written] == [None, None, state]
    assert written[2]["loss"] == pytest.approx(2 * written[0]["loss"], rel=1e-6), (
        "of what came since the last step"
    )


def test_a_file_that_cannot_be_written_costs_one_warning(
    client: WireClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(
        events.log, "warning", lambda text, **fields: said.append(fields["subscriber"])
    )
    model = client.create_model(2)
    run = root / model.replace(":", "_")
    (run / METRICS_FILE).mkdir()
    for seq_id in (1, 3):
        client.output(client.send(model, seq_id, [SFT], "cross_entropy"))
        assert client.result(client.optim_step(model, seq_id + 1))["metrics"]["grad_norm:mean"] > 0
    assert said == ["RecordedRun._write_line"]
    assert len((run / "spans.jsonl").read_text().splitlines()) == 4


def logged() -> tuple[TinkerRunLog, list[tuple[int, Mapping[str, Any]]]]:
    steps = list[tuple[int, Mapping[str, Any]]]()
    recorded = SimpleNamespace(stepped=lambda step, values, times: steps.append((step, values)))
    return TinkerRunLog(cast(Any, recorded), "run", 0), steps


def test_a_load_begins_another_generation_of_weights() -> None:
    run_log, steps = logged()
    run_log.applied(Applied(1, 0.5), 1e-3, 0.0)
    run_log.loaded("tinker://run/weights/a")
    run_log.applied(Applied(1, 0.5), 1e-3, 0.0)
    assert [step for step, _ in steps] == [1, 2] and run_log.generation == 1


def test_a_lines_means_are_over_tokens() -> None:
    """One token of ratio 1/e and three of ratio 1, sent in two requests."""
    run_log, steps = logged()
    for tokens, logprob in (([9], -1.5), ([9, 2, 3], -0.5)):
        entry = {
            "tokens": [1, *tokens[:-1]],
            "target_tokens": tokens,
            "advantages": [0.5] * len(tokens),
            "logprobs": [-0.5] * len(tokens),
        }
        request = read_forward_backward(request_of([entry], "importance_sampling"))
        batch = read_batch(request, DatumLimits(64, 300))
        output = Output([np.full(len(tokens), logprob, np.float32)], 0.0)
        run_log.note(request, batch, output, 0, SampleRecords(), 0.0)
    run_log.applied(Applied(1, 0.5), 1e-3, 0.0)
    assert steps[0][1]["ratio_mean"] == pytest.approx((math.exp(-1) + 3) / 4)

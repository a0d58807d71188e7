"""spans.jsonl: lanes of a run's time, and the versions of its tokens."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from mlx_parallm.rl_training.events import StepFinished
from mlx_parallm.rl_training.monitor.recording import record_spans
from mlx_parallm.run_files.spans import MOST_PARTS, SPANS_FILE, SpanLog, merged
from tests.rl_training.bandit_run import running


def test_overlapping_times_become_few_parts() -> None:
    assert merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]
    assert merged([]) == []
    # pauses grow shorter
    apart = [(10.0 * place, 10.0 * place + 1 + place / 10) for place in range(40)]
    parts = merged(apart)
    assert len(parts) == MOST_PARTS and (parts[0][0], parts[-1][1]) == (0.0, apart[-1][1])
    assert parts[0] == apart[0], "the shortest pauses are filled"


def test_a_run_leaves_its_lanes(tmp_path: Path) -> None:
    with running(tmp_path / "run", total_steps=3) as run:
        log = SpanLog(tmp_path)
        record_spans(run.stream, log)
        log.add("rl.sample", (5.0, 6.0))
        log.add("rl.sample", (5.5, 7.0))
        run.loop.run()
        log.flush()
    lines = [json.loads(text) for text in (tmp_path / SPANS_FILE).read_text().splitlines()]
    each = {"rl.wait", "rl.train", "rl.sync", "versions"}
    for step, more in (
        (1, {"rl.sample"}),
        (2, {"rl.checkpoint"}),
        (3, {"rl.checkpoint"}),
    ):
        assert {line["name"] for line in lines if line["step"] == step} == each | more
    assert [line for line in lines if line["name"] == "rl.sample"] == [
        {"name": "rl.sample", "step": 1, "begin": 5.0, "end": 7.0}
    ]
    trained = [line for line in lines if line["name"] == "rl.train"]
    assert all(line["end"] >= line["begin"] for line in trained)
    assert all(later["begin"] >= line["end"] for line, later in pairwise(trained))
    sampled = [line["tokens"] for line in lines if line["name"] == "versions"]
    assert all(sum(tokens.values()) > 0 for tokens in sampled)

    resumed = SpanLog(tmp_path, step=1)
    with running(tmp_path / "other", total_steps=1) as run:
        record_spans(run.stream, resumed)
        run.loop.run()
    steps = {json.loads(text)["step"] for text in (tmp_path / SPANS_FILE).read_text().splitlines()}
    assert steps == {1}, "what came after the checkpoint is made again"

    with (tmp_path / SPANS_FILE).open("a") as file:
        file.write('{"name": "rl.tr\n{"name": "rl.train", "step": 1, "begin": 1, "end": 2}\n')
    after = SpanLog(tmp_path, step=1)
    with running(tmp_path / "third", total_steps=1) as run:
        record_spans(run.stream, after)
        run.loop.run()
    assert {
        json.loads(text)["step"] for text in (tmp_path / SPANS_FILE).read_text().splitlines()
    } == {1}
    assert (tmp_path / "spans.damaged").exists(), (
        "a damaged line costs what was before it, and not the run"
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_long_run_keeps_its_newest_spans(tmp_path: Path) -> None:
    log, path = SpanLog(tmp_path, most_bytes=4_000), tmp_path / SPANS_FILE
    with running(tmp_path / "run", total_steps=40) as run:
        sizes = list[int]()
        record_spans(run.stream, log)
        run.stream.subscribe(StepFinished, lambda event: sizes.append(path.stat().st_size))
        run.loop.run()
    log.flush()
    steps = [json.loads(text)["step"] for text in path.read_text().splitlines()]
    assert max(sizes) <= 4_000 and path.stat().st_size <= 4_000
    assert steps == sorted(steps) and steps[0] > 20 and steps[-1] == 40, (
        "whole lines, the oldest are gone"
    )

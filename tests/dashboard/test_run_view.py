"""RunView: cursors, bounded answers, groups, search, tokens, redaction."""

import base64
import io
import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.environments.row_images import stored
from mlx_parallm.errors import CheckpointError, RequestError
from mlx_parallm.rl_training.events import RunEvents, SamplesWritten, StepFinished
from mlx_parallm.rl_training.monitor.recording import TokenLog
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.prepare import StepTokens
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.run_files.samples import choose_samples
from mlx_parallm.runs.dashboard import run_view
from mlx_parallm.runs.dashboard.run_view import MOST_NUMBERS, MOST_TOKENS, RunView, Search, sendable
from mlx_parallm.runs.explain import as_text, explain
from mlx_parallm.runs.run import Run
from mlx_parallm.system.redaction import Redactor
from mlx_parallm.types import RolloutGroup
from tests.dashboard.making import HOSTILE, SECRET, answer, evaluated, make_run, metrics_line


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return RunView(Run(make_run(tmp_path_factory.mktemp("runs"))), Redactor())


def ids(found: dict[str, Any]) -> list[str]:
    return [group["group_id"] for group in found["groups"]]


def test_a_cursor_brings_only_what_is_new(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2)
    view, file = RunView(Run(run), Redactor()), MetricsFile(run / METRICS_FILE)
    first = view.metrics(["headline", "reward_by_environment/*", "nothing"], "", 100)
    assert (first["reset"], first["steps"]) == (True, [1, 2])
    assert first["columns"] == {
        "headline": [0.01, 0.02],
        "reward_by_environment/sums": [0.02, 0.04],
    }
    assert "kl" in first["keys"]

    file.append(metrics_line(3, rolled_back_to="version 1"))
    with file.path.open("a") as half:
        half.write('{"step": 4, ')  # being written
    second = view.metrics(["headline"], first["cursor"], 100)
    assert (second["reset"], second["steps"], second["columns"]) == (
        False,
        [3],
        {"headline": [0.03]},
    )
    rollback = {"step": 3, "kind": "rollback", "text": "rolled back to version 1", "time": None}
    assert second["marks"] == [rollback]
    note = {"step": 2, "kind": "note", "text": "by hand", "time": 5.0}
    MetricsFile(file.path.with_name("marks.jsonl")).append(note)
    assert view.metrics(["headline"], second["cursor"], 100)["marks"] == [note, rollback]
    # what newer runs write, after the steps that were finished
    written = rollback | {"step": 2, "time": 6.0}
    MetricsFile(file.path.with_name("marks.jsonl")).append(written)
    assert view.metrics(["headline"], second["cursor"], 100)["marks"] == [note, written], "once"
    assert view.metrics(["headline"], second["cursor"], 100)["steps"] == []

    file.cut(1)  # what a resume does
    third = view.metrics(["headline"], second["cursor"], 100)
    assert (third["reset"], third["steps"]) == (True, [1])
    assert (
        RunView(Run(run), Redactor()).metrics(["headline"], third["cursor"], 100)["steps"] == []
    ), "another process"


def test_many_steps_become_means_and_no_answer_is_large(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    lines = (
        metrics_line(step, **{f"rewards/{part}/mean": 1 / (step + part) for part in range(60)})
        for step in range(2, 1501)
    )
    with (run / METRICS_FILE).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    view = RunView(Run(run), Redactor())
    few = view.metrics(["kl"], "", 4)  # 375 steps each: the mean of 1 to 375 is 188
    assert few["steps"] == [375, 750, 1125, 1500]
    assert few["columns"]["kl"] == pytest.approx([1.88, 5.63, 9.38, 13.13])
    everything = view.metrics(["*"], "", 2000)
    assert len(everything["steps"]) * len(everything["columns"]) <= MOST_NUMBERS + len(
        everything["columns"]
    )
    assert everything["steps"][-1] == 1500 and len(json.dumps(everything)) < 300_000


def test_groups_of_a_step_with_their_answers(view: RunView) -> None:
    found = view.groups(Search(first_step=2, last_step=2, order="best"))
    assert ids(found) == ["sums-2", "words-2"] and found["older"] is None
    sums, words = found["groups"]
    assert (sums["kind"], sums["reward_mean"], sums["state"], sums["prompt"]) == (
        "mixed",
        0.5,
        "taken",
        "Sum: 2+2",
    )
    assert (words["kind"], words["state"]) == ("wrong", "dropped")
    right, wrong = sums["answers"]
    assert (right["completion"], right["reward"], right["version"]) == ("4", 1.0, 3)
    assert right["advantage"] > 0 > wrong["advantage"] and wrong["completion"] == HOSTILE
    assert SECRET not in json.dumps(found)


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (Search(text="SPELL"), ["words-3", "words-2", "words-1"]),
        (Search(pattern=r"^Sum: [12]\+"), ["sums-2", "sums-1"]),
        (Search(lowest=0.4, highest=0.6), ["tools-9"]),
        (Search(environment="sums", first_step=2), ["sums-3", "sums-2"]),
        (Search(version=2), ["words-2"]),
        (Search(state="waiting"), ["tools-9"]),
        (Search(reason="no variance", last_step=1), ["words-1"]),
        (Search(older_than="sums-2"), ["words-1", "sums-1"]),
        (Search(text="abc", lowest=0.5), []),
    ],
)
def test_search(view: RunView, search: Search, expected: list[str]) -> None:
    assert ids(view.groups(search)) == expected


def test_a_group_keeps_its_kind_when_some_of_its_answers_fit(view: RunView) -> None:
    (found,) = view.groups(Search(environment="sums", first_step=1, last_step=1, lowest=1.0))[
        "groups"
    ]
    assert (len(found["answers"]), found["kind"], found["reward_mean"]) == (1, "mixed", 0.5)


def test_every_group_is_reached_in_parts(view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    found, older = list[str](), ""
    while True:
        part = view.groups(Search(limit=1, older_than=older))
        assert len(part["groups"]) <= 1
        found, older = found + ids(part), part["older"]
        if older is None:
            break
    assert found == ["tools-9", "words-3", "sums-3", "words-2", "sums-2", "words-1", "sums-1"]
    # the time is over at once: one group, and where to continue
    monkeypatch.setattr(run_view, "SEARCH_S", -1.0)
    part = view.groups(Search(text="nobody says this"))
    assert (part["groups"], part["older"]) == ([], "tools-9")


def test_a_wrong_or_endless_pattern_is_an_error(view: RunView, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not a regular expression"):
        view.groups(Search(pattern="("))
    run = make_run(tmp_path, steps=0)
    store = RolloutStore(run / "rollouts.sqlite")
    store.add(RolloutGroup("long", "sums", (answer("Go", "a" * 60 + "b"),) * 2), source="here")
    store.close()
    with pytest.raises(RequestError, match="takes more than"):
        RunView(Run(run), Redactor()).groups(Search(pattern="(a|a)+$"))


def test_a_group_as_a_whole(view: RunView) -> None:
    group = view.group("tools-9")
    assert [turn["role"] for turn in group["rollouts"][0]["conversation"]] == [
        "prompt",
        "model",
        "environment",
        "model",
    ]
    assert group["rollouts"][0]["conversation"][2]["text"] == "noon" and group["kind"] == "mixed"
    with pytest.raises(RequestError, match="no group 'nobody'"):
        view.group("nobody")


def test_images_of_prompts_are_shown_small(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="needs Pillow, which makes thumbnails")
    from PIL import Image

    large = stored(Image.new("RGB", (600, 300), "red"), Path(), "an image")
    damaged = stored(b"\x89PNG\r\n\x1a\nnothing", Path(), "an image")
    gone = f"sha256:{'0' * 64}"
    view = RunView(Run(make_run(tmp_path, steps=1)), Redactor())
    with closing(RolloutStore(view.path / "rollouts.sqlite")) as store:
        [group] = store.groups(["tools-9"])
        seeing = tuple(replace(each, images=(large, damaged, gone)) for each in group.rollouts)
        store.add(replace(group, group_id="seeing", rollouts=seeing), source="here")
    shown = view.group("seeing")
    assert shown["rollouts"][0]["images"] == [large, damaged, gone]
    assert [*shown["thumbnails"]] == [large], "what cannot be read is left out"
    url = shown["thumbnails"][large]
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert picture.size == (192, 96) and picture.getpixel((0, 0)) == (255, 0, 0)
    assert view.tokens("seeing", 0, 0, 0)["thumbnails"] == shown["thumbnails"]
    assert view.group("tools-9")["thumbnails"] == {}


def test_tokens_are_those_of_the_store(view: RunView) -> None:
    found = view.tokens("sums-1", 1, 0, 0)
    store = RolloutStore(view.path / "rollouts.sqlite", read_only=True)
    (group,) = store.groups(["sums-1"])
    store.close()
    rollout = group.rollouts[1]
    assert found["ids"] == list(rollout.tokens) and found["mask"] == list(rollout.mask)
    sampled = [
        value if own else None
        for value, own in zip(rollout.logprobs or (), rollout.mask, strict=True)
    ]
    assert found["values"]["logprobs"] == sampled
    later = view.tokens("sums-1", 1, 0, 5)
    assert later["ids"] == found["ids"][5:] and later["total"] == len(rollout.tokens) <= MOST_TOKENS
    with pytest.raises(RequestError, match="segments 0 to 0"):
        view.tokens("sums-1", 1, 3, 0)


def test_the_trainers_numbers_of_tokens(tmp_path: Path) -> None:
    """Sampler -0.5, trainer -0.25, reference -0.75: ratio e^0.25, k3 e^-0.5 + 0.5 - 1; teacher -1:
    the gap is -0.75."""
    view = RunView(Run(make_run(tmp_path, steps=1)), Redactor())
    assert set(view.tokens("sums-1", 0, 0, 0)["values"]) == {"logprobs"}, "nothing was kept"
    store = RolloutStore(view.path / "rollouts.sqlite", read_only=True)
    (group,) = store.groups(["sums-1"])
    store.close()
    sequences = tuple(
        TrainSequence(rollout, (2.0,) * len(rollout.tokens), fresh=True)
        for rollout in group.rollouts
    )
    count = sum(sequence.trained for sequence in sequences)
    numbers = {
        "logprobs": -0.5,
        "trainer_logprobs": -0.25,
        "reference_logprobs": -0.75,
        "teacher_logprobs": -1.0,
        "advantages": 2.0,
    }
    tokens = StepTokens(
        {name: np.full(count, number, np.float32) for name, number in numbers.items()}
    )
    batch = TrainBatch(1, (group,), sequences, BatchStatistics())
    events, log = RunEvents(), TokenLog(view.path, most_bytes=200_000)
    log.subscribe(events)
    events.emit(StepFinished({"step": 1}, batch, tokens))
    events.emit(SamplesWritten(1, choose_samples(1, [group], lambda parts: [*map(str, parts)])))
    log.close()
    found = view.tokens("sums-1", 0, 0, 0)
    for place, own in enumerate(found["mask"]):
        row = {
            name: column[place] for name, column in found["values"].items() if name != "logprobs"
        }
        kl = pytest.approx(math.exp(-0.5) + 0.5 - 1)
        known = {"ratio": pytest.approx(math.exp(0.25)), "kl": kl, "advantages": 2.0}
        known |= {"teacher_logprobs": -1.0, "teacher_gap": -0.75}
        known |= {name: numbers[name] for name in ("trainer_logprobs", "reference_logprobs")}
        assert row == (known if own else dict.fromkeys(known))
    assert "entropies" not in found["values"], "no column in which nothing is known"


def test_health_is_what_explain_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0)
    file = MetricsFile(run / METRICS_FILE)
    for step in range(1, 6):
        file.append(metrics_line(step, kl=9.0, reward_mean=0.1, groups_without_variance=0.0))
    (finding,) = [
        one
        for one in RunView(Run(run), Redactor()).health()["findings"]
        if one["name"] == "kl-running-away"
    ]
    assert "9" in finding["sentence"] and finding["setting"] and finding["steps"] == [[1, 5]]


def test_what_json_cannot_hold() -> None:
    assert sendable({"a": [float("nan"), 1.5, "\ud800x"]}) == {"a": [None, 1.5, "\\ud800x"]}


def test_two_evaluations_word_by_word(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    view, file = RunView(Run(run), Redactor()), MetricsFile(run / "evaluations.jsonl")
    file.path.unlink()
    assert view.evaluations.heldout(0, -1) == {"evaluations": [], "environments": {}}
    file.append(evaluated(0, 0.0, 1.0, text="It is one, I think."))
    file.append(evaluated(5, 1.0, 0.0, text="It is two, I think. <b>"))
    file.append({"step": 7, "skipped": "too slow"})
    found = view.evaluations.heldout(0, -1)
    assert found["evaluations"] == [{"step": 0, "version": 0}, {"step": 5, "version": 5}]
    part = found["environments"]["sums"]
    assert part["problems"] == [["p0", 0.0, 1.0], ["p1", 1.0, 0.0]]
    (example,) = part["examples"]
    assert (example["before"], example["after"], example["rewards"]) == (0.0, 1.0, [0.0, 1.0])
    assert example["diff"] == [
        ["same", "It is "],
        ["gone", "one"],
        ["new", "two"],
        ["same", ", I think."],
        ["new", " <b>"],
    ]
    with pytest.raises(RequestError, match="2 evaluations"):
        view.evaluations.heldout(0, 2)


def test_a_window_of_a_long_timeline(tmp_path: Path) -> None:
    """Steps are found by halves: a file of 10,000 steps is not read whole."""
    run = make_run(tmp_path, steps=1)
    view = RunView(Run(run), Redactor())
    (run / "spans.jsonl").unlink()
    assert view.timeline(9, 9) == {"spans": [], "tokens": {}}
    lines = []
    for step in range(1, 10_001):
        lines.append(
            json.dumps({"name": "rl.train", "step": step, "begin": step, "end": step + 0.5})
        )
        if step % 10 == 5:  # an evaluation of an earlier step ends here
            lines.append(
                json.dumps(
                    {"name": "rl.evaluate", "step": step - 5, "begin": step - 5, "end": step}
                )
            )
        lines.append(json.dumps({"name": "versions", "step": step, "tokens": {str(step): 7}}))
    (run / "spans.jsonl").write_text("\n".join(lines) + '\n{"name": "rl.tr')
    assert [step for _, step, *_ in view.timeline(8, None)["spans"]] == [1], "the run's newest step"
    assert list(view.timeline(9_999, 9_999)["tokens"]) == [
        str(step) for step in range(9_936, 10_000)
    ], "64 at most"
    for first, last in ((1, 3), (4_996, 5_003), (9_999, 10_000)):
        found = view.timeline(last - first + 1, last)
        trained = [step for name, step, *_ in found["spans"] if name == "rl.train"]
        assert trained == list(range(first, last + 1)) and len(found["tokens"]) == last - first + 1
    assert [span for span in view.timeline(8, 5_003)["spans"] if span[0] == "rl.evaluate"] == [
        ["rl.evaluate", 5_000, 5_000, 5_005]
    ]


def test_a_run_whose_newest_step_has_lost_its_state_is_shown_and_explained(tmp_path: Path) -> None:
    """It is not resumed without a word, but everything else of it can be read."""
    run = make_run(tmp_path)
    for step in (1, 2):
        (run / f"step_{step:06d}").mkdir()
    (run / "step_000001" / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step_000002 has no trainer_state"):
        Run(run).checkpoint()
    assert [path.name for path in Run(run).checkpoints()] == ["step_000001", "step_000002"]
    assert RunView(Run(run), Redactor()).summary()["name"] == "my-run"
    assert as_text(explain(Run(run)))

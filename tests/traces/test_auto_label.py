"""Labels by a judge and by a classifier, on runs of a scripted agent; a person's notes are
redacted."""

import io
import random
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.cli.table import main
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards.judge import judge
from mlx_parallm.systems.traces.auto_label import AutoLabeler
from mlx_parallm.systems.traces.judging import add_judge_labels
from mlx_parallm.systems.traces.reading import read_traces, write_lines
from mlx_parallm.systems.traces.rewards import fit_learned, trajectory_of
from mlx_parallm.systems.traces.session import label_about
from mlx_parallm.systems.traces.trace import ToolCallTrace, Trace, new_trace, trace_of_events
from tests.scripted_http import Reply, scripted_http
from tests.traces.messages import assistant, user

USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def reply(text: str) -> Reply:
    return 200, {}, {"choices": [{"message": {"content": text}}], "usage": USAGE}


def answers(*texts: str) -> list[Trace]:
    found = []
    for number, text in enumerate(texts):
        messages = [user("Which number?"), assistant(text)]
        found.append(new_trace(messages, session_id=str(number), source="test"))
    return found


def values(traces: list[Trace]) -> list[list[float | None]]:
    return [[label.value for label in trace.labels] for trace in traces]


def largest_first(path: str, body: Any) -> Reply:
    shown = [
        int(text)
        for text in re.findall(r"--- answer \d+ \S+ ---\n\D*(\d+)", body["messages"][0]["content"])
    ]
    order = sorted(range(len(shown)), key=lambda at: -shown[at])
    return reply("Ranking: " + " > ".join(str(at + 1) for at in order))


def test_a_judge_compares_in_two_orders() -> None:
    traces = answers("10", "30", "20", "30")
    with scripted_http(largest_first) as (url, received):
        cost = add_judge_labels(
            traces, judge(judge=url, model="m", mode="rank"), "m", relative=True
        )
    assert values(traces) == [[0.0], [1.0], [0.5], [1.0]]
    assert traces[0].labels[0].by == "judge:m" and traces[0].labels[0].prompt_hash
    assert (cost.labelled, cost.requests, cost.prompt_tokens, cost.completion_tokens) == (
        4,
        2,
        14,
        6,
    )
    orders = [
        re.findall(r"--- answer \d+ \S+ ---\n\D*(\d+)", call.body["messages"][0]["content"])
        for call in received
    ]
    assert orders[0] == orders[1][::-1]


def test_a_judge_that_takes_the_first_answer_labels_nothing() -> None:
    traces = answers("10", "30")
    with scripted_http(lambda path, body: reply("Ranking: 1 > 2")) as (url, _):
        cost = add_judge_labels(
            traces, judge(judge=url, model="m", mode="rank"), "m", relative=True
        )
    assert values(traces) == [[], []] and cost.disagreed == 2


def test_an_answer_that_does_not_come_costs_no_other_label() -> None:
    def score(path: str, body: Any) -> Reply:
        fails = '"30"' in body["messages"][0]["content"]
        return (500, {}, {"error": {"message": "overloaded"}}) if fails else reply("Score: 8")

    with scripted_http(score) as (url, _):
        traces = answers("10", "30")
        cost = add_judge_labels(traces, judge(judge=url, model="m", retries=0), "m")
        assert values(traces) == [[0.8], []] and cost.unread == 1
        with pytest.raises(RolloutRejectedError):
            add_judge_labels(answers("30"), judge(judge=url, model="m", retries=0), "m")


def test_a_judge_scores_each_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "traces.jsonl"
    write_lines(answers("10", "30"), file)

    def score(path: str, body: Any) -> Reply:
        return reply("Score: 8" if '"30"' in body["messages"][0]["content"] else "I cannot say")

    with scripted_http(score) as (url, _):
        assert main(["traces", "label", str(file), "--judge", url, "--judge-model", "m"]) == 0
    assert (
        "1 labelled" in (out := capsys.readouterr().out)
        and "1 without a score; 2 requests, 14 tokens in" in out
    )
    assert values(list(read_traces(file))) == [[], [0.8]]
    assert main(["traces", "label", str(file), "--judge", "http://127.0.0.1:9/v1"]) == 2
    assert "model is missing" in capsys.readouterr().err


def runs(count: int, seed: int) -> list[tuple[Trace, bool]]:
    """Runs of an agent whose tool fails now and then; it is good when the last call worked, nine
    times in ten."""
    source, found = random.Random(seed), []
    for number in range(count):
        oks = [source.random() < 0.6 for _ in range(source.randint(1, 4))]
        calls = [
            ToolCallTrace(source.choice(("find", "read")), {}, "ok" if ok else "error: gone", ok)
            for ok in oks
        ]
        good = oks[-1] != (source.random() < 0.05)
        words = " ".join(source.choices(("it", "is", "the", "number", "here", "so"), k=5))
        view = trace_of_events(
            f"{number}", "Find it", calls, words, timestamp=f"{number}", source="test"
        )
        found.append((view, good))
    return found


def judged_runs(count: int, seed: int) -> list[Trace]:
    found = []
    for trace, good in runs(count, seed):
        trace.add_label(label_about(trace, "manual", float(good), "user"))
        found.append(trace)
    return found


def auc(scores: list[float], labels: list[bool]) -> float:
    """The share of pairs of a good and a bad run in which the good one has the higher score."""
    pairs = [
        (a, b)
        for a, good in zip(scores, labels, strict=True)
        if good
        for b, other in zip(scores, labels, strict=True)
        if not other
    ]
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


@pytest.mark.slow
def test_both_learned_labelers_tell_good_from_bad_held_out() -> None:
    known, held_out = judged_runs(200, seed=0), runs(200, seed=1)
    labels, traces = [good for _, good in held_out], [trace for trace, _ in held_out]
    labeler, learned = AutoLabeler(known), fit_learned(known)
    chances = labeler.probabilities(traces)
    assert auc(chances, labels) >= 0.9
    # it sees no order of calls
    assert auc([learned.score(trajectory_of(trace)) for trace in traces], labels) >= 0.75
    sure = [
        good == (p > 0.5) for p, good in zip(chances, labels, strict=True) if max(p, 1 - p) >= 0.8
    ]
    assert len(sure) > 50 and sum(sure) / len(sure) > 0.8  # calibrated: at least what it claims


def test_proposals_leave_what_people_said_and_what_is_unsure() -> None:
    known, open_ = judged_runs(100, seed=0), [trace for trace, _ in runs(100, seed=1)]
    labeler = AutoLabeler(known)
    order = labeler.unsure_first([*known, *open_])
    chances = labeler.probabilities(order)
    assert len(order) == 100 and [abs(p - 0.5) for p in chances] == sorted(
        abs(p - 0.5) for p in chances
    )
    labelled, left = labeler.propose([*known, *open_], sure=0.8)
    assert labelled + left == 100 and labelled > 0
    assert all(len(trace.labels) == 1 for trace in known)
    made = [trace.labels[0] for trace in open_ if trace.labels]
    assert len(made) == labelled and {label.name for label in made} == {"auto"}
    assert all(max(label.value or 0, 1 - (label.value or 0)) >= 0.8 for label in made)
    # it does not learn from itself
    assert AutoLabeler([*known, *open_]).positive == labeler.positive
    with pytest.raises(ConfigError, match="it takes 10 of each"):
        AutoLabeler(known[:8])


def test_twenty_labels_are_enough_to_be_sure_of_most() -> None:
    """Of 13 runs that nobody has judged, at --sure 0.7; how sure it was is known."""
    known = judged_runs(60, seed=0)
    taken = {
        good: [trace for trace in known if (trace.labels[0].value == 1.0) is good][:10]
        for good in (True, False)
    }
    labeler, open_ = (
        AutoLabeler([*taken[True], *taken[False]]),
        [trace for trace, _ in runs(13, seed=1)],
    )
    labelled, left = labeler.propose(open_, sure=0.7)
    assert labelled + left == 13 and labelled > left
    assert labeler.surest == pytest.approx(max(max(p, 1 - p) for p in labeler.probabilities(open_)))


def test_the_command_proposes_and_asks_about_the_unsure_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "traces.jsonl"
    traces = [*judged_runs(80, seed=0), *(trace for trace, _ in runs(10, seed=1))]
    write_lines(traces, file)
    least_sure = AutoLabeler(traces).unsure_first(traces)[0].id
    key = "ghp_" + "a1B2c3D4e5F6" * 3
    monkeypatch.setattr("sys.stdin", io.StringIO(f"b it printed {key}\nq\n"))
    assert main(["traces", "label", str(file), "--unsure-first"]) == 0
    capsys.readouterr()
    [asked] = [
        trace for trace in read_traces(file) if trace.labels and trace.labels[-1].explanation
    ]
    assert asked.id == least_sure
    assert key not in file.read_text() and "it printed" in (asked.labels[-1].explanation or "")
    assert main(["traces", "label", str(file), "--auto", "--sure", "0.6"]) == 0
    assert re.search(r"learned from \d+ good and \d+ bad: \d+ labelled", capsys.readouterr().out)

"""Logs as other programs really write them: nothing vanishes, walks end, nobody learns what no
model said.

The long form of the last test is tests/soak/fuzz_logs.py.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.systems.traces.checkpoints import CheckpointLoader
from mlx_parallm.systems.traces.importers.claude_code import BLOCK_TWICE, TWICE, TWICE_OTHERWISE
from mlx_parallm.systems.traces.importers.links import Forest
from mlx_parallm.systems.traces.importers.report import ImportReport
from mlx_parallm.systems.traces.reading import read_traces
from mlx_parallm.systems.traces.trace import Trace, new_trace
from tests.soak.fuzz_logs import fuzz
from tests.soak.good_logs import GOOD
from tests.traces.messages import assistant, data_set, text, user
from tests.traces.test_importers import (
    claude,
    codex,
    event,
    imported,
    item,
    lines,
    roles,
    said,
    sampled,
    sides,
    span,
    spans,
)

Json = dict[str, Any]


def learned(traces: list[Trace]) -> list[list[tuple[str, str]]]:
    """Role and text of each SFT row; an answer that is not learned has the role "context"."""
    return [
        [("context" if m.get("weight") == 0 else m["role"], m["content"]) for m in row["messages"]]
        for row in data_set(traces).train
    ]


def why_not(traces: list[Trace], kind: Any = "sft") -> dict[str, int]:
    """Why traces make no row; one of another conversation does, so that a data set can be made."""
    other = new_trace([user("?"), assistant("!")], session_id="other", source="test")
    return dict(data_set([*traces, other], kind).left_out)


USE: Json = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "t1", "content": "a.py"}


# ---------------------------------------------------------------------- Claude Code


def test_a_uuid_counts_once(tmp_path: Path) -> None:
    """Each line twice, at once or later; the same uuid with other content, or with more; the
    same block under a new uuid; a whole answer again in a fork. Looked at too: results written
    twice, and lines of one answer in any order."""
    answer = [
        claude("a1", "u1", "assistant", text("Looking."), message_id="m1"),
        claude("a2", "a1", "assistant", [USE], message_id="m1"),
    ]
    ends = [
        claude("u2", "a2", "user", [RESULT]),
        claude("a3", "u2", "assistant", text("One."), message_id="m2"),
    ]
    first = claude("u1", None, "user", "list")
    twice = [first, first, *answer, answer[0], ends[0], answer[1], ends[0], ends[1], ends[1]]
    [trace], report = imported(lines(tmp_path / "S.jsonl", *twice), "claude-code")
    assert roles(trace) == ["user", "assistant", "tool", "assistant"]
    assert (trace.messages[1]["content"], len(trace.messages[1]["tool_calls"])) == ("Looking.", 1)
    assert report.lines.left_out[TWICE] == 5
    assert learned([trace]) == [
        [("user", "list"), ("assistant", "Looking."), ("tool", "a.py"), ("assistant", "One.")]
    ]
    changed = claude("a1", "u1", "assistant", text("Other."), message_id="m1")
    again = claude("a9", "a1", "assistant", text("Looking."), message_id="m1")
    grown = claude("a1", "u1", "assistant", [*text("Looking."), USE], message_id="m1")
    [trace], report = imported(
        lines(tmp_path / "C.jsonl", first, answer[0], changed, again, grown), "claude-code"
    )
    assert (trace.messages[1]["content"], len(trace.messages[1]["tool_calls"])) == ("Looking.", 1)
    assert report.lines.left_out[TWICE_OTHERWISE] == 1
    assert report.details[BLOCK_TWICE] >= 1
    fork = [
        claude("f1", None, "user", "other"),
        claude("f2", "f1", "assistant", text("Looking."), message_id="m1"),
    ]
    traces, _ = imported(lines(tmp_path / "F.jsonl", first, answer[0], *fork), "claude-code")
    assert [trace.messages[-1]["content"] for trace in traces] == ["Looking.", "Looking."]


@pytest.mark.parametrize(
    "kind", ["system", "progress", "attachment", "file-history-snapshot", "not-known-yet"]
)
def test_rows_that_are_no_messages_are_links(tmp_path: Path, kind: str) -> None:
    """One, or several in a row; before the first message too."""
    rows = [
        {"type": kind, "uuid": "h0", "parentUuid": None},
        claude("u1", "h0", "user", "list"),
        claude("a1", "u1", "assistant", [USE], message_id="m1"),
        {"type": kind, "uuid": "h1", "parentUuid": "a1"},
        {"type": kind, "uuid": "h2", "parentUuid": "h1"},
        claude("u2", "h2", "user", [RESULT]),
        {"type": kind, "uuid": "h3", "parentUuid": "u2", "isSidechain": False},
        claude("a2", "h3", "assistant", text("One."), message_id="m2"),
    ]
    [trace], report = imported(lines(tmp_path / "S.jsonl", *rows), "claude-code")
    assert roles(trace) == ["user", "assistant", "tool", "assistant"] and not trace.get(
        "untrainable"
    )
    assert report.lines.left_out == {f"lines of type {kind!r} are not messages": 4}


def test_what_the_user_wrote_meanwhile_is_a_message(tmp_path: Path) -> None:
    queued = {"type": "queued_command", "prompt": "and b.py"}
    rows = [
        claude("u1", None, "user", "list"),
        claude("a1", "u1", "assistant", [USE], message_id="m1"),
        claude("u2", "a1", "user", [RESULT]),
        {"type": "attachment", "uuid": "q", "parentUuid": "u2", "attachment": queued},
        claude("a2", "q", "assistant", text("Both."), message_id="m2"),
    ]
    [trace], _ = imported(lines(tmp_path / "S.jsonl", *rows), "claude-code")
    assert [m["content"] for m in trace.messages[2:]] == ["a.py", "and b.py", "Both."]


def test_a_compaction_begins_a_new_history(tmp_path: Path) -> None:
    """The summary stands in the new trace; the history before the boundary does not."""
    summary = {"isCompactSummary": True, "isVisibleInTranscriptOnly": True}
    rows = [
        claude("u1", None, "user", "list"),
        claude("a1", "u1", "assistant", text("One."), message_id="m1"),
        {
            "type": "system",
            "subtype": "compact_boundary",
            "uuid": "c",
            "parentUuid": None,
            "logicalParentUuid": "a1",
        },
        claude("u2", "c", "user", "This session is continued: …", **summary),
        claude("a2", "u2", "assistant", text("Two."), message_id="m2"),
    ]
    traces, _ = imported(lines(tmp_path / "S.jsonl", *rows), "claude-code")
    assert [[m["content"] for m in trace.messages] for trace in traces] == [
        ["list", "One."],
        ["This session is continued: …", "Two."],
    ]
    assert len(learned(traces)) == 2


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({"u1": None, "a1": "u1", "u2": "a1", "u1 ": "u2", "a2": "u1"}, "is twice in the log"),
        ({"u1": "a1", "a1": "u1"}, "in a circle"),
        ({"u1": "u1", "a1": "u1"}, "in a circle"),
        ({"u1": None, "a1": "u1", "u2": "a2", "a2": "u2"}, "in a circle"),
        (
            {"u1": "h1", "a1": "u1", "h1": "h2", "h2": "h1"},
            "the log does not hold the message before",
        ),
    ],
)
def test_walks_over_links_end(tmp_path: Path, links: dict[str, str | None], message: str) -> None:
    """A uuid at two places, circles of messages, of one, beside a good branch, of rows that are
    no messages. The report says so, and nobody learns an answer whose history is not known."""
    rows = []
    for name, parent in links.items():
        kind = {"u": "user", "a": "assistant", "h": "system"}[name[0]]
        if kind == "system":
            rows.append({"type": kind, "uuid": name, "parentUuid": parent})
        else:
            rows.append(claude(name.strip(), parent, kind, f"{name} text"))
    traces, report = imported(lines(tmp_path / "S.jsonl", *rows), "claude-code")
    assert any(message in line for line in report.draw())
    assert any(message in reason for reason in why_not(traces))


def test_a_history_that_is_not_whole_is_not_learned(tmp_path: Path) -> None:
    """A parent that the log does not hold, a damaged line in the middle; a sub-agent's own
    prompt is whole."""
    rows: list[Any] = [
        claude("u2", "gone", "user", "continue"),
        claude("a2", "u2", "assistant", text("Gone on."), message_id="m2"),
        claude("u3", None, "user", "new"),
        '{"type": "assistant", "uuid": "a3", "parentU',
        claude("u4", "a3", "user", "and?"),
        claude("a4", "u4", "assistant", text("Lost."), message_id="m4"),
        claude("s1", "u3", "user", "sub task", isSidechain=True),
        claude("s2", "s1", "assistant", text("Sub."), message_id="m5", isSidechain=True),
    ]
    traces, report = imported(lines(tmp_path / "S.jsonl", *rows), "claude-code")
    assert sorted(answer for trace in traces for answer in sampled(trace)) == [
        "Gone on.",
        "Lost.",
        "Sub.",
    ]
    reasons = why_not(traces)
    [lost] = [reason for reason in reasons if "does not hold the message before" in reason]
    assert reasons == {lost: 2, "the run of a sub-agent": 1, "no answer was sampled in it": 1}
    assert report.remarks.total() == 2


def test_a_resumed_session_is_learned_once(tmp_path: Path) -> None:
    """The next file begins with the lines of the first one, under another session and new uuids."""

    def session(uuid: str) -> list[Json]:
        first = claude(f"{uuid}1", None, "user", "q", sessionId=uuid)
        return [
            first,
            claude(
                f"{uuid}2", f"{uuid}1", "assistant", text("One."), message_id="m1", sessionId=uuid
            ),
        ]

    later = [
        claude("b3", "b2", "user", "more", sessionId="b"),
        claude("b4", "b3", "assistant", text("Two."), message_id="m2"),
    ]
    report = ImportReport()
    traces = list(read_traces(lines(tmp_path / "a.jsonl", *session("a")), report))
    traces += read_traces(lines(tmp_path / "b.jsonl", *session("b"), *later), report)
    assert [sampled(trace) for trace in traces] == [["One."], ["Two."]]
    assert roles(traces[1]) == ["user", "assistant", "user", "assistant"]


# ---------------------------------------------------------------------- text that no model gave


def test_what_a_program_wrote_is_not_learned(tmp_path: Path) -> None:
    """Claude Code's `<synthetic>` model, `isApiErrorMessage`, error texts without either,
    refusals; Codex'; a failed span and finish reasons of OTLP; an API's log line with `error` or
    a filtered choice. It stays as context."""
    error = "API Error: Request was aborted."

    def log(*answer: Any, **more: Any) -> list[Json]:
        line = claude(
            "a1", "u1", "assistant", text(error if not answer else answer[0]), message_id="m1"
        )
        line["message"] |= more.pop("message", {})
        return [claude("u1", None, "user", "q"), line | more]

    cases: list[tuple[str, list[Any]]] = [
        ("claude-code", log(message={"model": "<synthetic>"})),
        ("claude-code", log("Some words.", message={"model": "<synthetic>"})),
        ("claude-code", log("Some words.", isApiErrorMessage=True)),
        ("claude-code", log()),
        ("claude-code", log("I ca", message={"stop_reason": "refusal"})),
        ("claude-code", log("[Request interrupted by user]")),
        ("codex", [said("user", "q"), said("assistant", "[Request interrupted by user]")]),
        ("openai", [{"messages": [user("q"), assistant(error)]}]),
        (
            "openai",
            [
                {
                    "request": {"messages": [user("q")]},
                    "response": {
                        "choices": [
                            {"message": assistant("half"), "finish_reason": "content_filter"}
                        ]
                    },
                }
            ],
        ),
        (
            "art",
            [
                {
                    "messages_and_choices": [
                        user("q"),
                        {"finish_reason": "content_filter", "message": assistant("half")},
                    ]
                }
            ],
        ),
    ]
    asked = [{"role": "user", "parts": [{"type": "text", "content": "q"}]}]

    def call(reason: str, **more: Any) -> Json:
        parts = [{"type": "text", "content": "half"}]
        answer = [{"role": "assistant", "parts": parts, "finish_reason": reason}]
        return spans(span(1, sides(asked, answer)) | more)

    cases += [("otlp", [call("error")]), ("otlp", [call("stop", status={"code": 2})])]
    for number, (source, rows) in enumerate(cases):
        traces, report = imported(lines(tmp_path / f"rollout-{number}.jsonl", *rows), source)
        assert why_not(traces) == {"no answer was sampled in it": 1}, (source, rows)
        assert roles(traces[0])[-1] == "assistant"
        if source in ("claude-code", "openai", "art"):
            assert report.remarks.total() == 1
    row = {"messages": [user("q"), assistant("a")], "error": "timeout"}
    traces, _ = imported(lines(tmp_path / "failed.jsonl", row), "openai")
    assert why_not(traces) == {"the call failed": 1}
    for metrics, words in (
        ({}, error),
        ({"metrics": {"extra": {"finish_reason": "content_filter"}}}, "half"),
    ):
        answer = assistant(words, step=metrics)
        trace = new_trace([user("q"), answer], session_id="atif", source="test")
        [(reason, count)] = why_not([trace]).items()  # another program's traces come in as they are
        assert reason.startswith("none of its answers is learned: an answer that ") and count == 1
    middle = [
        *log(isApiErrorMessage=True),
        claude("u2", "a1", "user", "again"),
        claude("a2", "u2", "assistant", "Yes."),
    ]
    traces, _ = imported(lines(tmp_path / "middle.jsonl", *middle), "claude-code")
    assert learned(traces) == [
        [("user", "q"), ("context", error), ("user", "again"), ("assistant", "Yes.")]
    ]


# ---------------------------------------------------------------------- Codex


def test_a_compaction_with_a_history(tmp_path: Path) -> None:
    """The new trace opens with the replacement, whose answers were learned before; text as the
    summary, or neither."""

    def log(**payload: Any) -> list[Any]:
        return [said("user", "list"), said("assistant", "One."), codex("compacted", payload), *rest]

    rest = [said("user", "continue"), said("assistant", "Going on.")]
    history = [said("user", "list")["payload"], said("assistant", "Summary.")["payload"]]
    traces, report = imported(
        lines(tmp_path / "a.jsonl", *log(message="", replacement_history=history)), "codex"
    )
    assert [m["content"] for m in traces[1].messages] == [
        "list",
        "Summary.",
        "continue",
        "Going on.",
    ]
    assert sampled(traces[1]) == ["Going on."]
    assert report.messages.seen == report.messages.carried == 6
    traces, _ = imported(lines(tmp_path / "b.jsonl", *log(message="So far: one.")), "codex")
    assert traces[1].messages[0] == user("So far: one.")
    hidden = {"type": "compaction", "encrypted_content": "…"}
    for number, payload in enumerate(
        ({"message": ""}, {"message": "", "replacement_history": [*history, hidden]})
    ):
        traces, report = imported(lines(tmp_path / f"c{number}.jsonl", *log(**payload)), "codex")
        assert user("") not in traces[1].messages
        [reason] = why_not(traces)
        assert reason.startswith("its history is not whole") and report.remarks.total() == 1


def test_codex_items(tmp_path: Path) -> None:
    """Calls without their own result, results of parts, thoughts in full, images; an item
    of an unknown type."""
    image = {"type": "input_image", "image_url": "data:…"}
    rows = [
        said("user", "q"),
        item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": "all of it"}]),
        item("web_search_call", action={"type": "search", "query": "cats"}, status="completed"),
        item("local_shell_call", call_id="c1", action={"type": "exec", "command": ["ls"]}),
        item("function_call_output", call_id="c1", output=[{"type": "input_text", "text": "a.py"}]),
        item(
            "message",
            role="assistant",
            content=[{"type": "output_text", "text": "One."}],
            phase="final",
        ),
        item("message", role="user", content=[{"type": "input_text", "text": "and this?"}, image]),
        said("assistant", "A cat."),
    ]
    [trace], _ = imported(lines(tmp_path / "a.jsonl", *rows), "codex")
    calls = [call for m in trace.messages for call in m.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["web_search", "local_shell"]
    assert json.loads(calls[0]["function"]["arguments"])["query"] == "cats"
    assert len(trace.messages[1]["tool_calls"]) == 1  # Codex' own call is another answer
    assert trace.messages[1]["reasoning_content"] == "all of it"
    assert [m["content"] for m in trace.messages if m["role"] == "tool"] == ["a.py"]
    assert trace.messages[5]["content"] == [{"type": "text", "text": "and this?"}, image]
    assert why_not([trace]) == {"content of type 'input_image', which a row of text cannot hold": 1}
    [trace], report = imported(
        lines(tmp_path / "b.jsonl", said("user", "q"), item("oracle", x=1), rows[-1]), "codex"
    )
    assert report.lines.left_out == {"response items of type 'oracle' are not known": 1}
    assert why_not([trace]) == {
        "its history is not whole: response items of type 'oracle' are not known": 1
    }


@pytest.mark.parametrize("kind", ["shell", "local_shell", "computer", "apply_patch", "function"])
def test_text_behind_a_call_is_another_answer_unless_its_result_follows(
    tmp_path: Path, kind: str
) -> None:
    """Its result is lost, and what rests on it is not learned; a row never has it before its
    call."""
    call, second = (
        item(f"{kind}_call", call_id=name, name=kind, action={"type": "exec"}, arguments="{}")
        for name in ("c1", "c2")
    )
    result, other = (item(f"{kind}_call_output", call_id=n, output="r") for n in ("c1", "c2"))
    rows = [said("user", "q"), call, said("assistant", "One.")]
    [trace], _ = imported(lines(tmp_path / "a.jsonl", *rows), "codex")
    assert [bool(m.get("tool_calls")) for m in trace.messages] == [False, True, False]
    assert learned([trace]) == [[("user", "q"), ("assistant", "")]]
    rows += [second, result, other, said("assistant", "Two.")]
    [trace], _ = imported(lines(tmp_path / "b.jsonl", *rows), "codex")
    [row] = learned([trace])
    assert row[1:] == [("assistant", "One."), ("tool", "r"), ("tool", "r"), ("assistant", "Two.")]
    assert len(trace.messages[1]["tool_calls"]) == 2


@pytest.mark.parametrize("order", [("c1", "c2", "c3"), ("c3", "c2", "c1"), ("c2", "c3", "c1")])
def test_texts_and_thoughts_among_calls_are_one_answer_in_any_order_of_results(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    """Thoughts behind a call were lost, and calls behind a text stayed an answer without the first
    one's result."""

    def call(name: str) -> Json:
        return item("function_call", call_id=name, name="run", arguments="{}")

    thought = item("reasoning", summary=[{"type": "summary_text", "text": "hm"}])
    rows = [said("user", "q"), call("c1"), said("assistant", "One."), thought, call("c2")]
    rows += [said("assistant", "Two."), call("c3")]
    rows += [item("function_call_output", call_id=name, output=name) for name in order]
    rows += [said("assistant", "Done."), said("user", "and?"), said("assistant", "No.")]
    [trace], _ = imported(lines(tmp_path / "a.jsonl", *rows), "codex")
    answer = trace.messages[1]
    assert roles(trace)[:6] == ["user", "assistant", "tool", "tool", "tool", "assistant"]
    assert (answer["content"], answer["reasoning_content"]) == ("One.\n\nTwo.", "hm")
    assert [each["id"] for each in answer["tool_calls"]] == ["c1", "c2", "c3"]


def test_a_compaction_ends_what_stands_behind_a_call(tmp_path: Path) -> None:
    """Its place was looked up among the messages that the compaction left."""
    call = item("function_call", call_id="c1", name="run", arguments="{}")
    left = [{"type": "message", "role": "user", "content": f"{n}"} for n in range(3)]
    rows = [said("user", "q"), call, said("assistant", "One.")]
    rows += [{"type": "compacted", "payload": {"message": "", "replacement_history": left}}]
    rows += [item("function_call_output", call_id="c1", output="r"), said("assistant", "Two.")]
    traces, _ = imported(lines(tmp_path / "a.jsonl", *rows), "codex")
    assert roles(traces[1]) == ["user", "user", "user", "tool", "assistant"]


# ---------------------------------------------------------------------- OTLP


def test_all_parts_of_a_message_are_there(tmp_path: Path) -> None:
    """A result and text beside it; several results; an image, which a row cannot hold; a second
    answer is a branch."""
    call = {"type": "tool_call", "id": "c1", "name": "run", "arguments": {"cmd": "ls"}}
    result = {"type": "tool_call_response", "id": "c1", "response": "a.py"}

    def log(*parts: Json, role: str = "user") -> Json:
        asked = [
            {"role": "user", "parts": [{"type": "text", "content": "ls?"}]},
            {"role": "assistant", "parts": [call]},
            {"role": role, "parts": list(parts)},
        ]
        answers = [
            {"role": "assistant", "parts": [{"type": "text", "content": word}]}
            for word in ("One.", "Two.")
        ]
        return spans(span(1, sides(asked, answers)))

    for role in ("user", "tool"):
        rows = log(result, {"type": "text", "content": "and?"}, role=role)
        traces, report = imported(lines(tmp_path / f"{role}.jsonl", rows), "otlp")
        assert roles(traces[0]) == ["user", "assistant", "tool", "user", "assistant"]
        assert [m["content"] for m in traces[0].messages[2:4]] == ["a.py", "and?"]
        assert [trace.messages[-1]["content"] for trace in traces] == ["One.", "Two."]
        assert report.messages.seen == report.messages.carried == 5
    blob = {"type": "blob", "mime_type": "image/png", "data": "AA"}
    traces, _ = imported(lines(tmp_path / "blob.jsonl", log(result, blob)), "otlp")
    assert traces[0].messages[3]["content"] == [blob]
    assert why_not(traces) == {"content of type 'blob', which a row of text cannot hold": 2}


def test_older_forms_of_spans(tmp_path: Path) -> None:
    """An event for each message, one event with both sides, and keys with numbers."""
    asked, answered, answer = [user("q")], [assistant("a")], json.dumps({"content": "a"})
    both = {"prompt": json.dumps(asked), "completion": json.dumps(answered)}
    cases: list[tuple[Json, list[Json]]] = [
        ({}, [event("gen_ai.user.message", content="q"), event("gen_ai.choice", message=answer)]),
        ({}, [event(f"gen_ai.content.{side}", **{f"gen_ai.{side}": both[side]}) for side in both]),
        ({}, [event("gen_ai.client.inference.operation.details", **sides(asked, answered))]),
        (
            {f"gen_ai.prompt.0.{key}": value for key, value in asked[0].items()}
            | {"gen_ai.completion.0.content": "a"},
            [],
        ),
    ]
    for number, (values, events) in enumerate(cases):
        case = span(1, values, events)
        [trace], report = imported(lines(tmp_path / f"{number}.jsonl", spans(case, case)), "otlp")
        assert trace.messages == [*asked, *answered]
        assert report.lines.left_out == {"a span that is twice in the log": 1}


# ---------------------------------------------------------------------- checkpoints


def test_tasks_without_a_time(tmp_path: Path) -> None:
    """They belong to the only run; of several runs none can be said to be theirs, which is
    counted."""
    tasks = {"t": {"description": "find", "status": "completed"}, "u": {"description": "save"}}
    question = user("one")
    for name, history in (("single", [question]), ("several", [question, user("two"), 5])):
        (tmp_path / name).mkdir()
        checkpoint = {"session_data": {"s": {"history": history}}, "task_state": tasks}
        (tmp_path / name / "c.json").write_text(json.dumps(checkpoint))
    loader = CheckpointLoader(tmp_path)
    [view] = loader.load_traces("single")
    assert (view.tasks_created, view.tasks_completed) == (
        ["find", "save"],
        ["find"],
    ) and not loader.left_out
    assert [view.tasks_created for view in loader.load_traces("several")] == [[], []]
    assert loader.left_out == {
        "a task without a time, in a checkpoint of several runs": 2,
        "a message that is not an object": 1,
    }


def test_pickles_that_never_end_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that holds itself, and one that names the same list again and again."""
    circle: list[Any] = []
    circle.append(circle)
    bomb: list[Any] = ["x"]
    for _ in range(20):
        bomb = [bomb] * 4
    (tmp_path / "isaa").mkdir()
    for name, value in (("circle", circle), ("bomb", bomb)):
        content = pickle.dumps({"session_data": {"s": {"history": [user("q")]}}, "x": value})
        (tmp_path / "isaa" / f"{name}.pkl").write_bytes(content)
    monkeypatch.setattr("mlx_parallm.systems.traces.checkpoints.MOST_VALUES", 10_000)
    loader = CheckpointLoader(tmp_path)
    assert loader.load_traces("isaa") == []
    reasons = {Path(path).stem: reason for path, reason in loader.skipped.items()}
    assert "RecursionError" in reasons["circle"] and "more than 10000 values" in reasons["bomb"]


# ---------------------------------------------------------------------- the account


def test_branches_of_a_log_are_bounded() -> None:
    """A comb: each message has its own answer beside the next one, so copies grow by the
    square."""
    parents: dict[str, str | None] = {"0": None}
    for number in range(1, 60):
        parents |= {f"{number}": f"{number - 1}", f"leaf {number}": f"{number - 1}"}
    whole = Forest(parents)
    assert len(list(whole.branches())) == 60 and not whole.beyond
    bounded = Forest(parents, most_copied=300)
    assert sum(map(len, bounded.branches())) <= 300 + len(parents) and len(bounded.beyond) > 10


def test_deep_and_endless_numbers_are_left_out(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    good = {"messages": [user("q"), assistant("a")]}
    file = lines(
        tmp_path / "a.jsonl",
        good,
        good | {"deep": deep},
        '{"messages": [], "x": NaN}',
        '{"x": 1e999}',
    )
    traces, report = imported(file, "openai")
    assert len(traces) == 1
    assert report.lines.left_out == {"not JSON: nested deeper than 100 levels": 1, "not JSON": 2}


@pytest.mark.parametrize("source", GOOD)
def test_nothing_vanishes_of_mutated_logs(tmp_path: Path, source: str) -> None:
    counts = fuzz(source, 40, 7, tmp_path)
    assert counts.logs == 40 and not counts.faults
    assert counts.messages == counts.carried + counts.left_out > counts.left_out > 0

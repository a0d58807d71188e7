"""Chats in the forms of several APIs, and the rows that come of them: the whole history, or a
counted reason."""

import json
from pathlib import Path

import pytest

from mlx_parallm.systems.traces.collector import TraceCollector
from mlx_parallm.systems.traces.trace import Trace, new_trace
from tests.traces.messages import assistant, data_set, text, user
from tests.traces.test_foreign_logs import Json, learned, why_not
from tests.traces.test_importers import CALL, imported, lines

SUNNY = [
    ("system", "Be kind."),
    ("user", "weather?"),
    ("assistant", ""),
    ("tool", "Sunny."),
    ("assistant", "It is sunny."),
]


def conversations() -> dict[str, Json]:
    """One conversation in the forms of five APIs."""
    arguments = {"city": "Köln"}
    function = {"name": "look", "parameters": {"type": "object"}}
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "look", "arguments": json.dumps(arguments)},
    }
    asked = user("weather?")
    ends = assistant("It is sunny.")
    system = {"role": "system", "content": "Be kind."}
    return {
        "openai": {
            "messages": [
                system,
                asked,
                assistant(None, tool_calls=[call]),
                {"role": "tool", "tool_call_id": "c", "content": "Sunny."},
                ends,
            ],
            "tools": [{"type": "function", "function": function}],
        },
        "older": {
            "messages": [
                system,
                asked,
                assistant(None, function_call=call["function"]),
                {"role": "function", "name": "look", "content": "Sunny."},
                ends,
            ],
            "functions": [function],
        },
        "flat": {
            "messages": [
                system,
                asked,
                assistant(None, tool_calls=[{"id": "c", **call["function"]}]),
                {"role": "tool", "tool_call_id": "c", "content": "Sunny."},
                ends,
            ],
            "tools": [function],
        },
        "anthropic": {
            "system": [
                {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
            ],
            "messages": [
                asked,
                assistant([{"type": "tool_use", "id": "c", "name": "look", "input": arguments}]),
                user([{"type": "tool_result", "tool_use_id": "c", "content": text("Sunny.")}]),
                assistant(text("It is sunny.")),
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        },
        "gemini": {
            "systemInstruction": {"parts": [{"text": "Be kind."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "weather?"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "look", "args": arguments}}]},
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"name": "look", "response": {"content": "Sunny."}}}
                    ],
                },
                {"role": "model", "parts": [{"text": "It is sunny."}]},
            ],
            "tools": [{"functionDeclarations": [function]}],
        },
        "sharegpt": {
            "conversations": [
                {"from": "system", "value": "Be kind."},
                {"from": "human", "value": "weather?"},
                {
                    "from": "function_call",
                    "value": json.dumps({"name": "look", "arguments": arguments}),
                },
                {"from": "observation", "value": "Sunny."},
                {"from": "gpt", "value": "It is sunny."},
            ],
            "tools": json.dumps([function]),
        },
    }


@pytest.mark.parametrize("form", conversations())
def test_each_form_of_a_chat_is_the_same_conversation(tmp_path: Path, form: str) -> None:
    """As its own line, as the only entry of a JSON list, and as what an API was asked, with
    the answer beside."""
    row = conversations()[form]
    [trace], report = imported(lines(tmp_path / "a.jsonl", row), "openai")
    assert learned([trace]) == [SUNNY]
    call = trace.messages[2]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    has_ids = form not in ("older", "sharegpt")  # other readers of these forms give them none
    assert ("id" in call) is ("tool_call_id" in trace.messages[3]) is has_ids
    assert trace.messages[3].get("tool_call_id") == call.get("id")
    assert trace.tools == [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    ]
    assert report.messages.seen == report.messages.carried == 5
    (tmp_path / "list.json").write_text(json.dumps([row, row], indent=1))
    traces, _ = imported(tmp_path / "list.json", "openai")
    assert [trace.messages for trace in traces] == [trace.messages] * 2
    if form != "sharegpt":
        name = "contents" if form == "gemini" else "messages"
        request = {**row, name: row[name][:-1]}
        answer = {
            "gemini": {"candidates": [{"content": row[name][-1], "finishReason": "STOP"}]},
            "anthropic": {"type": "message", "stop_reason": "end_turn", **row[name][-1]},
        }.get(form, {"choices": [{"message": row[name][-1], "finish_reason": "stop"}]})
        [trace], _ = imported(
            lines(tmp_path / "log.jsonl", {"request": request, "response": answer}), "openai"
        )
        row_of_log = [
            ("context" if at == 2 else role, said) for at, (role, said) in enumerate(SUNNY)
        ]
        assert learned([trace]) == [row_of_log]  # the request's answers are those of earlier lines


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "content of type 'image_url'",
        ),
        ({"content": [{"type": "image", "source": {"data": "x"}}]}, "content of type 'image'"),
        (
            {"content": [{"type": "document", "source": {}}, *text("q")]},
            "content of type 'document'",
        ),
        ({"content": [{"type": "not-known-yet", "x": 1}]}, "content of type 'not-known-yet'"),
        ({"content": "a", "audio": {"id": "x"}}, "a message has the field 'audio'"),
        (assistant(None, refusal="No."), "a message has the field 'refusal'"),
        (assistant([{"type": "redacted_thinking", "data": "x"}]), "'redacted_thinking'"),
        (
            {"role": "tool", "tool_call_id": "gone", "content": "r"},
            "a tool's result without its call",
        ),
        ({"content": {"text": "q"}}, "content that is not text"),
    ],
)
def test_what_a_row_cannot_hold_leaves_its_trace_out(
    tmp_path: Path, message: Json, reason: str
) -> None:
    """It is in the trace as it was, and `build` says why there is no row, for each kind of row."""
    answer = assistant("a")
    row = {"messages": [user("q"), {"role": "user", **message}, answer]}
    [trace], report = imported(lines(tmp_path / "a.jsonl", row), "openai")
    assert (
        trace.messages[1] == {"role": "user", **message}
        and report.messages.seen == report.messages.carried == 3
    )
    trace.note(rewards={"reward": {"score": 1.0}})
    for kind in ("sft", "prompts"):
        [(left, count)] = why_not([trace], kind).items()
        assert reason in left and count == 1


def test_notes_stay_in_the_trace_and_are_counted(tmp_path: Path) -> None:
    """Fields that say nothing to a model, also in parts and calls; null and empty ones are
    nothing."""
    part = {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}, "annotations": []}
    messages = [
        {"role": "developer", "content": "Be brief.", "timestamp": 1},
        user([part]),
        assistant(None, refusal=None, tool_calls=[CALL | {"index": 0}], id="x"),
        {"role": "tool", "tool_call_id": "c1", "content": text("a.py")},
        assistant("One.", reasoning="hm", audio=None),
    ]
    [trace], _ = imported(lines(tmp_path / "a.jsonl", {"messages": messages}), "openai")
    assert trace.messages == messages
    made = data_set([trace])
    assert made.fields == {"timestamp": 1, "cache_control": 1, "id": 1, "index": 1}
    assert made.train[0]["messages"][4]["reasoning_content"] == "hm"


def test_an_empty_answer_is_not_learned(tmp_path: Path) -> None:
    """Empty text, no content, an empty list of blocks, spaces; one with a call is not empty."""
    for number, content in enumerate(("", None, [], " \n", text(""))):
        row = {"messages": [user("q"), assistant(content)]}
        traces, _ = imported(lines(tmp_path / f"{number}.jsonl", row), "openai")
        assert why_not(traces) == {"none of its answers is learned: an empty answer": 1}
    row = {"messages": [user(""), assistant("a")]}
    traces, _ = imported(lines(tmp_path / "prompt.jsonl", row), "openai")
    assert why_not(traces) == {"its prompt is empty": 1}


# ---------------------------------------------------------------------- builders


def test_each_trace_is_in_a_row_or_counted() -> None:
    """Of a pair the others too, equal answers, runs of sub-agents that lie inside a trace."""

    def scored(name: str, answer: str, score: float) -> Trace:
        messages = [user("q"), assistant(answer)]
        return new_trace(
            messages, session_id=name, source="test", rewards={"reward": {"score": score}}
        )

    traces = [
        scored(f"{n}", answer, score)
        for n, (answer, score) in enumerate((("a", 1), ("b", 0), ("c", 0.5), ("a", 1)))
    ]
    traces[0].subagent_trajectories = [scored("inner", "sub", 1)]
    assert why_not(traces, "preference") == {
        "the run of a sub-agent": 1,
        "no label and no reward": 1,
        "an answer to its prompt that is there already": 1,
        "neither the best nor the worst of its prompt": 1,
    }
    assert data_set(traces, sidechains=True).traces == 5


def test_what_a_collector_reads_makes_rows(tmp_path: Path) -> None:
    """Views are taken wherever traces are: pipeline.md names them together."""
    collector = TraceCollector(tmp_path)
    for number, good in enumerate((True, False)):
        collector.start_trace("s", f"question {number}")
        view = collector.finish_trace(f"answer {number}")
        collector.label_trace(view.trace_id, good)
    made = data_set(collector.load_traces(), "kto")
    assert sorted(row["label"] for row in made.train) == [False, True]


def test_fields_of_a_split_message_and_of_its_result_are_both_kept(tmp_path: Path) -> None:
    """The message has a name and a field called as ours is; its only part is a result with a
    field of its own."""
    part = {"type": "tool_result", "tool_use_id": "c1", "content": "r", "note": "of the part"}
    message = {"role": "user", "name": "bob", "step": "of the message", "content": [part]}
    asked = [user("q"), assistant(None, tool_calls=[CALL])]
    [trace], _ = imported(lines(tmp_path / "a.jsonl", {"messages": [*asked, message]}), "openai")
    held = json.dumps(trace.to_json())
    assert all(words in held for words in ("bob", "of the message", "of the part"))

"""Logs of the Responses API and of the OpenAI Agents SDK."""

from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.importers.report import ImportReport
from mlx_parallm.systems.traces.reading import detect, read_traces
from mlx_parallm.systems.traces.schema import dump_line, text_of
from mlx_parallm.systems.traces.trace import Trace
from tests.traces.messages import assistant, data_set, user
from tests.traces.test_log_table import learned as of_rows


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
        **more,
    }


CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}


def read(tmp_path: Path, *rows: Any) -> tuple[list[Trace], ImportReport]:
    path, report = tmp_path / "log.jsonl", ImportReport()
    path.write_bytes(b"".join(map(dump_line, rows)))
    assert detect(path) == "responses"
    traces = list(read_traces(path, report))
    assert report.lines.seen == report.lines.carried + sum(report.lines.left_out.values())
    assert report.messages.seen == report.messages.carried + sum(report.messages.left_out.values())
    return traces, report


def learned(trace: Trace) -> list[str]:
    """What is learned of a trace: an answer's text, or the name of its call."""
    try:
        made = data_set([trace])
    except TraceError:
        return []
    return of_rows(made)


def said(trace: Trace) -> list[str]:
    return [text_of(message["content"]) for message in trace.messages]


def test_a_call_its_result_and_its_answer_are_learned_once_each(tmp_path: Path) -> None:
    first = {"input": "1 + 1?", "instructions": "be brief", "tools": TOOLS}
    more = {"input": [user("1 + 1?"), THOUGHT, CALL, RESULT]}
    (one, two), _ = read(
        tmp_path,
        {"request": first, "response": {"id": "r1", "output": [THOUGHT, CALL]}},
        {**more, "id": "r2", "output": [answer("2")]},
    )
    roles = [message["role"] for message in one.messages]
    assert roles == ["system", "user", "assistant"] and learned(one) == ["add"]
    assert one.tools is not None and one.tools[0]["function"]["name"] == "add"
    assert one.messages[-1]["reasoning_content"] == "hm"
    assert learned(two) == ["2"]
    assert [message["role"] for message in two.messages][-2:] == ["tool", "assistant"]


def test_a_response_goes_on_from_another(tmp_path: Path) -> None:
    (_, two, lost, after_lost), report = read(
        tmp_path,
        {"input": "a", "id": "r1", "output": [answer("b")]},
        {"input": "c", "previous_response_id": "r1", "id": "r2", "output": [answer("d")]},
        {"input": "e", "previous_response_id": "gone", "id": "r3", "output": [answer("f")]},
        {"input": "g", "previous_response_id": "r3", "id": "r4", "output": [answer("h")]},
    )
    assert said(two) == ["a", "b", "c", "d"]
    assert learned(two) == ["d"]
    for trace in (lost, after_lost):
        assert "is not in the file" in str(trace.get("untrainable"))
    assert any("is not in the file" in remark for remark in report.remarks)


def test_spans_of_the_agents_sdk(tmp_path: Path) -> None:
    def span(**data: Any) -> dict[str, Any]:
        return {"object": "trace.span", "id": "s", "trace_id": "t", "span_data": data}

    asked = [user("a")]
    said = [assistant("b")]
    traces, report = read(
        tmp_path,
        span(type="agent", name="x"),
        span(type="generation", input=asked, output=said, model="m"),
        span(type="response", response_id="r"),
        span(type="response", input=asked, response={"id": "r", "output": [answer("c")]}),
    )
    assert [learned(trace) for trace in traces] == [["b"], ["c"]]
    reasons = sorted(report.lines.left_out)
    assert len(reasons) == 2 and "holds its id alone" in reasons[0] and "'agent'" in reasons[1]


@pytest.mark.parametrize(
    "response, count",
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, 0),
        ({"status": "failed", "error": {"code": "server_error"}}, 0),
        ({"status": "completed"}, 1),
    ],
)
def test_an_answer_that_was_cut_is_not_learned(
    tmp_path: Path, response: dict[str, Any], count: int
) -> None:
    row = {"request": {"input": "a"}, "response": {"output": [answer("b")], **response}}
    [trace], _ = read(tmp_path, row)
    assert len(learned(trace)) == count


def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    odd = {"type": "hologram", "data": 1}
    [trace], report = read(tmp_path, {"input": [odd, "x"], "output": [answer("b")]})
    assert "not whole" in str(trace.get("untrainable"))
    assert report.messages.left_out == {"an unknown item": 2}

"""Traces are ATIF 1.8, and chat messages come out of them as they went in."""

import json
from typing import Any

import atif
import pytest

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.schema import Label, dump_line
from mlx_parallm.systems.traces.trace import new_trace, parse_trace
from tests.traces.messages import assistant, text, user

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {}}}},
    },
    {"type": "function", "function": {"name": "save", "description": "Keep it."}},
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": text("Use tools.")},
    {
        "role": "user",
        "name": "bob",
        "content": [{"type": "image_url", "image_url": {"url": "x"}}, "Köln?"],
    },
    assistant(
        None,
        reasoning_content="hm",
        refusal=None,
        tool_calls=[
            {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"q":1}'}},
            {
                "id": "b",
                "type": "function",
                "function": {"name": "look", "arguments": '{"q": "ü", "n": [1, {}]}'},
            },
            {"type": "function", "function": {"name": "save", "arguments": "not JSON"}},
            {
                "id": "d",
                "index": 3,
                "type": "function",
                "function": {"name": "save", "arguments": {"q": 1}},
            },
        ],
    ),
    {"role": "tool", "tool_call_id": "b", "content": "second first"},
    {"role": "tool", "tool_call_id": "a", "content": text("z"), "name": "look"},
    {"role": "tool", "tool_call_id": "unknown", "content": "x"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    user("and?"),
    {"role": "tool", "tool_call_id": "a", "content": "late"},
    assistant("done"),
]


def test_messages_come_out_as_they_went_in() -> None:
    trace = new_trace(CONVERSATION, session_id="s", source="test", tools=TOOLS)
    assert trace.messages == CONVERSATION
    assert trace.tools == TOOLS
    again = parse_trace(json.loads(dump_line(trace.to_json())))
    assert again.messages == CONVERSATION and again.to_json() == trace.to_json()


def test_the_steps_are_atifs() -> None:
    """The independent package accepts the trace; results lie in the step of their call."""
    trace = new_trace(CONVERSATION, session_id="s", source="test", tools=TOOLS)
    theirs = atif.Trajectory.model_validate(trace.to_json())
    assert [step.source for step in theirs.steps] == [
        "system",
        "system",
        "user",
        "agent",
        "agent",
        "user",
        "system",
        "agent",
    ]
    step = theirs.steps[3]
    assert step.tool_calls is not None and step.observation is not None
    assert step.tool_calls[1].arguments == {"q": "ü", "n": [1, {}]}
    assert [result.source_call_id for result in step.observation.results] == ["b", "a", None]


def test_the_template_renders_the_same_tokens(tiny_tokenizer: Any) -> None:
    messages = [user("Sum: 2+3"), assistant("5")]
    trace = new_trace(messages, session_id="s", source="test")
    assert tiny_tokenizer.render_chat(trace.messages) == tiny_tokenizer.render_chat(messages)


def test_what_others_wrote_is_kept() -> None:
    """Unknown fields, of a later version too, and fields that are null come out as they went in."""
    data = {
        "schema_version": "ATIF-v1.9",
        "session_id": None,
        "agent": {"name": "x", "version": "1", "new_field": {"a": [1]}},
        "steps": [
            {"step_id": 1, "source": "user", "message": text("q"), "extra": {"theirs": 1}},
            {
                "step_id": 2,
                "source": "agent",
                "message": "a",
                "later": True,
                "metrics": {"cost_usd": 0.5},
            },
        ],
        "subagent_trajectories": [
            {
                "schema_version": "ATIF-v1.8",
                "trajectory_id": "sub",
                "agent": {"name": "y", "version": "1"},
                "steps": [],
            }
        ],
    }
    trace = parse_trace(data)
    assert trace.to_json() == data
    assert trace.messages == [user(text("q")), assistant("a")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": "1"}, "schema_version"),
        ({"steps": [{"step_id": 2, "source": "user", "message": ""}]}, "ids count from 1"),
        (
            {"steps": [{"step_id": 1, "source": "user", "message": "", "metrics": {}}]},
            "'agent' only",
        ),
        ({"steps": [{"step_id": 1, "source": "robot", "message": ""}]}, "steps.0.source"),
        ({"subagent_trajectories": [{"schema_version": "1"}]}, "subagent_trajectories.0.schema"),
        (
            {
                "steps": [
                    {
                        "step_id": 1,
                        "source": "agent",
                        "message": "",
                        "tool_calls": [
                            {"tool_call_id": "a", "function_name": "f", "arguments": {}}
                        ],
                        "observation": {"results": [{"source_call_id": "b", "content": ""}]},
                    }
                ]
            },
            "'b', which was not called",
        ),
    ],
)
def test_what_is_no_trajectory(change: dict[str, Any], reason: str) -> None:
    data = {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": []}
    with pytest.raises(TraceError, match=reason):
        parse_trace(data | change)


def test_labels_add_up() -> None:
    trace = new_trace(CONVERSATION, session_id="s", source="test")
    for value in (0.0, 1.0):
        trace.add_label(Label(name="good", value=value, by="user", at=1.0))
    assert [label.value for label in trace.labels] == [0.0, 1.0]
    assert parse_trace(trace.to_json()).labels == trace.labels

"""Calls of the Responses and the Messages API as chats: requests, answers, streams."""

from typing import Any

import pytest

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.importers.other_apis import MessageReader, ResponseReader
from tests.traces.messages import assistant, user

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]}
MADE = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]


def test_a_response_is_a_chat() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    items = [user("q"), TEXT, CALL, result]
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    chat = ResponseReader().chat({"input": items, "tools": tools, "model": "m"})
    assert chat["messages"] == [
        user("q"),
        assistant("I", tool_calls=MADE),
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    assert chat["tools"][0]["function"]["name"] == "add"
    event = {"type": "response.completed", "response": {"id": "r", "output": [TEXT, CALL]}}
    reader = ResponseReader()
    assert reader.take({"type": "response.output_text.delta", "delta": "I"}) is None
    answer = reader.take(event)
    assert answer is not None and answer["id"] == "r"
    assert answer["choices"][0]["message"] == chat["messages"][1]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_a_stream_of_messages_is_a_chat() -> None:
    events: list[Any] = [
        {"type": "message_start", "message": {"id": "m1", "model": "m", "usage": {"a": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I"}},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '{"a"'}},
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": ": 1}"}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"b": 2}},
    ]
    reader = MessageReader()
    assert [reader.take(event) for event in events] == [None] * len(events)
    answer = reader.take({"type": "message_stop"})
    assert answer is not None and answer["usage"] == {"a": 1, "b": 2}
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == assistant("I", tool_calls=MADE)


@pytest.mark.parametrize(
    "reader, body, reason",
    [
        (
            ResponseReader(),
            {"output": [TEXT], "status": "incomplete", "incomplete_details": {"reason": "x"}},
            "x",
        ),
        (
            ResponseReader(),
            {
                "output": [TEXT],
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
            },
            "length",
        ),
        (MessageReader(), {"content": [], "stop_reason": "max_tokens"}, "length"),
        (MessageReader(), {"content": [], "stop_reason": "end_turn"}, "stop"),
    ],
)
def test_reasons_are_a_chats(reader: Any, body: dict[str, Any], reason: str) -> None:
    assert reader.answer(body)["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a", "previous_response_id": "r"},
        {"input": [{"type": "hologram"}]},
        {"input": 3},
    ],
)
def test_what_is_no_whole_chat_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TraceError), match=r"keeps|whole|neither"):
        ResponseReader().chat(body)
    with pytest.raises(ValueError, match="failed"):
        ResponseReader().answer({"output": [TEXT], "status": "failed"})

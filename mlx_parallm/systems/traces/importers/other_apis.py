"""Calls of the Responses and the Messages API as the chats that they are, for a recorder in front
of a server that speaks them.

    READERS[path]() → chat(request body), then answer(whole body) or take(event) of a stream
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.systems.traces.importers.codex import ItemLog, join_answer
from mlx_parallm.systems.traces.importers.dialects import chat_messages, converted, tool_definitions
from mlx_parallm.systems.traces.importers.report import ImportReport
from mlx_parallm.systems.traces.importers.responses import input_items, take_items
from mlx_parallm.systems.traces.received_answers import CallReader, ChatReader
from mlx_parallm.systems.traces.schema import Json, mapping, text_of, without

CUT_REASONS = {"max_output_tokens": "length", "max_tokens": "length"}
STOP_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls"}


class _WholeAnswers:
    """An API of which half an answer is not read."""

    def so_far(self) -> Json:
        return {}


class ResponseReader(_WholeAnswers):
    """A call of the Responses API."""

    def chat(self, body: Mapping[str, Any]) -> Json:
        if body.get("previous_response_id") or body.get("conversation"):
            raise ValueError("it continues from messages that the upstream keeps")
        messages = _messages_of(input_items(body))
        if instructions := body.get("instructions"):
            messages.insert(0, {"role": "system", "content": instructions})
        return _request(body, messages)

    def answer(self, body: Mapping[str, Any]) -> Json:
        message = _one(_messages_of(body.get("output") or []))
        status = body.get("status")
        if status == "incomplete":
            reason = str(mapping(body.get("incomplete_details")).get("reason"))
            return _answer(body, message, CUT_REASONS.get(reason, reason))
        if status not in (None, "completed"):
            raise ValueError(f"the response is {status}")
        return _answer(body, message, "tool_calls" if message.get("tool_calls") else "stop")

    def take(self, event: Mapping[str, Any]) -> Json | None:
        ends = ("response.completed", "response.incomplete", "response.failed")
        return self.answer(event["response"]) if event.get("type") in ends else None


class MessageReader(_WholeAnswers):
    """A call of Anthropic's Messages API."""

    def __init__(self) -> None:
        self._whole: Json = {}
        self._blocks: dict[int, Json] = {}
        self._inputs: dict[int, str] = {}  # JSON of the calls' arguments so far

    def chat(self, body: Mapping[str, Any]) -> Json:
        system = body.get("system")
        listed = [{"role": "system", "content": system}] if system else []
        return _request(body, chat_messages([*listed, *body["messages"]]))

    def answer(self, body: Mapping[str, Any]) -> Json:
        message = _one(converted({"role": "assistant", "content": body["content"]}))
        reason = str(body.get("stop_reason"))
        return _answer(body, message, STOP_REASONS.get(reason, CUT_REASONS.get(reason, reason)))

    def take(self, event: Mapping[str, Any]) -> Json | None:
        kind, index = event.get("type"), int(event.get("index") or 0)
        if kind == "message_start":
            self._whole = dict(event["message"])
        elif kind == "content_block_start":
            self._blocks[index] = dict(event["content_block"])
        elif kind == "content_block_delta":
            self._grow(index, event["delta"])
        elif kind == "message_delta":
            self._whole |= event["delta"]
            self._whole["usage"] = {
                **(self._whole.get("usage") or {}),
                **(event.get("usage") or {}),
            }
        elif kind == "message_stop":
            for place, text in self._inputs.items():
                self._blocks[place]["input"] = json.loads(text or "{}")
            content = [self._blocks[place] for place in sorted(self._blocks)]
            return self.answer({**self._whole, "content": content})
        return None

    def _grow(self, index: int, delta: Mapping[str, Any]) -> None:
        block = self._blocks[index]
        for key in ("text", "thinking", "signature"):
            if key in delta:
                block[key] = block.get(key, "") + delta[key]
        if "partial_json" in delta:
            self._inputs[index] = self._inputs.get(index, "") + delta["partial_json"]


READERS: Mapping[str, Callable[[], CallReader]] = {
    "chat/completions": ChatReader,
    "responses": ResponseReader,
    "messages": MessageReader,
}
"""Path below /v1 → reader of its calls."""


def _messages_of(items: Any) -> list[Json]:
    log = ItemLog("")
    take_items(log, items, "", ImportReport())
    join_answer(log)
    if log.untrainable is not None:
        raise ValueError(log.untrainable)
    return log.messages


def _one(messages: list[Json]) -> Json:
    if len(messages) != 1:
        raise ValueError("its answer holds results of calls that the API made")
    return messages[0]


def _request(body: Mapping[str, Any], messages: list[Json]) -> Json:
    return {
        "messages": [_plain(message) for message in messages],
        "tools": tool_definitions(body.get("tools")),
        "model": body.get("model"),
        "temperature": body.get("temperature"),
    }


def _answer(body: Mapping[str, Any], message: Json, reason: str) -> Json:
    choice = {"index": 0, "message": _plain(message), "finish_reason": reason}
    kept = {key: body[key] for key in ("id", "model", "usage") if body.get(key) is not None}
    return kept | {"choices": [choice]}


def _plain(message: Json) -> Json:
    """The message without what a log adds; text alone as one text."""
    plain = without(message, "step")
    content = plain.get("content")
    if isinstance(content, list) and all(mapping(part).get("type") == "text" for part in content):
        plain["content"] = text_of(content)
    return plain

"""The Responses API's items → messages of a chat.

A chat has one message if the Responses API has several items: the reasoning, the text and the
calls of one answer. Items are joined again in that order, so that a conversation has the same
prompt tokens through either API.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import CUSTOM_ARGUMENT, content_text, parts_of
from mlx_parallm.execution.parts.kinds import Shown, kind_of

_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ROLES = ("user", "assistant", "system", "developer")


def flat_name(name: str, namespace: str | None) -> str:
    """The function's name in the chat. Functions of a namespace carry its name before theirs."""
    return name if not namespace else f"{namespace}__{name}"


def chat_messages(
    items: Sequence[Mapping[str, Any]], *, first: int = 0, shown: Shown = ()
) -> list[dict[str, Any]]:
    """Messages of a chat. `first`: position in `items` of the request's own first one, for error
    texts; `shown`: what the model reads.

    Raises RequestError: an item of another kind, content that is not text, a field that is missing,
    an output of no call.
    """
    turns, called = _Turns(), set[str]()
    for position, item in enumerate(items):
        where = f"input.{position - first}" if position >= first else "previous_response_id"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            _add_message(turns, item, where, shown)
        elif kind in _CALLS:
            call = _chat_call(item, kind, where)
            called.add(call["id"])
            turns.call(call)
        elif kind in _OUTPUTS:
            call_id = _text_field(item, "call_id", where)
            if call_id not in called:
                reason = f"{where}.call_id: no call before this output has the id {call_id!r}"
                raise RequestError(reason, param=f"{where}.call_id")
            output = _content(item.get("output"), f"{where}.output", shown)
            turns.add({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            turns.reason(_reasoning(item, where))
        else:
            raise RequestError(
                (
                    f"{where}: this server takes no item of type {kind!r}; it takes message,"
                    " reasoning, item_reference, "
                )
                + ", ".join((*_CALLS, *_OUTPUTS)),
                param=where,
                code="unsupported_content",
            )
    return turns.messages


class _Turns:
    """Joins the items of one answer to one message: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def reason(self, text: str) -> None:
        if text:
            self._answer({"reasoning", "content", "tool_calls"})["reasoning"] = text

    def say(self, text: str) -> None:
        self._answer({"content", "tool_calls"})["content"] = text

    def call(self, call: dict[str, Any]) -> None:
        message = self._answer(set())
        message.setdefault("content", "")
        message.setdefault("tool_calls", []).append(call)

    def _answer(self, taken: set[str]) -> dict[str, Any]:
        """The last message if it is an answer without any of these fields, else a new one."""
        last = self.messages[-1] if self.messages else {"role": None}
        if last["role"] != "assistant" or not taken.isdisjoint(last):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _add_message(turns: _Turns, item: Mapping[str, Any], where: str, shown: Shown) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role: must be one of {', '.join(_ROLES)}, not {role!r}",
            param=f"{where}.role",
        )
    place = f"{where}.content"
    if role == "assistant":
        turns.say(content_text(item.get("content"), place))
    else:
        turns.add(
            {
                "role": role,
                "content": _content(item.get("content"), place, shown if role == "user" else ()),
            }
        )


def _content(content: Any, where: str, shown: Shown) -> str | list[dict[str, Any]]:
    """A content as text, or as parts if it shows something that is read. Raises RequestError."""
    if not isinstance(content, list):
        return content_text(content, where)
    placed = [
        part if kind_of(part, shown) is None else {**part, "place": f"{where}.{index}"}
        for index, part in enumerate(content)
    ]
    return parts_of(placed, where, shown)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The reasoning's own text; else what `encrypted_content` of this server holds; else the
    summary."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
        ):
            raise RequestError(
                f"{where}.{name}: must be a list of parts with a 'text'", param=f"{where}.{name}"
            )
        if parts:
            return "".join(part["text"] for part in parts)
        if (
            name == "content"
            and (text := opened_reasoning(item.get("encrypted_content"))) is not None
        ):
            return text
    return ""


def sealed_reasoning(text: str) -> str:
    """`encrypted_content`: the text for clients that keep nothing else. It is not secret: the
    client may read it."""
    return _SEAL + json.dumps(text)


def opened_reasoning(sealed: Any) -> str | None:
    """The text; None if another server has sealed it."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    try:
        text = json.loads(sealed.removeprefix(_SEAL))
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None


_SEAL = "mlx_parallm:"


def _chat_call(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    name = flat_name(_text_field(item, "name", where), item.get("namespace"))
    if kind == "custom_tool_call":
        arguments = json.dumps(
            {CUSTOM_ARGUMENT: _text_field(item, "input", where)}, ensure_ascii=False
        )
    else:
        arguments = _text_field(item, "arguments", where)
    call_id = _text_field(item, "call_id", where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text_field(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(
            f"{where}.{name}: an item of type {item.get('type')!r} needs this string", param=where
        )
    return value

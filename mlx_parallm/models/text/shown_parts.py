"""Find the parts of a conversation that its chat template leaves out.

A template prints what it knows and drops the rest without a word: a call beside content, the result
of a tool, a second system message, the definition of a tool. A copy of the conversation with a mark
in each of these places is rendered, and the marks are looked for in the text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import REASONING, PartsText

MOST_SHAPES = 256  # conversations whose answer is kept
Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[list[dict[str, Any]], Tools | None], str]


class ShownParts:
    """Which parts a template leaves out, by the shape of the conversation."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[str, ...]] = {}

    def lost(self, chat: Chat, tools: Tools | None, key: str, render: Render) -> list[str]:
        """Return the places of calls, results, system messages and tools that are left out, such as
        `messages.2.tool_calls.0` or `tools.0`; [] if the template refuses the copy. `key`: what
        else the text depends on; `render` makes it."""
        shape = (key, len(tools or ()), *map(_shape, chat))
        if shape not in self._known:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            self._known[shape] = tuple(_lost(chat, tools or (), render))
        return list(self._known[shape])


def _shape(message: Mapping[str, Any]) -> Any:
    content = message["content"]
    kinds = (type(content), bool(content.strip()) if isinstance(content, str) else _kinds(content))
    others = tuple(sorted(key for key in message if key not in ("role", "content", "tool_calls")))
    return message["role"], kinds, len(message.get("tool_calls", ())), others


def _kinds(parts: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, bool], ...]:
    return tuple((part["type"], bool(part.get("text", "").strip())) for part in parts)


def _lost(chat: Chat, tools: Tools, render: Render) -> list[str]:
    marks: list[tuple[str, str]] = []  # place and mark

    def mark(place: str) -> str:
        marks.append((place, f"zq{len(marks)}x{len(chat)}zq"))
        return marks[-1][1]

    copy = [_marked(message, f"messages.{at}", mark) for at, message in enumerate(chat)]
    named = [_with_name(tool, mark(f"tools.{at}")) for at, tool in enumerate(tools)]
    if not marks:
        return []
    try:
        text = render(copy, named or None)
    except RequestError:  # nothing is left out in silence
        return []
    shown: dict[str, list[bool]] = {}
    for place, sign in marks:
        shown.setdefault(place, []).append(sign in text)

    def without(place: str) -> str | None:
        """The text without a call or a tool; None: the template refuses that."""
        try:
            if place.startswith("tools."):
                others = [tool for at, tool in enumerate(named) if place != f"tools.{at}"]
                return render(copy, others or None)
            return render(_without_call(copy, place), named or None)
        except RequestError:
            return None

    return [place for place, parts in shown.items() if _is_lost(place, parts, text, without)]


def _with_name(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the definition of a tool under another name."""
    if isinstance(function := tool.get("function"), Mapping):
        return {**tool, "function": {**function, "name": name}}
    return {**tool, "name": name}


def _is_lost(
    place: str, shown: list[bool], text: str, without: Callable[[str], str | None]
) -> bool:
    """Whether a part is left out. `shown`: of a call its name and its arguments. A call or a tool
    of which nothing is in the text may be there in another way: then the text is another one
    without it."""
    is_text = ".content" in place
    return not shown[-1] if is_text or any(shown) else without(place) == text


def _without_call(chat: Sequence[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    _, at, _, index = place.split(".")
    message = chat[int(at)]
    calls = [call for n, call in enumerate(message["tool_calls"]) if n != int(index)]
    changed = {**message, "tool_calls": calls}
    if not calls:
        del changed["tool_calls"]
    return [*chat[: int(at)], changed, *chat[int(at) + 1 :]]


def _marked(message: Mapping[str, Any], place: str, mark: Callable[[str], str]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    copy = dict(message)
    if role in ("system", "developer", "tool"):
        if not isinstance(content, str):  # in parts
            copy["content"] = [
                {**part, "text": mark(f"{place}.content.{index}")}
                if part.get("text", "").strip()
                else part
                for index, part in enumerate(content)
            ]
        elif content.strip():
            copy["content"] = _like(content, mark(f"{place}.content"))
    elif isinstance(content, str) and content.strip():
        copy["content"] = _like(content, "text")
    for name in REASONING:
        if isinstance(copy.get(name), str) and copy[name].strip():
            copy[name] = "thought"
    if calls := message.get("tool_calls"):
        copy["tool_calls"] = [
            _marked_call(call, f"{place}.tool_calls.{index}", mark)
            for index, call in enumerate(calls)
        ]
    return copy


def _like(content: str, text: str) -> str:
    """The text, written as parts if the content is."""
    return PartsText([text]) if isinstance(content, PartsText) else text


def _marked_call(call: Mapping[str, Any], place: str, mark: Callable[[str], str]) -> dict[str, Any]:
    name, arguments = mark(place), json.dumps({"value": mark(place)})
    return {**call, "function": {**call["function"], "name": name, "arguments": arguments}}


def with_one_system(chat: Chat) -> list[dict[str, Any]]:
    """Return a conversation whose system messages are one, at its start, in their order."""
    texts = [m["content"] for m in chat if m["role"] == "system" and isinstance(m["content"], str)]
    others = [dict(message) for message in chat if message["role"] != "system"]
    if not texts:
        return others
    first = next(message for message in chat if message["role"] == "system")
    return [{**first, "content": "\n\n".join(text for text in texts if text)}, *others]

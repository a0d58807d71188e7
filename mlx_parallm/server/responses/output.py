"""A chat's deltas → the items of a response, with the events that announce each.

    chat's delta → OutputItems.take … finish → events (without their sequence numbers), and `output`

An answer that is not streamed goes through the same code as one delta. An item is open until a
delta of another kind comes; events hold copies, because an item grows after them.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.execution.chat_messages import CUSTOM_ARGUMENT
from mlx_parallm.server.responses.body import ToolNames
from mlx_parallm.server.responses.items import sealed_reasoning
from mlx_parallm.server.stored_responses import new_item_id

Event = dict[str, Any]
COMPLETED, INCOMPLETE = "completed", "incomplete"


class _OpenItem(ABC):
    """One item of the output while it grows."""

    def __init__(self, kind: str, index: int, **fields: Any) -> None:
        self.index = index
        self.item: dict[str, Any] = {
            "id": new_item_id(kind),
            "type": kind,
            **fields,
            "status": "in_progress",
        }
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def added(self) -> list[Event]:
        return [
            {
                "type": "response.output_item.added",
                "output_index": self.index,
                "item": dict(self.item),
            }
        ]

    def grow(self, text: str, **more: Any) -> list[Event]:
        if not text:
            return []
        self._texts.append(text)
        return [self._delta(text, **more)]

    def done(self, status: str) -> list[Event]:
        closing = self._close()
        self.item["status"] = status
        return [
            *closing,
            {"type": "response.output_item.done", "output_index": self.index, "item": self.item},
        ]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {
            "type": f"response.{kind}",
            "item_id": self.item["id"],
            "output_index": self.index,
            **fields,
        }

    @abstractmethod
    def _delta(self, text: str, **more: Any) -> Event:
        """Return the event that carries this piece of text."""

    @abstractmethod
    def _close(self) -> list[Event]:
        """Fill the item; return the events before the item's own end."""


class _Message(_OpenItem):
    def __init__(self, index: int) -> None:
        super().__init__("message", index, role="assistant", content=[])
        self._logprobs: list[Any] = []

    def added(self) -> list[Event]:
        return [
            *super().added(),
            self._event("content_part.added", content_index=0, part=self._part()),
        ]

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _delta(self, text: str, **more: Any) -> Event:
        logprobs = more["logprobs"]
        self._logprobs += logprobs
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _close(self) -> list[Event]:
        part = self._part()
        self.item["content"] = [part]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._event("output_text.done", content_index=0, **text),
            self._event("content_part.done", content_index=0, part=part),
        ]


class _Reasoning(_OpenItem):
    """The model's own words, or the same as its summary if the client wants one: this server
    writes no other."""

    def __init__(self, index: int, *, as_summary: bool, sealed: bool) -> None:
        super().__init__("reasoning", index, summary=[])
        self._sealed = sealed
        self._name, self._field, self._kind = "reasoning_text", "content", "reasoning_text"
        self._at, self._opening, self._closing = (
            "content_index",
            "content_part.added",
            "content_part.done",
        )
        if as_summary:
            self._name, self._field, self._kind = (
                "reasoning_summary_text",
                "summary",
                "summary_text",
            )
            self._at = "summary_index"
            self._opening, self._closing = (
                "reasoning_summary_part.added",
                "reasoning_summary_part.done",
            )

    def _part(self) -> dict[str, Any]:
        return {"type": self._kind, "text": self.text}

    def added(self) -> list[Event]:
        return [*super().added(), self._event(self._opening, **{self._at: 0}, part=self._part())]

    def _delta(self, text: str, **more: Any) -> Event:
        return self._event(f"{self._name}.delta", **{self._at: 0}, delta=text)

    def _close(self) -> list[Event]:
        self.item[self._field] = [self._part()]
        if self._sealed:
            self.item["encrypted_content"] = sealed_reasoning(self.text)
        return [
            self._event(f"{self._name}.done", **{self._at: 0}, text=self.text),
            self._event(self._closing, **{self._at: 0}, part=self._part()),
        ]


class _FunctionCall(_OpenItem):
    def __init__(self, index: int, call_id: str, names: Mapping[str, Any]) -> None:
        super().__init__("function_call", index, call_id=call_id, **names, arguments="")

    def _delta(self, text: str, **more: Any) -> Event:
        return self._event("function_call_arguments.delta", delta=text)

    def _close(self) -> list[Event]:
        self.item["arguments"] = self.text
        return [
            self._event("function_call_arguments.done", name=self.item["name"], arguments=self.text)
        ]


class _CustomCall(_OpenItem):
    """A call of a custom tool. Its input is one string inside the function's arguments, so it is
    sent when the arguments are whole."""

    def __init__(self, index: int, call_id: str, names: Mapping[str, Any]) -> None:
        super().__init__("custom_tool_call", index, call_id=call_id, **names, input="")

    def grow(self, text: str, **more: Any) -> list[Event]:
        self._texts.append(text)
        return []

    def _delta(self, text: str, **more: Any) -> Event:
        return self._event("custom_tool_call_input.delta", delta=text)

    def _close(self) -> list[Event]:
        self.item["input"] = custom_input(self.text)
        return [
            self._delta(self.item["input"]),
            self._event("custom_tool_call_input.done", input=self.item["input"]),
        ]


def custom_input(arguments: str) -> str:
    """Return the string in the arguments, or the arguments if they have another form."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


class OutputItems:
    """The items of one response.

    Args:
        names: the request's names of the chat's functions.
        as_summary: reasoning is shown as its own summary.
        sealed: reasoning has `encrypted_content`.
    """

    def __init__(self, names: ToolNames, *, as_summary: bool, sealed: bool) -> None:
        self.output: list[dict[str, Any]] = []
        self._names, self._as_summary, self._sealed = names, as_summary, sealed
        self._open: _OpenItem | None = None
        self._call: int | None = None  # the chat's index of the open call
        self._logprobs = TextLogprobs()

    def take(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> list[Event]:
        """The events of a chat's delta, or of a whole message. `logprobs`: the chat's, of the
        same tokens."""
        self._logprobs.feed((logprobs or {}).get("content") or ())
        events: list[Event] = []
        if reasoning := delta.get("reasoning"):
            if not isinstance(self._open, _Reasoning):
                events += self._begin(
                    _Reasoning(self._next, as_summary=self._as_summary, sealed=self._sealed)
                )
            events += self._grow(reasoning)
            self._logprobs.take(reasoning)
        if content := delta.get("content"):
            if not isinstance(self._open, _Message):
                events += self._begin(_Message(self._next))
            events += self._grow(content, logprobs=self._logprobs.take(content))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            events += self._take_call(call.get("index", position), call)
        return events

    def finish(self, status: str) -> list[Event]:
        """End the last item with this status; an answer without any gets an empty message."""
        events = [] if self._open or self.output else self._begin(_Message(self._next))
        return events + self._end(status)

    def _take_call(self, index: int, call: Mapping[str, Any]) -> list[Event]:
        function, events = call.get("function") or {}, list[Event]()
        if self._call != index or not isinstance(self._open, _FunctionCall | _CustomCall):
            flat = function.get("name") or ""
            make = _CustomCall if flat in self._names.custom else _FunctionCall
            events += self._begin(make(self._next, call.get("id") or "", self._names.fields(flat)))
            self._call = index
        self._logprobs.skip()
        return events + self._grow(function.get("arguments") or "")

    @property
    def _next(self) -> int:
        return len(self.output) + (self._open is not None)

    def _begin(self, item: _OpenItem) -> list[Event]:
        events = self._end(COMPLETED)
        self._open = item
        return events + item.added()

    def _grow(self, text: str, **more: Any) -> list[Event]:
        assert self._open is not None
        return self._open.grow(text, **more)

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        ended, self._open = self._open, None
        events = ended.done(status)
        self.output.append(ended.item)
        return events


class TextLogprobs:
    """Finds the tokens of a text among all that were sampled: an answer's tokens are also
    markers, reasoning, calls."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._entries: list[tuple[int, int, Mapping[str, Any]]] = []  # start, end, entry
        self._at = self._taken = 0

    def feed(self, entries: Sequence[Mapping[str, Any]]) -> None:
        for entry in entries:
            start = len(self._bytes)
            self._bytes += bytes(entry["bytes"] or ())
            self._entries.append((start, len(self._bytes), entry))

    def take(self, text: str) -> list[Mapping[str, Any]]:
        """The tokens that hold the next occurrence of this text, each once; [] if it was not
        sampled so."""
        wanted = text.encode(errors="surrogatepass")
        start = self._bytes.find(wanted, self._at)
        if start < 0 or not self._entries:
            return []
        self._at = start + len(wanted)
        tokens = []
        while self._taken < len(self._entries) and self._entries[self._taken][0] < self._at:
            _, end, entry = self._entries[self._taken]
            self._taken += 1
            if end > start:
                tokens.append(entry)
        return tokens

    def skip(self) -> None:
        """Leave out everything up to here."""
        self._at, self._taken = len(self._bytes), len(self._entries)

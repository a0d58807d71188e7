"""A chat's answer → an Anthropic message, whole or as the events of its stream."""

import hashlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from mlx_parallm.server.messages.errors import anthropic_error
from mlx_parallm.server.protocol.to_chat import ChatFields

Event = dict[str, Any]
_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "abort": "pause_turn"}
_KEPT = (
    "policy_version",
    "weight_versions",
    "schema_error",
)  # fields kept from the chat's answer or choice
_START: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
_DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


class _Blocks:
    """The content of one message. A block is open until a delta of another kind comes."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._open: dict[str, Any] | None = None
        self._call: int | None = None  # the chat's index of the open call

    def take(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a chat's delta, or of a whole message."""
        if reasoning := delta.get("reasoning"):
            yield from self._begin("thinking")
            yield self._grow(reasoning)
        if content := delta.get("content"):
            yield from self._begin("text")
            yield self._grow(content)
        for position, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", position), call.get("function") or {}
            if self._call != index or self._open is None or self._open["type"] != "tool_use":
                yield from self._begin(
                    "tool_use",
                    anew=True,
                    id=call.get("id") or "",
                    name=function.get("name") or "",
                )
                self._call = index
            if arguments := function.get("arguments"):
                yield self._grow(arguments)

    def finish(self) -> Iterator[Event]:
        if self._open is None:
            return
        block, text = self._open, "".join(self._texts)
        self._open = None
        if block["type"] == "thinking":
            # No secret and never checked; clients send a block back only if it has one.
            signature = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
            block |= {"thinking": text, "signature": signature}
            yield self._delta({"type": "signature_delta", "signature": signature})
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = _object(text)
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _begin(self, kind: str, *, anew: bool = False, **fields: Any) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == kind and not anew:
            return
        yield from self.finish()
        self._open, self._texts = {"type": kind, **fields, **_START[kind]}, []
        self.content.append(self._open)
        yield {
            "type": "content_block_start",
            "index": len(self.content) - 1,
            "content_block": dict(self._open),
        }

    def _grow(self, text: str) -> Event:
        assert self._open is not None
        self._texts.append(text)
        kind, field = _DELTAS.get(self._open["type"], ("input_json_delta", "partial_json"))
        return self._delta({"type": kind, field: text})

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


class MessageForm:
    """One answer in the words of the Messages API: an `AnswerForm`. `stops`: the client's stop
    sequences."""

    def __init__(self, message_id: str, model: str, stops: Sequence[str]) -> None:
        self.id, self._model, self._stops = message_id, model, stops
        self._blocks = _Blocks()
        self._usage: dict[str, Any] = _usage({})
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._more = ChatFields(_KEPT)

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        for _ in self._blocks.take(choice["message"]):
            pass
        for _ in self._blocks.finish():
            pass
        self._usage = _usage(answer["usage"])
        self._more.take_ids(answer)
        self._more.take_ids(choice)
        self._take_end(answer, choice)
        return self._message() | self._more.taken

    async def events(
        self, chunks: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[Event, None]:
        begun = False
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.get("usage"):
                    self._usage = _usage(chunk["usage"])
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": self._message()}
                    yield {"type": "ping"}
                self._more.take_ids(chunk)
                for choice in chunk.get("choices") or ():
                    for event in self._blocks.take(choice["delta"]):
                        yield event
                    self._more.take_ids(choice)
                    if choice["finish_reason"] is not None:
                        self._take_end(chunk, choice)
        for event in self._blocks.finish():
            yield event
        yield {
            "type": "message_delta",
            "delta": dict(self._end),
            "usage": self._usage,
            **self._more.taken,
        }
        yield {"type": "message_stop"}

    def error(self, error: Mapping[str, Any]) -> Event:
        return anthropic_error(error)

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks.content),
            **self._end,
            "usage": self._usage,
        }

    def _take_end(self, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        """`answer`: the whole one, or a choice's last chunk."""
        stopped_by = choice.get("stop_reason")
        stop = (
            stopped_by if choice["finish_reason"] == "stop" and stopped_by in self._stops else None
        )
        reason = (
            "stop_sequence"
            if stop is not None
            else _REASONS.get(choice["finish_reason"], "end_turn")
        )
        self._end = {"stop_reason": reason, "stop_sequence": stop}
        self._more.take_end(answer, choice)


def _object(arguments: str) -> dict[str, Any]:
    """A call's input; {} for arguments that `max_tokens` has cut off."""
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)  # NaN and 1e999 are not JSON on the way out
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    """`input_tokens` are those that no cache held."""
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    reasoning = (chat.get("completion_tokens_details") or {}).get("reasoning_tokens")
    details = {"output_tokens_details": {"thinking_tokens": reasoning}}
    return {
        "input_tokens": chat.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": chat.get("completion_tokens", 0),
        **({} if reasoning is None else details),
    }

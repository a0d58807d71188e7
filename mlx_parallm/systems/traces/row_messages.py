"""A trace as the messages of a training row: its whole history, or the reason why it makes no row.

A row holds text, calls and results. What says nothing to a model (`NOTES`) stays in the trace and
is counted; anything else that a row cannot hold leaves the trace out, because a row without it
would be another conversation.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.dialects import converted, linked, not_sampled
from mlx_parallm.systems.traces.schema import Json, Trace, TraceStep, messages_of

NOTES = (
    "annotations",
    "cache_control",
    "choice",
    "citations",
    "created",
    "created_at",
    "date",
    "finishReason",
    "finish_reason",
    "id",
    "index",
    "is_error",
    "kind",
    "logprobs",
    "metadata",
    "model",
    "object",
    "phase",
    "provider_specific_fields",
    "reasoning_details",
    "rest",
    "score",
    "signature",
    "status",
    "stop_reason",
    "stop_sequence",
    "thinking_blocks",
    "thoughtSignature",
    "time",
    "timestamp",
    "token_ids",
    "usage",
    "uuid",
    "weight",
)
"""Fields of messages, parts and calls that say nothing to a model."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
ROLES = ("system", "developer", "user", "assistant", "tool")
_PART = ("type", "text")
_MESSAGE = ("role", "content", "tool_calls", "tool_call_id", "name", *THOUGHTS)


@dataclass(frozen=True)
class RowChat:
    """The chat of a trace. An answer with `"weight": 0` is not to be learned.

    Attributes:
        before: the messages before the first answer that is learned.
        answered: those from it to the last one that is learned; empty: nothing is.
        why_not: why an answer is not learned that the trace has as sampled; the first one's reason.
        notes: names of fields that the row does not hold, and how often.
    """

    before: list[Json]
    answered: list[Json]
    notes: Counter[str]
    why_not: str = ""


def row_chat(trace: Trace) -> RowChat:
    """Return the chat of a trace: content as text, arguments as JSON text. Raises TraceError:
    why it makes no row."""
    notes, plain, steps = Counter[str](), list[Json](), list[TraceStep]()
    for message in messages_of(trace.steps, with_step=True):
        step = message.pop("step")
        for each in converted(message):
            plain.append(_with_fields(each, notes))
            steps.append(step)
    messages, why_not = list[Json](), ""
    for message, step in zip(linked(plain), steps, strict=True):
        kept = _row_message(message, notes)
        if kept["role"] == "assistant":
            reason = _why_not(message, kept, step) if step.sampled else ""
            why_not = why_not or reason
            if reason or not step.sampled:
                kept["weight"] = 0
        messages.append(kept)
    _check_results(messages)
    answers = [
        at
        for at, message in enumerate(messages)
        if message["role"] == "assistant" and "weight" not in message
    ]
    if not answers:
        return RowChat(messages, [], notes, why_not)
    return RowChat(messages[: answers[0]], messages[answers[0] : answers[-1] + 1], notes, why_not)


def _why_not(message: Json, kept: Json, step: TraceStep) -> str:
    """Return why an answer is not learned: it is empty, or no model gave it. "": it is learned."""
    if not kept["content"].strip() and not kept.get("tool_calls"):
        return "an empty answer"
    about = (step.metrics.extra if step.metrics is not None else None) or {}
    return not_sampled(message, about) or ""


def _with_fields(message: Json, notes: Counter[str]) -> Json:
    """Put fields that conversion laid aside back, to be judged like the others."""
    extra = message.pop("step", {}).get("extra", {})
    notes.update(name for rest in extra.get("thoughts", ()) for name in rest if name != "type")
    return {**extra.get("fields", {}), **message}


def _row_message(message: Mapping[str, Any], notes: Counter[str]) -> Json:
    role = message.get("role")
    if role not in ROLES:
        raise TraceError(f"a message of the role {role!r}, which a row cannot hold"[:100])
    kept: Json = {"role": role, "content": _text(message.get("content"), notes)}
    thoughts = next((message[name] for name in THOUGHTS if message.get(name)), None)
    if thoughts is not None:
        if role != "assistant" or not isinstance(thoughts, str):
            raise TraceError("reasoning that is no text of an answer, which a row cannot hold")
        kept["reasoning_content"] = thoughts
    if message.get("tool_calls"):
        if role != "assistant" or not isinstance(message["tool_calls"], list):
            raise TraceError("calls that are none of an answer, which a row cannot hold")
        kept["tool_calls"] = [_row_call(call, notes) for call in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            kept[name] = str(message[name])
    _judge(
        {key: value for key, value in message.items() if key not in _MESSAGE},
        "a message has the field",
        notes,
    )
    return kept


def _text(content: Any, notes: Counter[str]) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TraceError("content that is no text, which a row cannot hold")
    texts = []
    for part in content:
        if (
            isinstance(part, Mapping)
            and isinstance(part.get("text"), str)
            and part.get("type") in (None, "text")
        ):
            _judge(
                {key: value for key, value in part.items() if key not in _PART},
                "a text has the field",
                notes,
            )
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TraceError(f"content of type {kind!r}, which a row of text cannot hold"[:100])
    return "".join(texts)


def _row_call(call: Any, notes: Counter[str]) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TraceError("a call without a function, which a row cannot hold")
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    _judge(
        {key: value for key, value in call.items() if key not in ("id", "type", "function")},
        "a call has",
        notes,
    )
    _judge(
        {key: value for key, value in function.items() if key not in ("name", "arguments")},
        "a call has",
        notes,
    )
    call_id = {"id": str(call["id"])} if call.get("id") else {}
    return {
        **call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _judge(fields: Mapping[str, Any], what: str, notes: Counter[str]) -> None:
    """Count notes; a field that holds nothing is none. Raises TraceError: another field."""
    for name, value in fields.items():
        if value is None or value is False or value in ("", [], {}):
            continue
        if name not in NOTES:
            raise TraceError(f"{what} {name!r}, which a row cannot hold"[:100])
        notes[name] += 1


def _check_results(messages: list[Json]) -> None:
    called: set[str] = set()
    for message in messages:
        called |= {call["id"] for call in message.get("tool_calls", ()) if "id" in call}
        if (
            message["role"] == "tool"
            and message.get("tool_call_id")
            and message["tool_call_id"] not in called
        ):
            raise TraceError("a tool's result without its call")

"""A trace as the messages of a training row: its whole history, or the reason why it makes no row.

A row holds text, calls and results. What says nothing to a model (`NOTES`) stays in the trace and
is counted; anything else that a row cannot hold leaves the trace out, because a row without it
would be another conversation.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.importers.dialects import converted, linked
from mlx_parallm.systems.traces.importers.endings import (
    CUT_FLAGS,
    OWN_CALL,
    REASONS,
    answered_without,
    cut_by_what_follows,
    ends_by_itself,
    is_own_call,
    not_sampled,
)
from mlx_parallm.systems.traces.schema import (
    WORDS,
    Json,
    TraceStep,
    chat_call,
    mapping,
    messages_of,
    present,
    text_or_none,
    without,
)
from mlx_parallm.systems.traces.session import compared_text
from mlx_parallm.systems.traces.trace import Trace

NOTES = WORDS["notes"]
"""Fields of messages, parts and calls that say nothing to a model."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
ROLES = ("system", "developer", "user", "assistant", "tool")
HALF_CHARACTER = "half a surrogate pair, replaced by U+FFFD"
_HALF = re.compile(r"[\ud800-\udfff]")
_PART = ("type", "text")
_MESSAGE = ("role", "content", "tool_calls", "tool_call_id", "name", *THOUGHTS)


@dataclass(frozen=True)
class RowChat:
    """The chat of a trace. An answer with `"weight": 0` is not to be learned.

    Attributes:
        before: the messages before the first answer that is learned.
        answered: those from it to the last one that is learned; empty: nothing is.
        notes: names of fields that the row does not hold, and how often.
        not_learned: reasons why an answer is not learned that the trace has as sampled.
    """

    before: list[Json]
    answered: list[Json]
    notes: Counter[str]
    not_learned: Counter[str]

    @property
    def why_not(self) -> str:
        """Why an answer is not learned; "": each is, or none was sampled."""
        return next(iter(self.not_learned), "")


def row_chat(trace: Trace) -> RowChat:
    """Return the chat of a trace: content as text, arguments as JSON text. Raises TraceError:
    why it makes no row."""
    notes, plain, steps = Counter[str](), list[Json](), list[TraceStep]()
    for message in messages_of(trace.steps, with_step=True):
        step = message.pop("step")
        for each in converted(message):
            plain.append(_with_fields(each, notes))
            steps.append(step)
    linked_messages = linked(plain)
    messages = [whole_characters(_row_message(each, notes), notes) for each in linked_messages]
    _check_results(messages)
    reasons = _why_not(linked_messages, messages, steps)
    for at, (message, step) in enumerate(zip(messages, steps, strict=True)):
        if message["role"] == "assistant" and (at in reasons or not step.sampled):
            message["weight"] = 0
    before, answered = divided(messages)
    return RowChat(before, answered, notes, Counter(reasons.values()))


def divided(messages: list[Json]) -> tuple[list[Json], list[Json]]:
    """Return the messages before the first answer that is learned, and those from it to the last
    one."""
    learned = [m["role"] == "assistant" and "weight" not in m for m in messages]
    if True not in learned:
        return messages, []
    first, behind = learned.index(True), len(learned) - learned[::-1].index(True)
    return messages[:first], messages[first:behind]


def whole_characters(value: Any, notes: Counter[str]) -> Any:
    """Return a value of JSON with U+FFFD in the place of each half of a surrogate pair: no file
    of UTF-8, and no tokenizer, takes it. Counted in `notes`."""
    if isinstance(value, str):
        if value.isascii() or not (halves := len(_HALF.findall(value))):
            return value
        notes[HALF_CHARACTER] += halves
        return _HALF.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [whole_characters(item, notes) for item in value]
    if isinstance(value, dict):
        pairs = [[whole_characters(each, notes) for each in pair] for pair in value.items()]
        return dict(pairs)
    return value


def _why_not(messages: list[Json], rows: list[Json], steps: list[TraceStep]) -> dict[int, str]:
    """Return the places of sampled answers that are not learned, and why."""
    reasons: dict[int, str] = {}
    lost = answered_without(messages)
    cut = dict(cut_by_what_follows(messages))
    seen: set[tuple[str, str]] = set()
    for at, (message, row, step) in enumerate(zip(messages, rows, steps, strict=True)):
        if row["role"] != "assistant" or not step.sampled:
            continue
        about = list(_records(step))
        reason = not_sampled(message, *about)
        if not row["content"].strip() and not row.get("tool_calls"):
            reason = "an empty answer"
        elif reason is None and any(map(is_own_call, message.get("tool_calls") or ())):
            reason = OWN_CALL
        elif reason is None and at in cut and not ends_by_itself(message, *about):
            reason = cut[at]
        elif reason is None and lost is not None and at >= lost[0]:
            reason = lost[1]
        if (name := _own_id(message, about)) is not None:
            key = name, compared_text(row)
            if reason is None and key in seen:
                reason = "an answer that stands in its conversation twice"
            seen.add(key)
        if reason is not None:
            reasons[at] = reason
    return reasons


def _own_id(message: Json, about: list[Mapping[str, Any]]) -> str | None:
    """The id that the API gave an answer."""
    names = (record.get(key) for record in (message, *about) for key in ("id", "response_id"))
    return next((name for name in names if isinstance(name, str) and name), None)


def _records(step: TraceStep) -> Iterator[Mapping[str, Any]]:
    """Yield what a step holds beside its message that may say how the answer ended."""
    if step.metrics is not None and step.metrics.extra:
        yield step.metrics.extra
    extra = step.extra or {}
    yield {key: extra[key] for key in (*REASONS, *CUT_FLAGS) if key in extra}
    for key in ("choice", "node", "ended"):
        if isinstance(extra.get(key), Mapping):
            yield extra[key]
    for line in extra.get("lines") or ():
        if isinstance(line, Mapping):
            yield line
            if isinstance(line.get("message"), Mapping):
                yield line["message"]


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
            raise TraceError("reasoning that is not a text of an answer, which a row cannot hold")
        kept["reasoning_content"] = thoughts
    if message.get("tool_calls"):
        if role != "assistant" or not isinstance(message["tool_calls"], list):
            raise TraceError("calls that are none of an answer, which a row cannot hold")
        kept["tool_calls"] = [_row_call(call, notes) for call in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            kept[name] = str(message[name])
    _judge(without(message, *_MESSAGE), "a message has the field", notes)
    return kept


def _text(content: Any, notes: Counter[str]) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TraceError("content that is not text, which a row cannot hold")
    texts = []
    for part in content:
        if isinstance(part, str):
            part = {"text": part}
        kind = mapping(part).get("type", None if isinstance(part, Mapping) else type(part).__name__)
        if kind not in (None, "text"):
            raise TraceError(f"content of type {kind!r}, which a row of text cannot hold"[:100])
        if not isinstance(part.get("text"), str):
            names = ", ".join(repr(key) for key in part if key != "type")
            raise TraceError(f"a part without 'text', which has {names or 'nothing'}"[:100])
        _judge(without(part, *_PART), "a text has the field", notes)
        texts.append(part["text"])
    return "".join(texts)


def _row_call(call: Any, notes: Counter[str]) -> Json:
    function = mapping(mapping(call).get("function"))
    if not isinstance(function.get("name"), str):
        raise TraceError("a call without a function, which a row cannot hold")
    _judge(without(call, "id", "type", "function"), "a call has", notes)
    _judge(without(function, "name", "arguments"), "a call has", notes)
    call_id = text_or_none(call.get("id") or None)
    return present(chat_call(call_id, function["name"], function.get("arguments", {})))


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
        result_of = message.get("tool_call_id") if message["role"] == "tool" else None
        if result_of and result_of not in called:
            raise TraceError("a tool's result without its call")

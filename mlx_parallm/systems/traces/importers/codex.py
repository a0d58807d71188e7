"""Logs of Codex: `~/.codex/sessions/…/rollout-*.jsonl`.

The format is internal to the program and changes; a line of an unknown kind is skipped and counted.
It does not hold the definitions of the tools: such a trace is text to learn from, not what the
model's template would make.

What a line holds beside its message is in the step's `extra.lines`. A trace whose history is not
whole has `extra.untrainable`, which says why; `build` leaves it out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.execution.parts.kinds import made_by
from mlx_parallm.systems.traces.importers.dialects import converted, result_content
from mlx_parallm.systems.traces.importers.endings import (
    BROKEN,
    INTERRUPTED,
    NEVER,
    is_own_call,
    marked,
    not_sampled,
)
from mlx_parallm.systems.traces.importers.report import SHAPES, ImportReport, objects, shape_of
from mlx_parallm.systems.traces.schema import (
    Json,
    add_step,
    as_context,
    chat_call,
    mapping,
    present,
    text_of,
    which,
    without,
)
from mlx_parallm.systems.traces.session import next_key
from mlx_parallm.systems.traces.trace import Trace, new_trace, numbered

SILENT = ("ghost_snapshot",)  # items that the model does not see
CLIENT_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
"""Calls that Codex itself makes: others that have no `call_id` are the API's own."""
PLAIN_THOUGHTS = ("summary_text", "reasoning_text", "text")
ARGUMENTS = ("arguments", "input", "action")
OUTPUTS = ("output", "outputs", "results", "result", "tools")
RESULT_TWICE = "a result that is twice in the log"
REPEATED = "an item that is twice in the log"
ENCRYPTED = "its history is not whole: a compaction that is encrypted, or has no text"


@dataclass
class ItemLog:
    """Messages that are made of response items, one after another (`take_item`)."""

    session: str
    version: str = "unknown"
    model: str | None = None
    instructions: str | None = None
    opened: int = 0  # messages that a compaction left
    messages: list[Json] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # places of the lines in `messages`
    about: list[Json] = field(default_factory=list)  # lines that are not messages
    answered: dict[str, Any] = field(default_factory=dict)
    untrainable: str | None = None
    is_side: bool | None = None  # None: no line has said it yet
    ended: int = 0  # messages when a turn last came to its end
    # places of texts behind an answer's calls: other answers, unless the calls' results follow
    behind_calls: set[int] = field(default_factory=set)
    items: list[str] = field(default_factory=list)  # the items of `messages` as text
    seen: set[str] = field(default_factory=set)  # the same
    replayed: int | None = None  # the item that a repeated history is at
    replayable: int = 0  # items before it


def codex(path: Path, report: ImportReport) -> Iterator[Trace]:
    """The `response_item` lines; events repeat them. A compaction ends a trace: the model saw a
    new prompt after it."""
    log = ItemLog(path.stem)
    number = 0
    for place, line in objects(path, report):
        payload, kind = line.get("payload"), line.get("type")
        if not isinstance(payload, dict):
            report.skip(place, "a line without 'payload'")
        elif kind in ("session_meta", "turn_context"):
            _take_about(log, kind, payload)
            log.about.append(line)
            log.places.append(place)
        elif kind == "compacted":
            number += 1
            yield from _codex_trace(log, number, report)
            _compact(log, line, place, report)
        elif kind != "response_item":
            _take_event(log, payload, place, report)
            reason = f"lines of type {kind!r}: the response items hold what was said"
            report.skip(place, reason[:100])
        else:
            report.expect(place, [payload])
            rest = without(line, "payload", "type")
            if _is_again(log, payload):
                report.skip(place, REPEATED)
                continue
            try:
                take_item(log, payload, place, report, rest)
            except SHAPES as error:
                report.skip(place, shape_of(error))
                log.untrainable = "its history is not whole: an item of an unknown shape"
    yield from _codex_trace(log, number + 1, report)


def _is_again(log: ItemLog, item: Json) -> bool:
    """Whether an item was read before: one of the same id and content, or of a history that a
    resumed session begins with."""
    text = json.dumps(item, sort_keys=True)
    if log.replayed is not None and text == log.items[log.replayed]:
        log.replayed = log.replayed + 1 if log.replayed + 1 < log.replayable else None
        return True
    log.replayed = None
    has_id = item.get("id") or (item.get("call_id") and str(item.get("type")).endswith("_call"))
    again = bool(has_id) and text in log.seen
    log.seen.add(text)
    log.items.append(text)
    return again


def _take_event(log: ItemLog, event: Json, place: str, report: ImportReport) -> None:
    """Learn from an event how the newest answer ended: the items do not say it."""
    kind = event.get("type")
    if kind in ("task_complete", "turn_complete"):
        log.ended = len(log.messages)
    reason = {"turn_aborted": INTERRUPTED, "error": BROKEN}.get(str(kind))
    if reason is None or len(log.messages) <= log.ended:
        return
    last = log.messages[-1]
    if last["role"] == "assistant" and last.get("step", {}).get("llm_call_count") != 0:
        log.messages[-1] = marked(last, reason)
        report.remark(place, NEVER.format(reason))


def _take_about(log: ItemLog, kind: str, payload: Json) -> None:
    if kind == "turn_context":
        log.model = payload["model"] if which(payload, ["model"], str) else log.model
        return
    if log.is_side is not None:  # a fork repeats its parent's lines behind its own first one
        log.replayed, log.replayable = (0 if log.items else None), len(log.items)
        return
    log.is_side = _is_subagent(payload)
    log.session = str(payload.get("id") or log.session)
    log.version = str(payload.get("cli_version") or log.version)
    base = payload.get("base_instructions")
    base = base if isinstance(base, dict) else {"text": payload.get("instructions")}
    log.instructions = base["text"] if which(base, ["text"], str) else None


def _is_subagent(meta: Json) -> bool:
    """Whether a session is another one's helper (a sub-agent, a review, a compaction), by what
    began it."""
    source, thread = meta.get("source"), meta.get("thread_source")
    kinds = source if isinstance(source, dict) else {str(source): None}
    return (
        any(_plain(kind) in ("subagent", "internal") for kind in kinds)
        or (isinstance(thread, str) and _plain(thread) != "user")
        or any(meta.get(name) for name in ("parent_thread_id", "agent_role", "agent_nickname"))
    )


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _compact(log: ItemLog, line: Json, place: str, report: ImportReport) -> None:
    """Open a new trace with what a compaction left: its `replacement_history`, else its summary."""
    payload = line["payload"]
    log.messages, log.places, log.about, log.answered = [], [], [line], {}
    log.opened, log.ended, log.untrainable, log.behind_calls = 0, 0, None, set()
    history, summary = payload.get("replacement_history"), payload.get("message")
    if isinstance(history, list):
        report.expect(place, history)
        for number, item in enumerate(history):
            try:
                take_item(log, item, f"{place}#{number}", report, {})
            except SHAPES as error:
                report.drop(place, f"an item of a compaction: {shape_of(error)}", item)
                log.untrainable = ENCRYPTED
        log.messages = [as_context(m) for m in log.messages]
    elif isinstance(summary, str) and summary:
        report.expect(place, [summary])
        log.messages = [{"role": "user", "content": summary}]
    if not log.messages:
        log.untrainable = ENCRYPTED
    if log.untrainable is not None:
        report.remark(place, f"{log.untrainable}; nothing of the trace is trained on")
    log.opened = len(log.messages)
    log.places = [place]


def take_item(log: ItemLog, item: Any, place: str, report: ImportReport, rest: Json) -> None:
    """Add a response item to the messages. `rest`: what its line holds beside it."""
    if not isinstance(item, dict):
        raise TraceError("an item that is not an object")
    kind, call_id = str(item.get("type")), str(item.get("call_id") or item.get("id") or "")
    if kind == "message" and item.get("role") in ("user", "assistant", "developer", "system"):
        _take_message(log, item, rest)
    elif kind == "reasoning":
        if not _take_reasoning(log, item, rest):
            report.skip(place, "reasoning that is encrypted")
            return
    elif kind.endswith("_output"):
        key = which(item, OUTPUTS) or "output"
        if call_id and call_id in log.answered:
            same = log.answered[call_id] == item.get(key)
            report.skip(place, RESULT_TWICE if same else f"{RESULT_TWICE}, with other content")
            return
        log.answered[call_id] = item.get(key)
        join_answer(log, call_id)
        log.messages.append(_output(item, call_id, rest, key))
    elif kind.endswith("_call") and kind not in CLIENT_CALLS and not item.get("call_id"):
        _take_own_call(log, item, kind, call_id, rest)  # the API made it: a search, code, MCP
    elif kind.endswith("_call"):
        calls = _open_answer(log).setdefault("tool_calls", [])
        calls.append(_codex_call(item, kind, call_id, rest))
    else:
        reason = f"response items of type {item.get('type')!r} are not known"
        report.skip(place, reason[:100])
        if kind not in SILENT:
            log.untrainable = f"its history is not whole: {reason}"[:100]
        return
    log.places.append(place)


def _take_message(log: ItemLog, item: Json, rest: Json) -> None:
    kept = rest | without(item, "type", "role", "content")
    if not isinstance(item.get("content"), str | list | None):
        raise TraceError("a message whose content is neither text nor a list")
    message, *more = converted({"role": item["role"], "content": item.get("content")})
    if more or message["role"] != item["role"] or message.keys() - {"role", "content"}:
        raise TraceError("a message that holds calls, results or thoughts")
    message["content"] = message["content"] or ""
    reason = not_sampled(message, item) if item["role"] == "assistant" else None
    if item["role"] != "assistant" or reason:
        message = marked(message, reason) if reason else message
        log.messages.append(add_step(message, extra={"lines": [kept]} if kept or reason else {}))
        return
    answer = _open_answer(log)
    if answer.get("tool_calls"):
        answer = {"role": "assistant", "content": None}
        log.behind_calls.add(len(log.messages))
        log.messages.append(answer)
    _add_content(answer, message["content"])
    _note(log, kept)


def _add_content(answer: Json, content: Any) -> None:
    before = answer["content"]
    if before and isinstance(before, str) and isinstance(content, str):
        answer["content"] = f"{before}\n\n{content}"
    elif before:
        answer["content"] = [*_parts(before), *_parts(content)]
    else:
        answer["content"] = content


def join_answer(log: ItemLog, call_id: str | None = None) -> None:
    """Make one answer of calls and the texts behind them: their results, or that of `call_id`,
    follow all of it, in any order."""
    first = last = len(log.messages) - 1
    if call_id is None:
        while first in log.behind_calls:
            first -= 1
    else:
        callers = (at - 1 for at in sorted(log.behind_calls) if _calls(log, at - 1, call_id))
        first = last = next(callers, last)
        while last + 1 in log.behind_calls:
            last += 1
    behind = log.messages[first + 1 : last + 1]
    if not behind or any(message["role"] != "tool" for message in log.messages[last + 1 :]):
        return
    for part in behind:
        log.messages[first] = _joined(log.messages[first], part)
    del log.messages[first + 1 : last + 1]
    later = {at - len(behind) for at in log.behind_calls if at > last}
    log.behind_calls = later | {at for at in log.behind_calls if at <= first}
    log.ended -= max(0, min(log.ended, last + 1) - first - 1)


def _calls(log: ItemLog, place: int, call_id: str) -> bool:
    return any(call.get("id") == call_id for call in log.messages[place].get("tool_calls", ()))


def _joined(answer: Json, part: Json) -> Json:
    """Return an answer with what its part behind a call holds."""
    if part["content"] or answer["content"] is None:
        _add_content(answer, part["content"])
    if "reasoning_content" in part:
        thoughts = answer.get("reasoning_content", "") + part["reasoning_content"]
        answer["reasoning_content"] = thoughts
    answer.setdefault("tool_calls", []).extend(part.get("tool_calls", ()))
    steps = [each.get("step", {}) for each in (answer, part)]
    if not any(steps):
        return answer
    extra = dict(steps[1].get("extra", {}))
    if lines := [line for step in steps for line in step.get("extra", {}).get("lines", ())]:
        extra["lines"] = lines
    return add_step(answer, **without(steps[1], "extra"), extra=extra)


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _take_reasoning(log: ItemLog, item: Json, rest: Json) -> bool:
    """Add the text of a thought: its content, else its summary; return whether it has any."""
    key = next((key for key in ("content", "summary") if text_of(item.get(key))), None)
    if key is None:
        return False
    kept = rest | without(item, "type", key)
    parts = item[key] if isinstance(item[key], list) else [item[key]]
    answer = _open_answer(log)
    answer["reasoning_content"] = answer.get("reasoning_content", "") + "\n".join(
        text_of([part]) for part in parts
    )
    if any(
        mapping(p).get("type") not in PLAIN_THOUGHTS or set(p) - {"type", "text"} for p in parts
    ):
        kept[key] = item[key]
    _note(log, kept)
    return True


def _codex_call(item: Json, kind: str, call_id: str, rest: Json) -> Json:
    key = which(item, ARGUMENTS) or ""
    arguments = item.get(key)
    if key != "arguments" or not isinstance(arguments, str):
        arguments = arguments if isinstance(arguments, dict) else present({"input": arguments})
    call = chat_call(call_id, str(item.get("name") or kind.removesuffix("_call")), arguments)
    others = rest | without(item, "type", "name", "call_id", key)
    return call | ({"rest": others} if others else {})


def _take_own_call(log: ItemLog, item: Json, kind: str, call_id: str, rest: Json) -> None:
    """Add a call that the API made, and its result, where the item holds one: other items of its
    answer follow as another answer."""
    key = which(present(item), (*OUTPUTS, "error"))
    plain = ("type", "name", "id", "status", *ARGUMENTS, *OUTPUTS, "error")
    if which(item, ARGUMENTS) is None:
        item = {**item, "arguments": without(item, *plain)}
    call = _codex_call(without(item, key), kind, call_id, rest)
    call["rest"] = {**call.get("rest", {}), "kind": kind}
    answer = _open_answer(log)
    if answer.get("tool_calls"):
        answer = {"role": "assistant", "content": None}
        log.messages.append(answer)
    answer["tool_calls"] = [call]
    if key is not None:
        content = made_by(kind, item[key]) or result_content(_logs(item[key]))
        log.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _logs(outputs: Any) -> Any:
    """Text of what code has printed, where that is all its output."""
    if not isinstance(outputs, list):
        return outputs
    logs = [mapping(each).get("logs") for each in outputs if mapping(each).get("type") == "logs"]
    texts = [text for text in logs if isinstance(text, str)]
    return "\n".join(texts) if len(texts) == len(outputs) else outputs


def _output(item: Json, call_id: str, rest: Json, key: str) -> Json:
    output = item.get(key)
    others = without(item, "type", "call_id", key)
    inner = output
    if isinstance(output, dict) and "content" in output:
        inner = output["content"]
        others |= without(output, "content")
    message = {"role": "tool", "tool_call_id": call_id, "content": result_content(inner)}
    return add_step(message, extra={"lines": [rest | others]} if rest | others else {})


def _open_answer(log: ItemLog) -> Json:
    """The answer that the model is giving: reasoning, text and calls up to the next message or
    result are one."""
    last = log.messages[-1] if len(log.messages) > log.opened else {}
    is_open = last.get("step", {}).get("llm_call_count") != 0 and not any(
        map(is_own_call, last.get("tool_calls", ()))
    )
    if last.get("role") != "assistant" or not is_open:
        log.messages.append({"role": "assistant", "content": None})
    return log.messages[-1]


def _note(log: ItemLog, kept: Json) -> None:
    """Keep what the line of a part of the newest answer holds beside it."""
    if kept:
        before = log.messages[-1].get("step", {}).get("extra", {}).get("lines", [])
        log.messages[-1] = add_step(log.messages[-1], extra={"lines": [*before, kept]})


def _codex_trace(log: ItemLog, number: int, report: ImportReport) -> list[Trace]:
    with report.carrying(log.places) as traces:
        traces.append(_trace_of(log, number, report))
    return traces


def _trace_of(log: ItemLog, number: int, report: ImportReport) -> Trace:
    if not any(message["role"] == "assistant" for message in log.messages):
        raise TraceError("no answer follows it")
    opening = [{"role": "system", "content": log.instructions}] if log.instructions else []
    messages, sampled = _learned_once(log.messages, report)
    trace = new_trace(
        [*opening, *messages],
        session_id=log.session,
        name=numbered(log.session, number),
        source="codex",
        source_id=log.session,
        model=log.model,
        agent="codex",
        version=log.version,
        log=log.about or None,
        sidechain=log.is_side or None,
        untrainable=log.untrainable,
    )
    report.samples(trace, sampled)
    return trace


def _learned_once(messages: Sequence[Json], report: ImportReport) -> tuple[list[Json], set[str]]:
    """Mark answers that an earlier file holds after the same messages: a fork, or a session that
    was resumed, repeats them. Return the messages, and the names of all answers."""
    chain, learned, names = "codex", list[Json](), set[str]()
    for message in messages:
        chain = next_key(chain, message)
        if message["role"] == "assistant":
            names.add(chain)
            if chain in report.sampled and message.get("step", {}).get("llm_call_count") != 0:
                message = as_context(message)
        learned.append(message)
    return learned, names

"""Logs of coding agents: Claude Code (`~/.claude/projects/…/*.jsonl`), Codex (`~/.codex/sessions/…/rollout-*.jsonl`).

Both formats are internal to their programs and change; a line of an unknown kind is skipped and counted. Neither holds
the definitions of the tools, and Claude Code's has no system prompt: such a trace is text to learn from, not what the
model's template would make.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.traces.importers.report import ImportReport, made, objects
from mlx_parallm.traces.schema import Json, Trace, new_trace, text_of

# ---------------------------------------------------------------------- Claude Code


@dataclass
class _Node:
    """One message; an answer's blocks are on lines of their own, which share the message's id."""

    uuid: str
    parent: str | None
    role: str
    sidechain: bool
    line: Json
    blocks: list[Json] = field(default_factory=list)


def claude_code(path: Path, report: ImportReport) -> Iterator[Trace]:
    """One trace for each branch; the run of a sub-agent (`isSidechain`) is a trace with `extra.sidechain`."""
    nodes: dict[str, _Node] = {}
    same: dict[str, str] = {}  # uuid of a line → of the node that holds it
    by_message: dict[str, str] = {}
    about: Json = {}
    for place, line in objects(path, report):
        kind, message = line.get("type"), line.get("message")
        if kind not in ("user", "assistant"):
            report.skip(place, f"lines of type {kind!r} are no messages")
            continue
        if not isinstance(message, dict) or not isinstance(line.get("uuid"), str):
            report.skip(place, "a message without 'message' or 'uuid'")
            continue
        report.use()
        about = about or line
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        parent = same.get(str(line.get("parentUuid")))
        key = str(message.get("id")) if kind == "assistant" and message.get("id") else None
        if key is not None and key in by_message:
            same[line["uuid"]] = by_message[key]
            nodes[by_message[key]].blocks += blocks
            continue
        results = _result_ids(blocks)
        twin = next((n for n in nodes.values() if results and n.parent == parent and _result_ids(n.blocks)), None)
        if twin is not None and not results & _result_ids(twin.blocks):  # results of parallel calls
            same[line["uuid"]] = twin.uuid
            twin.blocks += blocks
            continue
        node = _Node(line["uuid"], parent, kind, bool(line.get("isSidechain")), line, blocks)
        nodes[node.uuid] = node
        same[node.uuid] = node.uuid
        if key is not None:
            by_message[key] = node.uuid
    yield from _claude_traces(nodes, path, about, report)


def _result_ids(blocks: Iterable[Mapping[str, Any]]) -> set[str]:
    return {str(b.get("tool_use_id")) for b in blocks if isinstance(b, Mapping) and b.get("type") == "tool_result"}


def _claude_traces(nodes: dict[str, _Node], path: Path, about: Json, report: ImportReport) -> Iterator[Trace]:
    parents = {node.parent for node in nodes.values()}
    claimed: set[str] = set()
    number = 0
    for leaf in nodes.values():
        if leaf.uuid in parents:
            continue
        way: list[_Node] = []
        at: _Node | None = leaf
        while at is not None:
            way.append(at)
            at = nodes.get(at.parent) if at.parent is not None else None
        way.reverse()
        number += 1
        messages = [message for node in way for message in _claude_messages(node, copied=node.uuid in claimed)]
        claimed |= {node.uuid for node in way}
        session = str(about.get("sessionId") or path.stem)
        model = next((m for n in way if (m := (n.line.get("message") or {}).get("model"))), None)
        trace = new_trace(
            messages,
            session_id=session,
            source="claude-code",
            source_id=session,
            model=model,
            agent="claude-code",
            version=str(about.get("version") or "unknown"),
            sidechain=True if leaf.sidechain else None,
        )
        trace.trajectory_id = session if number == 1 else f"{session}#{number}"
        report.traces += 1
        yield trace


def _claude_messages(node: _Node, *, copied: bool) -> Iterator[Json]:
    timestamp = {"timestamp": node.line["timestamp"]} if isinstance(node.line.get("timestamp"), str) else {}
    blocks = [block for block in node.blocks if isinstance(block, dict)]
    if node.role == "assistant":
        step = timestamp | ({"is_copied_context": True} if copied else {})
        yield _claude_answer(blocks) | {"step": step}
        return
    for block in blocks:
        if block.get("type") == "tool_result":
            message = {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": _text(block)}
            yield message | ({"is_error": True} if block.get("is_error") else {})
    text = "".join(str(block.get("text", "")) for block in blocks if block.get("type") == "text")
    if text:
        yield {"role": "user", "content": text, "step": timestamp}


def _claude_answer(blocks: Iterable[Json]) -> Json:
    message: Json = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": str(block.get("name")), "arguments": arguments}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
    if texts:
        message["content"] = "".join(texts)
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _text(block: Mapping[str, Any]) -> str:
    return text_of(block.get("content"))


# ---------------------------------------------------------------------- Codex

_CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass
class _CodexLog:
    session: str
    version: str = "unknown"
    model: str | None = None
    instructions: str | None = None
    messages: list[Json] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)


def codex(path: Path, report: ImportReport) -> Iterator[Trace]:
    """The `response_item` lines; events repeat them. A compaction ends a trace: the model saw a new prompt after it."""
    log = _CodexLog(path.stem)
    number = 1
    for place, line in objects(path, report):
        payload = line.get("payload")
        kind = line.get("type")
        if not isinstance(payload, dict):
            report.skip(place, "a line without 'payload'")
        elif kind == "session_meta":
            log.session = str(payload.get("id") or log.session)
            log.version = str(payload.get("cli_version") or log.version)
            base = payload.get("base_instructions")
            log.instructions = base.get("text") if isinstance(base, dict) else payload.get("instructions")
            report.use()
        elif kind == "turn_context":
            log.model = payload.get("model") or log.model
            report.use()
        elif kind == "compacted":
            report.use()
            yield from _codex_trace(log, number, report)
            number += 1
            log.messages = [{"role": "user", "content": str(payload.get("message") or "")}]
        elif kind != "response_item":
            report.skip(place, f"lines of type {kind!r}: the response items hold what was said")
        else:
            _take_item(log, payload, place, report)
    yield from _codex_trace(log, number, report)


def _take_item(log: _CodexLog, item: Json, place: str, report: ImportReport) -> None:
    kind, call_id = item.get("type"), str(item.get("call_id") or item.get("id") or "")
    if kind == "message" and item.get("role") in ("user", "assistant", "developer", "system"):
        text = text_of(item.get("content"))
        if item["role"] == "assistant":
            answer = _open_answer(log)
            answer["content"] = (answer["content"] or "") + text
        else:
            log.messages.append({"role": item["role"], "content": text})
    elif kind == "reasoning":
        summary = "\n".join(str(part.get("text", "")) for part in item.get("summary") or () if isinstance(part, dict))
        if not summary:
            report.skip(place, "reasoning that is encrypted")
            return
        answer = _open_answer(log)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + summary
    elif kind in _CALLS:
        raw = item.get(_CALLS[kind])
        arguments = raw if kind == "function_call" else json.dumps(raw if isinstance(raw, dict) else {"input": raw})
        function = {"name": str(item.get("name") or kind.removesuffix("_call")), "arguments": arguments}
        _open_answer(log).setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
    elif kind in _OUTPUTS:
        if call_id in log.answered:
            report.skip(place, "a result that stands in the log twice")
            return
        log.answered.add(call_id)
        output = item.get("output")
        content = output.get("content") if isinstance(output, dict) else output
        log.messages.append({"role": "tool", "tool_call_id": call_id, "content": "" if content is None else content})
    else:
        report.skip(place, f"response items of type {kind!r} are not known")
        return
    report.use()


def _open_answer(log: _CodexLog) -> Json:
    """The answer that the model is giving: reasoning, text and calls up to the next message or result are one."""
    if not log.messages or log.messages[-1]["role"] != "assistant":
        log.messages.append({"role": "assistant", "content": None})
    return log.messages[-1]


def _codex_trace(log: _CodexLog, number: int, report: ImportReport) -> Iterator[Trace]:
    if not any(message["role"] == "assistant" for message in log.messages):
        return
    opening = [{"role": "system", "content": log.instructions}] if log.instructions else []

    def make() -> Trace:
        trace = new_trace(
            [*opening, *log.messages],
            session_id=log.session,
            source="codex",
            source_id=log.session,
            model=log.model,
            agent="codex",
            version=log.version,
        )
        trace.trajectory_id = log.session if number == 1 else f"{log.session}#{number}"
        return trace

    lines, used = report.lines, report.used
    trace = made(report, log.session, make)
    if trace is not None:
        report.lines, report.used = lines, used  # its lines are counted one by one
        yield trace

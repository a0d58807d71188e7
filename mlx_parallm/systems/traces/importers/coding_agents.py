"""Logs of coding agents: Claude Code (`~/.claude/projects/…/*.jsonl`), Codex
(`~/.codex/sessions/…/rollout-*.jsonl`).

Both formats are internal to their programs and change; a line of an unknown kind is skipped and
counted. Neither holds the definitions of the tools, and Claude Code's has no system prompt: such a
trace is text to learn from, not what the model's template would make.

What a line holds beside its message is in the step's `extra.lines`. A trace whose history is not
whole has `extra.untrainable`, which says why; `build` leaves it out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.dialects import (
    converted,
    joined,
    linked,
    marked,
    not_sampled,
    result_content,
)
from mlx_parallm.systems.traces.importers.links import Forest
from mlx_parallm.systems.traces.importers.report import SHAPES, ImportReport, objects, shape_of
from mlx_parallm.systems.traces.schema import Json, Trace, add_step, new_trace, text_of

NEVER = "{}: never trained on"

# ---------------------------------------------------------------------- Claude Code

TWICE = "a line whose uuid stands in the log twice"
TWICE_OTHERWISE = "a line whose uuid stands in the log twice, with other content"
BLOCK_TWICE = "a block of an answer that stands in the log twice"
REPEATED = {"toolUseResult": "field 'toolUseResult': the block of the result holds it"}


@dataclass
class _Node:
    """One message; an answer's blocks are on lines of their own, which share the message's id."""

    parent: str | None  # uuid of a line
    role: str
    lines: list[tuple[str, Json]]  # place and line
    blocks: list[Any]
    is_doubtful: bool = False  # it follows a uuid that stands at two places
    block_texts: set[str] = field(default_factory=set)  # its blocks as text
    results: set[str] = field(default_factory=set)  # ids of calls whose results it holds

    def __post_init__(self) -> None:
        self.block_texts |= set(map(_as_text, self.blocks))
        self.results |= _result_ids(self.blocks)

    @property
    def line(self) -> Json:
        return self.lines[0][1]


class _ClaudeLog:
    """The lines of a file, joined into messages. `nodes`: by the uuid of their first line."""

    def __init__(self, report: ImportReport) -> None:
        self.report = report
        self.nodes: dict[str, _Node] = {}
        self.holder: dict[str, str] = {}  # uuid of a message's line → of the node that holds it
        self.links: dict[str, str | None] = {}  # uuid of any other line → the one before it
        self.begins: set[str] = set()  # uuids of lines after which the model had a new prompt
        self.doubted: set[str] = set()  # uuids that stand at two places
        self._first: dict[str, Json] = {}  # uuid → its first line
        self._answers: dict[
            tuple[str, str | None], str
        ] = {}  # id of an answer and what a line of it follows → its node
        self._results: dict[str, str] = {}  # parent → the node of its results

    def read(self, place: str, line: Json) -> None:
        kind, message, uuid = line.get("type"), line.get("message"), line.get("uuid")
        parent = line.get("parentUuid") if isinstance(line.get("parentUuid"), str) else None
        queued = line.get("attachment") if kind == "attachment" else None
        # what the user wrote meanwhile
        if isinstance(queued, dict) and isinstance(queued.get("prompt"), str):
            kind, message = "user", {"role": "user", "content": queued["prompt"]}
            line = {**line, "type": kind, "message": message}
        if kind not in ("user", "assistant"):
            if isinstance(uuid, str) and uuid not in self.links and uuid not in self.holder:
                is_new = line.get("subtype") == "compact_boundary"
                self.links[uuid] = None if is_new else parent
                if is_new:
                    self.begins.add(uuid)
            self.report.skip(place, f"lines of type {kind!r} are no messages"[:100])
        elif not isinstance(message, dict) or not isinstance(uuid, str):
            self.report.skip(place, "a message without 'message' or 'uuid'")
        else:
            self.report.expect(place, [message])
            content = message.get("content")
            is_text = isinstance(content, str)
            if not is_text and content is not None and not isinstance(content, list):
                self.report.skip(place, "a message whose content is neither text nor a list")
                return
            blocks: list[Any] = (
                [{"type": "text", "text": content}] if is_text else list(content or ())
            )
            self._add(place, line, uuid, parent, blocks)

    def _add(
        self, place: str, line: Json, uuid: str, parent: str | None, blocks: list[Any]
    ) -> None:
        if uuid in self.holder:
            self._again(place, line, uuid, blocks)
            return
        self.links.pop(uuid, None)
        self._first[uuid] = line
        before = self.resolved(parent) or parent
        answer = (
            str(line["message"][("id")])
            if line["type"] == "assistant" and line["message"].get("id")
            else None
        )
        if answer is not None and (answer, before) in self._answers:
            self._join(place, line, uuid, self._answers[answer, before], blocks)
            return
        results = _result_ids(blocks) if line["type"] == "user" else set()
        if results:
            key = before or uuid
            if key in self._results and not results & self.nodes[self._results[key]].results:
                # results of parallel calls
                self._join(place, line, uuid, self._results[key], blocks)
                return
            self._results.setdefault(key, uuid)
        self.nodes[uuid] = _Node(
            parent, line["type"], [(place, line)], blocks, parent in self.doubted
        )
        self.holder[uuid] = uuid
        if answer is not None:
            self._answers.setdefault((answer, before), uuid)
            self._answers[answer, uuid] = uuid

    def _join(self, place: str, line: Json, uuid: str, name: str, blocks: Sequence[Any]) -> None:
        node = self.nodes[name]
        for block in blocks:
            if _as_text(block) in node.block_texts:
                self.report.drop(place, BLOCK_TWICE, block)
            else:
                node.blocks.append(block)
                node.block_texts.add(_as_text(block))
        node.results |= _result_ids(blocks)
        node.lines.append((place, line))
        self.holder[uuid] = name

    def _again(self, place: str, line: Json, uuid: str, blocks: Sequence[Any]) -> None:
        """A uuid counts once. A later line that holds all of the first one's blocks and more
        brings the others."""
        node = self.nodes[self.holder[uuid]]
        first, texts = self._first[uuid], set(map(_as_text, blocks))
        if first.get("parentUuid") != line.get("parentUuid"):
            self.doubted.add(uuid)
        if first == line:
            self.report.skip(place, TWICE)
        elif node.block_texts < texts:
            self._join(place, line, uuid, self.holder[uuid], blocks)
        else:
            self.report.skip(place, TWICE if texts <= node.block_texts else TWICE_OTHERWISE)

    def resolved(self, uuid: str | None) -> str | None:
        """The node that a link leads to, through lines that are no messages; None: to none."""
        end = self._end(uuid)
        return self.holder.get(end) if end is not None else None

    def before(self, node: _Node) -> str | None:
        """The node before this one; a sub-agent's first message has none, since its prompt is
        its own."""
        parent = self.resolved(node.parent)
        return (
            parent if parent is None or _is_side(self.nodes[parent]) or not _is_side(node) else None
        )

    def leads_nowhere(self, uuid: str | None) -> bool:
        """Whether a link leads out of the log, or in a circle, and not to the beginning of a
        conversation."""
        end = self._end(uuid)
        return end is not None and end not in self.holder and self.links.get(end, "") is not None

    def _end(self, uuid: str | None) -> str | None:
        """The last line that a link leads to through lines that are no messages. The way there
        gets shorter."""
        seen: list[str] = []
        at = uuid
        while (
            at is not None
            and at in self.links
            and self.links[at] is not None
            and at not in self.holder
        ):
            if len(seen) > len(self.links):  # a circle
                return at
            seen.append(at)
            at = self.links[at]
        for each in seen:
            self.links[each] = at
        return at


def claude_code(path: Path, report: ImportReport) -> Iterator[Trace]:
    """One trace for each branch; the run of a sub-agent (`isSidechain`) is a trace with
    `extra.sidechain`."""
    log = _ClaudeLog(report)
    for place, line in objects(path, report):
        log.read(place, line)
    yield from _claude_traces(log, path, report)


def _as_text(block: Any) -> str:
    return json.dumps(block, sort_keys=True)


def _result_ids(blocks: Sequence[Any]) -> set[str]:
    return {
        str(b.get("tool_use_id"))
        for b in blocks
        if isinstance(b, Mapping) and b.get("type") == "tool_result"
    }


def _claude_traces(log: _ClaudeLog, path: Path, report: ImportReport) -> Iterator[Trace]:
    nodes = log.nodes
    forest = Forest({name: log.before(node) for name, node in nodes.items()})
    claimed: set[str] = set()
    number = 0
    for way in forest.branches():
        session = str(nodes[way[-1]].line.get("sessionId") or path.stem)
        number += 1
        try:
            trace = _claude_trace(log, forest, way, claimed, session, report)
        except SHAPES as error:
            for name in way:
                for place, _ in nodes[name].lines if name not in claimed else ():
                    report.skip(place, shape_of(error))
            continue
        trace.trajectory_id = session if number == 1 else f"{session}#{number}"
        for name in way:
            for place, line in nodes[name].lines if name not in claimed else ():
                report.carry(place)
                for key in REPEATED.keys() & line.keys():
                    report.drop(place, REPEATED[key], line[key])
        claimed |= set(way)
        report.traces += 1
        yield trace
    report.sampled |= {_identity(nodes[name], name) for name in claimed}
    for name in nodes.keys() - claimed if forest.beyond else ():
        for place, _ in nodes[name].lines:
            report.skip(place, "a branch of a log with too many branches")


def _is_side(node: _Node) -> bool:
    return bool(node.line.get("isSidechain"))


def _identity(node: _Node, name: str) -> str:
    """Return a name for an answer that is the same in every file that holds it: a resumed session
    copies the earlier lines."""
    return str(node.line["message"].get("id") or name)


def _claude_trace(
    log: _ClaudeLog,
    forest: Forest[str],
    way: Sequence[str],
    claimed: set[str],
    session: str,
    report: ImportReport,
) -> Trace:
    nodes = [log.nodes[name] for name in way]
    messages: list[Json] = []
    for name, node in zip(way, nodes, strict=True):
        copied = name in claimed or (
            node.role == "assistant" and _identity(node, name) in report.sampled
        )
        messages += _claude_messages(node, report, copied=copied, is_new=name not in claimed)
    lost = None
    if way[0] in forest.circles:
        lost = "its history is not whole: the links of its messages go in a circle"
    elif log.leads_nowhere(nodes[0].parent):
        lost = "its history is not whole: the log does not hold the message before its first one"
    elif any(node.is_doubtful for node in nodes):
        lost = (
            "its history is not known: a message before it stands in the log twice, at different"
            " places"
        )
    if lost is not None:
        report.remark(nodes[0].lines[0][0], f"{lost}; nothing of the trace is trained on")
    about = nodes[0].line
    models = (node.line["message"].get("model") for node in nodes)
    model = next(
        (name for name in models if isinstance(name, str) and not name.startswith("<")), None
    )
    return new_trace(
        linked(messages),
        session_id=session,
        source="claude-code",
        source_id=session,
        model=model,
        agent="claude-code",
        version=str(about.get("version") or "unknown"),
        sidechain=True if _is_side(nodes[-1]) else None,
        untrainable=lost,
    )


def _claude_messages(
    node: _Node, report: ImportReport, *, copied: bool, is_new: bool
) -> list[Json]:
    """The messages of a node; what its lines hold beside their content is in the step of the
    first one."""
    place, line = node.lines[0]
    kept = []
    for _, each in node.lines:
        rest = {key: value for key, value in each.items() if key not in ("message", *REPEATED)}
        message = {key: value for key, value in each["message"].items() if key != "content"}
        if message.get("role") == node.role:
            del message["role"]
        kept.append(rest | ({"message": message} if message else {}))
    content = node.blocks
    made = converted({"role": node.role, "content": content if content else ""})
    made = [
        {**m, "content": joined(m[("content")])} if isinstance(m.get("content"), list) else m
        for m in made
    ]
    timestamp = {"timestamp": line["timestamp"]} if isinstance(line.get("timestamp"), str) else {}
    if (
        node.role == "user"
        and len(made) > 1
        and not made[-1].get("content")
        and made[-1]["role"] == "user"
    ):
        del made[-1]
    made[0] = add_step(made[0], extra={"lines": kept})
    answers = []
    for message in made:
        if message["role"] != "tool":
            message = add_step(message, **timestamp)
        if message["role"] == "assistant":
            about = [record for _, each in node.lines for record in (each, each["message"])]
            reason = not_sampled(message, *about)
            if reason is not None:
                message = marked(message, reason)
                if is_new:
                    report.remark(place, NEVER.format(reason))
            elif copied:
                message = add_step(message, is_copied_context=True)
        answers.append(message)
    return answers


# ---------------------------------------------------------------------- Codex

SILENT = ("ghost_snapshot",)  # items that the model does not see
ENCRYPTED = "its history is not whole: a compaction that is encrypted, or has no text"


@dataclass
class _CodexLog:
    session: str
    version: str = "unknown"
    model: str | None = None
    instructions: str | None = None
    opened: int = 0  # messages that a compaction left
    messages: list[Json] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # of the lines that are in `messages`
    about: list[Json] = field(default_factory=list)  # lines that are no messages
    answered: dict[str, Any] = field(default_factory=dict)
    untrainable: str | None = None


def codex(path: Path, report: ImportReport) -> Iterator[Trace]:
    """The `response_item` lines; events repeat them. A compaction ends a trace: the model saw a
    new prompt after it."""
    log = _CodexLog(path.stem)
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
            report.skip(
                place, f"lines of type {kind!r}: the response items hold what was said"[:100]
            )
        else:
            report.expect(place, [payload])
            rest = {key: value for key, value in line.items() if key not in ("payload", "type")}
            try:
                _take_item(log, payload, place, report, rest)
            except SHAPES as error:
                report.skip(place, shape_of(error))
                log.untrainable = "its history is not whole: an item of an unknown shape"
    yield from _codex_trace(log, number + 1, report)


def _take_about(log: _CodexLog, kind: str, payload: Json) -> None:
    if kind == "turn_context":
        log.model = payload["model"] if isinstance(payload.get("model"), str) else log.model
        return
    log.session = str(payload.get("id") or log.session)
    log.version = str(payload.get("cli_version") or log.version)
    base = payload.get("base_instructions")
    text = base.get("text") if isinstance(base, dict) else payload.get("instructions")
    log.instructions = text if isinstance(text, str) else None


def _compact(log: _CodexLog, line: Json, place: str, report: ImportReport) -> None:
    """Open a new trace with what a compaction left: its `replacement_history`, else its summary."""
    payload = line["payload"]
    log.messages, log.places, log.about, log.answered = [], [], [line], {}
    log.opened, log.untrainable = 0, None
    history, summary = payload.get("replacement_history"), payload.get("message")
    if isinstance(history, list):
        report.expect(place, history)
        for number, item in enumerate(history):
            try:
                _take_item(log, item, f"{place}#{number}", report, {})
            except SHAPES as error:
                report.drop(place, f"an item of a compaction: {shape_of(error)}", item)
                log.untrainable = ENCRYPTED
        log.messages = [
            add_step(m, is_copied_context=True) if m["role"] == ("assistant") else m
            for m in log.messages
        ]
    elif isinstance(summary, str) and summary:
        report.expect(place, [summary])
        log.messages = [{"role": "user", "content": summary}]
    if not log.messages:
        log.untrainable = ENCRYPTED
    if log.untrainable is not None:
        report.remark(place, f"{log.untrainable}; nothing of the trace is trained on")
    log.opened = len(log.messages)
    log.places = [place]


def _take_item(log: _CodexLog, item: Any, place: str, report: ImportReport, rest: Json) -> None:
    """Add a response item to the messages. `rest`: what its line holds beside it."""
    if not isinstance(item, dict):
        raise TraceError("an item that is no object")
    kind, call_id = item.get("type"), str(item.get("call_id") or item.get("id") or "")
    if kind == "message" and item.get("role") in ("user", "assistant", "developer", "system"):
        _take_message(log, item, rest)
    elif kind == "reasoning":
        if not _take_reasoning(log, item, rest):
            report.skip(place, "reasoning that is encrypted")
            return
    elif isinstance(kind, str) and kind.endswith("_output"):
        if call_id and call_id in log.answered:
            same = log.answered[call_id] == item.get("output")
            report.skip(
                place,
                "a result that stands in the log twice"
                + (("") if same else ", with other content"),
            )
            return
        log.answered[call_id] = item.get("output")
        log.messages.append(_output(item, call_id, rest))
    elif isinstance(kind, str) and kind.endswith("_call"):
        _open_answer(log).setdefault("tool_calls", []).append(
            _codex_call(item, kind, call_id, rest)
        )
    else:
        report.skip(place, f"response items of type {kind!r} are not known"[:100])
        if kind not in SILENT:
            log.untrainable = (
                f"its history is not whole: response items of type {kind!r} are not known"[:100]
            )
        return
    log.places.append(place)


def _take_message(log: _CodexLog, item: Json, rest: Json) -> None:
    kept = rest | {
        key: value for key, value in item.items() if key not in ("type", "role", "content")
    }
    if not isinstance(item.get("content"), str | list | None):
        raise TraceError("a message whose content is neither text nor a list")
    made = converted({"role": item["role"], "content": item.get("content")})
    message = made[0]
    if len(made) > 1 or message["role"] != item["role"] or message.keys() - {"role", "content"}:
        raise TraceError("a message that holds calls, results or thoughts")
    if message["content"] is None:
        message["content"] = ""
    if item["role"] != "assistant":
        log.messages.append(add_step(message, extra={"lines": [kept]} if kept else {}))
        return
    if reason := not_sampled(message, item):
        log.messages.append(add_step(marked(message, reason), extra={"lines": [kept]}))
        return
    answer = _open_answer(log)
    before = answer["content"]
    if before and isinstance(before, str) and isinstance(message["content"], str):
        answer["content"] = f"{before}\n\n{message['content']}"
    elif before:
        answer["content"] = [*_parts(before), *_parts(message["content"])]
    else:
        answer["content"] = message["content"]
    _note(log, kept)


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _take_reasoning(log: _CodexLog, item: Json, rest: Json) -> bool:
    """Add the text of a thought: its content, else its summary; return whether it has any."""
    key = next((key for key in ("content", "summary") if text_of(item.get(key))), None)
    if key is None:
        return False
    kept = rest | {name: value for name, value in item.items() if name not in ("type", key)}
    texts = (
        [text_of([part]) for part in item[key]]
        if isinstance(item[key], list)
        else [text_of(item[key])]
    )
    answer = _open_answer(log)
    answer["reasoning_content"] = answer.get("reasoning_content", "") + "\n".join(texts)
    plain = ("summary_text", "reasoning_text", "text")
    if any(
        not isinstance(p, dict) or set(p) - {"type", "text"} or p.get("type") not in plain
        for p in item[key]
    ):
        kept[key] = item[key]
    _note(log, kept)
    return True


def _codex_call(item: Json, kind: str, call_id: str, rest: Json) -> Json:
    key = next((key for key in ("arguments", "input", "action") if key in item), None)
    raw = item.get(key) if key is not None else None
    others = {
        name: value for name, value in item.items() if name not in ("type", "name", "call_id", key)
    }
    if key == "arguments" and isinstance(raw, str):
        arguments = raw
    else:
        value = raw if isinstance(raw, dict) else {} if raw is None else {"input": raw}
        arguments = json.dumps(value, ensure_ascii=False)
    function = {"name": str(item.get("name") or kind.removesuffix("_call")), "arguments": arguments}
    call: Json = {"id": call_id, "type": "function", "function": function}
    return call | ({"rest": rest | others} if rest | others else {})


def _output(item: Json, call_id: str, rest: Json) -> Json:
    output = item.get("output")
    others = {key: value for key, value in item.items() if key not in ("type", "call_id", "output")}
    inner = output
    if isinstance(output, dict) and "content" in output:
        inner = output["content"]
        others |= {key: value for key, value in output.items() if key != "content"}
    message = {"role": "tool", "tool_call_id": call_id, "content": result_content(inner)}
    return add_step(message, extra={"lines": [rest | others]} if rest | others else {})


def _open_answer(log: _CodexLog) -> Json:
    """The answer that the model is giving: reasoning, text and calls up to the next message or
    result are one."""
    last = log.messages[-1] if len(log.messages) > log.opened else {}
    if last.get("role") != "assistant" or last.get("step", {}).get("llm_call_count") == 0:
        log.messages.append({"role": "assistant", "content": None})
    return log.messages[-1]


def _note(log: _CodexLog, kept: Json) -> None:
    """Keep what the line of a part of the newest answer holds beside it."""
    if kept:
        before = log.messages[-1].get("step", {}).get("extra", {}).get("lines", [])
        log.messages[-1] = add_step(log.messages[-1], extra={"lines": [*before, kept]})


def _codex_trace(log: _CodexLog, number: int, report: ImportReport) -> Iterator[Trace]:
    places = list(log.places)
    if not any(message["role"] == "assistant" for message in log.messages):
        for place in places:
            report.skip(place, "no answer follows it")
        return
    opening = [{"role": "system", "content": log.instructions}] if log.instructions else []
    try:
        trace = new_trace(
            [*opening, *log.messages],
            session_id=log.session,
            source="codex",
            source_id=log.session,
            model=log.model,
            agent="codex",
            version=log.version,
            log=log.about or None,
            untrainable=log.untrainable,
        )
    except SHAPES as error:
        for place in places:
            report.skip(place, shape_of(error))
        return
    trace.trajectory_id = log.session if number == 1 else f"{log.session}#{number}"
    for place in places:
        report.carry(place)
    report.traces += 1
    yield trace

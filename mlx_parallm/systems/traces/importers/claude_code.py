"""Logs of Claude Code: `~/.claude/projects/…/*.jsonl`.

The format is internal to the program and changes; a line of an unknown kind is skipped and counted.
It holds neither the definitions of the tools nor a system prompt: such a trace is text to learn
from, not what the model's template would make.

What a line holds beside its message is in the step's `extra.lines`. A trace whose history is not
whole has `extra.untrainable`, which says why; `build` leaves it out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.systems.traces.importers.dialects import converted, joined, linked
from mlx_parallm.systems.traces.importers.endings import NEVER, marked, not_sampled
from mlx_parallm.systems.traces.importers.links import Forest
from mlx_parallm.systems.traces.importers.report import ImportReport, objects
from mlx_parallm.systems.traces.schema import (
    Json,
    add_step,
    as_context,
    mapping,
    which,
    without,
)
from mlx_parallm.systems.traces.session import text_digest
from mlx_parallm.systems.traces.trace import Trace, new_trace, numbered

TWICE = "a line whose uuid is twice in the log"
TWICE_OTHERWISE = "a line whose uuid is twice in the log, with other content"
BLOCK_TWICE = "a block of an answer that is twice in the log"
MOVED = "its history is not known: a message before it is twice in the log, at different places"
REPEATED = {"toolUseResult": "field 'toolUseResult': the block of the result holds it"}


@dataclass
class _Node:
    """One message; an answer's blocks are on their own lines, which share the message's id."""

    parent: str | None  # uuid of a line
    role: str
    lines: list[tuple[str, Json]]  # place and line
    blocks: list[Any]
    is_doubtful: bool = False  # its parent's uuid occurs twice
    block_texts: set[str] = field(default_factory=set)  # its blocks as text

    def __post_init__(self) -> None:
        self.block_texts |= set(map(_as_text, self.blocks))

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
        self.doubted: set[str] = set()  # uuids that are at two places
        self._first: dict[str, Json] = {}  # uuid → its first line
        # id of an answer and what a line of it follows → its node
        self._answers: dict[tuple[str, str | None], str] = {}
        self._results: dict[str, str] = {}  # parent → the node of its results

    def read(self, place: str, line: Json) -> None:
        kind, message, uuid = line.get("type"), line.get("message"), line.get("uuid")
        parent = line.get("parentUuid") if isinstance(line.get("parentUuid"), str) else None
        queued = mapping(line.get("attachment")).get("prompt")
        if kind == "attachment" and isinstance(queued, str):  # what the user wrote meanwhile
            kind, message = "user", {"role": "user", "content": queued}
            line = {**line, "type": kind, "message": message}
        if kind not in ("user", "assistant"):
            if isinstance(uuid, str) and uuid not in self.links and uuid not in self.holder:
                # after a compaction the model had a new prompt
                self.links[uuid] = None if line.get("subtype") == "compact_boundary" else parent
            self.report.skip(place, f"lines of type {kind!r} are not messages"[:100])
        elif not isinstance(message, dict) or not isinstance(uuid, str):
            self.report.skip(place, "a message without 'message' or 'uuid'")
        else:
            self.report.expect(place, [message])
            content = message.get("content")
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            if isinstance(content, list | None):
                self._add(place, line, uuid, parent, list(content or ()))
            else:
                self.report.skip(place, "a message whose content is neither text nor a list")

    def _add(
        self, place: str, line: Json, uuid: str, parent: str | None, blocks: list[Any]
    ) -> None:
        if uuid in self.holder:
            self._again(place, line, uuid, blocks)
            return
        self.links.pop(uuid, None)
        self._first[uuid] = line
        before = self.resolved(parent) or parent
        answer = str(line["message"].get("id") or "") if line["type"] == "assistant" else ""
        results = _result_ids(blocks) if line["type"] == "user" else set()
        same = self._answers.get((answer, before)) if answer else None
        if results:
            # the first result of parallel calls
            same = self._results.setdefault(before or uuid, uuid)
            if same == uuid or results & _result_ids(self.nodes[same].blocks):
                same = None
        if same is not None:
            self._join(place, line, uuid, same, blocks)
            return
        self.nodes[uuid] = _Node(
            parent, line["type"], [(place, line)], blocks, parent in self.doubted
        )
        self.holder[uuid] = uuid
        if answer:
            self._answers.setdefault((answer, before), uuid)
            self._answers[answer, uuid] = uuid

    def _join(self, place: str, line: Json, uuid: str, name: str, blocks: Sequence[Any]) -> None:
        node = self.nodes[name]
        for block in blocks:
            if (text := _as_text(block)) in node.block_texts:
                self.report.drop(place, BLOCK_TWICE, block)
            else:
                node.blocks.append(block)
                node.block_texts.add(text)
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
        """The node that a link leads to, through lines that are not messages; None: to none."""
        end = self._end(uuid)
        return self.holder.get(end) if end is not None else None

    def before(self, node: _Node) -> str | None:
        """The node before this one; a sub-agent's first message has none, since its prompt is
        its own."""
        parent = self.resolved(node.parent)
        begins = parent is not None and _is_side(node) and not _is_side(self.nodes[parent])
        return None if begins else parent

    def leads_nowhere(self, uuid: str | None) -> bool:
        """Whether a link leads out of the log, or in a circle, and not to the beginning of a
        conversation."""
        end = self._end(uuid)
        return end is not None and end not in self.holder and self.links.get(end, "") is not None

    def _end(self, uuid: str | None) -> str | None:
        """The last line that a link leads to through lines that are not messages. The way there
        gets shorter."""
        seen: list[str] = []
        at = uuid
        while at is not None and self.links.get(at) is not None and at not in self.holder:
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
    results = (b for b in blocks if mapping(b).get("type") == "tool_result")
    return {str(block.get("tool_use_id")) for block in results}


def _claude_traces(log: _ClaudeLog, path: Path, report: ImportReport) -> Iterator[Trace]:
    nodes = log.nodes
    forest = Forest({name: log.before(node) for name, node in nodes.items()})
    claimed: set[str] = set()
    for number, way in enumerate(forest.branches(), 1):
        session = str(nodes[way[-1]].line.get("sessionId") or path.stem)
        lines = [each for name in way if name not in claimed for each in nodes[name].lines]
        with report.carrying([place for place, _ in lines]) as traces:
            name = numbered(session, number)
            traces.append(_claude_trace(log, forest, way, claimed, session, name))
            for place, line in lines:
                for key in REPEATED.keys() & line.keys():
                    report.drop(place, REPEATED[key], line[key])
            claimed |= set(way)
        yield from traces
    for name in nodes.keys() - claimed if forest.beyond else ():
        for place, _ in nodes[name].lines:
            report.skip(place, "a branch of a log with too many branches")


def _is_side(node: _Node) -> bool:
    """Whether a sub-agent said it, or was told it: newer logs have a file for each sub-agent."""
    side = node.line.get("isSidechain")
    named = any(node.line.get(name) for name in ("agentId", "parent_tool_use_id"))
    return side if isinstance(side, bool) else named


def _identity(node: _Node, name: str) -> set[str]:
    """Return a name for each block of an answer that is the same in every file that holds it: a
    resumed session copies the earlier lines, and may give them new uuids."""
    answer = str(node.line["message"].get("id") or name)
    return {f"{answer} {text_digest(block).hex()}" for block in node.block_texts or {""}}


def _claude_trace(
    log: _ClaudeLog,
    forest: Forest[str],
    way: Sequence[str],
    claimed: set[str],
    session: str,
    trace_name: str,
) -> Trace:
    """The trace of a branch. The report gets the names of the answers that are sampled in it."""
    report, nodes = log.report, [log.nodes[name] for name in way]
    messages: list[Json] = []
    sampled: set[str] = set()
    for name, node in zip(way, nodes, strict=True):
        answer = _identity(node, name) if node.role == "assistant" else set()
        copied = name in claimed or bool(answer and answer <= report.sampled | sampled)
        sampled |= answer
        messages += _claude_messages(node, report, copied=copied, is_new=name not in claimed)
    lost = None
    if way[0] in forest.circles:
        lost = "its history is not whole: the links of its messages go in a circle"
    elif log.leads_nowhere(nodes[0].parent):
        lost = "its history is not whole: the log does not hold the message before its first one"
    elif any(node.is_doubtful for node in nodes):
        lost = MOVED
    if lost is not None:
        report.remark(nodes[0].lines[0][0], f"{lost}; nothing of the trace is trained on")
    about = nodes[0].line
    models = (node.line["message"].get("model") for node in nodes)
    named = (name for name in models if isinstance(name, str) and not name.startswith("<"))
    trace = new_trace(
        linked(messages),
        session_id=session,
        name=trace_name,
        source="claude-code",
        source_id=session,
        model=next(named, None),
        agent="claude-code",
        version=str(about.get("version") or "unknown"),
        sidechain=_is_side(nodes[-1]) or None,
        untrainable=lost,
    )
    report.samples(trace, sampled)
    return trace


def _rest(placed: tuple[str, Json]) -> Json:
    """Return the fields of a line beside its content."""
    _, line = placed
    message = without(line["message"], "content")
    if message.get("role") == line["type"]:
        del message["role"]
    return without(line, "message", *REPEATED) | ({"message": message} if message else {})


def _claude_messages(
    node: _Node, report: ImportReport, *, copied: bool, is_new: bool
) -> list[Json]:
    """The messages of a node; what its lines hold beside their content is in the step of the
    first one."""
    place, line = node.lines[0]
    parts = converted({"role": node.role, "content": node.blocks or ""})
    for message in parts:
        if isinstance(message.get("content"), list):
            message["content"] = joined(message["content"])
    last = parts[-1]
    if len(parts) > 1 and node.role == last["role"] == "user" and not last.get("content"):
        del parts[-1]
    parts[0] = add_step(parts[0], extra={"lines": list(map(_rest, node.lines))})
    about = [record for _, each in node.lines for record in (each, each["message"])]
    timestamp = {"timestamp": line["timestamp"]} if which(line, ["timestamp"], str) else {}
    for at, message in enumerate(parts):
        if message["role"] != "tool":
            message = add_step(message, **timestamp)
        if message["role"] == "assistant":
            if (reason := not_sampled(message, *about)) is not None:
                message = marked(message, reason)
                if is_new:
                    report.remark(place, NEVER.format(reason))
            elif copied:
                message = as_context(message)
        parts[at] = message
    return parts

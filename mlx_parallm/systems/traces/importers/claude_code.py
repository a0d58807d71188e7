"""Logs of Claude Code: `~/.claude/projects/…/*.jsonl`.

The format is internal to the program and changes; a line of an unknown kind is skipped and counted.
It holds neither the definitions of the tools nor a system prompt: such a trace is text to learn
from, not what the model's template would make.

What a line holds beside its message is in the step's `extra.lines`. A trace whose history is not
whole has `extra.untrainable`, which says why; `build` leaves it out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.systems.traces.importers.dialects import converted, joined, linked
from mlx_parallm.systems.traces.importers.endings import NEVER, marked, not_sampled
from mlx_parallm.systems.traces.importers.links import Forest
from mlx_parallm.systems.traces.importers.report import SHAPES, ImportReport, objects, shape_of
from mlx_parallm.systems.traces.importers.sessions import owned_answers
from mlx_parallm.systems.traces.schema import Json, add_step, as_context, without
from mlx_parallm.systems.traces.session import text_digest
from mlx_parallm.systems.traces.trace import Trace, new_trace

TWICE = "a line whose uuid is twice in the log"
TWICE_OTHERWISE = "a line whose uuid is twice in the log, with other content"
BLOCK_TWICE = "a block of an answer that is twice in the log"
REPEATED = {"toolUseResult": "field 'toolUseResult': the block of the result holds it"}


@dataclass
class _Node:
    """One message; an answer's blocks are on their own lines, which share the message's id."""

    parent: str | None  # uuid of a line
    role: str
    lines: list[tuple[str, Json]]  # place and line
    blocks: list[Any]
    is_doubtful: bool = False  # it follows a uuid that is at two places
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
        self.doubted: set[str] = set()  # uuids that are at two places
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
            self.report.skip(place, f"lines of type {kind!r} are not messages"[:100])
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
            str(line["message"]["id"])
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
        """The node that a link leads to, through lines that are not messages; None: to none."""
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
        """The last line that a link leads to through lines that are not messages. The way there
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
            trace, sampled = _claude_trace(log, forest, way, claimed, session, report)
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
        report.sampled |= owned_answers(trace, sampled)
        yield trace
    for name in nodes.keys() - claimed if forest.beyond else ():
        for place, _ in nodes[name].lines:
            report.skip(place, "a branch of a log with too many branches")


def _is_side(node: _Node) -> bool:
    """Whether a sub-agent said it, or was told it: newer logs have a file for each sub-agent."""
    side = node.line.get("isSidechain")
    return side if isinstance(side, bool) else bool(node.line.get("agentId"))


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
    report: ImportReport,
) -> tuple[Trace, set[str]]:
    """The trace of a branch, and the names of the answers that are sampled in it."""
    nodes = [log.nodes[name] for name in way]
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
        lost = (
            "its history is not known: a message before it is twice in the log, at different places"
        )
    if lost is not None:
        report.remark(nodes[0].lines[0][0], f"{lost}; nothing of the trace is trained on")
    about = nodes[0].line
    models = (node.line["message"].get("model") for node in nodes)
    model = next(
        (name for name in models if isinstance(name, str) and not name.startswith("<")), None
    )
    trace = new_trace(
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
    return trace, sampled


def _claude_messages(
    node: _Node, report: ImportReport, *, copied: bool, is_new: bool
) -> list[Json]:
    """The messages of a node; what its lines hold beside their content is in the step of the
    first one."""
    place, line = node.lines[0]
    kept = []
    for _, each in node.lines:
        rest = without(each, "message", *REPEATED)
        message = without(each["message"], "content")
        if message.get("role") == node.role:
            del message["role"]
        kept.append(rest | ({"message": message} if message else {}))
    content = node.blocks
    made = converted({"role": node.role, "content": content if content else ""})
    made = [
        {**m, "content": joined(m["content"])} if isinstance(m.get("content"), list) else m
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
                message = as_context(message)
        answers.append(message)
    return answers

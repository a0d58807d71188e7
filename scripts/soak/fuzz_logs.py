"""Mutated logs of agents through every importer: each import ends, and nothing of a log vanishes.

    .venv/bin/python -m scripts.soak.fuzz_logs --logs 10000 [--formats claude-code codex] [--seed 0]

Each log is a good one with one to four mutations: lines and keys that go, come twice, change places or names, values of
other types, links in a circle, roles and parts of unknown types, lines that break off, deep nesting, numbers that are
none. For each must hold

    it ends within `SECONDS` of processor time, and raises at most a TraceError of the file
    lines    = used    + skipped with a reason
    messages = carried + left out with a reason
    every text of the log (each has a mark of its own) is in a trace, or in what the report left out
    traces   = in rows + left out with a reason, and no row learns an empty answer or a program's error message
"""

import argparse
import copy
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.traces.builders import DatasetOptions, build_dataset
from mlx_parallm.traces.importers.report import UNACCOUNTED, ImportReport, entries
from mlx_parallm.traces.privacy import redact_trace, secret_finder
from mlx_parallm.traces.reading import read_traces
from mlx_parallm.traces.schema import Trace, dump_line, parse_trace

SECONDS = 5.0  # of processor time, for one log
MOST_GROWTH_MB = 400
MARK = re.compile(r"‹\d+›")
FAILED = "API Error: Request was aborted."
Json = dict[str, Any]
Mark = Callable[[str], str]


@dataclass
class LeftOut(ImportReport):
    """A report that keeps what was left out."""

    values: list[Any] = field(default_factory=list)

    def _noted(self, place: str, reason: str, value: Any) -> None:
        super()._noted(place, reason, value)
        self.values.append(value)


# ---------------------------------------------------------------------- good logs


def claude_code(mark: Mark) -> list[Json]:
    def line(uuid: str, parent: str | None, kind: str, content: Any, answer: str | None = None, **more: Any) -> Json:
        about: Json = {"id": answer, "model": "claude-x", "stop_reason": "end_turn"} if answer else {}
        base: Json = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "S", "version": "2.0.1"}
        message = {"role": kind, "content": content} | about
        return base | {"timestamp": "2026-11-22T10:00:00Z", "cwd": mark("/tmp"), "message": message} | more

    use = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": mark("ls")}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": mark("a.py")}]}
    image = {"type": "image", "source": {"type": "base64", "data": mark("AAAA")}}
    return [
        {"type": "summary", "summary": mark("files"), "leafUuid": "a4"},
        line("u1", None, "user", mark("list files")),
        line("a1", "u1", "assistant", [{"type": "thinking", "thinking": mark("hm"), "signature": mark("s")}], "m1"),
        line("a2", "a1", "assistant", [use], "m1"),
        {"type": "system", "uuid": "h1", "parentUuid": "a2", "content": mark("hook")},
        line(
            "u2", "h1", "user", [result, {"type": "text", "text": mark("go on")}], toolUseResult={"out": mark("a.py")}
        ),
        {"type": "progress", "uuid": "p1", "parentUuid": "u2", "data": mark("…")},
        line("a3", "p1", "assistant", [{"type": "text", "text": mark("One file.")}], "m2"),
        line("e1", "a3", "assistant", [{"type": "text", "text": FAILED}], isApiErrorMessage=True),
        line("u3", "e1", "user", [{"type": "text", "text": mark("and this?")}, image]),
        line("a4", "u3", "assistant", [{"type": "text", "text": mark("A cat.")}], "m3"),
        line("u4", "a3", "user", mark("thanks")),
        line("a5", "u4", "assistant", mark("Welcome."), "m4"),
        line("s1", None, "user", mark("sub task"), isSidechain=True),
        line("s2", "s1", "assistant", [{"type": "text", "text": mark("Sub.")}], "m5", isSidechain=True),
    ]


def codex(mark: Mark) -> list[Json]:
    def line(kind: str, **payload: Any) -> Json:
        return {"timestamp": "2026-11-22T10:00:00Z", "type": kind, "payload": payload}

    def item(kind: str, **fields: Any) -> Json:
        return line("response_item", **{"type": kind, **fields})

    def say(role: str, text: str) -> Json:
        part = {"type": "output_text" if role == "assistant" else "input_text", "text": mark(text)}
        return {"role": role, "content": [part]}

    history = [{"type": "message", **say("user", "list")}, {"type": "message", **say("assistant", "One.")}]
    return [
        line("session_meta", id="X", cli_version="0.65.0", instructions=mark("Be brief."), cwd=mark("/tmp")),
        line("turn_context", model="gpt-x", summary=mark("auto")),
        item("message", **say("user", "list")),
        line("event_msg", type="user_message", message=mark("list")),
        item("reasoning", summary=[{"type": "summary_text", "text": mark("look")}], encrypted_content=mark("…")),
        item("function_call", name="shell", arguments=json.dumps({"cmd": mark("ls")}), call_id="c1"),
        item("function_call_output", call_id="c1", output={"content": mark("a.py"), "success": True}),
        item("custom_tool_call", name="apply_patch", input=mark("***"), call_id="c2"),
        item("custom_tool_call_output", call_id="c2", output=[{"type": "input_text", "text": mark("done")}]),
        item("web_search_call", action={"type": "search", "query": mark("cats")}, status="completed"),
        item("message", **say("assistant", "One file.")),
        line("compacted", message="", replacement_history=history),
        item("message", **say("user", "go on")),
        item("message", **say("assistant", "Going on.")),
    ]


def openai(mark: Mark) -> list[Json]:
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": json.dumps({"q": mark("ls")})}}
    tools = [{"type": "function", "function": {"name": "run", "description": mark("runs")}}]
    chat = [
        {"role": "system", "content": mark("Be brief.")},
        {"role": "user", "content": [{"type": "text", "text": mark("q")}], "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": mark("a.py")},
        {"role": "assistant", "content": mark("One.")},
    ]
    older = [
        {"role": "user", "content": mark("q")},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": mark("{}")}},
        {"role": "function", "name": "f", "content": mark("3")},
        {"role": "assistant", "content": mark("Three.")},
    ]
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": mark("weather?"), "cache_control": {"type": mark("e")}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "w", "input": {"at": mark("Köln")}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": mark("Sunny.")}]},
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": mark("x")}, {"type": "text", "text": "y"}],
        },
    ]
    gemini = [
        {"role": "user", "parts": [{"text": mark("q")}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": mark("1")}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"b": mark("2")}}}]},
        {"role": "model", "parts": [{"text": mark("Two."), "thoughtSignature": mark("s")}]},
    ]
    spoken = [
        {"from": "system", "value": mark("Be brief.")},
        {"from": "human", "value": mark("q")},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"a": mark("1")}})},
        {"from": "observation", "value": mark("2")},
        {"from": "gpt", "value": mark("Two.")},
    ]
    answer = {"choices": [{"message": {"role": "assistant", "content": mark("hi")}, "finish_reason": "stop"}]}
    return [
        {"messages": chat, "tools": tools, "topic": mark("files")},
        {"messages": older, "functions": [{"name": "f", "description": mark("d")}]},
        {
            "system": mark("Be kind."),
            "messages": blocks,
            "tools": [{"name": "w", "input_schema": {"title": mark("t")}}],
        },
        {"contents": gemini, "systemInstruction": {"parts": [{"text": mark("Be brief.")}]}},
        {"conversations": spoken, "tools": json.dumps([{"name": "f", "description": mark("d")}])},
        {"request": {"messages": [{"role": "user", "content": mark("q")}], "model": mark("m")}, "response": answer},
        {"messages": [{"role": "user", "content": mark("q")}, {"role": "assistant", "content": FAILED}], "id": "e"},
    ]


def atif(mark: Mark) -> list[Json]:
    call = {"tool_call_id": "c", "function_name": "f", "arguments": {"a": mark("1")}}
    steps = [
        {"step_id": 1, "source": "user", "message": mark("q")},
        {"step_id": 2, "source": "agent", "message": mark("a"), "reasoning_content": mark("hm"), "tool_calls": [call]},
        {"step_id": 3, "source": "agent", "message": mark("end"), "extra": {"note": mark("n")}},
    ]
    steps[1]["observation"] = {"results": [{"source_call_id": "c", "content": mark("2")}]}
    about = {"name": "a", "version": "1", "tool_definitions": [{"type": "function", "function": {"name": "f"}}]}
    extra = {
        "rewards": {"reward": {"score": 1.0, "weight": 1.0}},
        "labels": [{"name": "x", "value": 1, "by": "u", "at": 1}],
    }
    whole = {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": about, "steps": steps, "notes": mark("note")}
    inner = {**copy.deepcopy(whole), "session_id": "inner", "notes": mark("inner")}
    return [whole | {"extra": extra}, {**copy.deepcopy(whole), "subagent_trajectories": [inner]}]


def otlp(mark: Mark) -> list[Json]:
    def span(number: int, values: Json, *events: Json) -> Json:
        listed = [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]
        about = {"traceId": "T", "spanId": f"s{number}", "startTimeUnixNano": str(number * 10**9), "name": mark("chat")}
        return about | {"attributes": listed, "events": list(events)}

    ask = {"role": "user", "parts": [{"type": "text", "content": mark("ls?")}]}
    call = {"type": "tool_call", "id": "c1", "name": "run", "arguments": {"cmd": mark("ls")}}
    calls = {"role": "assistant", "parts": [{"type": "reasoning", "content": mark("hm")}, call]}
    response = {"type": "tool_call_response", "id": "c1", "response": mark("a.py")}
    result = {"role": "tool", "parts": [response, {"type": "text", "content": mark("and?")}]}
    last = {"role": "assistant", "parts": [{"type": "text", "content": mark("One.")}], "finish_reason": "stop"}
    blob = {"role": "user", "parts": [{"type": "blob", "mime_type": "image/png", "data": mark("AA")}]}
    common = {"gen_ai.operation.name": "chat", "gen_ai.conversation.id": "C", "gen_ai.request.model": "m"}

    def messages(asked: list[Json], *answered: Json) -> Json:
        both = {"gen_ai.input.messages": json.dumps(asked), "gen_ai.output.messages": json.dumps(answered)}
        return common | both | {"server.address": mark("host")}

    event = {"key": "content", "value": {"stringValue": mark("old q")}}
    choice = {"key": "message", "value": {"stringValue": json.dumps({"content": mark("old a")})}}
    flat = {
        "openinference.span.kind": "LLM",
        "session.id": "P",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.text": mark("flat?"),
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": mark("Flat."),
    }
    older = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": mark("q"),
        "gen_ai.completion.0.content": mark("a"),
    }
    spans = [
        span(1, messages([ask], calls)),
        span(2, {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": mark("run")}),
        span(3, messages([ask, calls, result], last, {**last, "parts": [{"type": "text", "content": mark("Other.")}]})),
        span(4, messages([blob], last) | {"gen_ai.conversation.id": "D"}),
        span(5, flat),
        span(6, older | {"session.id": "Q"}),
        span(
            7,
            common | {"gen_ai.conversation.id": "E"},
            {"name": "gen_ai.user.message", "attributes": [event]},
            {"name": "gen_ai.choice", "attributes": [choice]},
            {"name": "exception", "attributes": [{"key": "exception.message", "value": {"stringValue": mark("e")}}]},
        ),
    ]
    resource_of = {"attributes": [{"key": "service.name", "value": {"stringValue": mark("agent")}}]}
    return [
        {"resourceSpans": [{"resource": resource_of, "scopeSpans": [{"spans": part}]}]}
        for part in (spans[:4], spans[4:])
    ]


def verifiers(mark: Mark) -> list[Json]:
    nodes = [
        {
            "parent": None,
            "message": {"role": "user", "content": mark("q")},
            "token_ids": [1, 2],
            "mask": [False, False],
        },
        {
            "parent": 0,
            "message": {"role": "assistant", "content": mark("a"), "provider_state": {"x": mark("s")}},
            "sampled": True,
            "token_ids": [3, 4],
            "mask": [False, True],
            "logprobs": [-0.5],
        },
        {"parent": 1, "message": {"role": "user", "content": mark("r")}},
        {"parent": 2, "message": {"role": "assistant", "content": mark("b")}, "sampled": True, "note": mark("n")},
        {"parent": 1, "message": {"role": "user", "content": mark("s")}},
        {"parent": 4, "message": {"role": "assistant", "content": mark("c")}, "sampled": True},
    ]
    record = {"id": "E", "nodes": nodes, "rewards": {"right": {"score": 1.0}}, "task": {"key": "k", "text": mark("t")}}
    row = {
        "prompt": [{"role": "user", "content": mark("q")}],
        "completion": [{"role": "assistant", "content": mark("a")}],
        "reward": 0.5,
        "answer": mark("a"),
    }
    return [{"id": "e", "traces": [record], "env": mark("env")}, row]


def art(mark: Mark) -> list[Json]:
    choice = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": mark("a")}}
    asked = {"role": "user", "content": mark("q")}
    one: Json = {"messages_and_choices": [asked, choice], "reward": 1.0, "metadata": {"m": mark("m")}}
    other = {**one, "messages_and_choices": [asked, {**choice, "message": {"role": "assistant", "content": mark("b")}}]}
    return [{"trajectories": [one, other], "note": mark("n")}, {**one, "additional_histories": [{"x": mark("h")}]}]


def recorded(mark: Mark) -> list[Json]:
    def turn(name: str, parent: str | None, asked: str, answer: str, **more: Any) -> Json:
        both = {"messages": [{"role": "user", "content": asked}], "response": {"role": "assistant", "content": answer}}
        return (
            {"type": "turn", "id": name, "parent": parent, "at": 1.0, "status": "complete", "model": "m"} | both | more
        )

    tokens = {"shared": 0, "prompt": [1, 2], "completion": [3], "logprobs": [-0.5], "versions": [[0, 0, 1]]}
    tokens |= {"temperature": 1.0, "policy": True}
    return [
        turn("t1", None, mark("q"), mark("a"), response_id="r1", tokens=tokens),
        turn("t2", "t1", mark("r"), mark("b")),
        turn("t3", "t1", mark("s"), mark("c")),
        {"type": "label", "name": "feedback", "value": 1, "by": "u", "at": 2.0, "explanation": mark("good")},
    ]


GOOD: dict[str, Callable[[Mark], list[Json]]] = {
    "claude-code": claude_code,
    "codex": codex,
    "openai": openai,
    "atif": atif,
    "otlp": otlp,
    "verifiers": verifiers,
    "art": art,
    "recorded": recorded,
}


# ---------------------------------------------------------------------- mutations


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested JSON."""
    found, open_ = list[tuple[Any, Any]](), [value]
    while open_:
        at = open_.pop()
        items = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        for key, inner in items:
            found.append((at, key))
            open_.append(inner)
    return found


LINKS = ("parentUuid", "parent", "uuid", "id", "logicalParentUuid", "spanId", "call_id", "tool_use_id", "tool_call_id")
KINDS = ("role", "type", "from", "source", "name", "subtype", "finish_reason", "stop_reason", "status")


def mutate(lines: list[Any], generator: random.Random, mark: Mark) -> list[Any]:
    """Change a log once, in place or as a new list."""

    def deep(levels: int) -> Any:
        value: Any = mark("deep")
        for _ in range(levels):
            value = [value] if generator.random() < 0.5 else {"k": value}
        return value

    def other_value() -> Any:
        made: list[Callable[[], Any]] = [
            *(lambda v=v: v for v in (None, 5, -1.5, True, "", 10**40, float("nan"), 1e999)),
            list,
            dict,
            lambda: deep(generator.choice((3, 60, 300))),
            lambda: mark("\ud800"),
            lambda: mark("x" * 20_000),
            lambda: [mark("listed"), {"type": "alien", "body": mark("b")}],
        ]
        return generator.choice(made)()

    if not lines:
        return [other_value()]
    at, kind = generator.randrange(len(lines)), generator.randrange(12)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(generator.randrange(len(lines) + 1), copy.deepcopy(lines[at]))
    elif kind == 2:
        to = generator.randrange(len(lines))
        lines[at], lines[to] = lines[to], lines[at]
    elif kind == 3:
        lines.insert(at, other_value())
    else:
        found = places(lines[at])
        chosen = [(c, k) for c, k in found if kind not in (9, 10) or k in (LINKS if kind == 9 else KINDS)]
        if not chosen:
            return lines
        container, key = generator.choice(chosen)
        if kind == 4:
            del container[key]
        elif kind == 5 and isinstance(container, dict):
            container[generator.choice(("foreign", "text", "content", "step", "id", "extra"))] = container.pop(key)
        elif kind == 6:
            container[key] = other_value()
        elif kind == 7:
            container[key] = [container[key]]
        elif kind == 8 and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif kind == 9:
            ids = [c[k] for line in lines for c, k in places(line) if k in LINKS]
            container[key] = generator.choice(ids) if ids else None
        elif kind == 10:
            container[key] = generator.choice(
                ("alien", "assistant", "user", "system", "tool", "tool_result", "error", "")
            )
        else:
            inner = {generator.choice(("foreign", "error", "text", "audio")): mark("new")}
            container[key] = inner if not isinstance(container[key], dict) else {**container[key], **inner}
    return lines


def texts_of(lines: list[Any], generator: random.Random) -> str:
    """The lines as a file; now and then one breaks off, or has more than one."""
    texts = [json.dumps(line) for line in lines]
    if texts and generator.random() < 0.15:
        at = generator.randrange(len(texts))
        cut = generator.randrange(len(texts[at]) + 1)
        texts[at] = generator.choice(
            (texts[at][:cut], texts[at] + texts[at], "\ufeff" + texts[at], "null", texts[at] + "}")
        )
    return "\n".join(texts) + "\n"


# ---------------------------------------------------------------------- the check


@dataclass
class Counts:
    logs: int = 0
    refused: int = 0
    lines: int = 0
    used: int = 0
    skipped: int = 0
    messages: int = 0
    carried: int = 0
    left_out: int = 0
    details: int = 0
    traces: int = 0
    rows: int = 0
    marks: int = 0
    slowest: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def check(path: Path, source: str, counts: Counts, *, redact: bool) -> list[str]:
    """Import one log; return what does not hold."""
    report, faults = LeftOut(), list[str]()
    try:
        traces = list(read_traces(path, report, source=source))
    except TraceError:
        counts.refused += 1
        return []
    skipped, left = report.skipped.total(), report.left_out.total()
    if report.lines != report.used + skipped or report.messages != report.carried + left:
        faults.append("the account of lines or messages does not add up")
    if UNACCOUNTED in report.skipped or UNACCOUNTED in report.left_out:
        faults.append("a line or message that no reason accounts for")
    if report.traces != len(traces):
        faults.append("the number of traces is wrong")
    held = "".join(json.dumps(trace.to_json(), ensure_ascii=False) for trace in traces)
    seen = set(MARK.findall(held + str([value for value in report.values if value is not None])))
    wanted = {mark for _, value in entries(path) for mark in marks_of(value, source)}
    if vanished := wanted - seen:
        faults.append(f"{len(vanished)} texts vanished: {sorted(vanished)[:3]}")
    for trace in traces:
        if parse_trace(json.loads(dump_line(trace.to_json()))).to_json() != trace.to_json():
            faults.append("a trace does not come back from the disk as it went")
    if redact:
        traces = [redact_trace(trace, secret_finder())[0] for trace in traces]
    counts.rows += _check_rows(traces, faults)
    counts.lines, counts.used, counts.skipped = (
        counts.lines + report.lines,
        counts.used + report.used,
        counts.skipped + skipped,
    )
    counts.messages, counts.carried = counts.messages + report.messages, counts.carried + report.carried
    counts.left_out, counts.details = counts.left_out + left, counts.details + report.details.total()
    counts.traces, counts.marks = counts.traces + len(traces), counts.marks + len(wanted)
    return faults


def marks_of(value: Any, source: str) -> set[str]:
    """The marks of a line. Ids of recorded turns are this package's own, and are in no trace."""
    if isinstance(value, ValueError):
        return set()
    if source == "recorded" and isinstance(value, dict):
        value = {key: item for key, item in value.items() if key not in ("id", "parent", "key")}
    return set(MARK.findall(json.dumps(value, ensure_ascii=False)))


def _check_rows(traces: list[Trace], faults: list[str]) -> int:
    """Build rows; each trace is in one or counted, which `build_dataset` asserts."""
    try:
        rows = build_dataset(traces, DatasetOptions("sft", test_fraction=0.0, near_duplicates=1.0)).train
    except TraceError:
        return 0
    for row in rows:
        learned = [m for m in row["messages"] if m["role"] == "assistant" and "weight" not in m]
        if any(not m["content"].strip() and not m.get("tool_calls") for m in learned):
            faults.append("an empty answer is learned")
        if any(m["content"].startswith(FAILED) for m in learned):
            faults.append("a program's error message is learned")
    return len(rows)


def fuzz(source: str, logs: int, seed: int, directory: Path) -> Counts:
    """Check that many mutated logs of a format; faults are counted, the first of each kind keeps its log in
    `directory`."""
    counts, number = Counts(), [0]

    def mark(text: str) -> str:
        number[0] += 1
        return f"{text} ‹{number[0]}›" if text != "{}" else json.dumps({"m": f"‹{number[0]}›"}, ensure_ascii=False)

    folder = directory / "sessions"
    folder.mkdir(exist_ok=True)
    path = folder / f"{source}.jsonl"
    for index in range(logs):
        generator = random.Random(f"{source} {seed} {index}")
        number[0] = 0
        lines: list[Any] = GOOD[source](mark)
        for _ in range(generator.randint(0 if index == 0 else 1, 4)):
            lines = mutate(lines, generator, mark)
        path.write_text(texts_of(lines, generator), encoding="utf-8")
        began = time.process_time()
        try:
            with bounded(SECONDS):
                faults = check(path, source, counts, redact=index % 50 == 0)
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"[:200]]
        counts.slowest = max(counts.slowest, time.process_time() - began)
        counts.logs += 1
        for fault in faults:
            kind = re.sub(r"\d+ texts vanished.*", "texts vanished", fault)
            if kind not in counts.faults:
                (directory / f"{source}-{index}.jsonl").write_bytes(path.read_bytes())
            counts.faults[kind] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=int, default=1000, help="mutated logs of each format (default 1000)")
    parser.add_argument("--formats", nargs="+", choices=sorted(GOOD), default=list(GOOD))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory for logs that show a fault")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for source in args.formats:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            counts = fuzz(source, args.logs, args.seed, directory)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            if grown > MOST_GROWTH_MB:
                counts.faults[f"memory grew by {grown:.0f} MB"] += 1
            sys.stdout.write(
                f"{source}: {counts.logs} logs, {counts.refused} refused as files; lines {counts.lines} = {counts.used}"
                f" used + {counts.skipped} skipped; messages {counts.messages} = {counts.carried} carried +"
                f" {counts.left_out} left out; {counts.details} parts or fields left out; {counts.marks} marked texts;"
                f" {counts.traces} traces, {counts.rows} rows; slowest {counts.slowest:.2f} s, memory +{grown:.0f} MB;"
                f" faults: {dict(counts.faults) or 'none'}\n"
            )
            sys.stdout.flush()
            bad += counts.faults.total()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

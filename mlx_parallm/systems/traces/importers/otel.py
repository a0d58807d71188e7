"""OpenTelemetry spans as OTLP/JSON: the `gen_ai.*` conventions, their older forms, and
OpenInference's keys (Phoenix).

Each span of a model call repeats the conversation before it. Calls of one conversation are joined
as the recorder joins
them: a call whose messages begin with an earlier one's messages and answer continues with it,
others branch. A span's further attributes and events, its resource and its scope are in
`extra.span` of the answer's step.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.importers.dialects import chat_messages, linked, tool_definitions
from mlx_parallm.systems.traces.importers.endings import marked, not_sampled
from mlx_parallm.systems.traces.importers.report import (
    SHAPES,
    ImportReport,
    entries,
    session_traces,
    shape_of,
)
from mlx_parallm.systems.traces.schema import (
    Json,
    Label,
    add_step,
    chat_call,
    mapping,
    parse_json,
    present,
    read_jsonl,
    text_or_none,
    which,
    without,
)
from mlx_parallm.systems.traces.session import Session, compared_text
from mlx_parallm.systems.traces.trace import Trace

_REASONS = "gen_ai.response.finish_reasons"
_MODELS = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")
MODEL_CALLS = ("chat", "generate_content", "text_completion")
EVALUATION = "gen_ai.evaluation"
DETAILS = "gen_ai.client.inference.operation.details"
REPEATED = "a repeated message that lacks reasoning or fields of its first one, or has others"
_ROLE_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_ROLE_EVENTS["gen_ai.choice"] = "assistant"
_CONTENT_EVENTS = {
    "gen_ai.content.prompt": "gen_ai.prompt",
    "gen_ai.content.completion": "gen_ai.completion",
}
_FLAT = {
    "input": re.compile(r"llm\.input_messages\.(\d+)\.message\.(.+)|gen_ai\.prompt\.(\d+)\.(.+)"),
    "output": re.compile(
        r"llm\.output_messages\.(\d+)\.message\.(.+)|gen_ai\.completion\.(\d+)\.(.+)"
    ),
    "tools": re.compile(
        r"llm\.tools\.(\d+)\.tool\.(json_schema)|llm\.request\.functions\.(\d+)\.(.+)"
    ),
}
"""Keys of attributes that number the parts of a list."""
_USAGE = {
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.prompt_tokens": "prompt_tokens",
    "llm.token_count.prompt": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.completion_tokens": "completion_tokens",
    "llm.token_count.completion": "completion_tokens",
}


@dataclass
class _ModelSpan:
    """One span: the messages that the model read, and each of its answers, as messages of which
    the last is the assistant's. `turn`: further fields of the turn that an answer is."""

    place: str
    prompt: list[Json]
    answers: list[list[Json]]
    finish_reasons: list[Any]
    turn: Json
    rest: Json
    labels: list[Label]


def otlp(path: Path, report: ImportReport) -> Iterator[Trace]:
    """Files of `resourceSpans`, one object a line or one in all. A span is what the report
    counts as a line."""
    conversations: dict[tuple[str, str | None], list[_ModelSpan]] = defaultdict(list)
    seen: dict[tuple[str, str], Json] = {}
    answered: dict[str, _ModelSpan] = {}
    agents = _Agents()
    calls: list[tuple[str, Json, _ModelSpan]] = []
    for place, span, around in _spans(path, report):
        span_key = _ids(span, "spanId")
        if span.get("spanId") is not None and span_key in seen:
            same = "" if seen[span_key] == span else ", with other content"
            report.skip(place, f"a span that is twice in the log{same}")
            continue
        seen[span_key] = span
        try:
            values = _attributes(span.get("attributes"))
            agents.add(span, values)
            name = _first(values, "gen_ai.conversation.id", "session.id") or span.get("traceId")
            call = _call(place, span, values, around, report)
        except SHAPES as error:
            report.skip(place, shape_of(error))
            continue
        if call is None:
            operation = _first(values, "gen_ai.operation.name", "openinference.span.kind")
            reason = f"spans of operation {operation!r} are not model calls with content"
            report.skip(place, reason[:200])
            continue
        calls.append((str(name), span, call))
    for name, span, call in calls:
        first = answered.setdefault(call.turn["response_id"] or call.place, call)
        if first is not call and _says_the_same(first, call):
            report.skip(call.place, "a model call whose answer's id is twice in the log")
            continue
        conversations[name, agents.subagent_of(span)].append(call)
    for (name, subagent), listed in conversations.items():
        for trace in _joined(name, sorted(listed, key=lambda call: call.turn["at"]), report):
            if subagent is not None:
                trace.note(sidechain=True)
            yield trace


def _says_the_same(one: _ModelSpan, other: _ModelSpan) -> bool:
    first, second = ([compared_text(a[-1]) for a in call.answers] for call in (one, other))
    return first == second


class _Agents:
    """Which span belongs to which agent: an agent that another one's span encloses is its
    sub-agent. Instrumentations may put several spans of one name around a run: they are one."""

    def __init__(self) -> None:
        # the id of a span, with its trace's → its parent's id, and the agent that it is the run of
        self._spans: dict[tuple[str, str], tuple[str, str | None]] = {}

    def add(self, span: Json, values: Json) -> None:
        is_agent = (
            values.get("gen_ai.operation.name") == "invoke_agent"
            or values.get("openinference.span.kind") == "AGENT"
        )
        name = _first(values, "gen_ai.agent.name", "agent.name", "gen_ai.agent.id")
        agent = str(name or span.get("name")) if is_agent else None
        self._spans[_ids(span, "spanId")] = _ids(span, "parentSpanId")[1], agent

    def subagent_of(self, span: Json) -> str | None:
        """Return the innermost agent's span that encloses a call, where another agent's encloses
        it; None where there is one agent, or none."""
        trace, at = _ids(span, "parentSpanId")
        inner: tuple[str, str] | None = None  # span and name of the innermost agent
        walked: set[str] = set()
        while at and at not in walked and (trace, at) in self._spans:
            walked.add(at)
            parent, agent = self._spans[trace, at]
            if agent is not None:
                if inner is not None and inner[1] != agent:
                    return inner[0]
                inner = at, agent
            at = parent
        return None


def _ids(span: Json, key: str) -> tuple[str, str]:
    return str(span.get("traceId")), str(span.get(key) or "")


def _spans(path: Path, report: ImportReport) -> Iterator[tuple[str, Json, Json]]:
    """Yield place, span, and what is around it: resource, scope, and keys of theirs that are not
    known."""
    numbers = count(1)

    def listed(key: str, kind: str, value: Any, *around: Any) -> list[Any]:
        """The list of that name; a value without it is left out."""
        if not (inner := _inner(value, key)):
            lost, at = [value, *around] if around else value, f"{place} {kind} {next(numbers)}"
            report.leave_out(at, lost, f"a {kind} without {key!r}")
        return inner

    for place, document in entries(path):
        resources = _inner(document, "resourceSpans")
        if not resources:
            reason = "not JSON" if isinstance(document, ValueError) else "no 'resourceSpans'"
            report.leave_out(place, document, reason)
            continue
        for key in document.keys() - {"resourceSpans"}:
            report.drop(place, f"field {key!r} beside 'resourceSpans'"[:100], document[key])
        for resource in resources:
            for scope in listed("scopeSpans", "resource", resource):
                for span in listed("spans", "scope", scope, resource):
                    at = f"{path.name} span {next(numbers)}"
                    around = without(resource, "scopeSpans") | without(scope, "spans")
                    if isinstance(span, dict):
                        at = f"{at} {span.get('spanId')}"
                        report.read(at, [span, around])
                        yield at, span, around
                    else:
                        report.leave_out(at, [span, around], "a span that is not an object")


def _inner(value: Any, key: str) -> list[Any]:
    """The list of that name; empty where it is none."""
    inner = mapping(value).get(key)
    return inner if isinstance(inner, list) else []


def _first(values: Mapping[str, Any], *keys: str) -> Any:
    """The first value that is there."""
    return next((values[key] for key in keys if values.get(key)), None)


def _attributes(listed: Any) -> Json:
    """Attributes by their keys. Raises TraceError: an entry is none, or a key is there
    twice."""
    values: Json = {}
    for entry in listed or ():
        if not isinstance(mapping(entry).get("key"), str) or set(entry) - {"key", "value"}:
            raise TraceError("an attribute that is not {key, value}")
        if entry["key"] in values:
            raise TraceError("an attribute that appears twice")
        values[entry["key"]] = _value(entry.get("value"))
    return values


def _value(value: Any) -> Any:
    """A value of OTLP/JSON: {"stringValue": …}, {"arrayValue": {"values": […]}}, {"kvlistValue":
    {"values": […]}}."""
    if not isinstance(value, dict) or not value:
        return value
    if len(value) != 1:
        raise TraceError("a value of several kinds")
    kind, inner = next(iter(value.items()))
    is_list = kind in ("arrayValue", "kvlistValue")
    if is_list and isinstance(inner, dict) and not set(inner) - {"values"}:
        listed = inner.get("values") or []
        return [_value(item) for item in listed] if kind == "arrayValue" else _attributes(listed)
    if kind == "intValue":
        return int(inner)
    return inner if kind in ("stringValue", "boolValue", "doubleValue", "bytesValue") else value


def _structured(value: Any) -> Any:
    """An attribute that is structured, or JSON text where the exporter could not."""
    return parse_json(value) if isinstance(value, str) else value


# ---------------------------------------------------------------------- one span


def _call(
    place: str, span: Json, values: Json, around: Json, report: ImportReport
) -> _ModelSpan | None:
    """The model call of a span; None: it is none, or has no content."""
    if values.get("gen_ai.operation.name") not in (None, *MODEL_CALLS):
        return None
    if values.get("openinference.span.kind") not in (None, "LLM"):
        return None
    rest = dict(values)
    prompt, answered, labels, events = _from_events(span.get("events") or (), rest)
    flat = {side: list(map(_message_of, _taken(rest, _FLAT[side]))) for side in ("input", "output")}
    prompt = _listed(rest.pop("gen_ai.input.messages", None)) or prompt or flat["input"]
    answered = _listed(rest.pop("gen_ai.output.messages", None)) or answered or flat["output"]
    if not prompt or not answered:
        return None
    system = _system(rest)
    report.expect(place, [*system, *prompt, *answered])
    reasons = _take_reasons(answered, rest)
    failed = _failure(span, rest)
    messages, answers = chat_messages([*system, *prompt]), list[list[Json]]()
    for message, reason in zip(answered, reasons, strict=True):
        about: Json = {"finish_reason": reason, "error": failed}
        parts = chat_messages([{"role": "assistant", **message}])
        answers.append([_checked(each, about) for each in parts])
    listed = _structured(rest.pop("gen_ai.tool.definitions", None))
    tools = tool_definitions(listed) or _flat_tools(rest)
    usage = {_USAGE[key]: rest.pop(key) for key in _USAGE if isinstance(rest.get(key), int)}
    kept = present(span, "attributes", "events")
    kept |= {"attributes": rest} | ({"events": events} if events else {}) | around
    turn: Json = {
        "at": int(span.get("startTimeUnixNano") or 0) / 1e9,
        "model": text_or_none(_first(values, *_MODELS)),
        "tools": tools or None,
        "response_id": text_or_none(values.get("gen_ai.response.id")),
        "usage": usage or None,
    }
    if any(not parts or parts[-1]["role"] != "assistant" for parts in answers):
        raise TraceError("an answer that is not the assistant's")
    return _ModelSpan(place, messages, answers, reasons, turn, kept, labels)


def _take_reasons(answered: Sequence[Any], rest: Json) -> list[Any]:
    """Take each answer's finish reason: its own, or the span's. A span's list that says more stays
    in `rest`."""
    reasons = [
        message.pop("finish_reason", None) if isinstance(message, dict) else None
        for message in answered
    ]
    listed = rest.pop(_REASONS, None)
    if not isinstance(listed, list):
        rest |= present({_REASONS: listed})
        return reasons
    reasons = [a or b for a, b in zip_longest(reasons, listed[: len(reasons)])]
    if listed != reasons[: len(listed)]:
        rest[_REASONS] = listed
    return reasons


def _listed(value: Any) -> list[Any]:
    value = _structured(value)
    if value is not None and not isinstance(value, list):
        raise TraceError("messages that are not a list")
    return [dict(message) if isinstance(message, dict) else message for message in value or ()]


def _system(rest: Json) -> list[Json]:
    value = rest.pop("gen_ai.system_instructions", None)
    if not value:
        return []
    with suppress(ValueError):  # plain text
        value = _structured(value)
    key = "content" if isinstance(value, str) else "parts"
    return [{"role": "system", key: value}]


def _checked(message: Json, about: Json) -> Json:
    reason = not_sampled(message, about) if message["role"] == "assistant" else None
    return marked(message, reason) if reason else message


def _failure(span: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    code = mapping(span.get("status")).get("code")
    return values.get("error.type") or (code in (2, "STATUS_CODE_ERROR") and code)


def _from_events(
    listed: Sequence[Any], values: Json
) -> tuple[list[Any], list[Any], list[Label], list[Any]]:
    """Return the contents of a span's events: the model's input and output messages (the
    conventions' older form), evaluations, and others."""
    prompt, answered, labels, others = list[Any](), list[Any](), list[Label](), list[Any]()
    if not isinstance(listed, list | tuple):
        raise TraceError("events that are not a list")
    for event in listed:
        name = mapping(event).get("name")
        fields = _attributes(mapping(event).get("attributes"))
        rest = without(mapping(event), "name", "attributes", "timeUnixNano")
        if name == f"{EVALUATION}.result":
            labels.append(_evaluation(fields, event))
        elif name == DETAILS and not fields.keys() & values.keys():
            values |= fields
        elif name in _ROLE_EVENTS:
            side = answered if name == "gen_ai.choice" else prompt
            side.append(_event_message(fields, _ROLE_EVENTS[name]))
        elif name in _CONTENT_EVENTS and _CONTENT_EVENTS[name] in fields:
            side = prompt if name.endswith("prompt") else answered
            side += _listed(fields.pop(_CONTENT_EVENTS[name]))
            others += [{"name": name, "attributes": fields}] if fields else []
        else:
            others.append(event)
            continue
        if rest:
            others.append({"name": name, **rest})
    return prompt, answered, labels, others


def _event_message(fields: Json, role: str) -> Json:
    """A message that was an event: its fields are attributes, or in a body; a choice's are in
    `message`."""
    made = without(fields, "body", "event_body", "message")
    for key in ("body", "event_body", "message"):
        inner = fields.get(key)
        try:
            inner = _structured(inner)
        except ValueError:
            inner = {"content": inner}
        if which(mapping(inner), ["message"], dict):
            inner = {**without(inner, "message"), **inner["message"]}
        if inner is not None:
            made |= inner if isinstance(inner, dict) else {key: inner}
    if isinstance(made.get("tool_calls"), str):
        made["tool_calls"] = parse_json(made["tool_calls"])
    if role == "tool" and "tool_call_id" not in made and "id" in made:
        made["tool_call_id"] = made.pop("id")
    return {"role": role, **made}


def _evaluation(values: Json, event: Mapping[str, Any]) -> Label:
    score = values.pop(f"{EVALUATION}.score.value", None)
    fields = {
        "name": str(values.pop(f"{EVALUATION}.name", None) or "evaluation"),
        "value": None if score is None else float(score),
        "label": values.pop(f"{EVALUATION}.score.label", None),
        "explanation": values.pop(f"{EVALUATION}.explanation", None),
        "by": "otlp",
        "at": int(event.get("timeUnixNano") or 0) / 1e9,
        "response_id": values.pop("gen_ai.response.id", None),
        "attributes": values or None,
    }
    return Label.model_validate(present(fields))


# ---------------------------------------------------------------------- flat keys


def _taken(rest: Json, pattern: re.Pattern[str]) -> list[Json]:
    """Take the attributes whose keys number the parts of a list; return an object a part."""
    parts: dict[int, Json] = defaultdict(dict)
    for key in list(rest):
        if match := pattern.fullmatch(key):
            number, name = filter(None, match.groups())
            parts[int(number)][name] = rest.pop(key)
    return [parts[number] for number in sorted(parts)]


def _flat_tools(rest: Json) -> list[Json] | None:
    """Take the tools of flat keys. Raises TraceError."""
    tools: list[Any] = []
    for tool in _taken(rest, _FLAT["tools"]):
        schemas = tool.keys() & {"json_schema", "parameters"}
        tool |= {key: _structured(tool[key]) for key in schemas}
        tools.append(tool.get("json_schema", tool))
    return tool_definitions(tools)


def _nested(flat: Mapping[str, Any]) -> Json:
    """`a.0.b` → {"a": [{"b": …}]}."""
    tree: Json = {}
    for key, value in flat.items():
        *way, last = key.split(".")
        at: Any = tree
        for name in way:
            at = at.setdefault(name, {}) if isinstance(at, dict) else None
        if isinstance(at, dict) and last not in at:
            at[last] = value
        else:  # both `a` and `a.b`
            tree[key] = value
    return {key: _lists(value) for key, value in tree.items()}


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(key.isdecimal() for key in value):
        return [_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _lists(item) for key, item in value.items()}


def _message_of(flat: Json) -> Json:
    """A message of flat keys in OpenAI's form."""
    fields = _nested(flat)
    contents, calls = fields.get("contents"), fields.get("tool_calls")
    if isinstance(contents, list) and "content" not in fields:
        del fields["contents"]
        fields["content"] = [_unwrapped(part, "message_content") for part in contents]
    if isinstance(calls, list):
        fields["tool_calls"] = list(map(_flat_call, calls))
    if isinstance(fields.get("function_call_name"), str):
        arguments = fields.pop("function_call_arguments_json", "{}")
        fields["function_call"] = {"name": fields.pop("function_call_name"), "arguments": arguments}
    return {"content": None, **fields}


def _unwrapped(value: Any, key: str) -> Any:
    """The value of an object that has this key alone."""
    return value[key] if isinstance(value, dict) and set(value) == {key} else value


def _flat_call(call: Any) -> Any:
    inner = mapping(_unwrapped(call, "tool_call"))
    function = inner["function"] if which(inner, ["function"], dict) else inner
    if not isinstance(function.get("name"), str):
        return call
    made = chat_call(str(inner.get("id") or ""), function["name"], function.get("arguments") or {})
    if function is not inner:
        made["function"] |= without(function, "name", "arguments")
    return made | without(inner, "id", "function", "name", "arguments", "type")


# ---------------------------------------------------------------------- conversations


def _joined(name: str, calls: Sequence[_ModelSpan], report: ImportReport) -> Iterator[Trace]:
    session, ends, places = Session(name), dict[str, str](), dict[str, str]()
    for call in calls:
        rest: Json = {"span": call.rest}
        for reason, answer in zip(call.finish_reasons, call.answers, strict=True):
            *messages, response = linked([*call.prompt, *answer])
            response, rest = add_step(response, extra=rest), {}
            turn = session.follow(
                messages, response, ends, finish_reason=text_or_none(reason), **call.turn
            )
            places[turn.id] = call.place
            before = [each for t in session.path(turn.id)[:-1] for each in t.spoken]
            for first, again in zip(before, messages, strict=False):
                if _bare(first) != _bare(again):
                    report.drop(call.place, REPEATED, again)
        session.labels += call.labels
    for trace in session_traces(session, places, report):
        trace.note(source="otlp")
        yield trace


def _bare(message: Mapping[str, Any]) -> Json:
    """A message, and its own fields that lie in its step."""
    extra = message.get("step", {}).get("extra", {})
    step_fields = without(extra, "span", "not_sampled")
    return without(message, "step") | ({"step": step_fields} if step_fields else {})


def holds_spans(path: Path) -> bool:
    """Return whether the first line, or the whole file, is OTLP/JSON."""
    first = next((value for _, value in read_jsonl(path)), None)
    if isinstance(first, ValueError):
        return b'"resourceSpans"' in path.read_bytes()[:4096]
    return isinstance(first, dict) and "resourceSpans" in first

"""OpenTelemetry spans as OTLP/JSON: the `gen_ai.*` conventions, and OpenInference's keys (Phoenix), mapped into them.

Each span of a model call repeats the conversation before it. Calls of one conversation are joined as the recorder joins
them: a call whose messages begin with an earlier one's messages and answer goes on with it, others branch.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.traces.importers.chats import tool_list
from mlx_parallm.traces.importers.report import ImportReport, objects
from mlx_parallm.traces.schema import Json, Label, Trace, read_jsonl
from mlx_parallm.traces.session import Session

MODEL_CALLS = ("chat", "generate_content", "text_completion")
EVALUATION = "gen_ai.evaluation"


def otlp(path: Path, report: ImportReport) -> Iterator[Trace]:
    """Files of `resourceSpans`, one object a line or one in all. A span is what the report counts as a line."""
    conversations: dict[str, list[Json]] = defaultdict(list)
    for span in _spans(path, report):
        place = f"{path.name} span {span.get('spanId', '?')}"
        values = _attributes(span.get("attributes"))
        try:
            call = _gen_ai_call(values) or _openinference_call(values)
        except (TraceError, ValueError, TypeError, KeyError, AttributeError) as error:
            report.skip(place, f"unexpected shape: {error}"[:200])
            continue
        if call is None:
            operation = values.get("gen_ai.operation.name") or values.get("openinference.span.kind")
            report.skip(place, f"spans of operation {operation!r} are no model calls with content")
            continue
        report.use()
        name = values.get("gen_ai.conversation.id") or values.get("session.id") or span.get("traceId")
        call["at"] = int(span.get("startTimeUnixNano") or 0) / 1e9
        call["labels"] = list(_evaluations(span))
        conversations[str(name)].append(call)
    for name, calls in conversations.items():
        yield from _joined(name, sorted(calls, key=lambda call: float(call["at"])), report)


def _joined(name: str, calls: Sequence[Json], report: ImportReport) -> Iterator[Trace]:
    session, ends = Session(name), dict[str, str]()
    for call in calls:
        session.follow(
            call["messages"],
            call["response"],
            ends,
            at=call["at"],
            model=call["model"],
            tools=tuple(call["tools"]) if call["tools"] else None,
            finish_reason=call["finish_reason"],
            response_id=call["response_id"],
            usage=call["usage"],
        )
        session.labels += call["labels"]
    for trace in session.traces():
        trace.note(source="otlp")
        report.traces += 1
        yield trace


def _spans(path: Path, report: ImportReport) -> Iterator[Json]:
    documents: list[tuple[str, Any]]
    try:
        documents = [(path.name, json.loads(path.read_bytes()))]
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        documents = list(objects(path, report))
    for place, document in documents:
        listed = document.get("resourceSpans") if isinstance(document, dict) else None
        if not isinstance(listed, list):
            report.skip(place, "no 'resourceSpans'")
            continue
        for resource in listed:
            for scope in resource.get("scopeSpans") or ():
                yield from scope.get("spans") or ()


def _attributes(listed: Any) -> Json:
    return {entry["key"]: _value(entry.get("value")) for entry in listed or () if isinstance(entry, dict)}


def _value(value: Any) -> Any:
    """A value of OTLP/JSON: {"stringValue": …}, {"arrayValue": {"values": […]}}, {"kvlistValue": {"values": […]}}."""
    if not isinstance(value, dict) or not value:
        return value
    kind, inner = next(iter(value.items()))
    if kind == "arrayValue":
        return [_value(item) for item in (inner or {}).get("values", ())]
    if kind == "kvlistValue":
        return _attributes((inner or {}).get("values"))
    return int(inner) if kind == "intValue" else inner


def _structured(value: Any) -> Any:
    """An attribute that is structured, or JSON text where the exporter could not."""
    return json.loads(value) if isinstance(value, str) else value


# ---------------------------------------------------------------------- gen_ai


def _gen_ai_call(values: Mapping[str, Any]) -> Json | None:
    asked = _structured(values.get("gen_ai.input.messages"))
    answered = _structured(values.get("gen_ai.output.messages"))
    operation = values.get("gen_ai.operation.name")
    if not asked or not answered or operation not in (None, *MODEL_CALLS):
        return None
    system = _structured(values.get("gen_ai.system_instructions")) or []
    messages = [{"role": "system", "content": _part_texts(system)}] if system else []
    for message in asked:
        messages += _from_parts(message)
    [response] = _from_parts({**answered[0], "role": "assistant"})
    usage = {
        name: values[key]
        for name, key in (
            ("prompt_tokens", "gen_ai.usage.input_tokens"),
            ("completion_tokens", "gen_ai.usage.output_tokens"),
        )
        if key in values
    }
    reasons = values.get("gen_ai.response.finish_reasons") or [answered[0].get("finish_reason")]
    return {
        "messages": messages,
        "response": response,
        "tools": [_definition(tool) for tool in _structured(values.get("gen_ai.tool.definitions")) or ()],
        "model": values.get("gen_ai.response.model") or values.get("gen_ai.request.model"),
        "finish_reason": reasons[0] if isinstance(reasons, list) and reasons else None,
        "response_id": values.get("gen_ai.response.id"),
        "usage": usage or None,
    }


def _part_texts(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    return "".join(str(part.get("content", "")) for part in parts if part.get("type") in (None, "text"))


def _from_parts(message: Mapping[str, Any]) -> list[Json]:
    """A message of parts as chat messages: each tool's result is one of its own."""
    role, parts = message.get("role"), message.get("parts") or []
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    if results:
        return [
            {
                "role": "tool",
                "tool_call_id": str(part.get("id")),
                "content": _as_text(part.get("response", part.get("result"))),
            }
            for part in results
        ]
    made: Json = {"role": role, "content": _part_texts(parts)}
    thoughts = "".join(str(part.get("content", "")) for part in parts if part.get("type") == "reasoning")
    calls = [
        {
            "id": str(part.get("id") or ""),
            "type": "function",
            "function": {"name": str(part.get("name")), "arguments": _as_text(part.get("arguments") or {})},
        }
        for part in parts
        if part.get("type") == "tool_call"
    ]
    if thoughts:
        made["reasoning_content"] = thoughts
    if calls:
        made |= {"tool_calls": calls, "content": made["content"] or None}
    return [made]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _definition(tool: Mapping[str, Any]) -> Json:
    if "function" in tool:
        return dict(tool)
    kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def _evaluations(span: Mapping[str, Any]) -> Iterator[Label]:
    for event in span.get("events") or ():
        if event.get("name") != f"{EVALUATION}.result":
            continue
        values = _attributes(event.get("attributes"))
        score = values.get(f"{EVALUATION}.score.value")
        fields = {
            "name": str(values.get(f"{EVALUATION}.name") or "evaluation"),
            "value": None if score is None else float(score),
            "label": values.get(f"{EVALUATION}.score.label"),
            "explanation": values.get(f"{EVALUATION}.explanation"),
            "by": "otlp",
            "at": int(event.get("timeUnixNano") or 0) / 1e9,
            "response_id": values.get("gen_ai.response.id"),
        }
        yield Label.model_validate({key: value for key, value in fields.items() if value is not None})


# ---------------------------------------------------------------------- OpenInference

_FLAT = re.compile(r"^llm\.(input|output)_messages\.(\d+)\.message\.(.+)$")
_FLAT_TOOL = re.compile(r"^llm\.tools\.(\d+)\.tool\.json_schema$")


def _openinference_call(values: Mapping[str, Any]) -> Json | None:
    if values.get("openinference.span.kind") not in (None, "LLM"):
        return None
    flat: dict[str, dict[int, Json]] = {"input": defaultdict(dict), "output": defaultdict(dict)}
    for key, value in values.items():
        if match := _FLAT.match(key):
            flat[match[1]][int(match[2])][match[3]] = value
    if not flat["input"] or not flat["output"]:
        return None
    tools = sorted((int(m[1]), values[key]) for key in values if (m := _FLAT_TOOL.match(key)))
    usage = {
        name: values[key]
        for name, key in (
            ("prompt_tokens", "llm.token_count.prompt"),
            ("completion_tokens", "llm.token_count.completion"),
        )
        if key in values
    }
    return {
        "messages": [_from_flat(flat["input"][index]) for index in sorted(flat["input"])],
        "response": _from_flat(flat["output"][min(flat["output"])]) | {"role": "assistant"},
        "tools": tool_list([_definition(_structured(tool)) for _, tool in tools]) or [],
        "model": values.get("llm.model_name"),
        "finish_reason": None,
        "response_id": None,
        "usage": usage or None,
    }


def _from_flat(fields: Mapping[str, Any]) -> Json:
    """One message whose fields have flat keys: `content`, `contents.0.message_content.text`, `tool_calls.0.…`."""
    texts = sorted(
        (int(key.split(".")[1]), str(value))
        for key, value in fields.items()
        if key.startswith("contents.") and key.endswith(".message_content.text")
    )
    content = fields.get("content") if "content" in fields else "".join(text for _, text in texts)
    message: Json = {"role": fields.get("role"), "content": content}
    numbers = sorted({int(key.split(".")[1]) for key in fields if key.startswith("tool_calls.")})
    calls = []
    for number in numbers:
        at = f"tool_calls.{number}.tool_call"
        function = {
            "name": str(fields.get(f"{at}.function.name")),
            "arguments": _as_text(fields.get(f"{at}.function.arguments") or {}),
        }
        calls.append({"id": str(fields.get(f"{at}.id") or ""), "type": "function", "function": function})
    if calls:
        message |= {"tool_calls": calls, "content": content or None}
    if fields.get("tool_call_id") is not None:
        message["tool_call_id"] = str(fields["tool_call_id"])
    return message


def holds_spans(path: Path) -> bool:
    """Whether the first line, or the whole file, is OTLP/JSON."""
    first = next((value for _, value in read_jsonl(path)), None)
    if isinstance(first, ValueError):
        return b'"resourceSpans"' in path.read_bytes()[:4096]
    return isinstance(first, dict) and "resourceSpans" in first

"""Calls of OpenAI's Responses API, one a line: what was asked (`input`, `instructions`, `tools`),
in the line or in its `request`, and the response's `output`. Spans of the OpenAI Agents SDK too.

    {"request": {"input": …, "tools": […]}, "response": {"id": …, "status": …, "output": […]}}
    {"input": …, "output": […]}
    {"object": "trace.span", "span_data": {"type": "generation" or "response", …}}

Only the output is learned: the answers in `input` are another call's. A call that continues from
`previous_response_id` gets the messages of that call, where it comes before it in the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.importers.chats import REQUESTS, openai_conversations
from mlx_parallm.systems.traces.importers.codex import ItemLog, take_item
from mlx_parallm.systems.traces.importers.dialects import tool_definitions
from mlx_parallm.systems.traces.importers.endings import NEVER, marked, not_sampled
from mlx_parallm.systems.traces.importers.report import SHAPES, ImportReport, by_line
from mlx_parallm.systems.traces.schema import Json, as_context, mapping, present, which, without
from mlx_parallm.systems.traces.trace import Trace, new_trace

ASKED = ("input", "instructions", "tools", "previous_response_id")
SPANS = ("generation", "response")
NO_HISTORY = "its history is not whole: the response that it continues from is not in the file"


def responses(path: Path, report: ImportReport) -> Iterator[Trace]:
    """A trace for each call."""
    histories: dict[str, ItemLog] = {}
    return by_line(partial(_traces, histories))(path, report)


def is_response_call(row: Mapping[str, Any]) -> bool:
    if isinstance(span := row.get("span_data"), Mapping):
        return row.get("object") == "trace.span" and isinstance(span.get("type"), str)
    return _output_of(row) is not None and not isinstance(row.get("messages"), list)


def _output_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The response that a line holds: the line itself, its `response`, or that one's `body`."""
    response = mapping(row.get("response"))
    held = (mapping(response.get("body")), response, row)
    return next((each for each in held if isinstance(each.get("output"), list)), None)


def _traces(
    histories: dict[str, ItemLog], row: Json, place: str, report: ImportReport
) -> list[Trace]:
    if isinstance(span := row.get("span_data"), Mapping):
        return _span_traces(histories, row, span, place, report)
    response = _output_of(row)
    if response is None:
        raise TraceError("no list 'output'")
    key = which(row, REQUESTS, Mapping)
    request = row if key is None else row[key]
    log = ItemLog(str(response.get("id") or row.get("id") or place))
    if (before := request.get("previous_response_id") or response.get("previous_response_id")) and (
        (history := histories.get(str(before))) is not None
    ):
        log.messages = [dict(message) for message in history.messages]
        log.untrainable = history.untrainable
    elif before:
        log.untrainable = NO_HISTORY
    take_items(log, input_items(request), place, report)
    log.messages = [as_context(each) for each in log.messages]
    log.opened = len(log.messages)
    take_items(log, response["output"], place, report)
    _end(log, response, row, place, report)
    if response.get("id"):
        histories[str(response["id"])] = log
    return [_trace(log, row, request, response, place, report)]


def input_items(request: Mapping[str, Any]) -> Any:
    items = request.get("input")
    return [{"role": "user", "content": items}] if isinstance(items, str) else items or []


def take_items(log: ItemLog, items: Any, place: str, report: ImportReport) -> None:
    """Add items to the messages. One that cannot be read is left out, and nothing is learned of
    what follows it."""
    if not isinstance(items, Sequence):
        raise TraceError("'input' is neither text nor a list")
    first = report.expect(place, items)
    for number, item in enumerate(items, first):
        kind = mapping(item).get("type")
        if kind is None and "role" in mapping(item):
            item, kind = {**item, "type": "message"}, "message"
        taken = len(log.places)
        try:
            take_item(log, item, f"{place}#{number}", report, {})
        except SHAPES:
            log.untrainable = "its history is not whole: an item of an unknown shape"
        if len(log.places) == taken:
            reason = "reasoning that is encrypted" if kind == "reasoning" else "an unknown item"
            report.leave(place, number, reason)


def _end(
    log: ItemLog, response: Mapping[str, Any], row: Json, place: str, report: ImportReport
) -> None:
    """Mark the answers of a response that did not come to its end."""
    details = mapping(response.get("incomplete_details"))
    about = (response, {"finish_reason": details.get("reason")})
    for at in range(log.opened, len(log.messages)):
        message = log.messages[at]
        if message["role"] == "assistant" and (reason := not_sampled(message, *about, row)):
            log.messages[at] = marked(message, reason)
            report.remark(place, NEVER.format(reason))


def _trace(
    log: ItemLog,
    row: Json,
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    place: str,
    report: ImportReport,
) -> Trace:
    if not any(message["role"] == "assistant" for message in log.messages[log.opened :]):
        raise TraceError("no answer in 'output'")
    instructions = request.get("instructions") or response.get("instructions")
    opening: list[Json] = []
    if isinstance(instructions, str):
        opening = [{"role": "system", "content": instructions}]
    elif instructions:
        raise TraceError("'instructions' is not text")
    if log.untrainable is not None:
        report.remark(place, f"{log.untrainable}; nothing of the trace is trained on")
    columns = {key: _rest(value) for key, value in without(row, *ASKED, "output").items()}
    return new_trace(
        [*opening, *log.messages],
        session_id=log.session,
        source="responses",
        model=response.get("model") if isinstance(response.get("model"), str) else None,
        tools=tool_definitions(request.get("tools") or response.get("tools")),
        columns={key: value for key, value in columns.items() if value not in (None, {})} or None,
        untrainable="the call failed" if row.get("error") else log.untrainable,
    )


def _rest(value: Any) -> Any:
    """Return what a request or a response holds beside its messages."""
    return present(value, *ASKED, "output") if isinstance(value, Mapping) else value


def _span_traces(
    histories: dict[str, ItemLog],
    row: Json,
    span: Mapping[str, Any],
    place: str,
    report: ImportReport,
) -> list[Trace]:
    kind = span.get("type")
    if kind not in SPANS:
        raise TraceError(f"spans of type {kind!r}: generations and responses hold what was said")
    rest = without(row, "span_data")
    if kind == "response":
        if _output_of(span) is None:
            raise TraceError("a response's span holds its id alone: log the response with it")
        return _traces(histories, {**rest, **span}, place, report)
    listed = span.get("output") or []
    choices = [{"message": message} for message in listed]
    call = {"request": {"messages": span.get("input")}, "response": {"choices": choices}}
    return openai_conversations({**rest, **call}, place, report)

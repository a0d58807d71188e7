"""The records of ATIF 1.8, Harbor's Agent Trajectory Interchange Format, of which a trace is made
(trace.py), and the JSON of its files.

Fields keep its names; unknown fields are kept. A step of source "agent" that is not copied context
was sampled by a model, and is what may be trained on.

Messages of OpenAI's chat become steps (`steps_of`) and back (`messages_of`) without loss: what ATIF
has no field for is in `extra.openai` of the step.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlx_parallm.errors import TraceError
from mlx_parallm.system.files import bounded_lines
from mlx_parallm.system.foreign_json import TooDeepError, read_json

SCHEMA_VERSION = "ATIF-v1.8"
LONGEST_LINE = 256 << 20  # bytes of a log's line, or of a log that is one JSON text
MOST_CONTAINERS = 4 << 20  # lists and objects of it: they take twenty times their room
DEEPEST = 100  # levels of foreign JSON: more is not a log, and would break what walks through it
_LARGE = re.compile(r"[eE]\+?\d{3}|\d{300}")  # may be beyond float64
WORDS: dict[str, list[str]] = tomllib.loads(
    files(__package__).joinpath("words.toml").read_text(encoding="utf-8")
)
"""Words of logs, by what they say."""
Json = dict[str, Any]
Content = str | list[Json]
V = TypeVar("V")
SHAPES = (TraceError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What converting a foreign object may raise where its shape is not the format's."""


def without(record: Mapping[str, V], *names: str | None) -> dict[str, V]:
    """Return the fields of a record beside these."""
    return {name: value for name, value in record.items() if name not in names}


def present(record: Mapping[str, V | None], *without: str) -> dict[str, V]:
    """Return the fields that hold something, beside those of the names `without`."""
    return {
        name: value for name, value in record.items() if value is not None and name not in without
    }


def mapping(value: Any) -> Mapping[str, Any]:
    """Return an object of foreign JSON; an empty one in the place of anything else."""
    return value if isinstance(value, Mapping) else {}


def which(record: Mapping[str, Any], names: Iterable[str], kind: Any = object) -> str | None:
    """Return the first of the names that a record has, with a value of this kind; None: it has
    none."""
    return next((name for name in names if name in record and isinstance(record[name], kind)), None)


def text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def chat_call(call_id: str | None, name: str, arguments: Any) -> Json:
    """Return a call in OpenAI's form. `arguments`: JSON text, or what becomes it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


class TraceRecord(BaseModel):
    """Fields that are not known are kept; fields that were not set are not written."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def to_json(self) -> Json:
        # all values are JSON's; mode "json" refuses half a character
        return self.model_dump(exclude_unset=True)


class TraceToolCall(TraceRecord):
    tool_call_id: str
    function_name: str
    arguments: Json
    extra: Json | None = None


class ObservationResult(TraceRecord):
    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[Json] | None = None
    extra: Json | None = None


class StepObservation(TraceRecord):
    results: list[ObservationResult]


class StepMetrics(TraceRecord):
    """Token counts and, from our own engine, the tokens. `logprobs`:
    [len(completion_token_ids)]."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Json | None = None


_OF_AGENTS = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


class TraceStep(TraceRecord):
    step_id: int = Field(ge=1)
    source: Literal["system", "user", "agent"]
    message: Content
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    reasoning_content: str | None = None
    tool_calls: list[TraceToolCall] | None = None
    observation: StepObservation | None = None
    metrics: StepMetrics | None = None
    llm_call_count: int | None = Field(None, ge=0)
    is_copied_context: bool | None = None
    extra: Json | None = None

    @model_validator(mode="after")
    def _by_the_format(self) -> Self:
        others = [name for name in _OF_AGENTS if self.__dict__[name] is not None]
        if self.source != "agent" and others:
            raise ValueError(
                f"step {self.step_id}: {others[0]!r} is for steps of source 'agent' only"
            )
        if self.source == "agent" and self.llm_call_count == 0 and self.metrics is not None:
            raise ValueError(
                f"step {self.step_id}: no model was called"
                " (llm_call_count = 0), but there are metrics"
            )
        if self.observation is not None and self.tool_calls is not None:
            call_ids = {call.tool_call_id for call in self.tool_calls}
            for result in self.observation.results:
                if result.source_call_id is not None and result.source_call_id not in call_ids:
                    raise ValueError(
                        f"step {self.step_id}: a result of {result.source_call_id!r}, which"
                        " was not called"
                    )
        return self

    @property
    def sampled(self) -> bool:
        """Whether a model sampled this step in this run: it may be trained on."""
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0

    @property
    def text(self) -> str:
        return text_of(self.message)

    @property
    def results(self) -> list[ObservationResult]:
        return [] if self.observation is None else self.observation.results


class TraceAgent(TraceRecord):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[Json] | None = None
    extra: Json | None = None


class Label(TraceRecord):
    """A judgement of an answer or a session: by whom, and when. Field names are OpenTelemetry's
    `gen_ai.evaluation.*`.

    Attributes:
        value: a number; `label`: a word ("good", "bad"). One of them, or an explanation, is there.
        by: who: "user", "rule:…", "judge:…", "auto:…".
        at: Unix time in seconds.
        response_id: the answer that is meant; None = the whole session.
        prompt_hash: SHA-256 of the messages before the first answer (`prompt_hash`).
    """

    name: str
    value: float | None = None
    label: str | None = None
    explanation: str | None = None
    by: str
    at: float
    response_id: str | None = None
    prompt_hash: str | None = None


# ---------------------------------------------------------------------- messages ↔ steps

_ROLE_OF = {"system": "system", "user": "user", "agent": "assistant"}
_SOURCE_OF = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_OPENAI = "openai"
"""In `extra` of steps, calls and results: fields of the chat message that ATIF has no place for;
"without" lists those that were absent."""


def steps_of(messages: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Turn OpenAI chat messages into ATIF steps, as JSON.

    A result joins the step that called the tool; one that follows no call is its own step. A
    message's key "step" holds fields for its step ("metrics", "timestamp", "is_copied_context",
    "extra", …), see `add_step`. Raises
    TraceError: a message's shape.
    """
    steps: list[Json] = []
    takes_results = False
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TraceError(f"message {number} is not an object")
        role = message.get("role")
        if role in ("tool", "function"):
            if not takes_results:
                step: Json = {"source": "system", "message": "", "extra": {_OPENAI: {"role": role}}}
                steps.append({"step_id": len(steps) + 1, **step})
                takes_results = True
            call_ids = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
            steps[-1].setdefault("observation", {"results": []})["results"].append(
                _result_of(message, call_ids)
            )
        elif isinstance(role, str) and role in _SOURCE_OF:
            steps.append({"step_id": len(steps) + 1, **_step_of(message, number)})
            takes_results = role == "assistant"
        else:
            raise TraceError(
                f"message {number} has the role {role!r}: expected system, user, assistant or tool"
            )
    return steps


def _with_rest(record: Json, original: Mapping[str, Any], written: Mapping[str, Any]) -> Json:
    """Add to `record` what `original` has beyond `written`, the message that the record becomes."""
    rest = {
        key: value for key, value in original.items() if key not in written or written[key] != value
    }
    if missing := [key for key in written if key not in original]:
        rest["without"] = missing
    return record | {"extra": {_OPENAI: rest}} if rest else record


def _restored(written: Json, extra: Json | None) -> Json:
    rest = dict((extra or {}).get(_OPENAI, {}))
    missing = rest.pop("without", ())
    return without({**written, **rest}, *missing)


def _step_of(message: Mapping[str, Any], number: int) -> Json:
    original = without(message, "step")
    step: Json = {
        "source": _SOURCE_OF[message["role"]],
        "message": _atif_content(message.get("content")),
    }
    if message["role"] == "assistant":
        if isinstance(message.get("reasoning_content"), str):
            step["reasoning_content"] = message["reasoning_content"]
        if message.get("tool_calls"):
            step["tool_calls"] = [_call_of(call, number) for call in message["tool_calls"]]
    written = _written(step)
    if "tool_calls" in step:  # each call has its own rest
        original["tool_calls"] = written["tool_calls"]
    return _with_own(_with_rest(step, original, written), message)


class StepFields(dict[str, Any]):
    """The content of a message's key "step" when this package put it there. A log's own field is a
    plain dict."""


def add_step(message: Mapping[str, Any], **fields: Any) -> Json:
    """Return a message with further fields for its step; `extra` is joined, key by key, and so
    is `extra.fields`."""
    step, added = dict(message.get("step", {})), dict(fields.pop("extra", {}))
    extra = {**step.get("extra", {}), **added}
    if "fields" in added:
        extra["fields"] = {**step.get("extra", {}).get("fields", {}), **added["fields"]}
    return {
        **message,
        "step": StepFields({**step, **fields, **({"extra": extra} if extra else {})}),
    }


def as_context(message: Mapping[str, Any]) -> Json:
    """Return a message; an answer as one that was sampled elsewhere."""
    is_answer = message.get("role") == "assistant"
    return add_step(message, is_copied_context=True) if is_answer else dict(message)


def foreign_message(message: Mapping[str, Any]) -> Json:
    """Return a message of a log: its own field that is called "step" moves to the step's
    `extra.fields`."""
    if "step" not in message or isinstance(message["step"], StepFields):
        return dict(message)
    kept = without(message, "step")
    return add_step(kept, extra={"fields": {"step": message["step"]}})


def _with_own(record: Json, message: Mapping[str, Any]) -> Json:
    """Add to a step what the message's key "step" has for it."""
    step_fields = dict(message.get("step", {}))
    extra = {**record.get("extra", {}), **step_fields.pop("extra", {})}
    return {**record, **step_fields, **({"extra": extra} if extra else {})}


def _written(step: Mapping[str, Any]) -> Json:
    """The message that a step's own fields make."""
    message: Json = {"role": _ROLE_OF[step["source"]], "content": step["message"]}
    if step.get("reasoning_content") is not None:
        message["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        message["tool_calls"] = [
            _restored(_written_call(call), call.get("extra")) for call in step["tool_calls"]
        ]
    return message


def _atif_content(content: Any) -> Content:
    """Text, or text parts where all parts are text; the text of other content."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and set(part) == {"type", "text"} and part["type"] == "text"
        for part in content
    ):
        return [dict(part) for part in content]
    return text_of(content)


def text_of(content: Any) -> str:
    """The text of a message's content: a string, a list of parts, or None."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (mapping(part).get("text", part) for part in content)
    return "".join(text for text in texts if isinstance(text, str))


def _call_of(call: Any, number: int) -> Json:
    function = mapping(mapping(call).get("function"))
    if not isinstance(function.get("name"), str):
        raise TraceError(f"message {number} has a tool call without a function name")
    entry: Json = {"tool_call_id": str(call.get("id") or ""), "function_name": function["name"]}
    entry["arguments"] = parsed_arguments(function.get("arguments")) or {}
    return _with_rest(entry, call, _written_call(entry))


def _written_call(call: Mapping[str, Any]) -> Json:
    return chat_call(call["tool_call_id"], call["function_name"], call["arguments"])


def parsed_arguments(raw: Any) -> Json | None:
    """The object that a call's arguments are; None where they are none."""
    if isinstance(raw, Mapping):
        return dict(raw)
    if not isinstance(raw, str | bytes):
        return None
    try:
        value = parse_json(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _result_of(message: Mapping[str, Any], call_ids: set[str]) -> Json:
    call_id = message.get("tool_call_id")
    result: Json = {"content": _atif_content(message.get("content"))}
    if call_id in call_ids:
        result["source_call_id"] = call_id
    original = without(message, "step")
    made = _with_rest(result, original, _written_result(result))
    return _with_own(made, {"step": {"extra": message.get("step", {}).get("extra") or {}}})


def _written_result(result: Mapping[str, Any]) -> Json:
    message: Json = {"role": "tool", "content": result.get("content")}
    if result.get("source_call_id") is not None:
        message["tool_call_id"] = result["source_call_id"]
    return message


def messages_of(steps: Iterable[TraceStep], *, with_step: bool = False) -> list[Json]:
    """Turn steps back into OpenAI chat messages. `with_step`: each has its `TraceStep` under
    "step"."""
    messages: list[Json] = []
    for step in steps:
        mark: Json = {"step": step} if with_step else {}
        data = step.to_json()
        message = _restored(_written(data), step.extra)
        if message["role"] not in ("tool", "function"):
            messages.append(message | mark)
        for result in (data.get("observation") or {}).get("results", ()):
            messages.append(_restored(_written_result(result), result.get("extra")) | mark)
    return messages


# ---------------------------------------------------------------------- files


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text of another program, which this one can walk through and write
    again.

    Raises ValueError: it is not JSON, holds NaN or a number beyond float64, is nested deeper than
    `DEEPEST`, or has so many lists and objects that they would fill the memory.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    number = _finite if _LARGE.search(text) else None
    try:
        return read_json(
            text, most=MOST_CONTAINERS, deepest=DEEPEST, constant=_finite, number=number
        )
    except TooDeepError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number of JSON")
    return value


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the line number, from 1, and the value of each line; a ValueError where the line is not
    JSON.

    Raises TraceError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(bounded_lines(file, LONGEST_LINE), 1):
                if line is None:
                    yield number, ValueError(f"not JSON: longer than {LONGEST_LINE:,} bytes")
                    continue
                if not line.strip():
                    continue
                try:
                    yield number, parse_json(line)
                except ValueError as error:
                    yield number, ValueError(f"not JSON: {error}")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def dump_line(value: Any) -> bytes:
    """One line of JSON in UTF-8; half a character is escaped, since no file can hold it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        return (json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n").encode()


def iso_time(seconds: float) -> str:
    """Return an ISO 8601 time. Raises ValueError: no such time."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, OSError) as error:
        raise ValueError(f"{seconds} is not a time") from error


def unix_time(text: Any) -> float | None:
    """Seconds of an ISO 8601 time; None where it is none."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None

"""Messages of other programs → OpenAI chat messages. One converter for every importer, and for the
rows of `build`.

    role        `role`, or ShareGPT's `from` ("human", "gpt", "observation", …); Gemini's "model"
    content     text, or parts: OpenAI's, Anthropic's blocks, OpenTelemetry's and Gemini's `parts`,
                Responses' items
    calls       `tool_calls`, the older `function_call`, blocks `tool_use`, parts `tool_call`,
                `functionCall`
    results     role "tool", the older "function", blocks `tool_result`, parts `tool_call_response`,
                `functionResponse`

A message that is OpenAI's already stays as it is. A part of an unknown type stays in the content;
an unknown field stays in the message, or in the `extra.fields` of its step if the message is
split. Nothing is dropped here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.execution.chat_messages import CALLERS, ROLE_OF
from mlx_parallm.systems.traces.importers.endings import is_own_call
from mlx_parallm.systems.traces.schema import (
    Json,
    add_step,
    chat_call,
    foreign_message,
    mapping,
    parse_json,
    present,
    text_or_none,
    which,
    without,
)

_TEXT = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_THOUGHT = ("thinking", "reasoning")
_CALL_KEYS = ("functionCall", "function_call")  # Gemini's parts have no type
_CODE_KEYS = ("executableCode", "executable_code")  # Gemini runs it itself
_DECLARATIONS = ("functionDeclarations", "function_declarations")
_CODE_RESULTS = ("codeExecutionResult", "code_execution_result")
_RESULT_KEYS = ("functionResponse", "function_response", *_CODE_RESULTS)
_IDS = ("id", "tool_use_id", "tool_call_id", "call_id")
_ARGUMENTS = ("input", "arguments", "args", "server_tool_call")
_RESULTS = ("content", "response", "result", "output", "server_tool_call_response")


# ---------------------------------------------------------------------- a conversation


def chat_messages(listed: Iterable[Any]) -> list[Json]:
    """Convert the messages of one conversation, in order. Raises TraceError: one that is no
    message."""
    messages: list[Json] = []
    for number, message in enumerate(listed):
        if not isinstance(message, Mapping):
            raise TraceError(f"message {number} is not an object")
        messages += converted(message)
    return linked(messages)


def linked(messages: Sequence[Json]) -> list[Json]:
    """Give calls whose id is None one, and results without one the id of the call that they answer.

    A call of a form that has no ids (`function_call`, ShareGPT's) has no key "id": it gets none,
    nor does its result, as in the rows and requests that are read elsewhere.
    """
    made: list[Json] = []
    waiting: dict[str, str] = {}  # id → name of calls without a result
    for number, message in enumerate(messages):
        kept = dict(message)
        if calls := kept.get("tool_calls") if kept.get("role") == "assistant" else None:
            named = []
            for at, call in enumerate(calls):
                if isinstance(mapping(call).get("function"), Mapping):
                    if call.get("id", "") is None:
                        call = {**call, "id": f"call_{number}_{at}"}
                    if call.get("id") is not None:
                        waiting[str(call["id"])] = str(call["function"].get("name"))
                named.append(call)
            kept["tool_calls"] = named
        elif kept.get("role") == "tool":
            if "tool_call_id" in kept and kept["tool_call_id"] is None:
                del kept["tool_call_id"]
                same = (each for each, name in waiting.items() if kept.get("name") in (None, name))
                kept |= present({"tool_call_id": next(same, None)})
            waiting.pop(str(kept.get("tool_call_id")), None)
        made.append(kept)
    return made


# ---------------------------------------------------------------------- one message


def converted(message: Mapping[str, Any]) -> list[Json]:
    """Convert one message: each result in it is its own message, and what follows a result
    too."""
    fields = foreign_message(message)
    if "role" not in fields and "from" in fields:
        fields["role"] = fields.pop("from")
    if "role" in fields and "content" not in fields and "value" in fields:
        fields["content"] = fields.pop("value")
    if "content" not in fields and isinstance(fields.get("parts"), list):
        fields["content"] = fields.pop("parts")
    role = fields.get("role")
    wrong = f"a message has the role {role!r}: expected system, user, assistant or tool"[:150]
    if not isinstance(role, str):
        raise TraceError(wrong)
    role = role.lower()
    if role in CALLERS:
        return [_spoken_call(fields)]
    fields["role"] = ROLE_OF.get(role, fields["role"])
    _take_calls(fields)
    if role != "tool" and fields.get("role") == "tool":  # the older forms have no ids
        fields.setdefault("tool_call_id", None)
    content = fields.get("content")
    if not isinstance(content, list) or not any(map(_is_foreign, content)):
        return [fields]
    if role not in ROLE_OF:
        raise TraceError(wrong)
    return _split(fields, content)


def _take_calls(fields: Json) -> None:
    """Give the older `function_call`, and calls that have the function's own fields, the form of
    `tool_calls`."""
    if _is_flat(fields.get("function_call")) and not fields.get("tool_calls"):
        fields["tool_calls"] = [fields.pop("function_call")]
    if isinstance(listed := fields.get("tool_calls"), list) and any(map(_is_flat, listed)):
        fields["tool_calls"] = [
            _without_no_id(_call(each)) if _is_flat(each) else each for each in listed
        ]


def _spoken_call(fields: Json) -> Json:
    """A call that is a message's text: {"name", "arguments"}, or a list of them."""
    text = fields.pop("content", None)
    try:
        listed = parse_json(text) if isinstance(text, str) else text
    except ValueError as error:
        raise TraceError(f"a message of role {fields['role']!r} is not a call in JSON") from error
    calls = []
    for call in listed if isinstance(listed, list) else [listed]:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise TraceError(f"a message of role {fields['role']!r} holds a call without a name")
        key = which(call, _ARGUMENTS) or "arguments"
        made = chat_call(call.get("id"), call["name"], _json_text(call.get(key)))
        calls.append(_without_no_id(made | without(call, "name", key, "id")))
    return {**fields, "role": "assistant", "content": None, "tool_calls": calls}


def _split(fields: Json, parts: Sequence[Any]) -> list[Json]:
    """A message of parts as messages: results come first in what a user sends, and in their
    place in an answer."""
    rest = without(fields, "role", "content", "tool_calls", "step")
    role = fields.get("role")
    if role == "tool" and any(_kind(part) == "result" for part in parts):
        role = "user"  # role of content beside the results
    made: list[Json] = []
    current = _Open(role)
    current.calls += fields.get("tool_calls") or []
    if role != "assistant":
        parts = sorted(parts, key=lambda part: _kind(part) != "result")
    for part in parts:
        if _kind(part) == "result":
            if not current.is_empty:
                made.append(current.message())
                current = _Open(role)
            made.append(_result(part))
        else:
            if current.has_own_call and (_kind(part) != "call" or not is_own_call(_call(part))):
                made.append(current.message())  # an answer continues behind what the API did for it
                current = _Open(role)
            current.add(part)
    if not current.is_empty or not made:
        made.append(current.message())
    return _with_rest(made, role, rest, fields)


def _with_rest(made: list[Json], role: Any, rest: Json, fields: Json) -> list[Json]:
    """Give the first message of the role the fields of the message that was split; those which it
    has already are kept in its step."""
    first = next((message for message in made if message["role"] == role), made[0])
    number, hidden = made.index(first), rest
    if first["role"] != "tool":
        hidden = {key: value for key, value in rest.items() if key in first}
        made[number] = {**rest, **first}
    if hidden:
        made[number] = add_step(made[number], extra={"fields": hidden})
    if "step" not in fields:
        return made
    return [add_step(message, **fields["step"]) for message in made]


class _Open:
    """A message that grows by parts."""

    def __init__(self, role: Any) -> None:
        self.role = role
        self.parts: list[Any] = []
        self.thoughts: list[str] = []
        self.calls: list[Any] = []
        self.rests: list[Json] = []  # unread parts of thoughts, which become text

    @property
    def is_empty(self) -> bool:
        return not (self.parts or self.thoughts or self.calls or self.rests)

    @property
    def has_own_call(self) -> bool:
        return self.role == "assistant" and any(map(is_own_call, self.calls))

    def add(self, part: Any) -> None:
        kind = _kind(part)
        if kind == "call" and self.role == "assistant":
            self.calls.append(_call(part))
        elif kind == "thought" and self.role == "assistant":
            key, text = _thought(part)
            self.thoughts.append(text)
            rest = without(part, key, "thought")
            if set(rest) - {"type"}:
                self.rests.append(rest)
        else:
            self.parts.append(part)

    def message(self) -> Json:
        content = joined(self.parts)
        message: Json = {"role": self.role, "content": content or (None if self.calls else "")}
        if any(self.thoughts):
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return add_step(message, extra={"thoughts": self.rests}) if self.rests else message


# ---------------------------------------------------------------------- parts


def _kind(part: Any) -> str:
    """ "text", "thought", "call", "result" or "other"."""
    if isinstance(part, str):
        return "text"
    if not isinstance(part, Mapping):
        return "other"
    kind = part.get("type")
    if kind is None:
        return _kind_without_type(part)
    if not isinstance(kind, str):
        return "other"
    if kind in _THOUGHT:
        return "thought" if _thought(part)[0] else "other"
    if kind in _TEXT:
        return "text" if isinstance(part.get("text", part.get("content")), str) else "other"
    if kind.endswith(("tool_result", "tool_call_response")) or kind == "function_call_output":
        return "result"
    if kind.endswith(("tool_use", "tool_call")) or kind == "function_call":
        return "call" if _is_call(part) else "other"
    return "other"


def _kind_without_type(part: Mapping[str, Any]) -> str:
    """Gemini's parts have no type."""
    if isinstance(part.get("text"), str):
        return "thought" if part.get("thought") is True else "text"
    if which(part, _RESULT_KEYS, Mapping):
        return "result"
    is_call = any(_is_call(part.get(key)) for key in _CALL_KEYS) or _code(part) is not None
    return "call" if is_call else "other"


def _code(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((part[key] for key in _CODE_KEYS if which(part, [key], Mapping)), None)


def _is_call(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("name"), str)


def _is_flat(call: Any) -> bool:
    """Whether an entry of `tool_calls` has the function's own fields, as many data sets write
    it."""
    return _is_call(call) and "function" not in call and "custom" not in call


def _is_foreign(part: Any) -> bool:
    """Whether a part is none that OpenAI's chat has."""
    kind = _kind(part)
    if kind == "text" and isinstance(part, Mapping):
        return part.get("type") not in ("text",) or "text" not in part
    return kind in ("thought", "call", "result")


def _thought(part: Mapping[str, Any]) -> tuple[str | None, str]:
    """The key that holds a thought's text, and the text."""
    key = which(part, ("thinking", "text", "content", "reasoning"), str)
    return key, part.get(key or "", "")


def _call(part: Mapping[str, Any]) -> Json:
    if (code := _code(part)) is not None:
        rest = without(part, *_CODE_KEYS)
        part = {**rest, "type": "executable_code", "name": "code_execution", "args": dict(code)}
    outer = without(part, *_CALL_KEYS)
    key = next((key for key in _CALL_KEYS if _is_call(part.get(key))), None)
    inner, rest = outer, dict[str, Any]()
    if key is not None:
        inner, rest = dict(part[key]), without(outer, "type")
    ids = which(inner, _IDS) or "id"
    arguments = which(inner, _ARGUMENTS) or "input"
    rest |= without(inner, "name", "type", ids, arguments)
    if inner.get("type") not in (None, "tool_use", "tool_call", "function_call", "function"):
        rest["kind"] = inner["type"]
    name, text = inner["name"], _json_text(inner.get(arguments))
    call = chat_call(text_or_none(inner.get(ids)), name, text)
    return call | ({"rest": rest} if rest else {})


def _without_no_id(call: Json) -> Json:
    return {key: value for key, value in call.items() if key != "id" or value is not None}


def _result(part: Mapping[str, Any]) -> Json:
    key = which(part, _RESULT_KEYS, Mapping)
    inner, rest = part, dict[str, Any]()
    if key is not None:
        inner, rest = part[key], without(part, key, "type")
    ids = which(inner, (*_IDS[1:], "id")) or "id"
    content = which(present(inner), _RESULTS) or "content"
    message: Json = {
        "role": "tool",
        "tool_call_id": text_or_none(inner.get(ids)),
        "content": result_content(inner.get(content)),
    }
    if isinstance(inner.get("name"), str):
        message["name"] = inner["name"]
    if inner.get("is_error"):
        message["is_error"] = True
    taken = (ids, content, *(name for name in ("name", "is_error") if name in message))
    rest |= present(inner, *taken)
    if rest.get("is_error") is False:
        del rest["is_error"]
    if rest.get("type") in ("tool_result", "tool_call_response", "function_call_output"):
        del rest["type"]
    return add_step(message, extra={"fields": rest}) if rest else message


def result_content(value: Any) -> Any:
    """Return a tool's result as the content of a message: text, parts if there is more than
    text, or JSON text."""
    if value is None or isinstance(value, str):
        return value or ""
    if value == []:
        return ""
    is_list = isinstance(value, list)
    if is_list and all(_kind(part) == "text" or "type" in part for part in value):
        return joined(value)
    if isinstance(value, Mapping) and set(value) == {"content"}:
        return result_content(value["content"])
    return _json_text(value)


def joined(parts: Sequence[Any]) -> Any:
    """Text, if all parts are nothing but text; else a list of parts, texts in OpenAI's form."""
    if all(isinstance(part, str) or _is_plain(part) for part in parts):
        return "".join(mapping(p).get("text", mapping(p).get("content", p)) for p in parts)
    return [_as_part(part) for part in parts]


def _is_plain(part: Any) -> bool:
    return _kind(part) == "text" and set(part) - {"type"} in ({"text"}, {"content"})


def _as_part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if _kind(part) != "text":
        return part
    key = "text" if isinstance(part.get("text"), str) else "content"
    return {"type": "text", "text": part[key], **without(part, "type", "text", key)}


def _json_text(value: Any) -> str:
    if value is None:
        return "{}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------- tools


def tool_definitions(listed: Any, functions: Any = None) -> list[Json] | None:
    """Tool definitions in OpenAI's form: a list or JSON text of OpenAI's, Anthropic's
    (`input_schema`), Gemini's (`functionDeclarations`) or bare functions; `functions`: OpenAI's
    older field. Raises TraceError."""
    made: list[Json] = []
    for value in (listed, functions):
        if isinstance(value, str):
            try:
                value = parse_json(value) if value.strip() else None
            except ValueError as error:
                raise TraceError("'tools' is text, but not JSON") from error
        if value is not None and not (
            isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)
        ):
            raise TraceError("'tools' is not a list of objects")
        for tool in value or ():
            declared = tool.get(which(tool, _DECLARATIONS) or "")
            if isinstance(declared, list) and all(isinstance(each, Mapping) for each in declared):
                rest = without(tool, *_DECLARATIONS)
                made += [*map(tool_definition, declared), *filter(None, [rest])]
            else:
                made.append(tool_definition(tool))
    return made or None


def tool_definition(tool: Mapping[str, Any]) -> Json:
    if "function" in tool or not isinstance(tool.get("name"), str):
        return dict(tool)
    schema = which(tool, ("parameters", "input_schema", "inputSchema")) or "parameters"
    function = present({name: tool.get(name) for name in ("name", "description", "strict")})
    function |= present({"parameters": tool.get(schema)})
    rest = without(tool, "name", "description", "strict", schema, "type")
    if tool.get("type") not in (None, "function", "custom"):
        rest["kind"] = tool["type"]
    return {"type": "function", "function": function, **rest}


# ---------------------------------------------------------------------- what an API answered


def answers_of(response: Any) -> Iterator[tuple[Json, Mapping[str, Any]]]:
    """Yield each answer that an API gave, with the object around it: OpenAI's `choices`,
    Anthropic's message, Gemini's `candidates`."""
    response = mapping(response)
    listed = response.get("choices", response.get("candidates"))
    if isinstance(listed, list):
        for choice in listed:
            inner = mapping(choice).get("message", mapping(choice).get("content"))
            if isinstance(inner, Mapping):
                yield {"role": "assistant", **inner}, choice
    elif response.get("role") == "assistant" and "content" in response:
        yield {key: response[key] for key in ("role", "content")}, response

"""The one reader of chat messages: what clients, rows and logs write → messages as every other part
takes them.

Readers of requests and rows call `read_messages` for their errors; `Tokenizer.render_chat_text`
calls it again, so that nothing reaches a chat template in another way. It is idempotent, and its
result is plain JSON:

    content       a string: text parts are joined (`PartsText`), null is "", an assistant's
                  `refusal` stands for missing content
    tool_calls    [{"type", "function": {"name", "arguments"}, …}]; arguments stay as written, an
                  object or text
    role          "function" is "tool", an assistant's `function_call` is a tool call (OpenAI's
                  older form)
    name          a result of a tool has the name of the function whose call it answers
    reasoning     also under `reasoning_content` and `thinking`, the names that templates read

Other fields are carried along, nulls are left out. Other content is refused by its place.

Where parts beside text are asked for, a content of a user or a tool with some is a list of parts,
{"type": "text", "text"} and {"type": its kind's name, …}, whose further fields are the source that
the client wrote (`execution/parts/`).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.parts.kinds import Shown, kind_of

ROLES = ("system", "user", "assistant", "tool")
DEVELOPER = "developer"  # OpenAI's name of system for models that reason
FUNCTION = "function"  # OpenAI's older name of tool
CUSTOM_ARGUMENT = "input"  # argument of the function that represents a custom tool
SHOWERS = ("user", "tool")  # whose messages may hold parts beside text
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_SPEAKERS: dict[str, tuple[str, ...]] = {
    "system": ("system", "system_instruction"),
    "developer": ("developer",),
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "model", "bot", "ai", "chatgpt", "bing", "bard"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "ipython"),
}
ROLE_OF = {name: role for role, names in _SPEAKERS.items() for name in names}
"""Names of speakers in other programs' logs and rows (ShareGPT's, Gemini's) → roles."""
# an assistant's turn whose text is the call, as JSON
CALLERS = ("function_call", "tool_call", "function-call")
REASONING = ("reasoning_content", "thinking", "reasoning")  # in transformers' order
WEIGHTS = ("weight", "train", "trainable", "loss", "loss_weight", "loss_mask")
"""Fields of messages in many programs' rows that say whether an answer is learned: 0 or 1."""
ARGUMENT_NAMES = ("arguments", "parameters", "input", "args")
"""Names of a call's arguments in rows and logs; the first is OpenAI's."""
_OF_CALLS = ("name", "id", "call_id", "tool_call_id", "type", "index", "description", "strict")
# fields that an assistant may have in place of content
ANSWERS = (*REASONING, "tool_calls", "function_call", "refusal")

# `role == "…"`, `["role"] != '…'`, `role in ("…", "…")`: comparisons of a role in a chat template
ROLE_COMPARED = (
    r"""\brole["']?\]?\s*(?:[!=]=\s*|(?:not\s+)?in\s*[\[(](?:\s*["'][^"']*["']\s*,)*\s*)"""
)


def read_messages(
    messages: Iterable[Any], where: str = "messages", *, shown: Shown = ()
) -> list[dict[str, Any]]:
    """Return messages in the one form. `where` begins the place that an error names; `shown`: what
    users and results of tools may hold beside text.

    Raises RequestError: a value that is not a message, content that is not text, a call without a
    name or with arguments that are neither an object nor text.
    """
    read = [_message(message, where, position, shown) for position, message in enumerate(messages)]
    names: dict[str, str] = {}
    for message in read:
        names |= {
            str(call.get("id")): call["function"]["name"] for call in message.get("tool_calls", ())
        }
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and name is not None:
            message.setdefault("name", name)  # Hermes' template wants it
    return read


def read_tools(tools: Any, where: str = "tools") -> list[dict[str, Any]]:
    """Return a row's definitions of tools in OpenAI's form: a list, or JSON text of one; [] for
    none.

    Raises RequestError.
    """
    try:
        read = json.loads(tools.strip() or "[]") if isinstance(tools, str) else tools or []
    except ValueError as error:
        raise RequestError(f"{where} is text, but not JSON: {error}", param=where) from error
    if not (isinstance(read, list | tuple) and all(isinstance(tool, Mapping) for tool in read)):
        raise RequestError(f"{where} is not a list of objects (or JSON text of one)", param=where)
    return [_tool(tool) for tool in read]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a definition in OpenAI's form, without nulls. Its keys keep their order, in which
    templates print them."""
    fields = {key: value for key, value in tool.items() if value is not None}
    if "function" not in fields and "name" in fields:
        fields = {
            "type": "function",
            "function": {key: value for key, value in fields.items() if key != "type"},
        }
    if isinstance(fields.get("function"), Mapping):
        fields["function"] = {
            key: without_nulls(value) if key in SCHEMAS else value
            for key, value in fields["function"].items()
            if value is not None
        }
    if "input_schema" in fields:
        fields["input_schema"] = without_nulls(fields["input_schema"])
    return fields


class PartsText(str):
    """The text of a content that was written as parts. `parts`: their texts, for a chat template
    that reads parts one by one."""

    parts: tuple[str, ...]

    def __new__(cls, parts: Iterable[str]) -> "PartsText":
        texts = tuple(parts)
        joined = super().__new__(cls, "".join(texts))
        joined.parts = texts
        return joined

    def __getnewargs__(self) -> tuple[tuple[str, ...]]:  # type: ignore[override]
        return (self.parts,)


SCHEMAS = ("parameters", "input_schema", "inputSchema", "returns", "return", "output_schema")
"""Fields of a function's definition that are JSON schemas."""
_VALUES = ("default", "const", "enum", "examples", "example")  # values, which may be null
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def without_nulls(schema: Any, *, by_name: bool = False) -> Any:
    """Return a schema without the nulls that Arrow puts if another row has a key. A default,
    constant or listed value that is null stays. `by_name`: an object of schemas by name."""
    if isinstance(schema, list | tuple):
        return [without_nulls(each) for each in schema if each is not None]
    if not isinstance(schema, Mapping):
        return schema
    if by_name:
        return {key: without_nulls(each) for key, each in schema.items() if each is not None}
    return {
        key: value if key in _VALUES else without_nulls(value, by_name=key in _BY_NAME)
        for key, value in schema.items()
        if value is not None or key in ("default", "const", "example")
    }


def parts_as_written(content: Any) -> Any:
    """Return a content that was written as parts as a list of them again; others as they are."""
    if not isinstance(content, PartsText):
        return content
    return [{"type": "text", "text": text} for text in content.parts]


def content_text(content: Any, where: str) -> str:
    """Return a message's content as text: a string, or the joined texts of its parts
    (`PartsText`). Raises RequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{where}: must be a string or a list of parts, not {_kind(content)}", param=where
        )
    return PartsText(part_text(part, f"{where}.{index}") for index, part in enumerate(content))


def parts_of(content: Any, where: str, shown: Shown) -> str | list[dict[str, Any]]:
    """Return a content as text, or as a list of parts if it has some that are `shown`. Raises
    RequestError."""
    if not isinstance(content, list | tuple):
        return content_text(content, where)
    kinds = [kind_of(part, shown) for part in content]
    if not any(kinds):
        return content_text(content, where)
    parts: list[dict[str, Any]] = []
    for index, (part, kind) in enumerate(zip(content, kinds, strict=True)):
        if kind is None:
            add_text(parts, part_text(part, f"{where}.{index}"))
        else:
            parts.append({**part, "type": kind.name})
    return parts


def add_text(parts: list[dict[str, Any]], text: str) -> None:
    """Put a text behind the parts of a content; it continues with the last one."""
    if parts and parts[-1]["type"] == "text":
        parts[-1]["text"] += text
    elif text:
        parts.append({"type": "text", "text": text})


def part_text(part: Any, where: str) -> str:
    """Return the text of one part of a content. Raises RequestError: a part that is not a text."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else _kind(part)
    name = TEXT_PARTS.get(kind) if isinstance(part, Mapping) and isinstance(kind, str) else None
    text = None if name is None else part.get(name)
    if isinstance(text, str):
        return text
    reason = f"{where}: only text parts can be read (got {kind!r})"
    if name is not None:
        others = ", ".join(repr(k) for k, v in part.items() if k != "type" and v is not None)
        others = others or "nothing else"
        problem = f"has no field {name!r}" if text is None else f"has a {name!r} that is not text"
        reason = f"{where}: a part of type {kind!r} {problem} (it has {others})"
    raise RequestError(reason, param=where, code="unsupported_content")


def weight_of(message: Mapping[str, Any], where: str) -> int | None:
    """Return 0 if a field of a message says that it is context, not learned; 1 if one says
    that it is; None: none says it. Raises RequestError: a weight that is neither 0 nor 1."""
    fields = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
    for key, value in fields.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RequestError(
                f"{where}.{key} is {value!r:.80}; expected 0 (context that is not learned) or 1",
                param=f"{where}.{key}",
            )
    return int(all(fields.values())) if fields else None


def in_known_roles(
    messages: Sequence[dict[str, Any]], template: str | None
) -> list[dict[str, Any]]:
    """Return messages whose roles a chat template knows: `developer` becomes `system` if it does
    not name it.

    A template that meets another role may leave its message out without a word (Qwen3's does).
    None: a template that cannot be read, because it is written in Python. Raises RequestError: an
    unknown role.
    """
    if template is None:
        return list(messages)
    roles = {message["role"] for message in messages}
    template_roles = {
        *ROLES,
        *(
            role
            for role in roles
            if re.search(ROLE_COMPARED + rf"['\"]{re.escape(role)}['\"]", template)
        ),
    }
    for position, message in enumerate(messages):
        if message["role"] not in template_roles | {DEVELOPER}:
            raise RequestError(
                f"messages.{position}.role: {message['role']!r} is not a role of this model's chat"
                f" template; there are {', '.join((*ROLES, DEVELOPER))}",
                param=f"messages.{position}.role",
            )
    return [
        {**message, "role": "system"} if message["role"] not in template_roles else message
        for message in messages
    ]


def _message(message: Any, where: str, position: int, shown: Shown) -> dict[str, Any]:
    place = f"{where}.{position}"
    is_object = isinstance(message, Mapping)
    fields = (
        {str(key): value for key, value in message.items() if value is not None}
        if is_object
        else {}
    )
    role = fields.pop("role", None)
    answered = role == "assistant" and any(fields.get(name) for name in ANSWERS)
    if not isinstance(role, str) or not role or not ("content" in message or answered):
        reason = (
            f'{where}: message {position} is not {{"role": …, "content": text}}: {message!r:.200}'
        )
        raise RequestError(reason, param=place)
    role = "tool" if role == FUNCTION else role
    if fields.get("audio") is not None:
        reason = f"{place}.audio: only text can be read"
        raise RequestError(reason, param=f"{place}.audio", code="unsupported_content")
    content: str | list[dict[str, Any]]
    if shown and role in SHOWERS:
        content = parts_of(fields.pop("content", ""), f"{place}.content", shown)
    else:
        content = _content(fields, role, place)
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    if isinstance(reasoning, str):
        fields |= {"reasoning_content": reasoning} | (
            {} if "thinking" in fields else {"thinking": reasoning}
        )
    calls = _calls(fields, place)
    return {"role": role, "content": content, **fields} | ({"tool_calls": calls} if calls else {})


def _content(fields: dict[str, Any], role: str, place: str) -> str:
    text = content_text(fields.pop("content", ""), f"{place}.content")
    refusal = fields.get("refusal")
    return refusal if role == "assistant" and not text and isinstance(refusal, str) else text


def _calls(fields: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Take the calls out of a message's fields."""
    calls, old = fields.pop("tool_calls", None) or [], fields.pop("function_call", None)
    if not isinstance(calls, list | tuple):
        calls = [calls]
    read = [_call(call, f"{place}.tool_calls.{index}") for index, call in enumerate(calls)]
    if old is not None:
        if read:
            reason = f"{place}: has both 'tool_calls' and 'function_call': send one of them"
            raise RequestError(reason, param=f"{place}.function_call")
        read = [_call({"function": old}, f"{place}.function_call")]
    return read


def _call(call: Any, place: str) -> dict[str, Any]:
    fields = (
        {key: value for key, value in call.items() if value is not None}
        if isinstance(call, Mapping)
        else {}
    )
    function = fields.get("function")
    if isinstance(fields.get("custom"), Mapping):  # OpenAI's custom tool: its input is a text
        custom = fields.pop("custom")
        written = json.dumps({CUSTOM_ARGUMENT: custom.get("input", "")}, ensure_ascii=False)
        fields["type"], function = "function", {"name": custom.get("name"), "arguments": written}
    # the function's own fields, as many data sets have them
    elif function is None and "name" in fields:
        function = {name: fields.pop(name) for name in ("name", *ARGUMENT_NAMES) if name in fields}
        if len(function) == 1:
            function |= {key: fields[key] for key in fields if key not in _OF_CALLS}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place}: a tool call has a 'function' with a 'name'", param=place)
    written = next((key for key in ARGUMENT_NAMES if key in function), ARGUMENT_NAMES[0])
    function = _with_arguments(function, place)
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = {}
    if not isinstance(arguments, str):
        arguments = _json_object(arguments, f"{place}.function.{written}")
    return {"type": "function", **fields, "function": {**function, "arguments": arguments}}


def _with_arguments(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a call's function with its arguments under that name. Raises RequestError: they may
    be under a name that is not read."""
    fields = {key: value for key, value in function.items() if value is not None}
    if "arguments" not in fields:
        name = next((name for name in ARGUMENT_NAMES if name in fields), None)
        if name is not None:
            return {("arguments" if key == name else key): fields[key] for key in fields}
        if others := [key for key in fields if key not in _OF_CALLS]:
            raise RequestError(
                f"{place}: a call of {fields['name']!r} has no 'arguments' (it has"
                f" {', '.join(map(repr, others))})",
                param=place,
            )
    return fields


def _json_object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{place}: must be a JSON object, written as a string", param=place)
    try:
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise RequestError(f"{place}: is nested too deeply", param=place) from error
    except (ValueError, TypeError) as error:
        raise RequestError(f"{place}: is not JSON: {error}", param=place) from error
    return dict(value)


def _kind(value: Any) -> str:
    return {"dict": "an object", "NoneType": "null"}.get(type(value).__name__, type(value).__name__)

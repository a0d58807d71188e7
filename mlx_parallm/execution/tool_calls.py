"""Tool definitions for a model's prompt, and the parser of tool calls in its text. No MLX.

    "own"       text between the model's own markers (mlx-lm's parser for its chat template)
    "xml"       <invoke name="search"><parameter name="query">MLX</parameter></invoke>
    "json"      ```json {"tool": "search", "arguments": {"query": "MLX"}} ```, a list of them, or
                only JSON
    "use_tool"  USE_TOOL[search](MLX)
    "tool_line" TOOL: search(query="MLX"), on its own line (action_grammar.py)
    "function"  search(query="MLX"), for the names in `tools`

A model may write anything: a text that begins as a call and cannot be read is a `MalformedCall`
beside the calls, never an exception. What it drafts in its reasoning is no call. Formats are tried
in this order; a format does not see text that an earlier one has read.
"""

import html
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from pydantic import PydanticUserError, TypeAdapter

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.action_grammar import HOW_TO_ACT, Action, parse_actions
from mlx_parallm.execution.call_arguments import (
    UnreadableError,
    checked_object,
    closing_bracket,
    read_arguments,
    read_json,
    read_object,
)
from mlx_parallm.execution.call_formats import (
    ARGUMENT_KEYS,
    OTHER_KEYS,
    ReadCalls,
    bare_calls,
    reader_of,
)
from mlx_parallm.execution.call_text import MARKUP, inside_value
from mlx_parallm.execution.chat_messages import content_text
from mlx_parallm.execution.typed_values import argument_schema, typed_value
from mlx_parallm.types import ChatTokenizer

Format = Literal["own", "xml", "json", "use_tool", "tool_line", "function"]
Call = tuple[str, dict[str, Any]]
Place = tuple[int, int, Callable[[], list[Call]]]
"""Start, end, and a function that reads the calls there: [] = there is no call; raises
UnreadableError."""
Tools = Mapping[str, Mapping[str, Any]]  # definitions by name
ToolLike = str | Mapping[str, Any] | Callable[..., Any]

FORMATS: tuple[Format, ...] = get_args(Format)
HOW_TO_CALL: Mapping[str, str] = {
    "json": 'To call one, write\n```json\n{"tool": "NAME", "arguments": {...}}\n```',
    "xml": (
        'To call one, write\n<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>'
    ),
    "use_tool": "To call one, write USE_TOOL[NAME](KEY=VALUE)",
    "tool_line": HOW_TO_ACT,
    "function": "To call one, write NAME(KEY=VALUE)",
}
# characters that are read to tell whether the marks of a text are in arguments
MOST_WORK = 10_000_000
# the argument that holds the text of a USE_TOOL call whose arguments are plain words
RAW_INPUT = "input"
NAME_KEYS = ("tool", "name")
THINKING = ("<think>", "</think>")
MOST_CALLS = 16  # that an answer may end with which has not ended its reasoning

# A run of white space is taken whole (`*+`): tried in parts, a long one would hold up all threads
# for minutes.
_FENCE = re.compile(
    r"```[ \t]*+(?:json|tool_call|tool)?(\s*+[{\[].*?)```", re.DOTALL | re.IGNORECASE
)
_NAMES_A_TOOL = re.compile(r'"(?:tool|name)"\s*:')
_INVOKE = re.compile(r"<invoke\b([^>]*?)(?:/>|>(.*?)</invoke\s*>)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter\b([^>]*)>(.*?)</parameter\s*>", re.DOTALL)
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_USE_TOOL = re.compile(r"USE_TOOL\[\s*+([^\[\]\n]*+)\s*+\]\s*+\(")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `text[start_pos:end_pos] == raw_text`; calls of one block share the block's
    place."""

    name: str
    arguments: Mapping[str, Any]  # JSON values
    raw_text: str
    start_pos: int
    end_pos: int


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A text that begins as a call and cannot be read, with its place as in ToolCall."""

    reason: str
    raw_text: str
    start_pos: int
    end_pos: int


class ParsedCalls(tuple[ToolCall, ...]):
    """The calls of one text in order, and its malformed calls."""

    malformed: tuple[MalformedCall, ...]

    def __new__(
        cls, calls: Iterable[ToolCall] = (), malformed: Iterable[MalformedCall] = ()
    ) -> "ParsedCalls":
        parsed = super().__new__(cls, calls)
        parsed.malformed = tuple(malformed)
        return parsed


@dataclass(frozen=True, slots=True)
class OwnFormat:
    """The format that the model was trained on (`Tokenizer.tool_markers`, `.parse_tool_call`).

    `markers`: (start, end); end is "" if a call ends at the next start or with the text.
    `parse(text, tools)` reads the text between them; it may raise anything.
    """

    markers: tuple[str, str]
    parse: Callable[[str, Any], Any]


def parse_tool_calls(
    text: str,
    tools: Sequence[ToolLike] = (),
    formats: Format | Literal["auto"] | Sequence[Format] = "auto",
    *,
    model_format: OwnFormat | None = None,
    thinking: tuple[str, str] | None = None,
) -> ParsedCalls:
    """Return the calls in `text`, behind its reasoning.

    Args:
        tools: the tools that may be called. A call of another one is returned too (the caller
            answers it), but "function" needs the names, and positional arguments need the
            parameters.
        formats: "auto" = all; "function" needs `tools`, "own" needs `model_format`.
        thinking: (start, end) of the reasoning, `THINKING` if it is None. The prompt may have
            opened it.

    Raises ConfigError: an unknown format, or an entry of `tools` that is not a tool. No `text`
    raises anything.
    """
    definitions = {definition["name"]: definition for definition in map(tool_definition, tools)}
    chosen = _chosen(formats, model_format, definitions)
    if "own" not in chosen:
        model_format = None
    calls_of = partial(_calls_in, tools=definitions, formats=chosen, model_format=model_format)
    begin = _answer_begin(text, thinking or THINKING, model_format, calls_of)
    parsed = calls_of(text[begin:])

    def place(call: ToolCall | MalformedCall) -> dict[str, Any]:
        return {"start_pos": call.start_pos + begin, "end_pos": call.end_pos + begin}

    return ParsedCalls(
        [replace(call, **place(call)) for call in parsed],
        [replace(call, **place(call)) for call in parsed.malformed],
    )


def _answer_begin(
    text: str,
    thinking: tuple[str, str],
    model_format: OwnFormat | None,
    calls_of: Callable[[str], ParsedCalls],
) -> int:
    """Return the place behind the reasoning. One that does not end has drafts in the model's own
    format, but for the calls that the text ends with."""
    start, end = thinking
    at, opens = text.find(end), text.lstrip().startswith(start)
    if at >= 0:
        # a mark in an argument is text of it
        is_mark = opens or not any(c.start_pos <= at < c.end_pos for c in calls_of(text))
        return at + len(end) if is_mark and (opens or start not in text[:at]) else 0
    marker = "" if model_format is None else model_format.markers[0]
    if not opens or not marker or marker not in text:
        return 0
    for begun in [*re.finditer(re.escape(marker), text)][-MOST_CALLS:]:
        rest, calls = text[begun.start() :], calls_of(text[begun.start() :])
        for first, last in sorted({(c.start_pos, c.end_pos) for c in calls}, reverse=True):
            rest = rest[:first] + rest[last:]
        if calls and not rest.strip():
            return begun.start()
    return len(text)


def _calls_in(
    text: str, *, tools: Tools, formats: Sequence[Format], model_format: OwnFormat | None
) -> ParsedCalls:
    calls: list[ToolCall] = []
    malformed: list[MalformedCall] = []
    for form in formats:
        taken = [(c.start_pos, c.end_pos) for c in calls] + [
            (m.start_pos, m.end_pos) for m in malformed
        ]
        places = (
            _own_places(text, model_format, tools)
            if model_format and form == "own"
            else _PLACES[form](text, tools)
        )
        for start, end, read in places:
            if any(start < other_end and other_start < end for other_start, other_end in taken):
                continue
            try:
                calls += [ToolCall(*call, text[start:end], start, end) for call in read()]
            except UnreadableError as error:
                malformed.append(MalformedCall(str(error), text[start:end], start, end))
    calls.sort(key=lambda call: call.start_pos)
    malformed.sort(key=lambda call: call.start_pos)
    return ParsedCalls(calls, malformed)


def read_calls(
    parse: Callable[[str, Any], Any], text: str, tools: Any
) -> list[tuple[str, dict[str, Any], str | None]]:
    """Return (name, arguments, id or None) of the calls in a model's own format; [] without a
    call, or if any part of the text cannot be read."""
    calls, rest = read_region(parse, text, tools)
    return [] if rest.strip() else calls


def read_region(parse: Callable[[str, Any], Any], text: str, tools: Any) -> ReadCalls:
    """Return the calls between a model's own markers, and the text behind them if the format
    has no end marker; no calls if any other part cannot be read."""
    try:
        if (reader := reader_of(parse)) is not None:
            calls, rest = reader(text, tools or ())
        else:
            parsed = parse(text, tools)
            entries = parsed if isinstance(parsed, list) else [parsed]
            calls, rest = [_own_call(call) for call in entries], ""
        for name, arguments, _ in calls:
            if not (isinstance(name, str) and name):
                return ReadCalls([])
            name.encode()
            json.dumps(arguments, allow_nan=False)
        return ReadCalls(calls, rest if calls else "")
    except Exception:  # noqa: BLE001 - boundary: a parser may raise anything on a malformed call
        return ReadCalls([])


def _own_call(call: Any) -> tuple[str, dict[str, Any], str | None]:
    """Raises TypeError, KeyError or ValueError: `call` is none."""
    name, arguments, call_id = call["name"], call.get("arguments") or {}, call.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("a call has an object of arguments")
    return name, arguments, call_id if isinstance(call_id, str) and call_id else None


def _chosen(formats: Any, model_format: OwnFormat | None, tools: Tools) -> list[Format]:
    """Raises ConfigError."""
    if formats == "auto":
        return [
            form
            for form in FORMATS
            if not ((form == "own" and model_format is None) or (form == "function" and not tools))
        ]
    requested = (formats,) if isinstance(formats, str) else tuple(formats)
    for form in requested:
        if form not in FORMATS:
            raise ConfigError(f"tool-call format {form!r} is none of: auto, {', '.join(FORMATS)}")
        if form == "own" and model_format is None:
            raise ConfigError('tool-call format "own": mlx-lm has no parser for this model')
    return [form for form in FORMATS if form in requested]


# ------------------------------------------------------------------ where calls are


def _own_places(text: str, model_format: OwnFormat, tools: Tools) -> Iterator[Place]:
    """The regions between the model's markers, and calls of declared tools that it wrote without
    them."""
    start_marker, end_marker = model_format.markers
    form = model_format.parse.__module__.rpartition(".")[2]
    bare, bare_end = bare_calls(form, openai_tools(tools.values()))
    starts, work = _any_of(start_marker, *bare), [0]
    begun = starts.search(text)
    while begun is not None:
        at, inside = begun.start(), begun.end()
        if begun.group() in bare:
            calls, end = _bare_call(text, at, bare_end, model_format, tools, work)
            if calls:
                yield at, end, partial(_plain_calls, calls)
            begun = starts.search(text, end if calls else inside)
            continue
        ending = _end_of_own(
            text, inside, _any_of(start_marker, end_marker), model_format, tools, work
        )
        stop = len(text) if ending is None else ending.start()
        end = stop if ending is None or ending.group() != end_marker else ending.end()
        read = read_region(model_format.parse, text[inside:stop], openai_tools(tools.values()))
        if read.calls:
            yield at, end - len(read.rest), partial(_plain_calls, read.calls)
        else:
            yield at, end, _unreadable
        begun = starts.search(text, end)


def _bare_call(
    text: str, at: int, end_tag: str, model_format: OwnFormat, tools: Tools, work: list[int]
) -> tuple[list[tuple[str, dict[str, Any], str | None]], int]:
    """The call that begins at `at`, and its end: the first end tag that makes it one."""
    end = text.find(end_tag, at)
    while end >= 0 and work[0] < MOST_WORK:
        end += len(end_tag)
        work[0] += end - at
        calls = read_calls(model_format.parse, text[at:end], openai_tools(tools.values()))
        if calls:
            return calls, end
        end = text.find(end_tag, end)
    return [], at


def _end_of_own(
    text: str,
    inside: int,
    marks: re.Pattern[str],
    model_format: OwnFormat,
    tools: Tools,
    work: list[int],
) -> re.Match[str] | None:
    """The first mark that is in no argument. A broken call, which never ends, does at its
    first. `work`: how many characters were read to tell, of all calls."""

    form = model_format.parse.__module__.rpartition(".")[2]

    def is_inside(end: int) -> bool:
        work[0] += end - inside
        if work[0] >= MOST_WORK or not inside_value(form, text[inside:end]):
            return False
        unclear = form not in MARKUP and text.startswith(model_format.markers[1] or "\0", end)
        definitions = openai_tools(tools.values())
        return not (unclear and read_calls(model_format.parse, text[inside:end], definitions))

    first = ending = marks.search(text, inside)
    while ending is not None and is_inside(ending.start()):
        ending = marks.search(text, ending.end())
    if ending is None and first is not None and is_inside(len(text)):
        return first
    return ending


def _any_of(*marks: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark) for mark in marks if mark))


def _xml_places(text: str, tools: Tools) -> Iterator[Place]:
    at = 0
    while (start := text.find("<invoke", at)) >= 0:
        match = _INVOKE.match(text, start)
        at = match.end() if match else len(text)
        yield (
            start,
            at,
            partial(_xml_call, match, tools) if match else partial(_unclosed, "<invoke>"),
        )


def _json_places(text: str, tools: Tools) -> Iterator[Place]:
    fences = list(_FENCE.finditer(text))
    for match in fences:
        yield match.start(), match.end(), partial(_json_calls, match[1])
    bare = text.strip()
    if not fences and bare[:1] in ("{", "["):
        start = text.index(bare[0])
        yield start, start + len(bare), partial(_json_calls, bare)


def _use_tool_places(text: str, tools: Tools) -> Iterator[Place]:
    at = 0
    while (match := _USE_TOOL.search(text, at)) is not None:
        name, inside = match[1].rstrip(), match.end()
        parameters = _parameters(tools, name)
        # In plain words an apostrophe is not a quotation mark; in a list of arguments it is.
        plain = closing_bracket(text, inside - 1, "\"'", words=True)
        # a mark here, its pair in the next call
        if plain is not None and _USE_TOOL.search(text, inside, plain):
            plain = None
        ends = [
            end
            for quotes in ("\"'", "")
            if (end := closing_bracket(text, inside - 1, quotes)) is not None
        ]
        if plain is None and not ends:
            yield match.start(), len(text), partial(_unclosed, "the parenthesis")
            return
        at = plain or ends[-1]
        arguments: dict[str, Any] = {(parameters or [RAW_INPUT])[0]: text[inside : at - 1].strip()}
        for end in reversed(ends):
            with suppress(UnreadableError):
                arguments = read_arguments(text[inside : end - 1], parameters)
                at = end
        yield match.start(), at, partial(_use_tool_call, name, arguments)


def _line_places(text: str, tools: Tools) -> Iterator[Place]:
    for action in parse_actions(text, {name: _parameters(tools, name) for name in tools}):
        if action.kind == "tool":
            yield action.start, action.end, partial(_line_call, action)


def _line_call(action: Action) -> list[Call]:
    if action.error is not None:
        raise UnreadableError(action.error)
    return [(action.name, dict(action.arguments))]


def _function_places(text: str, tools: Tools) -> Iterator[Place]:
    names = (
        "|".join(re.escape(name) for name in sorted(tools, key=len, reverse=True)) or r"[^\W\d]\w*"
    )
    # "add" is not part of "re-add" or "ns/add"
    pattern, at = re.compile(rf"(?<![\w.])(?<!\w[-/])({names})\s*\("), 0
    while (match := pattern.search(text, at)) is not None:
        end = closing_bracket(text, match.end() - 1, "\"'")
        at = len(text) if end is None else end
        call = partial(_function_call, match[1], text[match.end() : at - 1], tools)
        yield match.start(), at, partial(_unclosed, "the parenthesis") if end is None else call


_PLACES: Mapping[Format, Callable[[str, Tools], Iterator[Place]]] = {
    "xml": _xml_places,
    "json": _json_places,
    "use_tool": _use_tool_places,
    "tool_line": _line_places,
    "function": _function_places,
}


# ------------------------------------------------------------------ reading a place


def _unclosed(what: str) -> list[Call]:
    raise UnreadableError(f"{what} is not closed")


def _unreadable() -> list[Call]:
    raise UnreadableError("the model's own format cannot be read")


def _plain_calls(calls: Sequence[tuple[str, dict[str, Any], str | None]]) -> list[Call]:
    return [(name, arguments) for name, arguments, _ in calls]


def _xml_call(match: re.Match[str], tools: Tools) -> list[Call]:
    name = _attribute(match[1])
    if not name:
        raise UnreadableError("<invoke> has no name")
    parameters, rest = _xml_parameters(match[2] or "")
    if rest:
        raise UnreadableError(f"there is {rest[:40]!r} between the parameters")
    parameters_schema, arguments = tools.get(name, {}).get("parameters"), dict[str, Any]()
    for parameter in parameters:
        key, value = _attribute(parameter[1]), html.unescape(parameter[2])
        if not key or key in arguments:
            raise UnreadableError("a parameter has no name, or is repeated")
        schema = argument_schema(parameters_schema, key)
        if schema is True:  # undeclared
            arguments[key] = _json_or_text(value.strip())
        else:
            arguments[key] = typed_value(value, schema, parameters_schema)
    return [(name, arguments)]


def _xml_parameters(body: str) -> tuple[list[re.Match[str]], str]:
    """Return the <parameter> elements of a call, and the first text between or after them ("":
    none).

    It stops at the first text that is not a parameter: a search behind an unclosed one would read
    to the end each time.
    """
    parameters, at = list[re.Match[str]](), _end_of_space(body, 0)
    while at < len(body):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            following = body.find("<parameter", at + 1)
            return parameters, body[at : following if following > 0 else len(body)].strip()
        parameters.append(parameter)
        at = _end_of_space(body, parameter.end())
    return parameters, ""


def _end_of_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _json_calls(body: str) -> list[Call]:
    try:
        value = read_json(body)
    except UnreadableError:
        if _NAMES_A_TOOL.search(body):
            raise
        return []
    entries = [_json_call(entry) for entry in (value if isinstance(value, list) else [value])]
    calls = [call for call in entries if call is not None]
    if calls and len(calls) < len(entries):
        raise UnreadableError("a list of calls contains something else")
    return calls


def _json_call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    keys = [key for key in ARGUMENT_KEYS if key in value]
    if name is None or not (keys or "tool" in value):  # {"name": "Ada"} is not a call
        return None
    if not isinstance(name, str) or not name:
        raise UnreadableError(f"the tool's name is {name!r}")
    others = sorted(value.keys() - {*NAME_KEYS, *OTHER_KEYS, "thought", "reasoning"})
    if not keys and others:
        raise UnreadableError(f"the call has no arguments, but {', '.join(map(repr, others))}")
    arguments = (value[keys[0]] if keys else None) or {}
    return name, read_object(arguments) if isinstance(arguments, str) else checked_object(arguments)


def _use_tool_call(name: str, arguments: dict[str, Any]) -> list[Call]:
    if not name:
        raise UnreadableError("USE_TOOL[] names no tool")
    return [(name, arguments)]


def _function_call(name: str, source: str, tools: Tools) -> list[Call]:
    return [(name, read_arguments(source, _parameters(tools, name)))]


def _json_or_text(source: str) -> Any:
    try:
        return read_json(source)
    except UnreadableError:
        return source


def _attribute(head: str) -> str:
    match = _NAME.search(head)
    return html.unescape(match[1] or match[2] or "").strip() if match else ""


def _parameters(tools: Tools, name: str) -> list[str]:
    return list(tools.get(name, {}).get("parameters", {}).get("properties", {}))


# ------------------------------------------------------------------ definitions of tools


def tool_definition(tool: ToolLike) -> dict[str, Any]:
    """Return {"name", "description", "parameters": JSON schema}.

    Args:
        tool: a name, such a dictionary (or OpenAI's {"type": "function", "function": …}), or a
            function, whose annotations make the schema.

    Raises ConfigError.
    """
    if isinstance(tool, str):
        entry: dict[str, Any] = {"name": tool}
    elif isinstance(tool, Mapping):
        inner = tool.get("function")
        entry = dict(inner if isinstance(inner, Mapping) else tool)
    elif callable(tool):
        entry = _definition_of(tool)
    else:
        raise ConfigError(
            f"a tool is a name, a dictionary with a name, or a function; got {tool!r}"
        )
    if not isinstance(entry.get("name"), str) or not entry["name"].strip():
        raise ConfigError(f"a tool needs a name; got {tool!r}")
    schema = entry.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties", {}), Mapping):
        raise ConfigError(
            f"tool {entry['name']!r}: 'parameters' is not the JSON schema of an object: {schema!r}"
        )
    first = {
        "name": entry["name"],
        "description": entry.get("description") or "",
        "parameters": schema,
    }
    return first | {key: value for key, value in entry.items() if key not in first}


def _definition_of(function: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        schema = TypeAdapter[Any](function).json_schema()  # type: ignore[arg-type]  # its types name no functions
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        raise ConfigError(f"tool {name!r}: its parameters have no JSON schema: {error}") from error
    if schema.get("type") != "object":
        raise ConfigError(f"tool {name!r}: its parameters must be callable by name")
    return {
        "name": name,
        "description": (inspect.getdoc(function) or "").split("\n\n")[0],
        "parameters": schema,
    }


def openai_tools(definitions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the definitions as chat templates and endpoints take them."""
    return [{"type": "function", "function": dict(definition)} for definition in definitions]


def own_format(tokenizer: ChatTokenizer | None) -> OwnFormat | None:
    """Return the model's own format of calls, or None if mlx-lm has no parser for it."""
    if tokenizer is None or tokenizer.tool_markers is None or tokenizer.parse_tool_call is None:
        return None
    return OwnFormat(tokenizer.tool_markers, tokenizer.parse_tool_call)


def prompt_with_tools(
    prompt: Any,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer | None,
    formats: Format | Literal["auto"] | Sequence[Format] = "auto",
) -> tuple[Any, list[dict[str, Any]] | None]:
    """Return a prompt with the tools, and the `tools` of the chat template if that takes them
    and "own" is among the `formats`; else the prompt has instructions. With a chat template a
    text becomes a user's message. Token ids stay as they are."""
    if not isinstance(prompt, str) and not all(isinstance(message, Mapping) for message in prompt):
        return prompt, None
    if tokenizer is not None and tokenizer.has_chat_template and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    reads_own = formats == "auto" or "own" in ((formats,) if isinstance(formats, str) else formats)
    if tokenizer is not None and tokenizer.template_takes_tools and reads_own:
        return prompt, openai_tools(tools)
    return with_instructions(prompt, tools, how_to_call(formats)), None


def how_to_call(formats: Format | Literal["auto"] | Sequence[Format] = "auto") -> str:
    """Return the instruction of the first of the formats that can be taught; JSON's for "auto"."""
    requested = (formats,) if isinstance(formats, str) else formats
    return next(
        (HOW_TO_CALL[form] for form in requested if form in HOW_TO_CALL), HOW_TO_CALL["json"]
    )


def with_instructions(
    prompt: Any, definitions: Iterable[Mapping[str, Any]], how: str = HOW_TO_CALL["json"]
) -> Any:
    """Return a text or messages with instructions about the tools at the start, for templates
    without tools; `how` says how a call is written."""
    listed = "\n".join(
        (
            f"- {tool['name']}: {tool['description']} Arguments:"
            f" {json.dumps(tool['parameters'], ensure_ascii=False)}"
        )
        for tool in definitions
    )
    instructions = f"You can use these tools:\n{listed}\n{how}"
    if isinstance(prompt, str):
        return f"{instructions}\n\n{prompt}"
    first, *others = prompt
    if first.get("role") == "system":
        content = content_text(first.get("content") or "", "messages.0.content")
        return [{**first, "content": f"{content}\n\n{instructions}"}, *others]
    return [{"role": "system", "content": instructions}, *prompt]

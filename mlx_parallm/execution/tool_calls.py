"""Tool calls in what a model wrote: found, cut out with their place, read. The one parser of the product. No MLX.

    "own"       what stands between the model's own markers (mlx-lm's parser for its chat template)
    "xml"       <invoke name="search"><parameter name="query">MLX</parameter></invoke>
    "json"      ```json {"tool": "search", "arguments": {"query": "MLX"}} ```, a list of them, or nothing but that
    "use_tool"  USE_TOOL[search](MLX)
    "function"  search(query="MLX"), for the names of the tools that were given

A model may write anything: what begins as a call and cannot be read is a `MalformedCall` beside the calls, never an
exception. Formats are tried in this order; what one has taken, the next does not see.
"""

import ast
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_definitions import ToolLike, tool_definition

Format = Literal["own", "xml", "json", "use_tool", "function"]
Call = tuple[str, dict[str, Any]]
Found = tuple[int, int, Callable[[], list[Call]]]
"""Start, end, and what reads the calls there: none = it is no call after all; raises _UnreadableError."""
Tools = Mapping[str, Mapping[str, Any]]  # definitions by name

FORMATS: tuple[Format, ...] = get_args(Format)
RAW_INPUT = "input"  # the argument that holds the text of a USE_TOOL call whose arguments are plain words
NAME_KEYS, ARGUMENT_KEYS = ("tool", "name"), ("arguments", "args", "parameters")

_FENCE = re.compile(r"```[ \t]*(?:json|tool|tool_call)?[ \t]*\n?(\s*[{\[].*?)```", re.DOTALL | re.IGNORECASE)
_NAMES_A_TOOL = re.compile(r'"(?:tool|name)"\s*:')
_INVOKE = re.compile(r"<invoke\b([^>]*?)(?:/>|>(.*?)</invoke\s*>)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter\b([^>]*)>(.*?)</parameter\s*>", re.DOTALL)
_NAME = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_USE_TOOL = re.compile(r"USE_TOOL\[\s*([^\]\n]*?)\s*\]\s*\(")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `text[start_pos:end_pos] == raw_text`; calls that a model wrote in one block have the block's place."""

    name: str
    arguments: Mapping[str, Any]  # JSON values
    raw_text: str
    start_pos: int
    end_pos: int


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What began as a call and is none, with its place as a ToolCall's."""

    reason: str
    raw_text: str
    start_pos: int
    end_pos: int


class ParsedCalls(tuple[ToolCall, ...]):
    """The calls of one text in their order, and beside them what could not be read."""

    malformed: tuple[MalformedCall, ...]

    def __new__(cls, calls: Iterable[ToolCall] = (), malformed: Iterable[MalformedCall] = ()) -> "ParsedCalls":
        parsed = super().__new__(cls, calls)
        parsed.malformed = tuple(malformed)
        return parsed


@dataclass(frozen=True, slots=True)
class OwnFormat:
    """How the model itself was trained to call (`Tokenizer.tool_markers`, `.parse_tool_call`).

    `markers`: (start, end), the end "" where a call ends at the next start or with the text. `parse(text, tools)` reads
    what stands between them; it may raise anything.
    """

    markers: tuple[str, str]
    parse: Callable[[str, Any], Any]


class _UnreadableError(Exception):
    """Why a call is malformed."""


def parse_tool_calls(
    text: str,
    tools: Sequence[ToolLike] = (),
    formats: Format | Literal["auto"] | Sequence[Format] = "auto",
    *,
    own: OwnFormat | None = None,
) -> ParsedCalls:
    """The calls that stand in `text`.

    Args:
        tools: what may be called. A call of anything else is given too (the caller answers it), but "function" needs
            their names, and positional arguments their parameters.
        formats: "auto" = all, "function" only with `tools`, "own" only with `own`.

    Raises ConfigError: a format or a tool that is none. Whatever `text` holds raises nothing.
    """
    known = {definition["name"]: definition for definition in map(tool_definition, tools)}
    calls: list[ToolCall] = []
    malformed: list[MalformedCall] = []
    for form in _chosen(formats, own, known):
        taken = [(c.start_pos, c.end_pos) for c in calls] + [(m.start_pos, m.end_pos) for m in malformed]
        for start, end, read in _own_places(text, own, known) if own and form == "own" else _PLACES[form](text, known):
            if any(start < other_end and other_start < end for other_start, other_end in taken):
                continue
            try:
                calls += [ToolCall(*call, text[start:end], start, end) for call in read()]
            except _UnreadableError as error:
                malformed.append(MalformedCall(str(error), text[start:end], start, end))
    calls.sort(key=lambda call: call.start_pos)
    malformed.sort(key=lambda call: call.start_pos)
    return ParsedCalls(calls, malformed)


def read_calls(parse: Callable[[str, Any], Any], text: str, tools: Any) -> list[tuple[str, dict[str, Any], str | None]]:
    """(name, arguments, id or None) of the calls in a model's own format; [] when there is none, or something else too
    that cannot be read."""
    try:
        found = parse(text, tools)
        return [_own_call(call) for call in (found if isinstance(found, list) else [found])]
    except Exception:  # noqa: BLE001 - boundary: what a malformed call makes mlx-lm's parsers raise is not told
        return []


def _own_call(call: Any) -> tuple[str, dict[str, Any], str | None]:
    """Raises TypeError, KeyError or ValueError: no call."""
    name, arguments, call_id = call["name"], call.get("arguments") or {}, call.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise TypeError("a call has a name and an object of arguments")
    name.encode()
    json.dumps(arguments, allow_nan=False)
    return name, arguments, call_id if isinstance(call_id, str) and call_id else None


def _chosen(formats: Any, own: OwnFormat | None, tools: Tools) -> list[Format]:
    """Raises ConfigError."""
    if formats == "auto":
        return [form for form in FORMATS if not ((form == "own" and own is None) or (form == "function" and not tools))]
    asked = (formats,) if isinstance(formats, str) else tuple(formats)
    for form in asked:
        if form not in FORMATS:
            raise ConfigError(f"tool-call format {form!r} is none of: auto, {', '.join(FORMATS)}")
        if form == "own" and own is None:
            raise ConfigError('tool-call format "own": the tokenizer knows no format of this model')
    return [form for form in FORMATS if form in asked]


# ------------------------------------------------------------------ where calls stand


def _own_places(text: str, own: OwnFormat, tools: Tools) -> Iterator[Found]:
    start_marker, end_marker = own.markers
    at = text.find(start_marker)
    while at >= 0:
        inside = at + len(start_marker)
        following = text.find(start_marker, inside)
        limit = len(text) if following < 0 else following
        closed = text.find(end_marker, inside, limit) if end_marker else -1
        stop, end = (limit, limit) if closed < 0 else (closed, closed + len(end_marker))
        yield at, end, partial(_own_calls, own, text[inside:stop], tools)
        at = following


def _xml_places(text: str, tools: Tools) -> Iterator[Found]:
    at = 0
    while (start := text.find("<invoke", at)) >= 0:
        match = _INVOKE.match(text, start)
        at = match.end() if match else len(text)
        yield start, at, partial(_xml_call, match, tools) if match else partial(_unclosed, "<invoke>")


def _json_places(text: str, tools: Tools) -> Iterator[Found]:
    fences = list(_FENCE.finditer(text))
    for match in fences:
        yield match.start(), match.end(), partial(_json_calls, match[1])
    bare = text.strip()
    if not fences and bare[:1] in ("{", "["):
        start = text.index(bare[0])
        yield start, start + len(bare), partial(_json_calls, bare)


def _use_tool_places(text: str, tools: Tools) -> Iterator[Found]:
    at = 0
    while (match := _USE_TOOL.search(text, at)) is not None:
        name, inside, known = match[1], match.end(), _parameters(tools, match[1])
        # In plain words an apostrophe is no quotation mark; in what can be read as arguments every one counts.
        plain = _closing(text, inside - 1, "\"'", words=True)
        if plain is not None and _USE_TOOL.search(text, inside, plain):  # a mark here, its pair in the next call
            plain = None
        ends = [end for quotes in ("\"'", "") if (end := _closing(text, inside - 1, quotes)) is not None]
        if plain is None and not ends:
            yield match.start(), len(text), partial(_unclosed, "the parenthesis")
            return
        at = plain or ends[-1]
        arguments: dict[str, Any] = {(known or [RAW_INPUT])[0]: text[inside : at - 1].strip()}
        for end in reversed(ends):
            with suppress(_UnreadableError):
                arguments = _arguments(text[inside : end - 1], known)
                at = end
        yield match.start(), at, partial(_use_tool_call, name, arguments)


def _function_places(text: str, tools: Tools) -> Iterator[Found]:
    names = "|".join(re.escape(name) for name in sorted(tools, key=len, reverse=True)) or r"[^\W\d]\w*"
    pattern, at = re.compile(rf"(?<![\w.])({names})\s*\("), 0
    while (match := pattern.search(text, at)) is not None:
        end = _closing(text, match.end() - 1, "\"'")
        at = len(text) if end is None else end
        call = partial(_function_call, match[1], text[match.end() : at - 1], tools)
        yield match.start(), at, partial(_unclosed, "the parenthesis") if end is None else call


_PLACES: Mapping[Format, Callable[[str, Tools], Iterator[Found]]] = {
    "xml": _xml_places,
    "json": _json_places,
    "use_tool": _use_tool_places,
    "function": _function_places,
}


# ------------------------------------------------------------------ what stands there


def _unclosed(what: str) -> list[Call]:
    raise _UnreadableError(f"{what} is not closed")


def _own_calls(own: OwnFormat, text: str, tools: Tools) -> list[Call]:
    given = [{"type": "function", "function": dict(tool)} for tool in tools.values()]
    calls = read_calls(own.parse, text, given)
    if not calls:
        raise _UnreadableError("the model's own format cannot be read")
    return [(name, arguments) for name, arguments, _ in calls]


def _xml_call(match: re.Match[str], tools: Tools) -> list[Call]:
    name, body = _attribute(match[1]), match[2] or ""
    if not name:
        raise _UnreadableError("<invoke> has no name")
    if rest := _PARAMETER.sub("", body).strip():
        raise _UnreadableError(f"between the parameters stands {rest[:40]!r}")
    properties, arguments = tools.get(name, {}).get("parameters", {}).get("properties", {}), {}
    for parameter in _PARAMETER.finditer(body):
        key, value = _attribute(parameter[1]), html.unescape(parameter[2]).strip()
        if not key or key in arguments:
            raise _UnreadableError("a parameter has no name, or comes twice")
        schema = properties.get(key)
        wants_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        arguments[key] = value if wants_text else _json_or_text(value)
    return [(name, arguments)]


def _json_calls(body: str) -> list[Call]:
    try:
        value = _json(body)
    except _UnreadableError:
        if _NAMES_A_TOOL.search(body):
            raise
        return []
    found = [_json_call(entry) for entry in (value if isinstance(value, list) else [value])]
    calls = [call for call in found if call is not None]
    if calls and len(calls) < len(found):
        raise _UnreadableError("a list of calls holds something else")
    return calls


def _json_call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    given = [key for key in ARGUMENT_KEYS if key in value]
    if name is None or not (given or "tool" in value):  # {"name": "Ada"} is no call
        return None
    if not isinstance(name, str) or not name:
        raise _UnreadableError(f"the tool's name is {name!r}")
    arguments = (value[given[0]] if given else None) or {}
    return name, _object(arguments) if isinstance(arguments, str) else _checked_object(arguments)


def _use_tool_call(name: str, arguments: dict[str, Any]) -> list[Call]:
    if not name:
        raise _UnreadableError("USE_TOOL[] names no tool")
    return [(name, arguments)]


def _function_call(name: str, source: str, tools: Tools) -> list[Call]:
    return [(name, _arguments(source, _parameters(tools, name)))]


def _arguments(source: str, parameters: Sequence[str]) -> dict[str, Any]:
    """What stands between the parentheses of a call: nothing, a JSON object, or arguments as Python writes them; what
    is no literal (2 + 3, north) is its text. Positional ones go by `parameters`. Raises _UnreadableError."""
    if source.lstrip().startswith("{"):
        return _object(source)
    # Unknown escapes ("\d") mean themselves; doubled, Python does not warn of them.
    written = "f(" + _ESCAPE.sub(lambda m: m[0] if m[1] in "\\'\"abfnrtvxuU\n" else "\\" + m[0], source) + "\n)"
    try:
        call = ast.parse(written, "<tool call>", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _UnreadableError(f"no arguments: {error}") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _UnreadableError("no arguments")
    if len(call.args) > len(parameters):
        raise _UnreadableError(f"{len(call.args)} arguments without a name, {len(parameters)} known parameters")
    pairs = [*zip(parameters, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    found = {key: _literal(node, written) for key, node in pairs if key is not None}
    if len(found) < len(pairs) or any(isinstance(node, ast.Starred) for node in call.args):
        raise _UnreadableError("an argument comes twice, or with a star")
    return found


def _literal(node: ast.expr, source: str) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    try:
        return json.loads(json.dumps(ast.literal_eval(node), allow_nan=False))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return (ast.get_source_segment(source, node) or "").strip()


def _closing(text: str, opening: int, quotes: str, *, words: bool = False) -> int | None:
    """One past the bracket that closes the one at `opening`; None: none does. Those between `quotes` do not count; in
    `words` a mark after a letter or digit (Newton's, 5\") opens no quotation, one before a letter or digit ends none,
    and none goes over the end of a line."""
    depth, quote, at = 0, "", opening
    while at < len(text):
        character = text[at]
        if quote:
            if words and character == "\n":
                return None
            at += character == "\\"
            quote = "" if character == quote and not (words and text[at + 1 : at + 2].isalnum()) else quote
        elif character in quotes and not (words and text[at - 1].isalnum()):
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return None


def _json(source: str) -> Any:
    try:
        return json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"no JSON: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _json_or_text(source: str) -> Any:
    try:
        return _json(source)
    except _UnreadableError:
        return source


def _object(source: str) -> dict[str, Any]:
    return _checked_object(_json(source))


def _checked_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _UnreadableError("the arguments are no object")
    return value


def _attribute(head: str) -> str:
    match = _NAME.search(head)
    return html.unescape(match[1] or match[2] or "").strip() if match else ""


def _parameters(tools: Tools, name: str) -> list[str]:
    return list(tools.get(name, {}).get("parameters", {}).get("properties", {}))

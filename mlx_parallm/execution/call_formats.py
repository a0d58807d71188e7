"""Read the calls between a model's own tool markers, in each format that mlx-lm names.

    READERS[form](text, tools) -> ReadCalls      the whole text is calls, or ValueError: it is text

mlx-lm finds a model's format and its markers. Its parsers are not used here: they guess the types
of values, strip white space, take what they find and drop the rest. A reader here takes all of
the text or none of it. Values written as bare text get their type from the tool's schema
(`typed_values`).
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_parallm.execution.call_text import LONGEST_TAG, MARKUP, Markup, end_of_value
from mlx_parallm.execution.json_values import JSONObject
from mlx_parallm.execution.python_text import parsed_expression
from mlx_parallm.execution.typed_values import argument_schema, typed_value

Call = tuple[str, dict[str, Any], str | None]
"""Name, arguments, id or None."""


class ReadCalls(NamedTuple):
    """`rest`: text behind the calls of a format without an end marker; it is not part of them."""

    calls: list[Call]
    rest: str = ""


Reader = Callable[[str, Sequence[Mapping[str, Any]]], ReadCalls]

NAME_KEYS = ("name", "tool", "function")
ARGUMENT_KEYS = ("arguments", "args", "parameters")
OTHER_KEYS = ("id", "type", "index")  # further keys of a call; with any other key it is not a call
_SPACE = re.compile(r"\s*")
_CLOSERS = re.compile(r"[\s,}\]]*")
_WORD = re.compile(r"[\w.\-]+")


def reader_of(parse: Callable[[str, Any], Any]) -> Reader | None:
    """The reader of a format; None for a parser that is not mlx-lm's, or not known here."""
    module, _, form = parse.__module__.rpartition(".")
    if module.endswith("tool_parsers") or form == "taught_tools":
        return READERS.get(form)
    return None


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _parameters(tools: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((each["parameters"] for each in _functions(tools) if each["name"] == name), None)


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> Iterator[dict[str, Any]]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield {"name": function["name"], "parameters": function.get("parameters")}


def _names(tools: Sequence[Mapping[str, Any]] | None, other: str) -> str:
    """A pattern of a tool's name: the longest declared one, or any that matches `other`."""
    declared = sorted({each["name"] for each in _functions(tools)}, key=len, reverse=True)
    return "|".join([*map(re.escape, declared), other])


# ------------------------------------------------------------------ JSON


def _object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Arguments in their order. One that is repeated is written twice, as it was, and the last one
    counts."""
    arguments = dict(pairs)
    return arguments if len(arguments) == len(pairs) else JSONObject(pairs)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# a raw line end within a string is one of the string: models forget to escape it
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def json_call(value: Any) -> Call:
    """The call that an object of a name and arguments is. Raises ValueError: it is none, or has a
    key that would be lost."""
    if not isinstance(value, dict):
        raise ValueError("no object")
    if isinstance(inner := value.get("function", value.get("tool")), dict):
        outer = {key: item for key, item in value.items() if item is not inner}
        if not outer.keys() <= set(OTHER_KEYS):
            raise ValueError("a call has a key of no meaning")
        value = {**outer, **inner}
    names = [key for key in NAME_KEYS if key in value]
    keys = [key for key in ARGUMENT_KEYS if key in value]
    others = value.keys() - {*names, *keys, *OTHER_KEYS}
    if len(names) != 1 or len(keys) > 1 or others:
        raise ValueError("no call, or one with a key of no meaning")
    name, arguments = value[names[0]], value[keys[0]] if keys else None
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}", strict=False, parse_constant=_refuse)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    call_id = value.get("id")
    return name, arguments, call_id if isinstance(call_id, str) and call_id else None


def _read_json(text: str, tools: Any = None) -> ReadCalls:
    """Objects one after another, or a list of them."""
    calls, at = list[Call](), _skip(text, 0)
    while at < len(text):
        try:
            value, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError:
            # the last bracket is forgotten
            value, end = _DECODER.raw_decode(text.rstrip() + "}", at)
        calls += map(json_call, value if isinstance(value, list) else [value])
        closers = _CLOSERS.match(text, min(end, len(text)))
        at = closers.end() if closers else len(text)
    return ReadCalls(calls)


_MISTRALS_HEAD = re.compile(
    r"\s*+(?P<name>[^\s\[\]{}]++(?:[ \t]++[^\s\[\]{}]++)*+)\s*+"
    r"(?:\[CALL_ID\]\s*+(?P<id>[\w-]*+)\s*+)?\[ARGS\]\s*+"
)


def _read_mistral(text: str, tools: Any = None) -> ReadCalls:
    """`name[ARGS]{…}`, several times, or a list of objects; what follows is not a call."""
    at = _skip(text, 0)
    if text.startswith("[", at):
        value, end = _DECODER.raw_decode(text, at)
        return ReadCalls(list(map(json_call, value)), text[end:])
    calls = list[Call]()
    while (head := _MISTRALS_HEAD.match(text, at)) is not None:
        arguments, at = _DECODER.raw_decode(text, head.end())
        calls.append(json_call({"name": head["name"], "arguments": arguments, "id": head["id"]}))
    return ReadCalls(calls, text[at:])


_KIMIS_HEAD = re.compile(
    r"\s*+(?:<\|tool_call_begin\|>)?+\s*+(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*+"
    r"<\|tool_call_argument_begin\|>\s*+"
)
_KIMIS_END = re.compile(r"\s*+(?:<\|tool_call_end\|>)?+\s*+")


def _read_kimi_k2(text: str, tools: Any = None) -> ReadCalls:
    calls, at = list[Call](), 0
    while at < len(text):
        head = _KIMIS_HEAD.match(text, at)
        if head is None:
            raise ValueError("no call")
        arguments, end = _DECODER.raw_decode(text, head.end())
        calls.append(json_call({"name": head["name"], "arguments": arguments, "id": head["id"]}))
        closed = _KIMIS_END.match(text, end)
        at = closed.end() if closed else end
    return ReadCalls(calls)


# ------------------------------------------------------------------ values between tags


@dataclass(frozen=True, slots=True)
class _Tags:
    """A format of tags.

    Args:
        head: the beginning of a call, with `NAME` in place of its name.
        key: the opening tag of an argument, with the group `key`.
        end: of a call; "" if it ends with the text.
        line: the end of a line belongs to each tag around a value.
    """

    head: str
    key: re.Pattern[str]
    end: str = ""
    line: bool = False


_QUOTED = r"""(?:"(?P<key>[^"\n]+)"|'(?P<key1>[^'\n]+)'|(?P<key2>[^\s<>"']+))"""
_GLM = _Tags(
    r"(?P<name>NAME)(?=\s*(?:<arg_key>|\Z))",
    re.compile(r"<arg_key>(?P<key>(?:(?!</?arg_).)+?)</arg_key>(?:\\n|\s)*<arg_value>", re.DOTALL),
)
_TAGS: Mapping[str, _Tags] = {
    "qwen3_coder": _Tags(
        r"<function=\s*(?P<name>NAME)\s*>",
        re.compile(r"<parameter=(?P<key>[^<>\n]+)>"),
        "</function>",
        line=True,
    ),
    "minimax_m2": _Tags(
        r"""<invoke name=(?P<quote>["']?)(?P<name>NAME)(?P=quote)\s*>""",
        re.compile(rf"<parameter name={_QUOTED}\s*>"),
        "</invoke>",
    ),
    "minicpm5": _Tags(
        r"""(?:<function\s+)?(?:name\s*=\s*)?(?P<quote>["']?)(?P<name>NAME)(?P=quote)\s*>""",
        re.compile(rf"<param\s+name\s*=\s*{_QUOTED}\s*>"),
    ),
    "muse_spark": _Tags(
        r'<atem:invoke\b[^<>]{0,200}?\bname="(?P<name>NAME)"[^<>]{0,200}>',
        re.compile(r'<atem:parameter\b[^<>]{0,200}?\bname="(?P<key>[^"]{1,200})"[^<>]{0,200}>'),
        "</atem:invoke>",
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": _Tags(
        r"(?P<name>NAME)(?=\s*(?:<longcat_arg_key>|\Z))",
        re.compile(
            r"<longcat_arg_key>(?P<key>(?:(?!</?longcat_).)+?)</longcat_arg_key>"
            r"(?:\\n|\s)*<longcat_arg_value>",
            re.DOTALL,
        ),
    ),
}
_OTHER_NAME = r"""[^\s<>"'{}\[\]]+"""


def _tagged_reader(form: str) -> Reader:
    tags, markup = _TAGS[form], MARKUP[form]

    def read(text: str, tools: Sequence[Mapping[str, Any]]) -> ReadCalls:
        at = _skip(text, 0)
        if not tags.end and text.startswith("{", at):  # GLM's other form
            return _read_json(text)
        head = re.compile(tags.head.replace("NAME", _names(tools, _OTHER_NAME)))
        calls = list[Call]()
        while at < len(text) or not calls:
            begun = head.match(text, at)
            if begun is None:
                raise ValueError("no call begins here")
            name, at = begun["name"], _skip(text, begun.end())
            pairs, at = _pairs(text, at, tags, markup)
            if tags.end and text.startswith(tags.end, at):
                at = _skip(text, at + len(tags.end))
            elif pairs and head.match(text, at):
                pass  # another call: the end of this one is forgotten, or the format has none
            elif tags.end:
                raise ValueError("the call has no end")
            elif at < len(text):
                raise ValueError("text is left over")
            elif not pairs and tags.head is not _TAGS["minicpm5"].head:
                _check_bare(name, tools)
            calls.append((name, _typed(pairs, _parameters(tools, name)), None))
        return ReadCalls(calls)

    return read


def _check_bare(name: str, tools: Any) -> None:
    """Raises ValueError: a word that is alone, and names no tool."""
    declared = [each["name"] for each in _functions(tools)]
    if name not in declared if declared else not _WORD.fullmatch(name):
        raise ValueError("no tool has this name")


def _pairs(text: str, at: int, tags: _Tags, markup: Markup) -> tuple[list[tuple[str, str]], int]:
    """The arguments from `at` on, and the place behind them. Raises ValueError: one has no end."""
    pairs = list[tuple[str, str]]()
    while (opened := tags.key.match(text, at)) is not None:
        end = end_of_value(markup, text, opened.end(), final=True)
        if end is None:
            raise ValueError("a value of the call has no end")
        groups = opened.groupdict()
        key = next(groups[name] for name in ("key", "key1", "key2") if groups.get(name))
        pairs.append((key.strip(), _raw(text[opened.end() : end], tags, markup)))
        at = _skip(text, end + len(markup.closed))
    return pairs, at


def _raw(value: str, tags: _Tags, markup: Markup) -> str:
    if tags.line:
        return value.removeprefix("\n").removesuffix("\n")
    if markup.cdata and (data := CDATA.fullmatch(value)) is not None:
        return data[1]
    return value


CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


def _typed(pairs: Sequence[tuple[str, str]], parameters: Any) -> dict[str, Any]:
    return _object_of(
        [
            (key, typed_value(text, argument_schema(parameters, key), parameters))
            for key, text in pairs
        ]
    )


_XTML_ATTRIBUTES = re.compile(r'\s*(\w+)="([^"]*)"')
_XTML_HEAD = re.compile(r"<\|open\|>call((?:(?!<\|sep\|>).)*)<\|sep\|>", re.DOTALL)
_XTML_ARGUMENT = re.compile(r"<\|open\|>argument((?:(?!<\|sep\|>).)*)<\|sep\|>", re.DOTALL)
_XTML_JSON = re.compile(
    r"<\|open\|>json(?:(?!<\|sep\|>).)*<\|sep\|>(.*?)<\|close\|>json<\|sep\|>\s*", re.DOTALL
)
_XTML_END = "<|close|>call<|sep|>"


def _read_kimi_k3(text: str, tools: Sequence[Mapping[str, Any]]) -> ReadCalls:
    """Arguments that name their types, or one JSON object."""
    markup, calls, at = MARKUP["kimi_k3"], list[Call](), _skip(text, 0)
    while at < len(text):
        head = _XTML_HEAD.match(text, at)
        if head is None:
            raise ValueError("no call begins here")
        name, at = _attributes(head[1])["tool"], _skip(text, head.end())
        pairs: list[tuple[str, Any]] = []
        if (whole := _XTML_JSON.match(text, at)) is not None:
            pairs = [*json_call({"name": name, "arguments": whole[1]})[1].items()]
            at = whole.end()
        while (opened := _XTML_ARGUMENT.match(text, at)) is not None:
            end = end_of_value(markup, text, opened.end(), final=True)
            attributes = _attributes(opened[1])
            if end is None:
                raise ValueError("an argument has no end")
            value, kind = text[opened.end() : end], attributes.get("type", "string")
            pairs.append((attributes["key"], typed_value(value, {"type": kind})))
            at = _skip(text, end + len(markup.closed))
        if text.startswith(_XTML_END, at):
            at = _skip(text, at + len(_XTML_END))
        elif not (pairs and _XTML_HEAD.match(text, at)):
            raise ValueError("the call has no end")
        calls.append((name, _object_of(pairs), None))
    return ReadCalls(calls)


def _attributes(text: str) -> dict[str, str]:
    """Raises ValueError."""
    if len(text) > LONGEST_TAG or _XTML_ATTRIBUTES.sub("", text).strip():
        raise ValueError("no attributes")
    pairs = _XTML_ATTRIBUTES.findall(text)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}


# ------------------------------------------------------------------ values between brackets


class _Cursor:
    """A place in a text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def skip(self) -> None:
        self.at = _skip(self.text, self.at)

    def takes(self, sign: str) -> bool:
        """Move behind the sign and the space before it, if it is next."""
        at = _skip(self.text, self.at)
        if not self.text.startswith(sign, at):
            return False
        self.at = at + len(sign)
        return True

    def needs(self, sign: str) -> None:
        """Raises ValueError."""
        if not self.takes(sign):
            raise ValueError(f"{sign} is missing")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Raises ValueError."""
        matched = pattern.match(self.text, self.at)
        if matched is None:
            raise ValueError("the call cannot be read")
        self.at = matched.end()
        return matched

    @property
    def done(self) -> bool:
        self.skip()
        return self.at >= len(self.text)


class _Gemma:
    """`call:name{key:value,…}`: texts between delimiters, names of keys bare."""

    def __init__(self, text: str, delimiter: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._cursor, self._tools = _Cursor(text), tools
        mark = re.escape(delimiter)
        self._mark = delimiter
        # a text ends at a delimiter that something follows which may follow a text
        self._string = re.compile(rf"(.*?){mark}(?=\s*(?:[,:}}\]]|\Z))", re.DOTALL)
        self._key = re.compile(r"\s*([^\s:{},\[\]](?:[^:{},\[\]]*[^\s:{},\[\]])?)\s*:")
        self._bare = self._word = re.compile(r"[^,{}\[\]]+")
        if delimiter not in text:  # texts without marks, which only older models write
            self._word = re.compile(r"[^{}\[\]]+?(?<!\s)(?=\s*(?:,[^:,{}]+:|\}))")

    def read(self) -> ReadCalls:
        cursor, calls = self._cursor, list[Call]()
        names = _names(self._tools, r"[^\s{}]+")
        head = re.compile(rf"\s*call:(?P<name>{names})(?=\{{)")
        while not cursor.done:
            name = cursor.match(head)["name"]
            parameters = _parameters(self._tools, name)
            calls.append((name, self._object(parameters, outer=True), None))
        return ReadCalls(calls)

    def _object(self, parameters: Any = None, *, outer: bool = False) -> dict[str, Any]:
        cursor, pairs = self._cursor, list[tuple[str, Any]]()
        cursor.needs("{")
        while not cursor.takes("}"):
            if pairs:
                cursor.needs(",")
            if cursor.takes(self._mark):
                key = cursor.match(self._string)[1]
                cursor.needs(":")
            else:
                key = cursor.match(self._key)[1]
            schema = argument_schema(parameters, key)
            bare = self._word if outer else self._bare
            pairs.append((key, self._value(bare, schema, parameters)))
        return _object_of(pairs)

    def _value(self, bare: re.Pattern[str], schema: Any = True, root: Any = None) -> Any:
        cursor = self._cursor
        if cursor.takes(self._mark):
            return cursor.match(self._string)[1]
        cursor.skip()
        if cursor.text.startswith("{", cursor.at):
            return self._object()
        if cursor.takes("["):
            items: list[Any] = []
            while not cursor.takes("]"):
                if items:
                    cursor.needs(",")
                items.append(self._value(self._bare))
            return items
        return typed_value(cursor.match(bare)[0].strip(), schema, root)


_NEXT_ARGUMENT = (
    r"""\s*(?:,\s*[^\s,=()\[\]{}"']+\s*=|,?\s*\)\s*"""
    r"""(?:,\s*[^\s,()\[\]{}"']+\(|,?\s*\]\s*\Z))"""
)


class _Pythonic:
    """`[name(key=value, …), …]`: texts in quotation marks, which some templates do not escape."""

    def __init__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._cursor, self._tools = _Cursor(text), tools
        self._key = re.compile(r"""\s*([^\s,=()\[\]{}"']+)\s*=\s*""")
        # in quotation marks: as Python reads it, or up to a mark that ends an argument
        self._literal = re.compile(
            rf"""(?:"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+')(?={_NEXT_ARGUMENT})""", re.DOTALL
        )
        self._verbatim = re.compile(rf"""(["'])(.*?)\1(?={_NEXT_ARGUMENT})""", re.DOTALL)
        self._bare = re.compile(rf"""[^"'\[{{(].*?(?<!\s)(?={_NEXT_ARGUMENT})""", re.DOTALL)

    def read(self) -> ReadCalls:
        cursor, calls = self._cursor, list[Call]()
        names = _names(self._tools, r"""[^\s,()\[\]{}="']+""")
        head = re.compile(rf"\s*({names})\s*\(")
        cursor.needs("[")
        while not cursor.takes("]"):
            if calls:
                cursor.needs(",")
                if cursor.takes("]"):
                    break
            name = cursor.match(head)[1]
            parameters, pairs = _parameters(self._tools, name), list[tuple[str, Any]]()
            while not cursor.takes(")"):
                if pairs:
                    cursor.needs(",")
                    if cursor.takes(")"):
                        break
                key = cursor.match(self._key)[1]
                value = self._value(argument_schema(parameters, key), parameters)
                pairs.append((key, value))
            calls.append((name, _object_of(pairs), None))
        if not cursor.done or not calls:
            raise ValueError("text is left over, or there is no call")
        return ReadCalls(calls)

    def _value(self, schema: Any, root: Any) -> Any:
        cursor = self._cursor
        cursor.skip()
        sign = cursor.text[cursor.at : cursor.at + 1]
        if sign in ("[", "{"):
            return self._container()
        if sign in ('"', "'"):
            if (quoted := self._literal.match(cursor.text, cursor.at)) is not None:
                try:
                    value = ast.literal_eval(parsed_expression(quoted[0].replace("\0", "\\x00")))
                except ValueError:
                    value = None
                if isinstance(value, str):
                    cursor.at = quoted.end()
                    return value
            return cursor.match(self._verbatim)[2]
        return typed_value(cursor.match(self._bare)[0].strip(), schema, root)

    def _container(self) -> Any:
        """A list or an object, as JSON or as Python. Raises ValueError."""
        cursor = self._cursor
        try:
            value, cursor.at = _DECODER.raw_decode(cursor.text, cursor.at)
            return value
        except json.JSONDecodeError:
            pass
        for end in re.compile(rf"[\]}}](?={_NEXT_ARGUMENT})").finditer(cursor.text, cursor.at):
            written = cursor.text[cursor.at : end.end()]
            try:
                value = ast.literal_eval(_JSONNames().visit(parsed_expression(written)))
                value = json.loads(json.dumps(value, allow_nan=False))
            except (ValueError, TypeError, RecursionError, MemoryError):
                continue
            cursor.at = end.end()
            return value
        raise ValueError("a list or an object has no end")


class _JSONNames(ast.NodeTransformer):
    _values: Mapping[str, Any] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_json = node.id in self._values
        return ast.copy_location(ast.Constant(self._values[node.id]), node) if is_json else node


_BARE_CALLS: Mapping[str, tuple[str, str]] = {
    "qwen3_coder": ("<function={}>", "</function>"),
    "minimax_m2": ('<invoke name="{}">', "</invoke>"),
    "muse_spark": ('<atem:invoke name="{}">', "</atem:invoke>"),
}


def bare_calls(form: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[tuple[str, ...], str]:
    """How a call begins that a model has written without its tool markers, for each declared tool,
    and how it ends; () if a format has no such tags."""
    if form not in _BARE_CALLS:
        return (), ""
    start, end = _BARE_CALLS[form]
    return tuple(start.format(each["name"]) for each in _functions(tools)), end


READERS: Mapping[str, Reader] = {
    "json_tools": _read_json,
    "taught_tools": _read_json,
    "mistral": _read_mistral,
    "kimi_k2": _read_kimi_k2,
    "kimi_k3": _read_kimi_k3,
    "function_gemma": lambda text, tools: _Gemma(text, "<escape>", tools).read(),
    "gemma4": lambda text, tools: _Gemma(text, '<|"|>', tools).read(),
    "pythonic": lambda text, tools: _Pythonic(text, tools).read(),
    **{form: _tagged_reader(form) for form in _TAGS},
}

"""Calls with generated schemas and values, and a reference renderer of each format: what a model's
template writes.

Left out is what a format cannot say: a text in tags that looks like another type which its schema
allows, and a format's own end of a text, or of a call, within one.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mlx_parallm.execution.typed_values import typed_value

Call = tuple[str, dict[str, Any]]

NAMES = ("add", "add_two", "add-two", "get", "get.more", "mcp__x__get", "→", "ns/do", "call")
KEYS = ("a", "ab", "b_2", "x-y", "p.q", "$x", "class", "ключ", "type", "name", "arguments", "raw")
WORDS = (
    *("null", "None", "nil", "true", "False", "NaN", "Infinity", "1", "-0", "007", "1.0", "1e5"),
    *("[1, 2]", '{"a": 1}', "[]", '"quoted"', "'", '"', "it's", '5"', "", " ", "\n", "\t", "\r\n"),
    *(
        "    if x:\n        return 1\n",
        "  both  ",
        "\n\nlines\n\n",
        "a, b=3",
        "x=1, y=2)",
        "}",
        "]",
    ),
    *(
        "ü😀",
        "日本",
        "\\",
        "\\n",
        'C:\\dir\\"x"',
        "a & b &lt; c",
        "1 < 2 > 3",
        "</",
        "<",
        "2026-01-15",
    ),
    *("\x00", "a\x1bb", "\x07\x7f\x85", "\ufeff", "long " * 200, "a" * 1000),
    *("1234567890123456789", "\u2028", "{{ x }}", "key: value", "call:f{a:1}", "f(x=1)", "a\\"),
)
MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]f[ARGS]{}", "[ARGS]"),
    *("<parameter=b>1</parameter>", "</function>", '<parameter name="b">1</parameter>'),
    *('<param name="b">1</param>', "<arg_key>k</arg_key><arg_value>v</arg_value>", "</invoke>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|close|>tools<|sep|>", "<escape>"),
    *('<|"|>', "<end_function_call>", "<tool_call|>", "</longcat_tool_call>", "<![CDATA[x]]>"),
    *('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "</atem:function_calls>"),
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
)
BIG = (0, 1, -7, 10**18 + 7, -(2**63), 1234567890123456789, 10**30 + 1)
FLOATS = (0.5, -1.25, 5.7, 1e-9, 1.5e300, 3.0, 0.1)
DEFINITIONS = {
    "Count": {"type": "integer"},
    "Text": {"type": "string"},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
    "Point": {
        "type": "object",
        "properties": {"x": {"type": "number"}, "label": {"type": "string"}},
    },
}


def _text(rng: Random, form: str) -> str:
    pieces = rng.choices((*WORDS, *MARKS, "word", "a b"), k=rng.choice((1, 1, 1, 2, 3)))
    text = rng.choice(("", "", " ", "\n")).join(pieces)
    return "plain" if FORMATS[form].cannot_say(text) else text


def _json(rng: Random, form: str, depth: int = 2) -> Any:
    if depth and rng.random() < 0.5:
        size = rng.randrange(3)
        if rng.random() < 0.5:
            return [_json(rng, form, depth - 1) for _ in range(size)]
        return {rng.choice(KEYS): _json(rng, form, depth - 1) for _ in range(size)}
    return rng.choice((_text(rng, form), rng.choice(BIG), rng.choice(FLOATS), True, False, None))


def _container(rng: Random, form: str, kind: type) -> Any:
    value = _json(rng, form, 3)
    return value if isinstance(value, kind) else kind()


def argument(rng: Random, form: str) -> tuple[Any, Any]:
    """A schema and a value that fits it."""
    integer, number = {"type": "integer"}, {"type": "number"}
    text, whole = _text(rng, form), rng.choice(BIG)
    some = rng.choice((whole, None))
    flag = rng.choice((True, False))
    union = {"anyOf": [{"type": "string"}, rng.choice((integer, number, {"type": "array"}))]}
    union = rng.choice((union, {"type": ["string", "null"]}, {"type": ["boolean", "string"]}, {}))
    choices = [1, 2, None, "auto", "1.5"]
    return rng.choice(
        (
            ({"type": "string"}, text),
            ({"type": "string"}, text),
            ({"$ref": "#/$defs/Text"}, text),
            ({"allOf": [{"$ref": "#/$defs/Text"}], "description": "x"}, text),
            ({"enum": ["1", "true", "null"]}, rng.choice(("1", "true", "null"))),
            ({"type": "string", "format": "date"}, "2026-01-15"),
            ({"const": "null"}, "null"),
            (integer, whole),
            (number, rng.choice((*BIG, *FLOATS))),
            ({"type": "boolean"}, flag),
            ({"type": "null"}, None),
            ({"anyOf": [integer, {"type": "null"}]}, some),
            ({"oneOf": [number, {"type": "null"}]}, some),
            ({"type": ["boolean", "null"]}, rng.choice((flag, None))),
            ({"type": "integer", "nullable": True}, some),
            ({"$ref": "#/$defs/Count"}, whole),
            ({"$ref": "#/$defs/Maybe"}, some),
            ({"enum": [1, 2]}, rng.choice((1, 2))),
            ({"enum": choices}, rng.choice(choices)),
            ({"const": 7}, 7),
            ({"type": "object"}, _container(rng, form, dict)),
            ({"$ref": "#/$defs/Point"}, {"x": rng.choice(FLOATS), "label": text}),
            ({"type": "array", "items": {"type": "string"}}, [text, _text(rng, form)]),
            ({"type": "array"}, _container(rng, form, list)),
            ({"anyOf": [{"type": "object"}, {"type": "null"}]}, _container(rng, form, dict)),
            (union, _clear(text, union, form)),
        )
    )


def _clear(text: str, schema: Any, form: str) -> str:
    """The text, or another one where bare text in tags may be of another type."""
    return text if typed_value(text, schema) == text or not FORMATS[form].bare else "plain"


def calls(rng: Random, form: str) -> tuple[list[dict[str, Any]], list[Call]]:
    """Tools in OpenAI's form, and one to three calls of them."""
    tools, made = [], []
    for name in rng.sample(NAMES, rng.randrange(1, 4)):
        pairs = {key: argument(rng, form) for key in rng.sample(KEYS, rng.randrange(4))}
        schema = {"type": "object", "properties": {key: pair[0] for key, pair in pairs.items()}}
        if rng.random() < 0.9:
            made.append((name, {key: pair[1] for key, pair in pairs.items()}))
        function = {"name": name, "parameters": schema | {"$defs": DEFINITIONS}}
        tools.append({"type": "function", "function": function})
    return tools, made or [(tools[0]["function"]["name"], {})][: 0 if pairs else 1]


# ------------------------------------------------------------------ renderers


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _dumped(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _each(render: Callable[[str, dict[str, Any]], str]) -> Callable[[Sequence[Call]], str]:
    return lambda made: "\n".join(render(*call) for call in made)


def _tags(arguments: Mapping[str, Any], tag: str) -> str:
    pairs = arguments.items()
    return "".join(tag.replace("KEY", k).replace("VALUE", _written(v)) for k, v in pairs)


def _wrapped(start: str, end: str, render: Callable[[str, dict[str, Any]], str]) -> Any:
    return lambda made: start + "".join(render(*call) for call in made) + end


def _kimi_k3(name: str, arguments: dict[str, Any]) -> str:
    def kind(value: Any) -> str:
        names = {str: "string", bool: "boolean", dict: "object", list: "array"}
        return names.get(type(value), "null" if value is None else "number")

    inner = "".join(
        f'<|open|>argument key="{key}" type="{kind(value)}"<|sep|>{_written(value)}'
        "<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'


def _minicpm5(name: str, arguments: dict[str, Any]) -> str:
    def value(given: Any) -> str:
        text = _written(given)
        return f"<![CDATA[{text}]]>" if any(sign in text for sign in "<&\n") else text

    inner = "".join(f'<param name="{k}">{value(v)}</param>' for k, v in arguments.items())
    return f'<function name="{name}">{inner}</function>'


def _gemma(mark: str, *, quotes_keys: bool = False) -> Callable[[str, dict[str, Any]], str]:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f"{mark}{given}{mark}"
        if isinstance(given, list):
            return "[" + ",".join(map(value, given)) + "]"
        if isinstance(given, dict):
            quote = mark if quotes_keys else ""
            return "{" + ",".join(f"{quote}{k}{quote}:{value(v)}" for k, v in given.items()) + "}"
        return json.dumps(given)

    def render(name: str, arguments: dict[str, Any]) -> str:
        return (
            f"call:{name}" + "{" + ",".join(f"{k}:{value(v)}" for k, v in arguments.items()) + "}"
        )

    return render


def _pythonic(made: Sequence[Call]) -> str:
    def value(given: Any) -> str:
        if not isinstance(given, str):
            return json.dumps(given, ensure_ascii=False)
        for sign, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
            given = given.replace(sign, escaped)
        return f"'{given}'"

    written = (
        f"{name}({', '.join(f'{k}={value(v)}' for k, v in arguments.items())})"
        for name, arguments in made
    )
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


@dataclass(frozen=True)
class Format:
    render: Callable[[Sequence[Call]], str]
    bare: bool = False  # values stand as bare text, typed by the schema
    own: str = "(?!)"  # a pattern of what it cannot say within a text

    def cannot_say(self, text: str) -> bool:
        return re.search(self.own, text, re.DOTALL) is not None


def _hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{_dumped((name, arguments))}\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any]) -> str:
    tag = "\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>"
    return f"<tool_call>{name}{_tags(arguments, tag)}\n</tool_call>"


def _longcat(name: str, arguments: dict[str, Any]) -> str:
    tag = "\n<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>VALUE</longcat_arg_value>"
    return f"<longcat_tool_call>{name}{_tags(arguments, tag)}\n</longcat_tool_call>"


def _qwen(name: str, arguments: dict[str, Any]) -> str:
    inner = _tags(arguments, "<parameter=KEY>\nVALUE\n</parameter>\n")
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _invoke(prefix: str) -> Callable[[str, dict[str, Any]], str]:
    def render(name: str, arguments: dict[str, Any]) -> str:
        tag = f'<{prefix}parameter name="KEY">VALUE</{prefix}parameter>\n'
        return f'<{prefix}invoke name="{name}">\n{_tags(arguments, tag)}</{prefix}invoke>\n'

    return render


def _kimi_k2(name: str, arguments: dict[str, Any]) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
    )


_GEMMA4 = _gemma('<|"|>')
FORMATS: dict[str, Format] = {
    "json_tools": Format(_each(_hermes)),
    "mistral": Format(
        lambda made: "".join(
            f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in made
        )
    ),
    "kimi_k2": Format(
        _wrapped("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi_k2)
    ),
    "kimi_k3": Format(
        _wrapped("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _kimi_k3),
        own=r"<\|close\|>(?:argument|call)",
    ),
    "qwen3_coder": Format(
        _each(_qwen),
        bare=True,
        own=r"<parameter name=.*(?:<parameter=|</function>)|</function>\s*</?tool_call>",
    ),
    "minimax_m2": Format(
        _wrapped("<minimax:tool_call>\n", "</minimax:tool_call>", _invoke("")),
        bare=True,
        own="<parameter=.*(?:<parameter name=|</invoke>)",
    ),
    "muse_spark": Format(
        _wrapped("<atem:function_calls>\n", "</atem:function_calls>", _invoke("atem:")), bare=True
    ),
    "minicpm5": Format(_each(_minicpm5), bare=True, own=r"<!\[CDATA\["),
    "glm47": Format(_each(_glm), bare=True, own="<arg_value>.*</?tool_call>"),
    "laguna": Format(_each(_glm), bare=True, own="<arg_value>.*</?tool_call>"),
    "longcat": Format(_each(_longcat), bare=True),
    "function_gemma": Format(
        _each(lambda *call: f"<start_function_call>{_gemma('<escape>')(*call)}<end_function_call>"),
        own="<escape>",
    ),
    "gemma4": Format(
        _each(lambda *call: "<|tool_call>" + _GEMMA4(*call) + "<tool_call|>"),
        own=r'<\|"\|>',
    ),
    "pythonic": Format(_pythonic),
}


def same(value: Any, other: Any) -> bool:
    """Equal, and of the same JSON type at every depth."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, float) or isinstance(other, float):
        if isinstance(value, bool) or isinstance(other, bool):
            return False
        return isinstance(value, int | float) and math.isclose(value, other, rel_tol=1e-15)
    return type(value) is type(other) and bool(value == other)

"""Text within a model's own tool calls that looks like their markup: where it is, and how the
parsers read past it.

    inside_value(form, text)   does the text of an unfinished call end within an argument? Then a
                               marker there is text
    decided_end(markup, text)  up to where arguments have certainly ended: what a stream may show
    careful(form, parse)       the parser of mlx-lm, given the values in such a way that it takes
                               them whole

mlx-lm's parsers take the first end tag, bracket or marker, also one within a value, and drop what
follows. Here an argument ends where its end tag is followed by what may follow an argument; tags
within a value are counted, so that a value may hold a call of the same format. A call of which that
leaves a part over is no call: never half of one.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Parse = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags around the values of a format.

    Args:
        begins: how an opening tag begins.
        follows: what comes after an end tag; `may_end`: or the end of the call's text.
        call: how a call begins and ends, "" where there are no such tags.
    """

    begins: str
    opened: re.Pattern[str]
    closed: str
    follows: re.Pattern[str]
    may_end: bool = False
    call: tuple[str, str] = ("", "")


def _markup(
    begins: str, opened: str, closed: str, follows: str, call: str = "", *, may_end: bool = False
) -> Markup:
    following = re.compile(rf"\s*+(?:{opened}|{re.escape(follows)})", re.DOTALL)
    ends = (call, follows) if call else ("", "")
    return Markup(begins, re.compile(opened, re.DOTALL), closed, following, may_end, ends)


_GLM = _markup("<arg_value>", "<arg_value>", "</arg_value>", "<arg_key>", may_end=True)
MARKUP: Mapping[str, Markup] = {
    "qwen3_coder": _markup(
        "<parameter=", r"<parameter=[^<>\n]+>", "</parameter>", "</function>", "<function="
    ),
    "minimax_m2": _markup(
        "<parameter name=",
        r"<parameter name=[^<>\n]+>",
        "</parameter>",
        "</invoke>",
        "<invoke name=",
    ),
    "minicpm5": _markup(
        "<param name=", r"<param\s+name\s*=[^<>\n]+>", "</param>", "</function>", may_end=True
    ),
    "muse_spark": _markup(
        "<atem:parameter",
        r"<atem:parameter\b[^<>]*>",
        "</atem:parameter>",
        "</atem:invoke>",
        "<atem:invoke",
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": _markup(
        "<longcat_arg_value>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
        "<longcat_arg_key>",
        may_end=True,
    ),
    "kimi_k3": _markup(
        "<|open|>argument",
        r"<\|open\|>argument(?:(?!<\|sep\|>).)*<\|sep\|>",
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        "<|open|>call",
    ),
}
_QUOTES: Mapping[str, str] = {
    "json_tools": '"',
    "taught_tools": '"',
    "mistral": '"',
    "kimi_k2": '"',
    "pythonic": "\"'",
}
# around a text, at both ends alike
_DELIMITERS: Mapping[str, str] = {"function_gemma": "<escape>", "gemma4": '<|"|>'}
_SHIELD = "\ue0f1"  # stands for "<" in a value; private use, so that no model writes it
# in a pythonic call that is no Python: a bare word is a text
_ARGUMENT = r"""\w+=(?:"[^"]*"|'[^']*'|[^,"'()]+)"""
_BARE_CALL = re.compile(rf"\s*\[[\w.]+\((?:{_ARGUMENT}(?:,\s*|(?=\))))*\)\]\s*", re.DOTALL)


def inside_value(form: str, text: str) -> bool:
    """Whether the text of a call, from behind its start marker, ends within an argument."""
    if (markup := MARKUP.get(form)) is not None:
        begins, ends = markup.call
        all_ended = not ends or text.count(begins) <= text.count(ends)
        if ends and all_ended and text.rstrip().endswith(ends):
            return False  # the call has ended, though its last argument may have not
        return any(end is None for _, end in _values(markup, text, final=all_ended))
    if (quotes := _QUOTES.get(form)) is not None:
        return _ends_in_quotes(text, quotes)
    return form in _DELIMITERS and text.count(_DELIMITERS[form]) % 2 == 1


def _ends_in_quotes(text: str, quotes: str) -> bool:
    """Whether a quotation is open at the end. One that holds the end of a line is broken:
    nothing is inside of it."""
    at, opening = 0, re.compile(f"[{quotes}]")
    if '"' in text and quotes == '"' and not 0 <= text.find("{") < text.find('"'):
        return False  # no JSON
    while (quoted := opening.search(text, at)) is not None:
        quote = quoted.group()
        body = re.compile(rf"(?:[^{quote}\\\x00-\x1f]|\\.)*+", re.DOTALL).match(text, quoted.end())
        assert body is not None
        at = body.end() + 1
        if at > len(text) or text[body.end() :] == "\\":
            return True
        if text[body.end()] != quote:
            return False
    return False


def _values(markup: Markup, text: str, *, final: bool) -> Iterator[tuple[int, int | None]]:
    """Where each value begins and ends; None: it has not ended, or (not `final`) may go on."""
    at = 0
    while (opening := markup.opened.search(text, at)) is not None:
        end = _end_of_value(markup, text, opening.end(), final=final)
        yield opening.end(), end
        if end is None:
            return
        at = end + len(markup.closed)


def _end_of_value(markup: Markup, text: str, start: int, *, final: bool) -> int | None:
    depth, otherwise = 0, None
    for tag in re.compile(
        f"{markup.opened.pattern}|{re.escape(markup.closed)}", re.DOTALL
    ).finditer(text, start):
        if tag.group() != markup.closed:
            depth += 1
            continue
        ends = markup.follows.match(text, tag.end()) is not None
        ends = ends or (final and markup.may_end and not text[tag.end() :].strip())
        if ends and depth == 0:
            return tag.start()
        if ends and otherwise is None:  # of a tag within the value that nobody closes
            otherwise = tag.start()
        depth = max(0, depth - 1)
    return otherwise if final else None


def decided_end(markup: Markup, text: str) -> int:
    """The place behind the last argument that has certainly ended; 0: there is none."""
    ends = [
        end + len(markup.closed) for _, end in _values(markup, text, final=False) if end is not None
    ]
    return max(ends, default=0)


def certain_text(markup: Markup, text: str) -> str:
    """The text as far as it belongs to the value in which it ends, whatever comes next."""
    at = decided_end(markup, text)
    opening = markup.opened.search(text, at)
    if opening is None:
        return text
    start = opening.end()
    if (inner := markup.opened.search(text, start)) is not None:
        text = text[: inner.start()]
    at = start
    while (end := text.find(markup.closed, at)) >= 0:
        at = end + len(markup.closed)
        if re.fullmatch(r"\s*(?:<[^<>]*)?", text[at:]):  # what follows may make it the end
            return text[:end]
    tail = text[text.rfind("<") :] if "<" in text[start:] else ""
    begun = (
        markup.closed.startswith(tail)
        or markup.begins.startswith(tail)
        or tail.startswith(markup.begins)
    )
    return text.removesuffix(tail) if tail and begun else text


def careful(parse: Parse) -> Parse:
    """The parser of a format; any but mlx-lm's stays as it is."""
    form = parse.__module__.rpartition(".")[2]
    if ".tool_parsers." not in parse.__module__:
        return parse
    if (markup := MARKUP.get(form)) is not None:
        return lambda text, tools: _restored(parse(_shielded(markup, text), tools))
    if form == "kimi_k2":
        return lambda text, tools: parse(
            _STRING.sub(lambda match: match[0].replace("<", "\\u003c"), text), tools
        )
    if form == "pythonic":
        return lambda text, tools: parse(_whole_pythonic(text), tools)
    if form == "function_gemma":
        return lambda text, tools: _parse_function_gemma(parse, text, tools)
    return parse


_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def _shielded(markup: Markup, text: str) -> str:
    """The text with every "<" of its values replaced. Raises ValueError: a value has no end, or
    a tag is left over."""
    pieces, at = [], 0
    for start, end in _values(markup, text, final=True):
        if end is None or _SHIELD in text:
            raise ValueError("a value of the call has no end")
        pieces += [
            text[at:start],
            text[start:end].replace("<", _SHIELD).replace(f"{_SHIELD}![CDATA[", "<![CDATA["),
        ]
        at = end
    pieces.append(text[at:])
    whole = "".join(pieces)
    if whole.count(markup.closed) != len(pieces) // 2:
        raise ValueError("an end tag of the call is left over")
    return whole


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(_SHIELD, "<")
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if isinstance(value, dict):
        return {_restored(key): _restored(each) for key, each in value.items()}
    return value


def _whole_pythonic(text: str) -> str:
    """The text. Raises ValueError: mlx-lm would pick arguments out of it and leave the rest."""
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if _BARE_CALL.fullmatch(text) is None:
            raise ValueError("the call is no Python") from error
    return text


def _parse_function_gemma(parse: Parse, text: str, tools: Any) -> Any:
    """Objects, lists, brackets in texts and several calls are Gemma 4's but for the marks around
    texts."""
    gemma4 = import_module(parse.__module__.replace("function_gemma", "gemma4"))
    marks = _DELIMITERS["function_gemma"], _DELIMITERS["gemma4"]
    if marks[1] not in text:
        try:
            return gemma4.parse_tool_call(text.replace(*marks), tools)
        except ValueError:
            pass  # a text without marks, which only the older format has
    if text.count("{") != 1 or text.count("}") != 1:
        raise ValueError("the call cannot be read as a whole")
    return parse(text, tools)

"""Find text within a model's tool calls that looks like their markup.

    inside_value(form, text)   does the text of an unfinished call end within an argument? Then a
                               marker there is text
    decided_end(markup, text)  position up to which a stream may show arguments
    end_of_value(markup, …)    the end of a value

An argument ends where its end tag is followed by text that may follow an argument, or by another
call, if the end of the first one is forgotten; tags within a value are counted, so that a value may
hold a call of the same format.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags around the values of a format.

    Args:
        begins: how an opening tag begins.
        follows: text after an end tag; `may_end`: or the end of the call's text.
        next: the tag that follows if it is not an opening tag.
        call: how a call begins and ends, "" if there are no such tags.
        cdata: a value may be in a CDATA section, which ends it.
        named: a tool's name and the `next` tag begin another call.
    """

    begins: str
    opened: re.Pattern[str]
    closed: str
    follows: re.Pattern[str]
    next: str
    may_end: bool = False
    call: tuple[str, str] = ("", "")
    cdata: bool = False
    named: bool = False


def _markup(
    begins: str,
    opened: str,
    closed: str,
    follows: str,
    call: str = "",
    *,
    may_end: bool = False,
    cdata: bool = False,
    named: bool = False,
) -> Markup:
    following = re.compile(rf"\s*+(?:{opened}|{re.escape(follows)})", re.DOTALL)
    ends = (call, follows) if call else ("", "")
    opening = re.compile(opened, re.DOTALL)
    return Markup(begins, opening, closed, following, follows, may_end, ends, cdata, named)


_GLM = _markup("<arg_value>", "<arg_value>", "</arg_value>", "<arg_key>", may_end=True, named=True)
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
        "<param name=",
        r"<param\s+name\s*=[^<>\n]+>",
        "</param>",
        "</function>",
        may_end=True,
        cdata=True,
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
        named=True,
    ),
    "kimi_k3": _markup(
        "<|open|>argument",
        r"<\|open\|>argument(?:(?!<\|sep\|>).){0,300}<\|sep\|>",
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


LONGEST_TAG = 300  # an unfinished opening tag that is longer is text
_CDATA = re.compile(r"\s*<!\[CDATA\[")
_SPACE = re.compile(r"\s*+")
_NAME = re.compile(r"\s*+[^\s<>]{1,256}+\s*+")


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
        body = re.compile(rf"(?:[^{quote}\\\n\r]|\\.)*+", re.DOTALL).match(text, quoted.end())
        assert body is not None
        at = body.end() + 1
        if at > len(text) or text[body.end() :] == "\\":
            return True
        if text[body.end()] != quote:
            return False
    return False


def _values(markup: Markup, text: str, *, final: bool) -> Iterator[tuple[int, int | None]]:
    """If each value begins and ends; None: it has not ended, or (not `final`) may continue."""
    at = 0
    while (opening := markup.opened.search(text, at)) is not None:
        end = end_of_value(markup, text, opening.end(), final=final)
        yield opening.end(), end
        if end is None:
            return
        at = end + len(markup.closed)


def end_of_value(markup: Markup, text: str, start: int, *, final: bool) -> int | None:
    """Return the end of a value that begins at `start`; None: it has not ended, or (not `final`)
    may continue."""
    if markup.cdata and (section := _CDATA.match(text, start)) is not None:
        closing = re.compile(rf"\]\]>\s*{re.escape(markup.closed)}").search(text, section.end())
        return None if closing is None else closing.end() - len(markup.closed)
    depth, otherwise = 0, None
    for tag in re.compile(
        f"{markup.opened.pattern}|{re.escape(markup.closed)}", re.DOTALL
    ).finditer(text, start):
        if tag.group() != markup.closed:
            depth += 1
            continue
        ends = markup.follows.match(text, tag.end()) is not None
        ends = ends or (final and markup.may_end and not text[tag.end() :].strip())
        if depth == 0 and (ends or _begins_another(markup, text, tag.end())):
            return tag.start()
        if ends and otherwise is None:  # a tag within the value that is not closed
            otherwise = tag.start()
        depth = max(0, depth - 1)
    return otherwise if final else None


def decided_end(markup: Markup, text: str) -> int:
    """Return the place behind the last argument that has certainly ended; 0: none has."""
    ends = [
        end + len(markup.closed) for _, end in _values(markup, text, final=False) if end is not None
    ]
    return max(ends, default=0)


def certain_text(markup: Markup, text: str) -> str:
    """The text as far as it belongs to the value in which it ends, whatever comes next."""
    opening = markup.opened.search(text, decided_end(markup, text))
    if opening is None:
        return text
    at = start = opening.end()
    if (inner := markup.opened.search(text, start)) is not None:
        text = text[: inner.start()]
    while (end := text.find(markup.closed, at)) >= 0:
        at = end + len(markup.closed)
        if _may_follow(markup, text[at:].lstrip()):
            return text[:end]
    held = max(begun_mark(text[start:], markup.closed), begun_mark(text[start:], markup.begins))
    tag = text.rfind(markup.begins, start)
    if tag >= 0 and len(text) - tag < LONGEST_TAG:
        held = max(held, len(text) - tag)
    return text[: len(text) - held]


def _may_follow(markup: Markup, text: str) -> bool:
    """Whether a text behind an end tag may be the beginning of what makes it the end of a value."""
    if any(mark.startswith(text) for mark in (markup.next, markup.begins)):
        return True
    if _begins_another(markup, text, 0, certain=False):
        return True
    return text.startswith(markup.begins) and len(text) < LONGEST_TAG


def _begins_another(markup: Markup, text: str, at: int, *, certain: bool = True) -> bool:
    """Whether another call begins at `at`, or (not `certain`) may begin there."""
    before = _NAME if markup.named else _SPACE
    mark = markup.next if markup.named else markup.call[0]
    if not mark or (begun := before.match(text, at)) is None:
        return False
    if text.startswith(mark, begun.end()):
        return True
    return not certain and mark.startswith(text[begun.end() :])


def begun_mark(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)

"""Tool calls while they are being written: which have begun, and the beginning of their arguments
that is certain.

    text between tool markers → BegunCalls.feed → calls (name, arguments so far) → AnswerSplitter →
    deltas

Two ways, by the format: if the arguments are JSON, their text is shown as it comes
(`_JsonCalls`). Elsewhere the text up to the last complete argument is closed and read by the
format's reader (`_GrowingCalls`); a text argument is shown while it grows, if its format has it
verbatim. Nothing of such a call is shown before something of its arguments is.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_parallm.execution.call_text import (
    MARKUP,
    Markup,
    begun_mark,
    certain_text,
    decided_end,
    inside_value,
)
from mlx_parallm.execution.json_values import write_json
from mlx_parallm.execution.python_text import parsed_expression
from mlx_parallm.execution.tool_calls import read_calls
from mlx_parallm.execution.typed_values import argument_schema, is_text

# a text of n characters is parsed again after n / 2^6 more: the work stays linear but for a factor
READ_AGAIN = 6
# characters that are read of calls that were cut off, to find the last argument that has ended
MOST_READ = 200_000


def new_call_id() -> str:
    """Mistral's template takes nine letters and digits as an id, no more and no less; everybody
    else takes anything."""
    return uuid.uuid4().hex[:9]


@dataclass(slots=True)
class BegunCall:
    name: str
    id: str
    arguments: str = ""  # the beginning of a JSON object


class BegunCalls(Protocol):
    calls: list[BegunCall]

    @property
    def shows_all(self) -> bool:
        """Whether all of the text so far is in the calls."""
        ...

    def feed(self, text: str) -> None: ...

    def cut(self, undecided: str) -> None:
        """Read the text once more: a limit has ended the answer. However the text came in
        pieces, the calls are then the same. `undecided`: text at the end that may begin a
        marker."""
        ...


def begun_calls(
    form: str, parse: Callable[[str, Any], Any], tools: Sequence[Mapping[str, Any]]
) -> BegunCalls:
    """Return a reader of one region between tool markers. `form`: the name of mlx-lm's parser.
    With an unknown one nothing is shown before the end of the region."""
    if form in _HEADERS:
        return _JsonCalls(_HEADERS[form])
    return _GrowingCalls(form, parse, tools)


# ------------------------------------------------------------------ arguments that are JSON

_OBJECT = re.compile(
    r'[\s,\[\]}]*+\{\s*+"name"\s*+:\s*+(?P<json>"(?:[^"\\]|\\.){1,256}+")\s*+,\s*+'
    r'"(?:arguments|args|parameters)"\s*+:\s*+(?=\{)',
    re.DOTALL,
)
_HEADERS: Mapping[str, tuple[re.Pattern[str], ...]] = {  # up to the arguments' begin
    "json_tools": (_OBJECT,),
    "mistral": (
        re.compile(
            r"\s*+(?P<name>[^\s\[\]{}]{1,256}+)\s*+(?:\[CALL_ID\]\s*+(?P<id>[\w-]*+)\s*+)?"
            r"\[ARGS\]\s*+(?=\{)"
        ),
        _OBJECT,
    ),
    "kimi_k2": (
        re.compile(
            r"(?:\s|<\|tool_call_begin\|>|<\|tool_call_end\|>)*+(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256}+):\d+)\s*+"
            r"<\|tool_call_argument_begin\|>\s*+(?=\{)"
        ),
    ),
}
_IN_TEXT, _OUTSIDE = re.compile(r'["\\\x00-\x1f]'), re.compile(r'["{}\[\]]')


class _JsonCalls:
    def __init__(self, headers: Sequence[re.Pattern[str]]) -> None:
        self.calls: list[BegunCall] = []
        self._headers = headers
        self._text = ""
        self._at = 0  # characters read so far
        self._depth = 0  # open brackets of the arguments
        self._in_text = False

    @property
    def shows_all(self) -> bool:
        return self._at == len(self._text)

    def feed(self, text: str) -> None:
        self._text += text
        while self._depth or self._begin():
            call = self.calls[-1]
            call.arguments += self._read_value()
            if self._depth:
                return

    def cut(self, undecided: str) -> None:
        self.feed(undecided)

    def _begin(self) -> bool:
        """Read the header of the next call, and the bracket that opens its arguments."""
        match = next(
            (match for header in self._headers if (match := header.match(self._text, self._at))),
            None,
        )
        if match is None:
            return False
        groups = match.groupdict()
        try:
            name = json.loads(groups["json"]) if groups.get("json") else groups["name"]
            name.encode()
        except ValueError:  # no JSON, or half a surrogate pair
            return False
        self.calls.append(BegunCall(name, groups.get("id") or new_call_id(), "{"))
        self._at, self._depth, self._in_text = match.end() + 1, 1, False
        return True

    def _read_value(self) -> str:
        """Move to the end of the arguments, or of the text; return that text. A raw line
        end within a string is escaped."""
        pieces, start = list[str](), self._at
        while self._depth:
            match = (_IN_TEXT if self._in_text else _OUTSIDE).search(self._text, self._at)
            if match is None:
                self._at = len(self._text)
                break
            sign = match.group()
            if sign == "\\":
                if match.end() == len(self._text):  # the escaped character is still to come
                    self._at = match.start()
                    break
                self._at = match.end() + 1
                continue
            self._at = match.end()
            if sign == '"':
                self._in_text = not self._in_text
            elif self._in_text:
                pieces += [self._text[start : match.start()], json.dumps(sign)[1:-1]]
                start = self._at
            else:
                self._depth += 1 if sign in "{[" else -1
        return "".join([*pieces, self._text[start : self._at]])


# ------------------------------------------------------------------ arguments that a parser reads


@dataclass(frozen=True, slots=True)
class _CallEnd:
    """How the beginning of a call becomes a whole one: `close` ends it behind an argument. An
    argument ends as call_text.MARKUP says, or in the other formats at `comma`.

    `delimiters`: around the texts of a format without tags; within them a text is literal.
    `valid`: whether a closed text may be read, if one may seem to be closed.
    """

    close: str = ""
    comma: re.Pattern[str] = re.compile("(?!)")
    delimiters: tuple[str, ...] = ()
    valid: Callable[[str], bool] = lambda text: True


def _is_python(text: str) -> bool:
    try:
        # Python's parser takes no NUL, which a text between quotation marks may have
        parsed_expression(text.strip().replace("\0", " "))
    except ValueError:
        return False
    return True


_BEFORE_KEY = re.compile(r"""[,](?=\s*[^\s:{},\[\]"'<]+\s*:)""")
_STEPS: Mapping[str, _CallEnd] = {
    "qwen3_coder": _CallEnd("</function>"),
    "glm47": _CallEnd(),
    "laguna": _CallEnd(),
    "longcat": _CallEnd(),
    "minimax_m2": _CallEnd("</invoke>"),
    "minicpm5": _CallEnd(),
    "muse_spark": _CallEnd("</atem:invoke>"),
    "kimi_k3": _CallEnd("<|close|>call<|sep|>"),
    "function_gemma": _CallEnd("}", _BEFORE_KEY, ("<escape>",)),
    "gemma4": _CallEnd("}", _BEFORE_KEY, ('<|"|>',)),
    "pythonic": _CallEnd(
        ")]",
        re.compile(r"""[,](?=\s*[^\s,=()\[\]{}"']+\s*=)|\)(?=\s*,\s*[^\s,=()\[\]{}"']+\()"""),
        ('"', "'"),
        _is_python,
    ),
}
Read = tuple[str, dict[str, Any], str | None]


class _GrowingCalls:
    def __init__(
        self, form: str, parse: Callable[[str, Any], Any], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self.calls: list[BegunCall] = []
        self._form, self._steps, self._parse, self._tools = form, _STEPS.get(form), parse, tools
        self._markup = MARKUP.get(form)
        self._text = ""
        self._next = 0  # length at which the text is read again

    @property
    def shows_all(self) -> bool:
        return False

    def feed(self, text: str) -> None:
        self._text += text
        if len(self._text) >= self._next:
            self._next = len(self._text) + max(1, len(self._text) >> READ_AGAIN)
            self._read(self._text)

    def cut(self, undecided: str) -> None:
        # a text between delimiters that has ended: nothing behind it says so yet
        marks = () if self._steps is None else self._steps.delimiters
        places = ((self._text.rfind(mark), mark) for mark in marks)
        # with all but the last sign of the mark: what stands before it may look like its beginning
        ends = sorted({at + len(mark) - 1 for at, mark in places if at >= 0})
        for end in (*ends, len(self._text)):
            if self._form == "pythonic" and (escape := _first_escape(self._text[:end])):
                self._read(self._text[:escape])
            self._read(self._text[:end], MOST_READ)

    def _read(self, text: str, work: int = 0) -> None:
        """`work`: characters that may be read to find the last argument that has ended, beyond the
        first try."""
        if self._steps is None:
            return
        calls = self._decided(self._steps, text, work)
        growing = self._with_open_text(self._steps, text, calls)
        self._take(growing or calls, cut=2 if growing else 1)

    def _decided(self, steps: _CallEnd, text: str, work: int) -> list[Read]:
        """The calls up to the last argument that has ended."""
        if self._markup is not None:
            ends = [decided_end(self._markup, text)]
        else:
            ends = [comma.start() for comma in steps.comma.finditer(text)]
        for end in reversed(ends):
            closed = text[:end] + steps.close
            is_whole = end and not inside_value(self._form, closed) and steps.valid(closed)
            calls = read_calls(self._parse, closed, self._tools) if is_whole else []
            work -= end
            if calls or work < 0:
                return calls
        return []

    def _with_open_text(
        self, steps: _CallEnd, text: str, calls: Sequence[Read]
    ) -> list[Read] | None:
        """The calls with the argument that is being written, if that is a text that will not
        be read otherwise."""
        closed = self._closed_text(steps, text)
        if closed is None or not steps.valid(closed):
            return None
        longer = read_calls(self._parse, closed, self._tools)
        if _count(longer) != _count(calls) + 1 or not longer[-1][1]:
            return None
        name, arguments, _ = longer[-1]
        key, value = list(arguments.items())[-1]
        if not isinstance(value, str) or not value:
            return None
        if self._markup is None:
            return longer
        if self._markup.cdata and value.lstrip()[:1] in ("", "<"):  # may begin a CDATA section
            return None
        return longer if self._wants_text(self._markup, text, name, key) else None

    def _closed_text(self, steps: _CallEnd, text: str) -> str | None:
        """The call with the text that is being written closed; None: none is."""
        if self._markup is not None:
            return certain_text(self._markup, text) + self._markup.closed + steps.close
        if not inside_value(self._form, text):
            return None
        if self._form == "pythonic":
            mark = _open_quote(text)
        else:
            [mark] = steps.delimiters
            text = text[: len(text) - begun_mark(text, mark)]
        return None if mark is None else f"{text}{mark}{steps.close}"

    def _wants_text(self, markup: Markup, text: str, name: str, key: str) -> bool:
        if self._form == "kimi_k3":  # the tag says it
            *_, opened = markup.opened.finditer(text)
            return 'type="' not in opened[0] or 'type="string"' in opened[0]
        for tool in self._tools:
            if tool["function"]["name"] == name:
                parameters = tool["function"].get("parameters")
                return is_text(argument_schema(parameters, key), parameters)
        return False

    def _take(self, calls: Sequence[Read], *, cut: int) -> None:
        """`cut`: how many characters of the last call's JSON are not certain yet."""
        for index, (name, arguments, call_id) in enumerate(calls):
            written = write_json(arguments)
            written = written[:-cut] if index == len(calls) - 1 else written
            if index == len(self.calls):
                self.calls.append(BegunCall(name, call_id or new_call_id()))
            call = self.calls[index]
            if call.name == name and written.startswith(call.arguments):
                call.arguments = written


def _count(calls: Sequence[Read]) -> int:
    return sum(len(arguments) for _, arguments, _ in calls)


# no possessive repeat: `re` of Python 3.11.2 loses matches where one fails inside an alternation
_PIECE = re.compile(r"""[^"'\\]+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)


def _closed_end(text: str) -> int:
    """Return the end of what stands outside of quotations, or in closed ones."""
    end = 0
    while (piece := _PIECE.match(text, end)) is not None:
        end = piece.end()
    return end


def _first_escape(text: str) -> int:
    """Return the place of the first escape in the quotation in which a text ends; 0: none."""
    return max(text.find("\\", _closed_end(text)), 0)


def _open_quote(text: str) -> str | None:
    """The mark of the quotation in which a text ends; None: none, or one with an escape, which
    some templates do not mean as one."""
    mark = text[_closed_end(text) :]
    return mark[0] if mark[:1] in ('"', "'") and "\\" not in mark else None

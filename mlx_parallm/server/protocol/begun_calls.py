"""Tool calls while they are being written: which have begun, and the beginning of their arguments
that is certain.

    text between tool markers → BegunCalls.feed → calls (name, arguments so far) → AnswerSplitter →
    deltas

Two ways, by the format: where the arguments are JSON, their text is shown as it comes
(`_JsonCalls`). Elsewhere the text up to the last complete argument is closed and read by the
format's parser (`_GrowingCalls`); a text argument is shown while it grows, if its format has it
verbatim.
"""

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_parallm.execution.call_text import MARKUP, certain_text, decided_end, inside_value
from mlx_parallm.execution.tool_calls import read_calls

# a text of n characters is parsed again after n / 2^6 more: the work stays linear but for a factor
READ_AGAIN = 6
_NULLS = ("null", "none", "nil")  # parsers turn these words into nothing


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

    def feed(self, text: str) -> None: ...


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
    r'[\s,\[\]}]*+\{\s*+"name"\s*+:\s*+(?P<json>"(?:[^"\\]|\\.){1,256}+")\s*+,\s*+"arguments"\s*+:\s*+(?=\{)',
    re.DOTALL,
)
_HEADERS: Mapping[str, tuple[re.Pattern[str], ...]] = {  # up to where the arguments begin
    "json_tools": (_OBJECT,),
    "mistral": (re.compile(r"\s*+(?P<name>[\w-]{1,256}+)\s*+\[ARGS\]\s*+(?=\{)"), _OBJECT),
    "kimi_k2": (
        re.compile(
            r"(?:\s|<\|tool_call_begin\|>|<\|tool_call_end\|>)*+(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256}+):\d+)\s*+"
            r"<\|tool_call_argument_begin\|>\s*+(?=\{)"
        ),
    ),
}
_IN_TEXT, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')


class _JsonCalls:
    def __init__(self, headers: Sequence[re.Pattern[str]]) -> None:
        self.calls: list[BegunCall] = []
        self._headers = headers
        self._text = ""
        self._at = 0  # what was read
        self._depth = 0  # open brackets of the arguments
        self._in_text = False

    def feed(self, text: str) -> None:
        self._text += text
        while self._depth or self._begin():
            start, call = self._at, self.calls[-1]
            self._read_value()
            call.arguments += self._text[start : self._at]
            if self._depth:
                return

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

    def _read_value(self) -> None:
        """Move on to the end of the arguments, or of what is there."""
        while self._depth:
            match = (_IN_TEXT if self._in_text else _OUTSIDE).search(self._text, self._at)
            if match is None:
                self._at = len(self._text)
                return
            sign = match.group()
            if sign == "\\":
                if match.end() == len(self._text):  # what it escapes is still to come
                    self._at = match.start()
                    return
                self._at = match.end() + 1
                continue
            self._at = match.end()
            if sign == '"':
                self._in_text = not self._in_text
            else:
                self._depth += 1 if sign in "{[" else -1


# ------------------------------------------------------------------ arguments that a parser reads


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps by which a text becomes a whole call: up to `opened` there is a name, `close` ends
    the call. An argument ends as call_text.MARKUP says, or in the other formats at a comma.

    `verbatim`: the text of an argument whose schema is a string stands there as it is. `valid`:
    whether a closed text may be read, where the parser takes anything.
    """

    opened: re.Pattern[str]
    close: str
    verbatim: bool = False
    valid: Callable[[str], bool] = lambda text: True


def _is_python(text: str) -> bool:
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


_GLM = _Steps(re.compile("<arg_key>"), "", verbatim=True)
_STEPS: Mapping[str, _Steps] = {
    "qwen3_coder": _Steps(re.compile(r"<function=[^\s<>]+>"), "</function>", verbatim=True),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": _Steps(re.compile("<longcat_arg_key>"), "", verbatim=True),
    "minimax_m2": _Steps(re.compile("<invoke name=[^>]+>"), "</invoke>", verbatim=True),
    "minicpm5": _Steps(re.compile(r"""^\s*["']?[^"'<>]+["']?\s*>"""), "", verbatim=True),
    "muse_spark": _Steps(re.compile('<atem:invoke[^>]*name="[^"]+">'), "</atem:invoke>"),
    "kimi_k3": _Steps(
        re.compile(r"<\|open\|>call(?:(?!<\|sep\|>).)*<\|sep\|>"), "<|close|>call<|sep|>"
    ),
    "function_gemma": _Steps(re.compile(r"call:\w+\{"), "}"),
    "gemma4": _Steps(re.compile(r"call:[\w-]+\{"), "}"),
    "pythonic": _Steps(re.compile(r"\[[\w.]+\("), ")]", valid=_is_python),
}


class _GrowingCalls:
    def __init__(
        self, form: str, parse: Callable[[str, Any], Any], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self.calls: list[BegunCall] = []
        self._form, self._steps, self._parse, self._tools = form, _STEPS.get(form), parse, tools
        self._markup = MARKUP.get(form)
        self._text = ""
        self._next = 0  # length at which the text is read again

    def feed(self, text: str) -> None:
        self._text += text
        if self._steps is None or len(self._text) < self._next:
            return
        self._next = len(self._text) + max(1, len(self._text) >> READ_AGAIN)
        end = (
            self._text.rfind(",") if self._markup is None else decided_end(self._markup, self._text)
        )
        if end <= 0:
            opened = self._steps.opened.search(self._text)
            if opened is None:
                return
            end = opened.end()
        closed = self._text[:end] + self._steps.close
        if inside_value(self._form, closed) or not self._steps.valid(closed):
            return
        calls = read_calls(self._parse, closed, self._tools)
        growing = self._with_open_text(calls) if self._steps.verbatim else None
        self._take(growing or calls, cut=2 if growing else 1)

    def _with_open_text(
        self, calls: list[tuple[str, dict[str, Any], str | None]]
    ) -> list[Any] | None:
        """The calls with the argument that is being written, where that is a text that will not
        be read otherwise."""
        assert self._steps is not None and self._markup is not None
        shown = certain_text(self._markup, self._text)
        longer = read_calls(
            self._parse, shown + self._markup.closed + self._steps.close, self._tools
        )
        if not calls or len(longer) != len(calls) or len(longer[-1][1]) != len(calls[-1][1]) + 1:
            return None
        name, arguments, _ = longer[-1]
        key, value = list(arguments.items())[-1]
        word = value.lower() if isinstance(value, str) else ""
        if not word or word.startswith("<") or any(null.startswith(word) for null in _NULLS):
            return None
        return longer if _is_text(self._tools, name, key) else None

    def _take(self, calls: Sequence[tuple[str, dict[str, Any], str | None]], *, cut: int) -> None:
        """`cut`: how many characters of the last call's JSON are not certain yet."""
        for index, (name, arguments, call_id) in enumerate(calls):
            written = json.dumps(arguments, ensure_ascii=False)
            written = written[:-cut] if index == len(calls) - 1 else written
            if index == len(self.calls):
                self.calls.append(BegunCall(name, call_id or new_call_id()))
            call = self.calls[index]
            if call.name == name and written.startswith(call.arguments):
                call.arguments = written


def _is_text(tools: Sequence[Mapping[str, Any]], name: str, key: str) -> bool:
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            return isinstance(schema, Mapping) and schema.get("type") == "string"
    return False

"""The action grammar: a planner's answer, one action a line.

    THINK: the target is far, so a controller should aim
    TOOL: search(query="wind, today", filter={"limit": 3})
    DELEGATE: physics(target=120, wind=-2.5)
    ANSWER: 42

A keyword counts at the start of a line. `TOOL` and `DELEGATE` take a name and arguments in Python's
or JSON's syntax; strings may hold commas and brackets, values may be nested, and a call ends before
the next line with a keyword. `ANSWER` and `THINK` take the text up to the next keyword. All other
text is a thought. A call that cannot be read is an action with `error`: no text raises anything.
"""

import json
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_parallm.execution.call_arguments import UnreadableError, closing_bracket, read_arguments

ActionKind = Literal["tool", "delegate", "answer", "think"]
HOW_TO_ACT = "To call one, write a line such as\nTOOL: NAME(key=value)"

_KEYWORD = re.compile(r"^[ \t]*+(TOOL|DELEGATE|ANSWER|THINK):", re.MULTILINE)
_WORD = re.compile(r"[\w.\-/]+")
_CALLED = re.compile(r"\s*+([\w.\-/]++)[ \t]*+")
_KINDS: Mapping[str, ActionKind] = {
    "TOOL": "tool",
    "DELEGATE": "delegate",
    "ANSWER": "answer",
    "THINK": "think",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One action. It is at `text[start:end]` of the parsed text."""

    kind: ActionKind
    start: int
    end: int
    name: str = ""  # name of the tool or expert
    arguments: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    text: str = ""  # the answer or thought, stripped
    error: str | None = None  # why a call cannot be read


def any_name(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of one of the names, in any case: the longest that is there ("far
    left", not "left"). A name that begins or ends with a letter or digit does so at the edge of a
    word; signs ("→") need no edge."""
    before, behind = r"(?<!\w)", r"(?!\w)"
    edged = [
        (before if name[:1].isalnum() else "")
        + re.escape(name)
        + (behind if name[-1:].isalnum() else "")
        for name in sorted(names, key=len, reverse=True)
    ]
    return re.compile("|".join(edged) or "(?!)", re.IGNORECASE)


def parse_actions(
    text: str, parameters: Mapping[str, Sequence[str]] | None = None
) -> tuple[Action, ...]:
    """Return the actions in `text`, in order; empty thoughts are left out.

    Args:
        parameters: names of the parameters by tool or expert, for arguments without a name: `TOOL:
            add(1, 2)`.
    """
    marks = list(_KEYWORD.finditer(text))
    starts = [*(mark.start() for mark in marks), len(text)]
    actions = list(_thought(text, 0, starts[0]))
    for mark, end in zip(marks, starts[1:], strict=True):
        kind, inside = _KINDS[mark[1]], mark.end()
        if kind in ("tool", "delegate"):
            action = _call(kind, text, mark.start(), inside, end, parameters or {})
            actions += [action, *_thought(text, action.end, end)]
        elif kind == "answer" or text[inside:end].strip():
            actions.append(Action(kind, mark.start(), end, text=text[inside:end].strip()))
    return tuple(actions)


def write_action(kind: Literal["tool", "delegate"], name: str, arguments: Mapping[str, Any]) -> str:
    """Return the line of a call, which `parse_actions` reads back; the arguments are JSON
    values."""
    plain = all(
        key.isascii() and key.isidentifier() and not keyword.iskeyword(key) for key in arguments
    )
    if not plain:  # Python reads other letters of an identifier by their NFKC form: "ﬀ" as "ff"
        return f"{kind.upper()}: {name}({json.dumps(dict(arguments), ensure_ascii=False)})"
    values = ", ".join(
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
    )
    return f"{kind.upper()}: {name}({values})"


def _thought(text: str, start: int, end: int) -> Iterator[Action]:
    if thought := text[start:end].strip():
        yield Action("think", start, end, text=thought)


def _called(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern of the name behind a keyword: the longest known one that ends there, or a word."""
    signs = sorted((name for name in names if _WORD.fullmatch(name) is None), key=len, reverse=True)
    if not signs:
        return _CALLED
    any_sign = "|".join(map(re.escape, signs))
    return re.compile(rf"\s*+((?:{any_sign})(?=\s*(?:\(|$))|[\w.\-/]++)[ \t]*+", re.MULTILINE)


def _call(
    kind: ActionKind,
    text: str,
    start: int,
    inside: int,
    end: int,
    parameters: Mapping[str, Sequence[str]],
) -> Action:
    """Read the call after a keyword, which ends at `inside`; the next keyword is at `end`."""
    line_end = text.find("\n", inside, end)
    line_end = end if line_end < 0 else line_end
    called = _called(parameters).match(text, inside, line_end)
    if called is None:
        return Action(kind, start, line_end, error=f"{kind.upper()}: is followed by no name")
    name, opening = called[1], called.end()
    if not text[opening:line_end].strip():
        return Action(kind, start, line_end, name)
    if text[opening] != "(":
        return Action(
            kind, start, line_end, name, error=f"expected {kind.upper()}: {name}(key=value)"
        )
    called_with = text[opening:end]
    # text=it's
    length = closing_bracket(called_with, 0, "\"'") or closing_bracket(
        called_with, 0, "\"'", words=True
    )
    if length is None:
        return Action(kind, start, line_end, name, error="the parenthesis is not closed")
    close = opening + length
    try:
        arguments = read_arguments(text[opening + 1 : close - 1], parameters.get(name, ()))
    except UnreadableError as error:
        return Action(kind, start, close, name, error=str(error))
    return Action(kind, start, close, name, arguments)

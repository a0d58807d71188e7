"""Read the arguments of a call in text: `x=1, names=["a", "b"]`, in Python's syntax, with JSON's
values, or as JSON.

Models leave quotation marks away: `path=/tmp/x, date=2026-01-05, city=New York, when=12:30`. Where
the whole is not Python, each argument is read by itself, and a value that is not a literal is a
text.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from mlx_parallm.execution.python_text import parsed_expression

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


class UnreadableError(Exception):
    """A malformed call; the text is the reason."""


_KEY = re.compile(r"\s*([^\W\d][\w.\-]*)\s*=(?!=)")
_NEXT_KEY = re.compile(r"\s[^\W\d]\w*=(?!=)")  # within a value: a comma was forgotten
_OPENS_QUOTATION = "=([{,:"  # a quotation mark behind other signs (it's, 5") is one of the text


def read_arguments(source: str, parameters: Sequence[str]) -> dict[str, Any]:
    """Return the arguments between the parentheses of a call: nothing, a JSON object, or Python's
    syntax.

    An argument that is not a literal (2 + 3, north, /tmp/x) stays text. Positional ones are named
    by `parameters`. Raises UnreadableError, which names the argument.
    """
    if source.lstrip().startswith("{"):
        return read_object(source)
    # Unknown escapes ("\d") mean themselves; doubled, they give no warning of Python's.
    written = (
        "f("
        + _ESCAPE.sub(lambda m: m[0] if m[1] in "\\'\"abfnrtvxuU\n" else "\\" + m[0], source)
        + "\n)"
    )
    try:
        call = parsed_expression(written)
    except ValueError:
        return _named(_natural_arguments(source, parameters), parameters)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UnreadableError("no arguments")
    if any(isinstance(node, ast.Starred) for node in call.args) or any(
        k.arg is None for k in call.keywords
    ):
        raise UnreadableError("an argument has a star")
    pairs = [(None, _literal(node, written)) for node in call.args]
    return _named(
        [*pairs, *((k.arg, _literal(k.value, written)) for k in call.keywords)], parameters
    )


def _named(pairs: Sequence[tuple[str | None, Any]], parameters: Sequence[str]) -> dict[str, Any]:
    """Raises UnreadableError: more arguments without a name than there are parameters, or one
    that is repeated."""
    unnamed = sum(key is None for key, _ in pairs)
    if unnamed > len(parameters):
        raise UnreadableError(f"{unnamed} arguments without a name, {len(parameters)} parameters")
    arguments: dict[str, Any] = {}
    for position, (key, value) in enumerate(pairs):
        name = parameters[position] if key is None else key
        if name in arguments:
            raise UnreadableError(f"the argument {name!r} is repeated")
        arguments[name] = value
    return arguments


def _literal(node: ast.expr, source: str) -> Any:
    try:
        return json.loads(json.dumps(ast.literal_eval(_JsonNames().visit(node)), allow_nan=False))
    except (ValueError, TypeError, RecursionError, MemoryError):
        if isinstance(node, ast.List):
            return [_literal(each, source) for each in node.elts]
        return (ast.get_source_segment(source, node) or "").strip()


def _natural_arguments(source: str, parameters: Sequence[str]) -> list[tuple[str | None, Any]]:
    """Arguments one by one. A piece without a name belongs to the value before it: `text=Hello,
    world`."""
    pieces: list[tuple[str | None, str]] = []
    for piece in _pieces(source):
        key = _KEY.match(piece)
        is_parameter = key is not None and (
            not parameters or key[1] in parameters or piece[:1].isspace()
        )
        # a comma of the value (also of a URL: ?a=1,b=2)
        if pieces and pieces[-1][0] is not None and not is_parameter:
            pieces[-1] = (pieces[-1][0], f"{pieces[-1][1]},{piece}")
        else:
            pieces.append((None, piece) if key is None else (key[1], piece[key.end() :]))
    return [
        (key, _natural_value(key, value.strip()))
        for key, value in pieces
        if key or value.strip() or len(pieces) > 1
    ]


def _natural_value(key: str | None, text: str) -> Any:
    """Raises UnreadableError: nothing, half a quotation, words without a name, or two arguments
    without a comma."""
    place = "no arguments" if key is None else f"argument {key!r}"
    if not text:
        raise UnreadableError(f"{place}: a value is missing")
    try:
        return _literal(parsed_expression(text), text)
    except (ValueError, RecursionError, MemoryError):
        pass
    if text[0] in "\"'":
        raise UnreadableError(
            f"{place}: {text[:40]} is not text in quotation marks; put a \\ before those within it"
        )
    if _NEXT_KEY.search(text) or (key is None and len(text.split()) > 1):
        advice = "put texts in quotation marks, and commas between arguments"
        raise UnreadableError(f"{place}: cannot read {text[:40]!r}; {advice}")
    if text[0] == "[" and text[-1] == "]":
        return [_natural_value(key, piece.strip()) for piece in _pieces(text[1:-1])]
    return text


def _pieces(source: str) -> list[str]:
    """The text between the commas that are in no bracket or quotation."""
    pieces, start, depth, quote, before = list[str](), 0, 0, "", "("
    at = 0
    while at < len(source):
        character = source[at]
        if quote:
            at += character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'" and before in _OPENS_QUOTATION:
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth <= 0:
            pieces.append(source[start:at])
            start = at + 1
        before = before if character.isspace() else character
        at += 1
    return [*pieces, source[start:]]


class _JsonNames(ast.NodeTransformer):
    """Reads true, false and null as JSON does, at any depth."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return (
            ast.copy_location(ast.Constant(_JSON_NAMES[node.id]), node)
            if node.id in _JSON_NAMES
            else node
        )


def closing_bracket(text: str, opening: int, quotes: str, *, words: bool = False) -> int | None:
    """Return the place after the bracket that closes the one at `opening`, or None. Brackets
    between `quotes` do not count. With `words`, a mark after a letter or digit (Newton's, 5\")
    opens no quotation, one before a letter or digit ends none, and no quotation crosses the end
    of a line."""
    depth, quote, at = 0, "", opening
    while at < len(text):
        character = text[at]
        if quote:
            if words and character == "\n":
                return None
            at += character == "\\"
            quote = (
                ""
                if character == quote and not (words and text[at + 1 : at + 2].isalnum())
                else quote
            )
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


def read_json(source: str) -> Any:
    """Raises UnreadableError."""
    try:
        return json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"not JSON: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read_object(source: str) -> dict[str, Any]:
    """Raises UnreadableError."""
    return checked_object(read_json(source))


def checked_object(value: Any) -> dict[str, Any]:
    """Raises UnreadableError."""
    if not isinstance(value, dict):
        raise UnreadableError("the arguments are not an object")
    return value

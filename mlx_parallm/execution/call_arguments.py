"""Read the arguments of a call in text: `x=1, names=["a", "b"]`, in Python's syntax, with JSON's values, or as JSON."""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


class UnreadableError(Exception):
    """A malformed call; the text is the reason."""


def read_arguments(source: str, parameters: Sequence[str]) -> dict[str, Any]:
    """Return the arguments between the parentheses of a call: nothing, a JSON object, or Python's syntax. An argument
    that is no literal (2 + 3, north) stays text. Positional ones are named by `parameters`. Raises UnreadableError."""
    if source.lstrip().startswith("{"):
        return read_object(source)
    # Unknown escapes ("\d") mean themselves; doubled, they give no warning of Python's.
    written = "f(" + _ESCAPE.sub(lambda m: m[0] if m[1] in "\\'\"abfnrtvxuU\n" else "\\" + m[0], source) + "\n)"
    try:
        call = ast.parse(written, "<tool call>", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"no arguments: {error}") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UnreadableError("no arguments")
    if len(call.args) > len(parameters):
        raise UnreadableError(f"{len(call.args)} arguments without a name, {len(parameters)} parameters")
    pairs = [*zip(parameters, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    arguments = {key: _literal(node, written) for key, node in pairs if key is not None}
    if len(arguments) < len(pairs) or any(isinstance(node, ast.Starred) for node in call.args):
        raise UnreadableError("an argument is repeated, or has a star")
    return arguments


def _literal(node: ast.expr, source: str) -> Any:
    try:
        return json.loads(json.dumps(ast.literal_eval(_JsonNames().visit(node)), allow_nan=False))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return (ast.get_source_segment(source, node) or "").strip()


class _JsonNames(ast.NodeTransformer):
    """Reads true, false and null as JSON does, at any depth."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_JSON_NAMES[node.id]), node) if node.id in _JSON_NAMES else node


def closing_bracket(text: str, opening: int, quotes: str, *, words: bool = False) -> int | None:
    """Return the place after the bracket that closes the one at `opening`, or None. Brackets between `quotes` do not
    count. With `words`, a mark after a letter or digit (Newton's, 5\") opens no quotation, one before a letter or digit
    ends none, and no quotation crosses the end of a line."""
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

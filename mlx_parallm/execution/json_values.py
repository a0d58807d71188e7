"""The arguments of tool calls as chat templates get them: values of JSON that print as JSON.

Templates use arguments in many ways: `arguments | tojson` (Qwen, Llama), `arguments.items()`
(Qwen3-Coder, GLM), `"…" + arguments` (DeepSeek), `{{ arguments }}` (Mistral, Kimi). `JSONObject` is
a mapping for those that ask for one, and the client's own JSON text wherever it is printed or
joined to text; what lies in it prints as JSON too. Numbers and repeated keys stay as they were
written. Arguments that are not an objects are text, which `write_json` does not quote again.

JSON's true, false and null cannot be subclasses of Python's, so a template's tests have to know
them: `TESTS`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex


def whole_characters(text: str) -> str:
    """Return a foreign text with U+FFFD in place of halves of surrogate pairs, which no UTF-8 can
    hold and no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Printed:
    """A value that prints, and joins with text, as its JSON."""

    def __str__(self) -> str:
        return write_json(self)

    def __add__(self, other: Any) -> Any:
        return f"{self}{other}" if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return f"{other}{self}" if isinstance(other, str) else NotImplemented


class JSONObject(_Printed, dict[str, Any]):
    """An object. It has the methods of its text too, if it has no key of that name
    (`arguments.strip()`)."""

    def __init__(self, pairs: Sequence[tuple[str, Any]], text: str | None = None) -> None:
        """`pairs` may repeat keys; the last one counts. `text`: as the client has written it."""
        super().__init__(pairs)
        self._pairs, self._text = tuple(pairs), text

    def __str__(self) -> str:
        return write_json(self) if self._text is None else self._text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return str(self) == other if isinstance(other, str) else dict.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self or not hasattr(str, name):
            raise AttributeError(name)
        return str.__getattribute__(str(self), name)


class JSONArray(_Printed, list[Any]):
    __repr__ = _Printed.__str__

    def __add__(self, other: Any) -> Any:
        return list.__add__(self, other) if isinstance(other, list) else super().__add__(other)

    def __mul__(self, other: SupportsIndex) -> Any:
        return list.__mul__(self, other)


class JSONBool(_Printed, int):
    __repr__ = _Printed.__str__


class JSONNull(_Printed):
    __repr__ = _Printed.__str__

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, JSONNull)

    def __hash__(self) -> int:
        return hash(None)


class JSONNumber(float):
    """A number that Python would print in another way: 1.10, 1e5, 1e400, -0."""

    def __new__(cls, text: str) -> "JSONNumber":
        number = super().__new__(cls, text)
        number._text = text
        return number

    _text: str

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


class JSONText(str):
    """Arguments that are not an objects, as a model wrote them, or another server."""


_OF_JSON = (JSONObject, JSONArray, JSONBool, JSONNull, JSONNumber, JSONText)


def template_arguments(arguments: str | Mapping[str, Any]) -> JSONObject | JSONText:
    """Return the arguments of a call as a template gets them."""
    if isinstance(arguments, Mapping):
        return _object(list(arguments.items()))
    try:
        value = json.loads(
            arguments,
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=_int,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError):
        return JSONText(arguments)
    return (
        JSONObject(value._pairs, arguments)
        if isinstance(value, JSONObject)
        else JSONText(arguments)
    )


def holds_json_values(value: Any) -> bool:
    """Return whether a call's arguments lie in a value."""
    if isinstance(value, _OF_JSON):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_json_values, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_json_values, value))


def write_json(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    _outer: str = "",
) -> str:
    """Write a value as `json.dumps` does, with each number and each key of a call's arguments as
    it was written."""
    comma, colon = separators or ((", " if indent is None else ","), ": ")
    step = " " * indent if isinstance(indent, int) else indent
    inner = _outer + (step or "")

    def written(item: Any) -> str:
        options: dict[str, Any] = {
            "ensure_ascii": ensure_ascii,
            "indent": indent,
            "separators": separators,
        }
        return write_json(item, **options, sort_keys=sort_keys, _outer=inner)

    def joined(start: str, items: list[str], end: str) -> str:
        if not items or step is None:
            return start + comma.join(items) + end
        return f"{start}\n{inner}" + f"{comma}\n{inner}".join(items) + f"\n{_outer}{end}"

    if isinstance(value, Mapping):
        pairs = value._pairs if isinstance(value, JSONObject) else tuple(value.items())
        pairs = tuple(sorted(pairs, key=lambda pair: pair[0])) if sort_keys else pairs
        members = [
            json.dumps(key, ensure_ascii=ensure_ascii) + colon + written(item)
            for key, item in pairs
        ]
        return joined("{", members, "}")
    if isinstance(value, list | tuple):
        return joined("[", [written(item) for item in value], "]")
    if isinstance(value, JSONText | JSONNumber):
        return str(value)
    if isinstance(value, JSONBool):
        return "true" if value else "false"
    return json.dumps(None if isinstance(value, JSONNull) else value, ensure_ascii=ensure_ascii)


def _object(pairs: list[tuple[Any, Any]]) -> JSONObject:
    return JSONObject([(_key(key), _of_json(item)) for key, item in pairs])


def _key(key: Any) -> str:
    """Return a key as JSON has it: Python's may be numbers."""
    return key if isinstance(key, str) else json.dumps(key)


def _of_json(value: Any) -> Any:
    if value is None:
        return JSONNull()
    if isinstance(value, bool):
        return JSONBool(value)
    if isinstance(value, Mapping) and not isinstance(value, JSONObject):
        return _object(list(value.items()))
    if isinstance(value, list | tuple):
        return JSONArray(map(_of_json, value))
    return value


def _float(text: str) -> float:
    number = float(text)
    return number if repr(number) == text else JSONNumber(text)


def _int(text: str) -> int | float:
    number = int(text)
    return JSONNumber(text) if text == "-0" else number


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | JSONBool)


TESTS: Mapping[str, Callable[..., bool]] = {
    "none": lambda value: value is None or isinstance(value, JSONNull),
    "boolean": _is_bool,
    "true": lambda value: _is_bool(value) and bool(value),
    "false": lambda value: _is_bool(value) and not value,
    "integer": lambda value: isinstance(value, int) and not _is_bool(value),
}
"""Jinja's tests, for values of JSON as well."""

"""The value of an argument written as bare text in a call, by its JSON schema.

    kinds_of(schema, root)         the JSON types that a schema allows
    typed_value(text, schema, root)  the value: text if the schema wants text

Nothing is guessed if the schema decides: a string that looks like null, a number or true stays a
string, white space included. If a schema allows a string and something else, JSON of that other
type is that type. A value that does not fit is returned as written; nothing here raises.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_parallm.execution.python_text import parsed_expression

KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
MOST_REFS = 32  # references followed in a schema that refers to itself
_NAMES: Mapping[str, str] = {  # other programs' names of types
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "long", "short", "unsigned", "uint"), "integer"),
    **dict.fromkeys(("num", "float", "double"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("arr", "list", "tuple", "sequence"), "array"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("none", "nil"), "null"),
}
_HINTS: Mapping[str, str] = {  # keywords of a schema without a type
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string"),
}
_PYTHON = {"True": True, "False": False, "None": None}


def argument_schema(parameters: Any, key: str) -> Any:
    """The schema of one argument; True (anything) if the tool does not declare it."""
    if not isinstance(parameters, Mapping):
        return True
    places: list[Any] = [parameters]
    for _ in range(MOST_REFS):
        place = places.pop(0) if places else None
        if not isinstance(place, Mapping):
            continue
        properties = place.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        places += [each for choices in _alternatives(place, parameters) for each in choices]
    more = parameters.get("additionalProperties")
    return more if isinstance(more, Mapping) else True


def kinds_of(schema: Any, root: Any = None) -> frozenset[str]:
    """The JSON types that a schema allows; all of `KINDS` if it does not say. `root`: the
    schema that its `$ref`s point into."""
    return _kinds(schema, schema if root is None else root, MOST_REFS)


def _kinds(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return KINDS
    kinds = KINDS
    for choices in _alternatives(schema, root):
        kinds &= frozenset[str]().union(*(_kinds(each, root, depth - 1) for each in choices))
    for values in _listed(schema):
        kinds &= {_kind(value) for value in values}
    if (names := schema.get("type")) is not None:
        named = frozenset(map(_named, [names] if isinstance(names, str) else names))
        kinds &= KINDS if None in named else named | ({"integer"} if "number" in named else set())
    elif kinds == KINDS:
        kinds = frozenset(_HINTS[key] for key in schema if key in _HINTS) or KINDS
    if schema.get("nullable") is True:  # OpenAPI's
        kinds |= {"null"}
    return frozenset(kinds) or KINDS  # a schema that allows nothing says nothing


def _alternatives(schema: Mapping[str, Any], root: Any) -> Iterator[Sequence[Any]]:
    """The schemas that one schema is made of: of each list, one must fit."""
    for name in ("$ref", "$dynamicRef"):
        if name in schema:
            yield [_target(schema[name], root)]
    for name in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(name), list | tuple) and choices:
            yield choices
    if isinstance(parts := schema.get("allOf"), list | tuple):
        yield from ([each] for each in parts)


def _listed(schema: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """The values that a schema lists, by keyword."""
    if "const" in schema:
        yield [schema["const"]]
    if isinstance(values := schema.get("enum"), list | tuple) and values:
        yield values


def _named(name: Any) -> Any:
    name = str(name).strip().lower()
    if name in KINDS:
        return name
    return _NAMES.get(name.rstrip("0123456789").partition("[")[0])


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _target(ref: Any, root: Any) -> Any:
    """Return the part of `root` that a local `$ref` names; None: it is missing."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    place = root
    for step in ref[1:].lstrip("/").split("/") if ref[1:] else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(step)
        elif isinstance(place, list) and step.isdecimal() and int(step) < len(place):
            place = place[int(step)]
        else:
            return None
    return place


def _choices(schema: Any, root: Any, depth: int = MOST_REFS) -> list[Any]:
    """The values that a schema and its parts list."""
    if not isinstance(schema, Mapping) or depth == 0:
        return []
    listed = [value for values in _listed(schema) for value in values]
    inner = [each for choices in _alternatives(schema, root) for each in choices]
    return listed + [value for each in inner for value in _choices(each, root, depth - 1)]


def is_text(schema: Any, root: Any = None) -> bool:
    """Whether a value can only be a string, so that its text is the value."""
    return kinds_of(schema, root) == {"string"}


def typed_value(text: str, schema: Any, root: Any = None) -> Any:
    """Return the value that a text stands for. If no string is allowed, white space around the
    text does not count, and Python's True, False, None and containers are read too."""
    kinds = kinds_of(schema, root)
    if kinds == {"string"}:
        return text
    strings = "string" in kinds
    written = text if strings else text.strip()
    try:
        value = _json(written)
    except (ValueError, RecursionError):
        value = text if strings else _python(written, text)
    if isinstance(value, str):
        return text
    if (
        isinstance(value, float)
        and value.is_integer()
        and "integer" in kinds
        and "number" not in kinds
    ):
        value = _integer(written, value)
    if strings:
        choices = _choices(schema, root) if text in _choices(schema, root) else ()
        fits = _kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds)
        if not fits or (choices and not any(_same(value, choice) for choice in choices)):
            return text
    return value


def _json(text: str) -> Any:
    """Raises ValueError or RecursionError: no JSON, or a number that JSON cannot write."""
    if text != text.strip():
        raise ValueError("white space around JSON")

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    value = json.loads(text, strict=False, parse_constant=refuse)
    json.dumps(value, allow_nan=False)
    return value


def _python(written: str, text: str) -> Any:
    if written in _PYTHON:
        return _PYTHON[written]
    if written[:1] not in ("[", "{", "("):
        return text
    try:
        value = json.loads(
            json.dumps(ast.literal_eval(parsed_expression(written)), allow_nan=False)
        )
    except (ValueError, TypeError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, list | dict) else text


def _integer(written: str, value: float) -> int:
    """The whole number of a text such as 5.0, with all of its digits."""
    whole, _, rest = written.partition(".")
    exact = whole.lstrip("-").isdecimal() and not rest.strip("0")
    return int(whole) if exact else int(value)


def _same(value: Any, choice: Any) -> bool:
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)

"""JSON that came from outside: bounded before it is read; reading it cannot end the process.

Bytes become objects that take twenty times their room ("[[],[],…" is 3 bytes a list), and lists
inside one another are read by recursion.

Values are checked against JSON schemas by a compiled checker (`jsonschema-rs`): its regular
expressions backtrack within a bound, a `$ref` to another document is refused, never fetched, and
what would take too many steps is not checked: the checker holds the interpreter's lock and has no
bound, and forty definitions of which each refers to the next one twice take 2⁴⁰ steps, on a value
of one letter. So the steps are counted first, each pair of a part of the schema and a part of the
value once.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

import jsonschema_rs

MAX_CONTAINERS = 1 << 20
MAX_DEPTH = 256  # lists and objects inside one another: what reads them calls itself once a level
BACKTRACKS = 100_000  # limit of one regular expression on one text
MOST_STEPS = 20_000_000
"""Steps of a check: 3 to 12 ns each."""
EXPLAINED_STEPS = 20_000
"""Steps of a check that says where a fault lies: up to 40 µs each, for it keeps what is wrong with
every alternative."""
MOST_PAIRS = 300_000
_GROWS = ("$ref", "$dynamicRef", "$recursiveRef", "unevaluated")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_VALUES = ("const", "enum", "default", "examples")  # what they hold is not a schema
_OF_A_FRAGMENT = "%/?:@!$&'()*+,;=-._~"
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HERE = ("not", "if", "then", "else")
_HERE_LISTS = ("allOf", "anyOf", "oneOf")
_HERE_BY_NAME = ("dependentSchemas", "dependencies")
_OF_VALUES = ("additionalProperties", "unevaluatedProperties")
_OF_ITEMS = ("additionalItems", "contains", "unevaluatedItems")
# Drafts in which a schema without `$schema` is read: the newest in which it is one (`items` as a
# list is Draft 7's, `exclusiveMinimum: true` Draft 4's).
_DRAFTS: tuple[Any, ...] = (None, jsonschema_rs.Draft7Validator, jsonschema_rs.Draft4Validator)


class TooDeepError(ValueError):
    """Lists and objects lie too deeply inside one another."""

    def __init__(self, deepest: int = MAX_DEPTH) -> None:
        super().__init__(
            f"nested too deeply: at most {deepest} lists and objects in one another are read"
        )


class TooManyContainersError(ValueError):
    """There are so many lists and objects that they would take gigabytes."""


def read_json(
    text: bytes | str,
    *,
    most: int = MAX_CONTAINERS,
    deepest: int = MAX_DEPTH,
    constant: Callable[[str], Any] | None = None,
    number: Callable[[str], Any] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Args:
        most: lists and objects that it may hold.
        deepest: lists and objects that may lie inside one another.
        constant: reads NaN, Infinity and -Infinity; None: as Python's numbers.
        number: reads numbers with a point or an exponent; None: as Python's.

    Raises ValueError: no UTF-8, no JSON; TooDeepError; TooManyContainersError. One line each.
    """
    check_containers(text, most)
    try:
        decoded = text if isinstance(text, str) else text.decode()
        value = json.loads(decoded, parse_constant=constant, parse_float=number)
    except RecursionError:
        raise TooDeepError(deepest) from None
    if _containers(text) > deepest and deeper_than(value, deepest):
        raise TooDeepError(deepest)
    return value


def check_containers(text: bytes | str, most: int = MAX_CONTAINERS) -> None:
    """Raises TooManyContainersError: a text holds more than `most` lists and objects."""
    if len(text) > most and _containers(text) > most:
        raise TooManyContainersError(f"more than {most} lists and objects")


def deeper_than(value: Any, most: int) -> bool:
    """Whether more than `most` lists and objects lie inside one another."""
    level = [value]
    for _ in range(most + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return True


def _containers(text: bytes | str) -> int:
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


@lru_cache(256)
def validator(source: str, *, formats: bool = True) -> Any:
    """Return a `jsonschema_rs` validator of a schema as JSON text. `formats`: whether `format` is
    checked. Raises ValueError: this is not a JSON schema, or it refers to another document."""
    schema = with_plain_references(json.loads(source))
    options = jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS)
    drafts = _DRAFTS[:1] if isinstance(schema, dict) and "$schema" in schema else _DRAFTS
    reason = ""
    for draft in drafts:
        make = jsonschema_rs.validator_for if draft is None else draft
        try:
            return make(schema, validate_formats=formats, pattern_options=options, offline=True)
        except ValueError as error:
            reason = reason or str(getattr(error, "message", error))
    raise ValueError(f"not a JSON schema: {reason}")


def with_plain_references(schema: Any) -> Any:
    """Return a schema whose references are URIs: Vega-Lite's and TypeScript's have `<`, `|` and
    spaces as they stand in the names of their definitions."""
    if isinstance(schema, list):
        return [with_plain_references(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _as_uri(value)
        if key in _REFERENCES and isinstance(value, str)
        else value
        if key in _VALUES
        else with_plain_references(value)
        for key, value in schema.items()
    }


def _as_uri(reference: str) -> str:
    base, hash_sign, fragment = reference.partition("#")
    plain = quote(_STRAY_PERCENT.sub("%25", fragment), safe=_OF_A_FRAGMENT)
    return f"{base}{hash_sign}{plain}"


def fault(source: str, value: Any, *, what: str, formats: bool = True) -> str | None:
    """Return what is wrong with a value, by the first place in it; None: it follows the schema, a
    JSON text. `what`: the value's name. Raises ValueError: as `validator`."""
    check = validator(source, formats=formats)
    try:
        if steps_of_check(source, value) > EXPLAINED_STEPS:
            reason = "does not follow the schema, whose alternatives are too many to say where"
            return None if check.is_valid(value) else f"{what} {reason}"
        first = next(iter(check.iter_errors(value)), None)
    except ValueError as error:  # too many steps, nested deeper than the library goes, or no UTF-8
        return f"{what} cannot be checked: {error}"
    if first is None:
        return None
    place = "".join(f"/{step}" for step in first.instance_path)
    return f"{place or what}: {first.message}"


# ---------------------------------------------------------------------- steps of a check


def steps_of_check(source: str, value: Any) -> int:
    """Return how many steps a check of a value against a schema, as JSON text, takes at most; 0:
    each part of the schema is used once for each part of the value. Raises ValueError: too many."""
    if not any(word in source for word in _GROWS):
        return 0
    try:
        return _CheckSteps(*_indexed(source)).of(value)
    except RecursionError:
        raise ValueError("schema and value are nested too deeply") from None


@lru_cache(64)
def _indexed(source: str) -> tuple[Any, dict[str, list[Any]], list[Any]]:
    """Return the schema, its parts by anchor and by name, and those that references begin at."""
    root = json.loads(source)
    by_name, documents, nodes = defaultdict(list), [root], [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(key), str):
                    by_name[f"#{node[key]}"].append(node)
            for key in ("$id", "id"):
                if isinstance(node.get(key), str):
                    by_name[node[key].rstrip("#").rpartition("/")[2]].append(node)
                    documents.append(node)
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return root, dict(by_name), documents


class _CheckSteps:
    def __init__(self, root: Any, by_name: dict[str, list[Any]], documents: list[Any]) -> None:
        self._root, self._by_name, self._documents = root, by_name, documents
        self._pairs: dict[tuple[int, int], int | None] = {}
        self._targets: dict[str, list[Any]] = {}

    def of(self, value: Any) -> int:
        """Raises ValueError: too many."""
        if (steps := self._count(self._root, value)) > MOST_STEPS:
            raise ValueError(
                "the schema repeats itself so often that the check"
                f" would take {float(steps):.3g} steps"
            )
        return steps

    def _count(self, schema: Any, value: Any) -> int:
        if not isinstance(schema, dict):
            return 1
        pair = (id(schema), id(value))
        if pair in self._pairs:
            steps_before = self._pairs[pair]
            if steps_before is None:
                raise ValueError("the schema refers to itself without an end")
            return steps_before
        if len(self._pairs) >= MOST_PAIRS:
            raise ValueError("schema and value are too large to be checked")
        self._pairs[pair] = None
        steps = 1 + sum(self._count(part, inner) for part, inner in _below(schema, value))
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(schema.get(key), str):
                parts = self._parts_of(schema[key])
                steps += max((self._count(part, value) for part in parts), default=0)
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            steps *= 2  # its siblings are counted once more
        self._pairs[pair] = steps
        return steps

    def _parts_of(self, reference: str) -> list[Any]:
        """Return the parts that a reference may mean."""
        if reference not in self._targets:
            name, _, fragment = reference.partition("#")
            inside = self._documents
            if name:
                inside = self._by_name.get(name.rpartition("/")[2], [])
            if not fragment:
                parts = inside
            elif fragment.startswith("/"):
                parts = [part for each in inside for part in _at(each, fragment)]
            else:
                parts = self._by_name.get(f"#{fragment}", [])
            self._targets[reference] = parts
        return self._targets[reference]


def _at(node: Any, pointer: str) -> Iterator[Any]:
    """Yield the part at a JSON pointer, if it is there."""
    for step in unquote(pointer).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            return
    yield node


def _below(schema: dict[str, Any], value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs that a check of this one asks for, but for references."""
    for key, part in schema.items():
        if key in _HERE:
            yield part, value
        elif key in _HERE_LISTS and isinstance(part, list):
            yield from ((each, value) for each in part)
        elif key in _HERE_BY_NAME and isinstance(part, dict):
            yield from ((each, value) for each in part.values())
        elif isinstance(value, dict):
            yield from _of_object(key, part, value)
        elif isinstance(value, list):
            yield from _of_list(key, part, value)


def _of_object(key: str, part: Any, value: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    if key in _OF_VALUES:
        yield from ((part, inner) for inner in value.values())
    elif key == "propertyNames":
        yield from ((part, name) for name in value)
    elif key == "properties" and isinstance(part, dict):
        yield from ((part[name], inner) for name, inner in value.items() if name in part)
    elif key == "patternProperties" and isinstance(part, dict):
        yield from ((each, inner) for each in part.values() for inner in value.values())


def _of_list(key: str, part: Any, value: list[Any]) -> Iterator[tuple[Any, Any]]:
    if key in ("items", "prefixItems") and isinstance(part, list):
        yield from zip(part, value, strict=False)
    elif key == "items" or key in _OF_ITEMS:
        yield from ((part, inner) for inner in value)

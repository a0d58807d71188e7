"""A JSON schema as the grammar library can follow it, what gets lost on the way, and the check of
that. No MLX.

    schema ─ for_grammar ─► a schema for the library ─ grammar.py ─► grammar; keywords that it
    does not enforce
           ─ violation(answer) ─► the fault of an answer, for schemas with such keywords

The library refuses keywords that it does not know. Some of them have a twin that it does know
(`propertyNames`, zod's formats): those are written so. The others it leaves out when asked
(`lenient`), and names them. If the library takes more than the keyword means (leap seconds at
any time, a local part of 100 characters), the grammar gets something narrower.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer

from mlx_parallm.system.foreign_json import fault, validator, with_plain_references

_BASE64URL = "[A-Za-z0-9_-]+"
_DAY = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,31}"
_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_EMAIL = f"^{_ATOM}(?:\\.{_ATOM})?@(?:{_LABEL}\\.){{1,3}}[A-Za-z]{{2,10}}$"
_CHARACTER = "(?:[A-Za-z0-9\\-._~!$&'()*+,;=@]|%[0-9A-Fa-f]{2})"  # a character of a URI's path
_SCHEME, _AUTHORITY = (
    "[A-Za-z][A-Za-z0-9+.-]*:",
    f"//{_LABEL}(?:\\.{_LABEL})*(?::[0-9]{{1,4}})?(?:/{_CHARACTER}*)*",
)
_PATH = f"/?(?:{_CHARACTER}+(?:/{_CHARACTER}*)*)?"
_QUERY = f"(?:\\?(?:{_CHARACTER}|[:/?])*)?(?:#(?:{_CHARACTER}|[:/?])*)?"
# Formats that the library does not know, or takes too widely, as regular expressions; None = any
# text. If a schema has a pattern beside such a format (zod's have), the pattern is the
# definition.
FORMATS: Mapping[str, str | None] = {
    **dict.fromkeys(
        ("password", "binary", "path", "file-path", "directory-path", "float", "double")
    ),
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^[A-Za-z0-9_-]*$",
    "cuid": "^[cC][0-9a-z]{8,}$",
    "cuid2": "^[a-z][0-9a-z]+$",
    "date-time": f"^{_DAY}T{_TIME}$",
    "e164": "^\\+[1-9][0-9]{6,14}$",
    "email": _EMAIL,
    "emoji": "^(?:\\p{Extended_Pictographic}|\\p{Emoji_Component})+$",
    "guid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "idn-email": _EMAIL,
    "idn-hostname": f"^(?:{_LABEL}\\.){{0,3}}{_LABEL}$",
    "iri": f"^{_SCHEME}(?:{_AUTHORITY}|{_PATH}){_QUERY}$",
    "iri-reference": f"^(?:{_SCHEME})?(?:{_AUTHORITY}|{_PATH}){_QUERY}$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "jwt": f"^{_BASE64URL}\\.{_BASE64URL}\\.{_BASE64URL}$",
    "ksuid": "^[A-Za-z0-9]{27}$",
    "nanoid": "^[A-Za-z0-9_-]{21}$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]{0,5})(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "time": f"^{_TIME}$",
    "ulid": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$",
    "uri-reference": f"^(?:{_SCHEME})?(?:{_AUTHORITY}|{_PATH}){_QUERY}$",
    "uri-template": f"^(?:{_SCHEME})?(?:{_AUTHORITY}|{_PATH}){_QUERY}$",
    "url": "^[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9\\-._~:/?#\\[\\]@!$&'()*+,;=%]+$",
    "xid": "^[0-9a-v]{20}$",
}
# What changes nothing.
_SAYS_NOTHING: Mapping[str, Any] = {
    "uniqueItems": False,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
}
# Parts of a regular expression: an escape, the opening of a group with a mark, or one character.
_PATTERN_PART = re.compile(r"\\.|\(\?<?[=!>]|.", re.DOTALL)
_NO_AUTOMATON = re.compile(
    r"\(\?(?:<?[=!]|>)|\\[1-9kbBc]"
)  # parts without an automaton, outside of [...]
_SPACES = r" \t\n\r\f\v"
_NUMBERS = ("const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SMALLEST_INTEGER, _LARGEST_INTEGER = -(2**63), 2**63 - 1  # the library's range
_LARGEST_BOUND = 2**63 - 1024
_SMALLEST_BOUND = 1e-6  # the library loses smaller ones
_MAPS, _LISTS = (
    ("properties", "patternProperties", "$defs", "definitions"),
    ("prefixItems", "anyOf", "oneOf", "allOf"),
)
_SINGLE = ("items", "additionalProperties")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
LONGEST_REASON = 300  # characters
NO_TEXT = "NoExtension"  # how the library begins to say that no text matches
_BYTES = LLTokenizer("byte")


def for_grammar(schema: Any, *, close: bool) -> tuple[Any, tuple[str, ...]]:
    """Return the schema in the library's words, and the keywords that were left out.

    Args:
        close: objects that list `properties` and do not speak of others have no others. Objects
            that are put together of several schemas (`allOf`, a `$ref` beside `properties`) stay
            open: each part would forbid the others'.

    Raises RecursionError: nested too deeply.
    """
    rewriter = _Rewriter(
        frozenset(_merged_references(schema)) if close else frozenset(), close=close
    )
    schema = with_plain_references(schema)
    return rewriter.rewrite(schema, "#", merged=False), tuple(rewriter.lost)


class _Rewriter:
    def __init__(self, merged_references: frozenset[str], *, close: bool) -> None:
        self.lost: dict[str, None] = {}  # in the order in which they were met
        self._merged, self._close = merged_references, close

    def rewrite(self, schema: Any, place: str, *, merged: bool) -> Any:
        """`place`: the JSON pointer of the schema; `merged`: it is one of several parts of an
        object."""
        if not isinstance(schema, dict):
            return schema
        if "not" in schema and schema["not"] in ({}, True):
            return False  # zod's z.never()
        merged = merged or place in self._merged or _parts(schema) > 1
        node = {
            key: value
            for key, value in schema.items()
            if key not in _SAYS_NOTHING or value is not _SAYS_NOTHING[key]
        }
        self._numbers(node, place)
        self._object(node, merged=merged)
        self._string(node)
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                node[key] = {
                    n: self.rewrite(s, f"{place}/{key}/{_step(n)}", merged=False)
                    for n, s in node[key].items()
                }
        for key in _LISTS:
            if isinstance(node.get(key), list):
                inside = merged and key in _BRANCHES
                node[key] = [
                    self.rewrite(s, f"{place}/{key}/{i}", merged=inside)
                    for i, s in enumerate(node[key])
                ]
        for key in _SINGLE:
            if key in node:
                node[key] = self.rewrite(node[key], f"{place}/{key}", merged=False)
        return node

    def _numbers(self, node: dict[str, Any], place: str) -> None:
        """Narrows bounds that the library would round, which computes with doubles.

        Raises ValueError: a value that it would round, or that is beyond 64 bits.
        """
        for key in _BOUNDS:
            if type(value := node.get(key)) is int:
                node[key] = _narrowed(value, up="inimum" in key)
        for key in (*_NUMBERS, "enum"):
            for value in (
                _numbers_in(node.get(key)) if key in ("const", "enum") else (node.get(key),)
            ):
                if isinstance(value, int) and not _SMALLEST_INTEGER <= value <= _LARGEST_INTEGER:
                    raise ValueError(
                        f"{place}/{key}: the grammar holds integers of"
                        f" 64 bits, and {value} is larger"
                    )
                if (
                    isinstance(value, float)
                    and key not in ("const", "enum")
                    and 0 < abs(value) < _SMALLEST_BOUND
                ):
                    self.lost[key] = None
                if isinstance(value, int) and int(float(value)) != value:
                    raise ValueError(
                        f"{place}/{key}: the grammar would round"
                        f" {value}: it has 53 bits for a number"
                    )

    def _object(self, node: dict[str, Any], *, merged: bool) -> None:
        if "unevaluatedProperties" in node:
            if not merged and _parts(node) == ("properties" in node):
                node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
        elif (
            self._close
            and not merged
            and "properties" in node
            and not any(key in node for key in _OTHERS)
        ):
            self._close_object(node)
        self._patterns_beside_properties(node)
        if merged and "patternProperties" in node and node.get("additionalProperties") is False:
            # the other parts may list all names of a pattern: a dead end
            self.lost["patternProperties"] = None
        if (
            _is_more_than_one(node.get("minProperties"))
            and node.get("additionalProperties") is not False
        ):
            # the grammar counts a name twice that is written twice
            self.lost["minProperties"] = None
        names = node.get("propertyNames")
        if names is None:
            return
        others = node.get("additionalProperties", True)
        alone = (
            isinstance(names, dict) and "properties" not in node and "patternProperties" not in node
        )
        if names in ({}, True, {"type": "string"}):
            pass
        elif alone and _is_keyword(names, "pattern", str) and not _looks_around(names["pattern"]):
            node |= {"patternProperties": {names["pattern"]: others}, "additionalProperties": False}
        elif (
            alone
            and _is_keyword(names, "enum", list)
            and all(isinstance(name, str) for name in names["enum"])
        ):
            node |= {
                "properties": dict.fromkeys(names["enum"], others),
                "additionalProperties": False,
            }
        else:
            return
        del node["propertyNames"]

    @staticmethod
    def _close_object(node: dict[str, Any]) -> None:
        """Allow the listed properties, and required ones that are not listed."""
        required = [name for name in _list(node.get("required")) if isinstance(name, str)]
        if isinstance(node["properties"], dict):
            node["properties"] = dict.fromkeys(required, True) | node["properties"]
        node["additionalProperties"] = False

    def _patterns_beside_properties(self, node: dict[str, Any]) -> None:
        """Drops a pattern all of whose names are listed: the library opens another property that it
        then cannot name.

        The pattern's schema is added to those of matching names.
        """
        properties, patterns = node.get("properties"), node.get("patternProperties")
        if not isinstance(properties, dict) or not isinstance(patterns, dict):
            return
        for pattern, schema in patterns.items():
            if _looks_around(pattern) or not _names_only(pattern, properties):
                continue
            patterns = {key: value for key, value in patterns.items() if key != pattern}
            properties = {
                name: {"allOf": [value, schema]} if _matches(pattern, name) else value
                for name, value in properties.items()
            }
        node["properties"], node["patternProperties"] = properties, patterns
        if not patterns:
            del node["patternProperties"]

    def _string(self, node: dict[str, Any]) -> None:
        if _looks_around(node.get("pattern")):
            del node["pattern"]
            self.lost["pattern"] = None
        if isinstance(node.get("pattern"), str):
            node["pattern"] = _with_plain_spaces(node["pattern"])
        patterns = node.get("patternProperties")
        if isinstance(patterns, dict) and any(map(_looks_around, patterns)):
            del node["patternProperties"]
            node.pop("additionalProperties", None)
            self.lost["patternProperties"] = None
        name = node.get("format")
        if isinstance(name, str) and name in FORMATS:
            del node["format"]
            if (pattern := FORMATS[name]) is not None:
                node.setdefault("pattern", pattern)


def _numbers_in(value: Any) -> Iterator[int | float]:
    """The numbers of a JSON value, at any depth."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(each)


def _narrowed(value: int, *, up: bool) -> int:
    """The next integer inwards that the library holds: a double, of a size that it has digits
    for (int64's ends are beyond). A bound that leaves nothing stays as it is."""
    value = max(value, -_LARGEST_BOUND) if up else min(value, _LARGEST_BOUND)
    if not -_LARGEST_BOUND <= value <= _LARGEST_BOUND:
        return value
    nearest = float(value)
    if nearest != value and (nearest < value) == up:
        nearest = math.nextafter(nearest, math.inf if up else -math.inf)
    return int(nearest)


def _is_keyword(schema: Mapping[str, Any], key: str, kind: type) -> bool:
    """Whether a schema says only this of a string, in this type."""
    return (
        schema.keys() <= {"type", key}
        and schema.get("type", "string") == "string"
        and isinstance(schema.get(key), kind)
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_more_than_one(count: Any) -> bool:
    return isinstance(count, int | float) and count > 1


def _pattern_parts(pattern: str) -> Iterator[tuple[str, bool]]:
    """The parts of a regular expression, and whether each is in [...]."""
    inside = False
    for match in _PATTERN_PART.finditer(pattern):
        part = match.group()
        if inside and part.startswith("(?"):
            yield from ((character, True) for character in part)
            continue
        yield part, inside
        inside = part == "[" or (inside and part != "]")


def _looks_around(pattern: Any) -> bool:
    """Whether no automaton follows a regular expression: look-around, a back-reference, the edge
    of a word."""
    return isinstance(pattern, str) and any(
        not inside and _NO_AUTOMATON.match(part) is not None
        for part, inside in _pattern_parts(pattern)
    )


def _with_plain_spaces(pattern: str) -> str:
    """The regular expression with the spaces on which Rust and ECMAScript agree (\\x85 is one in
    Rust only)."""
    wide, narrow = "\\s", f"[{_SPACES}]"
    return "".join(
        (_SPACES if inside else narrow) if part == wide else part
        for part, inside in _pattern_parts(pattern)
    )


def _matches(pattern: str, name: str) -> bool:
    """Whether a property's name falls under a pattern."""
    return bool(validator(json.dumps({"pattern": pattern})).is_valid(name))


def _names_only(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern matches no text but these names: it is between anchors, and without
    them matches none."""
    parts = [part for part, inside in _pattern_parts(pattern) if not inside]
    depth = [
        sum(part[0] == "(" for part in parts[:i]) - parts[:i].count(")") for i in range(len(parts))
    ]
    if (
        parts[:1] != ["^"]
        or parts[-1:] != ["$"]
        or any(p == "|" and not d for p, d in zip(parts, depth, strict=True))
    ):
        return False
    inside = pattern[1:-1].replace("\\/", "/").replace("/", "\\/")
    others = "".join(f" & ~{json.dumps(name, ensure_ascii=False)}" for name in names)
    start = LLMatcher(
        _BYTES, LLMatcher.grammar_from_lark(f"start: NAME\nNAME: /{inside}/{others}"), log_level=0
    )
    if not start.is_error():
        start.compute_bitmask()  # a grammar that matches no text at all shows here
    return start.is_error() and start.get_error().startswith(NO_TEXT)


def _parts(schema: Mapping[str, Any]) -> int:
    """Return the number of schemas that apply to one object together (allOf, anyOf, …)."""
    branches = sum(
        len(schema[key]) if key == "allOf" else 1
        for key in _BRANCHES
        if isinstance(schema.get(key), list)
    )
    return branches + ("$ref" in schema) + ("properties" in schema)


def _merged_references(root: Any) -> Iterator[str]:
    """The `$ref`s whose targets are combined with other schemas of one object."""
    seen: set[str] = set()
    waiting = [(schema, False) for schema in _schemas(root)]
    while waiting:
        schema, merged = waiting.pop()
        if not isinstance(schema, dict) or not (merged or _parts(schema) > 1):
            continue
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            yield unquote(reference)
            waiting.append((_target(root, reference), True))
        waiting += [(branch, True) for key in _BRANCHES for branch in _list(schema.get(key))]


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and those in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        inner: list[Any] = [value] if key in _SINGLE else []
        if key in _MAPS and isinstance(value, dict):
            inner = [*value.values()]
        elif key in _LISTS and isinstance(value, list):
            inner = value
        for each in inner:
            yield from _schemas(each)


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _target(root: Any, reference: str) -> Any:
    """Return the part of the schema that a reference points to, or None."""
    for step in reference.removeprefix("#").split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        root = root.get(step) if isinstance(root, dict) else None
    return root


def violation(source: str, answer: str) -> str | None:
    """Return the first fault of an answer and its place; None when it follows the
    schema `source`.

    Raises ValueError: this is not a JSON schema.
    """
    try:
        value = json.loads(answer, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        return f"the answer is not JSON: {error}"[:LONGEST_REASON]
    reason = fault(source, value, what="the answer")
    return None if reason is None else reason[:LONGEST_REASON]


def _finite(number: str) -> float:
    """Raises ValueError: a number that readers of JSON take for infinite."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:40]} is beyond a double")
    return value

"""A JSON schema as the grammar library can follow it, what gets lost on the way, and the check of that. No MLX.

    schema ─ for_grammar ─► what the library reads ─ grammar.py ─► grammar, and the keywords that it does not enforce
           ─ violation(answer) ─► what is wrong with an answer whose schema has such keywords

The library refuses keywords that it does not know. Some of them have a twin that it does know (`propertyNames`, zod's
formats): those are written so. The others it leaves out when asked (`lenient`), and names them.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import jsonschema_rs

_BASE64URL = "[A-Za-z0-9_-]+"
# Formats that the library does not know, as regular expressions; None = any text. Where a schema has a pattern beside
# such a format (zod's have), the pattern is the definition.
FORMATS: Mapping[str, str | None] = {
    **dict.fromkeys(("password", "binary", "path", "file-path", "directory-path", "float", "double")),
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^[A-Za-z0-9_-]*$",
    "cuid": "^[cC][0-9a-z]{8,}$",
    "cuid2": "^[a-z][0-9a-z]+$",
    "e164": "^\\+[1-9][0-9]{6,14}$",
    "emoji": "^(?:\\p{Extended_Pictographic}|\\p{Emoji_Component})+$",
    "guid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "jwt": f"^{_BASE64URL}\\.{_BASE64URL}\\.{_BASE64URL}$",
    "ksuid": "^[A-Za-z0-9]{27}$",
    "nanoid": "^[A-Za-z0-9_-]{21}$",
    "ulid": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$",
    "uri-reference": "^[A-Za-z0-9\\-._~:/?#\\[\\]@!$&'()*+,;=%]*$",
    "url": "^[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9\\-._~:/?#\\[\\]@!$&'()*+,;=%]+$",
    "xid": "^[0-9a-v]{20}$",
}
# What changes nothing.
_SAYS_NOTHING: Mapping[str, Any] = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
_LOOKS_AROUND = ("(?=", "(?!", "(?<=", "(?<!", "\\1")
_MAPS, _LISTS = ("properties", "patternProperties", "$defs", "definitions"), ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
LONGEST_REASON = 300  # characters
BACKTRACKS = 100_000  # of a regular expression in `violation`


def for_grammar(schema: Any, *, close: bool) -> tuple[Any, tuple[str, ...]]:
    """Return the schema in the library's words, and the keywords that were left out.

    Args:
        close: objects that list `properties` and do not speak of others have no others. Objects that are put together
            of several schemas (`allOf`, a `$ref` beside `properties`) stay open: each part would forbid the others'.

    Raises RecursionError: nested too deeply.
    """
    rewriter = _Rewriter(frozenset(_merged_references(schema)) if close else frozenset(), close=close)
    return rewriter.rewrite(schema, "#", merged=False), tuple(rewriter.lost)


class _Rewriter:
    def __init__(self, merged_references: frozenset[str], *, close: bool) -> None:
        self.lost: dict[str, None] = {}  # in the order in which they were met
        self._merged, self._close = merged_references, close

    def rewrite(self, schema: Any, place: str, *, merged: bool) -> Any:
        """`place`: the JSON pointer of the schema; `merged`: it is one of several parts of an object."""
        if not isinstance(schema, dict):
            return schema
        if "not" in schema and schema["not"] in ({}, True):
            return False  # zod's z.never()
        merged = merged or place in self._merged or _parts(schema) > 1
        node = {
            key: value for key, value in schema.items() if key not in _SAYS_NOTHING or value is not _SAYS_NOTHING[key]
        }
        self._object(node, merged=merged)
        self._string(node)
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                node[key] = {n: self.rewrite(s, f"{place}/{key}/{n}", merged=False) for n, s in node[key].items()}
        for key in _LISTS:
            if isinstance(node.get(key), list):
                inside = merged and key in _BRANCHES
                node[key] = [self.rewrite(s, f"{place}/{key}/{i}", merged=inside) for i, s in enumerate(node[key])]
        for key in _SINGLE:
            if key in node:
                node[key] = self.rewrite(node[key], f"{place}/{key}", merged=False)
        return node

    def _object(self, node: dict[str, Any], *, merged: bool) -> None:
        if "unevaluatedProperties" in node:
            if not merged and _parts(node) == ("properties" in node):
                node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
        elif self._close and not merged and "properties" in node and not any(key in node for key in _OTHERS):
            node["additionalProperties"] = False
        names = node.get("propertyNames")
        if names is None:
            return
        others = node.get("additionalProperties", True)
        alone = isinstance(names, dict) and "properties" not in node and "patternProperties" not in node
        if names in ({}, True, {"type": "string"}):
            pass
        elif alone and _is_keyword(names, "pattern", str) and not _looks_around(names["pattern"]):
            node |= {"patternProperties": {names["pattern"]: others}, "additionalProperties": False}
        elif alone and _is_keyword(names, "enum", list) and all(isinstance(name, str) for name in names["enum"]):
            node |= {"properties": dict.fromkeys(names["enum"], others), "additionalProperties": False}
        else:
            return
        del node["propertyNames"]

    def _string(self, node: dict[str, Any]) -> None:
        if _looks_around(node.get("pattern")):
            del node["pattern"]
            self.lost["pattern"] = None
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


def _is_keyword(schema: Mapping[str, Any], key: str, kind: type) -> bool:
    """Whether a schema says only this of a string, in this type."""
    return (
        schema.keys() <= {"type", key}
        and schema.get("type", "string") == "string"
        and isinstance(schema.get(key), kind)
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _looks_around(pattern: Any) -> bool:
    return isinstance(pattern, str) and any(sign in pattern for sign in _LOOKS_AROUND)


def _parts(schema: Mapping[str, Any]) -> int:
    """How many schemas an object is put together of."""
    branches = sum(len(schema[key]) if key == "allOf" else 1 for key in _BRANCHES if isinstance(schema.get(key), list))
    return branches + ("$ref" in schema) + ("properties" in schema)


def _merged_references(root: Any) -> Iterator[str]:
    """The `$ref`s whose targets are parts of objects that are put together."""
    seen: set[str] = set()
    waiting = [(schema, False) for schema in _schemas(root)]
    while waiting:
        schema, merged = waiting.pop()
        if not isinstance(schema, dict) or not (merged or _parts(schema) > 1):
            continue
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            yield reference
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


def _target(root: Any, reference: str) -> Any:
    """What a reference within the schema points to; None where it points to nothing."""
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        root = root.get(step) if isinstance(root, dict) else None
    return root


def violation(source: str, answer: str) -> str | None:
    """Return what is wrong with an answer, by the first place in it; None when it follows the schema `source`.

    Raises ValueError: this is no JSON schema.
    """
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        return f"the answer is not JSON: {error}"
    check = validator(source)
    try:
        first = next(iter(check.iter_errors(value)), None)
    except ValueError as error:  # nested deeper than the library goes, or no UTF-8
        return f"the answer cannot be checked: {error}"[:LONGEST_REASON]
    if first is None:
        return None
    place = "".join(f"/{step}" for step in first.instance_path)
    return f"{place or 'the answer'}: {first.message}"[:LONGEST_REASON]


@lru_cache(64)
def validator(source: str) -> Any:
    """Raises ValueError: this is no JSON schema, or it refers to another document."""
    options = jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS)
    return jsonschema_rs.validator_for(json.loads(source), validate_formats=True, pattern_options=options, offline=True)

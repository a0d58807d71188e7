"""Schemas that repeat themselves: the checker holds the interpreter's lock, so what would not end
is refused before it is asked."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlx_parallm.system.foreign_json import EXPLAINED_STEPS, fault, steps_of_check

LEVELS = 40
Twice = Callable[[Any], Any]
BOMBS: dict[str, Twice] = {
    "anyOf": lambda ref: {"anyOf": [ref, ref]},
    "oneOf": lambda ref: {"oneOf": [ref, ref]},
    "allOf": lambda ref: {"allOf": [ref, ref]},
    "not": lambda ref: {"not": {"anyOf": [ref, ref]}},
    "if": lambda ref: {"if": ref, "then": ref, "else": ref},
    "dependent": lambda ref: {"dependentSchemas": {"a": ref, "b": ref}},
    "beside a reference": lambda ref: {**ref, "allOf": [ref]},
    "unevaluated": lambda ref: {"unevaluatedProperties": False, "allOf": [ref]},
}
REFERENCES: dict[str, tuple[Callable[[int], dict[str, str]], Callable[[int], dict[str, str]]]] = {
    "by pointer": (lambda n: {"$ref": f"#/$defs/d{n}"}, lambda n: {}),
    "by anchor": (lambda n: {"$ref": f"#a{n}"}, lambda n: {"$anchor": f"a{n}"}),
    "by id": (lambda n: {"$ref": f"s{n}"}, lambda n: {"$id": f"http://x/s{n}"}),
    "dynamic": (lambda n: {"$dynamicRef": f"#y{n}"}, lambda n: {"$dynamicAnchor": f"y{n}"}),
}


def chain(twice: Twice, way: str = "by pointer", levels: int = LEVELS) -> str:
    refer, name = REFERENCES[way]
    parts = {f"d{n}": {**name(n), **twice(refer(n + 1))} for n in range(levels)}
    parts[f"d{levels}"] = {**name(levels), "type": "integer"}
    return json.dumps({"$id": "http://x/root", **refer(0), "$defs": parts})


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("way", REFERENCES)
def test_a_schema_that_doubles_is_refused_at_once(name: str, way: str) -> None:
    reason = fault(chain(BOMBS[name], way), {"a": 1, "b": 2}, what="the answer")
    assert reason is not None and "repeats itself so often" in reason


def test_a_value_may_double_the_work_too() -> None:
    """Each level of the value is asked twice."""
    again = {"properties": {"a": {"$ref": "#/$defs/r"}}}
    source = json.dumps({"$defs": {"r": {"anyOf": [again, again]}}, "$ref": "#/$defs/r"})
    value: Any = {}
    for _ in range(LEVELS):
        value = {"a": value}
    assert "repeats itself" in (fault(source, value, what="it") or "")
    assert fault(source, {"a": {"a": {}}}, what="it") is None


def test_what_people_write_is_checked() -> None:
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/node",
    }
    value: Any = {"value": 0, "children": []}
    for depth in range(60):
        value = {"value": depth, "children": [value, {"value": "leaf"}]}
    assert fault(json.dumps(tree), value, what="it") is None
    wide = {"type": "array", "items": {"$ref": "#/$defs/i"}, "$defs": {"i": {"type": "integer"}}}
    assert fault(json.dumps(wide), list(range(20_000)), what="it") is None
    assert "cannot be checked" in (fault('{"$ref": "#"}', 1, what="it") or "")
    assert steps_of_check(json.dumps({"type": "integer"}), [1] * 1000) == 0
    few = chain(BOMBS["anyOf"], levels=8)
    assert fault(few, 1, what="it") is None
    assert "not valid" in (fault(few, "x", what="it") or "")


def test_a_tree_of_parts_of_many_kinds_is_checked() -> None:
    """Each part of a page may be of any of twenty kinds; `unevaluated` doubles the steps."""
    kinds = [
        {
            "properties": {
                "kind": {"const": number},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
            },
            "required": ["kind"],
            "unevaluatedProperties": False,
        }
        for number in range(20)
    ]
    source = json.dumps({"$ref": "#/$defs/part", "$defs": {"part": {"anyOf": kinds}}})

    def page(depth: int, leaf: int) -> dict[str, Any]:
        parts = [page(depth - 1, leaf) for _ in range(2)] if depth else []
        return {"kind": depth if depth else leaf, "parts": parts}

    assert steps_of_check(source, page(2, 0)) > EXPLAINED_STEPS
    assert fault(source, page(2, 0), what="the page") is None
    reason = fault(source, page(2, 20), what="the page")
    assert reason is not None and reason.startswith("the page does not follow the schema")


@pytest.mark.parametrize(
    "name",
    ["a b", "A<B,(C|null)>", 'a"b', "é", "a[b]", "a{b}", "a^b`", "50%", "a%b", "a\\b", "a#b"],
)
def test_a_reference_may_have_any_character(name: str) -> None:
    """As Vega-Lite's schema and those of TypeScript's types have it; the same text in a constant
    stays."""
    reference = f"#/definitions/{name}"
    schema = {
        "definitions": {name: {"type": "string"}},
        "properties": {"x": {"$ref": reference}, "y": {"const": {"$ref": reference}}},
    }
    source = json.dumps(schema)
    assert fault(source, {"x": "s", "y": {"$ref": reference}}, what="it") is None
    found = fault(source, {"x": 1}, what="it")
    assert found is not None and "/x" in found

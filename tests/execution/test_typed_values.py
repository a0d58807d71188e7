"""The type of an argument that stands as bare text, by its schema."""

import json
from typing import Any

import pytest

from mlx_parallm.execution.typed_values import argument_schema, is_text, kinds_of, typed_value

INTEGER, TEXT, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
ROOT = {
    "$defs": {"N": INTEGER, "T": TEXT, "Loop": {"$ref": "#/$defs/Loop"}},
    "definitions": {"a/b": {"anyOf": [{"$ref": "#/$defs/N"}, NULL]}},
    "properties": {"x": INTEGER},
    "additionalProperties": TEXT,
}
CASES: dict[str, tuple[Any, str, Any]] = {
    "text": (TEXT, "null", "null"),
    "text with space": (TEXT, "  1\n", "  1\n"),
    "a reference to text": ({"$ref": "#/$defs/T"}, "true", "true"),
    "a reference": ({"$ref": "#/$defs/N"}, " 7 ", 7),
    "a reference of a reference": ({"$ref": "#/definitions/a~1b"}, "null", None),
    "a reference to itself": ({"$ref": "#/$defs/Loop"}, "7", 7),
    "a reference to nothing": ({"$ref": "#/$defs/X"}, "7", 7),
    "nullable": ({"anyOf": [INTEGER, NULL]}, "5", 5),
    "null of a nullable text": ({"type": ["string", "null"]}, "null", None),
    "text of a nullable text": ({"type": ["string", "null"]}, "None", "None"),
    "OpenAPI's nullable": ({"type": "integer", "nullable": True}, "null", None),
    "text or number": ({"type": ["string", "integer"]}, "5", 5),
    "text or number: text": ({"type": ["string", "integer"]}, "true", "true"),
    "text or number: space": ({"type": ["string", "integer"]}, " 5", " 5"),
    "listed numbers": ({"enum": [1, 2]}, "1", 1),
    "listed texts": ({"enum": ["1", "true"]}, "1", "1"),
    "listed text and number": ({"enum": ["1", 2]}, "1", "1"),
    "constant": ({"const": None}, "null", None),
    "all of": ({"allOf": [TEXT, {"description": "x"}]}, "1", "1"),
    "no type but a hint": ({"minLength": 1}, "1", "1"),
    "another program's type": ({"type": "INT64"}, "1", 1),
    "an unknown type": ({"type": "money"}, "1", 1),
    "a big number": (INTEGER, "1234567890123456789", 1234567890123456789),
    "a whole number with a point": (INTEGER, "12345678901234567890.0", 12345678901234567890),
    "no whole number": (INTEGER, "5.7", 5.7),
    "no number": (INTEGER, "2026-01-15", "2026-01-15"),
    "Python's": ({"type": ["boolean", "null"]}, "True", True),
    "Python's None": (NULL, "None", None),
    "Python's list": ({"type": "array"}, "['a', True]", ["a", True]),
    "not a number": ({"type": "number"}, "NaN", "NaN"),
    "too big a number": ({"type": "number"}, "1e999", "1e999"),
    "JSON": ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
    "anything": ({}, "[1]", [1]),
    "anything: a quoted text": (True, '"a"', '"a"'),
    "anything: text": (True, "007", "007"),
    "a schema that is none": (None, "true", True),
    "impossible": ({"allOf": [INTEGER, TEXT]}, "1", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_schema_gives_the_type(case: str) -> None:
    schema, text, expected = CASES[case]
    value = typed_value(text, schema, ROOT)
    assert (type(value), value) == (type(expected), expected)
    json.dumps(value, allow_nan=False)


def test_a_deep_or_long_text_raises_nothing() -> None:
    for text in ("[" * 100_000, "1" * 10_000, "(" * 1000):
        assert typed_value(text, {"type": "array"}) is not None


def test_the_schema_of_an_argument_is_found() -> None:
    assert argument_schema(ROOT, "x") == INTEGER and argument_schema(ROOT, "y") == TEXT
    assert argument_schema(None, "x") is True and argument_schema({"properties": None}, "x") is True
    inherited = {
        "allOf": [{"$ref": "#/$defs/Base"}],
        "$defs": {"Base": {"properties": {"x": TEXT}}},
    }
    assert is_text(argument_schema(inherited, "x"), inherited)
    assert kinds_of({"type": "number"}) == {"integer", "number"}

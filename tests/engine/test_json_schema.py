"""Which texts the grammar of a schema takes, which keywords it gives up, and the check of those."""

import json
from typing import Any

import pytest

from mlx_parallm.engine.grammar import Grammars
from mlx_parallm.engine.json_schema import for_grammar, violation
from mlx_parallm.errors import RequestError
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import Structure

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def listing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


# schema → what it takes, what it does not take, keywords that it does not enforce
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "z.record": (
        {"type": "object", "propertyNames": TEXT, "additionalProperties": INTEGER},
        [{"A": 1}],
        [{"A": "x"}],
    ),
    "propertyNames, pattern": (
        {
            "type": "object",
            "propertyNames": TEXT | {"pattern": "^[a-z]+$"},
            "additionalProperties": INTEGER,
        },
        [{"ab": 1}],
        [{"A": 1}],
    ),
    "propertyNames, enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        [{"a": 1, "b": 2}, {}],
        [{"c": 1}],
    ),
    "z.never": (listing(a={"not": {}}, b=TEXT), [{"b": "x"}], [{"a": 1}]),
    "unevaluatedProperties": (
        listing(a=INTEGER) | {"unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "uniqueItems off": ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    "cuid": (TEXT | {"format": "cuid"}, ["cabcdefgh1"], ["x"]),
    "nanoid": (TEXT | {"format": "nanoid"}, ["a" * 21], ["a"]),
    "base64": (TEXT | {"format": "base64"}, ["aGk=", ""], ["aGk"]),
    "jwt": (TEXT | {"format": "jwt"}, ["a.b.c"], ["ab"]),
    "emoji": (TEXT | {"format": "emoji"}, ["😀"], ["ab"]),
    "e164": (TEXT | {"format": "e164"}, ["+491234567"], ["49"]),
    "uri-reference": (TEXT | {"format": "uri-reference"}, ["/a?b#c"], ["a b"]),
    "path": (TEXT | {"format": "path"}, ["/a b"], [1]),
    "password": (TEXT | {"format": "password"}, ["x"], [1]),
    "binary": (TEXT | {"format": "binary"}, ["x"], [1]),
    "zod's pattern": (TEXT | {"format": "cuid", "pattern": "^[cC][^ -]{3,}$"}, ["cABC"], ["ab"]),
}
# …, an answer that breaks the keyword, its name
GIVEN_UP: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "uniqueItems": (
        {"type": "array", "items": INTEGER, "uniqueItems": True},
        [1, 2],
        [1, 1],
        ["uniqueItems"],
    ),
    "contains": ({"type": "array", "contains": INTEGER}, [1, "a"], ["a"], ["contains"]),
    "not": (INTEGER | {"not": {"const": 3}}, 4, 3, ["not"]),
    "if": (
        listing(a=INTEGER) | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {},
        {"a": 1},
        ["if", "then"],
    ),
    "dependentRequired": (
        listing(a=INTEGER, b=INTEGER) | {"dependentRequired": {"a": ["b"]}},
        {"b": 1},
        {"a": 1},
        ["dependentRequired"],
    ),
    "unevaluatedProperties": (
        {"allOf": [listing(a=INTEGER), listing(b=INTEGER)], "unevaluatedProperties": False},
        {"a": 1, "b": 2},
        {"a": 1, "c": 2},
        ["unevaluatedProperties"],
    ),
    "overlapping oneOf": ({"oneOf": [INTEGER, INTEGER | {"minimum": 3}]}, 1, 5, ["oneOf"]),
    "look-ahead": (TEXT | {"format": "duration", "pattern": "^P(?!1)"}, "P2D", "P1D", ["pattern"]),
    "regex": (TEXT | {"format": "regex"}, "[a]", "[a", ["format:regex"]),
}


@pytest.fixture(scope="module")
def grammars(tiny_tokenizer: Tokenizer) -> Grammars:
    return Grammars(tiny_tokenizer, 320)


def schema(source: Any, **fields: Any) -> Structure:
    return Structure("json_schema", json.dumps(source), **fields)


def takes(grammars: Grammars, tokenizer: Tokenizer, structure: Structure, value: Any) -> bool:
    matcher = grammars._compile(structure).start.deep_copy()
    tokens = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("name", ENFORCED)
async def test_keywords_of_type_systems_are_enforced(
    grammars: Grammars, tiny_tokenizer: Tokenizer, name: str
) -> None:
    source, good, bad = ENFORCED[name]
    structure = schema(source)
    assert await grammars.unenforced(structure) == ()
    assert all(takes(grammars, tiny_tokenizer, structure, value) for value in good)
    assert not any(takes(grammars, tiny_tokenizer, structure, value) for value in bad)


@pytest.mark.parametrize("name", GIVEN_UP)
async def test_what_the_grammar_lets_through_is_named_and_found_in_the_end(
    grammars: Grammars, tiny_tokenizer: Tokenizer, name: str
) -> None:
    source, good, bad, names = GIVEN_UP[name]
    structure = schema(source)
    assert list(await grammars.unenforced(structure)) == names
    for value in (good, bad):
        assert takes(grammars, tiny_tokenizer, structure, value)
    assert violation(structure.source, json.dumps(good)) is None and violation(
        structure.source, json.dumps(bad)
    )


def test_objects_are_closed_but_for_those_put_together_of_several_schemas(
    grammars: Grammars, tiny_tokenizer: Tokenizer
) -> None:
    parts = {
        "allOf": [{"$ref": "#/$defs/A"}, listing(b=INTEGER)],
        "$defs": {"A": listing(a=INTEGER)},
    }
    plain, nested = listing(a=INTEGER), listing(a=listing(b=INTEGER))
    open_too = Grammars(tiny_tokenizer, 320, close_objects=False)
    for source, value, closed in (
        (plain, {"a": 1, "b": 2}, True),
        (nested, {"a": {"b": 1, "c": 2}}, True),
        (plain | {"additionalProperties": True}, {"a": 1, "b": 2}, False),
        ({"type": "object"}, {"a": 1}, False),
        (parts, {"a": 1, "b": 2}, False),
        (
            listing(x={"$ref": "#/$defs/A"}) | {"$defs": parts["$defs"]},
            {"x": {"a": 1, "b": 2}},
            True,
        ),
        ({"anyOf": [listing(a=INTEGER), listing(b=INTEGER)]}, {"a": 1, "c": 2}, True),
    ):
        assert takes(grammars, tiny_tokenizer, schema(source), value) is not closed, source
        assert takes(open_too, tiny_tokenizer, schema(source), value), source
        assert takes(open_too, tiny_tokenizer, schema(source, strict=True), value) is not closed, (
            source
        )


def test_a_schema_that_cannot_be_checked_either_is_refused(grammars: Grammars) -> None:
    elsewhere = {"type": "array", "uniqueItems": True, "not": {"$ref": "http://localhost:1/schema"}}
    with pytest.raises(RequestError) as refused:
        grammars._compile(schema(elsewhere, param="guided_json"))
    assert refused.value.param == "guided_json"
    slow = {"type": "string", "pattern": "^(?=(a+)+$)b"}
    assert violation(json.dumps(slow), json.dumps("a" * 40)) is not None, "in no time"


def test_the_schema_of_the_client_stays_as_it_is() -> None:
    source = ENFORCED["propertyNames, pattern"][0]
    before = json.dumps(source)
    for_grammar(source, close=True)
    assert json.dumps(source) == before


@pytest.mark.parametrize(
    "source",
    [
        {"propertyNames": INTEGER},
        {"propertyNames": {"type": ["string"], "pattern": []}},
        {"propertyNames": {"enum": 5}},
        {"patternProperties": 5},
        {"anyOf": 5, "allOf": [{}, {}]},
    ],
    ids=json.dumps,
)
async def test_odd_keywords_are_given_up_or_refused(grammars: Grammars, source: Any) -> None:
    try:
        await grammars.unenforced(schema({"type": "object"} | source, param="guided_json"))
    except RequestError as error:
        assert error.param == "guided_json"


ODD = 2**53 + 1  # the first integer that no double holds


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"minimum": ODD}, [ODD + 1], [ODD - 1]),
        ({"maximum": ODD}, [ODD - 1, 5], [ODD + 1]),
        ({"minimum": -ODD}, [1 - ODD], [-ODD - 1]),
        ({"exclusiveMinimum": ODD}, [ODD + 3], [ODD - 1, ODD]),
        ({"exclusiveMaximum": ODD}, [ODD - 2], [ODD, ODD + 1]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, -5, 2**63 - 1024], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1]),
    ],
    ids=json.dumps,
)
async def test_bounds_of_integers_are_narrowed_to_what_the_grammar_holds(
    grammars: Grammars,
    tiny_tokenizer: Tokenizer,
    bounds: dict[str, int],
    good: list[int],
    bad: list[int],
) -> None:
    """A rounded bound let an integer through that the check refused at each try; int64's were
    refused as they are."""
    structure = schema(INTEGER | bounds)
    assert await grammars.unenforced(structure) == ()
    for value in good:
        assert takes(grammars, tiny_tokenizer, structure, value)
        assert violation(structure.source, json.dumps(value)) is None
    assert not any(takes(grammars, tiny_tokenizer, structure, value) for value in bad)


@pytest.mark.parametrize(
    "source", [{"const": ODD}, {"enum": [1, ODD]}, {"const": {"a": [ODD]}}, {"enum": [[2**70]]}]
)
async def test_a_value_that_the_grammar_would_round_is_refused(
    grammars: Grammars, source: Any
) -> None:
    """`{"const": 9007199254740993}` made 9007199254740992, so that each try failed and the model
    was blamed."""
    with pytest.raises(
        RequestError, match=r"the grammar would round 9007199254740993|integers of 64 bits"
    ):
        await grammars.unenforced(schema(source, param="guided_json"))


def test_an_answer_that_cannot_be_checked_is_no_crash() -> None:
    assert "cannot be checked" in str(violation('{"maxLength": 5, "pattern": "^a"}', '"\\ud83d"'))

"""Schemas of public type systems and hand-made overlaps, over HTTP at temperature 1: is every
finished answer valid?

    .venv/bin/python -m tests.soak.structured --schemas 500 --seeds 10

The type systems are the models of the packages openai, anthropic and mcp (pydantic's schemas of
them), this project's configuration and the metaschemas of JSON Schema. Texts and lists get a bound,
so that the shipped model's answers end. The judge is the package jsonschema, not the validator that
the server uses. Prints a table; exit code 1 when an answer with finish_reason "stop" is invalid and
does not say so, or a stream ends otherwise than its answer.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
from jsonschema_specifications import REGISTRY
from pydantic import BaseModel

from mlx_parallm.config.load import Config
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.system.log import configure_logging
from tests.soak.fuzz_openapi import tiny_server

PACKAGES = ("mcp.types", "openai.types", "anthropic.types")
LARGEST = 8 << 10  # characters of a schema
LONGEST_TEXT, LONGEST_LIST = 6, 2
MAX_TOKENS = 96
REFUSED = "refused"
_INTEGER: Any = {"type": "integer", "minimum": 0, "maximum": 20}
_TEXT: Any = {"type": "string", "maxLength": 3}
_AB = {"type": "object", "properties": {"a": _INTEGER, "b": _INTEGER}}


def _closed(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, **keywords}


OVERLAPS: Mapping[str, Any] = {
    "patternProperties beside properties": _closed(
        properties={"score": _INTEGER}, patternProperties={"^score$": {"minimum": 3}}
    ),
    "a pattern of two listed names": _closed(
        properties={"a": _INTEGER, "b": _INTEGER}, patternProperties={"^(a|b)$": {"maximum": 9}}
    ),
    "a pattern with a class": _closed(
        properties={"a": _INTEGER, "b": _TEXT}, patternProperties={"^[ab]$": {}}
    ),
    "a pattern that continues": _closed(
        properties={"s": _INTEGER}, patternProperties={"^s": {"minimum": 5}}
    ),
    "a pattern in allOf": {
        "type": "object",
        "allOf": [
            {"properties": {"k": _INTEGER}},
            _closed(patternProperties={"^k$": {"minimum": 3}}),
        ],
    },
    "patterns that overlap": _closed(patternProperties={"^a": _INTEGER, "b$": {"minimum": 3}}),
    "a pattern and a schema of others": {
        "type": "object",
        "patternProperties": {"^n": _INTEGER},
        "additionalProperties": {"type": "boolean"},
    },
    "required, not listed": {"type": "object", "properties": {"a": _INTEGER}, "required": ["b"]},
    "minProperties": {
        "type": "object",
        "additionalProperties": _INTEGER,
        "minProperties": 2,
        "maxProperties": 3,
    },
    "propertyNames": {
        "type": "object",
        "propertyNames": {"maxLength": 2},
        "additionalProperties": _INTEGER,
    },
    "oneOf of numbers": {"oneOf": [_INTEGER, {"type": "number", "minimum": 5, "maximum": 9}]},
    "oneOf of objects": {"oneOf": [_AB | {"required": ["a"]}, _AB | {"required": ["b"]}]},
    "oneOf with a tag": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"k": {"const": name}, "v": _INTEGER},
                "required": ["k"],
            }
            for name in "xy"
        ]
    },
    "anyOf beside type": {
        "type": "integer",
        "anyOf": [{"minimum": 5, "maximum": 9}, {"multipleOf": 100}],
    },
    "allOf of bounds": {
        "allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}, {"multipleOf": 2}]
    },
    "not": _TEXT | {"not": {"enum": ["a", ""]}},
    "not required": _AB | {"not": {"required": ["a", "b"]}},
    "if, then, else": _AB
    | {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 0}},
    "dependentSchemas": _AB | {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": _AB | {"dependencies": {"a": ["b"]}},
    "uniqueItems": {
        "type": "array",
        "items": {"enum": ["a", "b"]},
        "uniqueItems": True,
        "maxItems": 2,
    },
    "contains": {"type": "array", "items": _INTEGER, "contains": {"maximum": 9}, "maxItems": 2},
    "prefixItems": {"type": "array", "prefixItems": [_INTEGER, _TEXT], "items": False},
    "items as a list": {"type": "array", "items": [_INTEGER, _TEXT], "additionalItems": False},
    "unevaluatedProperties": {
        "allOf": [_AB],
        "unevaluatedProperties": False,
        "properties": {"c": _TEXT},
    },
    "unevaluatedItems": {"type": "array", "prefixItems": [_INTEGER], "unevaluatedItems": False},
    "enum of numbers": {"enum": [1, 1.0, 2, "1", None, True]},
    "const with escapes": {"const": 'Köln "\\ \u2028 😀'},
    "const of many digits": {"const": 123456789012345678901234567890},
    "minLength of pairs": {
        "type": "string",
        "pattern": "^[😀-😂]+$",
        "minLength": 2,
        "maxLength": 2,
    },
    "look-ahead": {"type": "string", "pattern": "^(?!a)[a-c]{2}$"},
    "an edge of a word": {"type": "string", "pattern": "^\\bab\\b$"},
    "a space": {"type": "string", "pattern": "^\\s\\S$"},
    "not anchored": {"type": "string", "pattern": "ab", "maxLength": 4},
    "multipleOf": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
    "any number": {"type": "number"},
    "exclusiveMinimum of Draft 4": {
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 9,
    },
    "small bounds": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-9},
    "anything": {},
    "a tree": {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "type": "object",
                "properties": {
                    "v": _INTEGER,
                    "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
            }
        },
    },
    "a $ref beside maximum": {"$ref": "#/$defs/x", "maximum": 5, "$defs": {"x": _INTEGER}},
    "$anchor": {"$ref": "#x", "$defs": {"x": {"$anchor": "x"} | _INTEGER}},
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in (
            "date-time",
            "time",
            "date",
            "uuid",
            "ipv4",
            "uri-reference",
            "duration",
            "email",
            "hostname",
        )
    },
}


def schemas(count: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """The overlaps, and of the type systems as many as are left, drawn by `seed`."""
    yield from OVERLAPS.items()
    rows = {
        f"{c.__module__}.{c.__qualname__}": c
        for name in PACKAGES
        for c in _models(importlib.import_module(name))
    }
    rows |= {f"{c.__module__}.{c.__qualname__}": c for c in _parts_of(Config)}
    metaschemas = [(f"metaschema {uri}", REGISTRY.contents(uri)) for uri in REGISTRY]
    drawn = [*rows.items(), *metaschemas]
    random.Random(seed).shuffle(drawn)
    left = count - len(OVERLAPS)
    for name, source in drawn:
        if left <= 0:
            return
        schema = source.model_json_schema() if inspect.isclass(source) else source
        if len(json.dumps(schema)) <= LARGEST:
            left -= 1
            yield name, _bounded(schema)


def _models(module: Any) -> Iterator[type[BaseModel]]:
    names = [
        each.name
        for each in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}.")
    ]
    for each in (module, *map(importlib.import_module, names)):
        yield from (
            c for c in vars(each).values() if inspect.isclass(c) and issubclass(c, BaseModel)
        )


def _parts_of(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield section
    for info in section.model_fields.values():
        if inspect.isclass(info.annotation) and issubclass(info.annotation, BaseModel):
            yield from _parts_of(info.annotation)


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {
        key: _bounded(value)
        for key, value in schema.items()
        if key not in ("description", "default")
    }
    kind = schema.get("type")
    if (
        kind == "string"
        and not {"maxLength", "pattern", "format", "enum", "const", "minLength"} & schema.keys()
    ):
        bounded["maxLength"] = LONGEST_TEXT
    if kind == "array" and "maxItems" not in schema and "minItems" not in schema:
        bounded["maxItems"] = LONGEST_LIST
    return bounded


def is_valid(schema: Any, text: str) -> bool:
    """The judgement of another validator than the server's."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for judge in (draft, jsonschema.Draft7Validator, jsonschema.Draft4Validator):
        try:
            judge.check_schema(schema)
        except jsonschema.SchemaError:
            continue
        return bool(judge(schema).is_valid(value))
    raise ValueError("no draft has this schema")


def judge(http: httpx.Client, name: str, schema: Any, seeds: int) -> Counter[str]:
    """Ask for `seeds` answers, one of them a stream; the kinds of what came, "WRONG: …" of what
    must not come."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": form,
        "max_tokens": MAX_TOKENS,
    }

    def one(seed: int) -> str:
        return _kind(
            http.post("/v1/chat/completions", json=body | {"seed": seed, "stream": seed == 0}),
            name,
            schema,
        )

    first = one(0)
    if first == REFUSED:
        return Counter({REFUSED: seeds})
    with ThreadPoolExecutor(max(1, seeds - 1)) as pool:
        return Counter([first, *pool.map(one, range(1, seeds))])


def _kind(answer: httpx.Response, name: str, schema: Any) -> str:
    header = "" if answer.headers.get("X-Unenforced-Schema-Keywords") is None else ", header"
    if answer.status_code == 400:
        error = answer.json()["error"]
        return f"an error: {error['code']}" if error["code"] != "invalid_grammar" else REFUSED
    if answer.status_code != 200:
        return f"WRONG: {name}: {answer.status_code} {answer.text[:100]}"
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    text, reason = _streamed(answer) if streamed else _whole(answer.json())
    if reason == "stop" and not is_valid(schema, text):
        return f"WRONG: {name}: stop and {text[:80]!r}"
    return f"{reason}{header}"


def _whole(answer: Any) -> tuple[str, str]:
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def _streamed(answer: httpx.Response) -> tuple[str, str]:
    lines = [
        line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")
    ]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    if "error" in chunks[-1]:
        return "", f"an error at a stream's end: {chunks[-1]['error']['code']}"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1][
        "finish_reason"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    configure_logging(level="error")
    started, kinds, count = time.monotonic(), Counter[str](), 0
    with (
        mlx_thread(),
        tiny_server("server.max_model_len=512", "server.request_timeout_s=60") as serving,
        httpx.Client(base_url=serving.url, timeout=120) as http,
    ):
        for name, schema in schemas(arguments.schemas):
            kinds += judge(http, name, schema, arguments.seeds)
            count += 1
    print(f"{count} schemas, {arguments.seeds} seeds, {time.monotonic() - started:.0f} s")
    for kind, number in kinds.most_common():
        print(f"{number:7} {kind}")
    return int(any(kind.startswith("WRONG") for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())

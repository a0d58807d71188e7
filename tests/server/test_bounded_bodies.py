"""No body of any application can make the server build millions of errors, or keep a text without
an end.

pydantic makes an error for every wrong item of a list, 300 bytes and a microsecond each: a body of
16 MB with wrong items took 60 s and 6 GB. A list is therefore `ListOf`, which is given up at its
first fault, or has few items; an object whose keys or values are checked is `ObjectOf`. A text that
the server keeps has a length.

Looked at: every pydantic model below the bodies of all routes of `train`, `serve`, the prompt
policy, traces, the dashboard, Atropos and the hybrid chat, those that a route reads by itself, and
the tools of the MCP server.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

import mlx_parallm
from mlx_parallm.faces.atropos.routes import EnvironmentId, EnvironmentRegistration
from mlx_parallm.faces.atropos.wire import ScoredData
from mlx_parallm.faces.tinker.bodies import SampleBody, TinkerBody, not_too_much
from mlx_parallm.server.protocol.fields import Body, give_up_early, short
from mlx_parallm.systems.orchestrator.routes import HybridRequest

FEW = 1024  # items of a list that may all be wrong
USED_AND_FORGOTTEN = (  # texts of one request, which the context's length or the body's bounds
    *(f"mlx_parallm.server.{name}" for name in ("protocol", "responses", "messages")),
    *(
        f"mlx_parallm.server.api.{name}"
        for name in ("generate", "inference", "embeddings", "score")
    ),
    "mlx_parallm.systems.orchestrator.routes",
    "mlx_parallm.faces.atropos.wire",
)


def subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        yield each
        yield from subclasses(each)


def bodies() -> list[type[BaseModel]]:
    for package in ("server", "faces", "systems", "runs"):
        for module in pkgutil.walk_packages(
            [f"{mlx_parallm.__path__[0]}/{package}"], f"mlx_parallm.{package}."
        ):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found = {
        *subclasses(Body),
        *subclasses(TinkerBody),
        ScoredData,
        EnvironmentRegistration,
        EnvironmentId,
    }
    return sorted(
        {*found, HybridRequest}, key=lambda body: f"{body.__module__}.{body.__qualname__}"
    )


def is_checked(schema: dict[str, Any] | None) -> bool:
    """Whether an item of that schema can be wrong; a JSON object's keys are texts anyway."""
    return schema is not None and schema["type"] != "any"


def fault(schema: dict[str, Any], texts: bool) -> str | None:
    """What has no bound in this schema itself."""
    kind = schema.get("type")
    few = schema.get("max_length") is not None and schema["max_length"] <= FEW
    if kind in ("list", "set", "tuple"):
        return (
            "list"
            if is_checked(schema.get("items_schema")) and not (schema.get("fail_fast") or few)
            else None
        )
    if kind == "dict":
        checked = is_checked(schema.get("values_schema")) or schema["keys_schema"]["type"] != "str"
        return "object" if checked else None
    bounded = schema.get("max_length") is not None or schema.get("pattern") is not None
    return "text" if kind == "str" and texts and not bounded else None


def inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What lies in a schema, with the names of fields."""
    function = (
        schema["function"]["function"] if str(schema.get("type")).startswith("function-") else None
    )
    if function is give_up_early:
        yield "", schema["schema"].get("values_schema")
    elif function not in (short, not_too_much):
        for key, value in schema.items():
            if key == "fields" and isinstance(value, dict):
                yield from ((f".{name}", field) for name, field in value.items())
            elif key == "keys_schema" and value.get("type") == "str":
                continue
            elif key not in ("metadata", "function", "serialization", "cls", "config", "default"):
                yield "", value


def unbounded(schema: Any, texts: bool, where: str = "") -> Iterator[str]:
    """The places of a core schema that have no bound."""
    if isinstance(schema, list | tuple):
        for item in schema:
            yield from unbounded(item, texts, where)
    elif isinstance(schema, dict):
        where = f"{where}.{schema['cls'].__name__}" if schema.get("type") == "model" else where
        if (found := fault(schema, texts)) is not None:
            yield f"{where}: {found}"
        for name, inner in inner_schemas(schema):
            yield from unbounded(inner, texts, where + name)


@pytest.mark.parametrize("body", bodies(), ids=lambda body: body.__name__)
def test_a_body_has_bounds(body: type[BaseModel]) -> None:
    texts = not body.__module__.startswith(USED_AND_FORGOTTEN)
    assert list(unbounded(TypeAdapter(body).core_schema, texts)) == []


def test_the_walk_finds_what_has_no_bound() -> None:
    class Inner(BaseModel):
        numbers: list[int]
        name: str

    class Outer(Body):
        inner: dict[str, Inner] | None = None
        anything: list[Any] | None = None

    found = {
        place.rpartition(".")[2] for place in unbounded(TypeAdapter(Outer).core_schema, texts=True)
    }
    assert found == {"inner: object", "numbers: list", "name: text"}
    assert not list(unbounded(TypeAdapter(SampleBody).core_schema, texts=False))

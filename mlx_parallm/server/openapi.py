"""The OpenAPI document: what every route may answer besides 200, in one place.

FastAPI declares a 422 for each route with parameters, in a shape that this server never sends. `install_openapi` puts
the truth there: which statuses an operation can have follows from what it takes (a body, a model's name) and what it
does (generate). A route adds its own, or another shape, by `responses=` in `add_api_route`.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from mlx_parallm.server.errors import TIMED_OUT
from mlx_parallm.server.sse import EVENT_STREAM

MEANINGS = {
    400: "The request is wrong; `param` names the field",
    401: "The API key is missing or wrong",
    403: "Without a key: a foreign Host or Origin",
    404: "No such model, adapter or object",
    413: "The body is too large",
    422: "Not what the Atropos API wants, or not to be trained on; `detail` says why",
    429: "The queue is full: try again after Retry-After",
    500: "The server failed on this request; others go on",
    503: "Loading, draining, or the engine is dead: try again after Retry-After",
    TIMED_OUT: "Not ready within server.request_timeout_s",
}
EVERYWHERE = (401, 403, 500, 503, TIMED_OUT)
OPEN = ("/health",)  # neither key nor gate nor OpenAI's error body
GENERATING = ("openai", "tokens")  # tags
ATROPOS = "/atropos"  # what these refuse themselves has run-api's shape; what the gate or the key check does, OpenAI's
ATROPOS_REFUSALS = (400, 404, 413, 422, 503)
_DETAIL = {"type": "object", "required": ["detail"], "properties": {"detail": {}}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}


def install_openapi(app: FastAPI) -> None:
    """Replaces `app.openapi`; made at its first call, when all routes are there."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            schemas["Error"] = _ERROR
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _declare(path, operation, schemas)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _declare(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    if path in OPEN:
        responses["503"] = {"description": "Not able to answer; `reason` says why"}
        return
    statuses = {*EVERYWHERE}
    body = operation.get("requestBody")
    if body or operation.get("parameters"):
        statuses |= {400, 404}
    if body:
        statuses.add(413)
    if body and set(operation.get("tags", [])) & set(GENERATING):
        statuses.add(429)
    of_atropos = path.startswith(ATROPOS)
    if body and of_atropos:
        statuses.add(422)
    for status in sorted(statuses - {int(status) for status in responses}):
        schema: dict[str, Any] = {"$ref": "#/components/schemas/Error"}
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        if of_atropos and status in ATROPOS_REFUSALS:
            content = {"application/json": {"schema": {"anyOf": [schema, _DETAIL]}}, "text/plain": {}}
        responses[str(status)] = {"description": MEANINGS[status], "content": content}
    if "stream" in _body_properties(body, schemas):
        responses["200"].setdefault("content", {})[EVENT_STREAM] = {}


def _body_properties(body: dict[str, Any] | None, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = (body or {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    properties: dict[str, Any] = schemas.get(name, schema).get("properties", {})
    return properties

"""The HTTP application: `create_app(deps, routers)` puts the layers around the routes. Nothing is
global: each call makes a new app with its own metrics.

    uvicorn → (CORS) → request context → auth → body limit → gate → api/*.py → generation.py →
    EngineClient

ROUTERS lists the server's own route families. A part outside of the server brings an `AddedRouter`
of its own; key, limits, metrics and the OpenAPI document apply to it too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from prometheus_client.core import Metric

import mlx_parallm
from mlx_parallm.server.api import (
    adapters,
    chat,
    completions,
    control,
    embeddings,
    generate,
    inference,
    rewards,
    score,
    status,
    tokenize,
    training,
)
from mlx_parallm.server.auth import AuthMiddleware, PublicPaths, UserKeys
from mlx_parallm.server.context import ServerContext, ServerDeps
from mlx_parallm.server.errors import (
    ERROR_CONTENT,
    ERROR_SCHEMA,
    HEALTH,
    TIMED_OUT,
    install_error_handlers,
)
from mlx_parallm.server.generation import AnswerObserver
from mlx_parallm.server.messages import routes as messages
from mlx_parallm.server.messages.errors import AnthropicErrors
from mlx_parallm.server.middleware import (
    BodyLimitMiddleware,
    GateMiddleware,
    RequestContextMiddleware,
)
from mlx_parallm.server.responses import routes as responses
from mlx_parallm.server.schema_check import HEADER as UNENFORCED_HEADER
from mlx_parallm.server.sse import EVENT_STREAM

ROUTERS = (
    status.router,
    completions.router,
    chat.router,
    responses.router,
    messages.router,
    embeddings.router,
    tokenize.router,
    generate.router,
    inference.router,
    control.router,
    adapters.router,
    rewards.router,
    score.router,
    training.router,
)
CHATS = (chat.router, responses.router, messages.router)
"""Those that answer chats, in any API's words."""
GENERATING = {"openai", "tokens"}  # tags of routes that take a place in the queue
MEANINGS = {
    400: "The request is wrong; `param` names the field",
    401: "The API key is missing or wrong",
    403: "Without a key: a foreign Host or Origin",
    404: "No such model, adapter or object",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "The queue is full: try again after Retry-After",
    500: "The server failed on this request; others continue",
    503: "Loading, draining, or the engine is dead: try again after Retry-After",
    TIMED_OUT: "Not ready within server.request_timeout_s",
}
EVERYWHERE = {401, 403, 500, 503, TIMED_OUT}


@dataclass(frozen=True)
class AddedRouter:
    """A router from outside the server, and its demands on the layers around it.

    Attributes:
        basic_auth: below the router's prefix the key may come as the password of Basic
            authentication, for clients that can only put it into the URL
            (`http://name:KEY@host/prefix`).
        while_loading: path → the body of a 200 while the model loads, if a client would take the
            503 badly.
        public: paths whose GET holds no data, such as a page's own files: they need neither key nor
            model. One that ends with a slash means everything below it.
        page: the path that a person opens in a browser; the run prints it.
        close: closes the routes' objects, once no request runs.
        observe: follows the answers of the server's own chats (`generation.AnswerObserver`), asked
            for each request; None = it does not follow this one. Raises RequestError.
        metrics: further lines of /metrics, read at each scrape.
        user_keys: keys that let in beside the server's, to `user_paths` alone.
    """

    router: APIRouter
    basic_auth: bool = False
    while_loading: Mapping[str, Any] = field(default_factory=dict)
    public: tuple[str, ...] = ()
    page: str | None = None
    close: Callable[[], None] | None = None
    observe: Callable[[Request], AnswerObserver | None] | None = None
    metrics: Callable[[], Iterable[Metric]] | None = None
    user_keys: Sequence[str] = ()
    user_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.basic_auth and not self.router.prefix:
            raise ValueError(
                "AddedRouter(basic_auth=True) needs a router with a"
                " prefix: Basic would open every route"
            )


def create_app(
    deps: ServerDeps,
    routers: Sequence[AddedRouter] = (),
    *,
    base: Sequence[APIRouter] = ROUTERS,
    title: str = "mlx_parallm",
    origin_regex: str | None = None,
) -> FastAPI:
    """An app that can be served at once: until `deps.state.ready(…)` everything answers 503.

    Args:
        base: the routes of a model's server; a service without a model has others, and
            `needs_model=False`.
        origin_regex: web pages of these origins may read answers too, beside `server.cors_origins`.
    """
    app = FastAPI(title=title, version=mlx_parallm.__version__)
    app.state.context = ServerContext(deps)
    follows = _observing(routers)
    for router in (*base, *(added.router for added in routers)):
        app.include_router(router, dependencies=follows if router in CHATS else None)
    for added in routers:
        if added.metrics is not None:
            deps.state.metrics.watch(added.metrics)
    install_error_handlers(app)
    _install_openapi(app)
    # add_middleware puts each layer outside the ones before it.
    while_loading = {path: body for added in routers for path, body in added.while_loading.items()}
    public = PublicPaths(path for added in routers for path in added.public)
    app.add_middleware(GateMiddleware, state=deps.state, while_loading=while_loading, public=public)
    app.add_middleware(BodyLimitMiddleware, max_bytes=deps.max_body_bytes)
    origins = deps.config.cors_origins
    basic_prefixes = [added.router.prefix for added in routers if added.basic_auth]
    app.add_middleware(
        AuthMiddleware,
        api_key=deps.api_key,
        origins=origins,
        hosts=deps.config.allowed_hosts,
        basic_prefixes=basic_prefixes,
        public=public,
        users=[UserKeys(added.user_keys, added.user_paths) for added in routers],
    )
    app.add_middleware(
        RequestContextMiddleware,
        metrics=deps.state.metrics,
        timeout_s=deps.config.request_timeout_s,
    )
    app.add_middleware(AnthropicErrors)
    # outside of the key: a browser's preflight request cannot carry one
    if origins or origin_regex:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_origin_regex=origin_regex,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-ID", "Retry-After", UNENFORCED_HEADER),
        )
    return app


def _observing(routers: Sequence[AddedRouter]) -> list[Any]:
    """Return the dependency that lets a part follow chats. Raises ValueError: two parts want to."""
    observers = [added.observe for added in routers if added.observe is not None]
    if len(observers) > 1:
        raise ValueError("two parts would follow the server's chats: one answer has one observer")
    if not observers:
        return []
    [observe] = observers

    async def follow(request: Request) -> None:
        request.state.observer = observe(request)

    return [Depends(follow)]


def _install_openapi(app: FastAPI) -> None:
    """Declare each operation's answers besides 200.

    FastAPI declares a 422 in a shape that this server never sends. Which statuses an operation can
    have follows from its input (a body, parameters) and its tag; a route adds its own, or another
    shape, by `responses=`. The document is made at its first request, when all routes are there.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            schemas["Error"] = ERROR_SCHEMA
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
    if path == HEALTH:  # neither key nor gate nor OpenAI's error body
        return
    statuses = {*EVERYWHERE}
    body = operation.get("requestBody")
    if body or operation.get("parameters"):
        statuses |= {400, 404}
    if body:
        statuses |= {408, 413}
    if body and GENERATING.intersection(operation.get("tags", [])):
        statuses.add(429)
    for status_code in sorted(statuses):
        responses.setdefault(
            str(status_code), {"description": MEANINGS[status_code], "content": ERROR_CONTENT}
        )
    if "stream" in _body_properties(body, schemas):
        responses["200"].setdefault("content", {})[EVENT_STREAM] = {}


def _body_properties(body: dict[str, Any] | None, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = (body or {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    properties: dict[str, Any] = schemas.get(name, schema).get("properties", {})
    return properties

"""The HTTP application: `create_app(deps)` puts the layers around the routes. Nothing here is global; each call makes a
new app with its own metrics.

    uvicorn → (CORS) → request context → auth → body limit → gate → routes_*.py → generation.py → EngineClient
"""

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import mlx_parallm
from mlx_parallm.server.api.adapters import adapters_router
from mlx_parallm.server.api.chat import chat_router
from mlx_parallm.server.api.completions import completions_router
from mlx_parallm.server.api.control import control_router
from mlx_parallm.server.api.generate import generate_router
from mlx_parallm.server.api.inference import inference_router
from mlx_parallm.server.api.rewards import rewards_router
from mlx_parallm.server.api.status import status_router
from mlx_parallm.server.api.tokenize import tokenize_router
from mlx_parallm.server.api.training import training_router
from mlx_parallm.server.auth import AuthMiddleware
from mlx_parallm.server.context import ServerContext, ServerDeps
from mlx_parallm.server.errors import install_error_handlers
from mlx_parallm.server.middleware import BodyLimitMiddleware, GateMiddleware, RequestContextMiddleware
from mlx_parallm.server.openapi import install_openapi


def create_app(deps: ServerDeps) -> FastAPI:
    """An app that can be served at once: until `deps.state.ready(…)` everything answers 503."""
    app = FastAPI(title="mlx_parallm", version=mlx_parallm.__version__)
    app.state.context = ServerContext(deps)
    openai = (completions_router(), chat_router())
    tokens = (tokenize_router(), generate_router(), inference_router())
    control = (control_router(), adapters_router(), rewards_router(), training_router())
    for router in (status_router(), *openai, *tokens, *control, *deps.extra_routers):
        app.include_router(router)
    install_error_handlers(app)
    install_openapi(app)
    # add_middleware puts each layer outside the ones before it.
    app.add_middleware(GateMiddleware, state=deps.state)
    app.add_middleware(BodyLimitMiddleware, max_bytes=deps.max_body_bytes)
    app.add_middleware(AuthMiddleware, api_key=deps.api_key, origins=deps.cors_origins)
    app.add_middleware(RequestContextMiddleware, metrics=deps.state.metrics, timeout_s=deps.request_timeout_s)
    if deps.cors_origins:  # outside of the key: a browser's preflight request cannot carry one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=deps.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-ID",),
        )
    return app

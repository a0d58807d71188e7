"""The HTTP application: `create_app(deps)` puts the layers around the routes. Nothing here is global; each call makes a
new app with its own metrics.

    uvicorn → request context → auth → body limit → loading gate → routes_*.py → generation.py → EngineClient
"""

from fastapi import FastAPI

import mlx_parallm
from mlx_parallm.server.auth import AuthMiddleware
from mlx_parallm.server.context import ServerContext, ServerDeps
from mlx_parallm.server.errors import install_error_handlers
from mlx_parallm.server.middleware import BodyLimitMiddleware, LoadingGateMiddleware, RequestContextMiddleware
from mlx_parallm.server.routes_chat import chat_router
from mlx_parallm.server.routes_completions import completions_router
from mlx_parallm.server.routes_generate import generate_router
from mlx_parallm.server.routes_status import status_router
from mlx_parallm.server.routes_tokenize import tokenize_router


def create_app(deps: ServerDeps) -> FastAPI:
    """An app that can be served at once: until `deps.state.ready(…)` everything answers 503."""
    app = FastAPI(title="mlx_parallm", version=mlx_parallm.__version__)
    app.state.context = ServerContext(deps)
    for router in (status_router(), completions_router(), chat_router(), tokenize_router(), generate_router()):
        app.include_router(router)
    for router in deps.extra_routers:
        app.include_router(router)
    install_error_handlers(app)
    # add_middleware puts each layer outside the ones before it.
    app.add_middleware(LoadingGateMiddleware, state=deps.state)
    app.add_middleware(BodyLimitMiddleware, max_bytes=deps.max_body_bytes)
    app.add_middleware(AuthMiddleware, api_key=deps.api_key)
    app.add_middleware(RequestContextMiddleware, metrics=deps.state.metrics)
    return app

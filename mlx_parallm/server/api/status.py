"""What can be asked about the server itself: /health, /v1/models, /metrics."""

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.errors import RETRY_AFTER_SECONDS
from mlx_parallm.types import EngineStats, ServedModel


def status_router() -> APIRouter:
    router = APIRouter(tags=["status"])
    router.add_api_route("/health", health, methods=["GET"], response_class=JSONResponse)
    router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
    router.add_api_route("/v1/models", list_models, methods=["GET"], response_class=JSONResponse)
    router.add_api_route("/v1/models/{name:path}", show_model, methods=["GET"], response_class=JSONResponse)
    router.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response)
    return router


async def health(context: Context) -> Response:
    """200 only when a request sent now would be worked on: loaded, engine thread alive, and stepping."""
    unavailable = context.deps.state.unavailable
    if unavailable is not None:
        return _health_response(*unavailable)
    stats = context.engine.stats()
    problem = engine_problem(stats, time.monotonic(), context.deps.stall_seconds)
    if problem is not None:
        return _health_response("unhealthy", problem)
    return JSONResponse(
        {
            "status": "ok",
            "policy_version": stats.policy_version,
            "running": stats.running,
            "waiting": stats.waiting,
            "steps": stats.steps,
            "paused": context.clients_paused,
        }
    )


def engine_problem(stats: EngineStats, now: float, stall_seconds: float) -> str | None:
    """Why the engine would not work on a request, or None. `now`: time.monotonic()."""
    if not stats.alive:
        return f"the engine thread is dead: {stats.error or 'no reason recorded'}"
    if not stats.ready:
        return "the engine is not ready"
    silent = now - stats.last_step_time
    if (stats.running or stats.waiting) and silent > stall_seconds:
        return f"the engine has work but made no step for {silent:.0f} s"
    return None


def _health_response(status: str, reason: str) -> Response:
    return JSONResponse({"status": status, "reason": reason}, 503, {"Retry-After": str(RETRY_AFTER_SECONDS)})


async def list_models(context: Context) -> Response:
    return JSONResponse({"object": "list", "data": [_entry(context, model) for model in context.engine.models()]})


async def show_model(name: str, context: Context) -> Response:
    return JSONResponse(_entry(context, context.engine.resolve_model(name)))


def _entry(context: ServerContext, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": context.created,
        "owned_by": "mlx_parallm",
        "root": model.root,
        "parent": model.parent,
        "max_model_len": context.engine.max_model_len,
        "policy_version": model.policy_version,
        "logprobs_mode": context.deps.logprobs_mode,
    }


async def metrics(context: Context) -> Response:
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

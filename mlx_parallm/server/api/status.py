"""The server's own state: /health, /v1/models, /metrics."""

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.errors import HEALTH, RETRY_AFTER_SECONDS
from mlx_parallm.types import EngineStats, ServedModel

STALL_SECONDS = 60.0  # /health is 503 when there is work and no engine step for so long
router = APIRouter(tags=["status"], default_response_class=JSONResponse)


@router.head(HEALTH, include_in_schema=False)
@router.get(HEALTH)
async def health(context: Context) -> Response:
    """200 only when a request sent now would be worked on: loaded, engine thread alive, and stepping."""
    unavailable = context.deps.state.unavailable
    if unavailable is not None:
        return _health_response(*unavailable)
    stats = context.engine.stats()
    problem = _engine_problem(stats)
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


def _engine_problem(stats: EngineStats) -> str | None:
    """Why the engine would not work on a request, or None."""
    if not stats.alive:
        return f"the engine thread is dead: {stats.error or 'no reason recorded'}"
    if not stats.ready:
        return "the engine is not ready"
    silent = time.monotonic() - stats.last_step_time
    if (stats.running or stats.waiting) and silent > STALL_SECONDS:
        return f"the engine has work but made no step for {silent:.0f} s"
    return None


def _health_response(status: str, reason: str) -> Response:
    return JSONResponse({"status": status, "reason": reason}, 503, {"Retry-After": str(RETRY_AFTER_SECONDS)})


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models")
async def list_models(context: Context) -> Response:
    models = context.engine.models()
    further = [replace(models[0], id=name) for name in context.deps.config.served_model_names]
    return JSONResponse({"object": "list", "data": [_entry(context, model) for model in (*models, *further)]})


@router.get("/v1/models/{name:path}")
async def show_model(name: str, context: Context) -> Response:
    further = name in context.deps.config.served_model_names
    model = context.engine.resolve_model(name)
    return JSONResponse(_entry(context, replace(model, id=name) if further else model))


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
        "logprobs_mode": context.deps.config.logprobs_mode,
    }


@router.get("/metrics", response_class=Response)
async def metrics(context: Context) -> Response:
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

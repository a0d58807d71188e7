"""The server's own state: /health, /v1/models, /metrics."""

import asyncio
import time
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from typing_extensions import TypedDict

from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.errors import HEALTH, RETRY_AFTER_SECONDS
from mlx_parallm.types import EngineStats, ServedModel

STALL_SECONDS = 60.0  # /health is 503 when there is work and no engine step for so long
router = APIRouter(tags=["status"], default_response_class=JSONResponse)


class Healthy(TypedDict):
    status: Literal["ok"]
    policy_version: int
    running: int
    waiting: int
    steps: int
    paused: bool


class Unavailable(TypedDict):
    status: str
    reason: str


class ModelEntry(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    policy_version: int | None
    logprobs_mode: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]


_HEALTH_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": Healthy},
    503: {"model": Unavailable, "description": "Not able to answer; `reason` says why"},
}


@router.head(HEALTH, include_in_schema=False)
@router.get(HEALTH, responses=_HEALTH_ANSWERS)
async def health(context: Context) -> Response:
    """200 only when a request sent now would be worked on: loaded, engine thread alive, and
    stepping."""
    unavailable = context.deps.state.unavailable
    if unavailable is not None:
        return _health_response(*unavailable)
    stats = context.engine.stats()
    problem = _engine_problem(stats)
    if problem is not None:
        return _health_response("unhealthy", problem)
    healthy: Healthy = {
        "status": "ok",
        "policy_version": stats.policy_version,
        "running": stats.running,
        "waiting": stats.waiting,
        "steps": stats.steps,
        "paused": context.admission_paused,
    }
    return JSONResponse(healthy)


def _engine_problem(stats: EngineStats) -> str | None:
    """Return why the engine would not work on a request, or None."""
    if not stats.alive:
        return f"the engine thread is dead: {stats.error or 'no reason recorded'}"
    if not stats.ready:
        return "the engine is not ready"
    silent = time.monotonic() - stats.last_step_time
    if (stats.running or stats.waiting) and silent > STALL_SECONDS:
        return f"the engine has work but made no step for {silent:.0f} s"
    return None


def _health_response(status: str, reason: str) -> Response:
    problem: Unavailable = {"status": status, "reason": reason}
    return JSONResponse(problem, 503, {"Retry-After": str(RETRY_AFTER_SECONDS)})


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models", responses={200: {"model": ModelList}})
async def list_models(context: Context) -> Response:
    models = context.engine.models()
    shelved = await asyncio.to_thread(context.engine.shelved_models)
    further = [replace(models[0], id=name) for name in context.deps.config.served_model_names]
    listed: ModelList = {
        "object": "list",
        "data": [_entry(context, model) for model in (*models, *shelved, *further)],
    }
    return JSONResponse(listed)


@router.get("/v1/models/{name:path}", responses={200: {"model": ModelEntry}})
async def show_model(name: str, context: Context) -> Response:
    further = name in context.deps.config.served_model_names
    model = context.engine.resolve_model(name)
    return JSONResponse(_entry(context, replace(model, id=name) if further else model))


def _entry(context: ServerContext, model: ServedModel) -> ModelEntry:
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

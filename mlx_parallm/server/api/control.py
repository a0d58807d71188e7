"""What a trainer outside of this process asks of the server, vLLM's names: /pause, /resume, /is_paused,
/abort_requests, /reset_prefix_cache, /server_info, /get_world_size, /weight_info, /version.

Behind the same key as every other route. A client's pause and the trainer's own drain are two holders of the engine's
admission (`EngineClient.pause_admission`): neither ends the other's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict

import mlx_parallm
from mlx_parallm.engine.client import CLIENTS
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.protocol.fields import Body
from mlx_parallm.server.protocol.strict_json import StrictJSONRoute
from mlx_parallm.server.sse import until_hangup

if TYPE_CHECKING:
    from mlx_parallm.engine.client import EngineClient

_IDLE_WAIT_S = 0.5


class AbortBody(Body):
    model_config = ConfigDict(extra="ignore")
    request_ids: list[str] | None = None


def control_router() -> APIRouter:
    router = APIRouter(route_class=StrictJSONRoute, tags=["control"])
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("POST", "/pause", pause),
        ("POST", "/resume", resume),
        ("POST", "/abort_requests", abort_requests),
        ("POST", "/inference/v1/abort_requests", abort_requests),
        ("POST", "/reset_prefix_cache", reset_prefix_cache),
        ("GET", "/is_paused", is_paused),
        ("GET", "/server_info", server_info),
        ("GET", "/get_world_size", world_size),
        ("GET", "/weight_info", weight_info),
        ("GET", "/version", version),
    ]
    for method, path, endpoint in routes:
        router.add_api_route(path, endpoint, methods=[method], response_class=JSONResponse)
    return router


async def pause(
    request: Request, context: Context, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
) -> Response:
    """Requests are accepted and wait until /resume. What runs is ended with finish_reason "abort", or ends by itself
    ("wait"), or stands still and goes on after /resume ("keep"). Answered once that is so."""
    engine = context.engine
    await asyncio.wrap_future(engine.pause_admission(CLIENTS, freeze=mode == "keep"))
    if mode == "abort":
        _abort(context, None)
    if mode != "keep":
        await until_hangup(request.receive, _idle(engine))
    if clear_cache:
        await _reset_prefix_cache(engine)
    return JSONResponse({"status": "paused"})


async def resume(context: Context) -> Response:
    await asyncio.wrap_future(context.engine.resume_admission(CLIENTS))
    return JSONResponse({"status": "resumed"})


async def is_paused(context: Context) -> Response:
    return JSONResponse({"is_paused": context.clients_paused})


async def abort_requests(context: Context, body: AbortBody | None = None) -> Response:
    """Ends these requests with finish_reason "abort"; without ids, all that came over HTTP."""
    names = body.request_ids if body is not None else None
    return JSONResponse({"status": "aborted", "aborted": _abort(context, names or None)})


async def reset_prefix_cache(context: Context) -> Response:
    await _reset_prefix_cache(context.engine)
    return JSONResponse({"success": True})


async def server_info(context: Context) -> Response:
    engine = context.engine
    return JSONResponse(
        {
            "version": mlx_parallm.__version__,
            "models": [model.id for model in engine.models()],
            "policy_version": engine.stats().policy_version,
            "logprobs_mode": context.deps.logprobs_mode,
            "max_model_len": engine.max_model_len,
            "vocab_size": engine.vocab_size,
            "world_size": 1,
            "is_paused": context.clients_paused,
        }
    )


async def world_size() -> Response:
    return JSONResponse({"world_size": 1})


async def weight_info(context: Context) -> Response:
    return JSONResponse({"weight_version": context.engine.stats().policy_version})


async def version() -> Response:
    return JSONResponse({"version": mlx_parallm.__version__})


def _abort(context: ServerContext, names: list[str] | None) -> int:
    found = context.in_flight.find(names)
    for request_id in found:
        context.engine.abort(request_id)
    return len(found)


async def _idle(engine: "EngineClient") -> None:
    while not await asyncio.to_thread(engine.wait_idle, _IDLE_WAIT_S):
        pass


async def _reset_prefix_cache(engine: "EngineClient") -> None:
    await asyncio.wrap_future(engine.call(lambda owner: owner.reset_prefix_cache()))

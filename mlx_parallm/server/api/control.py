"""Control by a trainer outside of this process, by vLLM's names: /pause, /resume, /is_paused,
/abort_requests, /reset_prefix_cache, /server_info, /get_world_size, /weight_info, /version.

Behind the same key as every other route. A client's pause and the trainer's own drain are two
holders of the engine's
admission (`EngineClient.pause_admission`): neither ends the other's.
"""

import asyncio
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

import mlx_parallm
from mlx_parallm.engine.client import CLIENTS, left_of
from mlx_parallm.server.client_hangup import until_hangup
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.errors import error_response
from mlx_parallm.server.protocol.fields import Body, ListOf
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.system.log import PAUSED, RESUMED, get_logger

if TYPE_CHECKING:
    from mlx_parallm.engine.client import EngineClient
    from mlx_parallm.engine.prefix_disk.disk import Clearing

_IDLE_WAIT_S = 0.5
log = get_logger("server")
router = json_router("control")


class AbortBody(Body):
    model_config = ConfigDict(extra="ignore")
    request_ids: ListOf[Annotated[str, Field(max_length=256)]] | None = None


class PauseStatus(TypedDict):
    status: Literal["paused", "resumed"]


class IsPaused(TypedDict):
    is_paused: bool


class Aborted(TypedDict):
    status: Literal["aborted"]
    aborted: int


class Success(TypedDict):
    success: Literal[True]


class ServerInfo(TypedDict):
    version: str
    models: list[str]
    policy_version: int
    logprobs_mode: str
    max_model_len: int
    vocab_size: int
    world_size: int
    is_paused: bool


class WeightInfo(TypedDict):
    weight_version: int


class Version(TypedDict):
    version: str


@router.post("/pause", responses={200: {"model": PauseStatus}})
async def pause(
    request: Request,
    context: Context,
    mode: Literal["abort", "wait", "keep"] = "abort",
    clear_cache: bool = True,
) -> Response:
    """New requests are accepted and wait until /resume. Running ones end with finish_reason
    "abort" ("abort"), end by themselves ("wait"), or stop until /resume ("keep").
    Answered once that is so."""
    engine = context.engine
    await pause_for_clients(engine, "POST /pause", freeze=mode == "keep")
    if mode == "abort":
        _abort(context, None)
    if mode != "keep":
        await until_hangup(request.receive, _idle(engine))
    if clear_cache:
        await _reset_prefix_cache(engine)
    return JSONResponse({"status": "paused"})


@router.post("/resume", responses={200: {"model": PauseStatus}})
async def resume(context: Context) -> Response:
    await resume_for_clients(context.engine, "POST /resume")
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused", responses={200: {"model": IsPaused}})
async def is_paused(context: Context) -> Response:
    return JSONResponse({"is_paused": context.clients_paused})


@router.post("/inference/v1/abort_requests", responses={200: {"model": Aborted}})
@router.post("/abort_requests", responses={200: {"model": Aborted}})
async def abort_requests(context: Context, body: AbortBody | None = None) -> Response:
    """End these requests with finish_reason "abort"; without ids, all that came over HTTP."""
    names = body.request_ids if body is not None else None
    return JSONResponse({"status": "aborted", "aborted": _abort(context, names or None)})


@router.post("/reset_prefix_cache", responses={200: {"model": Success}})
async def reset_prefix_cache(context: Context) -> Response:
    if left := await left_of(await _reset_prefix_cache(context.engine)):
        words = "no prompt of before is used any more, but prefixes on disk are left"
        return error_response(f"{words}: {left}", 503)
    return JSONResponse({"success": True})


@router.get("/server_info", responses={200: {"model": ServerInfo}})
async def server_info(context: Context) -> Response:
    engine = context.engine
    info: ServerInfo = {
        "version": mlx_parallm.__version__,
        "models": [model.id for model in engine.models()],
        "policy_version": engine.stats().policy_version,
        "logprobs_mode": context.deps.config.logprobs_mode,
        "max_model_len": engine.max_model_len,
        "vocab_size": engine.vocab_size,
        "world_size": 1,
        "is_paused": context.clients_paused,
    }
    return JSONResponse(info)


@router.get("/get_world_size")
async def world_size() -> Response:
    return JSONResponse({"world_size": 1})


@router.get("/weight_info", responses={200: {"model": WeightInfo}})
async def weight_info(context: Context) -> Response:
    return JSONResponse({"weight_version": context.engine.stats().policy_version})


@router.get("/version", responses={200: {"model": Version}})
async def version() -> Response:
    return JSONResponse({"version": mlx_parallm.__version__})


async def pause_for_clients(engine: "EngineClient", by: str, *, freeze: bool) -> None:
    """Pause, and say in the log who did: a training then waits, and `health` names the reason."""
    await asyncio.wrap_future(engine.pause_admission(CLIENTS, freeze=freeze))
    log.info(PAUSED, by=by)


async def resume_for_clients(engine: "EngineClient", by: str) -> None:
    await asyncio.wrap_future(engine.resume_admission(CLIENTS))
    log.info(RESUMED, by=by)


def _abort(context: ServerContext, names: list[str] | None) -> int:
    request_ids = context.running.find(names)
    for request_id in request_ids:
        context.engine.abort(request_id)
    return len(request_ids)


async def _idle(engine: "EngineClient") -> None:
    while not await asyncio.to_thread(engine.wait_idle, _IDLE_WAIT_S):
        pass


async def _reset_prefix_cache(engine: "EngineClient") -> "Clearing":
    return await asyncio.wrap_future(engine.reset_prefix_cache())

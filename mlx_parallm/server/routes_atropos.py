"""The Atropos-style API under `/atropos`: a drop-in for environments that derive from atroposlib's `BaseEnv`.

`app.create_app` includes the router; `AtroposQueue` (rollout_store/queue.py) does the work and says in its docstring
what is different from atroposlib's server and why. Paths, bodies and replies are atroposlib 0.4.0's, but for these:

* a group that may not be trained on is answered 422 with the reason (`detail[].msg`), and in a list only that group is
  refused: the others are kept, `groups_processed` counts them. 503 means that nothing was lost: send again.
* `/register` and `/batch` are there for a trainer, and the trainer is this process: a registration changes nothing
  (as any second one in atroposlib) and says so; `/batch` is always null.
* `/reset_data` drops what waits, with the reason on record, and leaves environments registered.

Handlers are plain functions: FastAPI runs them in its thread pool, because each touches the database.
"""

import json
import uuid
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field

from mlx_parallm.errors import RolloutRejectedError, StoreError
from mlx_parallm.rollout_store.queue import AtroposQueue
from mlx_parallm.rollout_store.wire import ScoredData, to_scored_data

MAX_UNPACKED_BYTES = 512 << 20  # a gzip body may unpack to this; the app limits what comes over the wire
_REFUSALS: dict[int | str, dict[str, Any]] = {
    422: {"description": "Not to be trained on, with the reason"},
    503: {"description": "Nothing was lost: send again"},
}
_NO_EXAMPLE = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs")


class Registration(BaseModel):
    """What a trainer tells; kept for compatibility, answered, not used."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class EnvironmentRegistration(BaseModel):
    max_token_length: int
    desired_name: str
    weight: float
    group_size: int = Field(ge=1)
    min_batch_allocation: None = None
    """Batches are first come, first served: a guaranteed share is refused rather than ignored."""


class EnvironmentId(BaseModel):
    env_id: int


class _GzipRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_unpacked"):
            body = await super().body()
            if "gzip" in self.headers.get("content-encoding", "").lower() and body:
                body = await run_in_threadpool(_gunzip, body)
            self._unpacked = body
        return self._unpacked


class _GzipRoute(APIRoute):
    """Unpacks `Content-Encoding: gzip` bodies: environments send every group of more than 1 KB so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def with_unpacked_body(request: Request) -> Response:
            return await handler(_GzipRequest(request.scope, request.receive))

        return with_unpacked_body


def create_atropos_router(queue: AtroposQueue) -> APIRouter:
    """The `/atropos` routes over `queue`."""
    router = APIRouter(prefix="/atropos", tags=["atropos"], route_class=_GzipRoute)
    _add_trainer_routes(router, queue)
    _add_environment_routes(router, queue)
    _add_data_routes(router, queue)
    return router


def _add_trainer_routes(router: APIRouter, queue: AtroposQueue) -> None:
    settings = queue.settings

    @router.get("", include_in_schema=False)
    @router.get("/")
    def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @router.post("/register")
    def register(registration: Registration) -> dict[str, Any]:
        message = "the trainer is this server's own process: nothing was changed, and /batch hands nothing out"
        return {"uuid": uuid.uuid4().int, "message": message}

    @router.get("/batch")
    def batch() -> dict[str, None]:
        return {"batch": None}

    @router.get("/info")
    def info() -> dict[str, int]:
        return {"batch_size": settings.batch_size, "max_token_len": settings.max_token_length}

    @router.get("/wandb_info")
    def wandb_info() -> dict[str, str]:
        return {"group": settings.wandb_group, "project": settings.wandb_project}

    @router.get("/status")
    def status() -> dict[str, int]:
        return queue.status()

    @router.get("/reset_data", response_class=PlainTextResponse)
    def reset_data() -> str:
        queue.reset()
        return "Reset successful"


def _add_environment_routes(router: APIRouter, queue: AtroposQueue) -> None:
    settings = queue.settings

    @router.post("/register-env")
    def register_environment(registration: EnvironmentRegistration) -> dict[str, Any]:
        entry = queue.register_environment(
            registration.desired_name,
            max_token_length=registration.max_token_length,
            weight=registration.weight,
            group_size=registration.group_size,
        )
        return {
            "status": "success",
            "env_id": entry.env_id,
            "wandb_name": entry.name,
            "checkpoint_dir": settings.checkpoint_dir,
            "starting_step": queue.current_step,
            "checkpoint_interval": settings.checkpoint_interval,
            "num_steps": settings.total_steps,
        }

    @router.post("/disconnect-env")
    def disconnect_environment(environment: EnvironmentId) -> dict[str, str]:
        if queue.disconnect_environment(environment.env_id):
            return {"status": "success"}
        return {"status": "failure", "error": f"no environment {environment.env_id}"}

    @router.get("/status-env")  # a GET with a JSON body: so it is called
    def environment_status(environment: EnvironmentId) -> dict[str, float]:
        status = queue.environment_status(environment.env_id)
        if status is None:
            raise HTTPException(404, f"no environment {environment.env_id}: call /atropos/register-env first")
        return status


def _add_data_routes(router: APIRouter, queue: AtroposQueue) -> None:
    @router.post("/scored_data", responses=_REFUSALS, openapi_extra=_json_body(ScoredData.model_json_schema()))
    async def scored_data(request: Request) -> Response:
        data = await run_in_threadpool(_parsed, await request.body())
        return await run_in_threadpool(_submit, queue, [data], False)

    @router.post(
        "/scored_data_list",
        responses=_REFUSALS,
        openapi_extra=_json_body({"type": "array", "items": ScoredData.model_json_schema()}),
    )
    async def scored_data_list(request: Request) -> Response:
        data = await run_in_threadpool(_parsed, await request.body())
        if not isinstance(data, list):
            raise HTTPException(422, "expected a JSON array of scored groups")
        return await run_in_threadpool(_submit, queue, data, True)

    @router.get("/latest_example")
    def latest_example() -> dict[str, Any]:
        group = queue.latest_example()
        if group is None:
            return {field: [] for field in (*_NO_EXAMPLE, "messages", "images")}
        return to_scored_data(group)


def _submit(queue: AtroposQueue, items: list[Any], as_list: bool) -> Response:
    """Each group on its own: what is good is on the disk, what is not is named with its reason."""
    faults: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        try:
            queue.submit(item)
        except RolloutRejectedError as error:
            location = ["body", number] if as_list else ["body"]
            faults.append({"loc": location, "msg": str(error), "type": "rollout_rejected"})
        except StoreError as error:
            return JSONResponse({"status": "error", "detail": str(error)}, status_code=503)
    reply: dict[str, Any] = {"status": "rejected" if faults else "received"}
    if as_list:
        reply["groups_processed"] = len(items) - len(faults)
    if faults:
        reply["detail"] = faults
    return JSONResponse(reply, status_code=422 if faults else 200)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise HTTPException(422, f"the body is not JSON: {error}") from error


def _gunzip(body: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        unpacked = unpacker.decompress(body, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise HTTPException(400, "Invalid gzip payload") from error
    if unpacker.unconsumed_tail:
        raise HTTPException(413, f"the body unpacks to more than {MAX_UNPACKED_BYTES} bytes")
    if not unpacker.eof:
        raise HTTPException(400, "Invalid gzip payload: it ends too early")
    return unpacked


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

"""The Atropos API under `/atropos`: a drop-in for environments that derive from atroposlib's
`BaseEnv`.

`create_atropos_router` gives the daemon the router; `AtroposQueue` (queue.py) does the work. Paths,
bodies and replies are atroposlib 0.4.0's; docs/environments.md#atropos lists the differences.
Errors have FastAPI's shape ({"detail": …}), as there, not OpenAI's as on the other routes.

Handlers are plain functions: FastAPI runs them in its thread pool, because each touches the
database.
"""

import asyncio
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mlx_parallm.errors import RefusedError, RolloutRejectedError, StoreError
from mlx_parallm.faces.atropos.queue import LARGEST_NUMBER, AtroposQueue
from mlx_parallm.faces.atropos.rows import AskedRows, RowsRequest
from mlx_parallm.faces.atropos.wire import LONGEST_NAME, SHOWN, ScoredData, whole
from mlx_parallm.server.app import MEANINGS, AddedRouter
from mlx_parallm.server.auth import refuse_pages
from mlx_parallm.server.errors import ERROR_CONTENT
from mlx_parallm.server.protocol.fields import MAX_BODY_BYTES
from mlx_parallm.server.protocol.strict_json import check_containers

MAX_UNPACKED_BYTES = MAX_BODY_BYTES  # limit of an unpacked gzip body: a plain one's
# bodies that are unpacked, parsed and stored together: each may take some hundred MB as objects
GROUPS_AT_ONCE = 4
_NO_EXAMPLE = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "generation_params",
    "inference_logprobs",
)
_JSON = Body()
_DETAIL = {"type": "object", "required": ["detail"], "properties": {"detail": {}}}


def _refusal(meaning: str) -> dict[str, Any]:
    """Both shapes of an error: run-api's from these routes, OpenAI's from the key and the gate
    before them."""
    schemas = [ERROR_CONTENT["application/json"]["schema"], _DETAIL]
    content = {"application/json": {"schema": {"anyOf": schemas}}, "text/plain": {}}
    return {"description": meaning, "content": content}


_REFUSALS: dict[int | str, dict[str, Any]] = {
    **{status: _refusal(MEANINGS[status]) for status in (400, 404, 413)},
    422: _refusal("Not what the Atropos API wants, or not to be trained on; `detail` says why"),
}
_WAIT = {"status": "wait for trainer to start"}
"""Sent while the model loads. An environment that reads it asks again; at its third 503 it would
exit."""
_BAD_GZIP = "Invalid gzip payload"


class EnvironmentRegistration(BaseModel):
    max_token_length: int = Field(ge=1, le=LARGEST_NUMBER)
    desired_name: Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(whole)]
    weight: float = Field(ge=0, le=LARGEST_NUMBER)
    group_size: int = Field(ge=0, le=LARGEST_NUMBER)
    min_batch_allocation: float | None = Field(None, ge=0, le=1)


class EnvironmentId(BaseModel):
    env_id: NonNegativeInt


class _UnpackedRequest(Request):
    """Unpacks gzip bodies (environments send every group of more than 1 KB so) and parses JSON,
    off the loop."""

    async def packed_body(self) -> bytes:
        try:
            return await super().body()
        except ClientDisconnect as error:
            raise HTTPException(400, "the connection was closed before the body's end") from error

    async def body(self) -> bytes:
        if not hasattr(self, "_unpacked"):
            body = await self.packed_body()
            if "gzip" in self.headers.get("content-encoding", "").lower() and body:
                body = await run_in_threadpool(_gunzip, body)
            self._unpacked = body
        return self._unpacked

    async def json(self) -> Any:
        body = await self.body()
        check_containers(body)
        return await run_in_threadpool(json.loads, body)


def _route_class(queue: AtroposQueue) -> type[APIRoute]:
    places = asyncio.Semaphore(GROUPS_AT_ONCE)

    class AtroposRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            brings_groups = self.path.rpartition("/")[2].startswith("scored_data")

            async def handled(request: Request) -> Response:
                unpacked = _UnpackedRequest(request.scope, request.receive)
                if not brings_groups:
                    return await handler(unpacked)
                await unpacked.packed_body()  # a slow sender holds no place
                async with places:
                    return await handler(unpacked)

            async def answering(request: Request) -> Response:
                answer: Response
                try:
                    return await handled(request)
                except RequestValidationError as error:
                    detail = _details(error.errors())
                    reason, answer = str(detail[0]["msg"]), JSONResponse({"detail": detail}, 422)
                except HTTPException as error:
                    in_words = PlainTextResponse(error.detail, error.status_code)
                    reason = error.detail
                    answer = (
                        in_words
                        if reason == _BAD_GZIP
                        else await http_exception_handler(request, error)
                    )
                except RefusedError as error:
                    return JSONResponse({"detail": str(error)}, error.status)
                except StoreError as error:
                    return JSONResponse({"detail": str(error)}, 503)
                if brings_groups:
                    # the disk is full: the answer stays the same
                    with contextlib.suppress(StoreError):
                        await run_in_threadpool(queue.quarantine, reason)
                return answer

            return answering

    return AtroposRoute


def create_atropos_router(queue: AtroposQueue, rows: AskedRows) -> AddedRouter:
    """The `/atropos` routes over `queue`."""
    router = APIRouter(
        prefix="/atropos",
        tags=["atropos"],
        route_class=_route_class(queue),
        responses={503: _refusal(MEANINGS[503])},
    )
    _add_run_routes(router, queue)
    _add_environment_routes(router, queue, rows)
    _add_data_routes(router, queue)
    return AddedRouter(router, basic_auth=True, while_loading={"/atropos/register-env": _WAIT})


def _add_run_routes(router: APIRouter, queue: AtroposQueue) -> None:
    @router.get("", include_in_schema=False)
    @router.get("/")
    def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @router.get("/info")
    def info() -> dict[str, int]:
        return {
            "batch_size": queue.settings.batch_size,
            "max_token_len": queue.settings.max_token_length,
        }

    @router.get("/wandb_info")
    def wandb_info() -> dict[str, str | None]:
        return {"group": queue.settings.wandb_group, "project": queue.settings.wandb_project}

    @router.get("/status")
    def status() -> dict[str, int]:
        return queue.status()

    @router.get(
        "/reset_data", response_class=PlainTextResponse, dependencies=[Depends(refuse_pages)]
    )
    def reset_data() -> str:
        queue.reset()
        return "Reset successful"


def _add_environment_routes(router: APIRouter, queue: AtroposQueue, rows: AskedRows) -> None:
    @router.post("/register-env", responses=_REFUSALS)
    def register_environment(registration: EnvironmentRegistration) -> dict[str, Any]:
        settings = queue.settings
        entry = queue.register_environment(
            registration.desired_name,
            max_token_length=registration.max_token_length,
            weight=registration.weight,
            group_size=registration.group_size,
            min_batch_allocation=registration.min_batch_allocation,
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

    @router.post("/next-rows", responses=_REFUSALS)
    def next_rows(request: RowsRequest) -> dict[str, list[str]]:
        return {"rows": rows.draw(request)}

    @router.post("/disconnect-env", responses=_REFUSALS)
    def disconnect_environment(environment: EnvironmentId) -> dict[str, str]:
        if queue.disconnect_environment(environment.env_id):
            return {"status": "success"}
        return {"status": "failure", "error": f"no environment {environment.env_id}"}

    @router.get("/status-env", responses=_REFUSALS)  # a GET with a JSON body: so it is called
    # they slice with the counts
    def environment_status(environment: EnvironmentId) -> dict[str, int | float]:
        status = queue.environment_status(environment.env_id)
        if status is None:
            raise HTTPException(
                404, f"no environment {environment.env_id}: call /atropos/register-env first"
            )
        return status


def _add_data_routes(router: APIRouter, queue: AtroposQueue) -> None:
    @router.post(
        "/scored_data",
        responses=_REFUSALS,
        openapi_extra=_json_body(ScoredData.model_json_schema()),
    )
    def scored_data(group: Annotated[Any, _JSON]) -> Response:
        faults = _submit(queue, group, ["body"])
        return (
            JSONResponse({"detail": faults}, 422)
            if faults
            else JSONResponse({"status": "received"})
        )

    @router.post(
        "/scored_data_list",
        responses=_REFUSALS,
        openapi_extra=_json_body({"type": "array", "items": ScoredData.model_json_schema()}),
    )
    def scored_data_list(groups: Annotated[Any, _JSON]) -> Response:
        """Take each group on its own: good ones are on the disk, the others are named with the
        reason."""
        if not isinstance(groups, list):
            kind = {"type": "list_type", "loc": ("body",), "msg": "Input should be a valid list"}
            raise RequestValidationError([kind])
        faults = [_submit(queue, group, ["body", number]) for number, group in enumerate(groups)]
        taken = sum(not fault for fault in faults)
        if taken < len(groups):
            return JSONResponse({"detail": list(chain(*faults)), "groups_processed": taken}, 422)
        return JSONResponse({"status": "received", "groups_processed": taken})

    @router.get("/latest_example")
    def latest_example() -> Response:
        example = queue.latest_example()
        return JSONResponse(example or {field: [] for field in (*_NO_EXAMPLE, "messages", *SHOWN)})


def _submit(queue: AtroposQueue, group: Any, location: list[str | int]) -> list[dict[str, Any]]:
    """Store a group. Returns its faults in FastAPI's shape; none when it was kept."""
    try:
        queue.submit(group)
    except RolloutRejectedError as error:
        if isinstance(error.__cause__, ValidationError):
            entries = error.__cause__.errors(
                include_url=False, include_context=False, include_input=False
            )
            return _details([{**entry, "loc": (*location, *entry["loc"])} for entry in entries])
        kind = "rollout_rejected" if isinstance(group, dict) else "model_attributes_type"
        return [{"type": kind, "loc": location, "msg": str(error)}]
    return []


def _details(entries: Any) -> list[dict[str, Any]]:
    """FastAPI's details without the value that was sent: it may be large, or no JSON (NaN)."""
    return [{key: entry[key] for key in ("type", "loc", "msg")} for entry in entries]


def _gunzip(body: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
            unpacked = file.read(MAX_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise HTTPException(400, _BAD_GZIP) from error
    if len(unpacked) > MAX_UNPACKED_BYTES:
        raise HTTPException(413, f"the body unpacks to more than {MAX_UNPACKED_BYTES} bytes")
    return unpacked


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

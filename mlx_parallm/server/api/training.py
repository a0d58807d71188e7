"""/v1/training/rollback: the weights that are trained and served go back to an earlier version,
optimizer included.

The trainer does it between two steps, on its own thread (rl_training/publish/rollback.py). Every
server has the route: one that trains nothing answers 409.
"""

import asyncio
from typing import Annotated, Any, Literal, NotRequired, Self

from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from mlx_parallm.errors import ParallmError, RefusedError, RequestError
from mlx_parallm.server.context import Context, RollbackAPI, RollbackRequest
from mlx_parallm.server.errors import ERROR_CONTENT, ErrorDetail, error_body, status_of
from mlx_parallm.server.protocol.fields import Body
from mlx_parallm.server.protocol.strict_json import json_router

ANSWERED_WITHIN_S = 20.0
"""A step may take minutes: then the answer is 202, and GET reports the outcome."""
PATH = "/v1/training/rollback"
_NOT_NOW: dict[str, Any] = {
    "description": "Another rollback waits, or nothing is trained here (any more)",
    "content": ERROR_CONTENT,
}


class RollbackAnswer(TypedDict):
    """`to` and what follows: of a request that waits or is done; `error`: of one that was
    refused."""

    object: Literal["rollback"]
    status: Literal["none", "waiting", "done", "refused"]
    to: NotRequired[str]
    to_step: NotRequired[int]
    step: NotRequired[int]
    policy_version: NotRequired[int]
    error: NotRequired[ErrorDetail]


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": RollbackAnswer},
    202: {
        "model": RollbackAnswer,
        "description": "It will be done when the step that is being trained ends: see GET",
    },
    404: {"description": "No such version or checkpoint is kept", "content": ERROR_CONTENT},
    409: _NOT_NOW,
}
router = json_router("training")


class RollbackBody(Body):
    version: Annotated[int, Field(ge=0, strict=True)] | None = None
    checkpoint: Annotated[str, Field(min_length=1, max_length=64)] | None = None

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.version is None) == (self.checkpoint is None):
            raise RequestError("send either 'version' or 'checkpoint'", param="version")
        return self


@router.post(PATH, responses=_ANSWERS)
async def roll_back(body: RollbackBody, context: Context) -> Response:
    """Answer when it is done, or 202 when the step that is being trained takes longer than
    that."""
    request = _rollbacks(context).request(version=body.version, checkpoint=body.checkpoint)
    result = asyncio.shield(asyncio.wrap_future(request.result))
    try:
        await asyncio.wait_for(result, ANSWERED_WITHIN_S)
    except TimeoutError:
        return JSONResponse(_state(request), 202)
    return JSONResponse(_state(request))


@router.get(PATH, responses={200: {"model": RollbackAnswer}, 409: _NOT_NOW})
async def last_rollback(context: Context) -> Response:
    """The last request's `status`: "none", "waiting", "done" or "refused"."""
    return JSONResponse(_state(_rollbacks(context).last()))


def _rollbacks(context: Context) -> RollbackAPI:
    if context.deps.rollbacks is None:
        raise RefusedError("this server trains nothing: rollbacks are for mlx_parallm train", 409)
    return context.deps.rollbacks


def _state(request: RollbackRequest | None) -> dict[str, Any]:
    if request is None:
        return {"object": "rollback", "status": "none"}
    shown: dict[str, Any] = {"object": "rollback", "status": "waiting", "to": str(request.target)}
    if not request.result.done():
        return shown
    error = request.result.exception()
    if error is None:
        return shown | request.result.result() | {"status": "done"}
    status = status_of(error) if isinstance(error, ParallmError) else 500
    return shown | {"status": "refused", "error": error_body(str(error), status)["error"]}

"""/v1/training/rollback: the weights that are trained and served go back to an earlier version, optimizer included.

The trainer does it between two steps, on its own thread (rl_training/publish/rollback.py): `RollbackDesk` is where the
two meet. In every server: one that trains nothing says so.
"""

import asyncio
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Annotated, Any, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from mlx_parallm.errors import ParallmError, RequestError, RollbackRefusedError
from mlx_parallm.server.context import Context
from mlx_parallm.server.errors import error_body, status_of
from mlx_parallm.server.protocol.fields import Body
from mlx_parallm.server.protocol.strict_json import StrictJSONRoute

ANSWERED_WITHIN_S = 20.0
"""A step may take minutes: then the answer is 202, and GET tells what became of it."""
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    202: {"description": "It will be done when the step that is being trained ends: see GET"},
    404: {"description": "No such version or checkpoint is kept", "content": _ERROR},
    409: {"description": "Another rollback waits, or nothing is trained here (any more)", "content": _ERROR},
}
_NOTHING_TRAINED: dict[int | str, dict[str, Any]] = {409: _ANSWERS[409]}


@dataclass(frozen=True)
class RollbackTarget:
    """One of the two. `checkpoint`: the name of a directory of the run, e.g. step_000120."""

    version: int | None = None
    checkpoint: str | None = None

    def __str__(self) -> str:
        return self.checkpoint or f"version {self.version}"


class RollbackDesk:
    """One request at a time, from any thread, to the trainer's, which takes it and sets the future's result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: tuple[RollbackTarget, Future[dict[str, Any]]] | None = None
        self._last: tuple[RollbackTarget, Future[dict[str, Any]]] | None = None

    def ask(self, target: RollbackTarget) -> Future[dict[str, Any]]:
        """Raises RollbackRefusedError: one is being worked on, or the training has ended."""
        with self._lock:
            if self._closed:
                raise RollbackRefusedError("the training has ended: nothing is rolled back any more", 409)
            if self._last is not None and not self._last[1].done():
                raise RollbackRefusedError(f"a rollback to {self._last[0]} is not done yet: ask again then", 409)
            future: Future[dict[str, Any]] = Future()
            future.set_running_or_notify_cancel()  # who asked may go: it is done all the same
            self._waiting = self._last = (target, future)
            return future

    def take(self) -> tuple[RollbackTarget, Future[dict[str, Any]]] | None:
        """What was asked for and not taken yet."""
        with self._lock:
            taken, self._waiting = self._waiting, None
            return taken

    def close(self) -> None:
        """Who waits is told that the training has ended; also one whose rollback failed half-way. By the thread that
        takes, after its last one."""
        with self._lock:
            self._closed = True
        self.take()
        if self._last is not None and not self._last[1].done():
            self._last[1].set_exception(RollbackRefusedError("the training has ended before it was rolled back", 409))

    def state(self) -> dict[str, Any]:
        """Of the last request: `status` is "none", "waiting", "done" or "refused"."""
        with self._lock:
            last = self._last
        if last is None:
            return {"object": "rollback", "status": "none"}
        target, future = last
        told: dict[str, Any] = {"object": "rollback", "status": "waiting", "to": str(target)}
        if future.done():
            error = future.exception()
            told |= future.result() if error is None else {"error": _error(error)["error"]}
            told["status"] = "done" if error is None else "refused"
        return told


class RollbackBody(Body):
    version: Annotated[int, Field(ge=0, strict=True)] | None = None
    checkpoint: Annotated[str, Field(min_length=1, max_length=64)] | None = None

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.version is None) == (self.checkpoint is None):
            raise RequestError("send either 'version' or 'checkpoint'", param="version")
        return self


def training_router() -> APIRouter:
    router = APIRouter(route_class=StrictJSONRoute, tags=["training"])
    path = "/v1/training/rollback"
    router.add_api_route(path, roll_back, methods=["POST"], response_class=JSONResponse, responses=_ANSWERS)
    router.add_api_route(path, last_rollback, methods=["GET"], response_class=JSONResponse, responses=_NOTHING_TRAINED)
    return router


async def roll_back(body: RollbackBody, context: Context) -> Response:
    """Answers when it is done, or 202 when the step that is being trained takes longer than that."""
    desk = _desk(context)
    future = desk.ask(RollbackTarget(body.version, body.checkpoint))
    done, _ = await asyncio.to_thread(wait, [future], ANSWERED_WITHIN_S)
    if done:
        future.result()
    return JSONResponse(desk.state(), 200 if done else 202)


async def last_rollback(context: Context) -> Response:
    return JSONResponse(_desk(context).state())


def _desk(context: Context) -> RollbackDesk:
    if context.deps.rollbacks is None:
        raise RollbackRefusedError("this server trains nothing: rollbacks are for mlx_parallm_train", 409)
    return context.deps.rollbacks


def _error(error: BaseException) -> dict[str, Any]:
    status = status_of(error) if isinstance(error, ParallmError) else 500
    return error_body(str(error), status)

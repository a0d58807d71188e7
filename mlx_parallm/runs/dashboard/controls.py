"""Controls of the run that this process trains: POST /dashboard/api/control. Each command is in the
run's log and in marks.jsonl (rl_training/commands.py); rolling back has its own route,
/v1/training/rollback.

A foreign page cannot post here: without a key the server answers this machine's pages only, with
one a page would need the key in a header; and a browser's Origin has to be this server's, or one of
server.cors_origins, either way.
"""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from mlx_parallm.errors import RefusedError, RequestError
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.runs.dashboard.response_shapes import ControlAnswer, ControlState
from mlx_parallm.runs.run import Run
from mlx_parallm.server.api.control import pause_for_clients, resume_for_clients
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.protocol.fields import Body, ObjectOf
from mlx_parallm.server.protocol.strict_json import json_router

ANSWERED_WITHIN_S = 20.0
"""A step may take minutes: then the answer is 202, and a mark on the charts says that it is
done."""
LONGEST_NOTE = 400
LISTED_CHECKPOINTS = 20
DASHBOARD = "the dashboard"


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": ControlAnswer},
    202: {"model": ControlAnswer, "description": "It will be done when the step ends"},
}


class ControlBody(Body):
    """`text` belongs to a note, `settings` to a change; neither is passed over elsewhere."""

    action: Literal["pause", "resume", "checkpoint", "stop", "note", "change"]
    text: Annotated[str, Field(max_length=LONGEST_NOTE)] = ""
    # strict: true is not a number, nor is a text
    settings: ObjectOf[str, Annotated[float, Field(strict=True, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _one_order(self) -> Self:
        for field, value, action in (
            ("text", self.text, "note"),
            ("settings", self.settings, "change"),
        ):
            if value and self.action != action:
                raise RequestError(
                    f"{field!r} is for action = {action!r}, not for {self.action!r}", param=field
                )
        if self.action == "note" and not self.text.strip():
            raise RequestError("an empty note", param="text")
        if self.action == "change" and not self.settings:
            raise RequestError("a change without settings", param="settings")
        return self


def control_router(run: RunCommands | None, directory: Path) -> APIRouter:
    """Return the routes; `run` None: nothing is trained here, and they answer 409."""
    router = json_router("dashboard")

    def commands() -> RunCommands:
        """Raises RefusedError, before a route asks for the engine."""
        if run is None:
            raise RefusedError(
                "this process does not train the run: there is nothing to control", 409
            )
        return run

    Trained = Annotated[RunCommands, Depends(commands)]

    @router.get("/dashboard/api/control", responses={200: {"model": ControlState}})
    async def state(order: Trained, context: Context) -> Response:
        """The state that commands change: whether clients have paused the engine, settings,
        checkpoints to go back to."""
        names = [path.name for path in await asyncio.to_thread(Run(directory).checkpoints)][
            -LISTED_CHECKPOINTS:
        ]
        return JSONResponse(
            {
                "paused": context.clients_paused,
                "settings": order.settings(),
                "fixed": order.fixed(),
                "checkpoints": names[::-1],
            }
        )

    @router.post("/dashboard/api/control", responses=_ANSWERS)
    async def control(
        body: ControlBody, request: Request, order: Trained, context: Context
    ) -> Response:
        """Pause or resume the engine, save a checkpoint, stop with one, note something, change
        settings."""
        _check_origin(request, context)
        if body.action in ("pause", "resume"):
            await _pause(context, body.action == "pause")
            await asyncio.to_thread(order.mark, body.action, f"{body.action}d")
            return JSONResponse({"status": "done"})
        if body.action == "note":
            await asyncio.to_thread(order.mark, "note", body.text.strip())
            return JSONResponse({"status": "done"})
        if body.action == "stop":
            await asyncio.to_thread(order.stop)
            return JSONResponse({"status": "done"})
        return await _answer(
            order.checkpoint() if body.action == "checkpoint" else order.change(body.settings)
        )

    return router


async def _pause(context: ServerContext, pause: bool) -> None:
    """Pause every request, those of the rollouts too: the training waits for its
    batch."""
    if pause:
        await pause_for_clients(context.engine, DASHBOARD, freeze=True)
    else:
        await resume_for_clients(context.engine, DASHBOARD)


async def _answer(result: "Future[dict[str, Any]]") -> Response:
    try:
        done = await asyncio.wait_for(
            asyncio.shield(asyncio.wrap_future(result)), ANSWERED_WITHIN_S
        )
    except TimeoutError:
        return JSONResponse({"status": "waiting"}, 202)
    return JSONResponse({"status": "done", "result": done})


def _check_origin(request: Request, context: ServerContext) -> None:
    """Raises RefusedError: a page of another origin."""
    origin = request.headers.get("origin")
    allowed = context.deps.config.cors_origins
    if (
        origin is not None
        and origin not in allowed
        and urlsplit(origin).netloc != request.headers.get("host")
    ):
        raise RefusedError(
            "controls are for this server's own page, not for one of another origin", 403
        )

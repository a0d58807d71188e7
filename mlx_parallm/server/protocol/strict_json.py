"""Routers that read request bodies as strict JSON: Python's `json` would let NaN and Infinity
through."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from mlx_parallm.server.protocol.fields import MAX_BODY_BYTES
from mlx_parallm.system import foreign_json
from mlx_parallm.system.foreign_http import ACCEPTED, BeyondBoundsError, Bounds, Unpacked
from mlx_parallm.system.foreign_json import TooDeepError, TooManyContainersError, read_json


def check_containers(body: bytes) -> None:
    """Raises HTTPException 413: so many lists and objects would take gigabytes."""
    try:
        foreign_json.check_containers(body)
    except TooManyContainersError as error:
        raise HTTPException(413, f"the body holds {error}") from None


def json_router(tag: str) -> APIRouter:
    """A router of JSON routes under this tag of the OpenAPI document."""
    return APIRouter(route_class=StrictJSONRoute, default_response_class=JSONResponse, tags=[tag])


class StrictJSONRequest(Request):
    async def json(self) -> Any:
        """The body's value, unpacked. Raises HTTPException: 400 for a body that is not UTF-8, not
        JSON, NaN, Infinity or nested too deeply; 413 for too many lists; 415 for another packing
        than gzip and deflate."""
        body = await self.body()
        if encoding := self.headers.get("content-encoding", ""):
            body = await asyncio.to_thread(_unpacked, body, encoding)
        check_containers(body)
        try:
            return read_json(body, constant=_refuse_constant)
        except UnicodeDecodeError as error:
            raise HTTPException(
                400, f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
            ) from error
        except TooDeepError as error:
            raise HTTPException(400, f"the body is {error}") from error
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def _unpacked(body: bytes, encoding: str) -> bytes:
    """Raises HTTPException: 415 for an encoding that is not read here, 413 for a body that is too
    large unpacked, 400 for one whose encoding is wrong."""
    try:
        unpacker = Unpacked(encoding, "", "", Bounds(body=MAX_BODY_BYTES), "the body")
    except BeyondBoundsError as error:
        accepted = {"Accept-Encoding": f"{ACCEPTED}, identity"}
        raise HTTPException(415, f"Content-Encoding: {error}", accepted) from None
    try:
        unpacked = b"".join(unpacker.feed(body))
    except BeyondBoundsError as error:
        raise HTTPException(413 if "at most" in str(error) else 400, str(error)) from None
    if not unpacker.is_complete:
        raise HTTPException(400, f"the body ends within its {encoding}")
    return unpacked


class StrictJSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            return await handler(StrictJSONRequest(request.scope, request.receive))

        return strict_handler


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

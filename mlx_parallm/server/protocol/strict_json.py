"""Routers that read request bodies as strict JSON: Python's `json` would let NaN and Infinity
through."""

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

MAX_CONTAINERS = 1 << 20
MAX_DEPTH = 256  # lists and objects inside one another: what reads them calls itself once a level


def check_containers(body: bytes) -> None:
    """Raises HTTPException 413: so many lists and objects would take gigabytes ("[[],[],…" is 3
    bytes a list)."""
    if len(body) > MAX_CONTAINERS and body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise HTTPException(413, f"the body holds more than {MAX_CONTAINERS} lists and objects")


def deeper_than(value: Any, most: int) -> bool:
    """Whether more than `most` lists and objects lie inside one another."""
    level = [value]
    for _ in range(most + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return True


def _too_deep() -> HTTPException:
    return HTTPException(
        400,
        (f"the body is nested too deeply: at most {MAX_DEPTH} lists and objects in one another"),
    )


def json_router(tag: str) -> APIRouter:
    """A router of JSON routes under this tag of the OpenAPI document."""
    return APIRouter(route_class=StrictJSONRoute, default_response_class=JSONResponse, tags=[tag])


class StrictJSONRequest(Request):
    async def json(self) -> Any:
        """The body's value. Raises HTTPException: 400 for what is not UTF-8, not JSON, NaN,
        Infinity or nested too deeply; 413 for too many lists."""
        body = await self.body()
        check_containers(body)
        try:
            value = json.loads(body.decode(), parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            raise HTTPException(
                400, f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
            ) from error
        except RecursionError as error:
            raise _too_deep() from error
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
            raise _too_deep()
        return value


class StrictJSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            return await handler(StrictJSONRequest(request.scope, request.receive))

        return strict_handler


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

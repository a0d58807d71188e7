"""Routers that read request bodies as strict JSON: Python's `json` would let NaN and Infinity
through."""

from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from mlx_parallm.system import foreign_json
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
        """The body's value. Raises HTTPException: 400 for what is not UTF-8, not JSON, NaN,
        Infinity or nested too deeply; 413 for too many lists."""
        body = await self.body()
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


class StrictJSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            return await handler(StrictJSONRequest(request.scope, request.receive))

        return strict_handler


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

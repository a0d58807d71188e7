"""Adapters of a running server, vLLM's names: /v1/load_lora_adapter, /v1/unload_lora_adapter.

Under the root too, where a name that is taken is replaced, as prime-rl expects, which loads each step's adapter under
one name. Both are off until `server.adapter_roots` says where adapters may lie.
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import ConfigDict

from mlx_parallm.server.context import Context
from mlx_parallm.server.protocol.fields import Body
from mlx_parallm.server.protocol.strict_json import StrictJSONRoute


class UnloadBody(Body):
    model_config = ConfigDict(extra="ignore")
    screened: ClassVar[bool] = False
    lora_name: str


class LoadBody(UnloadBody):
    lora_path: str
    load_inplace: bool = False


def adapters_router() -> APIRouter:
    router = APIRouter(route_class=StrictJSONRoute, tags=["control"])
    routes: list[tuple[str, Callable[..., Any]]] = [
        ("/v1/load_lora_adapter", load),
        ("/load_lora_adapter", load_in_place),
        ("/v1/unload_lora_adapter", unload),
        ("/unload_lora_adapter", unload),
    ]
    for path, endpoint in routes:
        router.add_api_route(path, endpoint, methods=["POST"], response_class=PlainTextResponse)
    return router


async def load(body: LoadBody, context: Context) -> Response:
    """A name that is taken is replaced with `load_inplace`, or when it was loaded from this very path; requests that
    run under it go on under the new adapter."""
    loader = context.adapters
    await asyncio.to_thread(loader.load, body.lora_name, body.lora_path, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


async def load_in_place(body: LoadBody, context: Context) -> Response:
    """As under /v1 with `load_inplace`."""
    return await load(body.model_copy(update={"load_inplace": True}), context)


async def unload(body: UnloadBody, context: Context) -> Response:
    """Requests that run under the adapter end under it."""
    await asyncio.to_thread(context.adapters.unload, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")

"""Adapters of a running server, vLLM's names: /v1/load_lora_adapter, /v1/unload_lora_adapter.

Under the root too, if an existing name is replaced: prime-rl loads each step's adapter under one
name. Both are off until `server.adapter_roots` names the directories that adapters may be loaded
from.
"""

import asyncio
from typing import TYPE_CHECKING, ClassVar

from fastapi.responses import PlainTextResponse, Response
from pydantic import ConfigDict

from mlx_parallm.errors import RefusedError
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.protocol.fields import Body, ShortText
from mlx_parallm.server.protocol.strict_json import json_router

if TYPE_CHECKING:
    from mlx_parallm.engine.adapter_loader import AdapterLoader

router = json_router("control")


class UnloadBody(Body):
    model_config = ConfigDict(extra="ignore")
    screened: ClassVar[bool] = False
    lora_name: ShortText


class LoadBody(UnloadBody):
    lora_path: ShortText
    load_inplace: bool = False


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load(body: LoadBody, context: Context) -> Response:
    """An existing name is replaced with `load_inplace`, or when it was loaded from this very
    path; requests that run under it continue under the new adapter."""
    await asyncio.to_thread(
        _loader(context).load, body.lora_name, body.lora_path, in_place=body.load_inplace
    )
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


@router.post("/load_lora_adapter", response_class=PlainTextResponse)
async def load_in_place(body: LoadBody, context: Context) -> Response:
    """Load an adapter as the route under /v1 does with `load_inplace`."""
    return await load(body.model_copy(update={"load_inplace": True}), context)


@router.post("/unload_lora_adapter", response_class=PlainTextResponse)
@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload(body: UnloadBody, context: Context) -> Response:
    """Requests that run under the adapter end under it."""
    await asyncio.to_thread(_loader(context).unload, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def _loader(context: ServerContext) -> "AdapterLoader":
    loader = context.deps.state.parts.adapters
    if loader is None:
        raise RefusedError("this server loads no adapters while it runs", 403)
    return loader

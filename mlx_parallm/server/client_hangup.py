"""Cancel the work for a client that hangs up: neither Starlette nor uvicorn cancels its handler."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from mlx_parallm.server.errors import ClientDisconnectedError

T = TypeVar("T")


async def until_hangup(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Raises ClientDisconnectedError as soon as the ASGI channel
    `receive` reports that the client is gone, and cancels `work`.

    The request's body must have been read. Cancelling this call cancels the work.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError("the client hung up")
        return task.result()
    finally:
        unfinished = [each for each in (task, watcher) if not each.done()]
        for each in unfinished:
            each.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

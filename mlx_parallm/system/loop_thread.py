"""An asyncio loop in a thread of its own, for callers that block."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from mlx_parallm.errors import EngineUnavailableError

T = TypeVar("T")

CLOSED = "this InferenceModule is closed"


class LoopThread:
    """Starts when it is first needed. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="inference", daemon=True)
        self._ended = False

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Raises EngineUnavailableError: after `stop`."""
        with self._lock:
            if self._ended:
                work.close()
                raise EngineUnavailableError(CLOSED)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for it; an interrupted wait cancels it. Raises EngineUnavailableError: after `stop`, or by it."""
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError as error:
            raise EngineUnavailableError(CLOSED) from error
        finally:
            future.cancel()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, for the code of another loop."""
        try:
            return await asyncio.wrap_future(self.submit(work))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._ended and not (task and task.cancelling()):
                raise EngineUnavailableError(CLOSED) from error
            raise

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancels everything, runs `last` in the loop, ends the thread."""
        with self._lock:
            self._ended = True
        if self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._finish(last, self._loop), self._loop)
        if threading.current_thread() is not self._thread:  # a finalizer may run there, and cannot wait for itself
            self._thread.join()

    async def _finish(self, last: Callable[[], Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        try:
            await last()
        finally:
            loop.stop()

    def _main(self) -> None:
        assert self._loop is not None
        self._loop.run_forever()
        self._loop.close()

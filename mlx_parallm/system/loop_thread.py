"""An asyncio loop in its own thread, for callers that block."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from mlx_parallm.errors import EngineUnavailableError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines that any thread submits. The thread starts with the first one.

    It is a daemon: code that blocks it does not hold up the end of the process. `owner` is what an
    error names after `stop`.
    """

    def __init__(self, name: str, owner: str = "") -> None:
        self._closed = f"{owner or name} is closed"
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._ended = False

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread, and may not wait for it."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine. Raises EngineUnavailableError: after `stop`."""
        with self._lock:
            if self._ended:
                work.close()
                raise EngineUnavailableError(self._closed)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine; an interrupted wait cancels it. Raises EngineUnavailableError:
        it was stopped."""
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError as error:
            if not self._ended:
                raise  # by the work itself
            raise EngineUnavailableError(self._closed) from error
        finally:
            future.cancel()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the same for the code of another loop."""
        try:
            return await asyncio.wrap_future(self.submit(work))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._ended and not (task and task.cancelling()):
                raise EngineUnavailableError(self._closed) from error
            raise

    def stop(
        self,
        last: Callable[[], Coroutine[Any, Any, None]] | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Cancel everything, run `last` in the loop, and wait for the thread's end. May be called
        again.

        Returns False: code that blocks the thread outlasts `timeout_s`.
        """
        with self._lock:
            is_first, self._ended = not self._ended, True
            if self._loop is None:
                return True
            if is_first:
                asyncio.run_coroutine_threadsafe(self._finish(last, self._loop), self._loop)
        if not self.is_current:  # a finalizer may run there, and cannot wait for itself
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def _finish(
        self, last: Callable[[], Coroutine[Any, Any, None]] | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        try:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if last is not None:
                await last()
        finally:
            loop.stop()

    def _main(self) -> None:
        assert self._loop is not None
        try:
            with suppress(SystemExit):  # raised by work, whose future has it; it ends the loop
                self._loop.run_forever()
        finally:
            with self._lock:
                self._ended = True
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

"""StepThread: the thread of one episode, for an environment's code that may block."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from mlx_parallm.environments.episode_state import State

T = TypeVar("T")


class StepThread:
    """Runs the code of one episode that may block, always on the same thread, which starts with the
    first call.

    At the end it calls `last` with the state that the last call returned, even if no caller waited
    for it any more: on the thread, or if none was started, in `__exit__`. A thread cannot be
    killed: one that blocks when its episode has ended is left behind (`abandoned`), and ends as
    soon as it asks for another turn.
    """

    def __init__(
        self, name: str, state: State, last: Callable[[State], None], abandoned: "list[StepThread]"
    ) -> None:
        self.state = state
        self._name, self._abandoned, self._last = name, abandoned, last
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "StepThread":
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            self._last(self.state)
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Return the function's result, or raise its exception. A cancelled call leaves the
        thread behind."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        context, future = contextvars.copy_context(), Future[T]()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(function, *arguments)
            # a future cannot hold the one, the loop not the other
            except (StopIteration, KeyboardInterrupt) as error:
                unlike = RuntimeError(f"{type(error).__name__}: {error}")
                future.set_exception(unlike.with_traceback(error.__traceback__))
            except BaseException as error:  # noqa: BLE001  boundary: an exception of a step ends its episode
                future.set_exception(error)
            else:
                if isinstance(result, State):
                    self.state = result
                future.set_result(result)

        self._jobs.put(job)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.running():
                self._abandoned.append(self)
            raise

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._last(self.state)

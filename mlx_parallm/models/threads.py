"""Threads that use MLX, and the clean-up that MLX needs when they end."""

import atexit
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from typing import TypeVar

import mlx.core as mx

T = TypeVar("T")


def release_streams() -> None:
    """The last thing that a thread does with MLX; in the main thread, at the end of the process.

    Without that MLX 0.32 with MKL aborts when the process leaves (10 of 16 runs).
    """
    mx.synchronize()
    mx.clear_streams()


@contextmanager
def mlx_thread() -> Iterator[None]:
    """Give the thread's streams back after the block, its last use of MLX."""
    try:
        yield
    finally:
        release_streams()


class MLXThread:
    """A thread in which functions that use MLX run one after another, until `close`, which releases
    its streams.

    A thread that has given its streams back cannot use MLX again (0.32.4), so those of a pool will
    not do.
    """

    def __init__(self, name: str = "mlx") -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        outcome: Future[T] = Future()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return  # cancelled before it began
            try:
                outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001 - boundary: it is the caller's
                outcome.set_exception(error)

        self._work.put(run)
        return outcome

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what was submitted, at most so long, and end the thread. May be called again."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        with mlx_thread():
            while (work := self._work.get()) is not None:
                work()


def in_mlx_thread(function: Callable[[], T]) -> T:
    """Runs `function`, which uses MLX, in a thread of its own and waits; raises what it raises."""
    thread = MLXThread()
    outcome = thread.submit(function)
    thread.close()
    return outcome.result()


@cache
def release_streams_at_exit() -> None:
    """Release MLX's streams at exit, which a main thread with MLX needs."""

    def release() -> None:
        with suppress(RuntimeError):  # they are released already
            release_streams()

    atexit.register(release)

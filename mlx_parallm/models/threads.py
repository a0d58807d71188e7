"""Threads that use MLX, and the clean-up that MLX needs when they end."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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
    """Around what a thread does last with MLX: then gives its streams back."""
    try:
        yield
    finally:
        release_streams()


def in_mlx_thread(function: Callable[[], T]) -> T:
    """Runs `function`, which uses MLX, in a thread of its own and waits; raises what it raises.

    A thread that has given its streams back cannot use MLX again (0.32.4), so those of a pool will not do.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        with mlx_thread():
            try:
                outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001 - boundary: it is the caller's
                outcome.set_exception(error)

    thread = threading.Thread(target=run, name="mlx", daemon=True)
    thread.start()
    thread.join()
    return outcome.result()

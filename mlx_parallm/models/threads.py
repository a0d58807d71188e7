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
END_S = 10.0  # for each worker, at the end of the process


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


class _Worker:
    """An OS thread that stays until the process ends.

    MLX keeps a stream, on a CPU its own thread, for each thread that has ever computed, also
    after the streams were cleared (0.32.4): a new thread for each piece of work is never given
    back, and at the system's limit no thread starts any more.
    """

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._main, name="mlx", daemon=True)
        self.thread.start()

    def _main(self) -> None:
        with mlx_thread():
            while (work := self.work.get()) is not None:
                work()
                del work  # it holds its arrays


class _IdleWorkers:
    """Idle workers. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        atexit.register(self._end)

    def take(self) -> _Worker:
        with self._lock:
            return self._workers.pop() if self._workers else _Worker()

    def give_back(self, worker: _Worker) -> None:
        worker.thread.name = "mlx"
        with self._lock:
            self._workers.append(worker)

    def _end(self) -> None:
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.work.put(None)
        for worker in workers:
            worker.thread.join(END_S)


_IDLE = _IdleWorkers()


class MLXThread:
    """A thread in which functions that use MLX run one after another, until `close`.

    Its worker is used again by a later `MLXThread`, so a process has as many as were ever used at
    the same time. Threads of an ordinary pool will not do: each would release its streams at its
    end, or keep MLX from ending in order.
    """

    def __init__(self, name: str = "mlx") -> None:
        self._worker = _IDLE.take()
        self._worker.thread.name = name
        self._lock = threading.Lock()
        self._closed = False
        self._ended = threading.Event()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Raises RuntimeError: it is closed."""
        outcome: Future[T] = Future()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return  # cancelled before it began
            try:
                outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001 - boundary: it is the caller's
                outcome.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError("this MLXThread is closed")
            self._worker.work.put(run)
        return outcome

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return threading.current_thread() is self._worker.thread

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for submitted work, at most so long, and give the worker back. May be called
        again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._worker.work.put(self._give_back)
        if not self.is_current:  # it cannot wait for itself
            self._ended.wait(timeout_s)

    def _give_back(self) -> None:
        _IDLE.give_back(self._worker)
        self._ended.set()


def in_mlx_thread(function: Callable[[], T]) -> T:
    """Run `function`, which uses MLX, in a thread that does, and wait; raise its exception."""
    thread = MLXThread()
    outcome = thread.submit(function)
    thread.close()
    return outcome.result()


_LOADER_STARTS = threading.Lock()


@cache
def _loader() -> MLXThread:
    thread = MLXThread("loader")
    atexit.register(thread.close, END_S)
    return thread


def in_loader_thread(function: Callable[[], T]) -> T:
    """Run `function`, which reads arrays from disk and puts them in their place, in THE thread of
    the process that does so, after earlier ones; wait, and raise its exception.

    Clients cause any number of such reads at once: each in its own thread would leave as many
    threads and streams of MLX behind.
    """
    with _LOADER_STARTS:
        loader = _loader()
    return function() if loader.is_current else loader.submit(function).result()


@cache
def release_streams_at_exit() -> None:
    """Release MLX's streams at exit, which a main thread with MLX needs."""

    def release() -> None:
        with suppress(RuntimeError):  # they are released already
            release_streams()

    atexit.register(release)

"""Threads for reward code, so that it never blocks the environments.

They live as long as the process and are daemons: a reward that never returns must not hold up the
end of a run.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from mlx_parallm.system.loop_thread import LoopThread


class Worker:
    """Runs jobs one at a time on a thread without an event loop: a job may use asyncio.run, as
    under TRL."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None]] | None = None

    def put(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs = self._jobs or self._begin()
            self._jobs.put(job)

    def leave_behind(self) -> None:
        """Move the waiting jobs to a new thread, away from one that does not end."""
        with self._lock:
            left, self._jobs = self._jobs, self._begin()
            with suppress(Empty):
                while left is not None:
                    self._jobs.put(left.get_nowait())

    def _begin(self) -> "SimpleQueue[Callable[[], None]]":
        jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

        def work() -> None:
            while True:
                jobs.get()()

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return jobs


FUNCTIONS = Worker("rewards")
COMPUTERS = Worker("reward computers")  # a separate thread: a computer may wait for functions


# one loop, so that a client that a user's module keeps stays on it
ASYNC_FUNCTIONS = LoopThread("async rewards")

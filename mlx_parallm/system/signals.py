"""Shutdown signals, which a thread receives in `sigwait`. Imports no MLX.

A Python signal handler runs only when the main thread next executes bytecode, which is after the
running `mx.eval`. So `cli` calls `block_shutdown_signals` before any thread starts (later threads
inherit the mask), and `daemon` starts one
`ShutdownWatcher`: the first signal calls back, a second one ends the process at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import ClassVar

LAST_WORDS_S = 2.0
SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def block_shutdown_signals() -> None:
    """Block SIGINT, SIGTERM and SIGHUP in this thread and those it starts; until a watcher runs
    they stay pending.

    Child processes inherit the mask too: unblock it in a child that SIGTERM is to stop.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN_SIGNALS)


class ShutdownWatcher:
    """Calls `on_first(signal name)` in a new thread at the first signal; the second exits with 128
    + its number.

    `timeout`, `make` and container runtimes deliver one request twice (to the process and to its
    group): signals within `same_request_s` seconds count as the first one. SIGHUP stays ignored
    under `nohup`.
    """

    def __init__(self, on_first: Callable[[str], None], *, same_request_s: float = 0.25) -> None:
        self._on_first = on_first
        self._same_request_s = same_request_s
        self._signals = {
            s
            for s in SHUTDOWN_SIGNALS
            if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN
        }
        self._thread = threading.Thread(target=self._watch, name="shutdown-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread, after `block_shutdown_signals`. A pending signal is delivered now."""
        self._thread.start()

    def _watch(self) -> None:
        first = signal.sigwait(self._signals)
        first_at = time.monotonic()
        # In a thread, so that a callback that hangs cannot keep the second signal from being seen.
        name = signal.Signals(first).name
        threading.Thread(
            target=self._on_first, args=(name,), name="on-shutdown", daemon=True
        ).start()
        while True:
            again = signal.sigwait(self._signals)
            if time.monotonic() - first_at >= self._same_request_s:
                os._exit(128 + again)


class EndLimit:
    """Ends the process if what is left to do takes too long. Any thread.

    Foreign code that spins (`while True: pass`) cannot be stopped, and leaves other threads so
    little time that an orderly end takes minutes.
    """

    exit_code: ClassVar[int] = 0
    """Of a process that has done its work. A supervisor's child has another one
    (`cli/supervisor.py`)."""

    def __init__(self, exit_code: int | None = None) -> None:
        """`exit_code`: of this limit alone."""
        self._exit_code = exit_code
        self._cancelled = threading.Event()
        self._started = False

    def start(self, seconds: float, on_end: Callable[[], None] = lambda: None) -> None:
        """Call `on_end` and end the process with its exit code after so many seconds, unless
        `cancel` comes first."""
        if self._started:
            return
        self._started = True

        def wait() -> None:
            if not self._cancelled.wait(seconds):
                threading.Thread(target=on_end, daemon=True).start()
                self._cancelled.wait(LAST_WORDS_S)  # no longer, whatever it does
                os._exit(self.exit_code if self._exit_code is None else self._exit_code)

        threading.Thread(target=wait, name="end-limit", daemon=True).start()

    def cancel(self) -> None:
        self._cancelled.set()

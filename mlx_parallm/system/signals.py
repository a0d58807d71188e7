"""Shutdown signals, which a thread receives in `sigwait`. Imports no MLX.

A Python signal handler runs only when the main thread next executes bytecode, which is after the
running `mx.eval`. So a command makes one `Shutdown` before any thread starts: later threads inherit
its mask.

    with Shutdown() as shutdown:
        shutdown.stop                 for what waits or polls
        with shutdown.interrupts():   StopRequested in the main thread, while it loads or computes

What neither of them ends is ended by an `EndLimit`; a second signal ends the process at once.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from types import FrameType
from typing import ClassVar

from mlx_parallm.system.command_start import SHUTDOWN_SIGNALS

LAST_WORDS_S = 2.0
INTERRUPT = signal.SIGURG
"""Sent to the main thread alone. Its default action is to do nothing."""
END_S = 15.0  # limit of a command that has no other


class StopRequested(KeyboardInterrupt):
    """A signal asks the command to end. Its text is the signal's name."""


def block_shutdown_signals() -> None:
    """Block SIGINT, SIGTERM and SIGHUP in this thread and those it starts; until a watcher runs
    they stay pending.

    Child processes inherit the mask too: unblock it in a child that SIGTERM is to stop.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN_SIGNALS)


def unblock_shutdown_signals() -> None:
    """Let the signals have their usual effect, also if the parent process has blocked them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHUTDOWN_SIGNALS)


class ShutdownWatcher:
    """Calls `on_first(signal name)` in another thread at the first signal; the second exits with
    128 + its number.

    `timeout`, `make` and container runtimes deliver one request twice (to the process and to its
    group): signals within `same_request_s` seconds count as the first one. SIGHUP stays ignored
    under `nohup`.
    """

    def __init__(self, on_first: Callable[[str], None], *, same_request_s: float = 0.25) -> None:
        self._on_first = on_first
        self._same_request_s = same_request_s
        self.signals = {
            s
            for s in SHUTDOWN_SIGNALS
            if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN
        }
        self._first: SimpleQueue[str | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shutdown-watcher", daemon=True)

    def start(self) -> None:
        """Start the threads, after `block_shutdown_signals`. A pending signal is delivered now.

        Both start here: at the first signal the system may have no thread left.
        """
        self._thread.start()
        threading.Thread(target=self._call_back, name="on-shutdown", daemon=True).start()

    def send(self, number: int) -> None:
        """Let it receive a signal that another thread has received."""
        if number in self.signals and self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, number)

    def end(self) -> None:
        """End the threads; a signal that comes later is not theirs."""
        self._ended.set()
        self.send(signal.SIGTERM)
        self._thread.join()

    def _call_back(self) -> None:
        # A callback that hangs must not keep the second signal from being seen.
        if (name := self._first.get()) is not None:
            self._on_first(name)

    def _watch(self) -> None:
        first = signal.sigwait(self.signals)
        if self._ended.is_set():
            self._first.put(None)
            return
        first_at = time.monotonic()
        self._first.put(signal.Signals(first).name)
        while not self._ended.is_set():
            again = signal.sigwait(self.signals)
            if time.monotonic() - first_at >= self._same_request_s and not self._ended.is_set():
                os._exit(128 + again)


class Shutdown:
    """The end of a command by a signal: a context manager, in the main thread of a process.

    Args:
        tell: called with the signal's name at the first one.

    Attributes:
        stop: is set at the first signal.
        limit_s: the process ends so long after the first signal, with exit code 0; None: only
            within `interrupts`.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.stop, self._tell = threading.Event(), tell
        self.limit_s: float | None = None
        self._name, self._interrupting = "", False
        self._limit = EndLimit()
        self._watcher = ShutdownWatcher(self._first)
        self._undo = ExitStack()

    def __enter__(self) -> "Shutdown":
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN_SIGNALS)
        self._undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        self._watcher.start()
        self._undo.callback(self._watcher.end)
        self._set_handler(INTERRUPT, self._interrupt)
        self._take_from_older_threads()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore what was; after a signal nothing is left to restore, and the limit continues."""
        if not self.stop.is_set():
            self._limit.cancel()
            self._undo.close()

    @contextmanager
    def interrupts(self, limit_s: float = END_S) -> Iterator[None]:
        """Raise StopRequested within the block, in the main thread, at the first signal; end the
        process if that takes longer than the limit."""
        before, self.limit_s = self.limit_s, limit_s if self.limit_s is None else self.limit_s
        self._interrupting = True
        try:
            if self.stop.is_set():  # the signal came before the block
                self._limit.start(self.limit_s)
                raise StopRequested(self._name)
            yield
        finally:
            self._interrupting, self.limit_s = False, before

    def _first(self, name: str) -> None:
        self._name = name
        self.stop.set()
        if self.limit_s is not None:
            self._limit.start(self.limit_s)
        if self._interrupting:
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
        if self._tell is not None:
            self._tell(name)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupting and self.stop.is_set():
            self._interrupting = False  # once: what cleans up is not interrupted
            raise StopRequested(self._name)

    def _take_from_older_threads(self) -> None:
        """A signal may reach a thread that is older than the mask, such as NumPy's. Python's
        handler in C then writes its number into the wake-up socket at once, whatever the main
        thread does."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)

        def relay() -> None:
            with reader:
                while received := reader.recv(1):
                    self._watcher.send(received[0])

        threading.Thread(target=relay, name="shutdown-relay", daemon=True).start()
        self._undo.callback(writer.close)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._undo.callback(signal.set_wakeup_fd, before)
        for number in self._watcher.signals:
            self._set_handler(number, lambda *_: None)

    def _set_handler(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._undo.callback(signal.signal, number, signal.signal(number, handler))


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
        self._cancelled, self._begun = threading.Event(), threading.Event()
        self._seconds = 0.0
        self._on_end: Callable[[], None] = lambda: None
        # now: at the end the system may have no thread left
        self._thread = threading.Thread(target=self._wait, name="end-limit", daemon=True)
        self._thread.start()

    def start(
        self,
        seconds: float,
        on_end: Callable[[], None] = lambda: None,
        exit_code: int | None = None,
    ) -> None:
        """Call `on_end` and end the process with its exit code after so many seconds, unless
        `cancel` comes first. `exit_code`: another one."""
        if not self._begun.is_set():
            self._seconds, self._on_end = seconds, on_end
            self._exit_code = self._exit_code if exit_code is None else exit_code
            self._begun.set()

    def cancel(self) -> None:
        """Let the process continue; the limit's thread has ended then."""
        self._cancelled.set()
        self._begun.set()
        self._thread.join()

    def _wait(self) -> None:
        self._begun.wait()
        if not self._cancelled.wait(self._seconds):
            with suppress(RuntimeError):  # the system has no thread left
                threading.Thread(target=self._on_end, daemon=True).start()
            self._cancelled.wait(LAST_WORDS_S)  # no longer, whatever it does
            os._exit(self.exit_code if self._exit_code is None else self._exit_code)

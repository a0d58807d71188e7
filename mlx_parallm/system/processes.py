"""A program that was started here, and everything that it started: all of it ends with it.

A server may end while its children continue, and a child may leave its process group. All of them
inherit a variable of the environment, so they are found by that; and the group by its number.
"""

import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress

import psutil

MARK = "MLX_PARALLM_FAMILY"
TERMINATION_S = 2.0  # between SIGTERM and SIGKILL
POLL_S = 0.01


def marked(environment: Mapping[str, str] | None = None) -> tuple[dict[str, str], str]:
    """Return the environment for a program's start (None: over this process's own), and the mark by
    which its family is found."""
    mark = uuid.uuid4().hex
    return {**(os.environ if environment is None else environment), MARK: mark}, mark


def of_no_family() -> dict[str, str]:
    """Return the environment for a program that outlives whoever has started this process."""
    return {name: value for name, value in os.environ.items() if name != MARK}


def end_family(group: int, mark: str, *, patience_s: float = TERMINATION_S) -> None:
    """End what is left of a program that was started in its own session: SIGTERM, then
    SIGKILL after `patience_s`. Blocks until then; whoever started the program reaps it.

    Args:
        group: the program's process id.
        mark: as `marked` gave it.
    """
    for number, seconds in ((signal.SIGTERM, patience_s), (signal.SIGKILL, patience_s)):
        left = [process for process in _family(mark) if _is_alive(process)]
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(number)
        until = time.monotonic() + seconds
        while any(map(_is_alive, left)) and time.monotonic() < until:
            time.sleep(POLL_S)


def _family(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or it has ended
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                yield process


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False

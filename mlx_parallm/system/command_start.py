"""Holds the signals of a command before anything is imported that takes time.

A signal in the middle of an import would end in Python's traceback. A blocked one stays pending
until `cli/table.py` lets it in, which knows the command. Importing this module holds them; in any
other process it does nothing.
"""

import os
import signal
import sys

SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _is_command() -> bool:
    if sys.argv[:1] == ["-m"]:  # Python imports the package first, to find its `__main__`
        return ("-m", "mlx_parallm") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    name = sys.argv[0].rpartition("/")[2] if sys.argv else ""
    if not name.startswith("mlx_parallm") or "." in name:
        return False
    with open(sys.argv[0], "rb") as script:  # noqa: PTH123 - pathlib would be the longest import
        return b"from mlx_parallm.cli import" in script.read(1000)


IS_COMMAND = _is_command()
"""Whether this process is one of the installed scripts, or `python -m mlx_parallm`."""


def end_at_once(exit_code: int) -> None:
    """Let a signal in, also if the parent process has blocked it: until the command has a
    `system.signals.Shutdown`, it ends the process, with this exit code."""
    for number in SHUTDOWN_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup
            signal.signal(number, lambda *_: os._exit(exit_code))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHUTDOWN_SIGNALS)


if IS_COMMAND:
    signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN_SIGNALS)

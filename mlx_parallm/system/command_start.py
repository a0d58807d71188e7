"""Holds the signals of a command before anything is imported that takes time.

A signal in the middle of an import would end in Python's traceback. A blocked one stays pending
until `cli/table.py` lets it in, which knows the command. Importing this module holds them; in any
other process it does nothing.
"""

import os
import signal
import sys

SCRIPTS = {
    *("convert_adapter", "dashboard", "doctor", "eval", "explain", "export", "mcp", "merge_lora"),
    *("pipeline", "prompt_policy", "replay", "rollouts", "serve", "show_checkpoint", "traces"),
    "train",
}
"""What follows `mlx_parallm_` in the names of the installed scripts."""
SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_command() -> bool:
    """Return whether this process is one of the installed scripts, or `python -m mlx_parallm`."""
    if sys.argv[:1] == ["-m"]:  # Python imports the package first, to find its `__main__`
        return ("-m", "mlx_parallm") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    name = sys.argv[0].rpartition("/")[2] if sys.argv else ""
    return name == "mlx_parallm" or name.removeprefix("mlx_parallm_") in SCRIPTS


def end_at_once(exit_code: int) -> None:
    """Let a signal in, also if the parent process has blocked it: until the command has a
    `system.signals.Shutdown`, it ends the process, with this exit code."""
    for number in SHUTDOWN_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup
            signal.signal(number, lambda *_: os._exit(exit_code))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHUTDOWN_SIGNALS)


if is_command():
    signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN_SIGNALS)

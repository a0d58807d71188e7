"""Signals as an interactive shell gives them to its children."""

import signal


def default_signals() -> None:
    """For `preexec_fn`: a runner started by `nohup` or in the background passes ignored SIGHUP
    and SIGINT on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)

"""Keeps a Mac from falling asleep while it trains. No MLX; does nothing on other systems."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_parallm.system.log import get_logger

log = get_logger("power")


@contextmanager
def kept_awake(platform: str = sys.platform) -> Iterator[None]:
    """Prevent idle sleep (`caffeinate -i`) until the block, or this process, ends."""
    if platform != "darwin":
        yield
        return
    quiet = subprocess.DEVNULL
    try:
        holder = subprocess.Popen(
            ["caffeinate", "-i", "-w", str(os.getpid())], stdin=quiet, stdout=quiet, stderr=quiet
        )
    except OSError as error:
        log.warning(
            "this machine may sleep during training: caffeinate cannot be run", error=str(error)
        )
        yield
        return
    try:
        yield
    finally:
        holder.kill()  # not SIGTERM: the child has inherited our blocked signals
        holder.wait()

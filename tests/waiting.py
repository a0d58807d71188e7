"""A wait for what other threads and processes do, which say so by nothing else."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)  # another process or thread, whose state nothing announces

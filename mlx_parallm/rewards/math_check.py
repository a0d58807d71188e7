"""`builtin:math`: compares answers with math-verify in a separate process.

`math` → `MathWorker` → `math_worker.py`. The process is separate because sympy may never finish
with a model's answer (9**9**9**9) and only killing the process stops that; math-verify's time-outs
also need the main thread.
"""

import json
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rewards.part_tools import by_column
from mlx_parallm.system.packages import require

WORKER = Path(__file__).with_name("math_worker.py")
START_S = 120.0  # sympy takes seconds to import on a busy machine


def math(*, column: str = "answer", timeout_s: float = 5.0) -> Callable[..., Any]:
    """1 if the answer (its last \\boxed{…}, else its last expression) equals the reference, else
    0; None if the reference cannot be parsed as mathematics. A comparison that takes longer than
    `timeout_s` counts as different.

    Raises ConfigError: math-verify is not installed.
    """
    require("builtin:math", "math_verify")
    worker = MathWorker(timeout_s)
    return by_column(lambda text, reference: worker.score(str(reference), text), column)


class MathWorker:
    """One process for all comparisons; one that takes too long is replaced. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def score(self, reference: str, answer: str) -> float | None:
        """Raises RolloutRejectedError: the process cannot be started."""
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the process has died: there will be no answer
                process.stdin.write(json.dumps([reference, answer]) + "\n")
                process.stdin.flush()
            line = _line(process, self._timeout_s)
            if not line:
                self._process = None
                _end(process)
                return 0.0
        score: float | None = json.loads(line)
        return score

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )
        weakref.finalize(self, _end, process)
        if _line(process, START_S) != "ready\n":
            _end(process)
            raise RolloutRejectedError("math: math-verify cannot be started")
        return process


def _line(process: "subprocess.Popen[str]", timeout_s: float) -> str:
    """Return the next line; empty: none came in time, or the process has ended."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if ready else ""


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with suppress(BrokenPipeError), process:
        pass

"""Signs of life for a supervisor outside of the process (`cli/supervisor.py`). No MLX.

    <directory>/process    a thread touches it: it stops when a call in C holds the interpreter
    <directory>/engine     touched by each step, at rest while there is none
    <directory>/trainer    touched by each evaluation of a training step, at rest outside of them
    <directory>/writer     touched when a checkpoint begins, at rest when it is written

A file's time is the sign; the time 0 says that the part has no work. Its time of access is the
number of signs so far, of which a quick part gives many in a second. A process hangs when one of
them is silent: its own thread cannot tell, since a driver that hangs may hold the interpreter.
"""

import os
import threading
import time
from pathlib import Path
from typing import ClassVar

PAUSED = 80
"""Exit code of a process that its supervisor is to start again after a rest: it has ended at a
checkpoint (rl_training.restart_every)."""
EVERY_S = 1.0
FIRST, COLD = 15, 16
"""A part may be silent `FIRST` times as long up to its sign number `COLD`: a GPU's kernels are
compiled in its first evaluations, and how long one takes is not known yet."""
SILENCES = 10  # times the longest so far: more is a hang
PROCESS, ENGINE, TRAINER, WRITER = "process", "engine", "trainer", "writer"


class Heartbeat:
    """The sign of one part, from one thread. Without a `directory` it costs nothing."""

    directory: ClassVar[Path | None] = None
    """Where a supervisor looks, or None. Set before the parts are made."""

    def __init__(self, part: str) -> None:
        self._file: Path | None = None
        self._due, self._signs = 0.0, 0
        if self.directory is not None and self.directory.is_dir():
            self._file = self.directory / part
            self._file.touch()
            self.rest()

    def beat(self) -> None:
        """Say that the part works."""
        if self._file is None:
            return
        self._signs += 1
        if (now := time.monotonic()) >= self._due or self._signs <= COLD:
            self._due = now + EVERY_S
            self._touch(time.time())

    def rest(self) -> None:
        """Say that the part has no work."""
        if self._file is not None and self._due >= 0.0:
            self._due = -1.0
            self._touch(0.0)

    def _touch(self, at: float) -> None:
        assert self._file is not None
        try:
            os.utime(self._file, (self._signs, at))
        except OSError:  # the supervisor has gone: nobody looks any more
            self._file = None


def supervised() -> bool:
    """Return whether a supervisor listens to this process, and starts it again."""
    return Heartbeat.directory is not None


def beat_for_process() -> None:
    """Start a thread that touches `process` until the process ends."""
    heartbeat = Heartbeat(PROCESS)

    def beat() -> None:
        while True:
            heartbeat.beat()
            time.sleep(EVERY_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class Listener:
    """Hears one process for its supervisor, by its own clock: a machine that sleeps, or a
    supervisor that was stopped, is not a process that hangs.

    Args:
        limit_s: a part that works and is silent for longer hangs; where evaluations take long,
            for `SILENCES` times as long as its longest silence so far. A checkpoint may take
            `FIRST` times as long: a slow disk is not a hang.
    """

    def __init__(self, directory: Path, limit_s: float) -> None:
        self._directory, self._limit_s = directory, limit_s
        self._times: dict[str, float] = {}  # last time of each sign
        self._silent: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._signs: dict[str, float] = {}
        self._looked = time.monotonic()

    def look(self) -> tuple[str, float] | None:
        """Return the part that hangs, and for how many seconds it has been silent. Call it about
        once a second."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * EVERY_S), now
        for part in (PROCESS, ENGINE, TRAINER, WRITER):
            try:
                file = (self._directory / part).stat()
            except OSError:  # not there yet
                continue
            beat, self._signs[part] = file.st_mtime, file.st_atime
            if beat == 0.0 or beat != self._times.get(part):
                # what ended with a rest was silent, too
                longest = max(self._longest.get(part, 0.0), self._silent.get(part, 0.0))
                self._longest[part] = longest
                self._times[part], self._silent[part] = beat, 0.0
                continue
            self._silent[part] += passed
            if self._silent[part] > self._limit_of(part):
                return part, self._silent[part]
        return None

    def _limit_of(self, part: str) -> float:
        if part == PROCESS:
            return self._limit_s
        limit = max(self._limit_s, SILENCES * self._longest.get(part, 0.0))
        at_length = part == WRITER or self._signs.get(part, 0.0) < COLD
        return FIRST * limit if at_length else limit

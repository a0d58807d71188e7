"""Memory that this process takes, and the guard that acts before the system kills it.

What counts is what the system counts: on macOS the physical footprint (the GPU's buffers and
compressed pages are in it, which resident memory leaves out), on Linux resident memory without
mapped files, whose pages the system takes back when it needs them; with CUDA the memory of the GPU
too (`hardware.memory_use`).
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

GIB = 2**30
LOOK_S = 0.5
BELOW = 0.97
"""Of the mark: admission continues once less is used."""
IDLE_PAUSE_S = 30.0
"""A pause in which nothing computes and nothing is given back for so long helps nobody."""
LIBPROC = "/usr/lib/libproc.dylib"
RUSAGE_INFO_V0 = 0
RESIDENT = ("RssAnon:", "RssShmem:")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that this process takes of a memory. `place`: "process" (of the machine) or "gpu"."""

    place: str
    used: int
    whole: int

    @property
    def share(self) -> float:
        return self.used / self.whole if self.whole else 0.0

    def __str__(self) -> str:
        of = "the GPU's memory" if self.place == "gpu" else "the machine's memory"
        sizes = f"{self.used / GIB:.1f} of {self.whole / GIB:.1f} GiB"
        return f"{sizes} of {of} ({self.share:.0%})"


class _RusageV0(ctypes.Structure):
    """`rusage_info_v0` of <sys/resource.h> on macOS."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "user_time",
                "system_time",
                "pkg_idle_wkups",
                "interrupt_wkups",
                "pageins",
                "wired_size",
                "resident_size",
                "phys_footprint",
                "proc_start_abstime",
                "proc_exit_abstime",
            )
        ),
    )


def process_bytes() -> int:
    """Return the bytes that this process takes of the machine's memory."""
    measure = {"darwin": _physical_footprint, "linux": _resident_without_files}.get(sys.platform)
    return (measure() if measure else 0) or int(psutil.Process().memory_info().rss)


def _resident_without_files(status: Path = Path("/proc/self/status")) -> int:
    """Return Linux's resident memory of this process, without pages of mapped files: a checkpoint
    that is mapped is in its resident set as a whole once it was read. 0: the system does not say
    (older than 4.5)."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    sizes = [int(line.split()[1]) for line in lines if line.startswith(RESIDENT)]  # kB
    return 1024 * sum(sizes)


def _physical_footprint() -> int:
    """Return macOS's physical footprint of this process; 0: the system does not say."""
    usage = _RusageV0()
    try:
        ask = ctypes.CDLL(LIBPROC).proc_pid_rusage
    except (OSError, AttributeError):
        return 0
    failed = ask(os.getpid(), RUSAGE_INFO_V0, ctypes.byref(usage))
    return 0 if failed else int(usage.phys_footprint)


def machine_bytes() -> int:
    """Return the memory that this process may have: the machine's, or less in a container."""
    return min([int(psutil.virtual_memory().total), *container_limits()])


def container_limits(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Return the bounds of memory of this process's control groups (Docker, systemd), of version 1
    or 2; none outside of Linux."""
    limits, lines = list[int](), list[str]()
    with suppress(OSError):
        lines = groups.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                with suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((folder / name).read_text()))
    return limits


def others_holding(share: float = 0.05, count: int = 3) -> list[str]:
    """Name the other processes that hold at least this share of the machine's memory, the largest
    first, as "ollama 12.3 GiB". macOS shows a process only what belongs to its user."""
    whole, held = machine_bytes(), list[tuple[int, str]]()
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is None or process.info["pid"] == os.getpid() or memory.rss < share * whole:
            continue
        held.append((memory.rss, process.info["name"] or str(process.info["pid"])))
    return [f"{name} {size / GIB:.1f} GiB" for size, name in sorted(held, reverse=True)[:count]]


class Admission(Protocol):
    """The calls of the guard to an engine. They may come from any thread."""

    def pause(self) -> None:
        """Let new requests wait."""

    def resume(self) -> None:
        """Let them in again."""

    def release(self) -> None:
        """Give back caches that nobody needs."""

    def busy(self) -> bool:
        """Whether something computes, and may give memory back when it ends."""


class MemoryGuard:
    """Two marks, shares of the memory: at `pause` caches are given back and, where that was not
    enough, new requests wait; at `stop` the process is asked to save and end, before the system
    kills it. A mark of 1 does nothing.

    Args:
        on_stop: asks for the end in order; called once, with a sentence.
        measure: as `hardware.memory_use`.
    """

    def __init__(
        self,
        pause: float,
        stop: float,
        admission: Admission,
        on_stop: Callable[[str], None],
        measure: Callable[[], Sequence[MemoryUse]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pause, self.stop = pause, stop
        self._admission, self._on_stop = admission, on_stop
        self.measure, self._clock = measure, clock
        self.stopped: str | None = None
        """Why the process was asked to end; None: it was not."""
        self.paused = False
        self._released = self._goes_on = False  # since the memory was last below `pause`
        self._idle_since: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look every LOOK_S in its own thread."""
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Measure once, and act."""
        use = max(self.measure(), key=lambda each: each.share)
        if use.share < BELOW * self.pause:
            self._released = self._goes_on = False
            if self.paused:
                self.paused = False
                self._admission.resume()
                _log().info("memory: new requests are let in again", used=str(use))
        over_stop = self.stop < 1 and use.share >= self.stop
        over_pause = self.pause < 1 and use.share >= self.pause
        if not (over_pause or over_stop):
            if self.paused:  # less than the mark, but not yet below BELOW of it
                self._end_vain_pause(use)
            return
        if not self._released:  # caches count too: the next look says what is left
            self._released = True
            self._admission.release()
            return
        if over_pause and not self.paused and not self._goes_on:
            self.paused, self._idle_since = True, None
            self._admission.pause()
            mark = f"server.memory_pause = {self.pause:g}"
            _log().warning("memory: new requests wait until it falls", used=str(use), mark=mark)
        if over_stop and self.stopped is None:
            self.stopped = (
                f"the process took {use}, server.memory_stop = {self.stop:g}: it ended in order"
                " before the system would have killed it; choose a smaller model, batch or"
                " server.kv_cache_bytes (docs/operations.md)"
            )
            _log().error("memory: ending in order", used=str(use))
            self._on_stop(self.stopped)
        elif self.paused:
            self._end_vain_pause(use)

    def _end_vain_pause(self, use: MemoryUse) -> None:
        """Let requests in again where nothing runs that could give memory back."""
        now = self._clock()
        if self._admission.busy():
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
            self._admission.release()  # for requests that have ended meanwhile
        elif now - self._idle_since >= IDLE_PAUSE_S:
            self.paused, self._goes_on = False, True
            self._admission.resume()
            _log().warning(
                "memory: nothing runs and it does not fall, so requests are let in again",
                used=str(use),
                advice="raise server.memory_pause, or choose a smaller model",
            )

    def health(self) -> str | None:
        """Return a sentence while admission is paused or the process ends; else None."""
        if self.stopped is not None:
            return f"memory: {self.stopped}"
        if not self.paused:
            return None
        use = max(self.measure(), key=lambda each: each.share)
        return f"memory: {use} is taken, so new requests wait (server.memory_pause)"


def _log() -> Any:
    """The log loads rich, which a command's help does without."""
    from mlx_parallm.system.log import get_logger

    return get_logger("memory")

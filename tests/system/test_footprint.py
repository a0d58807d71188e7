"""The memory of this process, and the guard's two marks, with numbers instead of a full machine."""

import ctypes
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mlx_parallm.system import footprint, hardware
from mlx_parallm.system.footprint import (
    IDLE_PAUSE_S,
    MemoryGuard,
    MemoryUse,
    container_limits,
    machine_bytes,
    process_bytes,
)
from mlx_parallm.system.hardware import memory_use
from tests.altered import Altered


class Engine:
    """Notes what the guard does with it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.computes = True

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def release(self) -> None:
        self.calls.append("release")

    def busy(self) -> bool:
        return self.computes


class Guarded:
    def __init__(self, pause: float = 0.85, stop: float = 0.95) -> None:
        self.engine, self.share, self.now = Engine(), 0.0, 0.0
        self.guard = MemoryGuard(
            pause,
            stop,
            self.engine,
            lambda reason: self.engine.calls.append("stop"),
            lambda: [MemoryUse("gpu", 1, 100), MemoryUse("process", round(self.share * 100), 100)],
            lambda: self.now,
        )

    def looks(self, *percents: int) -> list[str]:
        """What the guard does while so much is used, one look after the other."""
        before = len(self.engine.calls)
        for percent in percents:
            self.share = percent / 100
            self.guard.look()
        return self.engine.calls[before:]


@pytest.mark.parametrize(
    ("percents", "calls"),
    [
        ((10, 84, 84), []),
        ((90, 80), ["release"]),  # caches were enough
        ((90, 90, 90), ["release", "pause"]),
        ((90, 90, 84, 84), ["release", "pause"]),  # just below the mark is not enough
        ((90, 90, 82), ["release", "pause", "resume"]),
        ((90, 90, 82, 90, 90), ["release", "pause", "resume", "release", "pause"]),
        ((99, 80), ["release"]),
        ((99, 99, 99), ["release", "pause", "stop"]),
        ((90, 90, 99), ["release", "pause", "stop"]),
    ],
)
def test_two_marks(percents: tuple[int, ...], calls: list[str]) -> None:
    guarded = Guarded()
    assert guarded.looks(*percents) == calls
    assert bool(guarded.guard.stopped) == ("stop" in calls)
    sentence = guarded.guard.health() or ""
    assert bool(sentence) == (calls[-1:] in (["pause"], ["stop"]))


def test_a_mark_of_1_does_nothing() -> None:
    assert Guarded(1, 1).looks(99, 99, 100, 120) == []
    assert Guarded(0.5, 1).looks(99, 100, 120) == ["release", "pause"]


def test_a_pause_that_helps_nobody_ends() -> None:
    """A model that takes 90 % itself is served all the same."""
    guarded = Guarded()
    assert guarded.looks(90, 90, 90) == ["release", "pause"]
    guarded.now = 10 * IDLE_PAUSE_S
    assert guarded.looks(90) == [], "what runs may give memory back"
    guarded.engine.computes = False
    assert guarded.looks(90) == ["release"]
    guarded.now += IDLE_PAUSE_S
    assert guarded.looks(90, 90, 90) == ["resume"] and guarded.guard.health() is None
    assert guarded.looks(99) == ["stop"], "the other mark holds"


def test_a_pause_ends_where_memory_stays_just_below_the_mark() -> None:
    guarded = Guarded()
    assert guarded.looks(90, 90, 84) == ["release", "pause"]
    guarded.engine.computes = False
    assert guarded.looks(84) == ["release"]
    guarded.now += IDLE_PAUSE_S
    assert guarded.looks(84) == ["resume"] and guarded.guard.health() is None


def test_this_process() -> None:
    resident = psutil.Process().memory_info().rss
    assert 0.3 * resident < process_bytes() < 2 * resident


@pytest.mark.skipif(sys.platform != "linux", reason="of /proc")
def test_files_that_are_mapped_are_no_memory_of_this_process(tmp_path: Path) -> None:
    """A checkpoint of 30 GB that is mapped and read would have been the end of a run."""
    file, size = tmp_path / "weights", 32 << 20
    file.write_bytes(bytes(size))
    resident, before = psutil.Process().memory_info().rss, process_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[::4096])
        assert psutil.Process().memory_info().rss > resident + size // 2
        assert process_bytes() < before + size // 4
    taken = bytearray(b"x" * size)
    assert process_bytes() > before + size // 2 and len(taken) == size


def test_resident_memory_counts_where_the_system_says_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert footprint._resident_without_files(tmp_path / "missing") == 0
    (tmp_path / "old").write_text("VmRSS:\t  900 kB\n")
    assert footprint._resident_without_files(tmp_path / "old") == 0
    (tmp_path / "new").write_text("RssAnon:\t 3 kB\nRssFile:\t 900 kB\nRssShmem:\t 1 kB\n")
    assert footprint._resident_without_files(tmp_path / "new") == 4096
    monkeypatch.setattr(footprint, "sys", Altered(sys, platform="freebsd14"))
    resident = psutil.Process().memory_info().rss
    assert 0.9 * resident < process_bytes() < 1.1 * resident


def test_the_physical_footprint_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """As proc_pid_rusage fills rusage_info_v0: 16 bytes of an id, then numbers of 8; the
    footprint is the eighth."""

    def proc_pid_rusage(pid: int, flavor: int, buffer: object) -> int:
        assert (pid, flavor) == (os.getpid(), 0)
        numbers = (ctypes.c_uint64 * 12).from_buffer(buffer._obj)  # type: ignore[attr-defined]
        numbers[:] = [*range(9), 7 << 30, 10, 11]
        return 0

    libraries = {footprint.LIBPROC: SimpleNamespace(proc_pid_rusage=proc_pid_rusage)}
    monkeypatch.setattr(footprint, "sys", Altered(sys, platform="darwin"))
    monkeypatch.setattr(footprint, "ctypes", Altered(ctypes, CDLL=libraries.__getitem__))
    assert process_bytes() == 7 << 30


@pytest.mark.parametrize(
    ("group", "file", "name"),
    [
        ("0::/system.slice/x", "system.slice/x", "memory.max"),
        ("0::/system.slice/x", "system.slice", "memory.max"),
        ("0::/", "", "memory.max"),
        ("4:memory:/docker/x", "memory/docker/x", "memory.limit_in_bytes"),
        ("4:cpu,memory:/y", "memory", "memory.limit_in_bytes"),
    ],
)
def test_a_container_has_less(
    group: str, file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the two versions of control groups write it, of the group itself or one above it."""
    groups, root = tmp_path / "groups", tmp_path / "root"
    groups.write_text(f"7:pids:/z\n{group}\n")
    (root / file).mkdir(parents=True)
    (root / "memory.max").write_text("max\n")
    (root / file / name).write_text("123456\n")
    assert container_limits(root, groups) == [123456]
    assert container_limits(root, tmp_path / "none") == []
    monkeypatch.setattr(footprint, "container_limits", lambda: [5 << 20, 6 << 20])
    assert machine_bytes() == 5 << 20


def test_a_gpus_memory_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = pytest.importorskip("mlx.core")
    [alone] = memory_use()
    assert alone.place == "process" and alone.whole == machine_bytes()
    assert memory_use(2)[0].whole == alone.whole // 2
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 80 << 30, "free_memory": 1})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 30 << 30)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 10 << 30)
    assert str(memory_use()[0]) == "40.0 of 80.0 GiB of the GPU's memory (50%)"
    assert memory_use()[1].place == "process"
    for module in (footprint, hardware):  # one memory, in which both are
        monkeypatch.setattr(module, "sys", Altered(sys, platform="darwin"))
    monkeypatch.setattr(footprint, "_physical_footprint", lambda: 50 << 30)
    assert [use.used >> 30 for use in memory_use()] == [50]

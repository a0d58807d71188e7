"""Signs of life, with a clock of the test's own."""

import os
from pathlib import Path

import pytest

from mlx_parallm.system.device import heartbeat
from mlx_parallm.system.device.heartbeat import (
    COLD,
    ENGINE,
    FIRST,
    PROCESS,
    SILENCES,
    WRITER,
    Heartbeat,
    Listener,
)
from mlx_parallm.system.serve_priority import Turns
from tests.clock import Clock


class FileClock(Clock):
    """Seconds of `time.monotonic`, and of files."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(100.0)
        self._directory = directory
        monkeypatch.setattr(heartbeat, "time", self)

    def beat(self, part: str, signs: int = COLD) -> None:
        (self._directory / part).touch()
        os.utime(self._directory / part, (signs, self.now))

    def hangs(self, listener: Listener, seconds: int) -> str | None:
        for _ in range(seconds):
            self.now += 1
            if (found := listener.look()) is not None:
                return found[0]
        return None


def test_a_part_that_has_work_and_is_silent_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, listener = FileClock(tmp_path, monkeypatch), Listener(tmp_path, 40)
    clock.beat(PROCESS)
    assert clock.hangs(listener, 39) is None
    clock.beat(ENGINE)
    clock.beat(PROCESS)
    assert clock.hangs(listener, 1) is None
    clock.beat(ENGINE)
    clock.now += 3600  # the machine slept, or the supervisor was stopped
    assert clock.hangs(listener, 38) is None
    assert clock.hangs(listener, 10) == PROCESS


def test_what_takes_long_may_be_silent_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, listener = FileClock(tmp_path, monkeypatch), Listener(tmp_path, 40)
    clock.beat(ENGINE, 1)  # its first evaluations compile kernels
    assert clock.hangs(listener, 40 * FIRST) is None
    clock.beat(ENGINE, COLD - 1)
    assert clock.hangs(listener, 40 * FIRST) is None
    clock.beat(ENGINE)
    assert clock.hangs(listener, 40 * FIRST * SILENCES - 50) is None
    quick = Listener(tmp_path, 40)
    for _ in range(3):
        clock.beat(ENGINE)
        assert clock.hangs(quick, 2) is None
    os.utime(tmp_path / ENGINE, (0, 0))  # at rest
    assert clock.hangs(quick, 1000) is None
    for _ in range(3):  # a checkpoint on a slow disk is not a hang
        clock.beat(WRITER)
        assert clock.hangs(quick, 40 * FIRST) is None
    os.utime(tmp_path / WRITER, (0, 0))
    clock.beat(ENGINE)
    assert clock.hangs(quick, 60) == ENGINE


def test_a_part_that_was_quick_is_known_within_its_first_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that hung two seconds after its start, with 60 steps behind it, was given ten
    minutes as one whose kernels are compiled."""
    clock, listener = FileClock(tmp_path, monkeypatch), Listener(tmp_path, 40)
    monkeypatch.setattr(Heartbeat, "directory", tmp_path)
    for signs, part in ((60, "engine"), (COLD - 1, "trainer")):
        sign = Heartbeat(part)
        for _ in range(signs):
            sign.beat()
    assert clock.hangs(listener, 60) == ENGINE
    (tmp_path / ENGINE).unlink()
    assert clock.hangs(listener, 500) is None, "the trainer's kernels may be compiled"


def test_engine_and_trainer_say_when_they_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Heartbeat, "directory", tmp_path)
    turns = Turns()
    times = lambda: [bool((tmp_path / part).stat().st_mtime) for part in ("engine", "trainer")]  # noqa: E731
    assert times() == [False, False]
    with turns.step(), turns.training():
        assert times() == [True, True]
    assert times() == [True, False], "the engine may have more work"
    turns.engine_idle()
    assert times() == [False, False]
    with turns.publishing():
        assert times() == [False, True]
        with turns.writing():
            assert times() == [False, False] and (tmp_path / WRITER).stat().st_mtime
        assert not (tmp_path / WRITER).stat().st_mtime

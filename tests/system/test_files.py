"""What is said to be on the disk is flushed before its name appears, and its name after."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from mlx_parallm.system import files
from mlx_parallm.system.files import flush_to_disk, write_atomically, write_directory


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, file's name) of each flush and rename, in order; temporary names without their tail."""
    found: list[tuple[str, str]] = []
    replace = Path.replace

    def name(path: Path) -> str:
        return path.name.partition(files.TEMPORARY)[0]

    def flush(descriptor: int) -> None:
        found.append(("flush", name(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def renamed(self: Path, target: Path) -> None:
        found.append(("rename", name(self)))
        replace(self, target)

    monkeypatch.setattr(files, "flush_to_disk", flush)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", renamed)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files come from /proc")
def test_content_is_flushed_before_its_name_appears_and_the_name_after(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    def fill(directory: Path) -> None:
        (directory / "a").write_text("1")
        (directory / "b").write_text("2")

    write_directory(tmp_path / "step", fill)
    assert sorted(events[:2]) == [("flush", "a"), ("flush", "b")]
    assert events[2:] == [("flush", "step"), ("rename", "step"), ("flush", tmp_path.name)]
    events.clear()
    write_atomically(tmp_path / "config.toml", b"x")
    assert events == [("flush", "config.toml"), ("rename", "config.toml"), ("flush", tmp_path.name)]


@pytest.mark.parametrize("refusal", [None, errno.ENOTSUP, errno.EIO])
def test_macos_is_asked_to_empty_the_drives_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int | None
) -> None:
    asked: list[object] = []

    def control(descriptor: int, command: int) -> None:
        asked.append(command)
        if refusal is not None:
            raise OSError(refusal, "refused")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
    with (tmp_path / "file").open("wb") as file:
        if refusal == errno.EIO:
            with pytest.raises(OSError, match="refused"):
                flush_to_disk(file.fileno())
        else:
            flush_to_disk(file.fileno())
    assert asked == ([51, "fsync"] if refusal == errno.ENOTSUP else [51])


def write(path: Path, content: str) -> None:
    def fill(directory: Path) -> None:
        (directory / "content").write_text(content)

    write_directory(path, fill)


def test_a_directory_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that was moved away first would be nobody's for a moment."""
    path, other = tmp_path / "step", tmp_path / "other"
    write(path, "old")
    write(other, "other")
    if not files._exchanged(path, other):
        pytest.skip("this file system cannot exchange two names")
    assert [(place / "content").read_text() for place in (path, other)] == ["other", "old"]
    monkeypatch.delattr(Path, "rename")
    write(path, "new")
    assert (path / "content").read_text() == "new"
    assert sorted(place.name for place in tmp_path.iterdir()) == ["other", "step"]


def test_a_directory_is_replaced_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    for content in ("old", "new"):
        write(tmp_path / "step", content)
    assert (tmp_path / "step/content").read_text() == "new"
    assert [place.name for place in tmp_path.iterdir()] == ["step"]


def test_names_are_exchanged_only_where_both_are_there(tmp_path: Path) -> None:
    write(tmp_path / "step", "old")
    assert not files._exchanged(tmp_path / "step", tmp_path / "nothing")
    assert (tmp_path / "step/content").read_text() == "old"

"""What is said to be on the disk is flushed before its name appears, and its name after."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.system import files
from mlx_parallm.system.files import (
    flush_to_disk,
    inside,
    raise_file_limit,
    read_bounded,
    sha256_of,
    write_atomically,
    write_directory,
)
from tests.altered import Altered


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """(what, file's name) of each flush and rename, in order; temporary names without their
    tail."""
    found: list[tuple[str, str]] = []
    replace = Path.replace

    def name(path: Path) -> str:
        return path.name.partition(files.TEMPORARY)[0]

    def flush(descriptor: int) -> None:
        found.append(("flush", name(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def renamed(self: Path, target: Path) -> None:
        if self.is_relative_to(tmp_path):  # no other thread's
            found.append(("rename", name(self)))
        replace(self, target)

    monkeypatch.setattr(files, "flush_to_disk", flush)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", renamed)
    return found


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="names of open files come from /proc"
)
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

    monkeypatch.setattr(files, "fcntl", Altered(fcntl, F_FULLFSYNC=51, fcntl=control))
    monkeypatch.setattr(files, "os", Altered(os, fsync=lambda descriptor: asked.append("fsync")))
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


def test_a_directory_is_replaced_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.slow
@pytest.mark.long
def test_importing_mlx_lm_leaves_the_limit_of_open_files() -> None:
    """mlx_lm sets it to (2048, 4096): below what the user has set, and an error where the hard
    limit is less."""
    for limits in ((1000, 3000), (5000, 6000)):
        code = (
            f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, {limits}); import"
            " mlx_parallm.models.mlx_lm_api as m;"
            "from mlx_parallm.system.files import raise_file_limit as up; was ="
            " r.getrlimit(r.RLIMIT_NOFILE);"
            "print(was, up(), r.getrlimit(r.RLIMIT_NOFILE))"
        )
        printed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert printed.strip() == f"{limits} {limits[1]} ({limits[1]}, {limits[1]})"


@pytest.mark.parametrize(
    ("limits", "refused", "expected"),
    [
        ((256, resource.RLIM_INFINITY), 20_000, 10_240),
        ((256, 4096), 10**6, 4096),
        ((70_000, 80_000), 10**6, 70_000),
    ],
    ids=["macOS", "hard limit", "enough"],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], refused: int, expected: int
) -> None:
    def setrlimit(kind: int, values: tuple[int, int]) -> None:
        if values[0] > refused:
            raise ValueError("current limit exceeds maximum limit")

    altered = Altered(resource, getrlimit=lambda kind: limits, setrlimit=setrlimit)
    monkeypatch.setattr(files, "resource", altered)
    assert raise_file_limit() == expected


def test_only_what_dead_processes_and_this_one_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = {
        "out",
        "out.tmp-1",
        "out.tmp-old",
        "out.tmp-notes2024",
        "out.tmp-20240131",
        f"other.tmp-{ended.pid}",
    }  # 1 lives
    for name in {*kept, f"out.tmp-{ended.pid}", f"out.tmp-{os.getpid()}"}:
        (tmp_path / name).mkdir()
    files.remove_of_the_dead(tmp_path, "out.tmp-")
    files.remove_of_the_dead(tmp_path / "none", "out.tmp-")
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize(
    "name", ["../out", "/etc/hostname", "link", "loop", "a\0b", "sub/../../out"]
)
def test_a_path_from_outside_stays_inside(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_text("x")
    (root / "link").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    assert inside(root, "sub/../sub/file") == (root / "sub" / "file").resolve()
    with pytest.raises(OSError, match=r"leads out|is not a path|Symlink|Too many"):
        inside(root, name)


def test_a_write_without_a_cause_gets_one(tmp_path: Path) -> None:
    """MLX says "Unable to write 4350 bytes"."""
    program = (
        "import resource, sys, mlx.core as mx\n"
        "from pathlib import Path\n"
        "from mlx_parallm.system.files import write_atomically, write_directory\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "def fill(path): mx.save_safetensors(str(path / 'a.safetensors'), {'a': mx.ones(5000)})\n"
        "for work in (lambda: write_directory(Path('out'), fill),\n"
        "             lambda: write_atomically(Path('file'), bytes(5000))):\n"
        "    try: work()\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert line.startswith("CheckpointError") and "ulimit -f" in line, line


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"12345")
    assert read_bounded(tmp_path / "large", 5) == b"12345"
    for path, reason in (
        (tmp_path / "pipe", "not a regular"),
        (Path("/dev/zero"), "not a regular"),
    ):
        with pytest.raises(OSError, match=reason):
            read_bounded(path, 5)
        with pytest.raises(OSError, match=reason):
            sha256_of(path)
    with pytest.raises(OSError, match="5 bytes, more than 4"):
        read_bounded(tmp_path / "large", 4)

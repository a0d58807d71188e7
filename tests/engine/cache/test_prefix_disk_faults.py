"""Prefixes on a disk that fails, hangs or is full, and in a directory that others share: every answer
is what it was, and what happened is said."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.prefix_disk import disk as disk_module
from mlx_parallm.engine.prefix_disk import files as files_module
from mlx_parallm.engine.prefix_disk.files import BlockFiles, block_names
from mlx_parallm.engine.prefix_disk.opening import open_prefix_disk
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.loading import LoadedModel
from tests.altered import Altered
from tests.engine.cache.stored_prefixes import NAME, PROMPT, answer, files_of, started
from tests.engine.helpers import (
    qwen3_model,
    request,
    run,
    serve,
)


def test_a_disk_that_takes_nothing_costs_a_warning_and_no_answer(tmp_path, monkeypatch):
    served = started(tmp_path)
    wanted = answer(serve(qwen3_model()), PROMPT).token_ids

    def full(path, flags, mode=0o777, **options):
        if files_module.TEMPORARY in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.open(path, flags, mode, **options)

    monkeypatch.setattr(files_module, "os", Altered(os, open=full))
    assert answer(served, PROMPT).token_ids == wanted
    files = served.engine.on_disk.arrivals.disk.files
    assert files.refused == 1, "then it rests"
    assert not files_of(tmp_path)
    monkeypatch.setattr(files_module, "os", os)
    files._rests_until = 0.0
    answer(served, PROMPT[1:])
    assert files_of(tmp_path)


def test_what_others_put_into_the_directory_stops_nothing(tmp_path):
    wanted = answer(started(tmp_path), PROMPT).token_ids
    pipe, link, large, *_, last = files_of(tmp_path)
    for path in (pipe, link, last):
        path.unlink()
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with large.open("ab") as file:
        file.truncate(1 << 27)  # of holes: more than all files may have
    shutil.rmtree(last.parent)
    last.parent.write_text("a file in a folder's place")
    served = started(tmp_path)
    assert answer(served, PROMPT).token_ids == wanted
    served.engine.reset_prefix_cache()
    served.engine.on_disk.arrivals.disk.settle()
    shutil.rmtree(tmp_path)
    served.engine.reset_prefix_cache()
    served.engine.on_disk.arrivals.disk.files._rests_until = 0.0
    assert answer(served, PROMPT).token_ids == wanted and files_of(tmp_path)
    names = block_names("root", PROMPT)
    files = BlockFiles(tmp_path, 1 << 26)
    for name, put in zip(
        names, (os.mkfifo, lambda path: path.symlink_to("/dev/zero")), strict=False
    ):
        files._path(name).parent.mkdir(exist_ok=True)
        put(files._path(name))
        assert files.read(name) is None
    assert not files.has("a" * 300), "a name that the system refuses, as it does a closed folder"


def test_a_disk_that_hangs_keeps_no_request_and_no_end(tmp_path, monkeypatch):
    wanted = answer(started(tmp_path), PROMPT).token_ids
    warnings = []
    log = SimpleNamespace(warning=lambda event, **values: warnings.append(event))
    monkeypatch.setattr(disk_module, "log", log)
    monkeypatch.setattr(disk_module, "END_S", 0.0)
    served = started(tmp_path)
    disk, hanging, answers = served.engine.on_disk.arrivals.disk, Event(), Event()
    read = disk.files.read

    def hung(name):
        hanging.set()
        answers.wait()
        return read(name)

    monkeypatch.setattr(disk.files, "read", hung)
    served.engine.add(request("a", PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True))
    served.engine.add(request("b", [*PROMPT[:200], 1], max_tokens=6, temperature=0.0))
    hanging.wait()
    assert not disk.hangs and not served.engine.on_disk.arrivals.arrived()
    monkeypatch.setattr(disk_module, "PATIENCE_S", 0.0)
    [done] = run(served.engine, [])["a"].completions
    assert done.token_ids == wanted and done.cached_tokens == 0
    assert served.engine.on_disk.failed_reads == 1 and warnings == ["prefixes_not_read"]
    served.engine.add(request("c", [*PROMPT[:100], 2], max_tokens=1))
    assert not served.engine.on_disk, "nobody waits for it any more"
    served.engine.on_disk.close()
    answers.set()
    disk._reader._thread.join()
    assert not disk.hangs and served.engine.on_disk.hit_tokens == 0


def test_a_folder_that_takes_long_to_clear_keeps_no_request(tmp_path, monkeypatch):
    served = started(tmp_path)
    disk, clearing, cleared = served.engine.on_disk.arrivals.disk, Event(), Event()
    monkeypatch.setattr(disk.files, "clear", lambda: (clearing.set(), cleared.wait()))
    monkeypatch.setattr(disk_module, "PATIENCE_S", 0.0)
    served.engine.reset_prefix_cache()
    clearing.wait()
    assert run(served.engine, [request("a", PROMPT, max_tokens=1)])["a"].completions
    cleared.set()
    disk.settle()
    assert not disk.hangs


def test_what_cannot_be_read_is_counted_and_what_is_no_file_is_replaced(tmp_path, monkeypatch):
    """A file of another user, and a link in a block's place."""
    wanted = answer(started(tmp_path), PROMPT).token_ids

    def forbidden(path, flags, mode=0o777, **options):
        if str(path).endswith(".safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return os.open(path, flags, mode, **options)

    served = started(tmp_path)
    monkeypatch.setattr(files_module, "os", Altered(os, open=forbidden))
    assert answer(served, PROMPT).token_ids == wanted
    assert (
        served.engine.on_disk.failed_reads == served.engine.on_disk.arrivals.disk.files.unread > 0
    )
    monkeypatch.setattr(files_module, "os", os)
    for path in files_of(tmp_path):
        path.unlink()
        path.symlink_to("/dev/zero")
    answer(started(tmp_path), PROMPT)
    assert answer(started(tmp_path), PROMPT).cached_tokens == 288


def test_an_error_of_the_disk_ends_no_thread_and_brings_nothing_back(tmp_path, monkeypatch):
    """Of counting at the start, and of clearing: until that is done nothing is read."""
    wanted = answer(started(tmp_path), PROMPT).token_ids
    failed = []

    def fails(files):
        failed.append(1)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "count", fails)
        patch.setattr(BlockFiles, "clear", fails)
        served = started(tmp_path)
        disk = served.engine.on_disk.arrivals.disk
        served.engine.reset_prefix_cache()
        assert answer(served, PROMPT).token_ids == wanted
        assert len(failed) == 3 and served.engine.on_disk.failed_reads == 1
        assert served.engine.on_disk.hit_tokens == 0 and not disk.hangs
        assert disk._reader._thread.is_alive() and disk._writer._thread.is_alive()
    served.engine.scheduler.forget_prefixes()
    assert answer(served, PROMPT).cached_tokens == 0, "what is removed now"
    served.engine.scheduler.forget_prefixes()
    assert answer(served, PROMPT).cached_tokens == 288, "and written again"


def test_what_cannot_be_removed_is_said_and_never_read(tmp_path, monkeypatch):
    """Of a directory that has become read-only, or closed. The cache goes on without it."""
    wanted = answer(started(tmp_path), PROMPT).token_ids
    first, second, *_ = files_of(tmp_path)
    unlink = Path.unlink

    def refused(path, missing_ok=False):
        if path == first:
            raise OSError(errno.EROFS, "Read-only file system")
        unlink(path, missing_ok=missing_ok)

    def closed(path):
        if Path(path) == second.parent:
            raise PermissionError(errno.EACCES, "Permission denied")
        return os.scandir(path)

    served = started(tmp_path)
    engine, files = served.engine, served.engine.on_disk.arrivals.disk.files
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        patch.setattr(files_module, "os", Altered(os, scandir=closed))
        left = engine.reset_prefix_cache().result()
        assert left == f"2 files or folders in {tmp_path} cannot be removed"
        assert engine.on_disk.stuck_files == 2
        assert first.exists() and second.exists()
        assert answer(served, PROMPT).token_ids == wanted and engine.on_disk.hit_tokens == 0
    assert answer(started(tmp_path), PROMPT).cached_tokens == 288, "written again, around them"
    assert engine.reset_prefix_cache().result() == "" and not files_of(tmp_path)
    assert engine.on_disk.stuck_files == files.bytes == 0


def test_a_directory_that_cannot_be_listed_is_said_and_not_read(tmp_path, monkeypatch):
    wanted = answer(started(tmp_path), PROMPT).token_ids
    served = started(tmp_path)

    def closed(path):
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return os.scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "os", Altered(os, scandir=closed))
        left = served.engine.reset_prefix_cache().result()
        assert left == f"{tmp_path} cannot be listed: Permission denied"
        assert answer(served, PROMPT).token_ids == wanted
        assert served.engine.on_disk.hit_tokens == 0 and served.engine.on_disk.failed_reads == 1
    served.engine.scheduler.forget_prefixes()
    assert answer(served, PROMPT).cached_tokens == 0, "what is removed now"


def test_what_cannot_be_removed_lets_no_more_be_written(tmp_path, monkeypatch):
    values = {"0.float32": np.zeros(1 << 12, np.float32)}
    files = BlockFiles(tmp_path, 50_000)

    unlink = Path.unlink

    def refused(path, missing_ok=False):
        if path.suffix == ".safetensors" and path.is_relative_to(tmp_path):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        written = []
        for number in range(6):
            files._rests_until = 0.0
            written.append(files.write(f"{number:040x}", values))
        assert written == [True, True, True, False, False, False]
        assert files.stuck == 3 and files.refused == 3
    files._rests_until = 0.0
    assert files.write("ab" * 20, values) and files.bytes <= 50_000


def test_a_block_larger_than_the_bound_is_said(tmp_path):
    files = BlockFiles(tmp_path, 5000)
    assert not files.write(NAME, {"0.float32": np.zeros(1 << 12, np.float32)})
    assert files.refused == 1 and not files_of(tmp_path)


def test_only_its_own_files_are_counted_and_removed(tmp_path):
    """A directory in which a person has others: two letters are no sign of a folder of ours."""
    others = [
        tmp_path / "v1" / "model.safetensors",
        tmp_path / "de" / "notes.txt",
        tmp_path / "de" / f"{NAME}.safetensors",  # another folder's name
        tmp_path / "ab" / f".part-x-{NAME}.safetensors",
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 5000)
        os.utime(path, (0, 0))
    (tmp_path / "ab" / f"{NAME[:-2]}00.safetensors").mkdir()
    files = BlockFiles(tmp_path, 100_000)
    for number in range(9):
        assert files.write(f"{number:040x}", {"0.float32": np.zeros(1 << 12, np.float32)})
    assert files.bytes <= 100_000
    files.clear()
    assert files.stuck == 0 and files_of(tmp_path) == sorted(others)


def test_a_disk_that_hangs_at_the_start_keeps_no_start(tmp_path, monkeypatch):
    wanted = answer(started(tmp_path), PROMPT).token_ids
    warnings, answers = [], Event()
    log = SimpleNamespace(warning=lambda event, **values: warnings.append(event))
    monkeypatch.setattr(disk_module, "log", log)

    def hung(path):
        answers.wait()
        return os.scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "os", Altered(os, scandir=hung))
        patch.setattr(disk_module, "PATIENCE_S", 0.0)
        served = started(tmp_path)
        [done] = run(
            served.engine, [request("a", PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True)]
        )["a"].completions
        assert done.token_ids == wanted and done.cached_tokens == 0
        assert warnings == ["server.prefix_disk is late"]
        answers.set()
        served.engine.on_disk.arrivals.disk.settle()
    served.engine.scheduler.forget_prefixes()
    assert answer(served, PROMPT).cached_tokens == 288


def test_a_directory_that_others_may_write_to_is_named(tmp_path, monkeypatch):
    warnings = []
    log = SimpleNamespace(warning=lambda event, **values: warnings.append(event))
    monkeypatch.setattr(files_module, "log", log)
    for mode in (0o700, 0o775, 0o777):
        tmp_path.chmod(mode)
        BlockFiles(tmp_path, 1).open()
        assert warnings == ["server.prefix_disk is not safe"] * (mode == 0o777)
    tmp_path.chmod(0o700)
    stranger = Altered(os, geteuid=lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setattr(files_module, "os", stranger)
    BlockFiles(tmp_path, 1).open()
    assert len(warnings) == 2, "another user owns it"


def test_a_folder_of_unknown_kind_is_passed_over(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, 1 << 26)
    assert files.write(NAME, {"0.float32": np.zeros(8, np.float32)})
    entries = files_module._entries

    def stale(follow_symlinks=True):
        raise OSError(errno.ESTALE, "Stale file handle")

    broken = SimpleNamespace(name="zz", is_dir=stale)
    monkeypatch.setattr(
        files_module,
        "_entries",
        lambda folder: entries(folder) + ([broken] if folder == tmp_path else []),
    )
    files.count()
    assert files.bytes == 4096
    files.clear()
    assert not files_of(tmp_path)


LIMITED = """
    import resource, signal, sys
    from pathlib import Path
    import numpy as np
    from mlx_parallm.engine.prefix_disk.files import BlockFiles
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    files = BlockFiles(Path(sys.argv[1]), 1 << 20)
    assert files.write("ab" * 20, {"0.float32": np.zeros(8, np.float32)})
    assert not files.write("cd" * 20, {"0.float32": np.zeros(1 << 14, np.float32)})
    assert files.refused == 1 and not files.takes("ef" * 20)
"""


@pytest.mark.slow
def test_a_file_that_the_system_cuts_off_is_refused_and_leaves_nothing(tmp_path):
    """A limit of the process, as a full disk: found while the file is written."""
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "File too large" in ended.stdout + ended.stderr, ended
    assert [path.stem for path in files_of(tmp_path)] == ["ab" * 20]


def test_what_killed_processes_left_half_written_goes(tmp_path):
    files = BlockFiles(tmp_path, 1 << 20)
    files.write(NAME, {"0.float32": np.zeros(3, np.float32)})
    half = files_of(tmp_path)[0]
    half = half.with_name(f"{files_module.TEMPORARY}{16 * '1'}-{half.name}")
    half.write_bytes(b"x")
    files.count()
    assert half.exists(), "its process may write it still"
    later = time.time() + 2 * files_module.STALE_S  # the clock was set back since
    for now in (0.0, later):
        half.write_bytes(b"x")
        os.utime(half, (now, now))
        files.count()
        assert not half.exists()
    assert len(files_of(tmp_path)) == 1


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    server = ServerConfig(prefix_disk=tmp_path / "file" / "below")
    loaded = LoadedModel(qwen3_model(), {}, tmp_path, 100)
    with pytest.raises(ConfigError, match=r"server\.prefix_disk: .*file"):
        open_prefix_disk(server, loaded, 1 << 20)

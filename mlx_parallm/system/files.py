"""Files and directories that are complete or absent, also after a kill -9 or a power cut.

And the free space of a run's disk: below the reserve nothing is begun, so that nothing ends
half-written. And how many files the process may have open.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

from mlx_parallm.errors import CheckpointError

GB = 10**9
RESERVE_GB = 1.0
FULL = 1 << 20  # bytes: with fewer free ones a write has failed for want of space
BLOCK, SAMPLES = 4096, 64  # bytes of a block, blocks of a file, of `sampled_digest`
RESERVE_SHARE = 0.05  # share of a small disk
TEMPORARY = ".tmp-"  # in the names of unfinished files; the next save removes leftovers
LONGEST_ID = 7  # digits of a process id; longer numbers in a name are dates
OPEN_FILES = (65_536, 10_240)  # wanted; macOS refuses what is above its own limit
# <sys/stdio.h> of macOS, <linux/fs.h>, <fcntl.h>
RENAME_SWAP, RENAME_EXCHANGE, AT_FDCWD = 2, 2, -100


def local_path(text: str | Path) -> Path:
    """Return the path that a text may be, with its home directory if there is one (`~nobody`
    has none)."""
    path = Path(text)
    with contextlib.suppress(RuntimeError):
        return path.expanduser()
    return path


def is_file(text: str | Path) -> bool:
    """Return whether a text is the path of a file. Free text is none, be it as long as no name
    can be."""
    try:
        return local_path(text).is_file()
    except (OSError, ValueError):  # a name of over 255 bytes; a null character
        return False


def is_directory(text: str | Path) -> bool:
    """Return whether a text is the path of a directory; see `is_file`."""
    try:
        return local_path(text).is_dir()
    except (OSError, ValueError):
        return False


def inside(root: Path, name: str | Path) -> Path:
    """Return a path below `root`, without links, that a foreign file, an archive or a request
    names. Raises OSError: it leads out of `root`, or is not a path."""
    try:
        path = (root / name).resolve()
    except (ValueError, RuntimeError) as error:  # a null character; a circle of links
        raise OSError(errno.EINVAL, f"{str(name)[:200]!r} is not a path") from error
    if not path.is_relative_to(root.resolve()):
        raise OSError(errno.EACCES, f"{str(name)[:200]!r} leads out of {root}")
    return path


def check_regular(path: Path, most: int | None = None) -> None:
    """Raises OSError: not there, no regular file (a pipe makes its reader wait for ever, a device
    never ends), or larger than `most` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"{path} has {status.st_size} bytes, more than {most}")


def regular_files(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of a foreign folder that match, sorted; no pipe, no device, no broken
    link."""
    matches = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in matches if is_file(path))


def bounded_lines(file: BinaryIO, most: int) -> Iterator[bytes | None]:
    """Yield the lines of a file; None in the place of one that is longer than `most` bytes."""
    while line := file.readline(most + 1):
        if len(line) <= most or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        yield None


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError."""
    check_regular(path, most)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:  # it grows
        raise OSError(errno.EFBIG, f"{path} has more than {most} bytes")
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it. Raises CheckpointError; `path` is then
    untouched."""
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            flush_to_disk(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        why = write_problem(path.parent, error) if error.errno == errno.EFBIG else error.strerror
        raise CheckpointError(f"{path} cannot be written: {why or error}") from error


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Make a directory: `fill` writes into a temporary one, which is flushed to the disk and
    renamed.

    An existing `path` is replaced, in one step if the system can: there is always a complete one of
    that name. Raises CheckpointError: an existing `path` is then untouched, and nothing is left
    half-written.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}")
    old = path.with_name(f"{path.name}{TEMPORARY}old")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if not _exchanged(temporary, path):
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            temporary.rename(path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:  # MLX raises RuntimeError for "Unable to write"
        if old.exists() and not path.exists():
            old.rename(path)
        why = write_problem(path.parent, error)
        raise CheckpointError(f"{path} cannot be written: {why}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def write_problem(directory: Path, error: Exception) -> str:
    """Return what an error of a write says, with its cause if it names none: MLX's "Unable to
    write 4350 bytes" does not."""
    if isinstance(error, OSError) and error.errno not in (None, errno.EFBIG):
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.suppress(OSError):
        if (free := free_bytes(directory)) < FULL:
            return f"{error}: the disk is full, {in_gb(free)} are free"
    if limit != resource.RLIM_INFINITY:
        return f"{error}: a file of this process may have {in_gb(limit)} (`ulimit -f`)"
    return f"{error}: is the disk full, a quota reached, or the disk gone?"


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two directories. Return False if one is missing, or the system or the file system
    cannot."""
    libc, (a, b) = ctypes.CDLL(None), (os.fsencode(one), os.fsencode(other))
    if renamex := getattr(libc, "renamex_np", None):  # macOS
        return bool(renamex(a, b, RENAME_SWAP) == 0)
    renameat2 = getattr(libc, "renameat2", None)
    return renameat2 is not None and bool(renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) == 0)


def point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to its neighbour `target`, in one rename. Raises
    CheckpointError."""
    temporary = link.with_name(f"{link.name}{TEMPORARY}{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)
        sync(link.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{link} cannot be written: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)


def flush_to_disk(descriptor: int) -> None:
    """Flush so that a power cut loses nothing: on macOS fsync leaves data in the drive's cache.
    Raises OSError."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
            return
        except OSError as error:
            # a network drive has fsync only
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
    os.fsync(descriptor)


def sha256_of(file: Path) -> str:
    """Return the hexadecimal digest of a regular file. Raises OSError."""
    check_regular(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sampled_digest(files: Iterable[Path]) -> str:
    """Return a digest of the sizes of files and of SAMPLES blocks of each: other weights have
    another one, and nobody waits for it. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(max(0, size - BLOCK) * number // (SAMPLES - 1))
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def remove_leftovers(directory: Path) -> None:
    """Remove the unfinished files of a killed process, and restore a directory that it was
    replacing."""
    for path in directory.glob(f"*{TEMPORARY}*"):
        original = path.with_name(path.name.partition(TEMPORARY)[0])
        if path.name.endswith(f"{TEMPORARY}old") and not original.exists():
            path.rename(original)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_of_the_dead(directory: Path, prefix: str) -> None:
    """Remove the unfinished entries PREFIX + id of a process, if that process is gone or this
    one."""
    for path in directory.glob(f"{glob.escape(prefix)}*"):
        owner = path.name.removeprefix(prefix)
        if (
            owner.isdecimal()
            and len(owner) <= LONGEST_ID
            and (int(owner) == os.getpid() or not psutil.pid_exists(int(owner)))
        ):
            shutil.rmtree(path, ignore_errors=True)


def in_gb(count: int) -> str:
    """Return a number of bytes for people: 1.30 GB, 4.20 MB."""
    return f"{count / GB:.2f} GB" if count >= GB / 10 else f"{count / 1e6:.2f} MB"


def free_bytes(directory: Path) -> int:
    """Return the bytes that this user may still write on the disk of an existing directory.
    Raises OSError."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def reserve_bytes(directory: Path, reserve_gb: float | None) -> int:
    """Return `rollouts.min_free_gb` in bytes; None = 1 GB, or 5 % of a disk under 20 GB. 0 = no
    reserve.

    Raises OSError.
    """
    if reserve_gb is not None:
        return round(reserve_gb * GB)
    status = os.statvfs(directory)
    return round(min(RESERVE_GB * GB, RESERVE_SHARE * status.f_blocks * status.f_frsize))


def shortage(directory: Path, reserve: int) -> str | None:
    """Say what is wrong with the free space; None while `reserve` bytes are free, or when
    `reserve` is 0."""
    try:
        free = free_bytes(directory) if reserve else 0
    except OSError as error:
        return f"cannot read the free space of the disk of {directory}: {error.strerror or error}"
    if free >= reserve:
        return None
    return (
        f"{in_gb(free)} are free on the disk of {directory}, less than the {in_gb(reserve)}"
        " that stay free"
        " (rollouts.min_free_gb): free some space"
    )


@contextlib.contextmanager
def file_limit_kept() -> Iterator[None]:
    """Keep the limit of open files while mlx_lm is imported. The import sets it to (2048, 4096):
    below the user's limit, so that only root could raise it again, or above it, which is an
    error."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


def raise_file_limit() -> int:
    """Let this process open as many files as the user's hard limit allows, 65,536 at most.
    Return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in OPEN_FILES:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= allowed:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            return allowed
    return OPEN_FILES[0] if soft == resource.RLIM_INFINITY else soft

"""Files of keys and values by blocks of tokens, which survive the process. No MLX.

A block is BLOCK tokens of a text; its name is a hash of what it stands for: the weights, the
client's salt, and all tokens of the text up to its end (`block_names`). Another CPU may compute
other last bits. So a name
never means two things, a file is never changed, and processes may share a directory. Each file is
safetensors; its hash covers name, types, shapes and bytes, so a damaged file is found and removed.
"""

import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import RLock

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from mlx_parallm.system.log import get_logger

BLOCK = 32
"""Tokens of a block: what is computed again behind the last one that is found."""
PAGE = 4096  # a file takes whole pages
ROOM_KEPT = 0.9  # of the bound, after the oldest files were removed
REST_S = 60.0  # without writing, after the disk has refused a file
STALE_S = 3600.0  # age of a half-written file whose process is gone
AHEAD_S = 3600.0  # a file used so much later than now was used before the clock was set back
COUNTED = 0.05  # of the bound: once so much was written or read the files are counted, others' too
TEMPORARY = ".part-"
NAME = re.compile(
    rf"({re.escape(TEMPORARY)}[0-9a-f]{{16}}-)?(?P<folder>[0-9a-f]{{2}})[0-9a-f]{{38}}(\.state)?\.safetensors"
)
"""Of files that are counted and removed: a person's own in the directory are left alone."""

log = get_logger(__name__)
Arrays = Mapping[str, np.ndarray]


def hashed(*parts: bytes | memoryview) -> str:
    """Return 40 hexadecimal digits; the parts' borders count."""
    state = blake2b(digest_size=20)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def block_names(root: str, tokens: Sequence[int], first: int = 0) -> list[str]:
    """Return the names of the whole blocks of a text, each a hash of the one before and its
    tokens.

    Args:
        root: of what its numbers depend on beside the tokens.
        first: how many blocks `root` already stands for.
    """
    names = []
    for start in range(first * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        block = ",".join(map(str, tokens[start : start + BLOCK]))  # those of images are large
        root = hashed(root.encode(), block.encode())
        names.append(root)
    return names


class BlockFiles:
    """
    Args:
        folder: made if it is missing, for this user alone.
        max_bytes: of all files, of other processes too; the ones that were not used for longest go
            first. `count` looks for them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.bytes = 0  # of the files, as last counted, and of those written since
        self.corrupt = 0  # files that were found damaged
        self.refused = 0  # files that the disk did not take
        self.unread = 0  # files that are there, and cannot be read
        self.stuck = 0  # files that could not be removed when they were to be, as last counted
        self._never: set[Path] = set()  # files and folders to be removed that are there: not read
        self._warned = False  # of `stuck`
        self._uncounted = 0  # bytes that were read and written since
        self._lock = RLock()  # of `bytes`, and so that `clear` comes before a write or after
        self._rests_until = 0.0

    def open(self) -> None:
        """Make the folder. Raises OSError: that cannot be, or it cannot be read."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.scandir(self.folder).close()
        status = self.folder.stat()
        strange = status.st_uid != os.geteuid() != 0
        if strange or status.st_mode & stat.S_IWOTH:
            who = "another user owns it and" if strange else "every user"
            reason = f"{who} may write there, and what is written there is served"
            log.warning("server.prefix_disk is not safe", folder=str(self.folder), reason=reason)

    def has(self, name: str) -> bool:
        path = self._path(name)
        if path in self._never or path.parent in self._never:
            return False
        try:
            return stat.S_ISREG(path.lstat().st_mode)
        except OSError:  # nothing there is to be seen
            return False

    def takes(self, name: str) -> bool:
        """Whether a file is to be written: it is not there, and the disk has refused none in the
        last minute."""
        return time.monotonic() >= self._rests_until and not self.has(name)

    def read(self, name: str) -> dict[str, np.ndarray] | None:
        """Return a file's arrays; None: it is not there, cannot be read, or was damaged and is
        removed."""
        path = self._path(name)
        try:
            data = self._bytes_of(path)
        except FileNotFoundError:  # another process has removed it
            return None
        except OSError as error:
            self.unread += 1
            if self.unread == 1:
                reason = error.strerror or str(error)
                log.warning("a stored prefix cannot be read", file=str(path), reason=reason)
            return None
        try:
            arrays = dict(load(data))
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            sound = header["__metadata__"]["hash"] == _hash_of(name, arrays)
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
            sound = False
        if not sound:
            self.corrupt += 1
            log.warning("a stored prefix is damaged, and removed", file=str(path))
            if not self._remove(path, len(data)):
                self._never.add(path)
            return None
        self._uncounted += len(data)  # others may have written as much
        return arrays

    def write(
        self,
        name: str,
        arrays: Arrays,
        *,
        used_ns: int | None = None,
        still: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Put a file there, whole or not at all; False: the disk does not take it, which is said
        once a minute. Arrays lie in C order: safetensors writes the memory as it lies.

        Args:
            used_ns: when it was used; None: now.
            still: whether it is to be there; asked when nothing is removed until it is.
        """
        assert all(array.flags.c_contiguous for array in arrays.values())
        path = self._path(name)
        if sum(array.nbytes for array in arrays.values()) > self.max_bytes:
            return self._rest(path, "a block is larger than server.prefix_disk_bytes")
        temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}-{path.name}")
        if self.bytes > self.max_bytes:
            self.count()  # what could not be removed may be gone
        if self.bytes > self.max_bytes:
            return self._rest(path, "older ones cannot be removed")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # somebody may remove it
            path.parent.mkdir(mode=0o700, exist_ok=True)
            kind = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            os.close(os.open(temporary, kind, 0o600))
            save_file(dict(arrays), temporary, {"hash": _hash_of(name, arrays)})
            if used_ns is not None:
                os.utime(temporary, ns=(used_ns, used_ns))
            size = _size(temporary.stat().st_size)
            with self._lock:
                if not still():
                    _unlink(temporary)
                    return False
                temporary.replace(path)
                self._never.discard(path)
                self.bytes += size
        except (OSError, SafetensorError) as error:
            _unlink(temporary)
            return self._rest(path, getattr(error, "strerror", None) or str(error))
        self._uncounted += size
        self.count_if_due()
        return True

    def used_ns(self, name: str) -> int:
        """Return when a file was used, now at the latest; now if it is not there."""
        now = time.time_ns()
        try:
            return min(now, self._path(name).lstat().st_mtime_ns)
        except OSError:
            return now

    def touch(self, names: Iterable[str]) -> None:
        """Note a use; the last of the names is the youngest then."""
        now = time.time_ns()
        for age, name in enumerate(names):
            try:
                os.utime(self._path(name), ns=(now + age, now + age))
            except OSError:
                continue  # removed meanwhile

    def _rest(self, path: Path, reason: str) -> bool:
        self.refused += 1
        self._rests_until = time.monotonic() + REST_S
        log.warning("prefixes are not written to disk for a minute", file=str(path), reason=reason)
        return False

    def clear(self) -> None:
        """Remove every file. What cannot be removed is `stuck`, and never read. Raises OSError: the
        folder cannot be listed."""
        with self._lock:
            files, closed = self._files()
            self._never = closed | {path for path, _, size in files if not self._remove(path, size)}
            self.stuck = len(self._never)
            self.bytes = sum(size for path, _, size in files if path in self._never)

    def count_if_due(self) -> None:
        """Count the files if so much was read and written since that others may have, too."""
        # with files that cannot be removed each write would list the folder in vain: then by
        # `_uncounted` alone, so the bound is passed by that share at most
        over = self.bytes > self.max_bytes and not self.stuck
        if over or self._uncounted > COUNTED * self.max_bytes:
            self.count()

    def count(self) -> None:
        """Count the files; remove the oldest if they are too many."""
        latest = time.time_ns() + int(AHEAD_S * 1e9)
        with self._lock:
            try:
                files, closed = self._files()
            except OSError as error:
                self._warn_of(self.folder, error)
                return
            self.bytes, self._uncounted = sum(size for _, _, size in files), 0
            self.stuck = len(closed | {path for path, _, _ in files if path in self._never})
            if self.bytes <= self.max_bytes:
                return
            for path, _, size in sorted(files, key=lambda file: file[1] if file[1] < latest else 0):
                if self.bytes <= ROOM_KEPT * self.max_bytes:
                    return
                self.stuck += not self._remove(path, size)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.safetensors"

    def _files(self) -> tuple[list[tuple[Path, int, int]], set[Path]]:
        """Return path, time of last use in ns and bytes of each file, and the folders that cannot
        be listed; remove what killed processes have left half-written. Raises OSError."""
        files, closed = [], set[Path]()
        for folder in _entries(self.folder):
            if re.fullmatch("[0-9a-f]{2}", folder.name):
                try:
                    files += self._files_in(folder)
                except OSError as error:
                    self._warn_of(Path(folder.path), error)
                    closed.add(Path(folder.path))
        return files, closed

    def _files_in(self, folder: "os.DirEntry[str]") -> list[tuple[Path, int, int]]:
        files = []
        for entry in _entries(folder) if folder.is_dir(follow_symlinks=False) else []:
            name = NAME.fullmatch(entry.name)
            if name is None or name["folder"] != folder.name:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process has removed it
            if stat.S_ISDIR(status.st_mode):
                continue
            if not entry.name.startswith(TEMPORARY):
                files.append((Path(entry.path), status.st_mtime_ns, _size(status.st_size)))
            elif abs(time.time() - status.st_mtime) > STALE_S:  # the clock may be set back
                _unlink(Path(entry.path))
        return files

    def _bytes_of(self, path: Path) -> bytes:
        """Return a file's bytes; none of what cannot be a block: a pipe, a device, what is larger
        than all may be. Raises OSError."""
        kind = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, kind), "rb") as file:
            status = os.fstat(file.fileno())
            sound = stat.S_ISREG(status.st_mode) and status.st_size <= self.max_bytes
            return file.read() if sound else b""

    def _remove(self, path: Path, size: int) -> bool:
        """Return whether a file is gone."""
        try:
            path.unlink(missing_ok=True)  # another process may be faster
        except OSError as error:
            self._warn_of(path, error)
            return False
        with self._lock:
            self.bytes = max(0, self.bytes - _size(size))
        return True

    def _warn_of(self, path: Path, error: OSError) -> None:
        if not self._warned:
            self._warned, reason = True, error.strerror or str(error)
            log.warning(
                "stored prefixes cannot be listed or removed", file=str(path), reason=reason
            )


def _entries(folder: "Path | os.DirEntry[str]") -> "list[os.DirEntry[str]]":
    """Return what a folder holds; []: it is gone. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _size(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _hash_of(name: str, arrays: Arrays) -> str:
    parts: list[bytes | memoryview] = [name.encode()]
    for key in sorted(arrays):
        array = arrays[key]
        numbers = array.reshape(-1).view(np.uint8).data  # no copy
        parts += [f"{key} {array.dtype} {array.shape}".encode(), numbers]
    return hashed(*parts)

"""A GGUF file in the place of a model: `--model FILE.gguf` converts it once and keeps the copy for
the next start.

The cache is a directory of Hugging Face folders, each named after its source (path,
size, time, dtype, versions). One process converts and the others wait for it. A folder may be
deleted while it is not in use.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_parallm.config.server import cache_directory
from mlx_parallm.errors import CheckpointError, ModelError
from mlx_parallm.system.device.traits import half_precision_is_slow
from mlx_parallm.system.files import TEMPORARY, remove_of_the_dead
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.packages import require

log = get_logger("gguf")

FORMAT = 1  # version of a folder: raise it when the converter's output changes
SIZES_FILE = "source.json"  # in a folder: its key, and the sizes of its other files
# a line for each folder, though a command resolves its model several times
_ANNOUNCED: set[Path] = set()


def converted(file: Path, dtype: str, *, convert: bool = True) -> Path:
    """Return the Hugging Face folder of a GGUF file, which is made if it is not in the cache.

    Args:
        dtype: model.dtype; "auto" = float32 on a CPU, else bfloat16.
        convert: False: only look into the cache.

    Raises ModelError: the file cannot be converted, or is not in the cache; ConfigError: the
    package gguf is missing;
    CheckpointError: the folder cannot be written.
    """
    require("reading GGUF", "gguf")
    if dtype == "auto":
        dtype = "float32" if half_precision_is_slow() else "bfloat16"
    try:
        status = file.stat()
        key = {
            "format": FORMAT,
            **{package: version(package) for package in ("gguf", "mlx-lm")},
            "dtype": dtype,
            "file": str(file.resolve()),
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
        }
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_directory("gguf") / f"{file.stem}-{dtype}-{digest}"
    if _is_complete(folder, key):
        _announce(folder, "the converted copy of the GGUF file is reused")
    elif not convert:
        raise ModelError(
            f"{file} has no converted copy in {folder.parent} yet, and here none is made"
        )
    else:
        _make(folder, file, dtype, key)
    return folder


def _make(folder: Path, file: Path, dtype: str, key: dict[str, Any]) -> None:
    from mlx_parallm.models.gguf.from_gguf import convert_gguf  # here: it needs an optional package

    with _locked(folder):
        if _is_complete(folder, key):  # by the process that held the lock
            _announce(folder, "the converted copy of the GGUF file is reused")
            return
        remove_of_the_dead(folder.parent, f"{folder.name}{TEMPORARY}")
        shutil.rmtree(folder, ignore_errors=True)
        log.info("the GGUF file is converted, once", file=str(file), dtype=dtype)
        report = convert_gguf(file, folder, dtype=dtype)
        for note in report.notes:
            log.warning(note, file=str(file))
        (folder / SIZES_FILE).write_text(
            json.dumps({"key": key, "sizes": _sizes(folder)}), encoding="utf-8"
        )
        _announce(folder, "the converted copy of the GGUF file is kept for the next start")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is made. Raises CheckpointError: there is no place for it."""
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise CheckpointError(
            f"{folder.parent} cannot be written: {error.strerror or error}; set XDG_CACHE_HOME"
            " to another directory"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, also by a kill -9
        yield


def _is_complete(folder: Path, key: dict[str, Any]) -> bool:
    try:
        return bool(
            json.loads((folder / SIZES_FILE).read_text()) == {"key": key, "sizes": _sizes(folder)}
        )
    except (OSError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {
        file.name: file.stat().st_size
        for file in sorted(folder.iterdir())
        if file.name != SIZES_FILE
    }


def _announce(folder: Path, event: str) -> None:
    if folder not in _ANNOUNCED:
        _ANNOUNCED.add(folder)
        log.info(event, directory=str(folder))

"""tinker:// names, and the directories behind them.

    DIRECTORY/RUN/run.json                              base, LoRA, the client's metadata
    DIRECTORY/RUN/weights/NAME/                         adapter and AdamW's state: training
    continues
                                                        from it
    DIRECTORY/RUN/sampler_weights/NAME/                 an adapter of this project, served, merged,
                                                        exported like any
    DIRECTORY/RUN/external_weights/NAME/                the same in PEFT's format, for a download
    …/checkpoint.json                                   when it was made, and until when it is kept

A checkpoint is written under another name and renamed, so a file with its name is whole. RUN is the
model's id with `_` for `:`. Any thread.
"""

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx_parallm.errors import RequestError
from mlx_parallm.system.files import (
    TEMPORARY,
    reserve_bytes,
    shortage,
    write_atomically,
    write_directory,
)

SCHEME = "tinker://"
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
KINDS = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
MOST_CHECKPOINTS = 4096  # for one run and kind
RUN_FILE, CHECKPOINT_FILE = "run.json", "checkpoint.json"


@dataclass(frozen=True)
class TinkerPath:
    """`run`: the model's id; `kind`: weights, sampler_weights or external_weights."""

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"


def read_path(text: str) -> TinkerPath:
    """Raises RequestError: no tinker:// path."""
    parts = text.removeprefix(SCHEME).split("/")
    if (
        not text.startswith(SCHEME)
        or len(parts) != 3
        or parts[1] not in KINDS
        or not all(map(_is_name, parts))
    ):
        raise RequestError(
            f"{text[:200]!r} is not a path of a checkpoint: expected {SCHEME}RUN/KIND/NAME with"
            f" KIND one of {', '.join(KINDS)}",
            param="path",
        )
    return TinkerPath(*parts)


def check_name(name: str) -> str:
    """Raises RequestError: not usable as a checkpoint's name."""
    if not _is_name(name):
        raise RequestError(
            f"{name[:200]!r} cannot name a checkpoint: use up to 128 letters, digits and . _ - = +"
            " @ , : and begin with"
            " a letter, a digit or _",
            param="path",
        )
    return name


def _is_name(name: str) -> bool:
    allowed = all(c.isascii() and (c.isalnum() or c in "._-=+@,:") for c in name)
    begins = 0 < len(name) <= 128 and (name[0].isalnum() or name[0] == "_")
    return begins and allowed and TEMPORARY not in name


@dataclass(frozen=True)
class TinkerRun:
    """A model that a client trains or has trained. `lora`: LoraChoice as JSON."""

    run_id: str
    base_model: str
    lora: Mapping[str, Any]
    created: float
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    session_id: str = ""


@dataclass(frozen=True)
class Checkpoint:
    path: TinkerPath
    directory: Path
    created: float
    expires: float | None = None
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    # optimizer steps, and how often a checkpoint was loaded before
    weights: tuple[int, int] | None = None

    @property
    def size_bytes(self) -> int:
        """The size of its files; 0 when it has just been deleted."""
        try:
            return sum(file.stat().st_size for file in self.directory.iterdir())
        except OSError:
            return 0

    def to_json(self) -> dict[str, Any]:
        """Return the checkpoint as the API shows it."""
        return {
            "checkpoint_id": self.path.checkpoint_id,
            "checkpoint_type": KINDS[self.path.kind],
            "time": iso(self.created),
            "tinker_path": str(self.path),
            "size_bytes": self.size_bytes,
            "public": False,
            "user_metadata": shown_metadata(self.user_metadata) or None,
            "expires_at": None if self.expires is None else iso(self.expires),
        }


def _read_run(file: Path) -> TinkerRun | None:
    """Read the file of a run. None: missing, or it is damaged, which must not hide the
    other runs."""
    try:
        return TinkerRun(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def shown_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """A client's metadata as the API shows it: text, and what is not a character (half of a pair)
    as an escape."""
    return {display(key): display(str(value)) for key, value in metadata.items()}


def display(text: str) -> str:
    """The text, fit for UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class Checkpoints:
    """All runs below a directory. Expired checkpoints are not found, and are removed when
    another one of their run is saved."""

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float] = time.time,
        *,
        min_free_gb: float | None = None,
    ) -> None:
        self.root = root.expanduser()
        self._clock, self._min_free_gb = clock, min_free_gb
        # called with each path whose content has changed
        self.removed: Callable[[str], None] = lambda name: None

    def run_directory(self, run_id: str) -> Path:
        """Raises RequestError: no run's id."""
        if not _is_name(run_id) or "_" in run_id:  # a directory has it for a colon
            raise RequestError(f"{run_id[:200]!r} is not an id of a training run")
        return self.root / run_id.replace(":", "_")

    def begin(self, run: TinkerRun) -> Path:
        """Make the run's directory, and write its description."""
        directory = self.run_directory(run.run_id)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / RUN_FILE, _json(vars(run) | {"lora": dict(run.lora)}))
        return directory

    def run(self, run_id: str) -> TinkerRun | None:
        file = self.run_directory(run_id) / RUN_FILE
        return _read_run(file)

    def runs(self) -> list[TinkerRun]:
        """Newest first."""
        files = self.root.glob(f"*/{RUN_FILE}") if self.root.is_dir() else ()
        runs = (_read_run(file) for file in files)
        return sorted((run for run in runs if run is not None), key=lambda run: -run.created)

    def save(
        self,
        path: TinkerPath,
        write: Callable[[Path], None],
        *,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        weights: tuple[int, int] | None = None,
    ) -> Path:
        """Write a checkpoint. Raises RequestError: there is one of that name, and it is not to
        be overwritten; the run has MOST_CHECKPOINTS; the disk is full, or nearly."""
        target = self._directory(path)
        if target.exists() and not overwrite and self.find(path) is not None:
            raise RequestError(
                f"{path} exists: choose another name, or save with overwrite=True", param="path"
            )
        self._check_room(target)
        now = self._clock()
        facts = {
            "created": now,
            "expires": None if ttl_seconds is None else now + ttl_seconds,
            "user_metadata": dict(user_metadata or {}),
            "step": None if weights is None else weights[0],
            "generation": 0 if weights is None else weights[1],
        }

        def fill(directory: Path) -> None:
            write(directory)
            (directory / CHECKPOINT_FILE).write_bytes(_json(facts))

        replaces = target.exists()
        try:
            write_directory(target, fill)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror or error}") from error
        if replaces:
            self.removed(str(path))
        self._remove_expired(path.run)
        return target

    def _check_room(self, target: Path) -> None:
        """Make the directory that the checkpoint goes to. Raises RequestError."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            reserve = reserve_bytes(target.parent, self._min_free_gb)
            count = sum(1 for _ in target.parent.iterdir())
        except OSError as error:
            raise RequestError(
                f"a checkpoint cannot be written: {error.strerror or error}"
            ) from error
        if (problem := shortage(target.parent, reserve)) is not None:
            raise RequestError(f"a checkpoint cannot be written: {problem}")
        if count >= MOST_CHECKPOINTS and not target.exists():
            raise RequestError(
                f"this run has {count} checkpoints of this kind,"
                f" {MOST_CHECKPOINTS} at most: delete some"
            )

    def find(self, path: TinkerPath) -> Checkpoint | None:
        """Return a checkpoint. None: missing, it has expired, or it is damaged."""
        checkpoint = self._read(path)
        return None if checkpoint is None or self._over(checkpoint) else checkpoint

    def _over(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.expires is not None and checkpoint.expires <= self._clock()

    def _read(self, path: TinkerPath) -> Checkpoint | None:
        directory = self._directory(path)
        try:
            facts = json.loads((directory / CHECKPOINT_FILE).read_text(encoding="utf-8"))
            metadata, step = facts["user_metadata"], facts.get("step")
            weights = None if step is None else (int(step), int(facts.get("generation", 0)))
            created, expires = float(facts["created"]), facts["expires"]
            return Checkpoint(
                path,
                directory,
                created,
                None if expires is None else float(expires),
                metadata,
                weights,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def exists(self, path: TinkerPath) -> bool:
        """Whether there is one, perhaps one whose time is over: a look at one file."""
        return (self._directory(path) / CHECKPOINT_FILE).is_file()

    def require(self, text: str) -> Checkpoint:
        """Raises RequestError: no path, or no checkpoint there."""
        checkpoint = self.find(read_path(text))
        if checkpoint is None:
            raise RequestError(f"there is no checkpoint {text}", param="path")
        return checkpoint

    def list(self, run_id: str, *kinds: str) -> list[Checkpoint]:
        """Return the checkpoints of one run, newest first: of these kinds, or of all."""
        checkpoints = []
        for kind in kinds or KINDS:
            for path in self._paths(run_id, kind):
                if checkpoint := self.find(path):
                    checkpoints.append(checkpoint)
        return sorted(checkpoints, key=lambda checkpoint: -checkpoint.created)

    def delete(self, path: TinkerPath) -> bool:
        """Return whether there was one."""
        directory = self._directory(path)
        if not directory.is_dir():
            return False
        gone = directory.parent / f".{uuid.uuid4().hex}"  # in one step: no half of it is found
        try:
            directory.rename(gone)
        except FileNotFoundError:  # another one was faster
            return False
        self.removed(str(path))
        shutil.rmtree(gone)
        return True

    def set_ttl(self, path: TinkerPath, ttl_seconds: int | None) -> bool:
        """Keep the checkpoint for so long from now on, None = forever. Return whether there is
        one."""
        if self.find(path) is None:
            return False
        file = self._directory(path) / CHECKPOINT_FILE
        facts = json.loads(file.read_text(encoding="utf-8"))
        facts["expires"] = None if ttl_seconds is None else self._clock() + ttl_seconds
        write_atomically(file, _json(facts))
        return True

    def _paths(self, run_id: str, kind: str) -> Iterator[TinkerPath]:
        """Yield the paths of a run's entries that may be checkpoints."""
        for entry in (self.run_directory(run_id) / kind).glob("*"):
            if _is_name(entry.name):
                yield TinkerPath(run_id, kind, entry.name)

    def _remove_expired(self, run_id: str) -> None:
        for path in [path for kind in KINDS for path in self._paths(run_id, kind)]:
            checkpoint = self._read(path)
            if checkpoint is not None and self._over(checkpoint):
                self.delete(path)

    def _directory(self, path: TinkerPath) -> Path:
        return self.run_directory(path.run) / path.kind / path.name

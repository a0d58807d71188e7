"""The directory of a run, `checkpoints/<run>/`, which one process has at a time; and how a path
on a command line leads to it. No MLX.

This package has the files in it, which training writes and `runs/` reads: checkpoints' state and
checksums, the state that a resume compares, metrics, evaluations, spans, samples, tokens. A
checkpoint's weights are `rl_training/checkpoint.py`'s, the groups `rollout_store`'s.
"""

import fcntl
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

from mlx_parallm.config.training import RolloutsConfig
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.metrics import METRICS_FILE
from mlx_parallm.run_files.trainer_state import STATE_FILE
from mlx_parallm.system.files import GB, shortage, sync, write_atomically
from mlx_parallm.system.log import CONFIGURED, get_logger

log = get_logger("train")

CONFIG_FILE = "config.toml"
STORE_FILE = "rollouts.sqlite"
MARKS_FILE = "marks.jsonl"  # orders given while the run continued
LOCK_FILE = ".lock"
# the newest checkpoint; the one at total_steps; the best so far
LATEST, FINAL, BEST = "latest", "final", "best"
USED_BY = (METRICS_FILE, STORE_FILE, LATEST)  # one of these files: the directory holds a run
_CHECKPOINT = re.compile(r"step_(\d+)(?:_mb(\d+))?")


def newest_checkpoint(run: Path) -> str | None:
    """Return the name of the newest checkpoint; None: there is none yet."""
    try:
        return str((run / LATEST).readlink())
    except OSError:
        return None


def checkpoints(run: Path) -> list[Path]:
    """The step_* directories, oldest first."""
    return sorted(
        (path for path in run.glob("step_*") if _CHECKPOINT.fullmatch(path.name)), key=moment
    )


def moment(checkpoint: Path) -> tuple[int, int]:
    """Returns (finished steps, mini-batches of the next) by the name of a step_* directory; (-1,
    0): it is none."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def checkpoint_at(path: Path) -> Path | None:
    """Returns `path` itself, or the checkpoint that `latest` of a run directory points at. Where
    a kill has left that link without a target, the newest step, or None. Raises
    CheckpointError: that one has lost its state, and an older one would be taken without a word."""
    for directory in (path, path / LATEST):
        if (directory / STATE_FILE).is_file():
            return directory.resolve()
    steps = checkpoints(path)
    complete = [step for step in steps if (step / STATE_FILE).is_file()]
    if complete and complete[-1] != steps[-1]:
        raise CheckpointError(
            f"{steps[-1]} has no {STATE_FILE}: it is damaged. Put it back, or continue from the"
            f" one before: --resume {complete[-1]}"
        )
    return complete[-1].resolve() if complete else None


def find_checkpoint(text: str, checkpoint_dir: Path, run_name: str | None) -> Path | None:
    """The checkpoint that `--resume text` means; its parent is the run directory.

    A run directory (its `latest`), one of its steps (step_5000 is step_005000), the specification's
    `checkpoints/latest` and `checkpoints/step_5000/` (of run `run_name`, else of the run that saved
    last), or "auto": `latest` of `run_name`, or None for a fresh start. Raises CheckpointError:
    nothing there; the message lists the runs.
    """
    if text == "auto":
        return checkpoint_at(checkpoint_dir / run_name) if run_name else None
    requested = Path(text).expanduser()
    candidates = [requested, requested.with_name(_padded(requested.name))]
    runs = [checkpoint_dir / run_name] if run_name else []
    if requested.parent.resolve() == checkpoint_dir.resolve() or len(requested.parts) == 1:
        newest_run = (checkpoint_dir / LATEST).resolve().parent
        candidates += [
            run / name
            for run in [*runs, newest_run]
            for name in (requested.name, _padded(requested.name))
        ]
        candidates += [checkpoint_dir / requested.name]
    for candidate in candidates:
        if checkpoint := checkpoint_at(candidate):
            return checkpoint
    there = requested if requested.is_dir() else checkpoint_dir
    names = (
        ", ".join(sorted(path.name for path in there.iterdir()))
        if there.is_dir()
        else "it does not exist"
    )
    raise CheckpointError(f"--resume {text}: no checkpoint there ({there}: {names or 'empty'})")


def _padded(name: str) -> str:
    number = name.removeprefix("step_")
    return f"step_{int(number):06d}" if number != name and number.isdecimal() else name


def find_run(path: Path) -> Path:
    """The run directory at `path`, or the one that `path` is a step of. Raises ConfigError: it
    is neither."""
    for place in (path, path.resolve().parent):
        if _is_run(place):
            return place.resolve()
    runs = sorted(place.name for place in path.iterdir() if _is_run(place)) if path.is_dir() else []
    hint = f"; runs in it: {', '.join(runs)}" if runs else ""
    raise ConfigError(
        f"{path} is not a run directory (no {METRICS_FILE}, {STORE_FILE} or {CONFIG_FILE}){hint}"
    )


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS_FILE, STORE_FILE, CONFIG_FILE))


class RunDirectory:
    """Held by an advisory lock from `open` to `close`, which the end of the process releases
    too."""

    def __init__(self, path: Path, lock: int, *, made_here: bool) -> None:
        self.path = path
        self._lock = lock
        self._made_here = made_here

    @classmethod
    def open(
        cls,
        checkpoint_dir: Path,
        run_name: str | None,
        checkpoint: Path | None,
        *,
        reuse: bool = False,
    ) -> "RunDirectory":
        """The directory of `checkpoint`, or a new one under `checkpoint_dir`.

        Args:
            reuse: a directory of that name is taken over (`--resume auto`, and no checkpoint was
                made in it).

        Raises ConfigError: no name, or a run of that name is there already. CheckpointError:
        another process has it, or it cannot be written.
        """
        if checkpoint is not None:
            path = checkpoint.parent
        elif run_name is None:
            raise ConfigError("rl_training.run_name is needed")
        else:
            path = checkpoint_dir / run_name
            if not reuse and any((path / name).exists() for name in USED_BY):
                raise ConfigError(
                    f"{path} holds a run already: continue with --resume {path}, or choose"
                    " another rl_training.run_name"
                )
        return cls.hold(path)

    @classmethod
    def hold(cls, path: Path) -> "RunDirectory":
        """Lock this directory; make it when it does not exist. Raises CheckpointError: in use, or
        not writable."""
        made_here = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)  # it holds people's prompts and answers
            if made_here:  # a power cut must not lose the directory's name
                sync(path.parent)
                sync(path.parent.parent)
            lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise CheckpointError(f"{path} is in use by another process") from error
        return cls(path, lock, made_here=made_here)

    @staticmethod
    def in_use(path: Path) -> bool:
        """Whether a process holds the directory now. Asks for a shared lock and gives it back at
        once."""
        try:
            lock = os.open(path / LOCK_FILE, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def is_there(self) -> bool:
        """Whether its path still leads to it: it may have been removed or replaced."""
        try:
            present, held = (self.path / LOCK_FILE).stat(), os.fstat(self._lock)
        except OSError:
            return False
        return (present.st_dev, present.st_ino) == (held.st_dev, held.st_ino)

    def write_config(self, text: str) -> None:
        """Write the configuration (`Config.saved_as`), once it has proved to fit: a resume that
        fails must not replace the old one."""
        write_atomically(self.path / CONFIG_FILE, text.encode())
        log.info(CONFIGURED, file=str(self.path / CONFIG_FILE))

    def keep(self) -> None:
        """Note that the start has succeeded: `discard` leaves the directory alone."""
        self._made_here = False

    def discard(self) -> None:
        """Remove the directory if `hold` made it, unless it is to be kept; called after `close`."""
        if self._made_here:
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        os.close(self._lock)


# ---------------------------------------------------------------------- which run a command line
# means


def name_after(source: str, resume: str | None) -> str:
    """Return the name of a run that has none: its configuration's and the time; without the time
    for "auto", which must find it again."""
    stem = Path(source).name.removesuffix(".toml").removesuffix(".jsonl")
    return stem if resume == "auto" else f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"


def directory_of(checkpoint_dir: Path, run_name: str | None, resume: str | None) -> Path:
    """Where the run lies or will lie. Raises ConfigError: nothing to resume there."""
    if resume is None or resume == "auto":
        return checkpoint_dir / str(run_name)
    requested = Path(resume).expanduser()
    # also a run that was killed before it wrote its configuration
    if (requested / STORE_FILE).is_file():
        return requested.resolve()
    return saved_config(requested).parent.resolve()


def saved_config(resume: Path) -> Path:
    """The resolved configuration of a run, from its directory or from one of its steps. Raises
    ConfigError."""
    if not resume.exists():
        same_step = ", ".join(map(str, _same_step(resume)))
        raise ConfigError(
            f"--resume {resume}: no such directory"
            + (f"; that step is in {same_step}" if same_step else "")
        )
    for directory in (resume, resume.resolve().parent):
        if (directory / CONFIG_FILE).is_file():
            return directory / CONFIG_FILE
    raise ConfigError(f"--resume {resume}: no {CONFIG_FILE} there or above it: give --config")


def _same_step(resume: Path) -> list[Path]:
    """The directories of that name, or of that step (step_5000 is step_005000), in the runs
    beside it."""
    word, _, number = resume.name.rpartition("_")
    names = (
        {resume.name, f"step_{int(number):06d}"}
        if word == "step" and number.isdecimal()
        else {resume.name}
    )
    runs = sorted(path for path in resume.parent.glob("*/") if not path.is_symlink())
    return [run / name for run in runs for name in sorted(names) if (run / name).is_dir()]


class DiskUse:
    """Prunes a run's rollouts after each checkpoint, and ends the run in order before its disk is
    full.

    Args:
        keep: how many of the newest checkpoints can ask for their rollouts again. An older one that
            is kept as the best cannot: a resume from it samples again.
    """

    def __init__(
        self, directory: RunDirectory, store: RolloutStore, config: RolloutsConfig, *, keep: int
    ) -> None:
        self._directory, run = directory, directory.path
        self._run, self._store, self._config, self._keep = run, store, config, keep
        self._warned = False

    def check(self) -> None:
        """Raises CheckpointError when less than the reserve is free, or the directory was
        removed: then the run has to save and end. (The store would take groups that cannot be found
        again.)"""
        if not self._directory.is_there():
            raise CheckpointError(
                f"training stops: {self._run} was removed or replaced while it trained"
            )
        if fault := shortage(self._run, self._store.min_free_bytes):
            raise CheckpointError(f"training stops: {fault}, then continue: --resume {self._run}")

    def prune(self) -> None:
        """Remove consumed rollouts that no recent checkpoint of the run needs for a resume."""
        kept = [moment(path)[0] for path in checkpoints(self._run)[-self._keep :]]
        if not kept:
            return
        keep, bound = self._config.keep, round(self._config.max_gb * GB)
        always = -1 if keep == "all" else max(kept) - keep
        pruned = self._store.prune(min(kept), always_up_to_step=always, max_bytes=bound)
        if pruned:
            log.info(
                "consumed rollouts pruned", groups=pruned, file_gb=self._store.size_bytes() / GB
            )
        elif (
            bound
            and (used := self._store.database.size_bytes(used=True)) > bound
            and not self._warned
        ):
            self._warned = True
            log.warning(
                "rollouts.sqlite is larger than rollouts.max_gb, but every group in it waits or"
                " may be needed by a"
                " resume: lower keep_checkpoints or checkpoint_interval to make it smaller",
                gb=used / GB,
                max_gb=self._config.max_gb,
            )

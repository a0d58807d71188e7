"""The directory of a run: `checkpoints/<run>/`, one process at a time, with the resolved configuration. No MLX."""

import fcntl
import os
import shutil
from pathlib import Path

from mlx_parallm.config import Config
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.log import get_logger
from mlx_parallm.rl_training.files import write_atomically

log = get_logger("train")

CONFIG_FILE = "config.toml"
STORE_FILE = "rollouts.sqlite"
LOCK_FILE = ".lock"
LATEST, FINAL = "latest", "final"  # the newest checkpoint; the one at total_steps
USED_BY = ("metrics.jsonl", STORE_FILE, "latest")  # what says that a run has been here


class RunDirectory:
    """Held by an advisory lock from `open` to `close`, which the end of the process releases too."""

    def __init__(self, path: Path, lock: int, *, made_here: bool) -> None:
        self.path = path
        self._lock = lock
        self._made_here = made_here

    @classmethod
    def open(cls, config: Config, checkpoint: Path | None, *, reuse: bool = False) -> "RunDirectory":
        """The directory of `checkpoint`, or a new one under `checkpoint_dir`.

        Args:
            reuse: a directory of that name is taken over (`--resume auto`, and no checkpoint was made in it).

        Raises ConfigError: no name, or a run of that name is there already. CheckpointError: another process has it,
        or it cannot be written.
        """
        training = config.rl_training
        if checkpoint is not None:
            path = checkpoint.parent
        elif training.run_name is None:
            raise ConfigError("rl_training.run_name is needed")
        else:
            path = training.checkpoint_dir / training.run_name
            if not reuse and any((path / name).exists() for name in USED_BY):
                raise ConfigError(
                    f"{path} holds a run already: go on with --resume {path}, or choose another rl_training.run_name"
                )
        made_here = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
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
        """Whether a process holds the directory now. Asks for a shared lock and gives it back at once."""
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

    def write_config(self, config: Config) -> None:
        """Once the configuration has proved to fit: a resume that fails must not replace the one that did."""
        named = config.rl_training.model_copy(update={"run_name": self.path.name})
        text = config.model_copy(update={"rl_training": named}).to_toml()
        write_atomically(self.path / CONFIG_FILE, text.encode())
        log.info("configuration written", file=str(self.path / CONFIG_FILE))

    def discard(self) -> None:
        """A start that failed leaves nothing: removes the directory if `open` made it. After `close`."""
        if self._made_here:
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        os.close(self._lock)

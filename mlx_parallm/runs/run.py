"""`Run`: the directory of a training run, read. No MLX.

    config.toml         config, load_config       rollouts.sqlite     open_rollouts
    metrics.jsonl       metrics, metrics_file     tokens.sqlite       token_values
    evaluations.jsonl   evaluations               run.log             events
    marks.jsonl         marks                     spans.jsonl         spans
    step_*, latest, …   checkpoints, checkpoint   .lock               running

Whatever shows a run reads it through this class: `explain`, `compare`, `rollouts`, `replay`, the
dashboard. How a file's lines look is in the module that writes them.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from mlx_parallm.config.leaves import Leaf, client_trainer
from mlx_parallm.config.load import Config, load_config
from mlx_parallm.errors import ConfigError, StoreError
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.directory import (
    BEST,
    CONFIG_FILE,
    FINAL,
    LATEST,
    LOCK_FILE,
    MARKS_FILE,
    STORE_FILE,
    RunDirectory,
    checkpoint_at,
    checkpoints,
    find_run,
)
from mlx_parallm.run_files.evaluations import EVALUATIONS_FILE, EvaluationLog
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.run_files.spans import SPANS_FILE, lines_of_steps
from mlx_parallm.run_files.token_records import TOKENS_FILE, read_tokens
from mlx_parallm.system.log import RUN_LOG_FILE

FILES = {
    "config": CONFIG_FILE,
    "metrics": METRICS_FILE,
    "evaluations": EVALUATIONS_FILE,
    "rollouts": STORE_FILE,
    "marks": MARKS_FILE,
    "spans": SPANS_FILE,
    "tokens": TOKENS_FILE,
    "log": RUN_LOG_FILE,
}
"""The parts of a run that are one file each."""

Metrics = Mapping[str, Any]
"""A line of metrics.jsonl or evaluations.jsonl."""


def open_run(path: Path) -> "Run":
    """Return the run at `path`, or the one that `path` is a step of. Raises ConfigError: neither
    is there."""
    return Run(find_run(path))


class Run:
    """A run directory: of a run that continues, was killed or has finished. Nothing in it is
    changed.

    Properties read a part when it is first used and keep it, so one `Run` shows one moment;
    `fresh` returns a later one. Methods read anew. A file that is missing or damaged is named by
    the error of its part; a last line that is only half written is left out.

    Attributes:
        running: whether a process trains it. Looked up first, so a run that ends while it is read
            counts as running.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running = RunDirectory.in_use(path)

    def fresh(self) -> "Run":
        return Run(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def file(self, part: str) -> Path:
        """Return the path of one of FILES."""
        return self.path / FILES[part]

    def has(self, part: str) -> bool:
        return self.file(part).is_file()

    def version(self, part: str) -> str:
        """Return a word for the state of one of FILES, another one after each change; "": it is
        not there."""
        file = self.file(part)
        if part == "rollouts":  # new groups are in the log of the database first
            return "+".join(_version(file.with_name(f"{file.name}{end}")) for end in ("", "-wal"))
        return _version(file)

    # ------------------------------------------------------------------ state

    @property
    def has_final(self) -> bool:
        """Whether the checkpoint at total_steps was made; a resume may continue after it."""
        return (self.path / FINAL).exists()

    @property
    def finished(self) -> bool:
        total = self.total_steps
        goes_on = bool(self.metrics) and total is not None and self.steps < total
        return self.has_final and not (goes_on and self.ended is None)

    @property
    def ended(self) -> str | None:
        """The condition of rl_training.until that ended the run, and the number that met it."""
        return self.metrics[-1].get("ended") if self.metrics else None

    @property
    def state(self) -> str:
        if self.running:
            return "running"
        return "finished" if self.finished else "stopped or killed"

    @property
    def waits(self) -> bool:
        """Whether another step of the run is still to be made."""
        return not self.finished and (self.total_steps is None or self.steps < self.total_steps)

    @property
    def steps(self) -> int:
        """The number of the last finished step."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @cached_property
    def started(self) -> float:
        """When the process that trains it, or did, wrote the configuration; Unix seconds."""
        config = self.file("config")
        return config.stat().st_mtime if config.exists() else self.until

    @cached_property
    def until(self) -> float:
        """Now while the run continues, else when its newest file was written; Unix seconds."""
        return time.time() if self.running else self._last_written()

    def _last_written(self) -> float:
        """Database and lock do not count: reading changes those."""
        files = [
            file
            for file in self.path.iterdir()
            if not file.name.startswith((STORE_FILE, LOCK_FILE))
        ]
        return max(
            (file.stat().st_mtime for file in [*files, self.path / LATEST] if file.exists()),
            default=0.0,
        )

    # ------------------------------------------------------------------ configuration

    def load_config(self, overrides: Sequence[str] = ()) -> Config:
        """Return the resolved configuration of the run with `section.key=value` overrides. Raises
        ConfigError: it is missing or not valid."""
        return load_config(self.file("config"), list(overrides), saved=True)

    @cached_property
    def config(self) -> Config | None:
        """The resolved configuration; None if it is missing or not valid."""
        try:
            return self.load_config()
        except ConfigError:
            return None

    @cached_property
    def _sections(self) -> Mapping[str, Any]:
        """The configuration as it is written, so that another version's can be read too."""
        try:
            return tomli.loads(self.file("config").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    @property
    def client_trainer(self) -> Leaf | None:
        """The leaf whose clients decide on samples and steps; such a run has
        neither groups nor rewards."""
        return client_trainer(self._sections)

    @property
    def total_steps(self) -> int | None:
        """The steps that the run is to make; None: unknown, or its clients decide."""
        if self.client_trainer is not None:
            return None
        try:
            return int(self._sections["rl_training"]["total_steps"])
        except (ValueError, KeyError):
            return None

    # ------------------------------------------------------------------ lines

    @cached_property
    def metrics_file(self) -> MetricsFile:
        """For who reads only the newest lines, or those behind a position."""
        return MetricsFile(self.file("metrics"))

    @cached_property
    def metrics(self) -> Sequence[Metrics]:
        """A line for each finished step. Raises CheckpointError: a damaged line."""
        return list(self.metrics_file.read())

    @cached_property
    def evaluations(self) -> Sequence[Metrics]:
        """A line for each evaluation that was made. Raises CheckpointError: a damaged line."""
        return EvaluationLog(self.path).done()

    def marks(self, most: int) -> list[dict[str, Any]]:
        """Return the newest marks: people's commands. Raises CheckpointError: a damaged line."""
        return MetricsFile(self.file("marks")).last(most)

    def spans(self, first: int, last: int) -> Iterator[dict[str, Any]]:
        """Yield the lines of spans.jsonl of these steps."""
        return lines_of_steps(self.file("spans"), first, last) if self.has("spans") else iter(())

    def events(self, *names: str) -> Iterator[dict[str, Any]]:
        """Yield the entries of run.log that have one of these names, oldest first; a line that is
        no entry is left out."""
        if not self.has("log"):
            return
        with self.file("log").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                # most lines are others: only these are parsed
                if any(f'"{name}"' in line for name in names):
                    entry = _entry(line)
                    if entry.get("event") in names:
                        yield entry

    # ------------------------------------------------------------------ rollouts and checkpoints

    def open_rollouts(self) -> RolloutStore:
        """Return the rollout store, to be closed by the caller. Raises StoreError: not found,
        or it cannot be read."""
        if not self.has("rollouts"):
            raise StoreError(
                f"{self.path}: no {STORE_FILE}: nothing has arrived yet, or a"
                " run in Python, which keeps none"
            )
        return RolloutStore(self.file("rollouts"), read_only=True)

    def token_values(self, group_id: str, number: int, segment: int) -> Mapping[str, np.ndarray]:
        """Return the trainer's numbers for the tokens of one segment; empty if the run has
        not kept it."""
        return read_tokens(self.path, group_id, number, segment)

    def checkpoints(self) -> list[Path]:
        """Return the step_* directories, oldest first."""
        return checkpoints(self.path)

    def checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint."""
        return checkpoint_at(self.path)

    def links(self, checkpoint: Path) -> Iterator[str]:
        """Yield the names that lead to a checkpoint: latest, best, final."""
        for name in (LATEST, BEST):
            link = self.path / name
            if link.is_symlink() and link.resolve() == checkpoint:
                yield name
        if checkpoint.name == FINAL:
            yield FINAL


def _version(file: Path) -> str:
    try:
        stat = file.stat()
    except OSError:
        return ""
    return f"{stat.st_ino}.{stat.st_size}.{stat.st_mtime_ns}"


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}

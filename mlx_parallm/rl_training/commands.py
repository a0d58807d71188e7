"""RunCommands: what people order of a run while it continues, called from any thread.

    note                   at once
    stop                   at once: the event that a signal sets, too
    checkpoint, change     by the trainer's thread, between two steps (`perform`)

A rollback has its own service (publish/rollback.py); its mark is written here. Each command is
a line of the log and of `marks.jsonl`: `{"step", "time", "kind", "text"}`, `step` finished steps,
`time` in Unix seconds. Nothing is cut from that file on a resume: what people did, they did.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.config.load import Config
from mlx_parallm.config.training import CHANGEABLE
from mlx_parallm.errors import (
    CheckpointError,
    ConfigError,
    ParallmError,
    RefusedError,
    RequestError,
)
from mlx_parallm.run_files.directory import MARKS_FILE
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.system.log import get_logger

log = get_logger("train")


class CommandedRun(Protocol):
    """A run that performs commands, on the trainer's thread."""

    def save_now(self) -> str:
        """Save a checkpoint; return its name. Raises CheckpointError."""

    def change_settings(self, changes: Mapping[str, Sequence[float]]) -> None:
        """Take new values, {key: [before, now]}; they are in a checkpoint when this returns.
        Raises CheckpointError."""


OnChange = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True)
class _Waiting:
    perform: Callable[[CommandedRun, "OnChange"], dict[str, Any]]
    result: Future[dict[str, Any]]


class RunCommands:
    """The commands of one run.

    `config` is the run's configuration as it is now; `keep` changes it.

    Args:
        config: the one that the run starts with.
        step: finished steps.
        alone: false: other processes train along, so settings stay.
    """

    def __init__(
        self,
        run: Path,
        stop: threading.Event,
        config: Config,
        *,
        step: Callable[[], int],
        alone: bool = True,
    ) -> None:
        self._file, self._stop = MetricsFile(run / MARKS_FILE), stop
        self.config, self._step, self._alone = config, step, alone
        self._file.cut(sys.maxsize)  # half a line that a power cut has left
        self._lock = threading.Lock()  # guards what follows, and the file
        self._waiting: deque[_Waiting] = deque()
        self._closed = False

    # ------------------------------------------------------------------ any thread

    def settings(self) -> dict[str, float]:
        """Return the values of CHANGEABLE."""
        return self.config.rl_training.changeable()

    def fixed(self) -> str | None:
        """Return why settings cannot be changed; None: they can."""
        if self.config.rl_training.deterministic:
            return (
                "rl_training.deterministic is on: the run has to repeat bit"
                " for bit from its configuration"
            )
        return (
            None
            if self._alone
            else "other processes train along, with the settings that they began with"
        )

    def mark(self, kind: str, text: str) -> None:
        """Write a mark at the present step. Raises CheckpointError: a full disk."""
        with self._lock:
            self._file.append(
                {"step": self._step(), "time": time.time(), "kind": kind, "text": text}
            )
        log.info("command", kind=kind, text=text, step=self._step())

    def stop(self) -> None:
        """Order the run to save a checkpoint and end. Raises RefusedError: the training has
        ended."""
        with self._lock:
            self._check_open()
        try:
            self.mark("stop", "stopped, with a checkpoint")
        finally:
            self._stop.set()  # on a full disk too

    def checkpoint(self) -> "Future[dict[str, Any]]":
        """Order a checkpoint. Result: {"checkpoint": its name}. Raises RefusedError: the
        training has ended."""

        def perform(run: CommandedRun, on_change: OnChange) -> dict[str, Any]:
            name = run.save_now()
            self.mark("checkpoint", f"checkpoint {name}")
            return {"checkpoint": name}

        return self._order(perform)

    def change(self, values: Mapping[str, float]) -> "Future[dict[str, Any]]":
        """Order other settings from the next step on. Result: {key: [before, now]} of what differs.

        Raises RefusedError: the run has to keep its settings, or the training has ended.
        RequestError: no such key, a wrong value.
        """
        if why := self.fixed():
            raise RefusedError(f"the settings stay: {why}", 409)
        self._check(values)

        def perform(run: CommandedRun, on_change: OnChange) -> dict[str, Any]:
            before = self.settings()
            self._check(values)
            changes = {
                key: [before[key], value] for key, value in values.items() if value != before[key]
            }
            if changes:
                run.change_settings(changes)
                on_change({key: now for key, (_, now) in changes.items()})
                texts = [f"{key} {was:g} → {now:g}" for key, (was, now) in changes.items()]
                self.mark("settings", ", ".join(texts))
            return changes

        return self._order(perform)

    def _check(self, values: Mapping[str, float]) -> None:
        """Raises RequestError."""
        for key in values:
            if key not in CHANGEABLE:
                raise RequestError(
                    f"only {', '.join(CHANGEABLE)} can change while the run continues", param=key
                )
        config = self.config
        if (beta := values.get("kl_beta")) is not None:
            if config.rl_training.kl_target is not None:
                raise RequestError(
                    "kl_target steers the KL: kl_beta is only its first value", param="kl_beta"
                )
            if beta == 0 and config.rl_training.kl_beta > 0:
                why = (
                    "without KL the run would lose its reference: stop it,"
                    " and resume it with kl_beta = 0"
                )
                raise RequestError(why, param="kl_beta")
            if config.rl_training.kl_beta == 0 and beta > 0:
                why = (
                    "with kl_beta = 0 the run has no reference: stop it, and resume it with"
                    " another kl_beta"
                )
                raise RequestError(why, param="kl_beta")
        if "learning_rate" in values and config.rl_training.algorithm == "ppo":
            why = (
                "the value head's rate hangs on it: stop the run, and resume"
                " it with another learning_rate"
            )
            raise RequestError(why, param="learning_rate")
        try:
            config.with_training(values)
        except ConfigError as error:
            raise RequestError(str(error)) from error

    def _order(
        self, perform: Callable[[CommandedRun, OnChange], dict[str, Any]]
    ) -> "Future[dict[str, Any]]":
        waiting = _Waiting(perform, Future())
        waiting.result.set_running_or_notify_cancel()  # it is done even if its client has gone
        with self._lock:
            self._check_open()
            self._waiting.append(waiting)
        return waiting.result

    def _check_open(self) -> None:
        if self._closed:
            raise RefusedError("the training has ended", 409)

    # ------------------------------------------------------------------ the trainer's thread

    def perform(self, run: CommandedRun, on_change: OnChange) -> None:
        """Do what waits; `on_change` gets new settings that the run has taken. Raises
        CheckpointError: the disk."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                waiting = self._waiting.popleft()
            try:
                waiting.result.set_result(waiting.perform(run, on_change))
            except ParallmError as error:
                waiting.result.set_exception(error)
                if isinstance(error, CheckpointError):
                    raise
            finally:
                if not waiting.result.done():
                    waiting.result.set_exception(
                        RefusedError("the training has ended in an error", 409)
                    )

    def keep(self, values: Mapping[str, float]) -> None:
        """Note settings that the trainer has taken."""
        self.config = self.config.with_training(values)

    def close(self) -> None:
        """Refuse what waits, and everything from now on."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = list(self._waiting), deque()
        for each in waiting:
            each.result.set_exception(
                RefusedError("the training has ended before it was done", 409)
            )

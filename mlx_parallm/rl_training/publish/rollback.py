"""Rollbacks requested at /v1/training/rollback, done by the trainer's thread between two steps.

    RollbackService ─ take ─► find the version in memory, or a checkpoint → put it back → publish
    under a new number

Weights, optimizer and the trainer's own numbers go back; steps, schedules, data and random states
continue. Rollouts of versions that are left count as stale (run_files/versions.py); those of the
version that is back are fresh.
"""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog

from mlx_parallm.errors import ParallmError, RefusedError
from mlx_parallm.rl_training.checkpoint import OPTIMIZER_FILE, CheckpointVersions
from mlx_parallm.rl_training.publish.guard import TrainingState
from mlx_parallm.rl_training.publish.weight_updater import WeightUpdater
from mlx_parallm.rl_training.step.policy import read_tensors
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.checksums import check_files
from mlx_parallm.run_files.trainer_state import STATE_FILE, TrainerState

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class RollbackTarget:
    """One of the two. `checkpoint`: the name of a directory of the run, e.g. step_000120."""

    version: int | None = None
    checkpoint: str | None = None

    def __str__(self) -> str:
        return self.checkpoint or f"version {self.version}"


@dataclass(frozen=True)
class RequestedRollback:
    target: RollbackTarget
    result: Future[dict[str, Any]]


class RollbackService:
    """Hands one request at a time from any thread to the trainer's, which takes it and sets its
    result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: RequestedRollback | None = None
        self._last: RequestedRollback | None = None

    def request(
        self, *, version: int | None = None, checkpoint: str | None = None
    ) -> RequestedRollback:
        """Raises RefusedError: another request is not done yet, or the training has ended."""
        with self._lock:
            if self._closed:
                raise RefusedError("the training has ended: nothing is rolled back any more", 409)
            if self._last is not None and not self._last.result.done():
                raise RefusedError(
                    f"a rollback to {self._last.target} is not done yet: ask again then", 409
                )
            self._waiting = self._last = RequestedRollback(
                RollbackTarget(version, checkpoint), Future()
            )
            # it is done even if its client has gone
            self._last.result.set_running_or_notify_cancel()
            return self._last

    def take(self) -> RequestedRollback | None:
        """Returns a request that was not taken yet."""
        with self._lock:
            taken, self._waiting = self._waiting, None
            return taken

    def last(self) -> RequestedRollback | None:
        with self._lock:
            return self._last

    def close(self) -> None:
        """Refuses the request that waits, and one whose rollback failed half-way. Called by the
        thread that takes."""
        with self._lock:
            self._closed, self._waiting = True, None
        if self._last is not None and not self._last.result.done():
            self._last.result.set_exception(
                RefusedError("the training has ended before it was rolled back", 409)
            )


@dataclass(frozen=True)
class Rollback:
    """`step` steps were finished when the weights went back to those of `to`, `to_step` steps
    old, as `version`."""

    step: int
    to: str
    to_step: int
    version: int


class Rollbacks:
    """One run's. The trainer's thread only; the service is for the others."""

    def __init__(
        self, service: RollbackService, run: Path, trainer: Trainer, updater: WeightUpdater
    ) -> None:
        self._service, self._run = service, run
        self._trainer, self._states, self._updater = trainer, updater.states, updater
        self._archive = CheckpointVersions(run)
        self._answer: tuple[Future[dict[str, Any]], Rollback] | None = None

    def perform(self, step: int) -> Rollback | None:
        """Perform the waiting rollback after `step` finished steps; None: none waits, or it was
        refused. `settle` sends the answer."""
        requested = self._service.take()
        if requested is None:
            return None
        target, future = requested.target, requested.result
        started = time.perf_counter()
        try:
            state = self._put_back(target)
        except ParallmError as error:
            log.warning("rollback refused", to=str(target), reason=str(error))
            future.set_exception(error)
            return None
        report = self._updater.go_back(state, step)
        done = Rollback(step, str(target), state.steps, report.version)
        log.warning(
            "rolled back",
            to=done.to,
            version=done.version,
            seconds=round(time.perf_counter() - started, 3),
        )
        self._answer = future, done
        return done

    def settle(self) -> None:
        """Answers the client: the rollback is in a checkpoint now."""
        if self._answer is not None:
            future, done = self._answer
            future.set_result(
                {
                    "to": done.to,
                    "to_step": done.to_step,
                    "step": done.step,
                    "policy_version": done.version,
                }
            )
            self._answer = None

    def _put_back(self, target: RollbackTarget) -> TrainingState:
        if target.version is not None and (kept := self._states.find(target.version)) is not None:
            self._states.put_back(kept)
            return kept
        path = self._checkpoint(target)
        before = self._states.now()
        try:
            return self._load(path)
        except ParallmError:
            self._states.put_back(before)  # a damaged checkpoint is found out half-way
            raise

    def _load(self, path: Path) -> TrainingState:
        """Load a checkpoint as `Checkpointer.resume` does, except data, random states and metrics:
        those continue."""
        state = TrainerState.read(path)
        check_files(path)
        self._trainer.policy.load(path)
        self._trainer.optimizer.restore(read_tensors(path / OPTIMIZER_FILE))
        self._trainer.restore(state.trainer)
        mx.eval(self._trainer.policy.slots.read())
        # in the middle of a step: no version has these weights
        table = [] if state.unpublished else state.versions
        return TrainingState(state.policy_version, state.step, (), {}, None, {}, table)

    def _checkpoint(self, target: RollbackTarget) -> Path:
        there = sorted(path.parent.name for path in self._run.glob(f"*/{STATE_FILE}"))
        if target.version is not None:
            path = self._archive.path(target.version)
            if path is None:
                versions = sorted({*self._states.kept(), *self._archive.versions()})
                raise RefusedError(
                    f"version {target.version} is not kept. Kept: {_listed(versions)}; see"
                    " rl_training.weight_updates.rollback_versions and keep_checkpoints",
                    404,
                    "version",
                )
            return path
        name = target.checkpoint or ""
        if name not in there:
            raise RefusedError(
                f"no checkpoint {name!r}. There are: {_listed(there)}", 404, "checkpoint"
            )
        return (self._run / name).resolve()


def _listed(names: list[Any]) -> str:
    return ", ".join(map(str, names)) or "none"

"""Rollbacks: what /v1/training/rollback asks for, done by the trainer's thread between two steps.

    RollbackDesk ─ take ─► find the version in memory, or a checkpoint → put it back → publish under a new number

Weights, optimizer and the trainer's own numbers go back; steps, schedules, data and random states go on. Rollouts of
versions that are left count as stale (versions.py); those of the version that is back are fresh.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog

from mlx_parallm.errors import ParallmError, RollbackRefusedError
from mlx_parallm.rl_training.checkpoint import OPTIMIZER_FILE
from mlx_parallm.rl_training.checkpoints.trainer_state import STATE_FILE, TrainerState
from mlx_parallm.rl_training.checkpoints.versions import CheckpointVersions
from mlx_parallm.rl_training.publish.guard import TrainingState
from mlx_parallm.rl_training.step.policy import read_tensors
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rl_training.weight_updater import WeightUpdater
from mlx_parallm.server.api.training import RollbackDesk, RollbackTarget

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Rollback:
    """`step` steps were finished when the weights went back to those of `to`, `to_step` steps old, as `version`."""

    step: int
    to: str
    to_step: int
    version: int


class Rollbacks:
    """One run's. The trainer's thread only; the desk is for the others."""

    def __init__(self, desk: RollbackDesk, run: Path, trainer: Trainer, updater: WeightUpdater) -> None:
        self._desk, self._run = desk, run
        self._trainer, self._states, self._updater = trainer, updater.states, updater
        self._archive = CheckpointVersions(run)
        self._answer: tuple[Future[dict[str, Any]], Rollback] | None = None

    def perform(self, step: int) -> Rollback | None:
        """What is waiting, after `step` finished steps; None: nothing, or it was refused. `settle` tells who asked."""
        asked = self._desk.take()
        if asked is None:
            return None
        target, future = asked
        started = time.perf_counter()
        try:
            state = self._put_back(target)
        except ParallmError as error:
            log.warning("rollback refused", to=str(target), reason=str(error))
            future.set_exception(error)
            return None
        report = self._updater.go_back(state, step)
        done = Rollback(step, str(target), state.steps, report.version)
        log.warning("rolled back", to=done.to, version=done.version, seconds=round(time.perf_counter() - started, 3))
        self._answer = future, done
        return done

    def settle(self) -> None:
        """It is in a checkpoint now: who asked is answered."""
        if self._answer is not None:
            future, done = self._answer
            future.set_result(
                {"to": done.to, "to_step": done.to_step, "step": done.step, "policy_version": done.version}
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
        """As `Checkpointer.resume`, but for what goes on: data, random states, metrics."""
        state = TrainerState.read(path)
        self._trainer.policy.load(path)
        self._trainer.optimizer.restore(read_tensors(path / OPTIMIZER_FILE))
        self._trainer.restore(state.trainer)
        mx.eval(self._trainer.policy.slots.read())
        table = [] if state.unpublished else state.versions  # of half a step: no version has had these weights
        return TrainingState(state.policy_version, state.step, (), {}, None, {}, table)

    def _checkpoint(self, target: RollbackTarget) -> Path:
        there = sorted(path.parent.name for path in self._run.glob(f"*/{STATE_FILE}"))
        if target.version is not None:
            path = self._archive.path(target.version)
            if path is None:
                versions = sorted({*self._states.kept(), *self._archive.versions()})
                raise RollbackRefusedError(
                    f"version {target.version} is not kept. Kept: {_listed(versions)}; see"
                    " rl_training.weight_updates.rollback_versions and keep_checkpoints",
                    404,
                    "version",
                )
            return path
        name = target.checkpoint or ""
        if name not in there:
            raise RollbackRefusedError(f"no checkpoint {name!r}. There are: {_listed(there)}", 404, "checkpoint")
        return (self._run / name).resolve()


def _listed(names: list[Any]) -> str:
    return ", ".join(map(str, names)) or "none"

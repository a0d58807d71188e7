"""TrainingLoop: the order of a run's steps.

    wait for a batch → [request the next one] → train → publish → metrics line → checkpoint →
    [request the next one]

The groups of the next `max_staleness` steps are requested *before* training. With max_staleness = 0
the next step's groups are requested after the publish, so that the newest weights sample them; in
deterministic mode they therefore start after publish, metrics line and checkpoint of the step
before.

A metrics line is on the disk before the checkpoint of its step: a resume cuts lines, it never
misses one. On a stop request the loop finishes the micro-batch, saves, and returns. Events
go to `events.RunEvents`. After a fault of the device nothing is published, and only the copy of the
last sound moment is saved (`Checkpointer.keep`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from mlx_parallm.config.training import LoopSection
from mlx_parallm.environments.base import Learner
from mlx_parallm.errors import CheckpointError, ParallmError
from mlx_parallm.models.sums import may_lose_results, raise_stored_faults
from mlx_parallm.rl_training.checkpoint import Checkpointer
from mlx_parallm.rl_training.events import (
    BatchReady,
    CheckpointSaved,
    Outcome,
    RolledBack,
    RunEvents,
    StepFinished,
    Waiting,
)
from mlx_parallm.rl_training.publish.rollback import Rollbacks
from mlx_parallm.rl_training.publish.weight_updater import WeightUpdater
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch
from mlx_parallm.rl_training.step.prepare import StepPosition
from mlx_parallm.rl_training.step.trainer import StepResult, Trainer
from mlx_parallm.rl_training.until import Until
from mlx_parallm.run_files.metrics import MetricsFile, complete
from mlx_parallm.run_files.trainer_state import StepInProgress, TrainerState
from mlx_parallm.run_files.versions import VersionSteps
from mlx_parallm.system.device.faults import DeviceFaults
from mlx_parallm.system.footprint import process_bytes
from mlx_parallm.system.log import words_of
from mlx_parallm.weights import PublishReport


class Batches(Protocol):
    """The source of batches: the rollout buffer, or rows of a file."""

    def request(self, step: int, last: int | None = None) -> None: ...
    def health(self) -> str | None: ...
    def collect(self, step: int, *, timeout_s: float) -> TrainBatch | None: ...
    def resume(self, step: int, group_ids: Sequence[str]) -> TrainBatch: ...
    def choose_again(self) -> None: ...


class Source(Protocol):
    """An in-process source of rollouts, whose state a checkpoint keeps."""

    def state(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class Parts:
    """The parts of a run; `run/assembly.py` makes them."""

    training: LoopSection
    trainer: Trainer
    buffer: Batches
    versions: VersionSteps
    updater: WeightUpdater
    checkpointer: Checkpointer | None  # None: no run directory, as in a notebook
    metrics: MetricsFile | None
    sources: Mapping[str, Source]
    rollbacks: Rollbacks | None = None
    # by the name of their environment
    learners: Mapping[str, Learner] = field(default_factory=dict)


@dataclass(frozen=True)
class RunControl:
    """Calls from the loop to the run, always on the trainer's thread.

    Args:
        should_stop: whether to save and return.
        before_step, while_waiting: checks that raise to save and end the run: failed sources, a
            full disk. The second is called at least every `wait_turn_s` while a step waits for its
            batch.
        between_steps: performs commands; called as often, while no step is under way.
        training: a context around each training step.
        measure: further numbers for the metrics line of a step that was trained and published.
        measure_end: the same of a step that turns out to be the last: `until` is met.
        after_step: called with the line when it is on the disk; true: save a checkpoint, besides
            those of checkpoint_interval. An exception ends the run.
        served_tokens: the engine's counter of sampled tokens.
        publishing: a context around the publish, the metrics line and a checkpoint.
        writing: a context around the writing of a checkpoint.
        faults: the device's, shared with the engine. After one nothing is published or saved.
    """

    should_stop: Callable[[], bool] = lambda: False
    before_step: Callable[[], None] = lambda: None
    between_steps: Callable[[], None] = lambda: None
    while_waiting: Callable[[], None] = lambda: None
    training: Callable[[], AbstractContextManager[None]] = nullcontext
    measure: Callable[[int], Mapping[str, Any]] = lambda step: {}
    measure_end: Callable[[int], Mapping[str, Any]] = lambda step: {}
    after_step: Callable[[dict[str, Any]], bool | None] = lambda line: None
    served_tokens: Callable[[], int] = lambda: 0
    wait_turn_s: float = 0.5
    publishing: Callable[[], AbstractContextManager[None]] = nullcontext
    writing: Callable[[], AbstractContextManager[None]] = nullcontext
    faults: DeviceFaults = field(default_factory=DeviceFaults)


class TrainingLoop:
    def __init__(
        self,
        parts: Parts,
        *,
        control: RunControl | None = None,
        events: RunEvents | None = None,
        state: TrainerState | None = None,
    ) -> None:
        self._parts, self._training = parts, parts.training
        self._control, self._events = control or RunControl(), events or RunEvents()
        self._step = state.step if state else 0
        self._last = self._training.total_steps
        self._in_progress = state.in_progress if state else None
        parts.trainer.restore(state.trainer if state else {})
        parts.updater.begin()
        self._line: dict[str, Any] | None = state.metrics if state else None
        self._saved: str | None = state.checkpoint_name if state else None
        self._counters = (time.perf_counter(), self._control.served_tokens())
        self._timeouts = parts.updater.timeouts
        self._refused = parts.updater.refused
        self._gave_up = ""  # why the last step had fewer rollouts
        self._until = Until.of(self._training.until)
        self._rollbacks = list(state.rollbacks) if state else []
        # since the last line
        self._rolled_back_to: str | None = _unreported(self._rollbacks, self._step)
        self._changes = list(state.changes) if state else []
        self._changed: dict[str, float] = {}  # settings, since the last line
        for change in self._changes:
            if change["step"] == self._step:
                self._changed |= {key: now for key, (_, now) in change["settings"].items()}
        self._sources_after_step = self._sources_now() if self._training.deterministic else None

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._step

    def run(self, until: int | None = None) -> Outcome:
        """Train up to step `until` (default: total_steps), to the condition of
        rl_training.until, or to a stop request, and save. May be called again for later steps.
        Raises CheckpointError: the disk. EnvironmentFailedError:
        the sources."""
        self._last = until or self._training.total_steps
        while self._step < self._last and not self._until.ended(self._line):
            step = self._step + 1
            work, self._in_progress = self._in_progress, None
            waited = time.perf_counter()
            try:
                with self._events.span("wait", step):
                    batch = self._batch(step, work)
            # the sources have failed; the weights are sound, and no step is under way
            except ParallmError:
                self._control.faults.check()
                if work is None:
                    self._save(None)
                raise
            if batch is None:
                return self._stop(None)
            time_rollout_s = (work.time_rollout_s if work else 0.0) + time.perf_counter() - waited
            self._request_ahead(step + 1, 1 + self._training.max_staleness)
            self._events.emit(BatchReady(batch))
            with self._events.span("train", step):
                result = self._train(batch, work)
            result = replace(result, seconds=result.seconds + (work.time_train_s if work else 0.0))
            if not result.finished:
                return self._stop(_interrupted(batch, result, time_rollout_s))
            with self._control.publishing():
                self._finish_step(batch, result, time_rollout_s)
        self._save(None, final=True)
        written = self._parts.metrics.read() if self._parts.metrics is not None else ()
        self._until.tell(self._line, written, self._events)
        return "finished"

    # ------------------------------------------------------------------ the parts of a step

    def _batch(self, step: int, work: StepInProgress | None) -> TrainBatch | None:
        """Return the step's batch; None when a stop was requested before it was complete."""
        if work is not None:
            batch = self._parts.buffer.resume(step, work.group_ids)
            return replace(
                batch, statistics=BatchStatistics(**work.statistics), gave_up=work.gave_up
            )
        started, requested = time.perf_counter(), False
        self._control.before_step()
        while not self._control.should_stop():
            if self._roll_back():
                requested = False
            self._control.between_steps()
            if self._young_enough(step):
                if not requested:
                    self._parts.buffer.request(step)
                    self._request_ahead(step, self._training.max_staleness)
                requested = True
                batch_or_none = self._parts.buffer.collect(
                    step, timeout_s=self._control.wait_turn_s
                )
                if batch_or_none is not None:
                    return batch_or_none
            self._control.while_waiting()
            self._events.emit(Waiting(step, time.perf_counter() - started))
            # waits for the lock, so this loop does not spin
            self._parts.updater.publish_if_due(self._step)
        return None

    def _roll_back(self) -> bool:
        """Perform a requested rollback between two steps, saved before the request is answered."""
        done = self._parts.rollbacks.perform(self._step) if self._parts.rollbacks else None
        if done is None or self._parts.rollbacks is None:
            return False
        self._rolled_back_to = done.to
        self._rollbacks.append(
            {"step": done.step, "to": done.to, "to_step": done.to_step, "version": done.version}
        )
        self._parts.buffer.choose_again()
        if self._parts.checkpointer is not None:
            self._parts.checkpointer.set_aside(self._state(None).checkpoint_name)
        self._save(None, anew=True)
        self._events.emit(RolledBack(self._step, done.to, done.version))
        self._parts.rollbacks.settle()
        return True

    def _request_ahead(self, step: int, lead: int) -> None:
        """Request the groups of `step` and later ones, up to `lead` steps beyond the step of the
        served weights."""
        _, steps = self._parts.versions.newest
        last = min(steps + lead, self._last)
        if last >= step:
            self._parts.buffer.request(step, last)

    def _young_enough(self, step: int) -> bool:
        """Whether groups sampled by the served weights are within max_staleness when `step` is
        trained."""
        _, steps = self._parts.versions.newest
        return step - 1 - steps <= self._training.max_staleness

    def _train(self, batch: TrainBatch, work: StepInProgress | None) -> StepResult:
        # the report of the run counts them
        if batch.gave_up and words_of(batch.gave_up) != self._gave_up:
            trained = len(batch.sequences)
            self._events.warn(
                "step with fewer rollouts",
                step=batch.step,
                trained_sequences=trained,
                reason=batch.gave_up,
            )
        self._gave_up = words_of(batch.gave_up)
        position = StepPosition.from_json(work.position) if work else None
        if not all(learner.trains_policy(batch.step) for learner in self._parts.learners.values()):
            batch = replace(batch, sequences=())
        with self._control.training():
            # before the other ranks begin, since they get the scores
            started = time.perf_counter()
            scored_position = self._parts.trainer.ask_companions(
                batch, position, self._control.should_stop
            )
            if scored_position is None:
                return StepResult(False, position or StepPosition(), {}, 0.0)
            asking_s = time.perf_counter() - started
            self._parts.trainer.announce_step(batch, scored_position)
            result = self._parts.trainer.train_step(
                batch, position=scored_position, should_stop=self._control.should_stop
            )
            return replace(result, seconds=asking_s + result.seconds)

    def _finish_step(self, batch: TrainBatch, result: StepResult, time_rollout_s: float) -> None:
        self._step = batch.step
        last = batch.step == self._last
        raise_stored_faults()
        self._control.faults.check()
        started = time.perf_counter()
        with self._events.span("publish", batch.step):
            report = self._parts.updater.after_step(
                batch.step,
                updates=result.position.updates,
                last=last,
                rollouts=[sequence.rollout for sequence in batch.sequences],
            )
        time_publish_s = time.perf_counter() - started
        learned = self._learn_beside(batch)
        times = {
            "time_rollout_s": time_rollout_s,
            "time_train_s": result.seconds,
            "time_publish_s": time_publish_s,
        } | dict(self._control.measure(batch.step))
        self._line = self._metrics(batch, result, report, times | learned)
        if ends := self._until.met_by(self._line):
            self._line |= ({} if last else self._end(batch)) | {"ended": ends}
            last = True
        if self._parts.metrics is not None:
            self._parts.metrics.append(self._line)
        if self._sources_after_step is not None:
            self._sources_after_step = self._sources_now()
        self._events.emit(StepFinished(self._line, batch, self._parts.trainer.step_tokens))
        self._keep_proved()
        wanted = self._control.after_step(self._line)
        if not last and (wanted or batch.step % self._training.checkpoint_interval == 0):
            self._save(None)

    def _end(self, batch: TrainBatch) -> dict[str, Any]:
        """Serve and measure the weights of a step that turns out to be the last. Return what this
        changes in its line."""
        updater = self._parts.updater
        if updater.state().dirty:
            rollouts = [sequence.rollout for sequence in batch.sequences]
            updater.after_step(batch.step, updates=0, last=True, rollouts=rollouts)
        numbers = {"policy_version": updater.version} | dict(self._control.measure_end(batch.step))
        return numbers

    def _learn_beside(self, batch: TrainBatch) -> dict[str, Any]:
        """Let the environments' learners learn from their groups, before the next ones are
        sampled."""
        numbers: dict[str, Any] = {}
        for name, learner in self._parts.learners.items():
            groups = [group for group in batch.groups if group.environment == name]
            numbers |= learner.learn(batch.step, groups, self._training.total_steps)
        return numbers

    def _metrics(
        self,
        batch: TrainBatch,
        result: StepResult,
        report: PublishReport | None,
        times: dict[str, Any],
    ) -> dict[str, Any]:
        now, served = time.perf_counter(), self._control.served_tokens()
        seconds, tokens = now - self._counters[0], served - self._counters[1]
        updater = self._parts.updater
        timeouts, refused = updater.timeouts - self._timeouts, updater.refused - self._refused
        self._counters = (now, served)
        self._timeouts, self._refused = updater.timeouts, updater.refused
        rolled_back_to, self._rolled_back_to = self._rolled_back_to, None
        changed, self._changed = self._changed, {}
        memory_gb = mx.get_peak_memory() / 1e9
        mx.reset_peak_memory()
        return complete(
            {
                "step": batch.step,
                "policy_version": updater.version,
                **batch.statistics.to_metrics(),
                **result.metrics,
                "publish_timeouts": timeouts,
                "publishes_refused": refused,
                "publish_kl": updater.publish_kl,
                "rolled_back_to": rolled_back_to,
                "gave_up": batch.gave_up or None,
                **({"changed": changed} if changed else {}),
                **times,
                "publish_ms": report.total_ms if report else None,
                "serve_tok_s": tokens / seconds if seconds > 0 else None,
                "memory_gb": memory_gb,
                "footprint_gb": process_bytes() / 1e9,
            }
        )

    def _sources_now(self) -> dict[str, Any]:
        return {name: source.state() for name, source in self._parts.sources.items()}

    # ------------------------------------------------------------------ saving

    def _stop(self, work: StepInProgress | None) -> Outcome:
        self._save(work if work and work.mini_batches else None)
        return "stopped"

    def _save(
        self, work: StepInProgress | None, *, final: bool = False, anew: bool = False
    ) -> None:
        self._control.faults.check()
        state, checkpointer = self._state(work), self._parts.checkpointer
        if checkpointer is not None and (state.checkpoint_name != self._saved or final or anew):
            with self._control.writing(), self._events.span("checkpoint", self._step):
                path = checkpointer.save(state, final=final, served=self._served(state))
            self._events.emit(CheckpointSaved(self._step, path))
            if anew:
                self._keep_proved()
        self._saved = state.checkpoint_name

    def _keep_proved(self) -> None:
        """Keep a copy of this moment, which is sound, in case a GPU fails later. A CPU that fails
        ends the process."""
        if self._parts.checkpointer is not None and may_lose_results():
            raise_stored_faults()
            self._control.faults.check()
            state = self._state(None)
            self._parts.checkpointer.keep(state, self._served(state))

    def save_proved(self) -> Path | None:
        """Save the last sound moment after a fault of the device; None: the last checkpoint is as
        new, or nothing newer is in memory."""
        return None if self._parts.checkpointer is None else self._parts.checkpointer.save_kept()

    def save_now(self) -> str:
        """Save a checkpoint between two steps unless one has these weights; return its name.
        Raises CheckpointError."""
        if self._parts.checkpointer is None:
            raise CheckpointError("this run has no directory for checkpoints")
        self._save(None)
        return str(self._saved)

    def change_settings(self, changes: Mapping[str, Sequence[float]]) -> None:
        """Continue with other values, {key: [before, now]}: they are in the next metrics line,
        and in a checkpoint when this returns. Raises CheckpointError."""
        self._parts.trainer.change({key: now for key, (_, now) in changes.items()})
        self._changes.append(
            {"step": self._step, "settings": {key: list(each) for key, each in changes.items()}}
        )
        self._changed |= {key: now for key, (_, now) in changes.items()}
        if self._parts.checkpointer is not None:
            self._parts.checkpointer.set_aside(self._state(None).checkpoint_name, forget=False)
        self._save(None, anew=True)

    def save(self, *, best: bool = False) -> Path:
        """Save a checkpoint between two `run`s; with `best`, the link `best` points at it from now
        on.

        Raises CheckpointError: it cannot be written, or the run has no directory.
        """
        if self._parts.checkpointer is None:
            raise CheckpointError("this run has no directory for checkpoints")
        state = self._state(None)
        path = self._parts.checkpointer.save(state, best=best, served=self._served(state))
        self._events.emit(CheckpointSaved(self._step, path))
        self._saved = state.checkpoint_name
        return path

    def _served(self, state: TrainerState) -> dict[str, mx.array] | None:
        return self._parts.updater.served() if state.unpublished else None

    def _state(self, work: StepInProgress | None) -> TrainerState:
        updater = self._parts.updater
        return TrainerState(
            step=self._step,
            policy_version=updater.version,
            versions=self._parts.versions.state(),
            unpublished=updater.state().dirty or bool(work and work.position["updates"]),
            in_progress=work,
            optimizer_updates=self._parts.trainer.optimizer.updates,
            sources=self._sources_now()
            if work or self._sources_after_step is None
            else self._sources_after_step,
            metrics=self._line,
            rollbacks=self._rollbacks,
            changes=self._changes,
            trainer=self._parts.trainer.state(),
        )


def _unreported(rollbacks: Sequence[Mapping[str, Any]], step: int) -> str | None:
    """Return the target of a rollback after `step` steps: no metrics line has reported it yet."""
    return str(rollbacks[-1]["to"]) if rollbacks and rollbacks[-1]["step"] == step else None


def _interrupted(batch: TrainBatch, result: StepResult, time_rollout_s: float) -> StepInProgress:
    return StepInProgress(
        step=batch.step,
        group_ids=batch.group_ids,
        position=result.position.to_json(),
        statistics=batch.statistics.to_json(),
        time_rollout_s=time_rollout_s,
        time_train_s=result.seconds,
        gave_up=batch.gave_up,
    )

"""The one assembly of a run's parts, for `mlx_parallm train` (start.py) and for programs
(faces/library).

    trainer, run directory, checkpoint → open_files: the trainer is at the run's last step
    → the caller lets the weights be served, and makes the batches → make_parts → TrainingLoop
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from mlx_parallm.config.training import LearningSection
from mlx_parallm.environments.base import Learner
from mlx_parallm.rl_training.checkpoint import Checkpointer, ConsumedGroups
from mlx_parallm.rl_training.events import RunEvents
from mlx_parallm.rl_training.loop import Batches, Parts, Source
from mlx_parallm.rl_training.publish.rollback import Rollbacks, RollbackService
from mlx_parallm.rl_training.publish.weight_updater import WeightUpdater
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.best_checkpoint import Judge
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.run_files.versions import VersionNumbers, VersionSteps
from mlx_parallm.weights import SharedWeights


@dataclass(frozen=True)
class RunFiles:
    """Checkpoints and metrics lines of a run.

    `checkpoint`, `state`: the run continues from them; None: it begins. `learners`: beside the
    policy, by the name of their environment.
    """

    checkpointer: Checkpointer
    metrics: MetricsFile
    checkpoint: Path | None
    state: TrainerState | None
    learners: Mapping[str, Learner]

    @property
    def step(self) -> int:
        """The number of steps that the run continues from."""
        return self.state.step if self.state is not None else 0

    def served(self) -> dict[str, mx.array]:
        """Return the weights that the server answered with, if the checkpoint's are newer; else
        nothing. Raises CheckpointError."""
        if self.checkpoint is None or self.state is None:
            return {}
        return self.checkpointer.served(self.checkpoint, self.state)

    def versions(self, numbers: VersionNumbers, *, served_known: bool) -> VersionSteps:
        """Return the table of the versions so far. `served_known`: `served` has the weights of the
        newest one."""
        if self.state is None:
            return VersionSteps()
        return self.state.restored_versions(numbers, served_known=served_known)


def open_files(
    run: Path,
    trainer: Trainer,
    groups: ConsumedGroups,
    *,
    checkpoint: Path | None,
    keep: int,
    keep_best: bool,
    judge: Judge | None = None,
    learners: Mapping[str, Learner] | None = None,
) -> RunFiles:
    """Open the files of a run in its directory. Put the trainer, its files and `groups` back to
    the moment of `checkpoint`, if there is one. Make a RolloutBuffer only afterwards.

    Args:
        groups: the store in which consumed groups go back to waiting.
        keep, keep_best, judge, learners: as in `Checkpointer`.

    Raises CheckpointError, AdapterError: as `Checkpointer.resume`.
    """
    metrics, learners = MetricsFile(run / METRICS_FILE), learners or {}
    checkpointer = Checkpointer(
        run,
        trainer.policy,
        trainer.optimizer,
        keep=keep,
        keep_best=keep_best,
        judge=judge,
        learners=learners,
    )
    state = checkpointer.resume(checkpoint, groups, metrics) if checkpoint is not None else None
    return RunFiles(checkpointer, metrics, checkpoint, state, learners)


@dataclass(frozen=True)
class PublishedWeights:
    """The weights that answer when the loop begins.

    `versions`: the table up to the one that is served. `older`: the served weights, if the
    trained ones are newer (`RunFiles.served`); empty: both are the same.
    """

    shared: SharedWeights
    versions: VersionSteps
    numbers: VersionNumbers
    older: Mapping[str, mx.array] = field(default_factory=dict)


def make_parts(
    trainer: Trainer,
    training: LearningSection,
    published: PublishedWeights,
    batches: Batches,
    files: RunFiles | None,
    *,
    drained: Callable[[], AbstractContextManager[None]] = nullcontext,
    events: RunEvents | None = None,
    sources: Mapping[str, Source] | None = None,
    rollbacks: RollbackService | None = None,
) -> Parts:
    """Make the parts of the loop that takes `batches`, trains and publishes.

    Args:
        files: None: nothing is kept, as in a notebook.
        drained, events: as in `WeightUpdater`.
        sources: whose state a checkpoint keeps.
        rollbacks: takes the requests; None: there are no requests.
    """
    updater = WeightUpdater(
        published.shared,
        trainer,
        published.versions,
        training.weight_updates,
        repeats=training.deterministic,
        numbers=published.numbers,
        drained=drained,
        events=events,
    )
    if files is None:
        return Parts(
            training, trainer, batches, published.versions, updater, None, None, sources or {}
        )
    if published.older and files.state is not None:
        every = training.weight_updates.update_every_n_steps
        updater.resume(published.older, due=files.state.publish_is_due(every))
    run = files.checkpointer.run_directory
    return Parts(
        training,
        trainer,
        batches,
        published.versions,
        updater,
        files.checkpointer,
        files.metrics,
        sources or {},
        None if rollbacks is None else Rollbacks(rollbacks, run, trainer, updater),
        files.learners,
    )

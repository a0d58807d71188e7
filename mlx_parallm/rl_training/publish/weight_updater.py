"""WeightUpdater: the one point where training reaches the server. Policy →
`SharedWeights.publish_*` every n steps.

If the weight lock cannot be taken within `lock_timeout_ms`, the old weights keep serving; the
publish stays due and is tried again after the next step, and while the trainer waits for rollouts
(with `max_staleness = 0` they can only come afterwards). Weights that no update has changed since
the last publish are not published: a version is a difference.

Weights that the guard refuses are taken back, with their optimizer, to those of the served version,
which continues
serving: left as they are they would be refused after every later step too, and their rollouts would
grow stale.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.config.training import WeightUpdateConfig
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.errors import CheckpointError, PublishTimeoutError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.rl_training.events import RunEvents, WeightsPublished
from mlx_parallm.rl_training.publish.guard import (
    NOT_SERVED,
    PublishGuard,
    TrainingState,
    TrainingStates,
    Verdict,
    digest,
)
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.versions import VersionNumbers, VersionSteps
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Rollout
from mlx_parallm.weights import PublishReport, SharedWeights

log = get_logger("train")


def publish(
    weights: SharedWeights, trainer: Trainer, version: int, timeout_s: float | None
) -> PublishReport:
    """Serve the trained weights as `version`. Raises PublishTimeoutError: nothing has changed.
    DeviceFaultError: the weights are not those that the optimizer holds."""
    policy = trainer.policy

    def adapter() -> Mapping[str, LoraPair]:
        trainer.optimizer.write()
        return policy.adapter()

    def parameters() -> Mapping[str, mx.array]:
        trainer.optimizer.write()
        return policy.full_parameters()

    if policy.lora:
        return weights.publish_adapter(
            policy.adapter(),
            version=version,
            timeout_s=timeout_s,
            again=adapter,
        )
    return weights.publish_parameters(
        policy.full_parameters(),
        version=version,
        timeout_s=timeout_s,
        again=parameters,
    )


@contextmanager
def drained(client: EngineClient, should_stop: Callable[[], bool]) -> Iterator[None]:
    """Let no new request begin, and wait for those that run, for the length of the block."""
    client.pause_admission()
    try:
        while not client.wait_idle(0.5) and not should_stop():
            log.debug("waiting for running requests to end before a publish")
        yield
    finally:
        client.resume_admission()


@dataclass(frozen=True)
class UpdaterState:
    """Hold whether there are trained weights that are not served, and whether their publish is
    overdue."""

    dirty: bool = False
    due: bool = False


class WeightUpdater:
    """One thread's, the trainer's. `timeouts` counts locks that could not be taken, `refused`
    updates taken back.

    Args:
        numbers: of the versions; default: counted up by one.
        drained: with `in_flight = "drain"`: a context in which no request runs (admission stops,
            running ones end).
        events: gets every publish, also one that was tried again; the drain is not in its time.
    """

    def __init__(
        self,
        weights: SharedWeights,
        trainer: Trainer,
        versions: VersionSteps,
        updates: WeightUpdateConfig,
        *,
        repeats: bool,
        numbers: VersionNumbers | None = None,
        drained: Callable[[], AbstractContextManager[None]] = nullcontext,
        events: RunEvents | None = None,
    ) -> None:
        policy = trainer.policy
        self._weights, self._policy, self._versions, self._config = (
            weights,
            policy,
            versions,
            updates,
        )
        self._guard = PublishGuard(policy, trainer.logprobs, updates.max_publish_kl)
        self.states = TrainingStates(trainer, versions, updates.kept_versions(lora=policy.lora))
        self._trainer = trainer
        self._repeats = repeats
        self._numbers = numbers or VersionNumbers()
        self._drained = drained if updates.in_flight == "drain" else nullcontext
        self._events = events or RunEvents()
        self._state = UpdaterState()
        self._resumed: tuple[list[mx.array], bool] | None = None
        self.timeouts = self.refused = 0
        self.publish_kl: float | None = None  # the last step's that was to be published

    def resume(self, served: Mapping[str, mx.array], *, due: bool) -> None:
        """Note, before `begin`, that these are served, and the trained weights are newer. `due`:
        to be published."""
        self._resumed = list(served.values()), due

    def begin(self) -> None:
        """Note that the trained weights are the served ones: before the first step, and after
        each publish."""
        if self._resumed is None:
            self._guard.published()
            self.states.keep()
            return
        (served, due), self._resumed = self._resumed, None
        self._guard.published(served)
        self.states.keep(served=False)
        self._state = UpdaterState(dirty=True, due=due)

    def served(self) -> dict[str, mx.array]:
        """The weights that are served, by the names of `TrainedPolicy.full_parameters`."""
        return dict(zip(self._policy.full_parameters(), self._guard.served, strict=True))

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def due(self) -> bool:
        """Whether a publish is overdue because its lock could not be taken in time."""
        return self._state.due

    def after_step(
        self, step: int, *, updates: int, last: bool = False, rollouts: Sequence[Rollout] = ()
    ) -> PublishReport | None:
        """Publishes when `step` is one of every n, or the last; None when nothing was published.

        Args:
            rollouts: the step's; the guard measures with them.

        Raises CheckpointError: the guard refused, and there is nothing in memory to go back to.
        """
        dirty = self._state.dirty or updates > 0
        due = dirty and (self._state.due or last or step % self._config.update_every_n_steps == 0)
        self._state = UpdaterState(dirty, due)
        self.publish_kl = None
        if due:
            self._look_at(self._guard.judge(rollouts), step)
        if not self._state.dirty:
            self._versions.still_newest(step)
        return self.publish_if_due(step)

    def publish_if_due(self, step: int) -> PublishReport | None:
        """Tries an overdue publish of the weights that `step` steps have made."""
        if not self._state.due:
            return None
        try:
            report = self._publish(self._config.lock_timeout_ms / 1e3)
        except PublishTimeoutError as error:
            self.timeouts += 1
            self._events.warn(
                "weights not published, the old ones keep serving", step=step, reason=str(error)
            )
            return None
        self._versions.record(report.version, step)
        self._published(report, step)
        return report

    def go_back(self, state: TrainingState, step: int) -> PublishReport:
        """Publish the restored weights of `state` after `step` steps, as a version.
        Waits for the lock."""
        report = self._publish(None)
        self._versions.go_back(state.table, state.steps, version=report.version, steps=step)
        self._published(report, step)
        return report

    def _look_at(self, verdict: Verdict, step: int) -> None:
        self.publish_kl = verdict.kl
        state = self.states.newest()
        if verdict.reason:
            self.refused += 1
            if state is None:
                raise CheckpointError(
                    f"step {step} is not published: {verdict.reason}. Go back with --resume to a"
                    " checkpoint before it,"
                    " and lower rl_training.learning_rate"
                )
            self._events.warn(
                "update taken back, the old weights keep serving", step=step, reason=verdict.reason
            )
            self.states.put_back(state)
        if verdict.reason or not verdict.moved:
            unserved = bool(verdict.reason) and state is not None and state.version == NOT_SERVED
            self._state = UpdaterState(dirty=unserved, due=unserved)

    def _publish(self, timeout_s: float | None) -> PublishReport:
        """Raises PublishTimeoutError."""
        number = self._numbers.reserve(
            self._weights.version, digest(self._policy) if self._repeats else None
        )
        with self._drained():
            report = publish(self._weights, self._trainer, number, timeout_s)
            self._numbers.used()
            self._trainer.ranks.publish(number, self._trainer)
        return report

    def _published(self, report: PublishReport, step: int) -> None:
        self._state = UpdaterState()
        self.begin()
        self._events.emit(WeightsPublished(step, report))

    def state(self) -> UpdaterState:
        return self._state

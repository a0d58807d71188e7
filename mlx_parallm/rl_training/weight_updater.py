"""WeightUpdater: the one point where training reaches the server. Policy → `SharedWeights.publish_*` every n steps.

A lock that is not had within `lock_timeout_ms` leaves the old weights serving; the publish stays due and is tried again
after the next step, and while the trainer waits for rollouts (with `max_staleness = 0` they can only come afterwards).
Weights that no update has changed since the last publish are not published: a version is a difference.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import structlog

from mlx_parallm.config import WeightUpdateConfig
from mlx_parallm.errors import PublishTimeoutError
from mlx_parallm.rl_training.policy import TrainedPolicy
from mlx_parallm.rl_training.versions import VersionSteps
from mlx_parallm.weights import PublishReport, SharedWeights

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class UpdaterState:
    """What a checkpoint keeps: whether there are trained weights that are not served, and whether that is overdue."""

    dirty: bool = False
    due: bool = False


class WeightUpdater:
    """One thread's, the trainer's. `timeouts` counts locks that were not had in time.

    Args:
        drained: with `in_flight = "drain"`: a context in which no request runs (admission stops, running ones end).
        on_publish: told of every publish, also of one that was tried again; the drain is not in its time.
    """

    def __init__(
        self,
        weights: SharedWeights,
        policy: TrainedPolicy,
        versions: VersionSteps,
        config: WeightUpdateConfig,
        *,
        drained: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_publish: Callable[[PublishReport], None] = lambda report: None,
    ) -> None:
        self._weights, self._policy, self._versions, self._config = weights, policy, versions, config
        self._drained = drained if config.in_flight == "drain" else nullcontext
        self._on_publish = on_publish
        self._state = UpdaterState()
        self.timeouts = 0

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def due(self) -> bool:
        """A publish is overdue: its lock was not had in time."""
        return self._state.due

    def after_step(self, step: int, *, updates: int, last: bool = False) -> PublishReport | None:
        """Publishes when `step` is one of every n, or the last; None when nothing was published."""
        dirty = self._state.dirty or updates > 0
        due = dirty and (self._state.due or last or step % self._config.update_every_n_steps == 0)
        self._state = UpdaterState(dirty, due)
        if not dirty:
            self._versions.still_newest(step)
        return self.publish_if_due(step)

    def publish_if_due(self, step: int) -> PublishReport | None:
        """Tries an overdue publish of the weights that `step` steps have made."""
        if not self._state.due:
            return None
        timeout_s = self._config.lock_timeout_ms / 1e3
        try:
            with self._drained():
                if self._policy.lora:
                    report = self._weights.publish_adapter(self._policy.adapter(), timeout_s=timeout_s)
                else:
                    report = self._weights.publish_parameters(self._policy.full_parameters(), timeout_s=timeout_s)
        except PublishTimeoutError as error:
            self.timeouts += 1
            log.warning("weights not published, the old ones keep serving", step=step, reason=str(error))
            return None
        self._state = UpdaterState()
        self._versions.record(report.version, step)
        self._on_publish(report)
        return report

    def state(self) -> UpdaterState:
        return self._state

    def restore(self, state: UpdaterState) -> None:
        self._state = state

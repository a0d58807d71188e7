"""The seam for what travels with the sequences of a step beside their tokens.

A companion has a name, by which `Trainer.companions` holds it, and answers the questions of the
stages that concern it; the defaults answer nothing. The trainer, the buffer and the loop ask all of
them and name none. Those that a configuration asks for are built by `factory.build_companions`.
"""

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.types import Rollout, RolloutGroup


class StepCompanion:
    """Something that travels with sequences, in a training step. One thread's, the trainer's."""

    name: ClassVar[str]

    # ------------------------------------------------------------------ groups become a batch

    def teaches(self, group: RolloutGroup) -> bool:
        """Return whether a group has a signal of this one, whatever its rewards are."""
        return False

    def dataset_completion(self, group: RolloutGroup) -> Rollout | None:
        """Return the dataset's answer to learn from in a group's place, or None."""
        return None

    # ------------------------------------------------------------------ a step

    def score(
        self, batch: TrainBatch, should_stop: Callable[[], bool]
    ) -> dict[str, np.ndarray] | None:
        """Return columns of scores, before the first update; None after a stop request."""
        return {}

    def measured(self) -> dict[str, float | None]:
        """Return numbers of the newest step for its metrics line."""
        return {}

    # ------------------------------------------------------------------ a run

    def health(self) -> str | None:
        """Say what is wrong; None when nothing is."""
        return None

    def close(self) -> None:
        """Let go of what it holds."""

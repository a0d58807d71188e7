"""The seam for what travels with the sequences of a step beside their tokens.

A companion has a name, by which `Trainer.companions` holds it, and answers the questions of the
stages that concern it; the defaults answer nothing. The trainer, the buffer and the loop ask all of
them and name none. Those that a configuration asks for are built by `factory.build_companions`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from mlx_parallm.rl_training.step.collate import Measure
    from mlx_parallm.rl_training.step.prepare import PreparedBatch


class StepCompanion:
    """What travels with sequences, as a training step sees it. One thread's, the trainer's."""

    name: ClassVar[str]

    # ------------------------------------------------------------------ groups become a batch

    def teaches(self, group: RolloutGroup) -> bool:
        """Return whether a group has a signal of this one, whatever its rewards are."""
        return False

    def dataset_completion(self, group: RolloutGroup) -> Rollout | None:
        """Return the dataset's answer to learn from in a group's place; None: there is none."""
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


class Compared(Protocol):
    """What a loss compares the model's distribution with, at the trained tokens of a step."""

    def measure(self, columns: np.ndarray) -> "Measure":
        """Return the function that gives one number for each of the tokens at these columns."""
        ...


class Signal(Protocol):
    """How a step learns from the scores of a companion; a part of the algorithm, so that every rank
    has it. The scores are columns of the step like its other scores: an interrupted step continues
    with them, and other ranks get them from rank 0.

    `companion`: the name of the one that scores. `column`: of its scores; a step that has it is not
    scored again. `missing`: what to say where that companion is not there.
    """

    @property
    def companion(self) -> str: ...

    @property
    def column(self) -> str: ...

    @property
    def missing(self) -> str: ...

    @property
    def temperature(self) -> float | None:
        """The temperature at which distributions are compared; None: the rollout's."""
        ...

    def learned(
        self,
        prepared: "PreparedBatch",
        batch: TrainBatch,
        scores: Mapping[str, np.ndarray],
        policy: np.ndarray,
    ) -> "PreparedBatch":
        """Return a prepared batch with these scores in it. `policy` [N]: log-probabilities of the
        weights that the step starts from."""
        ...

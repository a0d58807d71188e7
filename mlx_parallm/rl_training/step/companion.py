"""The seam for what travels with the sequences of a step beside their tokens.

A companion has a name, by which `Trainer.companions` holds it, and answers the questions of the
stages that concern it; the defaults answer nothing. The trainer, the buffer and the loop ask all of
them and name none. companions.py lists those of every policy; `factory.build_companions` adds those
of the leaves.

    a group enters a batch   teaches, dataset_completion
    before the first update  begin_step, score
    rows → a micro-batch     admit, wants_rows, columns
    a pass                   seen
    a mini-batch's gradient  begin_gradients, add_slopes, pull_back
    the step's metrics line  measured, exchanged
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
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

    def attach(self, model: BlockwiseModel) -> None:
        """Take the model whose passes follow, before the first of them."""

    @property
    def gradient(self) -> Any:
        """`BlockwiseModel`'s `features`: further arrays that a gradient goes to; None: none."""
        return None

    def make_room(self) -> None:
        """Forget what earlier passes needed; no step is under way."""

    def begin_step(self) -> None:
        """Begin the numbers of a training step."""

    def score(
        self, batch: TrainBatch, should_stop: Callable[[], bool]
    ) -> dict[str, np.ndarray] | None:
        """Return columns of scores, before the first update; None after a stop request."""
        return {}

    def admit(self, sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Return the sequences as they are collated. Raises ConfigError: one does not fit."""
        return sequences

    def wants_rows(self, sequences: Iterable[TrainSequence]) -> bool:
        """Return whether rows of these must be computed as they are, each token once."""
        return False

    def columns(
        self, sequences: Sequence[TrainSequence], rows: Sequence[int], mask: np.ndarray
    ) -> Mapping[str, Any]:
        """Return arrays of a micro-batch of these rows, by their names in `TokenBatch`. `mask`
        [B, T]: the trained places."""
        return {}

    def seen(self, inputs: np.ndarray) -> AbstractContextManager[None]:
        """Let passes over rows [B, T] of admitted sequences have what belongs to them."""
        return nullcontext()

    def begin_gradients(self) -> None:
        """Let `pull_back` be about the passes from here on."""

    def add_slopes(self, slopes: mx.array | None) -> None:
        """Note the gradient by `gradient`'s arrays, of the pass that is `seen` now."""

    def pull_back(self) -> Iterator[tuple[int, mx.array]]:
        """Yield further slots of the policy and their gradients, float32, not evaluated."""
        yield from ()

    def measured(self, batch: TrainBatch) -> dict[str, float | None]:
        """Return numbers of the newest step for its metrics line."""
        return {}

    def exchanged(
        self, exchange: Callable[[np.ndarray], Sequence[np.ndarray] | None]
    ) -> dict[str, float]:
        """Return numbers of a finished step over all ranks. `exchange`: `Ranks.exchange`; each rank
        calls it as often as the others."""
        return {}

    # ------------------------------------------------------------------ a run

    def health(self) -> str | None:
        """Say what is wrong; None when nothing is."""
        return None

    def close(self) -> None:
        """Let go of what it holds."""

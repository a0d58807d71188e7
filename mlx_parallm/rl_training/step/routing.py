"""Recorded experts in a step: a mixture's tokens go where they went when they were sampled, and the
load of its experts is counted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.experts.routing import UNFORCED, expert_load
from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.companion import StepCompanion
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.types import Rollout


class RecordedExperts(StepCompanion):
    """
    Args:
        shape: (layers, experts) of the mixture, whose load is counted; None: it is not.
        replays: passes repeat the recorded experts of trained tokens, and count those that differ.
        prompts: those of the other tokens too.
    """

    name = "experts"

    def __init__(
        self, shape: tuple[int, int] | None = None, *, replays: bool = True, prompts: bool = False
    ) -> None:
        self._shape, self._replays, self._prompts = shape, replays, prompts
        self._model: BlockwiseModel | None = None

    def attach(self, model: BlockwiseModel) -> None:
        self._model = model

    def begin_step(self) -> None:
        assert self._model is not None, "it is attached"
        self._model.forget_routing()
        if self._shape is not None:
            self._model.expert_load = np.zeros(self._shape, np.int64)

    def columns(
        self, sequences: Sequence[TrainSequence], rows: Sequence[int], mask: np.ndarray
    ) -> Mapping[str, Any]:
        """`TokenBatch.experts` [N, layers, k] int16, or int32 of more experts than a byte counts;
        `TokenBatch.prompt_experts`, as far as they are recorded."""
        columns: dict[str, Any] = {}
        if self._replays and (experts := _experts(sequences, rows)) is not None:
            columns["experts"] = mx.array(experts)
        if self._prompts and (prompts := _prompt_experts(sequences, rows, mask)) is not None:
            columns["prompt_experts"] = prompts[0], mx.array(prompts[1])
        return columns

    def measured(self, batch: TrainBatch) -> dict[str, float | None]:
        """How many of the experts that this process repeated its own router would not have chosen,
        and how many of a prompt's it could not repeat."""
        model = self._model
        if not self._replays or model is None:
            return {}
        counts = {
            "experts_differing": (model.experts_differing, model.experts_forced),
            "prompt_experts_differing": (
                model.prompt_experts_differing,
                model.prompt_experts_forced,
            ),
        }
        if self._prompts:
            places, recorded = prompt_coverage(batch.sequences)
            counts["prompt_experts_missing"] = (places - recorded, places)
        return {name: part / whole if whole else None for name, (part, whole) in counts.items()}

    def exchanged(
        self, exchange: Callable[[np.ndarray], Sequence[np.ndarray] | None]
    ) -> dict[str, float]:
        """The load of the experts by the tokens that the step trained on."""
        load = None if self._model is None else self._model.expert_load
        everyone = None if load is None else exchange(load)
        return {} if everyone is None else expert_load(np.sum(everyone, axis=0))


def experts_of(policy: TrainedPolicy, between_blocks: Callable[[], None]) -> RecordedExperts | None:
    """Return the companion of a policy whose experts are watched; None: it has none."""
    shape, replays, prompts = policy.experts
    if shape is None:
        return None
    layers, _, experts = shape
    return RecordedExperts((layers, experts), replays=replays, prompts=prompts)


def _experts(sequences: Sequence[TrainSequence], rows: Sequence[int]) -> np.ndarray | None:
    """The experts of the trained tokens [N, layers, k], `UNFORCED` if a rollout recorded
    none; None: no one did, or several tokens are scored at a position."""
    recorded = [sequences[row].rollout.routed_experts for row in rows]
    first = next((experts for experts in recorded if experts is not None), None)
    if first is None or any(sequences[row].targets_each > 1 for row in rows):
        return None
    kind = np.int32 if first.wide else np.int16
    parts = []
    for row, experts in zip(rows, recorded, strict=True):
        sequence = sequences[row]
        if experts is None:
            parts.append(np.full((sequence.trained, first.layers, first.each), UNFORCED, kind))
        else:
            sampled = np.array(sequence.rollout.mask, bool)
            trained = np.array((0, *sequence.rollout.trained_mask[1:]), bool)[sampled]
            recorded_last = experts.array()[len(experts) - len(trained) :]
            parts.append(recorded_last[trained].astype(kind))
    return np.concatenate(parts)


def _prompt_experts(
    sequences: Sequence[TrainSequence], rows: Sequence[int], mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Places in the flattened [B · T] and experts of the tokens that were recorded, without those
    that predict a trained one or are behind the last of these, or None."""
    places, parts = [], []
    for i, row in enumerate(rows):
        for columns, ids in _recorded(sequences[row].rollout):
            last = int(np.flatnonzero(mask[i])[-1])
            chosen = columns < last
            chosen[chosen] = ~mask[i, columns[chosen]]
            places.append(columns[chosen] + i * mask.shape[1])
            parts.append(ids[chosen])
    if not sum(map(len, places)) or any(sequences[row].targets_each > 1 for row in rows):
        return None
    kind = np.int32 if any(part.dtype.itemsize > 1 for part in parts) else np.int16
    return np.concatenate(places).astype(np.int32), np.concatenate(
        [part.astype(kind) for part in parts]
    )


def _recorded(rollout: Rollout) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield places [n] and experts [n, layers, k] of tokens that may predict no trained one: of
    prompts, and of sampled tokens of which some are forced."""
    for part in rollout.prompt_experts:
        yield np.arange(part.start, part.stop), part.experts.array()
    if rollout.forced is not None and rollout.routed_experts is not None:
        yield np.flatnonzero(rollout.mask) - 1, rollout.routed_experts.array()


def prompt_coverage(sequences: Sequence[TrainSequence]) -> tuple[int, int]:
    """How many tokens come before the last trained one of each sequence and predict no trained
    one, and how many of them have recorded experts."""
    places = recorded = 0
    for sequence in sequences:
        if sequence.trained:
            mask = np.array(sequence.rollout.trained_mask[1:], bool)
            free = ~mask[: np.flatnonzero(mask)[-1]]
            places += int(free.sum())
            for columns, _ in _recorded(sequence.rollout):
                recorded += int(free[columns[columns < len(free)]].sum())
    return places, recorded

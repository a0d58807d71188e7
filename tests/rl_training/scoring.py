"""The trainer's scores by the model's plain forward, and batches made with them."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.trainer import Trainer


def policy_logprobs(
    trainer: Trainer, batch: TrainBatch, temperature: float = 1.0
) -> list[np.ndarray]:
    """Sequence by sequence, by the model's plain forward: the naive twin of the trainer's
    scoring."""
    found = []
    for sequence in batch.sequences:
        tokens = mx.array(sequence.rollout.tokens)
        logprobs = token_logprobs(
            trainer.policy.model(tokens[None, :-1])[0], tokens[1:], temperature
        )
        found.append(np.array(logprobs)[np.array(sequence.rollout.mask[1:], bool)])
    return found


def reference_logprobs(trainer: Trainer, batch: TrainBatch) -> list[np.ndarray]:
    with trainer.policy.reference():
        return policy_logprobs(trainer, batch)


def on_policy(
    trainer: Trainer, batch: TrainBatch, shift: float = 0.0, temperature: float = 1.0
) -> TrainBatch:
    """The same batch with the trainer's own log-probabilities (+ shift) as the behaviour
    policy's."""
    sequences = []
    for sequence, own in zip(
        batch.sequences, policy_logprobs(trainer, batch, temperature), strict=True
    ):
        logprobs = np.zeros(len(sequence.rollout.tokens))
        logprobs[np.array(sequence.rollout.mask, bool)] = own + shift
        sequences.append(
            replace(sequence, rollout=replace(sequence.rollout, logprobs=tuple(logprobs.tolist())))
        )
    return replace(batch, sequences=tuple(sequences))


class StopAfter:
    """Asks to stop from the n-th micro-batch on."""

    def __init__(self, micro_batches: int) -> None:
        self.left = micro_batches

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def assert_same_metrics(found: dict[str, float | None], expected: dict[str, float | None]) -> None:
    """The same are known, and equal up to the rounding that `assert_same_training` speaks of."""
    known = [
        {name: value for name, value in metrics.items() if value is not None}
        for metrics in (found, expected)
    ]
    assert known[0] == pytest.approx(known[1], rel=1e-3, abs=1e-5)

"""TrainSequences → the numpy arrays of micro-batches. No MLX.

A mini-batch (one optimizer update) is cut into micro-batches by a budget of tokens, padding included, after sorting by
length. Alignment: position t of every [B, T] array is where token t + 1 is predicted, so T is the longest sequence - 1.
The first token of a sequence has nothing before it and is never trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.rl_training.batch import TrainSequence


@dataclass(frozen=True)
class MicroBatch:
    """B rows of at most T positions, N of which are trained on. Rows are right-padded with token 0."""

    rows: tuple[int, ...]  # [B] indices into the step's sequences
    inputs: np.ndarray  # [B, T] int32
    mask: np.ndarray  # [B, T] bool
    rollout_logprobs: np.ndarray  # [B, T] float32
    advantages: np.ndarray  # [B, T] float32
    fresh: np.ndarray  # [B, T] bool, within mask
    positions: np.ndarray  # [N] int32, where mask is true in the flattened [B · T]
    targets: np.ndarray  # [N] int32
    temperatures: np.ndarray  # [N] float32
    scatter: np.ndarray  # [B, T] int32: which of the N scores belongs here; N where mask is false


@dataclass(frozen=True)
class MiniBatch:
    """`tokens`: trained positions of the whole mini-batch, by which every micro-batch is normalised."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    sequences: int


def padded_length(length: int) -> int:
    """The next bucket: multiples of 8 up to 64, of 16 up to 256, of 64 beyond. Few shapes, little padding."""
    step = 8 if length <= 64 else 16 if length <= 256 else 64
    return -(-length // step) * step


def epoch_order(count: int, *, seed: int, step: int, epoch: int) -> list[int]:
    """The order of a step's sequences in one epoch: a function of its arguments alone."""
    return np.random.default_rng([seed & 0xFFFFFFFF, step, epoch]).permutation(count).tolist()


def collate(sequences: Sequence[TrainSequence], rows: Sequence[int], *, token_budget: int) -> MiniBatch:
    """The mini-batch of these rows. A sequence longer than the budget is a micro-batch of its own."""
    by_length = sorted(rows, key=lambda row: (len(sequences[row].rollout.tokens), row))
    parts: list[list[int]] = []
    for row in by_length:
        width = padded_length(len(sequences[row].rollout.tokens) - 1)
        if parts and (len(parts[-1]) + 1) * width <= token_budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    micro_batches = tuple(_micro_batch(sequences, part) for part in parts)
    return MiniBatch(micro_batches, sum(len(part.positions) for part in micro_batches), len(rows))


def _micro_batch(sequences: Sequence[TrainSequence], rows: Sequence[int]) -> MicroBatch:
    width = padded_length(max(len(sequences[row].rollout.tokens) for row in rows) - 1)
    shape = (len(rows), width)
    tokens = np.zeros((len(rows), width + 1), np.int32)
    mask, fresh = np.zeros(shape, bool), np.zeros(shape, bool)
    rollout_logprobs, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        sequence, rollout = sequences[row], sequences[row].rollout
        last = len(rollout.tokens) - 1
        tokens[i, : last + 1] = rollout.tokens
        mask[i, :last] = rollout.mask[1:]
        if rollout.logprobs is not None:  # else the trainer's own, which are not known before it has scored them
            rollout_logprobs[i, :last] = rollout.logprobs[1:]
        advantages[i, :last] = sequence.advantages[1:]
        fresh[i, :last] = sequence.fresh
    positions = np.flatnonzero(mask).astype(np.int32)
    scatter = np.full(shape[0] * shape[1], len(positions), np.int32)
    scatter[positions] = np.arange(len(positions), dtype=np.int32)
    temperatures = np.array([sequences[row].rollout.temperature or 1.0 for row in rows], np.float32)  # 0 counts as 1
    return MicroBatch(
        rows=tuple(rows),
        inputs=tokens[:, :-1],
        mask=mask,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        fresh=fresh & mask,
        positions=positions,
        targets=tokens[:, 1:].reshape(-1)[positions],
        temperatures=temperatures[positions // width],
        scatter=scatter.reshape(shape),
    )

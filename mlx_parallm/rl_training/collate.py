"""TrainSequences → the numpy arrays of micro-batches.

A mini-batch (one optimizer update) is cut into micro-batches by a budget of tokens, padding included, after sorting by
length. Alignment: position t of every [B, T] array is where token t + 1 is predicted, so T is the longest sequence - 1.
The first token of a sequence has nothing before it and is never trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.models.packing import SharedRows, padded_length
from mlx_parallm.models.packing import share_prompts as shared_rows
from mlx_parallm.rl_training.batch import TrainSequence
from mlx_parallm.rl_training.shared_prompts import parts_by_prompt

PAYS_BELOW = 0.9
"""Share of the tokens that sharing prompts leaves to compute: above it, two products for one cost what is saved."""


@dataclass(frozen=True)
class MicroBatch:
    """B rows of at most T positions, N of which are trained on, row after row. Rows are right-padded with token 0."""

    rows: tuple[int, ...]  # [B] indices into the step's sequences
    inputs: np.ndarray  # [B, T] int32
    mask: np.ndarray  # [B, T] bool
    positions: np.ndarray  # [N] int32, where mask is true in the flattened [B · T]
    targets: np.ndarray  # [N] int32
    temperatures: np.ndarray  # [N] float32
    scatter: np.ndarray  # [B, T] int32: which of the N scores belongs here; N where mask is false
    shared: SharedRows | None = None  # the same tokens with each prompt once

    @property
    def tokens(self) -> int:
        """That are computed, padding included."""
        return self.inputs.size if self.shared is None else self.shared.tokens


@dataclass(frozen=True)
class MiniBatch:
    """`tokens`: trained positions of the whole mini-batch, by which every micro-batch is normalised."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    sequences: int


def epoch_order(count: int, *, seed: int, step: int, epoch: int) -> list[int]:
    """The order of a step's examples in one epoch: a function of its arguments alone."""
    return np.random.default_rng([seed & 0xFFFFFFFF, step, epoch]).permutation(count).tolist()


def collate(
    sequences: Sequence[TrainSequence],
    rows: Sequence[int],
    *,
    token_budget: int,
    together: int = 1,
    share_prompts: bool = False,
) -> MiniBatch:
    """The mini-batch of these rows. A sequence longer than the budget is a micro-batch of its own.

    `together`: so many consecutive rows are one example (a pair) and stay in one micro-batch, in their order.
    `share_prompts`: the model computes a prompt once for all rows of a micro-batch that have it. Rows are then put
    together by prompt where that computes fewer tokens than by length (PAYS_BELOW).
    """

    def longest(example: Sequence[int]) -> int:
        return max(len(sequences[row].rollout.tokens) for row in example)

    examples = [tuple(rows[i : i + together]) for i in range(0, len(rows), together)]
    parts: list[list[int]] = []
    for example in sorted(examples, key=lambda example: (longest(example), example)):
        width = padded_length(longest(example) - 1)
        if parts and (len(parts[-1]) + together) * width <= token_budget:
            parts[-1] += example
        else:
            parts.append([*example])
    if share_prompts := share_prompts and all(1 in sequences[row].rollout.mask[1:] for row in rows) and bool(rows):
        computed = sum(len(part) * padded_length(longest(part) - 1) for part in parts)
        by_prompt, fewer = parts_by_prompt(sequences, examples, token_budget=token_budget)
        share_prompts = fewer <= PAYS_BELOW * computed
        parts = by_prompt if share_prompts else parts
    micro_batches = tuple(_micro_batch(sequences, part, share_prompts=share_prompts) for part in parts)
    return MiniBatch(micro_batches, sum(len(part.positions) for part in micro_batches), len(rows))


def _micro_batch(sequences: Sequence[TrainSequence], rows: Sequence[int], *, share_prompts: bool) -> MicroBatch:
    width = padded_length(max(len(sequences[row].rollout.tokens) for row in rows) - 1)
    shape = (len(rows), width)
    tokens = np.zeros((len(rows), width + 1), np.int32)
    mask = np.zeros(shape, bool)
    for i, row in enumerate(rows):
        rollout = sequences[row].rollout
        tokens[i, : len(rollout.tokens)] = rollout.tokens
        mask[i, : len(rollout.tokens) - 1] = rollout.mask[1:]
    positions = np.flatnonzero(mask).astype(np.int32)
    inputs = np.ascontiguousarray(tokens[:, :-1])
    shared = shared_rows(inputs, positions) if share_prompts else None
    scatter = np.full(shape[0] * shape[1], len(positions), np.int32)
    scatter[positions] = np.arange(len(positions), dtype=np.int32)
    temperatures = np.array([sequences[row].rollout.temperature or 1.0 for row in rows], np.float32)  # 0 counts as 1
    return MicroBatch(
        rows=tuple(rows),
        inputs=inputs,
        mask=mask,
        positions=positions,
        targets=tokens[:, 1:].reshape(-1)[positions],
        temperatures=temperatures[positions // width],
        scatter=scatter.reshape(shape),
        shared=shared if shared is not None and shared.tokens < inputs.size else None,
    )

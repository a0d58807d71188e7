"""TrainSequences → the numpy arrays of micro-batches.

A mini-batch (one optimizer update) is cut into micro-batches by a budget of tokens, padding included, after sorting by
length. Alignment: position t of every [B, T] array is where token t + 1 is predicted, so T is the longest sequence - 1.
The first token of a sequence has nothing before it and is never trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mlx_parallm.models.layout import CompactRows, pack_rows, padded_length
from mlx_parallm.models.layout import share_prompts as shared_rows
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.packed_rows import parts_packed, used
from mlx_parallm.rl_training.step.shared_prompts import parts_by_prompt

PAYS_BELOW = 0.9
"""Share of the tokens that is left to compute: above it, the products that sharing prompts splits in two cost what is
saved, and so do masks of packed rows."""
ATTENTION_WIDTH = 1024
"""Row length at which attention costs a token as much as all else: 512 with a 0.6B model on a CPU, where exp is most of
it, some thousands on a GPU. Packing must not put many short sequences into a row that is much longer."""

Arrange = Callable[[np.ndarray, np.ndarray], CompactRows]
Plan = list[tuple[list[int], Arrange | None]]
"""Micro-batches: the sequences of each, and what becomes of their rows."""


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
    compact: CompactRows | None = None  # the same tokens, fewer of them computed

    @property
    def tokens(self) -> int:
        """That are computed, padding included."""
        return self.inputs.size if self.compact is None else self.compact.tokens


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
    packing: bool = False,
) -> MiniBatch:
    """The mini-batch of these rows. A sequence longer than the budget is a micro-batch of its own.

    `together`: so many consecutive rows are one example (a pair) and stay in one micro-batch, in their order.
    `share_prompts`: the model computes a prompt once for all rows of a micro-batch that have it. `packing`: it computes
    several sequences in one row; pairs are not packed. Either is done where it computes less than rows that are sorted
    by length (PAYS_BELOW), and then the one of fewer tokens.
    """
    examples = [tuple(rows[i : i + together]) for i in range(0, len(rows), together)]
    parts = _by_length(sequences, examples, token_budget)
    plan: Plan = [(part, None) for part in parts]
    if rows and all(1 in sequences[row].rollout.mask[1:] for row in rows):
        shapes = [(len(part), _width(sequences, part)) for part in parts]
        fewest = PAYS_BELOW * _tokens(shapes)
        if share_prompts:
            by_prompt, computed = parts_by_prompt(sequences, examples, token_budget=token_budget)
            if computed <= fewest:
                fewest, plan = computed, [(part, shared_rows) for part in by_prompt]
        if packing and together == 1 and sum(used(sequences[row]) for row in rows) <= fewest:
            packed = parts_packed(sequences, rows, token_budget=token_budget)
            wide = [(len(part.rows), part.width) for part in packed]
            if _tokens(wide) <= fewest and _cost(wide) <= PAYS_BELOW * _cost(shapes):
                plan = [(part.sequences, partial(pack_rows, counts=part.counts)) for part in packed]
    micro_batches = tuple(_micro_batch(sequences, part, arrange) for part, arrange in plan)
    return MiniBatch(micro_batches, sum(len(part.positions) for part in micro_batches), len(rows))


def _by_length(
    sequences: Sequence[TrainSequence], examples: Sequence[tuple[int, ...]], token_budget: int
) -> list[list[int]]:
    parts: list[list[int]] = []
    for example in sorted(examples, key=lambda example: (_width(sequences, example, exact=True), example)):
        size = (len(parts[-1]) + len(example)) * _width(sequences, example) if parts else 0
        if parts and size <= token_budget:
            parts[-1] += example
        else:
            parts.append([*example])
    return parts


def _width(sequences: Sequence[TrainSequence], rows: Sequence[int], *, exact: bool = False) -> int:
    """Positions of the longest of them, padded."""
    longest = max(len(sequences[row].rollout.tokens) for row in rows) - 1
    return longest if exact else padded_length(longest)


def _tokens(shapes: Sequence[tuple[int, int]]) -> int:
    """Of (rows, width) each."""
    return sum(count * width for count, width in shapes)


def _cost(shapes: Sequence[tuple[int, int]]) -> float:
    """In tokens of short rows."""
    return sum(count * width * (1 + width / ATTENTION_WIDTH) for count, width in shapes)


def _micro_batch(sequences: Sequence[TrainSequence], rows: Sequence[int], arrange: Arrange | None) -> MicroBatch:
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
    compact = arrange(inputs, positions) if arrange else None
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
        compact=compact if compact is not None and compact.tokens < inputs.size else None,
    )

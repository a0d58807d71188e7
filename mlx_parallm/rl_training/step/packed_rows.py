"""Which sequences of a mini-batch go into one micro-batch, and there end to end into one row."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.models.layout import padded_length
from mlx_parallm.rl_training.step.batch import TrainSequence

SHORT_ROW = 64
"""Tokens of a row that may be longer than every sequence in it: attention over so few costs next to nothing."""

Sizes = list[tuple[int, int]]
"""(tokens that go into the model, sequence), ascending."""


@dataclass(frozen=True)
class PackedPart:
    """A micro-batch: the sequences of each of its rows, which are `width` long."""

    rows: list[list[int]]
    width: int

    @property
    def tokens(self) -> int:
        return len(self.rows) * self.width

    @property
    def sequences(self) -> list[int]:
        return [sequence for row in self.rows for sequence in row]

    @property
    def counts(self) -> list[int]:
        return [len(row) for row in self.rows]


def parts_packed(sequences: Sequence[TrainSequence], chosen: Sequence[int], *, token_budget: int) -> list[PackedPart]:
    """Micro-batches, short sequences first; one that is over the budget is a single sequence.

    Args:
        chosen: indices into `sequences`; each has a sampled token behind its first one.

    A row is as long as the longest sequence of its micro-batch, or SHORT_ROW. So no micro-batch has more tokens, or
    larger attention scores, than its sequences would have one to a row.
    """
    sizes = sorted((used(sequences[sequence]), sequence) for sequence in chosen)
    parts: list[PackedPart] = []
    while sizes:
        fit = max(1, _fitting(sizes, token_budget))
        parts.append(_first_fit(sizes[:fit]))
        sizes = sizes[fit:]
    return parts


def _fitting(sizes: Sizes, token_budget: int) -> int:
    return bisect_right(range(1, len(sizes) + 1), token_budget, key=lambda end: _first_fit(sizes[:end]).tokens)


def used(sequence: TrainSequence) -> int:
    """Tokens that go into the model: those before the last sampled one."""
    mask = sequence.rollout.mask
    return len(mask) - 1 - mask[::-1].index(1)


def _first_fit(sizes: Sizes) -> PackedPart:
    """Each sequence, the longest first, into the first row where it fits: at most 11/9 of the fewest rows possible, and
    one more (Johnson, 1973)."""
    capacity = max(padded_length(sizes[-1][0]), SHORT_ROW)
    rows: list[list[int]] = []
    room: list[int] = []
    for length, sequence in reversed(sizes):
        row = next((row for row, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(sequence)
        room[row] -= length
    return PackedPart(rows, padded_length(capacity - min(room)))

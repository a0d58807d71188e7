"""TrainSequences → the micro-batches of a mini-batch, as arrays. Rows are sorted by length, and cut
by a token budget.

A mini-batch is one optimizer update, a micro-batch one backward pass. Alignment: position t of
every [B, T] array is where token t + 1 is predicted, so T is the longest sequence - 1. The first
token of a sequence has nothing before it and is never trained on.

    by length   rows of nearly equal length, right-padded
    by prompt   the rows that share a prompt together, so that the model computes the prompt once
    packed      several sequences end to end in one row
    merged      one token for all rows that have the same tokens up to it: a tree

The budget counts the tokens that are computed, padding included. `MicroBatchBudget` lowers it where
one evaluation would take too long.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.blocks_per_eval import BlockLimits
from mlx_parallm.models.layouts.layout import CompactRows, TokenBatch, pack_rows
from mlx_parallm.models.layouts.layout import share_prompts as shared_rows
from mlx_parallm.models.layouts.padding import padded_length
from mlx_parallm.models.layouts.tree_rows import merge_rows, shared_length
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.companion import StepCompanion
from mlx_parallm.system.log import get_logger

PAYS_BELOW = 0.9
"""Share of the tokens that is left to compute. Above it, sharing prompts or packing rows costs
what it saves: the one splits products in two, the other needs masks."""
MERGING_PAYS_BELOW = 0.8
"""The same of merged rows, against whatever else computes the fewest, and against the rows' tokens
with each prompt once and no padding: what they have in common behind their prompts has to pay for
attention in its own blocks."""
ATTENTION_WIDTH = 1024
"""Row length at which attention costs a token as much as all else: 512 with a 0.6B model on a
CPU, where exp is most of it, some thousands on a GPU. Packing must not put many short sequences
into a row that is much longer."""
SHORT_ROW = 64
"""Tokens of a row that may be longer than every sequence in it: attention over so few costs next
to nothing."""
FIRST_TOKENS = 512
"""Token budget of a micro-batch, until a time limit has been measured."""
AIM = 0.8
"""Share of the time limit at which the budget is lowered."""

Measure = Callable[[mx.array, TokenBatch, slice], tuple[mx.array, ...]]
"""See `TokenBatch.measure`."""
Arrange = Callable[[np.ndarray, np.ndarray], CompactRows]
Cut = list[tuple[list[int], Arrange | None]]
"""The sequences of each micro-batch, and how its rows are rearranged."""
Sizes = list[tuple[int, int]]
"""(tokens that go into the model, sequence), ascending."""

log = get_logger("trainer")


@dataclass(frozen=True)
class MicroBatch:
    """B rows of at most T positions, N of which are trained on, row after row. Rows are
    right-padded with token 0."""

    rows: tuple[int, ...]  # [B] indices into the step's sequences
    inputs: np.ndarray  # [B, T] int32
    mask: np.ndarray  # [B, T] bool
    positions: np.ndarray  # [N] int32, where mask is true in the flattened [B · T]
    targets: np.ndarray  # [N] int32
    temperatures: np.ndarray  # [N] float32
    scatter: np.ndarray  # [B, T] int32: which of the N scores belongs here; N where mask is false
    # [N] int64: index of these tokens in the columns of the step (prepare.py)
    columns: np.ndarray
    # of companions, by their names in `TokenBatch`
    carried: Mapping[str, Any] = field(default_factory=dict)
    compact: CompactRows | None = None  # the same tokens, fewer of them computed

    @property
    def tokens(self) -> int:
        """How many are computed, padding included."""
        return self.inputs.size if self.compact is None else self.compact.tokens

    def token_batch(
        self,
        *,
        entropy_slope: bool = True,
        measure: Measure | None = None,
        replay: bool = False,
    ) -> TokenBatch:
        """The part that the model reads. `entropy_slope` False: the loss does not depend on the
        entropy. `measure`: further scores of the tokens. `replay`: the pass repeats what
        companions carry."""
        temperatures = self.temperatures
        same = (
            float(temperatures[0])
            if len(temperatures) and (temperatures == temperatures[0]).all()
            else None
        )
        return TokenBatch(
            inputs=mx.array(self.inputs),
            positions=mx.array(self.positions),
            targets=mx.array(self.targets),
            temperature=mx.array(temperatures) if same is None else same,
            compact=self.compact,
            entropy_slope=entropy_slope,
            measure=measure,
            **(self.carried if replay else {}),
        )


@dataclass(frozen=True)
class MiniBatch:
    """`tokens`: trained positions of all micro-batches. rows are indices into `batch`."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    sequences: int
    batch: Sequence[TrainSequence]


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
    merging: bool = False,
    companions: Iterable[StepCompanion] = (),
) -> MiniBatch:
    """The mini-batch of these rows. A sequence longer than the budget is its own micro-batch;
    one without a trained token is in none, and counts among the sequences.

    Args:
        together: so many consecutive rows are one example (a pair) and stay in one micro-batch, in
            their order.
        share_prompts: the model can compute a prompt once for all rows of a micro-batch that have
            it.
        packing: the model can compute several sequences in one row. Pairs are not packed.
        merging: the model can compute rows as a tree. Pairs are not merged.
        companions: those that carry arrays of the rows.

    Prompts are shared, or rows packed, if that computes less than rows sorted by length
    (PAYS_BELOW); of the two, the one with fewer tokens. Rows are merged if that computes less
    than all others (MERGING_PAYS_BELOW).
    """
    count = len(rows)
    examples = [tuple(rows[i : i + together]) for i in range(0, count, together)]
    examples = [example for example in examples if any(sequences[row].trained for row in example)]
    rows = [row for example in examples for row in example]
    parts = _by_length(sequences, examples, token_budget)
    cut: Cut = [(part, None) for part in parts]
    if rows and all(
        1 in sequences[row].rollout.trained_mask[1:] and sequences[row].targets_each == 1
        for row in rows
    ):
        shapes = [(len(part), _width(sequences, part)) for part in parts]
        fewest = PAYS_BELOW * _tokens(shapes)
        if share_prompts:
            by_prompt, computed = _by_prompt(sequences, examples, token_budget)
            if computed <= fewest:
                fewest, cut = computed, [(part, shared_rows) for part in by_prompt]
        if packing and together == 1 and sum(used(sequences[row]) for row in rows) <= fewest:
            packed = parts_packed(sequences, rows, token_budget=token_budget)
            wide = [(len(part.rows), part.width) for part in packed]
            if _tokens(wide) <= fewest and _cost(wide) <= PAYS_BELOW * _cost(shapes):
                fewest = _tokens(wide)
                cut = [(part.sequences, partial(pack_rows, counts=part.counts)) for part in packed]
        if merging and together == 1:
            merged, computed = _by_beginning(sequences, rows, token_budget)
            if share_prompts:
                fewest = min(fewest, _with_shared_prompts(sequences, rows))
            if computed <= MERGING_PAYS_BELOW * fewest:
                cut = [(part, merge_rows) for part in merged]
    starts = np.concatenate([[0], np.cumsum([sequence.trained for sequence in sequences])]).astype(
        np.int64
    )
    micro_batches = tuple(
        _micro_batch(sequences, part, arrange, starts, companions) for part, arrange in cut
    )
    return MiniBatch(
        micro_batches, sum(len(part.positions) for part in micro_batches), count, sequences
    )


def _micro_batch(
    sequences: Sequence[TrainSequence],
    rows: Sequence[int],
    arrange: Arrange | None,
    starts: np.ndarray,
    companions: Iterable[StepCompanion],
) -> MicroBatch:
    """`starts` [sequences + 1]: first column of each sequence."""
    width = padded_length(max(len(sequences[row].rollout.tokens) for row in rows) - 1)
    shape = (len(rows), width)
    tokens = np.zeros((len(rows), width + 1), np.int32)
    mask = np.zeros(shape, bool)
    for i, row in enumerate(rows):
        rollout = sequences[row].rollout
        tokens[i, : len(rollout.tokens)] = rollout.tokens
        mask[i, : len(rollout.tokens) - 1] = rollout.trained_mask[1:]
    positions = np.flatnonzero(mask).astype(np.int32)
    each = np.array([sequences[row].targets_each for row in rows])
    if each.max() > 1:
        positions = np.repeat(positions, each[positions // width])
    inputs = np.ascontiguousarray(tokens[:, :-1])
    compact = arrange(inputs, positions) if arrange else None
    scatter = np.full(shape[0] * shape[1], len(positions), np.int32)
    scatter[positions] = np.arange(len(positions), dtype=np.int32)
    # 0 counts as 1
    temperatures = np.array([sequences[row].rollout.temperature or 1.0 for row in rows], np.float32)
    return MicroBatch(
        rows=tuple(rows),
        inputs=inputs,
        mask=mask,
        positions=positions,
        targets=_targets(sequences, rows, mask, tokens[:, 1:].reshape(-1)[positions]),
        temperatures=temperatures[positions // width],
        scatter=scatter.reshape(shape),
        columns=np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows]),
        carried={
            name: column
            for companion in companions
            for name, column in companion.columns(sequences, rows, mask).items()
        },
        compact=compact if compact is not None and compact.tokens < inputs.size else None,
    )


def _targets(
    sequences: Sequence[TrainSequence], rows: Sequence[int], mask: np.ndarray, following: np.ndarray
) -> np.ndarray:
    """The tokens that are scored [N]: a sequence's own `targets`, else those that follow."""
    if all(sequences[row].targets is None for row in rows):
        return following
    starts = np.cumsum([0, *(sequences[row].trained for row in rows)])
    parts = []
    for i, row in enumerate(rows):
        targets = sequences[row].targets
        chosen = mask[i] if targets is None else mask[i, : len(targets)]
        parts.append(
            following[starts[i] : starts[i + 1]] if targets is None else targets[chosen].reshape(-1)
        )
    return np.concatenate(parts).astype(np.int32)


# ---------------------------------------------------------------------- by length


def _by_length(
    sequences: Sequence[TrainSequence], examples: Sequence[tuple[int, ...]], token_budget: int
) -> list[list[int]]:
    parts: list[list[int]] = []
    for example in sorted(
        examples, key=lambda example: (_width(sequences, example, exact=True), example)
    ):
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
    """Sum over shapes (rows, width)."""
    return sum(count * width for count, width in shapes)


def _cost(shapes: Sequence[tuple[int, int]]) -> float:
    """Return the cost with attention, in tokens of short rows."""
    return sum(count * width * (1 + width / ATTENTION_WIDTH) for count, width in shapes)


# ---------------------------------------------------------------------- by prompt


def _by_prompt(
    sequences: Sequence[TrainSequence], examples: Sequence[tuple[int, ...]], token_budget: int
) -> tuple[list[list[int]], int]:
    """Rows of the parts, in the order of their prompts, and the tokens that are computed for all of
    them.

    A part costs its distinct prompts and what follows them in each row, both padded. Every row has
    a sampled token behind its first one.
    """
    numbers: dict[tuple[int, ...], int] = {}
    prompts: dict[int, int] = {}  # row → number of its prompt
    sizes: dict[int, tuple[int, int]] = {}  # row → tokens of its prompt, and after it
    for row in (row for example in examples for row in example):
        rollout = sequences[row].rollout
        start = rollout.mask.index(1, 1)
        prompts[row] = numbers.setdefault(rollout.tokens[:start], len(numbers))
        sizes[row] = start, used(sequences[row]) - start

    def computed(rows: Sequence[int]) -> int:
        prompt, rest = (max(sizes[row][i] for row in rows) for i in (0, 1))
        return len({prompts[row] for row in rows}) * padded_length(prompt) + len(
            rows
        ) * padded_length(max(rest, 1))

    longest = [0] * len(numbers)
    for row, number in prompts.items():
        longest[number] = max(longest[number], sum(sizes[row]))

    def place(example: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        first = example[0]
        return (
            longest[prompts[first]],
            prompts[first],
            max(sum(sizes[row]) for row in example),
            example,
        )

    parts: list[list[int]] = []
    for example in sorted(examples, key=place):
        if parts and computed([*parts[-1], *example]) <= token_budget:
            parts[-1] += example
        else:
            parts.append([*example])
    return parts, sum(map(computed, parts))


# ---------------------------------------------------------------------- merged


def _with_shared_prompts(sequences: Sequence[TrainSequence], rows: Sequence[int]) -> int:
    """Return the tokens of the rows, each prompt counted once, without padding."""
    prompts, rest = set(), 0
    for row in rows:
        rollout = sequences[row].rollout
        start = rollout.mask.index(1, 1)
        prompts.add(rollout.tokens[:start])
        rest += used(sequences[row]) - start
    return sum(map(len, prompts)) + rest


def _by_beginning(
    sequences: Sequence[TrainSequence], rows: Sequence[int], token_budget: int
) -> tuple[list[list[int]], int]:
    """Return the rows of the parts, those with a common beginning next to each other, and the
    tokens that are computed for all of them."""
    tokens = {
        row: np.array(sequences[row].rollout.tokens[: used(sequences[row])], np.int32)
        for row in rows
    }
    order = sorted(rows, key=lambda row: (tokens[row].astype(">i4").tobytes(), row))
    parts: list[list[int]] = []
    sizes: list[int] = []
    for number, row in enumerate(order):
        new = len(tokens[row])
        if number:
            new -= shared_length(tokens[order[number - 1]], tokens[row])
        if parts and padded_length(sizes[-1] + new) <= token_budget:
            parts[-1].append(row)
            sizes[-1] += new
        else:
            parts.append([row])
            sizes.append(len(tokens[row]))
    return parts, sum(map(padded_length, sizes))


# ---------------------------------------------------------------------- packed


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


def parts_packed(
    sequences: Sequence[TrainSequence], chosen: Sequence[int], *, token_budget: int
) -> list[PackedPart]:
    """Micro-batches, short sequences first; one that is over the budget is a single sequence.

    Args:
        chosen: indices into `sequences`; each has a sampled token behind its first one.

    A row is as long as the longest sequence of its micro-batch, or SHORT_ROW. So no micro-batch has
    more tokens, or larger attention scores, than its sequences would have one to a row.
    """
    sizes = sorted((used(sequences[sequence]), sequence) for sequence in chosen)
    parts: list[PackedPart] = []
    while sizes:
        end = bisect_right(
            range(1, len(sizes) + 1), token_budget, key=lambda end: _first_fit(sizes[:end]).tokens
        )
        parts.append(_first_fit(sizes[: max(1, end)]))
        sizes = sizes[max(1, end) :]
    return parts


def used(sequence: TrainSequence) -> int:
    """Tokens that go into the model: those before the last trained one."""
    mask = sequence.rollout.trained_mask
    return len(mask) - 1 - mask[::-1].index(1)


def _first_fit(sizes: Sizes) -> PackedPart:
    """Each sequence, the longest first, into the first row with room: at most 11/9 of the
    fewest rows possible, and one more (Johnson, 1973)."""
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


# ---------------------------------------------------------------------- the budget


class MicroBatchBudget:
    """Tokens of a micro-batch, and blocks of an evaluation where their number is open, so that one
    evaluation stays within `max_eval_ms`; never above `token_budget`.

    macOS kills GPU work that takes seconds while a display is on (ml-explore/mlx#3267), and the
    first piece of work that is too large ends the process. So both start small, and double as long
    as evaluations take less than half the limit: first `tokens`, then the blocks. What takes too
    long has fewer blocks first. Without a limit `tokens` is always `token_budget`.

    `blocks`: of the model whose evaluations are observed.
    """

    def __init__(
        self,
        token_budget: int,
        max_eval_ms: int | None,
        blocks: int | BlockLimits = 1,
    ) -> None:
        self._limit_ms = max_eval_ms
        self._full = token_budget
        self._blocks = blocks if isinstance(blocks, BlockLimits) else None
        if self._blocks is not None and max_eval_ms is not None:
            self._blocks.most_blocks = 1
        self.tokens = self._full if self._limit_ms is None else min(self._full, FIRST_TOKENS)
        self._warned = False

    def observe(self, longest_ms: float, *, tokens: int, rows: int) -> None:
        """Adapt the budget after a micro-batch of `rows` sequences and `tokens` tokens, whose
        longest evaluation took `longest_ms`."""
        if self._limit_ms is None:
            return
        open_blocks = self._blocks
        if longest_ms > self._limit_ms:
            if open_blocks is not None and open_blocks.used > 1:
                fewer = int(open_blocks.used * AIM * self._limit_ms / longest_ms)
                open_blocks.most_blocks = max(1, fewer)
                return
            if rows == 1 and not self._warned:
                log.warning(
                    "one sequence alone takes longer than max_eval_ms: shorten"
                    " rl_training.atropos.max_token_length or"
                    " set rl_training.blocks_per_eval = 1",
                    tokens=tokens,
                    evaluation_ms=round(longest_ms),
                    limit=self._limit_ms,
                )
                self._warned = True
            lowered = max(1, int(tokens * AIM * self._limit_ms / longest_ms))
            if lowered < self.tokens:
                log.info(
                    "smaller micro-batches",
                    tokens=lowered,
                    evaluation_ms=round(longest_ms),
                    limit=self._limit_ms,
                )
                self.tokens = lowered
        elif longest_ms < self._limit_ms / 2:
            # a micro-batch that was nearly full
            if 2 * tokens > self.tokens and self.tokens < self._full:
                self.tokens = min(self._full, 2 * self.tokens)
            elif open_blocks is not None and open_blocks.used == open_blocks.most_blocks:
                open_blocks.most_blocks *= 2

"""Rows of a file in the place of the rollout buffer: step → TrainBatch.

The rows of a step are a function of (seed, step) alone: each epoch is a permutation (not shuffled:
the order of the rows), cut into batches of nearly equal size that never mix epochs. So a resumed
run continues at its step without a stored position. A step is one optimizer update on
`batch_size` examples (a pair is one, a pack of rows too).
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mlx_parallm.rl_training.data.learned_tokens import Encoded, Unit
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.types import Rollout

Score = Callable[[Sequence[Rollout]], list[float]]
"""Sequences → log π(y|x) - log π_ref(y|x) of each, under the weights as they are now."""


class DataBatches:
    """Args:
    units: in the order of the rows.
    packs: the units of each example; None: each unit is one.
    shuffle: False keeps that order in each epoch.
    weights: KTO: advantage of a row with label true, and minus that of a row with label false.
    pairs_together: as in `advantages_of`.
    log_ratios: computes what KTO's kl is estimated from; None: the algorithm needs none.
    scored_first: the rows come without log-probabilities, so the trainer scores them before it
        learns.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        packs: Sequence[Sequence[int]] | None = None,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        weights: tuple[float, float] = (1.0, 1.0),
        pairs_together: int | None = None,
        log_ratios: Score | None = None,
        scored_first: bool = False,
    ) -> None:
        self._units, self._seed, self._shuffle = units, seed, shuffle
        self._weights, self._pairs_together, self._log_ratios = weights, pairs_together, log_ratios
        self._scored_first = scored_first
        self._packs = [[unit] for unit in range(len(units))] if packs is None else packs
        self.steps_per_epoch = steps_per_epoch(len(self._packs), batch_size)

    def rows(self, step: int) -> list[int]:
        """The units that a step trains on."""
        epoch, number = divmod(step - 1, self.steps_per_epoch)
        drawn = np.array_split(self._order(epoch), self.steps_per_epoch)[number].tolist()
        return [unit for pack in drawn for unit in self._packs[pack]]

    def _order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._packs))
        return np.random.default_rng([self._seed & 0xFFFFFFFF, epoch]).permutation(len(self._packs))

    # ------------------------------------------------------------------ the interface of a rollout
    # buffer

    def request(self, step: int, last: int | None = None) -> None:
        """Rows need not be requested."""

    def collect(self, step: int, *, timeout_s: float = 0.0) -> TrainBatch:
        rows = self.rows(step)
        units = [self._units[row] for row in rows]
        constants = {}
        if self._log_ratios is not None:
            constants = kto_constants(units, self._mismatched(rows, step), self._log_ratios)
        sequences = [
            train_sequence(sequence, advantage, scored_first=self._scored_first)
            for unit, advantage in zip(
                units, advantages_of(units, self._weights, self._pairs_together), strict=True
            )
            for sequence in unit.sequences
        ]
        lengths = [int(sequence.mask.sum()) for unit in units for sequence in unit.sequences]
        return TrainBatch(
            step=step,
            groups=(),
            sequences=tuple(sequences),
            statistics=BatchStatistics(
                sequences=len(sequences), completion_tokens_mean=sum(lengths) / max(len(lengths), 1)
            ),
            constants=constants,
        )

    def resume(self, step: int, group_ids: Sequence[str]) -> TrainBatch:
        """Return the same batch again: a step is one update, so an interrupted step changed
        nothing."""
        return self.collect(step)

    def choose_again(self) -> None:
        """Do nothing after a rollback: the same rows come next."""

    def health(self) -> str | None:
        """Return None: rows are always available."""
        return None

    def _mismatched(self, rows: Sequence[int], step: int) -> list[Encoded]:
        order = self._order((step - 1) // self.steps_per_epoch).tolist()
        after = dict(zip(order, [*order[1:], order[0]], strict=True))
        return [mismatched(self._units[row], self._units[after[row]]) for row in rows]


def steps_per_epoch(examples: int, batch_size: int) -> int:
    return math.ceil(examples / batch_size)


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return packs of at most `capacity` in all: each item, the largest first, goes into the pack
    whose room is the smallest that it fits into, of equal rooms the one that had it first (TRL's
    strategy "bfd"). An item above `capacity` is a pack of its own.

    Worked: 5, 2, 3 and 1 with a capacity of 5 are [5], [3, 2] and [1].
    """
    packs, rooms, having = list[list[int]](), list[int](), defaultdict[int, deque[int]](deque)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        place = bisect_left(rooms, sizes[item])
        if place == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room = rooms[place]
            pack = having[room].popleft()
            if not having[room]:
                del rooms[place]
        packs[pack].append(item)
        left = room - sizes[item]
        if left > 0:
            if not having[left]:
                insort(rooms, left)
            having[left].append(pack)
    return packs


def advantages_of(
    units: Sequence[Unit], weights: tuple[float, float], pairs_together: int | None = None
) -> list[float]:
    """Return the number in the advantages of each unit's sequences: the margin of a reward model's
    pair, KTO's label and weight, or of another pair the weight of its chosen tokens in DPO's "sft".

    Args:
        units: of one mini-batch.
        pairs_together: pairs whose tokens have one mean; default: all of them.

    Worked: chosen completions of 2, 6 and 4 tokens. Together 3 / 12 each; two at a time the mean
    of the means over 8 and 4 tokens, so 3 / (2 · 8) for the first two, 3 / (2 · 4) for the third.
    """
    size = pairs_together or len(units)
    parts = [units[start : start + size] for start in range(0, len(units), size)]
    tokens = [sum(int(unit.sequences[0].mask[1:].sum()) for unit in part) for part in parts]
    advantages = list[float]()
    for number, unit in enumerate(units):
        if unit.margin is not None:
            advantages.append(unit.margin)
        elif len(unit.sequences) == 2:
            advantages.append(len(units) / (len(parts) * max(tokens[number // size], 1)))
        else:
            advantages.append(weights[0] if unit.label else -weights[1])
    return advantages


def train_sequence(
    sequence: Encoded, advantage: float, *, scored_first: bool = False
) -> TrainSequence:
    rollout = sequence.rollout()
    if scored_first:
        rollout = replace(rollout, logprobs=None)
    return TrainSequence(rollout, (advantage,) * len(sequence.tokens), fresh=False)


def mismatched(unit: Unit, other: Unit) -> Encoded:
    """The prompt of one with the completion of another, for the KL estimate of KTO
    (arXiv:2402.01306, §3.3)."""
    [prompt_row], [completion_row] = unit.sequences, other.sequences
    prompt, completion = prompt_row.prompt_length, completion_row.prompt_length
    return Encoded(
        np.concatenate([prompt_row.tokens[:prompt], completion_row.tokens[completion:]]),
        np.concatenate([np.zeros(prompt, bool), completion_row.mask[completion:]]),
        prompt_row.carried,
    )


def kto_constants(
    units: Sequence[Unit], foreign: Sequence[Encoded], log_ratios: Score
) -> dict[str, float]:
    """Constants of a mini-batch: "kl" = max(0, mean log-ratio of `foreign`), and how many units
    have either label."""
    ratios = log_ratios([sequence.rollout() for sequence in foreign])
    desirable = sum(unit.label for unit in units)
    return {
        "kl": max(0.0, math.fsum(ratios) / len(ratios)),
        "desirable": float(desirable),
        "undesirable": float(len(units) - desirable),
    }

"""What a trainer asks of the processes that train with it (docs/distributed.md). Here: one process alone.

Every rank runs the same `Trainer.train_step` on the same batch from the same state. Only the micro-batches are spread;
their numbers are exchanged and their gradients added, so each rank goes on with the same values. `distributed.py` has
the ranks of several processes.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")


class Ranks:
    """`lost`: why training cannot go on; empty while all are there."""

    rank, size = 0, 1
    lost = ""

    def share(self, parts: Sequence[T], cost: Callable[[T], float]) -> list[T]:
        """This rank's of all parts, in their order: the dearest first, each to whom has least to do so far."""
        loads, own = [0.0] * self.size, []
        for number in sorted(range(len(parts)), key=lambda number: -cost(parts[number])):
            least = loads.index(min(loads))
            loads[least] += cost(parts[number])
            if least == self.rank:
                own.append(number)
        return [parts[number] for number in sorted(own)]

    def budget(self, budget: int, tokens: int) -> int:
        """Tokens of a micro-batch, so that `tokens` in all are enough parts for every rank."""
        return budget if self.size == 1 else min(budget, -(-tokens // self.size))

    def exchange(self, value: T, *, stop: bool = False) -> list[T] | None:
        """Every rank's value, in the order of ranks. None: one of them wants to stop, or is gone."""
        return None if stop else [value]

    def sum(self, arrays: list[mx.array]) -> list[mx.array] | None:
        """The sums over all ranks of evaluated arrays, evaluated, the same bits everywhere. None: a rank is gone."""
        return arrays

    def tell(self, message: Any) -> None:
        """From rank 0 to all others."""

    def told(self, stop: threading.Event | None = None) -> Any:
        """What rank 0 told next; None when it has ended the run. Once `stop` is set, rank 0 hears of it. Raises
        RankLostError: it is gone."""

    def check(self, stop: threading.Event | None = None) -> None:
        """Between two steps. On rank 0: sets `stop` where another rank was asked to end the run. Raises RankLostError:
        a rank is gone."""

    def close(self) -> None:
        """Ends the run for the others too."""


ALONE = Ranks()

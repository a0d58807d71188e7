"""The interface of a trainer to the processes that train with it
(docs/operations.md#several-processes), for one process alone.

Every rank runs the same `Trainer.train_step` on the same batch from the same state. Only the
micro-batches are spread; their numbers are exchanged and their gradients added, so each rank
continues with the same values. Every rank samples too, with its own engine on these weights: rank 0
decides which groups a rank samples, and when it serves a new version. `distributed/` has the ranks
of several processes.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from mlx_parallm.config.load import Config
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.environments.runner import MakePlayer
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.prepare import StepPosition

T = TypeVar("T")


@dataclass(frozen=True)
class RankTask:
    """A step for the other ranks. `settings`: of `Trainer.settings`; `state`: of
    `Trainer.state`."""

    settings: Mapping[str, float]
    batch: TrainBatch
    position: StepPosition | None
    state: dict[str, Any]


class HasArrays(Protocol):
    """A trainer, for those who compare and copy its arrays."""

    def arrays(self) -> dict[str, mx.array]: ...

    def restore_arrays(self, arrays: Mapping[str, mx.array]) -> None: ...


class Ranks:
    """`lost`: why training cannot continue; empty while all ranks are there."""

    rank, size = 0, 1
    here = 1  # ranks on this machine
    lost = ""

    def begin(self, config: Config) -> None:
        """Prepare the other ranks for this run; called on rank 0, before it starts or writes
        anything. Raises ConfigError: which of them cannot, and why; RankLostError: a rank is
        gone."""

    def publish(self, version: int, trainer: HasArrays) -> None:
        """Make every rank serve the weights of `trainer` as `version`; rank 0 has published it."""

    def players(self) -> Sequence[MakePlayer]:
        """Return the players of the other ranks, once they serve."""
        return ()

    def clients_engine(self, engine: EngineClient) -> EngineClient:
        """Return the engine for clients and for pauses,
        perhaps that of all ranks."""
        return engine

    def served_tokens(self) -> int:
        """Return how many tokens the engines of the other ranks have sampled, for whomever."""
        return 0

    def announce_step(self, task: RankTask, trainer: HasArrays) -> None:
        """Make the other ranks begin the same step from the same arrays; called on rank 0. Raises
        RankLostError: they train another model."""

    def share(self, parts: Sequence[T], cost: Callable[[T], float]) -> list[T]:
        """Return this rank's share of all parts, in their order. The longest part goes first, each
        to the least loaded rank."""
        loads, numbers = [0.0] * self.size, []
        for number in sorted(range(len(parts)), key=lambda number: -cost(parts[number])):
            least = loads.index(min(loads))
            loads[least] += cost(parts[number])
            if least == self.rank:
                numbers.append(number)
        return [parts[number] for number in sorted(numbers)]

    def budget(self, budget: int, tokens: int) -> int:
        """Tokens of a micro-batch, so that `tokens` in all are enough parts for every rank."""
        return budget if self.size == 1 else min(budget, -(-tokens // self.size))

    def exchange(self, value: T, *, stop: bool = False) -> list[T] | None:
        """Every rank's value, in the order of ranks. None: one of them wants to stop, or is
        gone."""
        return None if stop else [value]

    def sum(self, arrays: list[mx.array]) -> list[mx.array] | None:
        """The sums over all ranks of evaluated arrays, evaluated, the same bits everywhere.
        None: a rank is gone."""
        return arrays

    def check(self, stop: threading.Event | None = None) -> None:
        """Check the other ranks between two steps. On rank 0, set `stop` if another rank was
        requested to end the run. Raises RankLostError: a rank is gone."""

    def close(self) -> None:
        """End the run for the others too."""


ALONE = Ranks()

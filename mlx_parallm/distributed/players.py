"""Groups that rank 0 starts and another rank plays, over its own TCP connection.

    rank 0       RolloutScheduler → RankPlayer → connection
    rank 1, …    connection → RankRolloutWorker → LocalPlayer → this rank's engine; results go back
                 as they finish

Rank 0 alone decides which groups there are: tasks are disjoint, the number of a group sets its
seed, and order, resume, refused groups and the store are those of a run with one process. Groups
that a lost rank has not finished are not settled, so a resume starts them again.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.runner import (
    EpisodeRunner,
    GroupPlan,
    GroupResult,
    LocalPlayer,
    OnError,
    OnResults,
    describe,
)
from mlx_parallm.errors import EnvironmentFailedError
from mlx_parallm.types import RolloutGroup

STOP_S = 10.0  # for episodes that are cancelled at the end of a run


@dataclass(frozen=True)
class GroupOrder:
    """A `GroupPlan` for another rank, which finds the environment by name."""

    environment: str
    group_id: str
    task_index: int
    size: int
    seed: int
    index: int | None
    max_steps: int | None

    @classmethod
    def of(cls, plan: GroupPlan) -> "GroupOrder":
        name = plan.source.name
        return cls(
            name, plan.group_id, plan.task_index, plan.size, plan.seed, plan.index, plan.max_steps
        )

    def plan(self, source: EnvironmentSource) -> GroupPlan:
        return GroupPlan(
            self.group_id,
            source,
            self.task_index,
            self.size,
            self.seed,
            self.index,
            max_steps=self.max_steps,
        )


@dataclass(frozen=True)
class Play:
    """Groups to play, submitted together."""

    orders: tuple[GroupOrder, ...]


@dataclass(frozen=True)
class UseTemperature:
    temperature: float


@dataclass(frozen=True)
class StopPlaying:
    pass


@dataclass(frozen=True)
class PlayedGroup:
    """A group's result, as far as the store needs it."""

    group: RolloutGroup
    failure: str | None
    may_pass: bool
    times: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Broken:
    """A rank that can play no more: its engine has died, or there is a bug in this package."""

    error: str


def hang_up(connection: Connection) -> None:
    """End a connection whose messages another thread reads: that thread gets EOFError, and
    closes it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def received(connection: Connection) -> Any:
    """Return the next message; None: the other end is gone."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


class RankPlayer:
    """The `GroupPlayer` of another rank, as rank 0 sees it. Single use. Until `stop`, a rank that
    cannot play is an error of the run: groups are delivered in order, so the others would wait for
    its groups for ever."""

    def __init__(
        self, connection: Connection, rank: int, on_results: OnResults, on_error: OnError
    ) -> None:
        self._connection, self._rank = connection, rank
        self._on_results, self._on_error = on_results, on_error
        self._lock = threading.Lock()  # guards sending, and what follows
        self._plans: dict[str, GroupPlan] = {}  # in flight there, by group id
        self._stopped = False
        threading.Thread(target=self._read, name=f"rollouts of rank {rank}", daemon=True).start()

    def play(self, plans: Sequence[GroupPlan]) -> None:
        with self._lock:
            self._plans |= {plan.group_id: plan for plan in plans}
        self._send(Play(tuple(GroupOrder.of(plan) for plan in plans)))

    def use_temperature(self, temperature: float) -> None:
        self._send(UseTemperature(temperature))

    def stop(self, timeout_s: float = 0.0) -> Sequence[str]:
        """Stop without waiting: the end of the run ends that rank too."""
        self._stopped = True
        self._send(StopPlaying())
        return ()

    def _send(self, message: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # the connection is closed: `_read` says so
            self._connection.send(message)

    def _read(self) -> None:
        with self._connection:
            try:
                while (message := received(self._connection)) is not None:
                    self._take(message)
                self._fail("the connection for its groups is closed")
            except Exception as error:  # noqa: BLE001  boundary of the thread: nothing else would see it
                self._fail(describe(error))

    def _take(self, message: PlayedGroup | Broken) -> None:
        if isinstance(message, Broken):
            self._fail(message.error)
            return
        with self._lock:
            plan = self._plans.pop(message.group.group_id)
        group = replace(message.group, metadata={**message.group.metadata, "rank": self._rank})
        result = GroupResult(
            plan, group, (), None, message.failure, message.may_pass, message.times
        )
        self._on_results([result])

    def _fail(self, why: str) -> None:
        if not self._stopped:
            self._on_error(EnvironmentFailedError(f"rank {self._rank}: {why}"))


class RankRolloutWorker:
    """Plays rank 0's groups on another rank, until rank 0 stops it or the connection ends.

    Args:
        check: called before results are sent. An exception, for example because the engine has
            died, ends the run: groups that failed for that reason say nothing about their tasks.
    """

    def __init__(
        self,
        connection: Connection,
        sources: Sequence[EnvironmentSource],
        runner: EpisodeRunner,
        *,
        fixed_order: bool,
        check: Callable[[], None],
    ) -> None:
        self._connection, self._check = connection, check
        self._sources = {source.name: source for source in sources}
        self._lock = threading.Lock()  # guards sending
        self._player = LocalPlayer(
            runner,
            list(self._sources),
            fixed_order=fixed_order,
            on_results=self._send_results,
            on_error=lambda error: self._send(Broken(describe(error))),
        )
        self._thread = threading.Thread(target=self._read, name="rollouts for rank 0", daemon=True)
        self._thread.start()

    def close(self) -> list[str]:
        """Cancel running episodes; return the environments that still block their threads after
        STOP_S."""
        return self._player.stop(STOP_S)

    def _read(self) -> None:
        with self._connection:
            try:
                while (message := received(self._connection)) is not None:
                    self._take(message)
            except Exception as error:  # noqa: BLE001  boundary of the thread: rank 0 would wait for ever
                self._send(Broken(describe(error)))

    def _take(self, message: Play | UseTemperature | StopPlaying) -> None:
        if isinstance(message, Play):
            self._player.play(
                [order.plan(self._sources[order.environment]) for order in message.orders]
            )
        elif isinstance(message, UseTemperature):
            self._player.use_temperature(message.temperature)
        else:
            self._player.stop()

    def _send_results(self, results: Sequence[GroupResult]) -> None:
        self._check()
        for result in results:
            self._send(PlayedGroup(result.group, result.failure, result.may_pass, result.times))

    def _send(self, message: object) -> None:
        # rank 0 is gone: the main thread ends the process
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

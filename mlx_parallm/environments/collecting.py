"""Collector: finished groups of a `RolloutManager` on their way to whoever calls `collect_rollouts`.

They are handed on in the order in which they were started, whenever they finished: else what is collected first would
be the shortest episodes.
"""

import dataclasses
import math
import pickle
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from mlx_parallm.environments.collecting_config import CollectionStatistics, RolloutConfig
from mlx_parallm.environments.episode import failed_trajectories
from mlx_parallm.environments.runner import GroupPlan, GroupResult
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Trajectory

log = get_logger("environments")

Group = tuple[Trajectory, ...]
SIGNALS_SEEN_WITHIN_S = 0.5


class Collector:
    """`started`, `add` and `end` are called by the manager, `take` by one thread of the user's at a time."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        on_start: Callable[[str], None] | None,
        on_complete: Callable[[Trajectory], None] | None,
    ) -> None:
        self.statistics = CollectionStatistics()
        self._config, self._on_start, self._on_complete = config, on_start, on_complete
        self._changed = threading.Condition()  # guards what follows
        self._order: deque[str] = deque()  # groups that were started and are not ready, in their order
        self._early: dict[str, Group] = {}  # those of them that an earlier one holds back
        self._ready = Spool(config.max_trajectory_buffer, config.offload_to_disk)
        self._outstanding = 0  # groups that were asked for and not taken
        self._ended = self._closed = False

    # --- the manager's side

    def begin(self) -> None:
        """Raises RuntimeError: it is closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("this manager is closed")
            self._ended = False

    def started(self, plans: Sequence[GroupPlan]) -> None:
        with self._changed:
            self._order.extend(plan.group_id for plan in plans)
        if self._on_start is not None:
            for plan in plans:
                for number in range(plan.size):
                    self._on_start(f"{plan.group_id}/{number}")

    def add(self, result: GroupResult) -> None:
        """A finished group; a failed one too: its trajectories say why."""
        group = _group_of(result, self._config.temperature)
        for trajectory in group:
            if self._config.verbose:
                log.info(
                    "rollout finished",
                    rollout=trajectory.group_id,
                    steps=trajectory.step_count,
                    tokens=trajectory.rollout.sampled_tokens,
                    error=trajectory.error,
                )
            if self._on_complete is not None:
                self._on_complete(trajectory)
        with self._changed:
            self._early[result.plan.group_id] = group
            while self._order and self._order[0] in self._early:
                self._ready.push(self._early.pop(self._order.popleft()))
            self._changed.notify_all()

    def end(self) -> None:
        """What was started and is not finished will not come."""
        with self._changed:
            for name in self._order:
                if name in self._early:
                    self._ready.push(self._early.pop(name))
            self._order.clear()
            self._outstanding, self._ended = len(self._ready), True
            self._changed.notify_all()

    def close(self) -> None:
        """Gives up what nobody took."""
        self._closed = True
        self._ready.close()

    # --- the user's side

    def take(self, wanted: int, ask: Callable[[int], None], *, largest: int, ahead: int) -> Iterator[Trajectory]:
        """Whole groups until there are `wanted` trajectories; ends early after `end`.

        Args:
            ask: starts so many more groups.
            largest: most trajectories of one group.
            ahead: groups that are to be in flight beyond the wanted ones.
        """
        given = 0
        with self._clocked(), self._bar(wanted) as advance:
            while given < wanted:
                with self._changed:
                    missing = max(0, math.ceil((wanted - given) / largest) + ahead - self._outstanding)
                    self._outstanding += missing
                ask(missing)
                group = self._next()
                if group is None:
                    return
                given += len(group)
                for trajectory in group:
                    self.statistics.add(trajectory)
                    advance()
                yield from group

    def _next(self) -> Group | None:
        with self._changed:
            # A signal that comes just before a wait is only seen after it (CPython): none lasts longer than that.
            while not self._changed.wait_for(lambda: len(self._ready) or self._ended, SIGNALS_SEEN_WITHIN_S):
                pass
            if not len(self._ready):
                return None
            self._outstanding -= 1
            return self._ready.pop()

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.statistics.seconds += time.monotonic() - began

    @contextmanager
    def _bar(self, wanted: int) -> Iterator[Callable[[], None]]:
        console = Console(stderr=True)
        shown = self._config.enable_progress_bar and console.is_terminal
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not shown) as progress:
            task = progress.add_task("rollouts", total=wanted)
            yield lambda: progress.advance(task)


def _group_of(result: GroupResult, temperature: float) -> Group:
    plan, group, failure = result.plan, result.trajectories, result.failure
    if failure is None or any(trajectory.error is not None for trajectory in group):
        return group
    if not group:
        return failed_trajectories(plan.group_id, plan.size, temperature, failure)
    marked = (dataclasses.replace(trajectory.rollout, error=failure) for trajectory in group)  # its reward failed
    return tuple(dataclasses.replace(each, rollout=rollout) for each, rollout in zip(group, marked, strict=True))


class Spool:
    """First in, first out. Beyond `limit` trajectories the later groups wait in a file, which has no name and is gone
    with the process."""

    def __init__(self, limit: int, directory: Path | str | None) -> None:
        self._limit = limit
        self._memory: deque[Group] = deque()
        self._held = 0  # trajectories in memory
        self._on_disk: deque[int] = deque()  # where each group in the file begins
        self._file: IO[bytes] | None = None
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  closed by `close`

    def __len__(self) -> int:
        """Groups."""
        return len(self._memory) + len(self._on_disk)

    def push(self, group: Group) -> None:
        if self._file is None or (not self._on_disk and self._held + len(group) <= self._limit):
            self._memory.append(group)
            self._held += len(group)
            return
        self._on_disk.append(self._file.seek(0, 2))
        pickle.dump(group, self._file)

    def pop(self) -> Group:
        """The oldest group. Raises IndexError: there is none."""
        if self._memory:
            group = self._memory.popleft()
            self._held -= len(group)
            return group
        start = self._on_disk.popleft()
        assert self._file is not None, "only its groups are not in memory"
        self._file.seek(start)
        read: Group = pickle.load(self._file)
        if not self._on_disk:
            self._file.truncate(0)
        return read

    def close(self) -> None:
        self._memory.clear()
        self._on_disk.clear()
        if self._file is not None:
            self._file.close()

"""SentDraws: the draws of environments that send their groups over HTTP, and keep their rows.

    name_rows("letters_0", …)    all of its rows, or its levels from easy to hard
    draw("letters_0", 4)         the rows that its next groups are to ask
    earned("letters_0", group)   a group has come, which says of which row it is

An environment that asks for no rows is estimated all the same, as far as its groups name theirs.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.config.environment import AdaptiveConfig
from mlx_parallm.environments.curriculum.draws import RowDraws, newest_version, rewards_of
from mlx_parallm.environments.curriculum.log import DrawLog
from mlx_parallm.errors import CheckpointError
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import RolloutGroup

log = get_logger("environments")

SENT_DRAWS_FILE = "draws_http.jsonl"
MOST_ROWS = 1_000_000
MOST_IN_FLIGHT = 256
"""Groups of an environment that were drawn and have not come. Of older ones none comes any more:
their sender has ended, or keeps groups to itself."""


@dataclass(slots=True)
class RowSender:
    draws: RowDraws
    named: Any = None  # what it has told of its rows; None: its groups alone tell
    # the groups that have not come: their rows
    in_flight: dict[int, str] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return next(iter(self.in_flight), self.draws.next_group)


class SentDraws:
    """Any thread.

    Args:
        kept: a run's directory, where it continues.
    """

    def __init__(self, kept: Path, *, seed: int) -> None:
        self._log, self._seed = DrawLog(kept / SENT_DRAWS_FILE), seed
        self._lock = threading.Lock()
        self._senders: dict[str, RowSender] = {}

    def check(self) -> None:
        """Raises CheckpointError: the file of a former process is damaged."""
        for _ in self._log.read():
            pass

    def name_rows(
        self,
        environment: str,
        rows: Sequence[str],
        settings: AdaptiveConfig,
        *,
        group_size: int,
        levels: bool = False,
    ) -> None:
        """Take the rows of an environment. Those that it named before keep what they earned.
        Raises CheckpointError: the file cannot be read."""
        named = (tuple(rows), settings, group_size, levels)
        with self._lock:
            before = self._senders.get(environment)
            if before is None or before.named != named:
                draws = RowDraws(
                    environment,
                    rows,
                    settings,
                    group_size=group_size,
                    seed=self._seed,
                    levels=levels,
                )
                draws.continue_in(self._log)
                self._senders[environment] = RowSender(draws, named)

    def draw(self, environment: str, groups: int) -> list[str] | None:
        """Return the rows of so many groups; None: it has named no rows. Raises CheckpointError:
        the disk is full."""
        with self._lock:
            sender = self._senders.get(environment)
            if sender is None or sender.named is None:
                return None
            return [self._next(sender) for _ in range(groups)]

    def _next(self, sender: RowSender) -> str:
        if len(sender.in_flight) >= MOST_IN_FLIGHT:
            oldest = sender.first
            sender.draws.earned(oldest, [])
            del sender.in_flight[oldest]
        index, rows = sender.draws.next_group, sender.draws.keys
        row = rows[sender.draws.draw(index, sender.first) % len(rows)]
        sender.in_flight[index] = row
        return row

    def earned(self, environment: str, group: RolloutGroup) -> None:
        """Count what a group earned whose metadata names its row."""
        row = group.metadata.get("row")
        if row is None:
            return
        try:
            with self._lock:
                self._count(environment, row, group)
        except CheckpointError as error:
            log.warning("what a row earned is not kept", environment=environment, error=str(error))

    def _count(self, environment: str, row: str, group: RolloutGroup) -> None:
        sender = self._senders.get(environment)
        if sender is None:
            size = len(group.rollouts)
            draws = RowDraws(environment, [], AdaptiveConfig(), group_size=size, seed=self._seed)
            draws.continue_in(self._log, others="known")
            sender = self._senders[environment] = RowSender(draws)
        draws = sender.draws
        index = next((index for index, name in sender.in_flight.items() if name == row), None)
        if index is None:
            if not draws.know(row, most=MOST_ROWS):
                return
            index = draws.next_group
            draws.draw(index, sender.first, row)
        draws.earned(index, rewards_of(group), version=newest_version(group))
        sender.in_flight.pop(index, None)

    def begin_again(self, environment: str) -> None:
        """Forget which groups were drawn: the environment has begun anew."""
        with self._lock:
            if sender := self._senders.get(environment):
                sender.in_flight.clear()
                sender.draws.rewind()

    def numbers(self) -> list[Mapping[str, Any]]:
        """Return `RowDraws.numbers` of each environment."""
        with self._lock:
            return [sender.draws.numbers() for sender in self._senders.values()]

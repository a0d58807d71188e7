"""SentDraws: the draws of environments that send their groups over HTTP, and keep their rows.

    name_rows("letters_0", …)    all of its rows, or its levels from easy to hard
    draw("letters_0", 4)         the rows that its next groups are to ask
    earned("letters_0", group)   a group has come, which says of which row it is

An environment that asks for no rows is estimated all the same, as far as its groups name theirs.
"""

import threading
from collections import deque
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
"""The newest draws of an environment. Of older ones no group comes any more: their sender has
ended, or keeps groups to itself."""


@dataclass(slots=True)
class RowSender:
    draws: RowDraws
    named: Any = None  # what it has told of its rows; None: its groups alone tell
    # the groups that have not come: their rows
    in_flight: dict[int, str] = field(default_factory=dict)
    # of the newest groups that have come, or come no more: whether they come no more
    lost: deque[bool] = field(default_factory=lambda: deque(maxlen=MOST_IN_FLIGHT))
    warns: bool = True  # when most are lost

    @property
    def first(self) -> int:
        return next(iter(self.in_flight), self.draws.next_group)

    def start(self, row: str | None = None) -> int:
        """Return a new group's index: of a row that is drawn here, or that its sender has drawn."""
        draws = self.draws
        while draws.next_group - self.first >= MOST_IN_FLIGHT:
            self.lost.append(True)
            self.release(self.first)
        index = draws.next_group
        self.in_flight[index] = draws.keys[draws.draw(index, self.first, row) % len(draws.keys)]
        self._tell()
        return index

    def release(self, index: int) -> None:
        if self.in_flight.pop(index, None) is not None:
            self.draws.release(index)

    def _tell(self) -> None:
        if self.warns and 2 * sum(self.lost) > MOST_IN_FLIGHT:
            self.warns = False
            log.warning(
                "most groups of the rows that were drawn never came, so their rows are drawn"
                " nearly alike: send groups whose answers all earn one reward too"
                " (Atropos: --env.ensure_scores_are_not_same False)",
                environment=self.draws.environment,
            )


class SentDraws:
    """Any thread.

    Args:
        kept: a run's directory, where it continues.
    """

    def __init__(self, kept: Path, *, seed: int) -> None:
        self._log, self._seed = DrawLog(kept / SENT_DRAWS_FILE), seed
        self._lock = threading.Lock()
        self._naming = threading.Lock()  # one change of rows at a time; held before _lock
        self._senders: dict[str, RowSender] = {}

    def check(self) -> None:
        """Raises CheckpointError: the file of a former process is damaged."""
        self._log.find_places()

    def name_rows(
        self,
        environment: str,
        rows: Sequence[str],
        settings: AdaptiveConfig,
        *,
        group_size: int,
        levels: bool = False,
    ) -> None:
        """Take the rows of an environment. Those that it named before keep what they earned; their
        order is that of the first call, but levels have their own.
        Raises CheckpointError: the file cannot be read."""
        named = (tuple(rows) if levels else frozenset(rows), settings, group_size, levels)
        with self._naming:
            with self._lock:
                before = self._senders.get(environment)
                if before is not None and before.named == named:
                    return
                self._log.find_places()
            draws = RowDraws(
                environment, rows, settings, group_size=group_size, seed=self._seed, levels=levels
            )
            self._continue(draws, named)

    def _continue(self, draws: RowDraws, named: Any) -> None:
        """Let an environment have these draws, once they know what the file has. Others draw and
        earn meanwhile: a file of many groups takes long."""
        draws.replay(self._log)
        with self._lock:
            draws.continue_in(self._log)  # what they have added
            self._senders[draws.environment] = RowSender(draws, named)

    def draw(self, environment: str, groups: int) -> list[str] | None:
        """Return the rows of so many groups; None: it has named no rows. Raises CheckpointError:
        the disk is full."""
        with self._lock:
            sender = self._senders.get(environment)
            if sender is None or sender.named is None:
                return None
            drawn: dict[int, str] = {}
            try:
                for _ in range(groups):
                    index = sender.start()
                    drawn[index] = sender.in_flight[index]
            except CheckpointError:
                for index in drawn:  # nobody is told of them
                    sender.release(index)
                raise
            return list(drawn.values())

    def earned(self, environment: str, group: RolloutGroup) -> None:
        """Count what a group earned whose metadata names its row."""
        row = group.metadata.get("row")
        if row is None:
            return
        try:
            self._meet(environment, group_size=len(group.rollouts))
            with self._lock:
                self._count(environment, row, group)
        except CheckpointError as error:
            log.warning("what a row earned is not kept", environment=environment, error=str(error))

    def _meet(self, environment: str, *, group_size: int) -> None:
        """Know the rows that the file has of an environment that has named none."""
        with self._lock:
            if environment in self._senders:
                return
        with self._naming:
            with self._lock:
                if environment in self._senders:
                    return
                self._log.find_places()
            entries = self._log.read(environment)
            rows = list(dict.fromkeys(entry["row"] for entry in entries if "row" in entry))
            settings = AdaptiveConfig()
            draws = RowDraws(environment, rows, settings, group_size=group_size, seed=self._seed)
            self._continue(draws, None)

    def _count(self, environment: str, row: str, group: RolloutGroup) -> None:
        sender = self._senders[environment]
        draws = sender.draws
        drawn = [index for index, name in sender.in_flight.items() if name == row]
        if not drawn:
            # one that has named its rows has no others
            if not draws.know(row, most=MOST_ROWS if sender.named is None else 0):
                return
            drawn = [sender.start(row)]
        draws.earned(drawn[0], rewards_of(group), version=newest_version(group))
        sender.lost.append(False)
        del sender.in_flight[drawn[0]]
        for index in () if draws.levels else drawn[1:]:  # which of them it is of, nobody knows
            sender.release(index)

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

"""RowDraws: which row each group of an environment asks (`curriculum = "adaptive"`).

pass_rates.py estimates what a group of each row is expected to teach, log.py keeps draws and
rewards, order.py gives an environment its draws, sent.py those whose rows are elsewhere.

    draw(index)      one draw of every 1 / floor goes through all rows in turn; each other one takes
                     a row in proportion to a power of `PassRates.teaches`, of those that no
                     group plays now
    finished(index)  the group's rewards change the estimate

The row of group `index` follows from the seed and from all draws and rewards before, which the
`DrawLog` of a run keeps: a run that was killed plays the same rows as if it had not been. Rows are
known by the hash of their prompt, so a row keeps its estimate when the file is put in another
order.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.config.environment import AdaptiveConfig
from mlx_parallm.environments.curriculum.log import DRAWS_FILE, DrawLog
from mlx_parallm.environments.curriculum.pass_rates import Kinds, Numbers, PassRates, RewardRange
from mlx_parallm.environments.task_draws import FinishedGroup
from mlx_parallm.errors import CheckpointError
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import RolloutGroup

log = get_logger("environments")

BLOCK = 1024
"""Rows whose weights are summed together: a draw and a change look at one block and at the sums
of all, for a million rows at two thousand numbers."""

SHARPNESS = 4
"""Power of the chance in a row's weight: one that is half as likely to teach is drawn a sixteenth
as often. In proportion to the chance itself, or its square, many poor rows together get most of the
groups: of 3,000 rows, of which few were seen, half of all (`scripts/bench/row_draws.py`)."""


class Weights:
    """Numbers of rows, at least 0, and draws in proportion to them."""

    def __init__(self, weights: Numbers) -> None:
        blocks = -(-len(weights) // BLOCK)
        self._blocks = np.zeros((blocks, BLOCK))
        self._flat = self._blocks.reshape(-1)
        self._sums = np.zeros(blocks)
        self.put(slice(0, len(weights)), weights)

    def make_room(self, rows: int) -> None:
        """Make room for so many rows in all."""
        if rows > len(self._flat):
            self._blocks = np.vstack([self._blocks, np.zeros((1, BLOCK))])
            self._flat = self._blocks.reshape(-1)
            self._sums = np.append(self._sums, 0.0)

    def put(self, rows: slice, weights: Numbers | float) -> None:
        self._flat[rows] = weights
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        self._sums[blocks] = self._blocks[blocks].sum(axis=1)

    def draw(self, number: float) -> int | None:
        """Return the row at `number`, from 0 to below 1, of the sum; None: all weights are 0."""
        block, rest = _at(self._sums, number)
        if block is None:
            return None
        row, _ = _at(self._blocks[block], rest)
        return None if row is None else block * BLOCK + row


def _at(weights: Numbers, number: float) -> tuple[int | None, float]:
    """Return the place at `number` of the sum, and which part of that weight it leaves."""
    ends = np.cumsum(weights)
    if ends[-1] <= 0.0:
        return None, 0.0
    place = int(np.searchsorted(ends, number * ends[-1], side="right"))
    place = min(place, int(np.flatnonzero(weights)[-1]))  # number * sum is rounded
    before = ends[place - 1] if place else 0.0
    return place, min(max(float((number * ends[-1] - before) / weights[place]), 0.0), 1.0)


@dataclass(slots=True)
class _Drawn:
    row: int
    finished: bool = False


class RowDraws:
    """The draws of one environment; its queue's lock guards them.

    Args:
        keys: of the rows, in their order; what follows the first of two equal ones is told apart by
            its number.
        rates: see `PassRates`; empty: none was measured.
        levels: the rows are levels of difficulty, from easy to hard, each with tasks without end.
        sharpness: power of the chance in a row's weight.
    """

    def __init__(
        self,
        environment: str,
        keys: Sequence[str],
        config: AdaptiveConfig,
        *,
        group_size: int,
        seed: int,
        rates: Sequence[float | None] = (),
        levels: bool = False,
        sharpness: float = SHARPNESS,
    ) -> None:
        self.environment, self.levels = environment, levels
        self._config, self._seed, self._sharpness = config, f"{environment}/{seed}", sharpness
        self._keys = _different(keys)
        self._row_of = {key: row for row, key in enumerate(self._keys)}
        self._range = RewardRange(config.pass_reward)
        self._rates = PassRates(
            rates or [None] * len(keys),
            group_size=max(2, group_size),
            half_life=config.half_life,
            ordered=levels,
        )
        self._weights = Weights(self._rates.teaches**sharpness)
        self._groups: dict[int, _Drawn] = {}  # those that are not settled, and perhaps older ones
        self._in_flight: Counter[int] = Counter()  # groups that play each row now
        self._draws = 0
        self._log: DrawLog | None = None
        self._unknown: set[str] = set()  # rows of the log that the data has no more
        self._full = False  # a row has come that could not be added
        self._replays, self._taken = False, 0  # how many entries of the log were taken
        self._turn: tuple[int, Any] = (-1, ())  # number and order of the turn through all rows

    # --- the queue's side

    def draw(self, index: int, first: int, key: str | None = None) -> int:
        """Return the number of the task of group `index`; the groups below `first` are settled.
        `key`: somebody else has drawn this row for it."""
        settled = itertools.takewhile(lambda group: group < first, self._groups)
        for group in list(settled):
            del self._groups[group]
        if index not in self._groups:
            key = key or self._keys[self._next_row(index)]
            self._keep({"group": index, "row": key})
        row = self._groups[index].row
        if self.levels:  # another group of a level has another task
            return row + index * len(self._keys)
        self._in_flight[row] += 1
        self._weights.put(slice(row, row + 1), 0.0)
        return row

    def finished(self, result: FinishedGroup) -> None:
        """Count what a group earned. A row whose group failed, unless that may pass, counts as
        wrong: it would fail again."""
        assert result.plan.index is not None, "a group of the queue has one"
        rewards: list[float | None] | None = rewards_of(result.group, self._config.reward)
        if result.failure is not None:
            rewards = [] if result.may_pass else None
        self.earned(result.plan.index, rewards, version=newest_version(result.group))

    def earned(
        self, index: int, rewards: Sequence[float | None] | None, *, version: int | None = None
    ) -> None:
        """Count the rewards of group `index`; an answer without a finite one does not count.

        Args:
            rewards: None: the group failed, and would fail again.
            version: the newest policy version that sampled it; None: unknown.
        """
        if not self._groups[index].finished:
            finite = None if rewards is None else _finite(rewards)
            self._keep({"group": index, "rewards": finite, "version": version})
        self.release(index)

    def release(self, index: int) -> None:
        """Count group `index` as one that nobody plays."""
        row = self._groups[index].row
        self._in_flight -= Counter([row])
        self._weigh(slice(row, row + 1))

    def rewind(self) -> None:
        """Forget which groups were in flight: they are played again."""
        rows, self._in_flight = list(self._in_flight), Counter()
        for row in rows:
            self._weigh(slice(row, row + 1))

    # --- the run's side

    @property
    def keys(self) -> Sequence[str]:
        """The rows, in their order."""
        return self._keys

    def know(self, key: str, *, most: int) -> bool:
        """Add a row that is new. False: there are `most` already."""
        if key in self._row_of:
            return True
        if len(self._keys) >= most:
            if not self._full:
                log.warning(
                    "rows beyond those that are known: their groups are not counted",
                    environment=self.environment,
                    row=key,
                )
            self._full = True
            return False
        row = self._row_of[key] = len(self._keys)
        self._keys.append(key)
        self._turn = (-1, ())
        self._rates.add_row()
        self._weights.make_room(row + 1)
        self._weigh(slice(row, row + 1))
        return True

    @property
    def next_group(self) -> int:
        """The first index that no draw was made for yet."""
        return max(self._groups, default=-1) + 1

    def kinds(self) -> Kinds:
        """Count the rows of each kind."""
        return self._rates.kinds()

    def numbers(self) -> dict[str, Any]:
        kinds = asdict(self.kinds())
        totals = {f"rows_{name}": count for name, count in kinds.items()}
        return totals | {"rows_by_environment": {self.environment: kinds}}

    def keep(self, run: Path) -> None:
        file = run / DRAWS_FILE
        self.continue_in(DrawLog(file))
        if self._unknown and not self._groups:
            raise CheckpointError(
                f"{file}: none of the {len(self._unknown)} rows that were drawn for"
                f" {self.environment} is in its data, so these are the draws of another data set:"
                " put the data back, or remove the file to let the estimates begin anew"
            )

    def continue_in(self, kept: DrawLog) -> None:
        """Take every entry of a log as when it was written, and append to it from now on. Raises
        CheckpointError: a damaged file."""
        self.replay(kept)
        if self._unknown:
            log.warning(
                "rows that were drawn are no longer in the data: what they earned is forgotten",
                environment=self.environment,
                rows=len(self._unknown),
            )
        self._log = kept

    def replay(self, kept: DrawLog) -> None:
        """Take the entries of a log that were not taken yet. Nothing is estimated before the last
        one: each new policy version changes the estimates of all rows."""
        self._replays = True
        try:
            for entry in kept.read(self.environment, after=self._taken):
                self._take(entry)
                self._taken += 1
        finally:
            self._replays = False
        everything = slice(0, len(self._keys))
        self._rates.estimate(everything)
        self._weigh(everything)

    # --- both

    def _keep(self, entry: dict[str, Any]) -> None:
        """Write an entry, then take it: what counts is on the disk."""
        if self._log is not None:
            self._log.append({"environment": self.environment, **entry})
        self._take(entry)

    def _take(self, entry: Mapping[str, Any]) -> None:
        index, drawn = entry["group"], self._groups.get(entry["group"])
        if "row" in entry:
            self._draws += 1
            row = self._row_of.get(entry["row"])
            if row is None:
                self._unknown.add(entry["row"])
                self._groups.pop(index, None)
            else:
                self._groups[index] = _Drawn(row)
        elif drawn is not None and not drawn.finished:
            drawn.finished = True
            self._count(drawn.row, entry["rewards"], entry["version"])

    def _next_row(self, index: int) -> int:
        """Return the row for a group that has none yet."""
        rows, floor = len(self._keys), self._config.floor
        turns = math.floor(self._draws * floor)
        if math.floor((self._draws + 1) * floor) > turns:
            return self._in_turn(turns)
        number = random.Random(f"{self._seed}/{index}").random()
        row = self._weights.draw(number)
        return int(number * rows) if row is None else row  # None: every row is in flight

    def _in_turn(self, number: int) -> int:
        """Return the row of a draw that goes through all of them, in a new order each time."""
        turn, place = divmod(number, len(self._keys))
        if self._turn[0] != turn:
            source = random.Random(f"{self._seed}/turn/{turn}")
            order = np.random.default_rng(source.getrandbits(64)).permutation(len(self._keys))
            self._turn = turn, order
        return int(self._turn[1][place])

    def _count(self, row: int, rewards: Sequence[float] | None, version: int | None) -> None:
        if rewards is None:
            right, wrong = 0.0, float(self._rates.size)
        elif rewards:
            right = self._range.right(rewards)
            wrong = len(rewards) - right
        else:
            return
        if self._replays:
            self._rates.count(row, right=right, wrong=wrong, version=version)
        else:
            self._weigh(self._rates.add(row, right=right, wrong=wrong, version=version))

    def _weigh(self, rows: slice) -> None:
        self._weights.put(rows, self._rates.teaches[rows] ** self._sharpness)
        for row in self._in_flight:
            self._weights.put(slice(row, row + 1), 0.0)


def _finite(rewards: Sequence[float | None]) -> list[float]:
    return [each for each in rewards if each is not None and math.isfinite(each)]


def rewards_of(group: RolloutGroup, name: str = "reward") -> list[float | None]:
    return [each.scores.get(name) if each.is_scored else None for each in group.rollouts]


def newest_version(group: RolloutGroup) -> int | None:
    """Return the newest policy version of a group's tokens."""
    segments = [segment for rollout in group.rollouts for segment in rollout.segments]
    newest = max((max(each.policy_versions, default=-1) for each in segments), default=-1)
    return newest if newest >= 0 else None


def _different(keys: Sequence[str]) -> list[str]:
    """Return the keys; equal ones get their number behind them, from the second on."""
    seen: Counter[str] = Counter()
    different = []
    for key in keys:
        seen[key] += 1
        different.append(key if seen[key] == 1 else f"{key}#{seen[key]}")
    return different

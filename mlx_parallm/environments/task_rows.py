"""Tasks of an environment in rows, from a JSONL file or from Python: which one is number `index` of a split."""

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.environments.kinds.problems import Split
from mlx_parallm.environments.rows import json_lines, prompt_key, split_heldout
from mlx_parallm.errors import ConfigError

HELDOUT_SHARE = 0.1

Rows = str | Path | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Row:
    values: Mapping[str, Any]
    key: str


class TaskRows:
    """Training rows come in a new order each epoch; a tenth is held out, by a hash of what the row asks."""

    def __init__(self, rows: Rows, asked: str, *, seed: int, what: str) -> None:
        """`asked`: the column that every row needs, and by which rows are held out.

        Raises ConfigError, which begins with `what`: no rows, or one without the column (with file and line).
        """
        entries = (
            json_lines(Path(rows), what)
            if isinstance(rows, str | Path)
            else [(f"task {number}", row) for number, row in enumerate(rows)]
        )
        found = []
        for where, row in entries:
            if not isinstance(row, Mapping) or not row.get(asked):
                raise ConfigError(f"{what}: {where} has no {asked!r}")
            found.append(_Row(dict(row), prompt_key(row[asked])))
        if not found:
            raise ConfigError(f"{what}: there are no tasks in {rows!r}")
        self._what, self._seed = what, seed
        self._train, self._heldout = split_heldout(found, HELDOUT_SHARE)
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def row(self, index: int, split: Split) -> dict[str, Any]:
        """Raises ConfigError: of a single prompt, none is held out."""
        rows = self._train if split == "train" else self._heldout
        if not rows:
            raise ConfigError(f"{self._what}: too few tasks to hold one out")
        epoch, position = divmod(index, len(rows))
        return dict(rows[self._order(epoch)[position] if split == "train" else position].values)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(f"tasks/{self._seed}/{epoch}").shuffle(order)
        return order

"""kind = "dataset": rows of the user's (`dataset_rows.py`), scored by reward functions of the user's
(`rewards/functions.py`). See docs/your_data.md."""

import copy
import functools
import random

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, PolicyInference, Task
from mlx_parallm.environments.kinds.problems import Split
from mlx_parallm.environments.rows import read_rows
from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.functions import Prompt, RewardFunctions


class DatasetSource(EnvironmentSource):
    """Goes through all training rows in a new order each epoch; held-out rows stay in theirs."""

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Raises ConfigError: a bad row, a reward function that cannot be loaded or called."""
        super().__init__(config, seed=seed, name=name)
        self.rows = read_rows(config)
        self.rewards = RewardFunctions.from_config(config, columns=self.rows.columns)
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)  # groups of two epochs may be in flight

    def task(self, index: int, split: Split = "train") -> Task:
        """Task `index`: row `index` of the split, from epoch index // rows. Raises ConfigError: no held-out rows."""
        rows = self.rows.train if split == "train" else self.rows.heldout
        if not rows:
            raise ConfigError(f"environments: {self.config.data} has no held-out rows")
        epoch, position = divmod(index, len(rows))
        row = rows[self._order(epoch)[position] if split == "train" else position]
        plain = self.config.prompt_format == "text"
        turns = ({"role": "user", "content": row.prompt},) if isinstance(row.prompt, str) else tuple(row.prompt)
        messages = self.open_with(turns)
        seen: Prompt = row.prompt if isinstance(row.prompt, str) else list(messages)
        answer = row.columns.get(self.config.answer_column)
        return Task(
            key=f"{self.config.name}:{row.key}",
            messages=messages,
            reward=self.rewards.for_row(seen, copy.deepcopy(row.columns), self.progress),
            answer=None if answer is None else str(answer),
            plain=plain,
        )

    def attach(self, inference: PolicyInference) -> None:
        self.rewards.attach(inference)

    def heldout(self, n: int) -> list[Task]:
        """Up to n held-out rows of distinct prompts."""
        first_of = {row.key: index for index, row in reversed(list(enumerate(self.rows.heldout)))}
        return [self.task(index, "heldout") for index in sorted(first_of.values())[:n]]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows.train)))
        random.Random(f"{self.config.name}/{self.seed}/{epoch}").shuffle(order)
        return order

"""kind = "dataset": the user's rows (`environments/dataset_rows.py`), scored by reward functions
(`rewards/functions.py`).

See docs/your_data.md.
"""

import copy
from collections.abc import Iterator

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, Split, Task
from mlx_parallm.environments.dataset_rows import DataRow, common_columns, read_prompts
from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.functions import Prompt, RewardFunctions


class DatasetSource(EnvironmentSource):
    """Goes through all training rows in a new order each epoch; held-out rows stay in theirs."""

    rewards: RewardFunctions
    columns_are_all = True
    """Whether reward functions get the columns of the rows and no others: a parameter that is none
    of them is then refused before a model is loaded."""

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Raises ConfigError: a bad row, a reward function that cannot be loaded or called."""
        super().__init__(config, seed=seed, name=name)
        self.rows = read_prompts(config, seed=seed)
        if config.tool_choice == "required":
            rows = [*self.rows.train, *self.rows.heldout]
            if not any(row.tools for row in rows):
                raise ConfigError(
                    f'environments: {self.name}: tool_choice = "required", but no row has a column'
                    " `tools` with definitions of functions"
                )
        self.rewards = (
            RewardFunctions.from_config(
                config, columns=common_columns(self.rows) if self.columns_are_all else None
            )
            if config.rewards
            else RewardFunctions.none()  # something else scores (config.load checks it)
        )

    def task(self, index: int, split: Split = "train") -> Task:
        """Return row `index` of the split as a task. Raises ConfigError: no held-out rows."""
        return self._task_of(self.rows.row(index, split))

    def long_tasks(self, size: int) -> Iterator[tuple[str, Task]]:
        """Yield file and line, and task, of each row with a longer prompt."""
        for row in (*self.rows.train, *self.rows.heldout):
            turns = [row.prompt] if isinstance(row.prompt, str) else row.prompt
            if sum(len(str(turn).encode(errors="surrogatepass")) for turn in turns) > size:
                yield row.where, self._task_of(row)

    def _task_of(self, row: DataRow) -> Task:
        plain = self.config.prompt_format == "text"
        turns = (
            ({"role": "user", "content": row.prompt},)
            if isinstance(row.prompt, str)
            else tuple(row.prompt)
        )
        messages = self.open_with(turns)
        seen: Prompt = row.prompt if isinstance(row.prompt, str) else list(messages)
        answer = row.columns.get(self.config.answer_column)
        return Task(
            key=f"{self.config.name}:{row.key}",
            messages=messages,
            reward=self.rewards.for_row(seen, copy.deepcopy(row.columns), self.progress),
            answer=None if answer is None else str(answer),
            plain=plain,
            columns=row.columns,
            tools=tuple(row.tools),
            tool_names=self.named_tools(row.columns),
        )

    def heldout(self, n: int) -> list[Task]:
        """Return up to n held-out rows of distinct prompts."""
        first_of = {row.key: index for index, row in reversed(list(enumerate(self.rows.heldout)))}
        return [self.task(index, "heldout") for index in sorted(first_of.values())[:n]]

"""An environment that never answers: `name = "awaits"` sleeps after the policy's turn (asyncio),
"blocks" holds up its thread."""

import asyncio
import time

from mlx_parallm.environments.base import EnvironmentSource, Split, Task
from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.kinds.tasks import make_problem
from mlx_parallm.rewards.base import exact_match

FOR_EVER_S = 1e9


class Sleeping(EnvironmentSource):
    def task(self, index: int, split: Split = "train") -> Task:
        problem = make_problem("sort", index, seed=self.seed, split=split)
        return Task(f"{split}/{index}", self.open_with(problem.messages), exact_match(""))

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        await super().play(episode, task, max_steps)
        if self.config.name == "blocks":
            time.sleep(FOR_EVER_S)  # noqa: ASYNC251  this is what it is for
        await asyncio.sleep(FOR_EVER_S)

"""An environment that never answers: `name = "awaits"` sleeps in `step` (asyncio), "blocks"
holds up its thread."""

import asyncio
import time

from mlx_parallm.environments.base import Environment, EnvironmentSource, Messages, Split, Task
from mlx_parallm.environments.kinds.tasks import make_problem
from mlx_parallm.rewards.base import exact_match

FOR_EVER_S = 1e9


class Asleep(Environment):
    def __init__(self, blocks: bool) -> None:
        self._blocks = blocks

    async def step(self, text: str) -> Messages | None:
        if self._blocks:
            time.sleep(FOR_EVER_S)  # noqa: ASYNC251  this is what it is for
        await asyncio.sleep(FOR_EVER_S)
        return None


class Sleeping(EnvironmentSource):
    def task(self, index: int, split: Split = "train") -> Task:
        problem = make_problem("sort", index, seed=self.seed, split=split)
        return Task(f"{split}/{index}", self.open_with(problem.messages), exact_match(""))

    def environment(self, task: Task) -> Environment:
        return Asleep(blocks=self.config.name == "blocks")

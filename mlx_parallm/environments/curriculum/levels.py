"""LevelsSource: one environment at several levels of difficulty (`levels` of an [[environments]]
entry), each a source of its own with other options.

A group draws its level by what a group of that level is expected to teach (`RowDraws` with
`levels`), so the levels rise while the policy learns, and fall when it forgets. Task number k is
number k // n of level k % n.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, PolicyInference, Split, Task
from mlx_parallm.environments.curriculum.draws import RowDraws
from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.episode_state import Prompt
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.errors import ConfigError
from mlx_parallm.types import Trajectory


@dataclass(frozen=True, slots=True)
class LevelTask(Task):
    source: EnvironmentSource | None = None  # of its level, which plays it


class LevelsSource(EnvironmentSource):
    def __init__(self, config: EnvironmentConfig, levels: Sequence[EnvironmentSource]) -> None:
        """Raises ConfigError: an environment whose tasks come in order, or with a learner."""
        first = levels[0]
        super().__init__(config, seed=first.seed, name=first.name)
        if any(level.stays_here for level in levels):
            raise ConfigError(
                f"environments: {self.name}: levels need tasks that follow from `index` or `seed`,"
                " and no learner beside the policy"
            )
        self._levels = tuple(levels)
        self.rewards, self.structure = first.rewards, first.structure
        self.opens_together = all(level.opens_together for level in levels)
        self.several_turns = any(level.several_turns for level in levels)
        self.keeps_rows = first.keeps_rows
        self.draws = RowDraws(
            self.name,
            [f"level {number}" for number in range(len(levels))],
            config.adaptive,
            group_size=config.group_size,
            seed=self.seed,
            levels=True,
        )

    def task(self, index: int, split: Split = "train") -> Task:
        number, level = divmod(index, len(self._levels))
        source = self._levels[level]
        source.progress = self.progress
        task = source.task(number, split)
        values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
        return LevelTask(**values, source=source)

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        assert isinstance(task, LevelTask) and task.source is not None, "task() made it"
        await task.source.play(episode, task, max_steps)

    def attach(self, inference: PolicyInference) -> None:
        for level in self._levels:
            level.attach(inference)

    def take_tools(self, tools: EpisodeTools | None) -> None:
        for level in self._levels:
            level.take_tools(tools)
        self.tools = self._levels[0].tools

    def group_metadata(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Any]:
        return self._levels[0].group_metadata(trajectories)

    def router(self, name: str) -> Any:
        return self._levels[0].router(name)

    def format_prompt(self, prompt: Prompt) -> Prompt:
        return self._levels[0].format_prompt(prompt)

    @property
    def how_to_end(self) -> str:
        return self._levels[0].how_to_end

    @property
    def left_behind(self) -> int:
        return sum(level.left_behind for level in self._levels)

    def join(self, deadline: float) -> None:
        for level in self._levels:
            level.join(deadline)

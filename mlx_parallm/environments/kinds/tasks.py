"""kind = "tasks": the built-in problems of `tasks.py`, scored by exact match."""

import difflib

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.environments.kinds.problems import TASKS, Split, make_problem, score
from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.base import verifier

HELDOUT_SEED = 0
"""Held-out problems do not depend on the run's seed, so that runs are compared on the same ones."""


class TasksSource(EnvironmentSource):
    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Raises ConfigError: an unknown task, or options (these tasks have none)."""
        super().__init__(config, seed=seed, name=name)
        if config.name not in TASKS:
            near = difflib.get_close_matches(config.name, TASKS, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"environments: no built-in task {config.name!r}; did you mean {near!r}? There are: {', '.join(TASKS)}"
            )
        if config.options:
            raise ConfigError(
                f"environments: the built-in task {config.name!r} takes no options (got {', '.join(config.options)})"
            )

    def task(self, index: int, split: Split = "train") -> Task:
        seed = HELDOUT_SEED if split == "heldout" else self.seed
        problem = make_problem(self.config.name, index, seed=seed, split=split)
        return Task(
            key=problem.key,
            messages=self.open_with(problem.messages),
            reward=verifier(lambda text: score(problem, text)),
            answer=problem.answer,
        )

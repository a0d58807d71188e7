"""kind = "tools": questions that the policy answers with the help of tools, one turn each.

Tools are for environments of every kind (`episode_tools.py`); this one adds the questions and
nothing else.
"""

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.dataset_rows import TaskData, read_tasks
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.state import BaseEnvironment, Inference, State


class ToolsEnvironment(BaseEnvironment):
    """One question, calls, one answer. The tools are those of the configuration, or `tools`."""

    several_turns = True

    def __init__(
        self,
        inference: Inference | None = None,
        tasks: TaskData = (),
        *,
        tools: EpisodeTools | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            tasks: rows {"prompt": a text or messages, …}, or a JSONL file of them.
            tools: `EpisodeTools.of(ToolClient(…))`, in Python.

        Raises ConfigError: no tasks, or a row without a prompt.
        """
        super().__init__(inference)
        self._rows = read_tasks(tasks, "prompt", seed=seed, what="tools: tasks")
        self.episode_tools = tools

    def reset(self, *, index: int | None = None, split: Split = "train") -> State:
        """Task `index` of a split; without an index the next one."""
        row = dict(self._rows.row(self._index_or_next(index), split).columns)
        prompt = row.pop("prompt")
        return State(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt],
            metadata=row,
        )

    def update_state(self, state: State, response: str) -> State:
        """The answer is the end."""
        state = super().update_state(state, response)
        state.done = True
        return state

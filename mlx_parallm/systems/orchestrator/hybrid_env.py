"""`HybridEnv`: the orchestrator as a gym-like environment of texts; `VectorizedHybridEnv`:
several side by side."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.action_grammar import Action
from mlx_parallm.models.threads import MLXThread
from mlx_parallm.systems.orchestrator.orchestrator import Orchestrator
from mlx_parallm.systems.orchestrator.reward import HybridTask

Task = Mapping[str, Any] | HybridTask
Step = tuple[str, float, bool, dict[str, Any]]
"""Observation, reward, done, info. info has what StepResult.info has, tool_result,
expert_result, and solved."""


class HybridEnv:
    """Episodes on the tasks of a pool, in their order and again, or of a generator (number of the
    episode → task).

    The limit and the rewards are those of `orchestrator.config`. `step_penalty`,
    `tool_call_reward`, `expert_use_reward` and `max_episode_length` replace its `step_penalty`,
    `valid_tool_call_reward`, `expert_delegation_reward` and `max_steps`; None leaves them. Raises
    ConfigError: not one of task_pool and task_generator, or an empty pool.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        task_pool: Sequence[Task] = (),
        task_generator: Callable[[int], Task] | None = None,
        step_penalty: float | None = None,
        tool_call_reward: float | None = None,
        expert_use_reward: float | None = None,
        max_episode_length: int | None = None,
    ) -> None:
        if bool(task_pool) == (task_generator is not None):
            raise ConfigError("HybridEnv: set either task_pool (with tasks) or task_generator")
        changed = {
            "step_penalty": step_penalty,
            "valid_tool_call_reward": tool_call_reward,
            "expert_delegation_reward": expert_use_reward,
        }
        config = orchestrator.config
        rewards = dataclasses.replace(config.rewards, **_set(changed))
        orchestrator.config = dataclasses.replace(
            config, rewards=rewards, **_set({"max_steps": max_episode_length})
        )
        self.orchestrator = orchestrator
        self._pool, self._generator = list(task_pool), task_generator
        self.episodes = 0

    def reset(self, task: Task | None = None) -> str:
        """Begin the next task, or the given one; return the first observation."""
        if task is None:
            number, self.episodes = self.episodes, self.episodes + 1
            task = (
                self._generator(number)
                if self._generator is not None
                else self._pool[number % len(self._pool)]
            )
        return self.orchestrator.reset(task)

    def step(self, action: Action) -> Step:
        """Carry out one action. Raises RuntimeError: the episode is over."""
        return self._outcome(self.orchestrator.step(action))

    def step_from_text(self, text: str) -> Step:
        """Carry out the first action of a text (docs/systems.md#hybrid has the grammar)."""
        return self._outcome(self.orchestrator.step_text(text))

    def _outcome(self, result: Any) -> Step:
        info = dict(result.info) | {
            "tool_result": result.tool_result,
            "expert_result": result.expert_result,
            "solved": self.orchestrator.solved,
        }
        return result.observation, result.reward, result.done, info


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class VectorizedHybridEnv:
    """N environments, stepped at the same time on a thread each; one that is done begins its next
    task at once.

    Each needs its own Orchestrator; they may share tools and experts, which act on one
    thread. Close it at the end.
    """

    def __init__(self, envs: Sequence[HybridEnv]) -> None:
        if not envs or len({id(env.orchestrator) for env in envs}) < len(envs):
            raise ConfigError(
                "VectorizedHybridEnv: one environment or more, each with its own orchestrator"
            )
        self.envs = list(envs)
        self._threads = ThreadPoolExecutor(len(self.envs), thread_name_prefix="hybrid env")
        self._acting = MLXThread("experts")
        for env in self.envs:
            env.orchestrator.run = lambda function: self._acting.submit(function).result()

    def close(self) -> None:
        """End the threads. May be called again."""
        self._threads.shutdown()
        self._acting.close()

    def __enter__(self) -> "VectorizedHybridEnv":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self) -> list[str]:
        return [env.reset() for env in self.envs]

    def step(
        self, texts: Sequence[str]
    ) -> tuple[list[str], list[float], list[bool], list[dict[str, Any]]]:
        """Step each with its text. If one was done, the observation is of its next task, and
        info["final_observation"] has the last one of the task before. Raises ValueError: not N
        texts."""
        if len(texts) != len(self.envs):
            raise ValueError(
                f"{len(texts)} texts for {len(self.envs)} environments:"
                f" expected {len(self.envs)} actions"
            )
        steps = list(self._threads.map(HybridEnv.step_from_text, self.envs, texts))
        seen, rewards, dones, infos = (list(column) for column in zip(*steps, strict=True))
        for number, done in enumerate(dones):
            if done:
                infos[number] = {**infos[number], "final_observation": seen[number]}
                seen[number] = self.envs[number].reset()
        return seen, rewards, dones, infos

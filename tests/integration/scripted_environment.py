"""An environment of one's own whose reward or slowness is one known way to not learn; `name`
chooses it."""

import asyncio
import math
import time
import zlib
from collections.abc import Sequence
from typing import Any

from mlx_parallm.environments.base import EnvironmentSource, Split, Task
from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.kinds.tasks import make_problem
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.rewards.base import verifier
from mlx_parallm.types import Trajectory

STALL_S = 0.5  # longer than the tools' time-out of such a run
GROUPS_BEFORE = 24  # a silence, or the right answers, come after so many groups


def noise(text: str) -> float:
    """A reward that tells answers apart and teaches nothing."""
    return zlib.crc32(text.encode()) % 7 / 7


def brevity(responses: Sequence[Trajectory]) -> list[dict[str, float]]:
    """Pays for being shorter than the others of the group: 0.5 on average, and 0.5 for all in
    the end."""
    lengths = [response.rollout.sampled_tokens for response in responses]
    mean = sum(lengths) / len(lengths)
    return [{"reward": 0.5 + (mean - length) / 16} for length in lengths]


def unused_part(responses: Sequence[Trajectory]) -> list[dict[str, float]]:
    """One part that tells answers apart, and one that is paid for a tool that nobody knows of."""
    scores = [noise(response.text) for response in responses]
    return [{"reward": score, "rewards/noise": score, "rewards/used_tool": 0.0} for score in scores]


def stalls(query: str) -> str:
    """Look something up. It does not answer."""
    time.sleep(STALL_S)
    return query


def fails(query: str) -> str:
    """Look something up. It is broken."""
    raise RuntimeError(f"no index for {query!r}")


class Calling(EnvironmentSource):
    """Calls the run's tool itself before each answer is scored, as an episode of tools does."""

    def task(self, index: int, split: Split = "train") -> Task:
        problem = make_problem("sort", index, seed=self.seed, split=split)
        return Task(f"{index}", self.open_with(problem.messages), verifier(noise))

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        await super().play(episode, task, max_steps)
        assert self.tools is not None
        for definition in self.tools.definitions:
            await self.tools.client.acall(definition["name"], {"query": task.key})


class Endless(BaseEnvironment):
    """Has always something more to say."""

    rewards_turns = True

    def reset(self, index: int = 0) -> State:
        return State([*make_problem("sort", index, seed=0, split="train").messages])

    def update_state(self, state: State, response: str) -> State:
        asked = self.build_prompt(state)
        state = super().update_state(state, response)
        state.turn_reward = noise(response)
        answered = {"role": "assistant", "content": response}
        state.prompt = [*asked, answered, {"role": "user", "content": "Go on."}]
        return state


class Scripted(EnvironmentSource):
    """Options: `silence_s`, how long the episodes of "late" and "silent" continue after the answer."""

    def task(self, index: int, split: Split = "train") -> Task:
        problem = make_problem("sort", index, seed=self.seed, split=split)
        of_groups = {"brevity": brevity, "unused_part": unused_part}
        word = problem.messages[-1]["content"].rpartition(" ")[2]
        reward = of_groups.get(self.config.name) or verifier(
            lambda text: self._reward(index, text, word)
        )
        return Task(f"{index}", self.open_with(problem.messages), reward)

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        await super().play(episode, task, max_steps)
        index = int(task.key)
        silent = self.config.name == "silent" and index >= GROUPS_BEFORE
        late = self.config.name == "late" and index == GROUPS_BEFORE
        if silent or late:
            await asyncio.sleep(float(self.config.options["silence_s"]))

    def _reward(self, index: int, text: str, word: str) -> float:
        rewards: dict[str, Any] = {
            "constant": lambda: 0.5,
            "by_prompt": lambda: 0.2 + index % 3 / 10,
            "all_wrong": lambda: 0.0,
            "all_right": lambda: 1.0,
            "solved": lambda: 1.0 if index >= GROUPS_BEFORE else noise(text),
            "learned": lambda: 1.0 if index >= GROUPS_BEFORE and index % 8 else noise(text),
            "hole": lambda: (
                sum(a == b for a, b in zip(text, word, strict=False)) / max(len(text), len(word))
            ),
            "up_to_0.7": lambda: min(0.7, noise(text)),
            "rarely": lambda: 0.4 if index % 8 else noise(text),
            "hardly": lambda: 0.5 + 2e-4 * noise(text),
            "no_number": lambda: math.nan,
            "raises": lambda: {}["answer"],
        }
        return float(rewards.get(self.config.name, lambda: noise(text))())

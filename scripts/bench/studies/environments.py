"""Environments of studies: one turn of five decides; episodes of very different length; one that
sleeps for ever."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

from mlx_parallm.environments.base import EnvironmentSource, Split, Task
from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.kinds.tasks import make_problem
from mlx_parallm.environments.state import BaseEnvironment, Inference, State
from mlx_parallm.rewards.base import exact_match

TURNS, DECISIVE = 5, 2
LETTERS = 8  # of a word
DIGIT = "3"  # builtin:tiny picks it in one answer of six
FOR_EVER_S = 1e9


class OneTurnDecides(BaseEnvironment):
    """A digit between four words, each in its own sequence; the digit is worth 1, the words
    nothing."""

    rewards_turns = True

    def reset(self, seed: int = 0, split: Split = "train") -> State:
        rng = random.Random(f"{split} {seed}")
        words = ["".join(rng.choices(ascii_lowercase, k=LETTERS)) for _ in range(TURNS)]
        questions = [f"Reverse: {word}" for word in words]
        questions[DECISIVE] = "Pick a digit."
        return State(prompt=_message(questions[0]), metadata={"questions": questions})

    def update_state(self, state: State, response: str) -> State:
        turn = state.step_count
        state = super().update_state(state, response)
        state.turn_reward = float(turn == DECISIVE and response.strip() == DIGIT)
        state.done = state.step_count == TURNS
        if not state.done:
            state.prompt = _message(state.metadata["questions"][turn + 1])
        return state


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def turns_of(normal: float, median: float, longest: int) -> int:
    """The turns of an episode, from a draw of the standard normal distribution."""
    return min(longest, max(1, round(median * math.exp(normal))))


class Sums(BaseEnvironment):
    def __init__(
        self,
        inference: Inference | None = None,
        median: float = 2.0,
        longest: int = 60,
        highest: int = 99,
    ) -> None:
        super().__init__(inference)
        self.median, self.longest, self.highest = median, longest, highest

    def reset(self, seed: int = 0, split: Split = "train") -> State:
        state = State(prompt="", metadata={"seed": f"{split} {seed}", "right": 0})
        return self._ask(state)

    def _ask(self, state: State) -> State:
        # its own sum for each turn, the same for all rollouts of a group
        rng = random.Random(f"{state.metadata['seed']} {state.step_count}")
        a, b = rng.randint(0, self.highest), rng.randint(0, self.highest)
        state.metadata["answer"] = str(a + b)
        state.prompt = [{"role": "user", "content": f"Sum: {a}+{b}"}]
        return state

    def update_state(self, state: State, response: str) -> State:
        if "turns" not in state.metadata:  # of this rollout, not of its group
            state.metadata["turns"] = turns_of(random.gauss(), self.median, self.longest)
        right = response.strip() == state.metadata["answer"]
        state = super().update_state(state, response)
        state.metadata["right"] += right
        state.done = state.step_count >= state.metadata["turns"]
        return state if state.done else self._ask(state)


def share_of_right_sums(trajectories: Sequence[Any], **_columns: Any) -> list[float]:
    return [trajectory.metadata["right"] / trajectory.step_count for trajectory in trajectories]


class Sleeping(EnvironmentSource):
    """It never answers: with `name = "awaits"` it sleeps after the policy's turn (asyncio), with
    "blocks" it holds up its thread."""

    def task(self, index: int, split: Split = "train") -> Task:
        problem = make_problem("sort", index, seed=self.seed, split=split)
        return Task(f"{split}/{index}", self.open_with(problem.messages), exact_match(""))

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        await super().play(episode, task, max_steps)
        if self.config.name == "blocks":
            time.sleep(FOR_EVER_S)  # noqa: ASYNC251  this is what it is for
        await asyncio.sleep(FOR_EVER_S)

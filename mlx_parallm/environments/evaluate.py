"""Greedy answers to held-out tasks through the engine: the before and after of a run."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.environments.base import ChatTokenizer, EnvironmentSource, PolicyClient, Task
from mlx_parallm.environments.episodes import EpisodeRunner, GroupPlan, GroupResult

SOLVED = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Answer:
    """One held-out task and what the policy made of it."""

    prompt: str  # the last message of the task
    expected: str | None
    text: str
    reward: float  # 0.0 for a failed episode
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    environment: str
    answers: tuple[Answer, ...]

    @property
    def accuracy(self) -> float:
        """Share of answers with the full reward of 1."""
        return sum(answer.reward >= SOLVED for answer in self.answers) / max(1, len(self.answers))

    @property
    def reward_mean(self) -> float:
        return sum(answer.reward for answer in self.answers) / max(1, len(self.answers))


async def evaluate(
    client: PolicyClient,
    sources: Sequence[EnvironmentSource],
    tokenizer: ChatTokenizer,
    n: int,
    *,
    max_token_length: int,
    adapter: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_in_flight: int = 64,
) -> list[Evaluation]:
    """Answers up to n held-out tasks of each source, one greedy answer each. A failed episode counts as wrong."""
    runner = EpisodeRunner(
        client,
        tokenizer,
        temperature=0.0,
        max_token_length=max_token_length,
        adapter=adapter,
        template_kwargs=template_kwargs,
    )
    slots = asyncio.Semaphore(max_in_flight)

    async def answer(source: EnvironmentSource, task: Task, number: int) -> Answer:
        plan = GroupPlan(f"heldout-{source.name}-{number}", source, number, 1, seed=0, split="heldout", task=task)
        async with slots:
            [result] = await runner.run([plan])
        return _answer(task, result)

    async def one(source: EnvironmentSource) -> Evaluation:
        tasks = source.heldout(n)
        answers = await asyncio.gather(*(answer(source, task, number) for number, task in enumerate(tasks)))
        return Evaluation(source.name, tuple(answers))

    return list(await asyncio.gather(*(one(source) for source in sources)))


def _answer(task: Task, result: GroupResult) -> Answer:
    reward = result.group.rollouts[0].reward if result.failure is None else 0.0
    text = result.texts[0] if result.texts else ""
    return Answer(task.messages[-1]["content"], task.answer, text, reward, result.failure)

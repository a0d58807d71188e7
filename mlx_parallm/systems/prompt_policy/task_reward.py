"""A prompt's reward from a real task: a model answers it, a verifier scores the answers, their mean
is the reward.

The model is behind an OpenAI endpoint (`EndpointAnswers`), or it is the one that this server serves
(`ServedAnswers`): then the policy learns which prompts the served model answers well, also while
that one is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Protocol

from fastapi import Request as HTTPRequest

from mlx_parallm.errors import EndpointError, RefusedError, RolloutRejectedError
from mlx_parallm.execution.json_values import whole_characters
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.server.generation import (
    UNNAMED,
    EncodedPrompt,
    build_requests,
    check_text,
    new_id,
    resolve_model,
    run,
)
from mlx_parallm.server.protocol.fields import QueueFields
from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig
from mlx_parallm.types import Rollout, SamplingParams, Trajectory


class TaskAnswers(Protocol):
    """A function that answers a prompt `config.rollouts` times."""

    async def __call__(self, prompt: str, request: HTTPRequest | None) -> list[str]:
        """Raises EndpointError, RequestError."""
        ...


class EndpointAnswers:
    """A model behind `POST /v1/chat/completions`."""

    def __init__(self, endpoint: OpenAIEndpoint, config: PromptPolicyConfig) -> None:
        self._endpoint = endpoint
        self._body = {
            "model": config.task_model,
            "n": config.rollouts,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }

    async def __call__(self, prompt: str, request: HTTPRequest | None) -> list[str]:
        messages = [{"role": "user", "content": prompt}]
        reply = await self._endpoint.post("/chat/completions", {**self._body, "messages": messages})
        try:
            return [
                whole_characters(str(choice["message"]["content"] or ""))
                for choice in reply["choices"]
            ]
        except (LookupError, TypeError) as error:
            raise EndpointError(
                f"{self._endpoint.base_url}: this is not a chat completion: {str(reply)[:200]}"
            ) from error


class ServedAnswers:
    """The model that this server serves: in training, the policy that is being trained."""

    def __init__(self, config: PromptPolicyConfig) -> None:
        self._params = SamplingParams(
            max_tokens=config.max_tokens, temperature=config.temperature, n=config.rollouts
        )

    async def __call__(self, prompt: str, request: HTTPRequest | None) -> list[str]:
        assert request is not None, "the served model is reached through a request"
        context = request.app.state.context
        check_text(prompt, "prompt")
        tokens = tuple(context.tokenizer.render_chat([{"role": "user", "content": prompt}]))
        encoded = EncodedPrompt(tokens, prompt, opens_text=True)
        model = resolve_model(context, None)
        fields = QueueFields()
        requests = build_requests(new_id(UNNAMED), [encoded], self._params, model, fields, request)
        [output] = await run(context, request, requests)
        return [completion.text for completion in output.completions]


@dataclass(frozen=True)
class TaskResult:
    """Answers to one prompt, with the reward of each, None without a score; `reward` is the mean
    of the others."""

    answers: list[str]
    rewards: list[float | None]

    @property
    def reward(self) -> float:
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) / len(scored)


class TaskReward:
    """Rewards prompts by what a model answers to them.

    Args:
        rewards: reward functions, as in `[[environments]] rewards`.

    Raises ConfigError: no such function.
    """

    def __init__(self, answers: TaskAnswers, rewards: Sequence[str]) -> None:
        self._answers = answers
        self._functions = RewardFunctions(rewards, (), columns=None, key="prompt_policy.rewards")

    async def __call__(
        self, prompt: str, columns: Mapping[str, Any], request: HTTPRequest | None = None
    ) -> TaskResult:
        """Answer and score a prompt. `columns`: what the functions compare with, e.g. {"answer":
        "42"}.

        Raises RefusedError: the model cannot be asked (502), a reward function fails, lacks a
        column or scores none of the answers (422).
        """
        try:
            texts = await self._answers(prompt, request)
        except EndpointError as error:
            raise RefusedError(f"no answer: {error}", 502) from error
        if not texts:
            raise RefusedError("the model gave no answer", 502)
        trajectories = [_trajectory(prompt, text) for text in texts]
        try:
            reward = self._functions.for_row(prompt, columns, TrainingProgress)
            scores = reward(trajectories)
            scored = await scores if isawaitable(scores) else scores
        except RolloutRejectedError as error:
            raise RefusedError(f"no reward: {error}", 422, "columns") from error
        rewards = [None if UNSCORED in score else float(score["reward"]) for score in scored]
        if not any(reward is not None for reward in rewards):
            names = ", ".join(self._functions.names)
            raise RefusedError(f"no reward: {names} scored none of the answers", 422, "columns")
        return TaskResult(texts, rewards)


def _trajectory(prompt: str, text: str) -> Trajectory:
    """An answer as reward functions see it; how it was sampled is not known here."""
    messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": text})
    rollout = Rollout((), (), None, (), 1.0, {}, "stop")
    return Trajectory(text, rollout, prompt=prompt, messages=messages)

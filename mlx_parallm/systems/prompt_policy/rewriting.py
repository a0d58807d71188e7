"""A prompt in, a mutation and the new prompt out: /mutate and /rollout."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import Request as HTTPRequest

from mlx_parallm.errors import EndpointError, RefusedError
from mlx_parallm.systems.prompt_policy.classifier import Classified, classify_prompt
from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig
from mlx_parallm.systems.prompt_policy.embeddings import Embedder
from mlx_parallm.systems.prompt_policy.experience import Choice
from mlx_parallm.systems.prompt_policy.mutations import CHAT_REWRITE, RULES, ChatMutation, Mutation
from mlx_parallm.systems.prompt_policy.prompt_ratings import default_reward_model
from mlx_parallm.systems.prompt_policy.protocol import (
    LONGEST_PROMPT,
    UNCHANGED,
    ImpactAnswer,
    MutateAnswer,
    MutateBody,
    RolloutAnswer,
    RolloutBody,
)
from mlx_parallm.systems.prompt_policy.service import PolicyService, allowed_actions, done
from mlx_parallm.systems.prompt_policy.store import Decision
from mlx_parallm.systems.prompt_policy.task_reward import TaskReward


@dataclass(frozen=True)
class PolicyDeps:
    """The parts that the routes use."""

    config: PromptPolicyConfig
    service: PolicyService
    embedder: Embedder
    chat: ChatMutation | None = None
    task: TaskReward | None = None


async def rewrite(deps: PolicyDeps, body: MutateBody, *, by_model: bool = True) -> MutateAnswer:
    """Choose a mutation for a prompt, apply it, and keep the decision until its reward comes.
    Mutations that would change nothing are not chosen. With `reward_source = "model"` the reward
    model's score is the reward, unless `by_model` is False: the caller has its own reward.

    Raises RequestError: no such mutation; RefusedError (502): another server cannot be asked;
    StoreError.
    """
    service = deps.service
    classified, possible = await asyncio.to_thread(_apply_rules, body.prompt)
    [state] = await embed(deps, [body.prompt])
    names = _choosable(deps, body, possible)
    uncertainty = service.uncertainty(state)
    if body.conservative and uncertainty > deps.config.conservative_above:
        return await _answer(
            body, classified, uncertainty, why="too little is known about such prompts"
        )
    if not names:
        return await _answer(
            body, classified, uncertainty, why="no mutation that may be chosen would change it"
        )
    allowed = allowed_actions(service.mutations, names)
    choice = await done(service.choose(state, allowed, deterministic=body.deterministic))
    name = service.mutations[choice.action]
    mutation = await _by_chat(deps, body.prompt) if name == CHAT_REWRITE else possible[name]
    if mutation is None:
        return await _answer(
            body, classified, uncertainty, why="the chat model gave the same text back"
        )
    decision_id = f"mutation-{uuid.uuid4().hex}"
    await done(
        service.open(
            Decision(
                decision_id, state, choice.action, state, choice.log_prob, choice.value, allowed
            )
        )
    )
    answer = await _answer(body, classified, uncertainty, made=(decision_id, mutation, choice))
    if by_model and deps.config.reward_source == "model":
        await done(service.reward(decision_id, answer.score))
        return answer.model_copy(update={"id": None})
    return answer


async def roll_out(
    deps: PolicyDeps, body: RolloutBody, request: HTTPRequest | None
) -> RolloutAnswer:
    """Rewrite a prompt, let the model of the task answer it, and store the mean reward.

    Raises RefusedError (404): no task is set; what `rewrite` and `TaskReward` raise.
    """
    if deps.task is None:
        raise RefusedError(
            "no task: set prompt_policy.rewards, and task_url where this server serves no model",
            404,
        )
    changed = await rewrite(deps, body, by_model=False)
    result = await deps.task(changed.prompt, body.columns, request)
    if changed.id is not None:
        await done(deps.service.reward(changed.id, result.reward))
    return RolloutAnswer(
        mutation=changed,
        answers=result.answers,
        rewards=result.rewards,
        reward=result.reward,
        stored=changed.id is not None,
        buffer_size=deps.service.buffer_size,
    )


async def embed(deps: PolicyDeps, prompts: Sequence[str]) -> np.ndarray:
    """Return embeddings [N, input_dim] float32. Raises RefusedError (502): the embedding model
    cannot be asked."""
    try:
        return await deps.embedder(prompts)
    except EndpointError as error:
        raise RefusedError(f"no embedding: {error}", 502) from error


def _apply_rules(prompt: str) -> tuple[Classified, dict[str, Mutation | None]]:
    classified = classify_prompt(prompt)
    return classified, {name: rule(prompt, classified) for name, rule in RULES.items()}


def _choosable(
    deps: PolicyDeps, body: MutateBody, possible: dict[str, Mutation | None]
) -> list[str]:
    mutations = deps.service.mutations
    allowed_actions(mutations, body.allowed)  # refuses a name that is none
    allowed_actions(mutations, None if body.mutation is None else [body.mutation], param="mutation")
    wanted = set(mutations if body.allowed is None else body.allowed)
    if body.mutation is not None:
        wanted &= {body.mutation}
    return [
        name
        for name in mutations
        if name in wanted and (name == CHAT_REWRITE or possible[name] is not None)
    ]


async def _by_chat(deps: PolicyDeps, prompt: str) -> Mutation | None:
    assert deps.chat is not None
    try:
        return await deps.chat(prompt)
    except EndpointError as error:
        raise RefusedError(f"no rewriting: {error}", 502) from error


async def _answer(
    body: MutateBody,
    classified: Classified,
    uncertainty: float,
    *,
    why: str = "",
    made: tuple[str, Mutation, Choice] | None = None,
) -> MutateAnswer:
    decision_id, mutation, choice = made or (None, None, None)
    text = body.prompt if mutation is None else mutation.text
    scored = await asyncio.to_thread(lambda: default_reward_model().score(text[:LONGEST_PROMPT]))
    return MutateAnswer(
        id=decision_id,
        prompt=text,
        action=None if choice is None else choice.action,
        mutation_type=None if mutation is None else mutation.mutation_type,
        change_description=f"left as it is: {why}"
        if mutation is None
        else mutation.change_description,
        expected_impact=UNCHANGED
        if mutation is None
        else ImpactAnswer.model_validate(mutation.expected_impact),
        category=classified.category,
        confidence=classified.confidence,
        probability=None if choice is None else float(choice.probabilities[choice.action]),
        log_prob=None if choice is None else choice.log_prob,
        value=None if choice is None else choice.value,
        uncertainty=uncertainty,
        score=scored.score,
    )

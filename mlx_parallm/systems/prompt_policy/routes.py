"""The routes of a prompt policy. Its own service has them at the root, a daemon below
/prompt_policy.

POST /select_action      embedding → mutation           POST /mutate    prompt → mutation and new prompt
POST /get_distribution   embedding → probabilities      POST /feedback  the reward of a mutation
POST /store_experience   the reward of a client's own   POST /embed     prompts → embeddings
POST /update             learn now                      GET  /stats     how it goes
POST /save  POST /load   checkpoints
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from fastapi import Request as HTTPRequest

from mlx_parallm.errors import RequestError
from mlx_parallm.server.errors import ERROR_CONTENT
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.systems.prompt_policy.experience import Experience
from mlx_parallm.systems.prompt_policy.protocol import (
    ActionAnswer,
    ActionBody,
    DistributionAnswer,
    DistributionBody,
    EmbedAnswer,
    EmbedBody,
    ExperienceBody,
    LoadCheckpointBody,
    LoadedAnswer,
    MessageAnswer,
    MutateAnswer,
    MutateBody,
    PolicyFeedbackBody,
    RolloutAnswer,
    RolloutBody,
    SaveBody,
    SavedAnswer,
    StatsAnswer,
    StoredAnswer,
    UpdateAnswer,
)
from mlx_parallm.systems.prompt_policy.rewriting import PolicyDeps, embed, rewrite, roll_out
from mlx_parallm.systems.prompt_policy.service import PolicyService, allowed_actions, done

TAG = "prompt policy"
_ASKS_ANOTHER: Any = {
    502: {"description": "Another server cannot be asked", "content": ERROR_CONTENT}
}
_SCORES: Any = {
    422: {"description": "The task gives no reward: `columns` lacks one", "content": ERROR_CONTENT}
}
_OTHER_SIZES: Any = {
    409: {"description": "The checkpoint does not fit this policy", "content": ERROR_CONTENT}
}


def _add_acting(router: APIRouter, deps: PolicyDeps) -> None:
    """Add the routes that take embeddings."""
    service = deps.service

    @router.post("/select_action")
    async def select_action(body: ActionBody) -> ActionAnswer:
        """Choose a mutation for an embedding."""
        state, allowed = (
            _vector(deps, body.embedding, "embedding"),
            allowed_actions(service.mutations, body.allowed),
        )
        choice = await done(service.choose(state, allowed, deterministic=body.deterministic))
        return ActionAnswer(
            action=choice.action,
            mutation_type=service.mutations[choice.action],
            probability=float(choice.probabilities[choice.action]),
            log_prob=choice.log_prob,
            value=choice.value,
            uncertainty=choice.uncertainty,
        )

    @router.post("/get_distribution")
    async def get_distribution(body: DistributionBody) -> DistributionAnswer:
        """The probability of every mutation for an embedding."""
        state, allowed = (
            _vector(deps, body.embedding, "embedding"),
            allowed_actions(service.mutations, body.allowed),
        )
        choice = await done(service.choose(state, allowed, deterministic=True))
        return DistributionAnswer(
            probabilities=choice.probabilities.tolist(),
            mutation_types=list(service.mutations),
            uncertainty=choice.uncertainty,
        )

    @router.post("/store_experience")
    async def store_experience(body: ExperienceBody) -> StoredAnswer:
        """Keep an experience. It is on the disk when this answers."""
        allowed = allowed_actions(service.mutations, body.allowed)
        if body.action >= len(service.mutations):
            raise RequestError(
                f"'action' is {body.action}; there are 0 to {len(service.mutations) - 1}",
                param="action",
            )
        if allowed is not None and not allowed[body.action]:
            raise RequestError(
                f"'action' is {body.action}, which 'allowed' does not name", param="action"
            )
        await done(
            service.add(
                Experience(
                    _vector(deps, body.state, "state"),
                    body.action,
                    body.reward,
                    _vector(deps, body.next_state, "next_state"),
                    body.done,
                    body.log_prob,
                    body.value,
                    allowed,
                    body.episode_id,
                )
            )
        )
        return StoredAnswer(buffer_size=service.buffer_size)


def _add_learning(router: APIRouter, deps: PolicyDeps) -> None:
    """Add updates, checkpoints and statistics."""
    service = deps.service

    @router.get("/stats")
    async def policy_stats() -> StatsAnswer | MessageAnswer:
        """Return the numbers of updates, episodes and experiences, and the latest averages."""
        return _stats(service)

    @router.post("/update")
    async def update_policy() -> UpdateAnswer | MessageAnswer:
        """Learn from the experiences since the last update."""
        result = await done(service.update())
        if result is None:
            least = deps.config.ppo.min_buffer_size
            return MessageAnswer(
                message=f"Not enough experiences: {service.buffer_size} of {least}"
            )
        return UpdateAnswer.model_validate(result | {"buffer_size": service.buffer_size})

    @router.post("/save")
    async def save_policy(body: SaveBody | None = None) -> SavedAnswer:
        """Write a checkpoint below the checkpoint directory, `latest` without a name."""
        return SavedAnswer(path=await done(service.save(body.path if body is not None else None)))

    @router.post("/load", responses=_OTHER_SIZES)
    async def load_policy(body: LoadCheckpointBody) -> LoadedAnswer:
        """Continue from a checkpoint."""
        await done(service.load(body.path))
        return LoadedAnswer(path=body.path)


def _add_rewriting(router: APIRouter, deps: PolicyDeps) -> None:
    """Add the routes that take prompts."""

    @router.post("/mutate", responses=_ASKS_ANOTHER)
    async def mutate_prompt(body: MutateBody) -> MutateAnswer:
        """Choose a mutation for a prompt and apply it. Mutations that would change nothing are
        not chosen."""
        return await rewrite(deps, body)

    @router.post("/feedback", responses=_ASKS_ANOTHER)
    async def reward_mutation(body: PolicyFeedbackBody) -> StoredAnswer:
        """Reward a mutation. It is on the disk when this answers."""
        next_state = (
            None if body.next_prompt is None else (await embed(deps, [body.next_prompt]))[0]
        )
        await done(deps.service.reward(body.id, body.value, body.episode_id, next_state))
        return StoredAnswer(buffer_size=deps.service.buffer_size)

    @router.post("/rollout", responses=_ASKS_ANOTHER | _SCORES)
    async def roll_out_prompt(body: RolloutBody, request: HTTPRequest) -> RolloutAnswer:
        """Rewrite a prompt, let a model answer it, score the answers, and keep the mean as the
        reward."""
        return await roll_out(deps, body, request)

    @router.post("/embed", responses=_ASKS_ANOTHER)
    async def embed_prompts(body: EmbedBody) -> EmbedAnswer:
        """Turn prompts into the numbers that the policy reads."""
        rows = await embed(deps, body.input)
        return EmbedAnswer(embeddings=rows.tolist(), dimensions=deps.embedder.dimensions)


def policy_router(deps: PolicyDeps, prefix: str = "") -> APIRouter:
    """A router with all routes but /health."""
    router = json_router(TAG)
    _add_acting(router, deps)
    _add_learning(router, deps)
    _add_rewriting(router, deps)
    outer = APIRouter()
    outer.include_router(router, prefix=prefix)
    return outer


def _vector(deps: PolicyDeps, numbers: Sequence[float], param: str) -> np.ndarray:
    size = deps.config.ppo.input_dim
    if len(numbers) != size:
        raise RequestError(
            f"{param!r} has {len(numbers)} numbers, and the policy reads {size}", param=param
        )
    return np.array(numbers, np.float32)


def _stats(service: PolicyService) -> StatsAnswer | MessageAnswer:
    history = service.history()
    if not history.experiences or history.max_reward is None:
        return MessageAnswer(message="No training data yet")

    def mean(name: str) -> float | None:
        values = [losses[name] for losses in history.losses]
        return math.fsum(values) / len(values) if values else None

    return StatsAnswer(
        total_updates=history.updates,
        total_episodes=history.episodes,
        total_experiences=history.experiences,
        buffer_size=service.buffer_size,
        avg_reward=math.fsum(history.rewards) / len(history.rewards),
        max_reward=history.max_reward,
        avg_policy_loss=mean("policy_loss"),
        avg_value_loss=mean("value_loss"),
        avg_entropy=mean("entropy"),
        avg_kl=mean("approx_kl"),
        mutations={
            name: sum(history.actions[n : n + 1]) for n, name in enumerate(service.mutations)
        },
    )

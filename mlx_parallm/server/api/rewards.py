"""POST /v1/rewards: rewards for earlier answers, by their ids. An ordinary client trains the model.

rollout_store/completions.py keeps the answers and makes the groups. Every server has the route: one
that trains nothing answers 409.
"""

import asyncio
from typing import Annotated, Any, Literal, Self

from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from mlx_parallm.config.number_fields import TRUTH_COUNTS
from mlx_parallm.engine.validation import MAX_CHOICES
from mlx_parallm.errors import RefusedError, RequestError
from mlx_parallm.server.context import Context
from mlx_parallm.server.errors import ERROR_CONTENT
from mlx_parallm.server.protocol.fields import Body, ListOf
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.types import MAX_REWARD


class RewardedGroup(TypedDict):
    id: str
    rollouts: int


class RewardsAnswer(TypedDict):
    object: Literal["rewards"]
    environment: str
    groups: list[RewardedGroup]


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": RewardsAnswer},
    404: {"description": "No such completion", "content": ERROR_CONTENT},
    409: {
        "description": "The completion already has a reward, still runs, was"
        " aborted, or is not the policy's",
        "content": ERROR_CONTENT,
    },
    410: {"description": "Too late: the completion is kept no longer", "content": ERROR_CONTENT},
}

router = json_router("training")
CompletionId = Annotated[str, Field(min_length=1, max_length=256)]
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD), TRUTH_COUNTS]


class RewardsBody(Body):
    """One of `id` and `ids`; a reward for each choice, in the order of the ids, then of the
    choices' indices."""

    id: CompletionId | None = None
    ids: ListOf[CompletionId] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    rewards: ListOf[Reward | None] = Field(min_length=1)
    environment: str = Field("rewards", pattern=r"^[\w.:-]{1,64}$")

    @model_validator(mode="after")
    def _one_kind_of_id(self) -> Self:
        if (self.id is None) == (self.ids is None):
            raise RequestError(
                "send either 'id' (one completion) or 'ids' (several of the same prompt)",
                param="id",
            )
        if len(set(self.all_ids)) < len(self.all_ids):
            raise RequestError("'ids' has an id twice", param="ids")
        return self

    @property
    def all_ids(self) -> list[str]:
        return [self.id] if self.id is not None else self.ids or []


@router.post("/v1/rewards", responses=_ANSWERS)
async def reward_completions(body: RewardsBody, context: Context) -> Response:
    """The scored groups are on the disk when this answers."""
    kept = context.deps.completions
    if kept is None:
        raise RefusedError(
            "this server trains nothing: rewards are for mlx_parallm train", 409, "id"
        )
    if not kept.enabled:
        raise RefusedError(
            "completions are not kept: server.kept_completions_bytes is 0", 409, "id"
        )
    try:
        groups = await asyncio.to_thread(kept.reward, body.all_ids, body.rewards, body.environment)
    except RefusedError as error:
        if error.status == 404 and context.running.find(body.all_ids):
            raise RefusedError(
                "a completion is still being generated: reward it when it ends", 409, "id"
            ) from error
        raise
    listed: list[RewardedGroup] = [
        {"id": group.group_id, "rollouts": len(group.rollouts)} for group in groups
    ]
    answer: RewardsAnswer = {"object": "rewards", "environment": body.environment, "groups": listed}
    return JSONResponse(answer)

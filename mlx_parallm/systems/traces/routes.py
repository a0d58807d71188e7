"""The routes of a server that records its own answers.

    POST /sessions/NAME/v1/chat/completions    as /v1/chat/completions, and recorded with tokens and
                                               log-probabilities
    POST /sessions/NAME/v1/responses           as /v1/responses, and recorded as the chat that it is
    POST /sessions/NAME/v1/messages            as /v1/messages, and recorded as the chat that it is
    GET  /sessions/NAME/v1/models              as /v1/models
    POST /sessions/NAME/feedback               a score, label or comment for a session or one of its
                                               answers

A client needs `base_url=http://host:8000/sessions/NAME/v1` and nothing else.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Annotated, Literal, NotRequired, Self

from fastapi import APIRouter, Depends
from fastapi import Path as PathParameter
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from mlx_parallm.errors import RequestError
from mlx_parallm.rollout_store.companions import unkept_of
from mlx_parallm.rollout_store.completions import Choice
from mlx_parallm.server.api import chat
from mlx_parallm.server.api.status import list_models
from mlx_parallm.server.app import AddedRouter
from mlx_parallm.server.context import Context
from mlx_parallm.server.messages import routes as messages
from mlx_parallm.server.protocol.fields import Body
from mlx_parallm.server.protocol.response_bodies import finite
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.responses import routes as responses
from mlx_parallm.systems.traces.received_answers import ObservedCall
from mlx_parallm.systems.traces.recorder import SessionRecorder, session_name
from mlx_parallm.systems.traces.schema import Json, Label, present
from mlx_parallm.systems.traces.session import TurnTokens
from mlx_parallm.types import MAX_REWARD, Completion, Request, weight_spans

SessionName = Annotated[str, PathParameter(min_length=1, max_length=128)]
Trained = Callable[[str, Label, str | None], Awaitable[Json]]
"""Makes a rollout of a scored session, and says what became of it: session, label, the client's
group."""


class FeedbackBody(Body):
    """One of `score`, `label` and `comment` at least. Without `response_id` the whole session is
    meant."""

    score: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)] | None = None
    label: str | None = Field(None, min_length=1, max_length=256)
    comment: str | None = Field(None, min_length=1, max_length=100_000)
    response_id: str | None = Field(None, min_length=1, max_length=256)
    name: str = Field("feedback", pattern=r"^[\w.:-]{1,64}$")
    by: str = Field("user", pattern=r"^[\w.:@-]{1,64}$")
    group: str | None = Field(None, min_length=1, max_length=256)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.score is None and self.label is None and self.comment is None:
            raise RequestError("send 'score', 'label' or 'comment'", param="score")
        return self

    def to_label(self) -> Label:
        same = self.model_dump(include={"name", "label", "by", "response_id"})
        others = {"value": self.score, "explanation": self.comment, "at": time.time()}
        return Label.model_validate(present(same | others))


class TrainingOutcome(TypedDict):
    """`sessions`: how many of `group_size` wait for their group, or the names of those that are
    queued in `group`."""

    state: Literal["waiting", "queued", "refused", "trained"]
    reason: NotRequired[str]
    sessions: NotRequired[int | list[str]]
    group_size: NotRequired[int]
    group: NotRequired[str]


class FeedbackAnswer(TypedDict):
    """`training`: only where a score was given to a server that trains."""

    object: Literal["feedback"]
    session: str
    label: Label
    training: NotRequired[TrainingOutcome]


def session_router(
    recorder: SessionRecorder,
    *,
    is_policy: Callable[[Request], bool] = lambda request: False,
    trained: Trained | None = None,
) -> AddedRouter:
    """The routes of one recorder.

    Args:
        is_policy: whether a request is answered by the policy that is being trained.
        trained: None = this server trains nothing.
    """
    router = json_router("openai")

    async def record(name: SessionName, request: HTTPRequest) -> None:
        request.state.observer = _CallObserver(recorder, session_name(name), is_policy)

    for recorded in (chat.router, responses.router, messages.router):
        router.include_router(recorded, prefix="/sessions/{name}", dependencies=[Depends(record)])

    @router.get("/sessions/{name}/v1/models")
    async def models_of_session(name: SessionName, context: Context) -> Response:
        return await list_models(context)

    add_feedback(router, recorder, trained)
    return AddedRouter(router)


def add_feedback(
    router: APIRouter, recorder: SessionRecorder, trained: Trained | None = None
) -> None:
    """Add the route for feedback. Its label is on the disk when it answers."""

    @router.post("/sessions/{name}/feedback", responses={200: {"model": FeedbackAnswer}})
    async def give_feedback(name: SessionName, body: FeedbackBody) -> Response:
        """Label a session or one of its answers."""
        label = recorder.feedback(session_name(name), body.to_label())
        result = {"object": "feedback", "session": name, "label": label.to_json()}
        if trained is not None and label.value is not None:
            result["training"] = await trained(name, label, body.group)
        return JSONResponse(result)


class _CallObserver(ObservedCall):
    """Records one call of a session."""

    def __init__(
        self, recorder: SessionRecorder, session: str, is_policy: Callable[[Request], bool]
    ) -> None:
        super().__init__(session)
        self._recorder, self._is_policy = recorder, is_policy
        self._tokens: dict[int, TurnTokens] = {}

    def sampled(self, requests: Sequence[Request], choices: Sequence[Sequence[Choice]]) -> None:
        [request], [parts] = requests, choices
        if unkept_of(request) is not None:  # nothing can be trained on
            return
        policy = self._is_policy(request)
        self._tokens = {part[0].index: _sampled(request, part, policy) for part in parts}

    async def ended(self) -> None:
        for index, choice in self.call.choices.items():
            choice.tokens = self._tokens.get(index)
        await self._recorder.commit(self.call)


def _sampled(request: Request, parts: Choice, policy: bool) -> TurnTokens:
    versions = tuple(chain.from_iterable(part.policy_versions for part in parts))
    columns: Json = {}
    if request.params.reshapes_distribution:
        columns["processed_logprobs"] = [
            finite(value) for part in parts for value in part.processed_logprobs or ()
        ]
    if request.params.is_constrained:
        columns["forced"] = list(chain.from_iterable(part.forced or () for part in parts))
    return TurnTokens(
        shared=0,
        prompt=list(request.prompt_token_ids),
        completion=list(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=[finite(value) for part in parts for value in part.logprobs],
        versions=[(span.version, span.start, span.end) for span in weight_spans(versions)],
        temperature=request.params.temperature or 1.0,
        policy=policy,
        prompt_version=next((p.prompt_version for p in parts if isinstance(p, Completion)), -1),
        **columns,
    )

"""The routes of learning from use.

POST /v1/feedback          a rating, an edit or a regenerate of an answer, by its id
GET  /v1/feedback/status   what became of answers and signals, by reason
GET  /v1/feedback/review   answers that wait for a person
POST /v1/feedback/review   approve or reject them
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, Self

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from mlx_parallm.errors import RefusedError, RequestError
from mlx_parallm.server.errors import ERROR_CONTENT
from mlx_parallm.server.protocol.fields import Body, ListOf
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.systems.feedback.consent import Agreement
from mlx_parallm.systems.feedback.follow_ups import LONGEST_WORDS, ConversationReader
from mlx_parallm.systems.feedback.observer import answer_id
from mlx_parallm.systems.feedback.signals import Kind, ReplySignal, edit_value
from mlx_parallm.systems.feedback.store import (
    FORGOTTEN,
    LISTED,
    AnswerState,
    FeedbackStore,
    KeptAnswer,
)

CHAT_PATHS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/",
    "/v1/messages",
    "/v1/messages/",
    "/v1/models",
    "/v1/models/",
    "/v1/feedback",
)
"""Paths that the keys of people who agree open."""


AnswerId = Annotated[str, Field(min_length=1, max_length=256)]


class ChatFeedbackBody(Body):
    """One of `rating`, `edit` and `kind`."""

    id: AnswerId
    choice: int = Field(0, ge=0, lt=1024)
    rating: Literal["up", "down"] | Annotated[float, Field(ge=-1, le=1)] | None = None
    edit: str | None = Field(None, max_length=100_000)
    kind: Literal["regenerate", "tool"] | None = None
    comment: str = Field("", max_length=LONGEST_WORDS)

    @model_validator(mode="after")
    def _one_signal(self) -> Self:
        if sum(each is not None for each in (self.rating, self.edit, self.kind)) != 1:
            raise RequestError("send one of 'rating', 'edit' and 'kind'", param="rating")
        return self

    def value(self, kept: KeptAnswer) -> tuple[Kind, float | None]:
        """An edit is compared as far as the answer is kept."""
        if self.rating is not None:
            words = {"up": 1.0, "down": -1.0}
            return "thumb", words[self.rating] if isinstance(self.rating, str) else self.rating
        if self.edit is not None:
            return "edit", edit_value(kept.answer, self.edit[:LONGEST_WORDS])
        return ("tool", 1.0) if self.kind == "tool" else ("regenerate", -1.0)


class ChatFeedbackAnswer(TypedDict):
    """`state`: of the answer; "released" to the trainer. `reason`: why it or the signal is not
    used."""

    object: Literal["feedback"]
    id: str
    state: AnswerState
    reason: NotRequired[str]


class FeedbackState(TypedDict):
    """`answers`: how many are in each state now. `outcomes`, `signals`: what became of answers, and
    of each kind of signal, since the run began. `forgotten`: answers that were decided on, beyond
    `max_answers`. `baselines`: mean reward by task."""

    object: Literal["feedback.state"]
    review: bool
    answers: dict[str, int]
    outcomes: dict[str, int]
    signals: dict[str, dict[str, int]]
    forgotten: int
    baselines: dict[str, float]


class ReviewedAnswer(TypedDict):
    id: str
    task: str
    at: float
    question: str
    answer: str
    reply: str
    kind: str | None
    reward: float | None


class ReviewQueue(TypedDict):
    object: Literal["feedback.review"]
    review: bool
    waiting: int
    answers: list[ReviewedAnswer]


class ReviewBody(Body):
    action: Literal["approve", "reject"]
    ids: ListOf[AnswerId] = Field(min_length=1, max_length=LISTED)


class ReviewDone(TypedDict):
    object: Literal["feedback.reviewed"]
    action: Literal["approve", "reject"]
    ids: list[str]


class FeedbackRoutes:
    """Args:
    review: whether answers wait for a person before they are learned.
    heard: called after each signal.
    more: further outcomes of answers, counted elsewhere.
    """

    def __init__(
        self,
        store: FeedbackStore,
        agreement: Agreement,
        reader: ConversationReader,
        *,
        review: bool,
        decay: float | None,
        heard: Callable[[], None],
        more: Callable[[], dict[str, int]],
    ) -> None:
        self._store, self._agreement, self._reader = store, agreement, reader
        self._review, self._decay, self._heard, self._more = review, decay, heard, more
        self.router = json_router("training")
        unknown: dict[int | str, dict[str, Any]] = {
            404: {"description": "No such answer", "content": ERROR_CONTENT}
        }
        self.router.post("/v1/feedback", responses={200: {"model": ChatFeedbackAnswer}, **unknown})(
            self.give
        )
        self.router.get("/v1/feedback/status", responses={200: {"model": FeedbackState}})(
            self.state
        )
        self.router.get("/v1/feedback/review", responses={200: {"model": ReviewQueue}})(self.queue)
        self.router.post("/v1/feedback/review", responses={200: {"model": ReviewDone}})(self.decide)

    async def give(self, body: ChatFeedbackBody, request: Request) -> Response:
        """Say something about an answer. It is on the disk when this answers."""
        identity = answer_id(body.id, body.choice)
        kept = await asyncio.to_thread(self._store.find, identity)
        owner = self._agreement.name_of(request)
        if kept is None or (owner is not None and not kept.user.startswith(f"{owner}/")):
            raise RefusedError(
                f"no answer {identity!r} is kept: only those to chats with consent are", 404, "id"
            )
        kind, value = await asyncio.to_thread(body.value, kept)
        reason = None
        if value is None:
            reason = "the edit changes white space alone"
            await asyncio.to_thread(self._store.count, "signal", kind, reason)
        else:
            words = self._reader.words(body.comment or body.edit or "")
            after = await asyncio.to_thread(
                self._store.signal, ReplySignal(identity, kind, value, words)
            )
            kept = after or kept
            self._heard()
        answer: ChatFeedbackAnswer = {"object": "feedback", "id": identity, "state": kept.state}
        if reason or kept.reason:
            answer["reason"] = reason or str(kept.reason)
        return JSONResponse(answer)

    async def state(self) -> Response:
        """Tell what became of answers and signals."""
        counts = await asyncio.to_thread(self._store.counts)
        signals: dict[str, dict[str, int]] = {}
        outcomes = self._more()
        for (what, kind, outcome), number in counts.items():
            if what == "answer":
                outcomes[outcome] = number
            elif what == "signal":
                signals.setdefault(kind, {})[outcome] = number
        answer: FeedbackState = {
            "object": "feedback.state",
            "review": self._review,
            "answers": await asyncio.to_thread(self._store.states),
            "outcomes": outcomes,
            "signals": signals,
            "forgotten": counts.get(FORGOTTEN, 0),
            "baselines": await asyncio.to_thread(self._store.baselines),
        }
        return JSONResponse(answer)

    async def queue(self, limit: Annotated[int, Field(ge=1, le=LISTED)] = LISTED) -> Response:
        """List answers that wait for a person, the oldest first."""
        waiting = await asyncio.to_thread(self._store.states)
        listed = await asyncio.to_thread(self._store.under_review, limit)
        answers: list[ReviewedAnswer] = [
            {
                "id": kept.id,
                "task": kept.task,
                "at": kept.at,
                "question": kept.question,
                "answer": kept.answer,
                "reply": kept.reply,
                "kind": kept.kind,
                "reward": kept.reward,
            }
            for kept in listed
        ]
        answer: ReviewQueue = {
            "object": "feedback.review",
            "review": self._review,
            "waiting": waiting.get("review", 0),
            "answers": answers,
        }
        return JSONResponse(answer)

    async def decide(self, body: ReviewBody) -> Response:
        """Approve or reject answers; those that do not wait are left out of the reply."""
        done = await asyncio.to_thread(
            self._store.review, body.ids, approve=body.action == "approve", decay=self._decay
        )
        self._heard()
        answer: ReviewDone = {"object": "feedback.reviewed", "action": body.action, "ids": done}
        return JSONResponse(answer)

"""/v1/score: scores of conversations by the reward model of `server.reward_model`.

vLLM's shapes: `text_1` and `text_2` in (here a prompt and an answer), a list of scores out. A
reward model also reads `messages`, a conversation or a list of them, and `input`, whole texts.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from mlx_parallm.engine.validation import MAX_CHOICES
from mlx_parallm.errors import ModelNotFoundError, RefusedError, RequestError
from mlx_parallm.execution.chat_messages import read_messages, read_tools
from mlx_parallm.server.context import Context, ConversationScorer
from mlx_parallm.server.errors import ERROR_CONTENT
from mlx_parallm.server.generation import check_text, new_id
from mlx_parallm.server.protocol.fields import Body, ListOf
from mlx_parallm.server.protocol.openai import MAX_MESSAGES, MAX_TOOLS, Message, ToolDefinition
from mlx_parallm.server.protocol.strict_json import json_router

Texts = str | ListOf[str]
Conversation = str | Sequence[Mapping[str, Any]]
SOURCES = ("messages", "input", "text_1")
PREFIX = "score"


class OneScore(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ScoreAnswer(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[OneScore]
    usage: ScoreUsage


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": ScoreAnswer},
    404: {"description": "The reward model has another name", "content": ERROR_CONTENT},
    409: {"description": "This server has no reward model", "content": ERROR_CONTENT},
}

router = json_router("scores")


class ScoreBody(Body):
    """One of `messages`, `input`, and `text_1` with `text_2`: 1 and 1, 1 and many, or as many."""

    model: str | None = None
    messages: ListOf[Message] | ListOf[ListOf[Message]] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES
    )
    tools: ListOf[ToolDefinition] = Field(default_factory=list, max_length=MAX_TOOLS)
    input: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        values = {"messages": self.messages, "input": self.input, "text_1": self.text_1}
        if sum(value is not None for value in values.values()) != 1:
            raise RequestError(
                "give one of 'messages', 'input', and 'text_1' with 'text_2'", param="messages"
            )
        if (self.text_1 is None) != (self.text_2 is None):
            raise RequestError("'text_1' and 'text_2' belong together", param="text_2")
        if self.tools and self.messages is None:
            raise RequestError("'tools' is for 'messages' only", param="tools")
        return self

    def conversations(self, prompt_format: str) -> list[Conversation]:
        """Return the texts to score, in the reward model's form."""
        if self.messages is not None:
            chats = self.messages
            lists = [chats] if isinstance(chats[0], Message) else chats
            return [_chat(chat, place) for place, chat in enumerate(lists)]
        if self.input is not None:
            return list(_texts(self.input, "input"))
        assert self.text_1 is not None and self.text_2 is not None, "it was checked"
        prompts, answers = _texts(self.text_1, "text_1"), _texts(self.text_2, "text_2")
        if len(prompts) == 1:
            prompts = prompts * len(answers)
        if len(prompts) != len(answers):
            raise RequestError(
                f"'text_1' has {len(prompts)} entries and 'text_2' {len(answers)}: expected 1 and"
                " 1, 1 and many, or as many",
                param="text_2",
            )
        pairs = zip(prompts, answers, strict=True)
        return [_pair(prompt, answer, prompt_format) for prompt, answer in pairs]


@router.post("/v1/score", responses=_ANSWERS)
@router.post("/score", responses=_ANSWERS)
async def score(body: ScoreBody, context: Context) -> Response:
    scorer = _scorer(context, body.model)
    conversations = body.conversations(scorer.prompt_format)
    if len(conversations) > MAX_CHOICES:
        raise RequestError(
            f"there are {len(conversations)} conversations, and at most {MAX_CHOICES} are taken"
        )
    tools = read_tools([tool._as_written for tool in body.tools])
    scores, tokens = await asyncio.wrap_future(scorer.score(conversations, tools))
    return JSONResponse(
        {
            "id": new_id(PREFIX),
            "object": "list",
            "created": int(time.time()),
            "model": scorer.name,
            "data": [
                {"index": index, "object": "score", "score": number}
                for index, number in enumerate(scores)
            ],
            "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        }
    )


def _scorer(context: Context, name: str | None) -> ConversationScorer:
    """The reward model. Raises RefusedError (409): the server has none. ModelNotFoundError
    (404)."""
    scorer = context.deps.scorer
    if scorer is None:
        raise RefusedError(
            "this server has no reward model: start it with --reward-model (server.reward_model)",
            status=409,
        )
    if name not in (None, "default", scorer.name):
        raise ModelNotFoundError(str(name), [scorer.name])
    return scorer


def _texts(value: Texts, param: str) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value)
    if not texts:
        raise RequestError(f"{param!r} must not be empty", param=param)
    for text in texts:
        check_text(text, param)
    return texts


def _chat(messages: Sequence[Message], place: int) -> Conversation:
    chat = read_messages(message.model_dump(exclude_unset=True) for message in messages)
    for number, message in enumerate(chat):
        check_text(message["content"], f"messages.{place}.{number}.content")
    return chat


def _pair(prompt: str, answer: str, prompt_format: str) -> Conversation:
    if prompt_format == "text":
        return prompt + answer
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

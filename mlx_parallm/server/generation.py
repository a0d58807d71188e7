"""From a route to the engine and back: prompts to token ids, admission, running requests, ending them on a hang-up.

Encoding happens here, at the edge, exactly once; token ids that a client sends are used as they are.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request as HTTPRequest

from mlx_parallm.errors import ParallmError, RequestError
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.openai_protocol import Conversation
from mlx_parallm.server.sse import merged, until_hangup
from mlx_parallm.types import CompletionDelta, Request, RequestOutput, SamplingParams, ServedModel


class GenerationFailedError(ParallmError):
    """The engine gave one request up with an error of its own (HTTP 500); other requests go on."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: tuple[int, ...]
    text: str | None = None  # None when the client sent ids


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def resolve_model(context: ServerContext, name: str | None) -> ServedModel:
    """The model of that name, or the default one. Raises ModelNotFoundError (404)."""
    return context.engine.resolve_model(name or "default")


def encode_prompts(context: ServerContext, prompt: Any) -> list[EncodedPrompt]:
    """The completions route's `prompt` (str, list of str, ids, list of ids). Raises RequestError."""
    if isinstance(prompt, str):
        entries: list[Any] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        entries = [prompt]
    else:
        entries = list(prompt)
    if not entries:
        raise RequestError("'prompt' must not be empty", param="prompt")
    return [encode_prompt(context, entry) for entry in entries]


def encode_prompt(
    context: ServerContext, prompt: str | Sequence[int], *, add_special_tokens: bool = True
) -> EncodedPrompt:
    """One prompt as text or ids (the engine checks their range). Raises RequestError: no token, not Unicode."""
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        encoded = EncodedPrompt(tuple(context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)), prompt)
    else:
        encoded = EncodedPrompt(tuple(prompt))
    if not encoded.token_ids:
        raise RequestError("'prompt' must not be empty", param="prompt")
    return encoded


def render_conversation(context: ServerContext, conversation: Conversation) -> tuple[int, ...]:
    """Token ids of a chat. Raises RequestError: no template, content that is not text, a template that refuses."""
    messages = conversation.template_messages()
    for position, message in enumerate(messages):
        check_text(message["content"], f"messages.{position}.content")
    options = conversation.render_options(context.deps.chat_template_kwargs)
    token_ids = tuple(context.tokenizer.render_chat(messages, **options))
    if not token_ids:
        raise RequestError("the chat template made an empty prompt of 'messages'", param="messages")
    return token_ids


def check_text(text: str, param: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes. Raises RequestError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param!r} is not valid Unicode: a lone surrogate", param=param) from error


def build_requests(
    response_id: str,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    model: ServedModel,
    *,
    stream: bool = False,
) -> list[Request]:
    """One engine request a prompt; n choices of a prompt are one request."""
    return [
        Request(f"{response_id}-{position}", prompt.token_ids, params, model.adapter, stream)
        for position, prompt in enumerate(prompts)
    ]


async def run(context: ServerContext, http_request: HTTPRequest, requests: Sequence[Request]) -> list[RequestOutput]:
    """All requests to their end, submitted together. The client's hang-up aborts them.

    Raises RequestError, EngineUnavailableError, ClientDisconnectedError, GenerationFailedError.
    """
    with context.admitted():
        outputs = await until_hangup(http_request.receive, context.engine.generate_many(list(requests)))
    for output in outputs:
        for completion in output.completions:
            if completion.finish_reason == "error":
                raise GenerationFailedError(completion.error or "the generation failed")
    return outputs


async def stream(
    context: ServerContext, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Deltas of all requests as they come, with the request's position. Closing it aborts what still runs."""
    with context.admitted():
        submitted: float | None = time.perf_counter()
        streams = [context.engine.stream(request) for request in requests]
        deltas = merged(cast("list[AsyncGenerator[CompletionDelta, None]]", streams))
        async with aclosing(deltas):
            async for position, delta in deltas:
                if submitted is not None:
                    context.metrics.observe_first_token(time.perf_counter() - submitted)
                    submitted = None
                if delta.finish_reason == "error":
                    raise GenerationFailedError(delta.error or "the generation failed")
                yield position, delta

"""/v1/chat/completions: messages in, streamed or not; ids and log-probabilities of exactly what was sampled."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.generation import (
    EncodedPrompt,
    build_requests,
    new_id,
    render_conversation,
    resolve_model,
    run,
    stream,
)
from mlx_parallm.server.openai_protocol import ChatBody
from mlx_parallm.server.openai_responses import (
    chat_logprobs,
    last_version,
    prompt_logprob_entries,
    usage,
    usage_of,
    version_spans,
)
from mlx_parallm.server.sse import EventStream
from mlx_parallm.server.strict_json import StrictJSONRoute
from mlx_parallm.types import Completion, CompletionDelta, RequestOutput, ServedModel
from mlx_parallm.types import Request as EngineRequest


def chat_router() -> APIRouter:
    router = APIRouter(route_class=StrictJSONRoute, tags=["openai"])
    router.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"], response_class=JSONResponse)
    return router


async def create_chat_completion(body: ChatBody, request: Request, context: Context) -> Response:
    model = resolve_model(context, body.model)
    prompt = EncodedPrompt(render_conversation(context, body))
    response_id = new_id("chatcmpl")
    requests = build_requests(response_id, [prompt], body.to_params(), model, stream=body.stream)
    if body.stream:
        chunks = ChatChunks(context, body, model, response_id, prompt.token_ids)
        return await EventStream(chunks.events(requests)).prefetch(request.receive)
    [output] = await run(context, request, requests)
    return JSONResponse(_response(context, body, model, response_id, output))


def _response(
    context: ServerContext, body: ChatBody, model: ServedModel, response_id: str, output: RequestOutput
) -> dict[str, Any]:
    response: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model.id,
        "choices": [_choice(context, body, completion) for completion in output.completions],
        "usage": usage_of([output]),
        "policy_version": last_version([output], model.policy_version),
    }
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprob_entries(
            context.texts, output.prompt_token_ids, output.prompt_logprobs
        )
    if body.return_token_ids:
        response["prompt_token_ids"] = output.prompt_token_ids
    return response


def _choice(context: ServerContext, body: ChatBody, completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": completion.index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": _logprobs(context, body, completion) if body.logprobs else None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_versions": version_spans(completion.policy_versions),
    }
    if body.logprobs and completion.processed_logprobs is not None:
        choice["processed_logprobs"] = completion.processed_logprobs
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _logprobs(context: ServerContext, body: ChatBody, part: Completion | CompletionDelta) -> dict[str, Any]:
    # The engine gives the alternatives that were asked for; with top_logprobs = 0 none are shown.
    tops = part.top_logprobs if body.top_logprobs else None
    return chat_logprobs(context.texts, part.token_ids, part.logprobs, tops, body.return_tokens_as_token_ids)


class ChatChunks:
    """Turns a streamed request's deltas into chunks: a role first, then content, the reason and versions last."""

    def __init__(
        self,
        context: ServerContext,
        body: ChatBody,
        model: ServedModel,
        response_id: str,
        prompt_token_ids: tuple[int, ...],
    ) -> None:
        self._context = context
        self._body = body
        self._model = model
        self._prompt_token_ids = prompt_token_ids
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model.id,
        }
        self._versions: dict[int, list[int]] = {}  # by choice

    async def events(self, requests: list[EngineRequest]) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks, then the usage chunk when asked for. Closing it aborts the request."""
        tail = {"usage": None} if self._body.include_usage else {}
        generated = 0
        async with aclosing(stream(self._context, requests)) as deltas:
            async for _, delta in deltas:
                generated += len(delta.token_ids)
                if delta.index not in self._versions:
                    yield {**self._head, **self._role_chunk(delta.index), **tail}
                yield {**self._head, **self._chunk(delta), **tail}
        if self._body.include_usage:
            counts = usage(len(self._prompt_token_ids), generated)
            yield {**self._head, "choices": [], "usage": counts}

    def _role_chunk(self, index: int) -> dict[str, Any]:
        first = not self._versions
        self._versions[index] = []
        chunk: dict[str, Any] = {
            "choices": [
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ]
        }
        if first and self._body.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_token_ids
        return chunk

    def _chunk(self, delta: CompletionDelta) -> dict[str, Any]:
        versions = self._versions[delta.index]
        versions.extend(delta.policy_versions)
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": _logprobs(self._context, self._body, delta) if self._body.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        chunk: dict[str, Any] = {"choices": [choice]}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
            choice["weight_versions"] = version_spans(tuple(versions))
            chunk["policy_version"] = versions[-1] if versions else self._model.policy_version
        return chunk

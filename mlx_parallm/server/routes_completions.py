"""/v1/completions: text or token ids in, one or many prompts, streamed or not, and prompt scoring (echo)."""

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
    encode_prompts,
    new_id,
    resolve_model,
    run,
    stream,
)
from mlx_parallm.server.openai_protocol import CompletionBody
from mlx_parallm.server.openai_responses import (
    CompletionLogprobs,
    finite,
    joined,
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


def completions_router() -> APIRouter:
    router = APIRouter(route_class=StrictJSONRoute, tags=["openai"])
    router.add_api_route("/v1/completions", create_completion, methods=["POST"], response_class=JSONResponse)
    return router


async def create_completion(body: CompletionBody, request: Request, context: Context) -> Response:
    model = resolve_model(context, body.model)
    prompts = [prompt.last(body.truncate_prompt_tokens) for prompt in encode_prompts(context, body.prompt)]
    response_id = new_id("cmpl")
    requests = build_requests(response_id, prompts, body.to_params(), model, body, stream=body.stream)
    if body.stream:
        chunks = CompletionChunks(context, body, model, response_id, prompts)
        return await EventStream(chunks.events(requests)).prefetch(request.receive)
    outputs = await run(context, request, requests)
    return JSONResponse(_response(context, body, model, response_id, prompts, outputs))


def _response(
    context: ServerContext,
    body: CompletionBody,
    model: ServedModel,
    response_id: str,
    prompts: list[EncodedPrompt],
    outputs: list[RequestOutput],
) -> dict[str, Any]:
    choices = [
        _choice(context, body, prompt, output, completion, position * body.n + completion.index)
        for position, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        for completion in output.completions
    ]
    return {
        "id": response_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.id,
        "choices": choices,
        "usage": usage_of(outputs),
        "policy_version": last_version(outputs, model.policy_version),
    }


def _choice(
    context: ServerContext,
    body: CompletionBody,
    prompt: EncodedPrompt,
    output: RequestOutput,
    completion: Completion,
    index: int,
) -> dict[str, Any]:
    text = (_prompt_text(context, prompt) if body.echo else "") + completion.text
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": _logprobs(context, body, output, completion) if body.logprobs is not None else None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_versions": version_spans(completion.policy_versions),
    }
    if body.logprobs is not None and completion.processed_logprobs is not None:
        choice["processed_logprobs"] = [finite(logprob) for logprob in completion.processed_logprobs]
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprob_entries(
            context.texts, output.prompt_token_ids, output.prompt_logprobs
        )
    if body.return_token_ids:
        choice["prompt_token_ids"] = output.prompt_token_ids
        choice["token_ids"] = completion.token_ids
    return choice


def _logprobs(
    context: ServerContext, body: CompletionBody, output: RequestOutput, completion: Completion
) -> dict[str, list[Any]]:
    """Of the completion; with `echo` of the prompt before it."""
    lists = CompletionLogprobs(context.texts, body.return_tokens_as_token_ids)
    prompt_part = lists.take((), (), None)
    if body.echo and output.prompt_logprobs is not None:
        scores = output.prompt_logprobs
        prompt_part = lists.take(output.prompt_token_ids, scores.logprobs, scores.top_logprobs)
    return joined(prompt_part, lists.take(completion.token_ids, completion.logprobs, completion.top_logprobs))


def _prompt_text(context: ServerContext, prompt: EncodedPrompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return context.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


class CompletionChunks:
    """Turns a streamed request's deltas into the route's chunks; one `_ChoiceStream` a choice."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionBody,
        model: ServedModel,
        response_id: str,
        prompts: list[EncodedPrompt],
    ) -> None:
        self._context = context
        self._body = body
        self._model = model
        self._prompts = prompts
        self._head = {
            "id": response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.id,
        }
        self._choices: dict[int, _ChoiceStream] = {}

    async def events(self, requests: list[EngineRequest]) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks, then the usage chunk when asked for. Closing it aborts the requests."""
        tail = {"usage": None} if self._body.include_usage else {}
        generated = cached = 0
        async with aclosing(stream(self._context, requests)) as deltas:
            async for position, delta in deltas:
                generated += len(delta.token_ids)
                cached += delta.cached_tokens
                yield {**self._head, **self._chunk(position, delta), **tail}
        if self._body.include_usage:
            prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
            yield {**self._head, "choices": [], "usage": usage(prompt_tokens, generated, cached)}

    def _chunk(self, position: int, delta: CompletionDelta) -> dict[str, Any]:
        index = position * self._body.n + delta.index
        state = self._choices.get(index)
        chunk: dict[str, Any] = {}
        choice: dict[str, Any] = {"index": index, "text": delta.text}
        if state is None:
            state = self._choices[index] = _ChoiceStream(
                CompletionLogprobs(self._context.texts, self._body.return_tokens_as_token_ids)
            )
            if self._body.echo:
                choice["text"] = _prompt_text(self._context, self._prompts[position]) + delta.text
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self._prompts[position].token_ids
        state.versions += delta.policy_versions
        choice["logprobs"] = None
        if self._body.logprobs is not None:
            choice["logprobs"] = state.logprobs.take(delta.token_ids, delta.logprobs, delta.top_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
            choice["weight_versions"] = version_spans(tuple(state.versions))
            chunk["policy_version"] = state.versions[-1] if state.versions else self._model.policy_version
        return {"choices": [choice], **chunk}


class _ChoiceStream:
    """What one choice's chunks need from the earlier ones."""

    def __init__(self, logprobs: CompletionLogprobs) -> None:
        self.logprobs = logprobs
        self.versions: list[int] = []

"""/v1/chat/completions: messages in, streamed or not; ids and log-probabilities of exactly what was sampled."""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlx_parallm.errors import RequestError
from mlx_parallm.server.answer_parts import AnswerFormat, AnswerSplitter
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
from mlx_parallm.server.openai_protocol import ChatBody, ChatTokensBody
from mlx_parallm.server.openai_responses import (
    chat_logprobs,
    finite,
    last_version,
    prompt_logprob_entries,
    usage,
    usage_of,
    version_spans,
)
from mlx_parallm.server.sse import EventStream
from mlx_parallm.server.strict_json import StrictJSONRoute
from mlx_parallm.types import Completion, CompletionDelta, FinishReason, RequestOutput, SamplingParams, ServedModel
from mlx_parallm.types import Request as EngineRequest

_TAIL_TOKENS = 16  # enough for the markers with which a template opens an answer


def chat_router() -> APIRouter:
    router = APIRouter(route_class=StrictJSONRoute, tags=["openai"])
    router.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"], response_class=JSONResponse)
    router.add_api_route("/v1/chat/completions/tokens", continue_tokens, methods=["POST"], response_class=JSONResponse)
    return router


async def create_chat_completion(body: ChatBody, request: Request, context: Context) -> Response:
    model = resolve_model(context, body.model)
    prompt = EncodedPrompt(body.given_tokens or render_conversation(context, body)).last(body.truncate_prompt_tokens)
    response_id = new_id("chatcmpl")
    params = body.to_params()
    form = answer_format(context, body, params, prompt.token_ids)
    params = replace(params, skip_special_tokens=params.skip_special_tokens and not form.needs_special_tokens)
    requests = build_requests(response_id, [prompt], params, model, body, stream=body.stream)
    if body.stream:
        chunks = ChatChunks(context, body, form, model, response_id, prompt.token_ids)
        return await EventStream(chunks.events(requests)).prefetch(request.receive)
    [output] = await run(context, request, requests)
    return JSONResponse(_response(context, body, form, model, response_id, output))


async def continue_tokens(body: ChatTokensBody, request: Request, context: Context) -> Response:
    """A chat whose prompt is `tokens`, as they are; multi-turn RL clients keep what was sampled that way."""
    return await create_chat_completion(body, request, context)


def answer_format(
    context: ServerContext, body: ChatBody, params: SamplingParams, prompt_token_ids: Sequence[int]
) -> AnswerFormat:
    """How to read the answers to this prompt. Raises RequestError: tools, and no parser of this model's tool calls."""
    tokenizer, tools = context.tokenizer, body.callable_tools
    if body.must_call:
        return AnswerFormat(parse=_json_calls, forced=True, parallel=body.parallel_tool_calls)
    if params.structure is not None:
        return AnswerFormat()  # the whole answer is what was asked for
    if tools and tokenizer.tool_markers is None:
        raise RequestError(
            "this server cannot read this model's tool calls: set model.tool_parser to their format, "
            'or send tool_choice = "none"',
            param="tools",
        )
    think = tokenizer.think_markers if body.separate_reasoning else None
    opened = False
    if think is not None:
        # What a user's message says of thinking must not count: only the prompt's end does, or the text gone on with.
        tail = tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        if body.continues_final_message:
            tail = str(body.template_messages()[-1]["content"])
            opened = tail.rfind(think[0]) > tail.rfind(think[1])
        else:
            opened = tail.rstrip().endswith(think[0])
    return AnswerFormat(
        think_markers=think,
        tool_markers=tokenizer.tool_markers if tools else None,
        structural_markers=tokenizer.structural_markers if think else (),
        parse=tokenizer.parse_tool_call,
        tools=tools,
        parallel=body.parallel_tool_calls,
        starts_reasoning=opened,
        # Inside tool markers any special token may stand.
        needs_special_tokens=bool(tools) or (think is not None and any(map(tokenizer.hides, think))),
        on_malformed=context.metrics.malformed_tool_calls.inc,
    )


def _json_calls(text: str, tools: Any) -> Any:
    return json.loads(text)


def openai_reason(reason: FinishReason | None, called: bool) -> str | None:
    """An answer that its model ended with tool calls in it ends with them."""
    return "tool_calls" if called and reason == "stop" else reason


def _response(
    context: ServerContext,
    body: ChatBody,
    form: AnswerFormat,
    model: ServedModel,
    response_id: str,
    output: RequestOutput,
) -> dict[str, Any]:
    response: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model.id,
        "choices": [_choice(context, body, form, completion) for completion in output.completions],
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


def _choice(context: ServerContext, body: ChatBody, form: AnswerFormat, completion: Completion) -> dict[str, Any]:
    parts = form.read(completion.text, completion.finish_reason)
    choice: dict[str, Any] = {
        "index": completion.index,
        "message": parts.message(),
        "logprobs": _logprobs(context, body, completion) if body.logprobs else None,
        "finish_reason": openai_reason(completion.finish_reason, bool(parts.tool_calls)),
        "stop_reason": completion.stop_reason,
        "weight_versions": version_spans(completion.policy_versions),
    }
    if body.logprobs and completion.processed_logprobs is not None:
        choice["processed_logprobs"] = [finite(logprob) for logprob in completion.processed_logprobs]
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
        form: AnswerFormat,
        model: ServedModel,
        response_id: str,
        prompt_token_ids: tuple[int, ...],
    ) -> None:
        self._context = context
        self._body = body
        self._form = form
        self._model = model
        self._prompt_token_ids = prompt_token_ids
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model.id,
        }
        self._versions: dict[int, list[int]] = {}  # by choice
        self._splitters: dict[int, AnswerSplitter] = {}

    async def events(self, requests: list[EngineRequest]) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks, then the usage chunk when asked for. Closing it aborts the request."""
        tail = {"usage": None} if self._body.include_usage else {}
        generated = cached = 0
        async with aclosing(stream(self._context, requests)) as deltas:
            async for _, delta in deltas:
                generated += len(delta.token_ids)
                cached += delta.cached_tokens
                if delta.index not in self._versions:
                    yield {**self._head, **self._role_chunk(delta.index), **tail}
                yield {**self._head, **self._chunk(delta), **tail}
        if self._body.include_usage:
            counts = usage(len(self._prompt_token_ids), generated, cached)
            yield {**self._head, "choices": [], "usage": counts}

    def _role_chunk(self, index: int) -> dict[str, Any]:
        first = not self._versions
        self._versions[index] = []
        self._splitters[index] = AnswerSplitter(self._form)
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
        splitter = self._splitters[delta.index]
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": splitter.delta(delta.text, delta.finish_reason),
            "logprobs": _logprobs(self._context, self._body, delta) if self._body.logprobs else None,
            "finish_reason": openai_reason(delta.finish_reason, splitter.calls_made > 0),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        chunk: dict[str, Any] = {"choices": [choice]}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
            choice["weight_versions"] = version_spans(tuple(versions))
            chunk["policy_version"] = versions[-1] if versions else self._model.policy_version
        return chunk

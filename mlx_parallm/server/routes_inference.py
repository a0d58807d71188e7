"""/inference/v1/generate: token ids in, token ids and log-probabilities out, in vLLM's shape.

RL clients (verifiers' TrainClient) check it strictly: `logprobs.content` has one entry a token id, its `token` is
"token_id:<id>". Unknown fields are ignored, as vLLM's are; a sampling field that is known and missing here is not.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field, model_validator

from mlx_parallm.errors import RequestError
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.fields import Body, LogprobCount, QueueFields, SamplingFields, StreamOptions, TokenId
from mlx_parallm.server.generation import EncodedPrompt, build_requests, new_id, resolve_model, run, stream
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
from mlx_parallm.server.structure_fields import StructureFields
from mlx_parallm.types import Completion, CompletionDelta, RequestOutput, SamplingParams, ServedModel
from mlx_parallm.types import Request as EngineRequest


class InferenceSampling(StructureFields, SamplingFields):
    """vLLM's SamplingParams. Without `max_tokens` an answer may be as long as a chat's."""

    model_config = ConfigDict(extra="ignore")
    max_tokens: int | None = Field(None, ge=1)
    logprobs: LogprobCount | None = None
    spaces_between_special_tokens: bool = True  # in a text that is not sent

    def to_params(self) -> SamplingParams:
        return self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs)


class InferenceBody(QueueFields, Body):
    model_config = ConfigDict(extra="ignore")
    screened: ClassVar[bool] = False
    model: str | None = None
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: InferenceSampling = Field(default_factory=InferenceSampling)
    request_id: str | None = Field(None, min_length=1, max_length=256)
    stream: bool = False
    stream_options: StreamOptions | None = None
    features: Any = None
    content_parts: Any = None

    @model_validator(mode="after")
    def _text_only(self) -> Self:
        for name in ("features", "content_parts"):
            if getattr(self, name):
                raise RequestError(f"{name!r} carries images or sound; this server takes only token ids", param=name)
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            param = "sampling_params.prompt_logprobs"
            raise RequestError(f"{param!r} is not available when stream = true", param=param)
        return self


def inference_router() -> APIRouter:
    router = APIRouter(route_class=StrictJSONRoute, tags=["tokens"])
    router.add_api_route("/inference/v1/generate", generate_tokens, methods=["POST"], response_class=JSONResponse)
    return router


async def generate_tokens(body: InferenceBody, request: Request, context: Context) -> Response:
    model = resolve_model(context, body.model)
    response_id = new_id("generate-tokens")
    answer = _Answer(context, body, model, body.request_id or response_id)
    prompts = [EncodedPrompt(tuple(body.token_ids))]
    params = body.sampling_params.to_params()
    requests = build_requests(response_id, prompts, params, model, body, stream=body.stream)
    if body.stream:
        return await EventStream(answer.chunks(requests)).prefetch(request.receive)
    [output] = await run(context, request, requests, client_id=body.request_id)
    return JSONResponse(answer.whole(output))


class _Answer:
    def __init__(self, context: ServerContext, body: InferenceBody, model: ServedModel, request_id: str) -> None:
        self._context = context
        self._body = body
        self._model = model
        self._head = {"request_id": request_id, "model": model.id}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        scores = None
        if output.prompt_logprobs is not None:
            scores = prompt_logprob_entries(self._context.texts, output.prompt_token_ids, output.prompt_logprobs)
        choices = [
            self._choice(completion) | {"weight_versions": version_spans(completion.policy_versions)}
            for completion in output.completions
        ]
        return {
            **self._head,
            "choices": choices,
            "prompt_logprobs": scores,
            "usage": usage_of([output]),
            "policy_version": last_version([output], self._model.policy_version),
        }

    async def chunks(self, requests: list[EngineRequest]) -> AsyncGenerator[dict[str, Any], None]:
        """A chunk a delta; the spans of weight versions come with a choice's last, the usage after all when asked."""
        versions: dict[int, list[int]] = {}
        generated = cached = 0
        async with aclosing(stream(self._context, requests, client_id=self._body.request_id)) as deltas:
            async for _, delta in deltas:
                generated += len(delta.token_ids)
                cached += delta.cached_tokens
                seen = versions.setdefault(delta.index, [])
                seen += delta.policy_versions
                choice = self._choice(delta)
                if delta.finish_reason is not None:
                    choice["weight_versions"] = version_spans(tuple(seen))
                yield {**self._head, "choices": [choice]}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": usage(len(self._body.token_ids), generated, cached)}

    def _choice(self, part: Completion | CompletionDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": part.index,
            "token_ids": part.token_ids,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._body.sampling_params.logprobs is not None:
            tops = part.top_logprobs if self._body.sampling_params.logprobs else None
            choice["logprobs"] = chat_logprobs(self._context.texts, part.token_ids, part.logprobs, tops, as_ids=True)
            if part.processed_logprobs is not None:
                choice["processed_logprobs"] = [finite(logprob) for logprob in part.processed_logprobs]
        return choice

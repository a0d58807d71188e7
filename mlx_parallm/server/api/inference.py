"""/inference/v1/generate: token ids in, token ids and log-probabilities out, in vLLM's shape.

RL clients (verifiers' TrainClient) check it strictly: `logprobs.content` has one entry a token id,
its `token` is "token_id:<id>". Unknown fields are ignored, as in vLLM; a known sampling field that
this server lacks is refused.
"""

from typing import Any, ClassVar, Self

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, model_validator

from mlx_parallm.errors import RequestError
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.generation import (
    EncodedPrompt,
    ResponseBuilder,
    build_requests,
    new_id,
    resolve_model,
    respond,
)
from mlx_parallm.server.protocol.companions import AskedFields
from mlx_parallm.server.protocol.fields import (
    Body,
    ListOf,
    LogprobCount,
    QueueFields,
    SamplingFields,
    StreamOptions,
    StructureFields,
    TokenId,
)
from mlx_parallm.server.protocol.response_bodies import (
    TokenReader,
    chat_logprobs,
    processed_logprobs,
    prompt_logprob_entries,
    version_spans,
)
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.schema_check import answer_check
from mlx_parallm.types import (
    Completion,
    CompletionDelta,
    RequestOutput,
    SamplingParams,
    ServedModel,
)

router = json_router("tokens")


class InferenceSampling(StructureFields, SamplingFields):
    """vLLM's SamplingParams. Without `max_tokens` an answer may be as long as a chat's."""

    model_config = ConfigDict(extra="ignore")
    max_tokens: int | None = Field(None, ge=1)
    logprobs: LogprobCount | None = None
    spaces_between_special_tokens: bool = True  # in a text that is not sent

    def to_params(self) -> SamplingParams:
        return self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs)


class InferenceBody(AskedFields, QueueFields, Body):
    model_config = ConfigDict(extra="ignore")
    screened: ClassVar[bool] = False
    model: str | None = None
    token_ids: ListOf[TokenId] = Field(min_length=1)
    sampling_params: InferenceSampling = Field(default_factory=InferenceSampling)
    request_id: str | None = Field(None, min_length=1, max_length=256)
    stream: bool = False
    stream_options: StreamOptions | None = None
    features: Any = None
    content_parts: Any = None

    @model_validator(mode="after")
    def _text_only(self) -> Self:
        for name, value in {"features": self.features, "content_parts": self.content_parts}.items():
            if value:
                raise RequestError(
                    f"{name!r} carries images or sound; this server takes only token ids",
                    param=name,
                )
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            param = "sampling_params.prompt_logprobs"
            raise RequestError(f"{param!r} is not available when stream = true", param=param)
        if self.stream:
            self.check_streamed()
        return self


@router.post("/inference/v1/generate")
async def generate_tokens(body: InferenceBody, request: Request, context: Context) -> Response:
    model = resolve_model(context, body.model)
    response_id = new_id("generate-tokens")
    answer = _TokensResponse(context, model, body.request_id or response_id, body)
    prompts = [EncodedPrompt(tuple(body.token_ids))]
    params = body.sampling_params.to_params()
    requests = build_requests(
        response_id, prompts, params, model, body, request, stream=body.stream
    )
    check = await answer_check(context, params, content=params.structure)
    return await respond(
        answer,
        request,
        requests,
        streamed=body.stream,
        stream_options=body.stream_options,
        client_id=body.request_id,
        check=check,
    )


class _TokensResponse(ResponseBuilder):
    def __init__(
        self, context: ServerContext, model: ServedModel, request_id: str, body: InferenceBody
    ) -> None:
        super().__init__(context, model, {"request_id": request_id, "model": model.id})
        self._logprobs = body.sampling_params.logprobs
        self._body = body
        self._readers: dict[int, TokenReader] = {}  # by choice

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        scores = None
        if output.prompt_logprobs is not None:
            scores = prompt_logprob_entries(
                self._reader(), output.prompt_token_ids, output.prompt_logprobs
            )
        choices = [
            self._choice(completion)
            | {"weight_versions": version_spans(completion.policy_versions)}
            | self._body.given_back(
                completion, len(output.prompt_token_ids), server=self.context.deps.config
            )
            for completion in output.completions
        ]
        return {"choices": choices, "prompt_logprobs": scores}

    def chunks(self, index: int, delta: CompletionDelta) -> list[dict[str, Any]]:
        return [{"choices": [self._choice(delta)]}]

    def _reader(self, *, opens_text: bool = True) -> TokenReader:
        return self.context.tokenizer.detokenizer(opens_text=opens_text, skip_special_tokens=False)

    def _choice(self, part: Completion | CompletionDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": part.index,
            "token_ids": part.token_ids,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._logprobs is not None:
            tops = part.top_logprobs if self._logprobs else None
            reader = self._readers.setdefault(part.index, self._reader(opens_text=False))
            choice["logprobs"] = chat_logprobs(
                reader, part.token_ids, part.logprobs, tops, as_ids=True
            )
            choice |= processed_logprobs(part)
        return choice

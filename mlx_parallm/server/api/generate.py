"""Root /generate: token ids in, token ids and log-probabilities out, in the shapes of two families
of RL clients.

vLLM's (Atropos' default): `prompt: {"prompt_token_ids": […]}`, parallel lists out. SGLang's:
`input_ids` or `text` with `sampling_params`, one object with `meta_info` a completion out. Both
ignore unknown keys.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field, ValidationError

from mlx_parallm.engine.validation import MAX_CHOICES
from mlx_parallm.errors import EngineUnavailableError, RequestError
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.errors import request_error
from mlx_parallm.server.generation import (
    UNNAMED,
    EncodedPrompt,
    build_requests,
    check_count,
    encode_prompt,
    new_id,
    resolve_model,
    run,
    schema_error,
)
from mlx_parallm.server.protocol.companions import AskedFields, AskedFlatFields
from mlx_parallm.server.protocol.fields import (
    Body,
    ListOf,
    LogprobCount,
    QueueFields,
    SamplingFields,
    StructureFields,
    TokenId,
)
from mlx_parallm.server.protocol.response_bodies import (
    TokenReader,
    finite,
    last_version,
    version_spans,
)
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.schema_check import answer_check
from mlx_parallm.types import (
    Completion,
    PromptLogprobs,
    RequestOutput,
    SamplingParams,
    Structure,
    TopLogprob,
)
from mlx_parallm.types import Request as EngineRequest

if TYPE_CHECKING:
    from mlx_parallm.models.tokenizer import Tokenizer

router = json_router("tokens")
VLLM_MAX_TOKENS = 16
SGLANG_MAX_NEW_TOKENS = 128


class GenerationAbortedError(EngineUnavailableError):
    """Stopped from outside (HTTP 503: ask again); clients of /generate know only "stop" and
    "length"."""


class VllmPrompt(Body):
    model_config = ConfigDict(extra="ignore")
    screened: ClassVar[bool] = False
    prompt_token_ids: ListOf[TokenId] | None = None
    prompt: str | None = None


class VllmBody(AskedFields, QueueFields, StructureFields, SamplingFields):
    model_config = ConfigDict(extra="ignore")
    screened: ClassVar[bool] = False
    prompt: VllmPrompt | str | ListOf[TokenId]
    stop: str | ListOf[str] | ListOf[TokenId] = Field(default_factory=list)  # type: ignore[assignment]
    max_tokens: int = Field(VLLM_MAX_TOKENS, ge=1)
    logprobs: LogprobCount | None = None

    def prompt_value(self) -> str | list[int]:
        if not isinstance(self.prompt, VllmPrompt):
            return self.prompt
        value = (
            self.prompt.prompt_token_ids
            if self.prompt.prompt_token_ids is not None
            else self.prompt.prompt
        )
        if value is None:
            raise RequestError("'prompt' needs 'prompt_token_ids' or 'prompt'", param="prompt")
        return value

    def to_params(self) -> SamplingParams:
        return self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs)


class SglangSampling(SamplingFields):
    model_config = ConfigDict(extra="ignore")
    screened: ClassVar[bool] = False
    max_new_tokens: int = Field(SGLANG_MAX_NEW_TOKENS, ge=1)
    min_new_tokens: int = Field(0, ge=0)
    sampling_seed: int | None = None
    no_stop_trim: bool = False
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    stop: str | ListOf[str] | ListOf[TokenId] = Field(default_factory=list)  # type: ignore[assignment]

    def structure(self) -> Structure | None:
        """Return the structure that the text must match. Raises RequestError: the request has
        more than one, or SGLang's structural tags."""
        if self.structural_tag is not None:
            param = "sampling_params.structural_tag"
            raise RequestError(
                f"{param!r} is not supported by this server",
                param=param,
                code="unsupported_parameter",
            )
        schema = self.json_schema
        source = json.dumps(schema) if isinstance(schema, dict) else schema
        by_field = [
            None
            if source is None
            else Structure("json_schema", source, "sampling_params.json_schema"),
            None if self.regex is None else Structure("regex", self.regex, "sampling_params.regex"),
            None if self.ebnf is None else Structure("grammar", self.ebnf, "sampling_params.ebnf"),
        ]
        structures = [structure for structure in by_field if structure is not None]
        if len(structures) > 1:
            names = ", ".join(structure.param for structure in structures)
            raise RequestError(
                f"one answer cannot follow several structures: {names}", param=structures[0].param
            )
        return structures[0] if structures else None

    def to_params(self, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        neutral_names = self.model_copy(
            update={
                "min_tokens": self.min_new_tokens,
                "seed": self.sampling_seed if self.sampling_seed is not None else self.seed,
                "include_stop_str_in_output": self.no_stop_trim,
            }
        )
        return neutral_names.sampling_params(
            max_tokens=self.max_new_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )


SamplingOfEach = Annotated[ListOf[SglangSampling], Field(max_length=MAX_CHOICES)]


class SglangBody(AskedFlatFields, QueueFields, Body):
    model_config = ConfigDict(extra="ignore")
    screened: ClassVar[bool] = False
    model: str | None = None
    lora_path: str | None = None  # an adapter's name
    text: str | ListOf[str] | None = None
    input_ids: ListOf[TokenId] | ListOf[ListOf[TokenId]] | None = None
    sampling_params: SglangSampling | SamplingOfEach = SglangSampling()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: LogprobCount = 0
    return_text_in_logprobs: bool = False
    stream: bool = False

    def prompt_values(self) -> tuple[list[Any], bool]:
        """The prompts, and whether they came as a batch (which is answered with a list)."""
        source: Any = self.input_ids if self.input_ids is not None else self.text
        if source is None or source == []:
            raise RequestError(
                "'input_ids' or 'text' must be given and not empty", param="input_ids"
            )
        if isinstance(source, str) or isinstance(source[0], int):
            return [source], False
        return list(source), True

    def params_of(self, count: int) -> list[SamplingParams]:
        """One `SamplingParams` a prompt."""
        params = (
            self.sampling_params
            if isinstance(self.sampling_params, list)
            else [self.sampling_params] * count
        )
        if len(params) != count:
            raise RequestError(
                "'sampling_params' as a list needs one entry a prompt", param="sampling_params"
            )
        logprobs = self.top_logprobs_num if self.return_logprob else None
        prompt_logprobs = (
            self.top_logprobs_num if self.return_logprob and self.logprob_start_len >= 0 else None
        )
        return [sampling.to_params(logprobs, prompt_logprobs) for sampling in params]


@router.post("/generate")
async def generate(body: dict[str, Any], request: Request, context: Context) -> Response:
    parsed = _parse(body)
    if isinstance(parsed, VllmBody):
        return await _vllm(parsed, request, context)
    return await _sglang(parsed, request, context)


async def _vllm(body: VllmBody, request: Request, context: ServerContext) -> Response:
    model = resolve_model(context, body.model)
    prompt, params = encode_prompt(context, body.prompt_value()), body.to_params()
    check = await answer_check(context, params, content=params.structure)
    requests = build_requests(new_id(UNNAMED), [prompt], params, model, body, request)
    [output] = await run(context, request, requests, check=check)
    return check.with_header(JSONResponse(_vllm_answer(body, output, model.policy_version)))


async def _sglang(body: SglangBody, request: Request, context: ServerContext) -> Response:
    """One object for one prompt with n = 1, a list for anything else."""
    model = resolve_model(context, body.lora_path or body.model)
    values, batched = body.prompt_values()
    response_id = new_id(UNNAMED)
    params_of = body.params_of(len(values))
    check_count(len(values), max(params.n for params in params_of))
    prompts = [encode_prompt(context, value) for value in values]
    requests = [
        build_requests(f"{response_id}-{position}", [prompt], params, model, body, request)[0]
        for position, (prompt, params) in enumerate(zip(prompts, params_of, strict=True))
    ]
    if len({params.structure for params in params_of}) > 1:
        raise RequestError(
            "the 'sampling_params' of one request must have one structure",
            param="sampling_params",
        )
    # a greedy answer is not sampled again
    warmest = max(params_of, key=lambda params: params.temperature)
    check = await answer_check(context, warmest, content=warmest.structure)
    outputs = await run(context, request, requests, check=check)
    answers = zip(requests, prompts, outputs, strict=True)
    objects = [
        each for answer in answers for each in _sglang_objects(context.tokenizer, body, *answer)
    ]
    return check.with_header(
        JSONResponse(objects[0] if len(objects) == 1 and not batched else objects)
    )


def _parse(body: dict[str, Any]) -> VllmBody | SglangBody:
    """Tell the shapes apart by their prompt key. Raises RequestError."""
    if body.get("stream"):
        raise RequestError(
            "'stream' is not supported on /generate; use /v1/completions", param="stream"
        )
    shape = SglangBody if "input_ids" in body or "text" in body else VllmBody
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise request_error(error.errors()) from error


def _vllm_answer(body: VllmBody, output: RequestOutput, default_version: int) -> dict[str, Any]:
    """`logprobs`: [n][T][1] of {"<id>": logprob}, the sampled token's entry first."""
    completions = output.completions
    prompt = body.prompt_value()
    response: dict[str, Any] = {
        "text": [completion.text for completion in completions],
        "prompt": prompt if isinstance(prompt, str) else None,
        "finish_reasons": [_finish_reason(completion) for completion in completions],
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": [completion.token_ids for completion in completions],
        "weight_versions": [
            version_spans(completion.policy_versions) for completion in completions
        ],
        "policy_version": last_version([output], default_version),
    }
    if any(completion.error for completion in completions):
        response["schema_errors"] = [completion.error for completion in completions]
    if body.logprobs is not None:
        response["logprobs"] = [_vllm_logprobs(completion) for completion in completions]
    length = len(output.prompt_token_ids)
    columns = [body.given_back(completion, length) for completion in completions]
    response |= {name: [column.get(name) for column in columns] for name in columns[0]}
    if output.prompt_logprobs is not None:
        response["prompt_logprobs"] = _vllm_prompt_logprobs(
            output.prompt_token_ids, output.prompt_logprobs
        )
    return response


def _vllm_logprobs(completion: Completion) -> list[list[dict[str, float]]]:
    tops: Sequence[Sequence[TopLogprob]] = completion.top_logprobs or [()] * len(
        completion.token_ids
    )
    return [
        [_by_id(token_id, logprob, top)]
        for token_id, logprob, top in zip(
            completion.token_ids, completion.logprobs, tops, strict=True
        )
    ]


def _vllm_prompt_logprobs(
    token_ids: Sequence[int], scores: PromptLogprobs
) -> list[dict[str, float] | None]:
    return [
        None if logprob is None else _by_id(token_id, logprob, top or ())
        for token_id, logprob, top in zip(
            token_ids, scores.logprobs, scores.top_logprobs, strict=True
        )
    ]


def _by_id(token_id: int, logprob: float, top: Sequence[TopLogprob]) -> dict[str, float]:
    """The given token first: clients read the first entry."""
    entry = {str(token_id): finite(logprob)}
    for alternative in top:
        entry.setdefault(str(alternative.token_id), finite(alternative.logprob))
    return entry


def _sglang_objects(
    tokenizer: "Tokenizer",
    body: SglangBody,
    request: EngineRequest,
    prompt: EncodedPrompt,
    output: RequestOutput,
) -> list[dict[str, Any]]:
    """One object a completion."""
    opens, skips = request.opens_text, request.params.skip_special_tokens

    def triples(
        reader: TokenReader,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        *,
        in_turn: bool = True,
    ) -> list[list[Any]]:
        """`in_turn`: the tokens follow one another; otherwise each could be in the reader's
        place."""
        shown = []
        for token_id, logprob in zip(ids, logprobs, strict=True):
            text = reader.text_of(token_id) if body.return_text_in_logprobs else None
            shown.append([None if logprob is None else finite(logprob), token_id, text])
            if in_turn:
                reader.add(token_id)
        return shown

    objects = []
    for completion in output.completions:
        meta: dict[str, Any] = {
            "id": output.request_id,
            "finish_reason": _sglang_finish(completion),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
            "cached_tokens": completion.cached_tokens,
            "weight_version": str(completion.policy_versions[-1])
            if completion.policy_versions
            else None,
            "weight_versions": version_spans(completion.policy_versions),
        }
        meta |= schema_error(completion)
        meta |= body.given_back(completion, len(output.prompt_token_ids))
        if body.return_logprob:
            reader = tokenizer.detokenizer(opens_text=opens, skip_special_tokens=skips)
            meta["output_token_logprobs"] = triples(
                reader, completion.token_ids, completion.logprobs
            )
        if body.return_logprob and body.top_logprobs_num and completion.top_logprobs is not None:
            reader, alternatives = (
                tokenizer.detokenizer(opens_text=opens, skip_special_tokens=skips),
                [],
            )
            for token_id, top in zip(completion.token_ids, completion.top_logprobs, strict=True):
                ids, logprobs = [t.token_id for t in top], [t.logprob for t in top]
                alternatives.append(triples(reader, ids, logprobs, in_turn=False))
                reader.add(token_id)
            meta["output_top_logprobs"] = alternatives
        if body.return_logprob and output.prompt_logprobs is not None:
            of_prompt = triples(
                prompt.reader(tokenizer), output.prompt_token_ids, output.prompt_logprobs.logprobs
            )
            meta["input_token_logprobs"] = of_prompt[body.logprob_start_len :]
        objects.append(
            {"text": completion.text, "output_ids": completion.token_ids, "meta_info": meta}
        )
    return objects


def _sglang_finish(completion: Completion) -> dict[str, Any]:
    reason = _finish_reason(completion)
    if reason == "length":
        return {"type": "length", "length": len(completion.token_ids)}
    matched = (
        completion.stop_reason if completion.stop_reason is not None else completion.token_ids[-1]
    )
    return {"type": "stop", "matched": matched}


def _finish_reason(completion: Completion) -> str:
    """ "stop" or "length". Raises GenerationAbortedError for anything else."""
    if completion.finish_reason not in ("stop", "length"):
        raise GenerationAbortedError("the generation was aborted")
    return completion.finish_reason

"""/v1/completions: text or token ids in, one or many prompts, streamed or not, and prompt
scoring (echo)."""

from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.generation import (
    EncodedPrompt,
    ResponseBuilder,
    build_requests,
    encode_prompts,
    new_id,
    resolve_model,
    respond,
)
from mlx_parallm.server.protocol.openai import CompletionBody
from mlx_parallm.server.protocol.response_bodies import (
    TokenReader,
    completion_logprobs,
    joined,
    openai_head,
    processed_logprobs,
    prompt_logprob_entries,
    version_spans,
)
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.schema_check import answer_check
from mlx_parallm.types import Completion, CompletionDelta, RequestOutput, ServedModel
from mlx_parallm.types import Request as EngineRequest

router = json_router("openai")


@router.post("/v1/completions")
async def create_completion(body: CompletionBody, request: Request, context: Context) -> Response:
    model = resolve_model(context, body.model)
    prompts = [
        prompt.last(body.truncate_prompt_tokens) for prompt in encode_prompts(context, body.prompt)
    ]
    response_id = new_id("cmpl")
    params = body.with_defaults(context.sampling_defaults).to_params()
    check = await answer_check(context, params, content=params.structure)
    requests = build_requests(
        response_id, prompts, params, model, body, request, stream=body.stream
    )
    answer = _CompletionsResponse(context, model, response_id, body, prompts, requests)
    options = body.stream_options
    return await respond(
        answer, request, requests, streamed=body.stream, stream_options=options, check=check
    )


class _CompletionsResponse(ResponseBuilder):
    def __init__(
        self,
        context: ServerContext,
        model: ServedModel,
        response_id: str,
        body: CompletionBody,
        prompts: list[EncodedPrompt],
        requests: list[EngineRequest],
    ) -> None:
        head = openai_head("text_completion", response_id, model, usage_follows=body.include_usage)
        super().__init__(context, model, head)
        self._body = body
        self._prompts, self._requests = prompts, requests
        self._readers: dict[int, TokenReader] = {}  # by streamed choice

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(position, output, completion)
            for position, output in enumerate(outputs)
            for completion in output.completions
        ]
        return {"choices": choices}

    def _choice(
        self, position: int, output: RequestOutput, completion: Completion
    ) -> dict[str, Any]:
        wanted = self._body.logprobs is not None
        choice: dict[str, Any] = {
            "index": position * self._body.n + completion.index,
            "text": self._echoed(position) + completion.text,
            "logprobs": self._all_logprobs(position, output, completion) if wanted else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "weight_versions": version_spans(completion.policy_versions),
        }
        if wanted:
            choice |= processed_logprobs(completion)
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprob_entries(
                self._prompt_reader(position), output.prompt_token_ids, output.prompt_logprobs
            )
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = completion.token_ids
        return choice

    def _echoed(self, position: int) -> str:
        """The prompt's text, with `echo`."""
        prompt = self._prompts[position]
        if not self._body.echo:
            return ""
        if prompt.text is not None:
            return prompt.text
        return self.context.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _all_logprobs(
        self, position: int, output: RequestOutput, completion: Completion
    ) -> dict[str, list[Any]]:
        """The completion's log-probabilities; with `echo` the prompt's before them."""
        to_lists = partial(completion_logprobs, as_ids=self._body.return_tokens_as_token_ids)
        start, scores = len(self._echoed(position)), output.prompt_logprobs
        sampled = completion.token_ids, completion.logprobs, completion.top_logprobs
        lists = to_lists(self._reader(position), *sampled, start=start)
        if not self._body.echo or scores is None:
            return lists
        prompt = output.prompt_token_ids, scores.logprobs, scores.top_logprobs
        return joined(to_lists(self._prompt_reader(position), *prompt), lists)

    def _prompt_reader(self, position: int) -> TokenReader:
        return self._prompts[position].reader(self.context.tokenizer)

    def _reader(self, position: int) -> TokenReader:
        request = self._requests[position]
        skips = request.params.skip_special_tokens
        return self.context.tokenizer.detokenizer(
            opens_text=request.opens_text, skip_special_tokens=skips
        )

    def chunks(self, index: int, delta: CompletionDelta) -> list[dict[str, Any]]:
        choice: dict[str, Any] = {"index": index, "text": delta.text}
        if index not in self._readers:
            position = index // self._body.n
            self._readers[index] = self._reader(position)
            choice["text"] = self._echoed(position) + delta.text
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self._prompts[position].token_ids
        choice["logprobs"] = None
        if self._body.logprobs is not None:
            sampled, as_ids = (
                (delta.token_ids, delta.logprobs, delta.top_logprobs),
                self._body.return_tokens_as_token_ids,
            )
            choice["logprobs"] = completion_logprobs(self._readers[index], *sampled, as_ids=as_ids)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        choice["finish_reason"] = delta.finish_reason
        return [{"choices": [choice]}]

"""/v1/chat/completions: messages in, streamed or not; ids and log-probabilities of exactly what
was sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.answer_grammar import (
    Calls,
    answer_grammar,
    arguments_schema,
    forced_format,
    tool_format,
)
from mlx_parallm.execution.prompt_images import carried_by
from mlx_parallm.execution.thinking import Thinking, ends_thinking, thinking_after
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.generation import (
    AnswerForm,
    EncodedPrompt,
    ResponseBuilder,
    build_requests,
    encode_conversation,
    new_id,
    observer_of,
    resolve_model,
    respond,
)
from mlx_parallm.server.protocol.answer_parts import AnswerFormat, AnswerSplitter
from mlx_parallm.server.protocol.openai import ChatBody, ChatTokensBody
from mlx_parallm.server.protocol.response_bodies import (
    TokenReader,
    chat_logprobs,
    openai_head,
    processed_logprobs,
    prompt_logprob_entries,
    version_spans,
)
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.schema_check import answer_check, with_names
from mlx_parallm.types import (
    Completion,
    CompletionDelta,
    FinishReason,
    RequestOutput,
    ServedModel,
    Structure,
)
from mlx_parallm.types import Request as EngineRequest

router = json_router("openai")
UNREAD = "X-Unread-Template-Arguments"
"""Header with the request's fields that the chat template does not read."""


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatBody, request: Request, context: Context) -> Response:
    return await answer_chat(body, request, context, response_id=new_id("chatcmpl"))


async def answer_chat(
    body: ChatBody,
    request: Request,
    context: ServerContext,
    *,
    response_id: str,
    form: AnswerForm | None = None,
) -> Response:
    """Answer a chat. `form`: the words of another API. Raises as `generation.run` does."""
    model = resolve_model(context, body.model)
    if tokens := body.prompt_tokens:
        opens_text = not body.continues_final_message
        shown = body.template_messages(shown=context.shown) if context.shown else ()
        carried = await carried_by(context.image_reader, shown)
        prompt = EncodedPrompt(tokens, opens_text=opens_text, carried=carried)
    else:
        prompt = await encode_conversation(context, body)
    prompt = prompt.last(body.truncate_prompt_tokens)
    plan = plan_answer(context, body, prompt.token_ids)
    params = body.with_defaults(context.sampling_defaults).to_params()
    skips = params.skip_special_tokens and not plan.answer_format.needs_special_tokens
    budget = params.thinking_token_budget
    if budget is None and body.reasoning_effort and ends_thinking(context.tokenizer):
        budget = context.deps.config.reasoning_budgets.get(body.reasoning_effort)
    params = replace(
        params,
        thinking_token_budget=budget,
        skip_special_tokens=skips,
        structure=plan.structure,
        reasoning=None if plan.thinking is None else plan.thinking.reasoning,
    )
    check = await answer_check(
        context,
        params,
        content=plan.schema,
        called=plan.called_schemas,
        must_call=bool(body.forced_tools),
        read=plan.checked_format.read,
    )
    requests = build_requests(
        response_id, [prompt], params, model, body, request, stream=body.stream
    )
    if (observer := observer_of(request)) is not None:
        observer.begun(body)
    answer = _ChatResponse(context, model, response_id, body, plan.answer_format, requests[0])
    options = body.stream_options
    response = await respond(
        answer,
        request,
        requests,
        streamed=body.stream,
        stream_options=options,
        form=form,
        check=check,
    )
    unread = [] if tokens else body.unread_fields(context.tokenizer.unread_arguments)
    return with_names(response, UNREAD, unread)


@router.post("/v1/chat/completions/tokens")
async def continue_tokens(body: ChatTokensBody, request: Request, context: Context) -> Response:
    """A chat whose prompt is `tokens`, unchanged; so multi-turn RL clients keep the tokens that
    were sampled."""
    return await create_chat_completion(body, request, context)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The required form of an answer to one prompt, and how to read it. `schema`: of the content
    after the reasoning; None = any text."""

    answer_format: AnswerFormat
    structure: Structure | None
    schema: Structure | None
    # schemas of call arguments, for calls by grammar or strict tools
    called_schemas: Mapping[str, Structure]
    # how its content and calls are told from its reasoning, which the client may not want
    checked_format: AnswerFormat
    thinking: Thinking | None


def plan_answer(
    context: ServerContext, body: ChatBody, prompt_token_ids: Sequence[int]
) -> AnswerPlan:
    """Raises RequestError: tools, and calls are not to be read."""
    tokenizer, tools, forced = context.tokenizer, body.callable_tools, body.forced_tools
    if tools and not tokenizer.reads_tools:
        raise RequestError(
            (
                "this server reads no tool calls: set model.tool_parser to their format, or send"
                ' tool_choice = "none"'
            ),
            param="tools",
        )
    schema = None if forced else body.structure()
    written = forced_format(tokenizer) if forced else tool_format(tokenizer)
    thinking = _thinking(context, body, prompt_token_ids)
    calls = (
        Calls(forced or tools, written, body.calls_several)
        if forced or (tools and schema is not None)
        else None
    )
    may_think = (
        thinking if thinking is not None and (thinking.opened or not body.thinking_is_off) else None
    )
    think = tokenizer.think_markers if body.separate_reasoning else None
    # reasoning and answer are not separated
    mixed = may_think is not None and think is None
    answer_format = AnswerFormat(
        think_markers=think if may_think is not None or (schema is None and not forced) else None,
        tool_markers=written.markers if tools else None,
        structural_markers=tokenizer.structural_markers if think and schema is None else (),
        parse=written.parse,
        tools=forced or tools,
        tool_format=written.name,
        parallel=body.parallel_tool_calls,
        forced=bool(forced),
        structured=schema is not None and not mixed,
        starts_reasoning=think is not None and thinking is not None and thinking.opened,
        # Inside tool markers any special token may be.
        needs_special_tokens=bool(tools)
        or (think is not None and any(map(tokenizer.hides, think))),
        on_malformed=context.metrics.malformed_tool_calls.inc,
    )
    structure = answer_grammar(tokenizer, may_think, calls, schema)
    checked = forced or [
        tool for tool in tools if schema is not None or tool["function"].get("strict") is True
    ]
    called = {tool["function"]["name"]: arguments_schema(tool) for tool in checked}
    checked_format = replace(answer_format, on_malformed=lambda: None)
    if mixed and may_think is not None:
        if any(map(tokenizer.hides, may_think.markers)):  # reasoning and content are not separated
            schema = None
        checked_format = replace(
            checked_format,
            think_markers=may_think.markers,
            structured=True,
            starts_reasoning=may_think.opened,
        )
    return AnswerPlan(answer_format, structure, schema, called, checked_format, thinking)


def _thinking(
    context: ServerContext, body: ChatBody, prompt_token_ids: Sequence[int]
) -> Thinking | None:
    """Return whether the answer may begin with reasoning. None: the model does not think, or the
    prompt has ended it."""
    tokenizer = context.tokenizer
    markers = tokenizer.think_markers
    if markers is None:
        return None
    if body.continues_final_message:
        messages = body.template_messages(shown=context.shown)
        tail = str(messages[-1]["content"])
        return (
            Thinking(markers, opened=True)
            if tail.rfind(markers[0]) > tail.rfind(markers[1])
            else None
        )
    return thinking_after(tokenizer, prompt_token_ids)


def reasoning_tokens(
    ids: Sequence[int], start: Sequence[int], end: Sequence[int], *, opened: bool
) -> int:
    """Return how many of an answer's tokens are its first reasoning, markers included. `opened`:
    the prompt has opened it."""
    begin = 0 if opened else _position(ids, start, 0)
    if begin is None:
        return 0
    ended = _position(ids, end, begin)
    return (len(ids) if ended is None else ended + len(end)) - begin


def _position(ids: Sequence[int], marker: Sequence[int], begin: int) -> int | None:
    places = range(begin, len(ids) - len(marker) + 1)
    return next((at for at in places if list(ids[at : at + len(marker)]) == list(marker)), None)


def openai_reason(reason: FinishReason | None, called: bool) -> str | None:
    """`tool_calls` when the model stopped by itself and called tools, else the engine's reason."""
    return "tool_calls" if called and reason == "stop" else reason


class _ChatResponse(ResponseBuilder):
    """One prompt's answer. A streamed choice sends its role first, then content, and the finish
    reason last."""

    def __init__(
        self,
        context: ServerContext,
        model: ServedModel,
        response_id: str,
        body: ChatBody,
        answer_format: AnswerFormat,
        request: EngineRequest,
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(
            context, model, openai_head(kind, response_id, model, usage_follows=body.include_usage)
        )
        self._body = body
        self._format = answer_format
        self._request = request
        # by choice, of its tokens with log-probabilities
        self._readers: dict[int, TokenReader] = {}
        self._splitters: dict[int, AnswerSplitter] = {}
        self._sampled: dict[int, list[int]] = {}  # token ids of each choice, of models that reason

    def usage_details(self) -> dict[str, int]:
        """OpenAI's count of reasoning tokens, markers included, of models that reason."""
        if self._format.think_markers is None:
            return {}
        tokenizer = self.context.tokenizer
        start, end = map(tokenizer.encode_within, self._format.think_markers)
        opened = self._format.starts_reasoning
        count = sum(
            reasoning_tokens(ids, start, end, opened=opened) for ids in self._sampled.values()
        )
        return {"reasoning_tokens": count}

    def _sample(self, part: Completion | CompletionDelta) -> None:
        if self._format.think_markers is not None:
            self._sampled.setdefault(part.index, []).extend(part.token_ids)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        response: dict[str, Any] = {
            "choices": [self._choice(completion) for completion in output.completions]
        }
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            reader = self.context.tokenizer.detokenizer(skip_special_tokens=False)
            scores = output.prompt_logprobs
            response["prompt_logprobs"] = prompt_logprob_entries(
                reader, output.prompt_token_ids, scores
            )
        if self._body.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        return response

    def _choice(self, completion: Completion) -> dict[str, Any]:
        self._sample(completion)
        parts = self._format.read(completion.text, completion.finish_reason)
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": parts.message(),
            "logprobs": self._logprobs(completion),
            "finish_reason": openai_reason(completion.finish_reason, bool(parts.tool_calls)),
            "stop_reason": completion.stop_reason,
            "weight_versions": version_spans(completion.policy_versions),
        }
        if self._body.logprobs:
            choice |= processed_logprobs(completion)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _logprobs(self, part: Completion | CompletionDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        # The engine returns the requested alternatives; with top_logprobs = 0 none are shown.
        tops = part.top_logprobs if self._body.top_logprobs else None
        as_ids = self._body.return_tokens_as_token_ids
        if (reader := self._readers.get(part.index)) is None:
            skips = self._request.params.skip_special_tokens
            reader = self.context.tokenizer.detokenizer(
                opens_text=self._request.opens_text, skip_special_tokens=skips
            )
            self._readers[part.index] = reader
        return chat_logprobs(reader, part.token_ids, part.logprobs, tops, as_ids)

    def chunks(self, index: int, delta: CompletionDelta) -> list[dict[str, Any]]:
        self._sample(delta)
        opening = [] if index in self._splitters else [self._role_chunk(index)]
        splitter = self._splitters[index]
        parts = splitter.take(delta.text, delta.finish_reason)
        choice: dict[str, Any] = {
            "index": index,
            "delta": parts.delta(),
            "logprobs": self._logprobs(delta),
            "finish_reason": openai_reason(delta.finish_reason, splitter.calls_made > 0),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return [*opening, {"choices": [choice]}]

    def _role_chunk(self, index: int) -> dict[str, Any]:
        first = not self._splitters
        self._splitters[index] = AnswerSplitter(self._format)
        delta = {"role": "assistant", "content": ""}
        chunk: dict[str, Any] = {
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        }
        if first and self._body.return_token_ids:
            chunk["prompt_token_ids"] = self._request.prompt_token_ids
        return chunk

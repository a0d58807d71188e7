"""Run the requests of a route: prompts to token ids, admission, the engine, and the answer, whole
or streamed.

    route → build_requests → respond(…, ResponseBuilder) → run → ResponseBuilder.whole → JSON
                                                         → stream → ResponseBuilder.chunks →
                                                         EventStream

Text is encoded only here, once. Token ids that a client sends are used as they are.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from mlx_parallm.engine.grammar import GRAMMAR_CODE
from mlx_parallm.engine.sequence import random_stream
from mlx_parallm.engine.validation import MAX_CHOICES
from mlx_parallm.errors import (
    GenerationFailedError,
    InvalidAnswerError,
    ParallmError,
    RequestError,
    failure_of,
)
from mlx_parallm.execution.prompt_images import (
    CUT,
    counted_tokens,
    image_sources,
    text_of,
    with_sources,
    without_sources,
)
from mlx_parallm.rollout_store.completions import Choice
from mlx_parallm.server.auth import client_of
from mlx_parallm.server.client_hangup import until_hangup
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.errors import ClientDisconnectedError
from mlx_parallm.server.protocol.fields import QueueFields, StreamOptions
from mlx_parallm.server.protocol.openai import ChatBody, Conversation
from mlx_parallm.server.protocol.response_bodies import (
    TokenReader,
    last_version,
    usage,
    usage_of,
    version_spans,
)
from mlx_parallm.server.schema_check import NO_CHECK, AnswerCheck
from mlx_parallm.server.sse import AnswerResponse, EventStream, StreamForm, merged
from mlx_parallm.types import (
    Completion,
    CompletionDelta,
    Request,
    RequestOutput,
    SamplingParams,
    ServedModel,
)

if TYPE_CHECKING:
    from mlx_parallm.models.tokenizer import Tokenizer

UNNAMED = "gen"  # prefix of response ids that no client sees
Part = TypeVar("Part", Completion, CompletionDelta)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: tuple[int, ...]
    text: str | None = None  # None when the client sent ids
    opens_text: bool = False  # the completion starts a new text, as a chat's answer does
    carried: Mapping[str, Any] = field(default_factory=dict)  # fields of `Request`, beside tokens

    def last(self, count: int | None) -> "EncodedPrompt":
        """`truncate_prompt_tokens`: the last `count` tokens; None = all."""
        if count is None or count >= len(self.token_ids):
            return self
        if self.carried:
            raise RequestError(CUT, param="truncate_prompt_tokens")
        return EncodedPrompt(self.token_ids[-count:], opens_text=self.opens_text)

    def reader(self, tokenizer: "Tokenizer") -> TokenReader:
        """Read this prompt's tokens."""
        if self.text is None:
            return tokenizer.detokenizer(skip_special_tokens=False)
        return tokenizer.text_reader(self.text)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def resolve_model(context: ServerContext, name: str | None) -> ServedModel:
    """The model of that name, or the default one. Raises ModelNotFoundError (404)."""
    return context.engine.resolve_model(name or "default")


def encode_prompts(context: ServerContext, prompt: Any) -> list[EncodedPrompt]:
    """The completions route's `prompt` (str, list of str, ids, list of ids). Raises
    RequestError."""
    if isinstance(prompt, str):
        entries: list[Any] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        entries = [prompt]
    else:
        entries = list(prompt)
    if not entries:
        raise RequestError("'prompt' must not be empty", param="prompt")
    check_count(len(entries), 1)
    return [encode_prompt(context, entry) for entry in entries]


def encode_prompt(context: ServerContext, prompt: str | Sequence[int]) -> EncodedPrompt:
    """One prompt as text or ids (the engine checks their range). Raises RequestError: no token,
    not Unicode."""
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        check_size(context, prompt, "prompt")
    ids = tuple(context.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if not ids:
        raise RequestError("'prompt' must not be empty", param="prompt")
    text = prompt if isinstance(prompt, str) else None
    return EncodedPrompt(ids, text, opens_text=context.tokenizer.opens_text(ids))


async def encode_conversation(context: ServerContext, conversation: Conversation) -> EncodedPrompt:
    """Return a chat's token ids, and what goes with them. Raises RequestError: no template, content
    that the model cannot read, a template that refuses."""
    # each is a token at least
    if (count := len(conversation.messages)) > (room := context.engine.max_model_len):
        reason = (
            f"This model's maximum context length is {room} tokens, but"
            f" 'messages' holds {count} messages."
        )
        raise RequestError(reason, param="messages", code="context_length_exceeded")
    reader = context.image_reader
    messages = conversation.template_messages(shown=context.shown)
    sources = image_sources(messages)
    contents = [text_of(message["content"]) for message in messages]
    for position, content in enumerate(contents):
        check_text(content, f"messages.{position}.content")
    check_size(context, "".join(contents), "messages")  # before the template spends seconds on it
    options = conversation.render_options(context.deps.chat_template_kwargs)
    text = context.tokenizer.render_chat_text(
        without_sources(messages), shown=context.shown if sources else (), **options
    )
    text, carried = await with_sources(reader, text, sources)
    check_size(context, text, "messages")
    token_ids = tuple(context.tokenizer.encode(text, add_special_tokens=False))
    if not token_ids:
        raise RequestError("the chat template made an empty prompt of 'messages'", param="messages")
    opens_text = not conversation.continues_final_message
    return EncodedPrompt(token_ids, opens_text=opens_text, carried=carried)


def check_count(prompts: int, n: int) -> None:
    """Raises RequestError when one request asks for more than MAX_CHOICES completions."""
    if prompts * n > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts × n = {n}: a request may ask for {MAX_CHOICES} completions",
            param="n",
        )


def check_size(context: ServerContext, text: str, param: str) -> None:
    """Refuse a text that cannot fit before the tokenizer spends seconds on it. Raises
    RequestError."""
    room = context.engine.max_model_len
    if len(text) > room * context.tokenizer.longest_token:
        raise RequestError(
            (
                f"This model's maximum context length is {room} tokens, but {param!r} has"
                f" {len(text)} characters."
            ),
            param=param,
            code="context_length_exceeded",
        )


def check_text(text: str, param: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes. Raises RequestError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param!r} is not valid Unicode: a lone surrogate", param=param
        ) from error


def build_requests(
    response_id: str,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    model: ServedModel,
    body: QueueFields,
    http_request: HTTPRequest,
    *,
    stream: bool = False,
) -> list[Request]:
    """One engine request a prompt; n choices of a prompt are one request. Prefixes are shared under
    the body's cache_salt, else among requests of the same key. Raises RequestError: too many."""
    check_count(len(prompts), params.n)
    salt = client_of(http_request) if body.cache_salt is None else body.cache_salt
    return [
        Request(
            f"{response_id}-{position}",
            prompt.token_ids,
            params,
            model.adapter,
            stream,
            cache_salt=salt,
            priority=body.priority,
            # a grammar's text is its match
            opens_text=prompt.opens_text and params.structure is None,
            **prompt.carried,
        )
        for position, prompt in enumerate(prompts)
    ]


def in_mode(context: ServerContext, part: Part) -> Part:
    """Set `logprobs` as `server.logprobs_mode` says: "processed" are those of the distribution
    that was drawn from."""
    if context.deps.config.logprobs_mode == "raw" or part.processed_logprobs is None:
        return part
    return replace(part, logprobs=part.processed_logprobs)


class AnswerForm(StreamForm, Protocol):
    """A chat's answer in the words of another API. The observer sees the chat's own."""

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The answer that the client sees."""

    def events(
        self, chunks: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The stream's events. Closing it must close `chunks`."""


class AnswerObserver(Protocol):
    """Follow one answer. A dependency of the route sets it as
    `request.state.observer`."""

    def begun(self, body: ChatBody) -> None:
        """Take the request, before it runs."""

    async def aborted(self) -> None:
        """Take the end of an answer whose client is gone."""

    def sampled(self, requests: Sequence[Request], choices: Sequence[Sequence[Choice]]) -> None:
        """Take the engine's samples, whole, before the client sees the end. `choices`:
        [prompts][n]."""

    async def whole(self, answer: Mapping[str, Any]) -> None:
        """Take an answer that is not streamed, before it is sent."""

    def events(
        self, events: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Pass a stream's chunks on. Closing it must close `events`."""


def observer_of(http_request: HTTPRequest) -> AnswerObserver | None:
    observer: AnswerObserver | None = getattr(http_request.state, "observer", None)
    return observer


async def run(
    context: ServerContext,
    http_request: HTTPRequest,
    requests: Sequence[Request],
    client_id: str | None = None,
    check: AnswerCheck = NO_CHECK,
) -> list[RequestOutput]:
    """All requests to their end, submitted together. The client's hang-up aborts them.

    `client_id`: a name by which /abort_requests finds them, too.

    Raises RequestError, EngineUnavailableError, ClientDisconnectedError, GenerationFailedError.
    """
    with context.admitted(requests):
        outputs = await until_hangup(
            http_request.receive, _checked_outputs(context, requests, client_id, check)
        )
    _keep(context, requests, _choices_of(outputs), client_id, observer_of(http_request))
    return [
        replace(o, completions=tuple(in_mode(context, c) for c in o.completions)) for o in outputs
    ]


async def _checked_outputs(
    context: ServerContext, requests: Sequence[Request], client_id: str | None, check: AnswerCheck
) -> list[RequestOutput]:
    """Run the requests; choices that break their schema are sampled again. Raises as `run`."""
    with context.running.holding(requests, client_id):
        outputs = await context.engine.generate_many(list(requests))
    for attempt in range(1, check.retries + 1):
        faulty = [
            (position, completion.index)
            for position, output in enumerate(outputs)
            for completion in output.completions
            if requests[position].params.temperature > 0
            and check.fault(completion, completion.text) is not None
        ]
        if not faulty:
            break
        again = [_again(requests[position], index, attempt) for position, index in faulty]
        with context.running.holding(again, client_id):
            sampled = await context.engine.generate_many(again)
        context.metrics.resampled_choices.inc(len(again))
        for (position, index), output in zip(faulty, sampled, strict=True):
            outputs[position] = _with_choice(outputs[position], index, output.completions[0])
    for position, output in enumerate(outputs):
        outputs[position] = replace(
            output, completions=tuple(map(check.settle, output.completions))
        )
        for completion in output.completions:
            if completion.finish_reason == "error":
                raise _failure(completion, check)
    return outputs


def _again(request: Request, index: int, attempt: int) -> Request:
    """The request for another text in the place of choice `index`; its seed follows from the
    request's."""
    params = request.params
    seed = (
        None if params.seed is None else random_stream(random_stream(params.seed, index), attempt)
    )
    return replace(
        request,
        request_id=f"{request.request_id}.{index}.{attempt}",
        params=replace(params, n=1, seed=seed, prompt_logprobs=None),
        stream=False,
    )


def _with_choice(output: RequestOutput, index: int, sampled: Completion) -> RequestOutput:
    """The output with another text in the place of choice `index`."""
    completions = list(output.completions)
    rejected = output.rejected_tokens + len(completions[index].token_ids)
    completions[index] = replace(
        sampled, index=index, cached_tokens=completions[index].cached_tokens
    )
    return replace(output, completions=tuple(completions), rejected_tokens=rejected)


def _choices_of(outputs: Sequence[RequestOutput]) -> list[list[Choice]]:
    return [[(completion,) for completion in output.completions] for output in outputs]


async def stream(
    context: ServerContext,
    requests: Sequence[Request],
    client_id: str | None = None,
    observer: AnswerObserver | None = None,
    check: AnswerCheck = NO_CHECK,
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Deltas of all requests as they come, with the request's position. Closing it aborts what
    still runs.

    A choice that may be sampled again comes in one delta, once it has been checked.
    """
    if check.holds_streams_back:
        with context.admitted(requests):
            started = time.perf_counter()
            outputs = await _checked_outputs(context, requests, client_id, check)
        context.metrics.observe_first_token(time.perf_counter() - started)
        _keep(context, requests, _choices_of(outputs), client_id, observer)
        for position, output in enumerate(outputs):
            for completion in output.completions:
                yield (
                    position,
                    in_mode(context, completion.delta(rejected_tokens=output.rejected_tokens)),
                )
        return
    texts: dict[tuple[int, int], str] = defaultdict(str)
    with context.admitted(requests), context.running.holding(requests, client_id):
        submitted: float | None = time.perf_counter()
        parts: list[list[list[CompletionDelta]]] = [
            [[] for _ in range(request.params.n)] for request in requests
        ]
        unfinished = sum(request.params.n for request in requests)
        streams = [context.engine.stream(request) for request in requests]
        deltas = merged(cast("list[AsyncGenerator[CompletionDelta, None]]", streams))
        async with aclosing(deltas):
            async for position, delta in deltas:
                if submitted is not None:
                    context.metrics.observe_first_token(time.perf_counter() - submitted)
                    submitted = None
                if check.active:
                    texts[position, delta.index] += delta.text
                    delta = _settled(check, delta, texts[position, delta.index])
                if delta.finish_reason == "error":
                    raise _failure(delta, check)
                if context.deps.completions is not None or observer is not None:
                    parts[position][delta.index].append(delta)
                    unfinished -= delta.finish_reason is not None
                    if not unfinished:  # before the client sees the end, and may reward it
                        _keep(context, requests, parts, client_id, observer)
                yield position, in_mode(context, delta)


def _failure(part: Completion | CompletionDelta, check: AnswerCheck) -> ParallmError:
    """Return the error of a choice that failed, or of its end."""
    param = check.param if part.error_code == GRAMMAR_CODE else None
    return failure_of(part.error, part.error_code, param)


def _settled(check: AnswerCheck, delta: CompletionDelta, text: str) -> CompletionDelta:
    """A delta of a stream that cannot be sampled again; `text` is all of its choice. Raises
    InvalidAnswerError."""
    fault = None if delta.finish_reason is None else check.fault(delta, text)
    if fault is None:
        return delta
    if check.marks and delta.finish_reason == "stop":
        return replace(delta, error=fault)
    raise replace(check, retries=0).error(fault, text)


def _keep(
    context: ServerContext,
    requests: Sequence[Request],
    choices: Sequence[Sequence[Choice]],
    client_id: str | None,
    observer: AnswerObserver | None,
) -> None:
    """Pass the choices to the observer, and keep them for rewards that come later, under the id
    that the answer shows."""
    if observer is not None:
        observer.sampled(requests, choices)
    response_id = requests[0].request_id.rpartition("-")[0]
    if context.deps.completions is not None and not response_id.startswith(f"{UNNAMED}-"):
        context.deps.completions.keep(client_id or response_id, requests, choices)


class ResponseBuilder(ABC):
    """Builds one HTTP answer. `head`: the fields with which the answer, or each of its chunks,
    begins."""

    def __init__(self, context: ServerContext, model: ServedModel, head: dict[str, Any]) -> None:
        self.context, self.model, self.head = context, model, head

    @abstractmethod
    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer without its head, usage and policy version."""

    def usage_details(self) -> dict[str, int]:
        """The answer's own `completion_tokens_details`, once it is made."""
        return {}

    @abstractmethod
    def chunks(self, index: int, delta: CompletionDelta) -> list[dict[str, Any]]:
        """The stream's chunks for a delta; the last one has one choice, the delta's.

        `index`: the choice's position in the answer (choices of a second prompt come after all of
        the first's).
        """


async def respond(
    answer: ResponseBuilder,
    http_request: HTTPRequest,
    requests: Sequence[Request],
    *,
    streamed: bool,
    stream_options: StreamOptions | None,
    client_id: str | None = None,
    form: AnswerForm | None = None,
    check: AnswerCheck = NO_CHECK,
) -> Response:
    """Run the requests. `form`: None = as OpenAI's chat or completion. Raises as `run` does."""
    observer = observer_of(http_request)
    if streamed:
        deltas = stream(answer.context, requests, client_id, observer, check)
        events = _events(answer, requests, stream_options or StreamOptions(), deltas)
        events = observer.events(events) if observer else events
        stream_response = EventStream(form.events(events) if form else events, form)
        return check.with_header(await stream_response.prefetch(http_request.receive))
    try:
        outputs = await run(answer.context, http_request, requests, client_id, check)
    except (
        ClientDisconnectedError,
        GenerationFailedError,
        InvalidAnswerError,
        asyncio.CancelledError,
    ):
        if observer is not None:
            await observer.aborted()
        raise
    version = last_version(outputs, answer.model.policy_version)
    body = {**answer.head, **answer.whole(outputs)}
    completions = [completion for output in outputs for completion in output.completions]
    for choice, completion in zip(body["choices"], completions, strict=True):
        choice |= schema_error(completion)
    counts = counted_tokens(usage_of(outputs, answer.usage_details()), requests)
    body |= {"usage": counts, "policy_version": version}
    if observer is not None:
        await observer.whole(body)
    return check.with_header(AnswerResponse(form.whole(body) if form else body))


def schema_error(part: Completion | CompletionDelta) -> dict[str, str]:
    """The field of that name, of a choice that ended by itself and does not match its schema."""
    return {} if part.error is None else {"schema_error": part.error}


async def _events(
    answer: ResponseBuilder,
    requests: Sequence[Request],
    wanted: StreamOptions,
    sampled: AsyncGenerator[tuple[int, CompletionDelta], None],
) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks; a choice's last one has the policy versions of its tokens. Closing it aborts the
    requests."""
    versions: dict[int, list[int]] = defaultdict(list)  # by choice
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    generated = cached = rejected = 0
    async with aclosing(sampled) as deltas:
        async for position, delta in deltas:
            generated += len(delta.token_ids)
            rejected += delta.rejected_tokens
            cached += delta.cached_tokens
            index = position * requests[0].params.n + delta.index
            versions[index] += delta.policy_versions
            chunks = answer.chunks(index, delta)
            if delta.finish_reason is not None:
                spans = version_spans(tuple(versions[index]))
                chunks[-1]["choices"][0] |= {
                    "stop_reason": delta.stop_reason,
                    "weight_versions": spans,
                }
                chunks[-1]["choices"][0] |= schema_error(delta)
                chunks[-1]["policy_version"] = (versions[index] or [answer.model.policy_version])[
                    -1
                ]
            so_far = (
                {"usage": usage(prompt_tokens, generated, cached, rejected)}
                if wanted.usage_so_far
                else {}
            )
            for chunk in chunks:
                yield answer.head | chunk | so_far
    if wanted.include_usage:
        counts = usage(prompt_tokens, generated, cached, rejected, answer.usage_details())
        yield answer.head | {"choices": [], "usage": counted_tokens(counts, requests)}

"""The in-process backend of `InferenceModule`: the daemon's engine without HTTP.

Each call is one submission to the engine's queue, so the prompts of all calls of all threads share
batches.
"""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_parallm.engine.client import EngineClient
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.row_images import with_stored_images
from mlx_parallm.errors import (
    GenerationFailedError,
    RequestError,
    RolloutRejectedError,
    failure_of,
)
from mlx_parallm.execution.prompt_images import carried_with, digests
from mlx_parallm.execution.thinking import thinking_after
from mlx_parallm.execution.tool_calls import (
    own_format,
    parse_tool_calls,
    prompt_with_tools,
)
from mlx_parallm.inference.types import (
    MAX_NEW_TOKENS,
    CalledAnswer,
    Generation,
    Prompt,
    Response,
    is_messages,
)
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import PolicyClient, Request, RequestOutput, SamplingParams
from mlx_parallm.weights import SharedWeights

CACHED_ANSWERS = 1000
MAX_LOGITS_BYTES = 2 << 30  # limit of one get_logits call


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A prompt; `chat`: its answer begins its own text."""

    tokens: tuple[int, ...]
    chat: bool = False
    carried: Mapping[str, Any] = field(default_factory=dict)  # fields of `Request`


class EngineBackend:
    """Generates with an engine of this process, for `InferenceModule`.

    Args:
        tokenizer: used by the module's loop only.
        adapter: the adapter of the next requests; None = the base.
        weights: the engine's; without them nothing is cached.
        template_kwargs: arguments of the chat template.
    """

    def __init__(
        self,
        client: PolicyClient,
        tokenizer: Tokenizer,
        *,
        adapter: str | None = None,
        weights: SharedWeights | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.client = client
        self.adapter = adapter
        self._tokenizer = tokenizer
        self._weights = weights
        self._template_kwargs = template_kwargs
        self._greedy: OrderedDict[Hashable, list[Generation]] = OrderedDict()

    async def generate(
        self, prompts: Sequence[Prompt], params: Mapping[str, Any], *, logprobs: bool
    ) -> list[list[Generation]]:
        return await self._sample([self._encode(prompt) for prompt in prompts], params)

    async def generate_with_tools(
        self,
        prompts: Sequence[Prompt],
        tools: Sequence[Mapping[str, Any]],
        formats: Any,
        params: Mapping[str, Any],
    ) -> list[CalledAnswer]:
        model_format = own_format(self._tokenizer)
        # raises on an unknown format before anything is sampled
        parse_tool_calls("", tools, formats, model_format=model_format)
        with_tools = [
            prompt_with_tools(prompt, tools, self._tokenizer, formats) for prompt in prompts
        ]
        encoded = [self._encode(*each) for each in with_tools]
        visible = {"skip_special_tokens": model_format is None}  # its markers may be special tokens
        answers = await self._sample(encoded, {**params, **visible})
        return [
            CalledAnswer(
                answer.text,
                parse_tool_calls(
                    answer.text,
                    tools,
                    formats,
                    model_format=model_format,
                    thinking=self._tokenizer.think_markers,
                ),
                answer.finish_reason,
                answer.token_ids,
            )
            for each in answers
            for answer in each
        ]

    async def logprobs(
        self, prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> list[np.ndarray]:
        """Return log-softmax(logits) of each response's tokens after its prompt, [T] float32."""
        scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
        pairs = [self._pair(*pair) for pair in zip(prompts, responses, strict=True)]
        requests = [
            Request(_id(), before + after, scored, self.adapter, **carried)
            for before, after, carried in pairs
        ]
        outputs = await self.client.generate_many(requests)
        logprobs = []
        for (before, *_), output in zip(pairs, outputs, strict=True):
            if output.prompt_logprobs is None:
                errors = [completion.error for completion in output.completions]
                raise GenerationFailedError(errors[0] or "the text could not be scored")
            logprobs.append(np.array(output.prompt_logprobs.logprobs[len(before) :], np.float32))
        return logprobs

    async def logits(
        self, prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> list[np.ndarray]:
        """Return [T, vocabulary] float32 for each pair, computed in chunks between the engine's
        steps. Raises
        RequestError: more than MAX_LOGITS_BYTES."""
        pairs = [self._pair(*pair) for pair in zip(prompts, responses, strict=True)]
        client = self.client
        if not isinstance(client, EngineClient):
            raise RequestError("get_logits needs the engine in this process")
        size = 4 * client.vocab_size * sum(len(after) for _, after, _ in pairs)
        if size > MAX_LOGITS_BYTES:
            raise RequestError(
                f"the logits would take {size / 2**30:.1f} GiB, more than {MAX_LOGITS_BYTES >> 30}"
                " GiB: pass fewer responses in a call"
            )
        return [await self._logits(client, *pair) for pair in pairs]

    async def aclose(self) -> None:
        """Do nothing: the engine belongs to its starter."""

    async def _sample(
        self, encoded: Sequence[_Encoded], params: Mapping[str, Any]
    ) -> list[list[Generation]]:
        requests = [self._request(prompt, params, number) for number, prompt in enumerate(encoded)]
        keys = [self._key(request) for request in requests]
        cached = [self._cached(key) for key in keys]
        new = [
            request for request, answers in zip(requests, cached, strict=True) if answers is None
        ]
        outputs = iter(await self.client.generate_many(new) if new else [])
        complete = [_answers(next(outputs)) if answers is None else answers for answers in cached]
        for request, key, answers in zip(requests, keys, complete, strict=True):
            if key is not None and key == self._key(request):  # no publish came between
                self._keep(key, answers)
        return complete

    def _request(self, prompt: _Encoded, params: Mapping[str, Any], number: int) -> Request:
        tokens = prompt.tokens
        room = max(1, self.client.max_model_len - len(tokens))
        sampling = {"max_tokens": min(MAX_NEW_TOKENS, room), **params}
        if number and "seed" in params:
            sampling["seed"] = derive_seed("prompt", params["seed"], number)
        drawn = SamplingParams(**sampling)
        if drawn.stop and prompt.chat:  # they count behind the reasoning
            thinking = thinking_after(self._tokenizer, tokens)
            drawn = replace(drawn, reasoning=None if thinking is None else thinking.reasoning)
        return Request(
            _id(),
            tokens,
            drawn,
            self.adapter,
            opens_text=prompt.chat or self._tokenizer.opens_text(tokens),
            **prompt.carried,
        )

    async def _logits(
        self,
        client: EngineClient,
        before: tuple[int, ...],
        after: tuple[int, ...],
        carried: Mapping[str, Any],
    ) -> np.ndarray:
        first = len(before) - 1
        rows: list[np.ndarray] = []
        if not after:
            return np.zeros((0, client.vocab_size), np.float32)
        params = SamplingParams(max_tokens=0)
        request = Request("logits", before + after, params, self.adapter, **carried)
        text = await asyncio.wrap_future(client.call(lambda engine: engine.begin_logits(request)))
        while not text.finished:
            chunk = await asyncio.wrap_future(
                client.call(lambda engine: engine.scores.next_logits(text))
            )
            start = text.done - len(chunk)
            if start == 0:  # the first chunk, or the base has changed
                rows.clear()
            rows.append(chunk[max(first - start, 0) :])
        return np.concatenate(rows)

    def _encode(self, prompt: Prompt, tools: Any = None) -> _Encoded:
        if isinstance(prompt, str):
            return _Encoded(tuple(self._tokenizer.encode(prompt)))
        if not is_messages(prompt):
            return _Encoded(tuple(prompt))  # type: ignore[arg-type]
        try:
            messages = with_stored_images(prompt, "messages")
        except RolloutRejectedError as error:
            raise RequestError(str(error), param="messages") from error
        options = {"tools": tools, "teach_tools": False, "template_kwargs": self._template_kwargs}
        tokens = tuple(self._tokenizer.render_chat(messages, **options))
        return _Encoded(tokens, chat=True, carried=carried_with(self._tokenizer, messages))

    def _pair(
        self, prompt: Prompt, response: Response
    ) -> tuple[tuple[int, ...], tuple[int, ...], Mapping[str, Any]]:
        """Return the tokens of a prompt and of a response behind it, and what goes with the prompt.
        Raises RequestError: the prompt is empty, so nothing precedes the first token."""
        encoded = self._encode(prompt)
        before, carried = encoded.tokens, encoded.carried
        if not before:
            raise RequestError("prompt: the prompt is empty", param="prompt")
        if not isinstance(response, str):
            return before, tuple(response), carried
        text = (
            self._tokenizer.decode(before, skip_special_tokens=False)
            if carried
            else self._text(prompt, before)
        )
        return before, tuple(self._tokenizer.encode_after(text, response)), carried

    def _text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        """The text of a prompt that has these ids."""
        if isinstance(prompt, str):
            return prompt
        if is_messages(prompt):
            return self._tokenizer.render_chat_text(prompt, template_kwargs=self._template_kwargs)
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    # The greedy cache: sampled answers are never kept, and no answer outlives a change of the
    # weights.

    def _key(self, request: Request) -> Hashable:
        params = request.params
        if self._weights is None or params.temperature != 0:
            return None
        with self._weights.read() as view:
            revision = view.revision
        limits = (params.max_tokens, params.n, params.stop, params.skip_special_tokens)
        prompt = request.prompt_token_ids, digests(request), request.opens_text
        return revision, request.adapter, prompt, limits

    def _cached(self, key: Hashable) -> list[Generation] | None:
        if key not in self._greedy:
            return None
        self._greedy.move_to_end(key)
        return self._greedy[key]

    def _keep(self, key: Hashable, answers: list[Generation]) -> None:
        self._greedy[key] = [replace(answer, cached=True) for answer in answers]
        while len(self._greedy) > CACHED_ANSWERS:
            self._greedy.popitem(last=False)


def _answers(output: RequestOutput) -> list[Generation]:
    """Raises GenerationFailedError, InvalidAnswerError."""
    for completion in output.completions:
        if completion.finish_reason == "error":
            raise failure_of(completion.error, completion.error_code)
    return [Generation.of(completion, output.prompt_token_ids) for completion in output.completions]


def _id() -> str:
    return f"inference-{uuid.uuid4().hex}"

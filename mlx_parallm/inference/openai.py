"""The backend of `InferenceModule` for any OpenAI-compatible endpoint. No MLX.

vLLM's extensions, which this project's server has too, add to OpenAI's protocol: token ids
(`return_token_ids`; once an endpoint refuses the field, requests leave it out), spans of policy
versions, /tokenize, and `echo` with log-probabilities. Nothing is cached, because the endpoint's
weights may change at any time.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.errors import EndpointError, RequestError
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.execution.tool_calls import (
    MalformedCall,
    ParsedCalls,
    ToolCall,
    openai_tools,
    parse_tool_calls,
)
from mlx_parallm.inference.types import (
    MAX_NEW_TOKENS,
    CalledAnswer,
    Generation,
    Prompt,
    Response,
    is_messages,
)
from mlx_parallm.system.log import get_logger

log = get_logger("inference")


class OpenAIBackend:
    """Generates with a server that speaks OpenAI's API, for `InferenceModule`.

    Args:
        model: the model's name in requests.
        open_endpoint: opens a connection to a base URL.
    """

    def __init__(
        self, model: str, base_url: str, open_endpoint: Callable[[str], OpenAIEndpoint]
    ) -> None:
        self._model = model
        self._endpoint = open_endpoint(base_url)
        root = self._endpoint.base_url.removesuffix("/v1")
        self._root = open_endpoint(root)  # serves /tokenize
        self._gives_token_ids = True
        self.completion_tokens = 0  # sum over all answers, counted by the endpoint

    async def generate(
        self, prompts: Sequence[Prompt], params: Mapping[str, Any], *, logprobs: bool
    ) -> list[list[Generation]]:
        return await _all(
            self._answers(prompt, _body(params, number), logprobs)
            for number, prompt in enumerate(prompts)
        )

    async def generate_with_tools(
        self,
        prompts: Sequence[Prompt],
        tools: Sequence[Mapping[str, Any]],
        formats: Any,
        params: Mapping[str, Any],
    ) -> list[CalledAnswer]:
        """Use the endpoint's own `tools`. It takes the calls out of the text, so they have an
        empty place at its end. Calls that it leaves in the text are parsed as usual."""
        parse_tool_calls("", tools, formats)
        bodies = []
        for number, prompt in enumerate(prompts):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if not is_messages(messages):
                raise RequestError("tools: an endpoint needs a text or messages, not token ids")
            bodies.append(
                {"messages": list(messages), "tools": openai_tools(tools), **_body(params, number)}
            )
        replies = await _all(self._post("/chat/completions", body) for body in bodies)
        self.completion_tokens += sum(map(_completion_tokens, replies))
        return [
            _called_answer(choice, tools, formats)
            for reply in replies
            for choice in _choices(reply)
        ]

    async def logprobs(
        self, prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> list[np.ndarray]:
        """Raises EndpointError: the endpoint lacks /tokenize, or does not score prompts.
        RequestError: a prompt is empty, so nothing precedes the first token."""
        return await _all(self._score(*pair) for pair in zip(prompts, responses, strict=True))

    async def logits(
        self, prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> list[np.ndarray]:
        raise RequestError(
            "get_logits needs the model in this process: an OpenAI endpoint returns none"
        )

    async def aclose(self) -> None:
        await self._endpoint.aclose()
        await self._root.aclose()

    async def _answers(
        self, prompt: Prompt, body: dict[str, Any], logprobs: bool
    ) -> list[Generation]:
        if is_messages(prompt):
            scores: dict[str, Any] = {"logprobs": True} if logprobs else {}
            reply = await self._post(
                "/chat/completions", {"messages": list(prompt), **body, **scores}
            )
        else:
            scores = {"logprobs": 0} if logprobs else {}
            text_or_ids = prompt if isinstance(prompt, str) else list(prompt)
            reply = await self._post("/completions", {"prompt": text_or_ids, **body, **scores})
        self.completion_tokens += _completion_tokens(reply)
        return [_answer(choice, reply, logprobs=logprobs) for choice in _choices(reply)]

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        body = {"model": self._model, **body}
        if self._gives_token_ids:
            try:
                return await self._endpoint.post(path, {**body, "return_token_ids": True})
            except EndpointError as error:
                if error.status not in (400, 422) or "return_token_ids" not in str(error):
                    raise
                log.info("the endpoint returns no token ids", url=self._endpoint.base_url)
                self._gives_token_ids = False
        return await self._endpoint.post(path, body)

    async def _score(self, prompt: Prompt, response: Response) -> np.ndarray:
        before = await self._tokens(prompt, special=True)
        if not before:
            raise RequestError("prompt: the prompt is empty", param="prompt")
        after = await self._after(prompt, before, response)
        if not after:
            return np.zeros(0, np.float32)
        body = {
            "model": self._model,
            "prompt": before + after,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
        }
        [choice] = _choices(await self._endpoint.post("/completions", body))
        scores = ((choice.get("logprobs") or {}).get("token_logprobs") or [])[len(before) :]
        if len(scores) != len(after) or None in scores:
            raise EndpointError(
                f"{self._endpoint.base_url} does not score prompts (echo"
                " with logprobs and max_tokens 0)"
            )
        return np.array(scores, np.float32)

    async def _after(self, prompt: Prompt, before: Sequence[int], response: Response) -> list[int]:
        """Return the tokens that a response has behind its prompt, by the rule of
        `Tokenizer.encode_after`."""
        if not isinstance(response, str):
            return list(response)
        if isinstance(prompt, str):
            text = prompt
        else:
            text = str((await self._on_texts("/detokenize", {"tokens": list(before)}))["prompt"])
        for context in (text, "\n"):
            first = await self._tokens(context, special=False)
            both = await self._tokens(context + response, special=False)
            if both[: len(first)] == first:
                return both[len(first) :]
        return await self._tokens(response, special=False)

    async def _tokens(self, text: Prompt, *, special: bool) -> list[int]:
        if isinstance(text, str):
            body: dict[str, Any] = {"prompt": text, "add_special_tokens": special}
        elif is_messages(text):
            body = {"messages": list(text)}
        else:
            return list(text)  # type: ignore[arg-type]
        return [int(token) for token in (await self._on_texts("/tokenize", body))["tokens"]]

    async def _on_texts(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._root.post(path, {"model": self._model, **body})
        except EndpointError as error:
            if error.status in (404, 405):
                raise EndpointError(
                    f"get_logprobs of texts needs {path}, which vLLM and mlx_parallm have"
                    f" ({error}); pass token ids instead",
                    status=error.status,
                ) from error
            raise


async def _all(coroutines: Any) -> list[Any]:
    """Return the results; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _body(params: Mapping[str, Any], number: int) -> dict[str, Any]:
    body = {"max_tokens": MAX_NEW_TOKENS, **params}
    if "stop" in body:
        body["stop"] = list(body["stop"])
    if number and "seed" in body:
        body["seed"] = derive_seed("prompt", body["seed"], number)
    return body


def _completion_tokens(reply: Mapping[str, Any]) -> int:
    """Return the endpoint's count; 0 if it gives none, or no number."""
    usage = reply.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0


def _choices(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the choices in order. Raises EndpointError."""
    choices = reply.get("choices")
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, dict) for choice in choices)
    ):
        raise EndpointError(f"the endpoint's answer has no choices: {reply!r:.200}")
    return sorted(choices, key=lambda choice: choice.get("index", 0))


def _answer(choice: Mapping[str, Any], reply: Mapping[str, Any], *, logprobs: bool) -> Generation:
    message, block = choice.get("message"), choice.get("logprobs") or {}
    text = (message.get("content") if isinstance(message, dict) else choice.get("text")) or ""
    scores = block.get("token_logprobs")
    if block.get("content") is not None:
        scores = [entry["logprob"] for entry in block["content"]]
    if logprobs and scores is None:
        raise EndpointError("the endpoint returns no log-probabilities of its answers")
    prompt_token_ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
    return Generation(
        text=text,
        token_ids=None if choice.get("token_ids") is None else tuple(choice["token_ids"]),
        logprobs=None if scores is None else tuple(scores),
        finish_reason=str(choice.get("finish_reason")),
        policy_versions=tuple(
            span["version"]
            for span in choice.get("weight_versions") or ()
            for _ in range(span["start"], span["end"])
        ),
        prompt_token_ids=None if prompt_token_ids is None else tuple(prompt_token_ids),
    )


def _called_answer(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], formats: Any
) -> CalledAnswer:
    text, calls = _called(choice, tools, formats)
    ids = choice.get("token_ids")
    finish = str(choice.get("finish_reason"))
    return CalledAnswer(text, calls, finish, None if ids is None else tuple(ids))


def _called(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], formats: Any
) -> tuple[str, ParsedCalls]:
    message = choice.get("message") or {}
    text = message.get("content") or ""
    if not message.get("tool_calls"):
        return text, parse_tool_calls(text, tools, formats)
    calls, malformed = [], []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["function"].get("arguments") or "{}")
            if not isinstance(arguments, dict):
                raise TypeError("its arguments are not an object")
            calls.append(ToolCall(call["function"]["name"], arguments, "", len(text), len(text)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            malformed.append(MalformedCall(f"{call!r:.200}: {error}", "", len(text), len(text)))
    return text, ParsedCalls(calls, malformed)

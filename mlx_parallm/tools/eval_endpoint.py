"""An OpenAI-compatible endpoint in the place of the engine, for environments that `EpisodeRunner` plays. No MLX.

Its tokens are not known, so characters stand for them: `CharacterTokenizer` writes a conversation down with marks that
no text may hold, `EndpointPolicy` reads it back and asks for the next turn.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.errors import EndpointError, RequestError
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.types import Completion, FinishReason, Request, RequestOutput

OPEN, SAID, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"  # Unicode's noncharacters
_NO_MARKS = dict.fromkeys(map(ord, (OPEN, SAID, CLOSE)))
UNBOUNDED = 2**31 - 1  # the endpoint refuses what is too long for its model
SEEDS = 2**31


class CharacterTokenizer:
    """`types.ChatTokenizer`: a token is a character."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return self.encode(self.render_chat_text(messages, **options))

    def render_chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Fields of the request, then the messages. Raises RequestError: a message that is not role and text."""
        fields = {"tools": tools and list(tools), "chat_template_kwargs": template_kwargs and dict(template_kwargs)}
        text = _entry("", json.dumps({name: value for name, value in fields.items() if value}))
        for message in messages:
            if set(message) != {"role", "content"} or not isinstance(message["content"], str):
                raise RequestError(f"an endpoint is asked with role and content alone, not with {dict(message)}")
            text += _entry(message["role"], message["content"])
        return text + (f"{OPEN}assistant{SAID}" if add_generation_prompt else "")

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


class EndpointPolicy:
    """`types.PolicyClient`. `completion_tokens`: of all answers, as far as the endpoint says."""

    max_model_len = UNBOUNDED

    def __init__(self, endpoint: OpenAIEndpoint, model: str) -> None:
        self._endpoint, self._model = endpoint, model
        self.completion_tokens = 0

    async def generate(self, request: Request) -> RequestOutput:
        """A call for each completion: not every endpoint knows `n`. Raises EndpointError."""
        route, asked = _asked("".join(map(chr, request.prompt_token_ids)))
        params = request.params
        body: dict[str, Any] = {"model": self._model, **asked, "temperature": params.temperature}
        body |= {"top_p": params.top_p} if params.top_p < 1 else {}
        body |= {"stop": list(params.stop)} if params.stop else {}
        body |= {"max_tokens": params.max_tokens} if params.max_tokens is not None else {}
        calls = []
        for index in range(params.n):
            seed = {} if params.seed is None else {"seed": (params.seed + index) % SEEDS}
            calls.append(self._complete(route, body | seed, index))
        completions = await asyncio.gather(*calls)
        return RequestOutput(request.request_id, request.prompt_token_ids, tuple(completions))

    async def generate_many(self, requests: Sequence[Request]) -> list[RequestOutput]:
        return list(await asyncio.gather(*map(self.generate, requests)))

    async def _complete(self, route: str, body: Mapping[str, Any], index: int) -> Completion:
        reply = await self._endpoint.post(route, body)
        try:
            choice = reply["choices"][0]
            said = choice["message"]["content"] if "message" in choice else choice["text"]
            reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
            text = str(said or "").translate(_NO_MARKS)
            self.completion_tokens += int((reply.get("usage") or {}).get("completion_tokens") or 0)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            answer = json.dumps(reply)[:200]
            raise EndpointError(f"{self._endpoint.base_url}{route} answered what OpenAI does not: {answer}") from error
        count = len(text)
        return Completion(
            index=index,
            text=text,
            token_ids=tuple(map(ord, text)),
            logprobs=(0.0,) * count,
            processed_logprobs=None,
            top_logprobs=None,
            policy_versions=(-1,) * count,
            finish_reason=reason,
        )


def _entry(role: str, content: str) -> str:
    return f"{OPEN}{role}{SAID}{content.translate(_NO_MARKS)}{CLOSE}"


def _asked(text: str) -> tuple[str, dict[str, Any]]:
    """(route, what a request says but for how to sample) of a conversation, or of a text for the model as it is."""
    if not text.startswith(OPEN):
        return "/completions", {"prompt": text}
    fields, *turns, _ = [entry.removesuffix(CLOSE).split(SAID, 1) for entry in text[1:].split(OPEN)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return "/chat/completions", {"messages": messages, **json.loads(fields[1])}

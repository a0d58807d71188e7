"""A client that honours the EngineClient contract with scripted answers: for orders, delays and
failures that a real engine cannot be made to show on demand."""

import asyncio
from collections.abc import Callable, Sequence

from mlx_parallm.types import Completion, Request, RequestOutput

Answer = Callable[[Request, int], str | Exception | Completion]


class ScriptedClient:
    max_model_len = 2048

    def __init__(
        self, tokenizer, answer: Answer, *, gate: Callable[[Request], float | None] | None = None
    ) -> None:
        """`answer(request, choice)` is the text; `gate(request)` the turns of the loop to wait,
        None = for ever."""
        self.tokenizer, self.answer, self.gate = tokenizer, answer, gate
        self.requests: list[Request] = []
        self.calls: list[list[str]] = []  # ids of each call
        self.aborted: list[str] = []
        self.version = 0

    async def generate(self, request: Request) -> RequestOutput:
        self.calls.append([request.request_id])
        return await self._one(request)

    async def generate_many(self, requests: Sequence[Request]) -> list[RequestOutput]:
        self.calls.append([request.request_id for request in requests])
        return list(await asyncio.gather(*(self._one(request) for request in requests)))

    async def _one(self, request: Request) -> RequestOutput:
        self.requests.append(request)
        try:
            turns = self.gate(request) if self.gate else 0
            if turns is None:
                await asyncio.Event().wait()
            for _ in range(int(turns)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        completions = tuple(self._completion(request, choice) for choice in range(request.params.n))
        return RequestOutput(request.request_id, request.prompt_token_ids, completions)

    def _completion(self, request: Request, choice: int) -> Completion:
        answer = self.answer(request, choice)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Completion):
            return answer
        ids = (
            *self.tokenizer.encode(answer, add_special_tokens=False),
            end_of_turn(self.tokenizer),
        )
        return finished(choice, answer, ids, version=self.version)


def end_of_turn(tokenizer) -> int:
    """The EOS that the tiny model's template closes a turn with."""
    [token] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert token in tokenizer.eos_token_ids
    return token


def finished(
    choice: int, text: str, ids: Sequence[int], *, reason="stop", version=0, error=None
) -> Completion:
    size = len(ids)
    logprobs = tuple(-0.5 - 0.01 * position for position in range(size))
    return Completion(
        choice,
        text,
        tuple(ids),
        logprobs,
        None,
        None,
        (version,) * size,
        reason,
        error=error,
        prompt_version=version,
    )

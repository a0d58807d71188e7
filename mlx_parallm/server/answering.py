"""From engine requests to an HTTP answer, whole or streamed: the one way of the routes that can stream.

route → respond(…, Answer) → generation.run → Answer.whole → JSON
                           → generation.stream → Answer.chunks → EventStream
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response

from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation import run, stream
from mlx_parallm.server.protocol.answers import last_version, usage, usage_of, version_spans
from mlx_parallm.server.sse import EventStream
from mlx_parallm.types import CompletionDelta, Request, RequestOutput, ServedModel


class Answer(ABC):
    """What one HTTP request's answer looks like. `head`: with what the answer, or each of its chunks, begins."""

    def __init__(self, context: ServerContext, model: ServedModel, head: dict[str, Any]) -> None:
        self.context, self.model, self.head = context, model, head

    @abstractmethod
    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer but for its head, usage and policy version."""

    @abstractmethod
    def chunks(self, index: int, delta: CompletionDelta) -> list[dict[str, Any]]:
        """What the stream says of a delta: the last one has one choice, the delta's. `index`: the choice's in the
        answer (choices of a request's second prompt come after all of the first's)."""


async def respond(
    answer: Answer,
    http_request: HTTPRequest,
    requests: Sequence[Request],
    *,
    streamed: bool,
    include_usage: bool,
    client_id: str | None = None,
) -> Response:
    """Runs the requests. `include_usage`: a stream ends with a chunk of it. Raises as `generation.run`."""
    if streamed:
        events = _events(answer, requests, include_usage, client_id)
        return await EventStream(events).prefetch(http_request.receive)
    outputs = await run(answer.context, http_request, requests, client_id)
    version = last_version(outputs, answer.model.policy_version)
    return JSONResponse({**answer.head, **answer.whole(outputs), "usage": usage_of(outputs), "policy_version": version})


async def _events(
    answer: Answer, requests: Sequence[Request], include_usage: bool, client_id: str | None
) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks; a choice's last one has the versions that it was sampled under. Closing it aborts the requests."""
    versions: dict[int, list[int]] = defaultdict(list)  # by choice
    generated = cached = 0
    async with aclosing(stream(answer.context, requests, client_id)) as deltas:
        async for position, delta in deltas:
            generated += len(delta.token_ids)
            cached += delta.cached_tokens
            index = position * requests[0].params.n + delta.index
            versions[index] += delta.policy_versions
            chunks = answer.chunks(index, delta)
            if delta.finish_reason is not None:
                spans = version_spans(tuple(versions[index]))
                chunks[-1]["choices"][0] |= {"stop_reason": delta.stop_reason, "weight_versions": spans}
                chunks[-1]["policy_version"] = (versions[index] or [answer.model.policy_version])[-1]
            for chunk in chunks:
                yield answer.head | chunk
    if include_usage:
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        yield answer.head | {"choices": [], "usage": usage(prompt_tokens, generated, cached)}

"""/v1/hybrid/chat/completions: the served planner answers with the tools and experts of the run's
hybrid environment.

An OpenAI client with base_url "http://…/v1/hybrid" uses it as any chat model. The planner's turns
are sampled by the engine with the weights of that moment; the answer is the text of ANSWER:, and
`steps` has what was done on the way.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from mlx_parallm.errors import EngineUnavailableError, RequestError
from mlx_parallm.inference.types import MAX_NEW_TOKENS
from mlx_parallm.server.app import AddedRouter
from mlx_parallm.server.protocol.fields import ListOf
from mlx_parallm.server.protocol.openai import MAX_MESSAGES
from mlx_parallm.server.protocol.strict_json import StrictJSONRoute
from mlx_parallm.systems.orchestrator.orchestrator import Orchestrator, OrchestratorStep

NO_ANSWER = "length"  # OpenAI's reason for an answer that a limit ended


class HybridMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str


class HybridRequest(BaseModel):
    """The supported part of OpenAI's body; another field is an error."""

    model_config = ConfigDict(extra="forbid")

    messages: ListOf[HybridMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str = "default"
    max_tokens: int = Field(MAX_NEW_TOKENS, ge=1, description="of one turn of the planner")
    temperature: float = Field(0.0, ge=0)
    stop: str | ListOf[str] | None = None
    stream: bool = False


@dataclass(frozen=True)
class ServedPlanner:
    """The part of an environment that the route uses. `inference`: None while there is no
    engine."""

    begin: Callable[[], Orchestrator]
    opening: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]
    inference: Callable[[], Any]


def hybrid_router(planner: ServedPlanner) -> AddedRouter:
    """Return the routes of one environment. If a run has several, the first one answers."""
    router = APIRouter(
        prefix="/v1/hybrid",
        route_class=StrictJSONRoute,
        default_response_class=JSONResponse,
        tags=["openai"],
    )

    @router.post("/chat/completions")
    async def chat(body: HybridRequest) -> dict[str, Any]:
        """Answer with tools and experts. `steps`: kind, name, written, result, error of each
        action."""
        if body.stream:
            raise RequestError(
                "stream: an answer with tools comes whole; leave stream out", param="stream"
            )
        return await answer(planner, body)

    return AddedRouter(router)


async def answer(planner: ServedPlanner, body: HybridRequest) -> dict[str, Any]:
    """Play one episode for a client; return OpenAI's chat completion. Raises
    EngineUnavailableError, RequestError."""
    inference, orchestrator = planner.inference(), planner.begin()
    if inference is None:
        raise EngineUnavailableError("the environment has no engine yet")
    messages = planner.opening([message.model_dump() for message in body.messages])
    orchestrator.reset({"prompt": messages})
    steps, prompt_tokens, completion_tokens = [], 0, 0
    while not orchestrator.done:
        result = await inference.agenerate(
            [messages], body.max_tokens, temperature=body.temperature, stop=body.stop
        )
        text = result[0]
        prompt_tokens += len(result.metadata["prompt_token_ids"][0] or ())
        completion_tokens += len(result.token_ids[0])
        step = await asyncio.to_thread(orchestrator.step_text, text)
        steps.append(_shown(step, text))
        messages = [
            *messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": step.text},
        ]
    message = {"role": "assistant", "content": orchestrator.answer or ""}
    reason = NO_ANSWER if orchestrator.answer is None else "stop"
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "steps": steps,
    }


def _shown(step: OrchestratorStep, written: str) -> dict[str, Any]:
    info = step.info
    return {
        "kind": info["kind"],
        "name": info["name"],
        "written": written,
        "result": step.text,
        "error": info["error"],
    }

"""An engine face without a model, for what the real one cannot be made to do on demand: fail,
hang, stall."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from mlx_parallm.errors import EngineUnavailableError, ModelNotFoundError
from mlx_parallm.types import (
    Completion,
    CompletionDelta,
    EngineStats,
    Request,
    RequestOutput,
    ServedModel,
    Structure,
)

HEALTHY = EngineStats(
    alive=True,
    ready=True,
    steps=3,
    last_step_time=0.0,
    running=0,
    waiting=0,
    prompt_tokens=0,
    prefill_tokens=0,
    generation_tokens=0,
    requests_finished=0,
    requests_failed=0,
    requests_aborted=0,
    policy_version=0,
)


class TimeFromTheHang:
    """In place of the `asyncio` of the server's layers: a request's time limit begins where the
    engine hangs. A busy machine may need all of a short one to come there."""

    def __init__(self, engine: "FakeEngine") -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        limit = asyncio.timeout(None)
        if seconds is not None:
            self._engine.limits.append((limit, seconds))
        return limit


class FakeEngine:
    """Answers token 5 `max_tokens` times; `behaviour` is what goes wrong: "fail", "crash",
    "unavailable" or "hang"."""

    max_model_len, engines = 128, 1

    def __init__(self, behaviour: str = "answer") -> None:
        self.behaviour = behaviour
        self.running = 0
        self.cancelled = 0
        self.current = HEALTHY
        self.limits: list[tuple[asyncio.Timeout, float]] = []  # that begin in a hang

    def stats(self) -> EngineStats:
        if self.current is not HEALTHY:
            return self.current
        return replace(
            HEALTHY,
            last_step_time=time.monotonic(),
            running=self.running,
            requests_aborted=self.cancelled,
        )

    def rank_stats(self) -> dict[int, EngineStats]:
        return {}

    def stall(self, seconds: float) -> None:
        self.current = replace(HEALTHY, running=1, last_step_time=time.monotonic() - seconds)

    def models(self) -> tuple[ServedModel, ...]:
        return (ServedModel("fake", None, "fake", None, 0),)

    def shelved_models(self) -> tuple[ServedModel, ...]:
        return ()

    async def unenforced(self, structure: Structure) -> tuple[str, ...]:
        return ()

    def resolve_model(self, name: str) -> ServedModel:
        if name not in ("fake", "default"):
            raise ModelNotFoundError(name, ["fake"])
        return self.models()[0]

    async def generate_many(self, requests: list[Request]) -> list[RequestOutput]:
        await self._misbehave()
        return [self._output(request) for request in requests]

    async def stream(self, request: Request) -> AsyncGenerator[CompletionDelta, None]:
        await self._misbehave(before_first=True)
        yield CompletionDelta(0, "a", (5,), (-0.5,), None, (0,))
        await self._misbehave()
        yield CompletionDelta(0, "a", (5,), (-0.5,), None, (1,), finish_reason="length")

    async def _misbehave(self, before_first: bool = False) -> None:
        if self.behaviour == "unavailable":
            raise EngineUnavailableError("the engine is draining")
        if before_first:
            return
        if self.behaviour == "crash":
            raise ZeroDivisionError("secret detail")
        if self.behaviour == "hang":
            self.running += 1
            if self.limits:
                limit, seconds = self.limits.pop()
                limit.reschedule(asyncio.get_running_loop().time() + seconds)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.running -= 1

    def _output(self, request: Request) -> RequestOutput:
        count = request.params.max_tokens or 4
        failed = self.behaviour == "fail"
        completions = tuple(
            Completion(
                index=index,
                text="a" * count,
                token_ids=(5,) * count,
                logprobs=(float("-inf"),) * count,
                processed_logprobs=None,
                top_logprobs=None,
                policy_versions=(0,) * (count - 1) + (1,),
                finish_reason="error" if failed else "length",
                error="the row produced NaN" if failed else None,
            )
            for index in range(request.params.n)
        )
        return RequestOutput(request.request_id, request.prompt_token_ids, completions)

"""Tinker's routes below /api/v1: sessions, promises, training, sampling. rest.py has runs and
checkpoints.

A faulty request is either answered with an HTTP status at once (a body that cannot be
read, an unknown session), or by its promise: 200 with `{"error", "category"}`, which the SDK raises
as RequestFailedError.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from mlx_parallm.errors import RefusedError, RequestError
from mlx_parallm.faces.tinker import bodies
from mlx_parallm.faces.tinker.checkpoints import display, shown_metadata
from mlx_parallm.faces.tinker.pace import Pace
from mlx_parallm.faces.tinker.promises import POLL_S
from mlx_parallm.faces.tinker.sampling import Sampling
from mlx_parallm.faces.tinker.service import TinkerService
from mlx_parallm.faces.tinker.wire import (
    BodyTooLargeError,
    decompressed,
    leading_number,
    read_forward_backward,
)
from mlx_parallm.faces.tinker.wire_counts import CHUNK_DATUMS
from mlx_parallm.server.context import Context
from mlx_parallm.server.errors import request_error
from mlx_parallm.server.protocol.strict_json import StrictJSONRoute

PREFIX = "/api/v1"
MOST_DECOMPRESSED = 256 << 20
IN_A_THREAD = 1 << 18  # bytes of a body whose parsing would hold up the event loop
CHUNK_BYTES = 24_000_000  # limit of a forward_backward request: below the server's body limit
# bodies that are decompressed and read at once: each may take MOST_DECOMPRESSED twice
LARGE_AT_ONCE = 2
LONGEST_REASON = 64  # characters
Service = Callable[[], TinkerService]


def tinker_router() -> APIRouter:
    return APIRouter(
        prefix=PREFIX,
        route_class=StrictJSONRoute,
        default_response_class=JSONResponse,
        tags=["tinker"],
    )


def add_routes(router: APIRouter, service: Service, sampling: Callable[[], Sampling]) -> None:
    """`service`, `sampling`: called once the model is loaded."""
    _client_routes(router, service)
    _session_routes(router, service)
    many = APIRouter(route_class=_paced_route(Pace()), default_response_class=JSONResponse)
    _future_routes(router, many, service, sampling)
    _sampling_routes(router, many, service, sampling)
    router.include_router(many)
    numbered = APIRouter(route_class=_numbered_route(service), default_response_class=JSONResponse)
    _training_routes(router, numbered, service)
    _saving_routes(numbered, service)
    router.include_router(numbered)


def _client_routes(router: APIRouter, service: Service) -> None:
    @router.post("/client/config")
    async def client_config(body: bodies.ClientConfigBody) -> dict[str, Any]:
        return {
            "sample_use_retrieve_futures": True,  # one poll a sampling client, not one a sample
            "fwdbwd_max_chunk_len": CHUNK_DATUMS,  # so that a batch is one request
            "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
        }

    @router.post("/client/dynamic_config")
    async def dynamic_config(body: bodies.ClientConfigBody) -> dict[str, Any]:
        return {"refresh_interval_sec": 3600, "sample_cancel_enabled": True}

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        model = {
            "model_name": service().base_model,
            "max_context_length": service().engine.max_model_len,
        }
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    @router.post("/telemetry")
    async def telemetry(request: Request) -> dict[str, str]:
        return {"status": "accepted"}  # nothing is kept


def _session_routes(router: APIRouter, service: Service) -> None:
    @router.post("/create_session")
    async def create_session(body: bodies.CreateSessionBody) -> dict[str, Any]:
        session = service().create_session(body)
        warning = (
            None
            if service().learner.trains_head
            else "train_unembed has no effect: the head is the embedding"
        )
        return {"type": "create_session", "session_id": session.session_id, "info_message": warning}

    @router.post("/session_heartbeat")
    async def heartbeat(body: bodies.SessionBody) -> dict[str, str]:
        service().session(body.session_id, status=410)
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, request: Request) -> dict[str, str]:
        sent = await request.json() if await request.body() else None
        reason = sent.get("reason") if isinstance(sent, dict) else None
        kind = reason.get("type") if isinstance(reason, dict) else "success"
        service().finish(session_id, kind[:LONGEST_REASON] if isinstance(kind, str) else "unknown")
        return {"status": "ok"}

    @router.get("/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        newest = sorted(service().sessions.values(), key=lambda session: -session.created)
        return {"sessions": [session.session_id for session in newest[offset : offset + limit]]}

    @router.get("/sessions/{session_id}")
    async def session(session_id: str) -> dict[str, Any]:
        stored = service().session(session_id)
        metadata = shown_metadata(stored.user_metadata or {})
        answer = {
            "training_run_ids": stored.models,
            "sampler_ids": stored.samplers,
            "user_metadata": metadata,
        }
        return answer | {"display_name": stored.display_name and display(stored.display_name)}


def _future_routes(
    router: APIRouter, many: APIRouter, service: Service, sampling: Callable[[], Sampling]
) -> None:
    @many.post("/retrieve_future")
    async def retrieve(body: bodies.RetrieveBody, context: Context) -> Response:
        promises = service().promises
        promise = promises.find(body.request_id)
        result = await promises.wait(promise, _poll_s(context), lambda: context.deps.state.draining)
        if result is not None:
            return Response(result.body, media_type=result.media_type)
        answer: dict[str, Any] = {
            "type": "try_again",
            "request_id": body.request_id,
            "queue_state": "active",
        }
        if reason := promise.reason():
            answer["queue_state_reason"] = reason
        return JSONResponse(answer)

    @router.post("/retrieve_futures")
    async def retrieve_many(body: bodies.RetrieveManyBody, context: Context) -> dict[str, Any]:
        service().promises.forget(body.retrieved_request_ids)
        most = _poll_s(context)
        seconds = most if body.timeout is None else min(max(body.timeout, 0.0), most)
        state = context.deps.state
        events, cursor = await sampling().completions(
            body.target, body.prev_cursor, seconds, lambda: state.draining
        )
        return {"completions": events, "cursor": cursor}

    @router.post("/cancel_future")
    async def cancel(body: bodies.CancelBody) -> dict[str, str]:
        service().promises.find(body.request_id).cancel()
        return {"status": "ok"}


def _poll_s(context: Context) -> float:
    """Return the seconds for which a poll is held. It ends before the server's time limit would
    make an error of it."""
    limit = context.deps.config.request_timeout_s  # 0 = none
    return min(POLL_S, limit / 2) if limit else POLL_S


def _training_routes(router: APIRouter, numbered: APIRouter, service: Service) -> None:
    @router.post("/create_model")
    async def create_model(body: bodies.CreateModelBody) -> dict[str, Any]:
        return service().create_model(body).answer()

    @router.post("/get_info")
    async def get_info(body: bodies.ModelBody) -> dict[str, Any]:
        model, name = service().model(body.model_id), service().base_model
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_data": {"model_name": name, "tokenizer_id": service().tokenizer_id},
            "is_lora": True,
            "lora_rank": model.run.lora["rank"],
            "model_name": name,
            "optimizer_config": {"type": "adamw"},
        }

    @router.post("/unload_model")
    async def unload_model(body: bodies.ModelBody) -> dict[str, Any]:
        service().model(body.model_id)
        service().unload(body.model_id)
        return {"type": "unload_model", "model_id": body.model_id}

    places = asyncio.Semaphore(LARGE_AT_ONCE)

    @numbered.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        body, encoding = await request.body(), request.headers.get("content-encoding", "")

        def read() -> Any:
            return read_forward_backward(decompressed(body, encoding, MOST_DECOMPRESSED))

        if not encoding and len(body) <= IN_A_THREAD:
            return service().forward_backward(read()).answer()
        async with places:
            content = await asyncio.to_thread(read)
        return service().forward_backward(content).answer()

    @numbered.post("/optim_step")
    async def optim_step(body: bodies.OptimStepBody) -> dict[str, Any]:
        return service().optim_step(body).answer()


def _saving_routes(numbered: APIRouter, service: Service) -> None:
    @numbered.post("/save_weights")
    async def save_weights(body: bodies.SaveWeightsBody) -> dict[str, Any]:
        return service().save_weights(body).answer()

    @numbered.post("/save_weights_for_sampler")
    async def save_for_sampler(body: bodies.SaveForSamplerBody) -> dict[str, Any]:
        return service().save_for_sampler(body).answer()

    @numbered.post("/load_weights")
    async def load_weights(body: bodies.LoadWeightsBody) -> dict[str, Any]:
        return service().load_model(body).answer()

    @numbered.post("/save_weights_external")
    async def save_external(body: bodies.SaveExternalBody) -> dict[str, Any]:
        return service().save_external(body).answer()


def _sampling_routes(
    router: APIRouter, many: APIRouter, service: Service, sampling: Callable[[], Sampling]
) -> None:
    @router.post("/create_sampling_session")
    async def create_sampling_session(body: bodies.SamplingSessionBody) -> dict[str, Any]:
        session = service().session(body.session_id)
        made = await service().create_sampler(
            session, body.sampling_session_seq_id, body.base_model, body.model_path
        )
        return {"type": "create_sampling_session", "sampling_session_id": made.sampler_id}

    @router.get("/samplers/{sampler_id}")
    async def sampler(sampler_id: str) -> Response:
        stored = service().sampling.get(sampler_id)
        if stored is None:
            raise RefusedError(f"there is no sampler {sampler_id!r}", 404)
        answer = {
            "sampler_id": sampler_id,
            "base_model": stored.base_model,
            "model_path": stored.model_path,
        }
        return JSONResponse(answer)

    @many.post("/asample")
    async def asample(body: bodies.SampleBody) -> dict[str, Any]:
        return (await sampling().sample(body)).answer()


def _paced_route(pace: Pace) -> type[StrictJSONRoute]:
    """The class of routes that clients call hundreds of times at once."""

    class PacedRoute(StrictJSONRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def paced(request: Request) -> Response:
                await pace.turn()
                return await handler(request)

            return paced

    return PacedRoute


# ---------------------------------------------------------------------- requests that cannot be run


def _numbered_route(service: Service) -> type[StrictJSONRoute]:
    """The class of routes whose requests have `model_id` and `seq_id`.

    The SDK takes a number before it sends, and continues with the next one after an error. A number
    that never comes would leave all later requests of the model waiting for it, so what cannot be
    run takes its turn and fails as a promise.
    """

    class NumberedRoute(StrictJSONRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler, kind = super().get_route_handler(), self.path_format.rpartition("/")[2]

            async def answer(request: Request) -> Response:
                body = await request.body()

                async def again() -> Any:
                    return {"type": "http.request", "body": body, "more_body": False}

                try:
                    return await handler(Request(request.scope, again))
                except (RequestError, RequestValidationError, HTTPException) as error:
                    number = None if isinstance(error, RefusedError) else _number(error, kind, body)
                    if number is None:
                        raise
                    content = blake2b(body, digest_size=16).digest()
                    return JSONResponse(
                        service().refuse(*number, kind, _why(error), content).answer()
                    )

            return answer

    return NumberedRoute


def _why(error: RequestError | RequestValidationError | HTTPException) -> str:
    if isinstance(error, RequestValidationError):
        error = request_error(error.errors())
    return display(str(error.detail) if isinstance(error, HTTPException) else str(error))


def _number(error: Exception, kind: str, body: bytes) -> tuple[str, int] | None:
    """The model and the number of a request that was refused; None if they cannot be read, or
    it has none."""
    if kind == "forward_backward":
        numbered = leading_number(error.leading if isinstance(error, BodyTooLargeError) else body)
        return numbered if numbered and numbered[1] > 0 else None
    if isinstance(error, HTTPException) and error.status_code != 400:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model, seq_id = (
        (value.get("model_id"), value.get("seq_id")) if isinstance(value, dict) else (None, None)
    )
    return (
        (model, seq_id) if isinstance(model, str) and type(seq_id) is int and seq_id > 0 else None
    )

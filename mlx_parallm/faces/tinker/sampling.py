"""Samples: a request of the API → the engine's request → protobuf. Server's thread only.

Log-probabilities of sampled tokens are those of the tempered distribution, before top_k and top_p;
those of the prompt are at temperature 1. A `stop` that is sent takes the place of the end of the
text: `[]` lets nothing stop a sample. What ended a sample belongs to it, once.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from mlx_parallm.engine.validation import alternatives
from mlx_parallm.errors import ParallmError, RefusedError, RequestError
from mlx_parallm.faces.tinker.bodies import FuturesTarget, SampleBody, SamplingParamsBody
from mlx_parallm.faces.tinker.pace import Pace
from mlx_parallm.faces.tinker.promises import (
    Promise,
    PromiseResult,
    failure,
    failure_of,
    protobuf_result,
)
from mlx_parallm.faces.tinker.run_log import SampleRecord
from mlx_parallm.faces.tinker.service import TinkerService
from mlx_parallm.faces.tinker.sessions import Completions, Sampler
from mlx_parallm.faces.tinker.wire import DrawnSample, write_samples
from mlx_parallm.server.context import AlternativesHeld
from mlx_parallm.server.errors import ServerBusyError
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Completion, Request, RequestOutput, SamplingParams, TopLogprob

CLONE = 1_000_000_000  # seq_ids of a copied sampling client begin at a multiple of it
KEPT_SAMPLES = 1 << 17  # requests that are known by their number
# that an answer of retrieve_futures waits for more while samples run: a group takes one poll, not
# many
GATHER_S = 0.02
WRITTEN_AT_ONCE = 4096  # tokens; more are written by another thread
NOT_OFFERED = {
    "target_prompt_logprobs": "log-probabilities of other tokens at the prompt's positions",
    "prompt_alt_tokens_k": "draws at every position of the prompt",
    "record_stability_info": "what stable_reinforce needs, whose formula is not published",
}

log = get_logger("tinker")


class Sampling:
    def __init__(self, service: TinkerService) -> None:
        self._service = service
        self._known: dict[tuple[str, int], Promise] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0  # samples, of all requests
        self._alternatives = AlternativesHeld()
        self._pace = Pace()

    async def sample(self, body: SampleBody) -> Promise:
        """Begin the samples of a request. Raises RequestError: it cannot be run;
        ServerBusyError: too many run."""
        sampler = await self._sampler(body)
        key = None if body.seq_id is None else (sampler.sampler_id, body.seq_id)
        if key is not None and (earlier := self._known.get(key)) is not None:
            return earlier
        service = self._service
        if self._running and self._running + body.num_samples > service.config.max_samples:
            raise ServerBusyError(
                f"{self._running} samples run or wait (tinker.max_samples); try again"
            )
        params, prompt = _params(body), _prompt(body)
        checked = Request("tinker", prompt, params, sampler.adapter)
        service.engine.check(checked)
        line = None if key is None else sampler.line(key[1] // CLONE)
        ended = ExitStack()
        ended.enter_context(
            self._alternatives.holding(alternatives(checked, service.engine.max_model_len))
        )
        with ExitStack() as on_error:
            on_error.push(ended)
            promise = service.promises.new(sample_count=body.num_samples)
            on_error.pop_all()
        if key is not None and line is not None:
            self._known[key] = promise
            while len(self._known) > KEPT_SAMPLES:
                del self._known[next(iter(self._known))]
            line.running += 1
            promise.on_result.append(partial(_completed, line))
        request = Request(promise.request_id, prompt, params, sampler.adapter)
        task = asyncio.create_task(self._run(promise, request, body, sampler))
        self._tasks.add(task)
        self._running += body.num_samples
        task.add_done_callback(lambda done: self._ended(done, body.num_samples, ended))
        promise.cancel = task.cancel
        return promise

    def _ended(self, task: "asyncio.Task[None]", count: int, ended: ExitStack) -> None:
        self._tasks.discard(task)
        self._running -= count
        ended.close()

    async def completions(
        self, target: FuturesTarget, cursor: int, seconds: float, ending: Callable[[], bool]
    ) -> tuple[list[object], int]:
        """Wait for an event after `cursor`, at most `seconds`. Return the samples that have ended
        since, and the number of the last event."""
        sampler = self._service.sampling.get(target.sampling_session_id)
        if sampler is None:
            raise RefusedError(
                f"sampling session {target.sampling_session_id!r} is unknown: the server was"
                " restarted, and its samples are lost",
                410,
            )
        line = sampler.line(target.cloned_sampler_id)
        seen = max(min(cursor, line.first + len(line.events)) - line.first, 0)
        del line.events[:seen]
        line.first += seen
        deadline = time.monotonic() + seconds
        while not line.events and not ending() and (left := deadline - time.monotonic()) > 0:
            await _news(line, min(left, 1.0))
        gathered = time.monotonic() + GATHER_S
        while line.events and line.running and (left := gathered - time.monotonic()) > 0:
            await _news(line, left)
        return list(line.events), line.first + len(line.events)

    async def _sampler(self, body: SampleBody) -> Sampler:
        if body.sampling_session_id is None:
            raise RequestError("asample needs a sampling_session_id (SDKs send one since 0.18)")
        sampler = self._service.sampling.get(body.sampling_session_id)
        if sampler is None:
            raise RefusedError(
                f"sampling session {body.sampling_session_id!r} is unknown: its model was"
                " unloaded, or the server was"
                " restarted. Make a new sampling client",
                404,
            )
        session = self._service.sessions.get(sampler.session_id)
        if session is not None:
            session.last_seen = time.time()
        return sampler

    async def _run(
        self, promise: Promise, request: Request, body: SampleBody, sampler: Sampler
    ) -> None:
        promises = self._service.promises
        try:
            promises.resolve(promise, await self._answer(promise, request, body, sampler))
        except ParallmError as error:
            promises.resolve(promise, failure_of(error))
        except asyncio.CancelledError:
            promises.resolve(promise, failure("the sample was cancelled", category="user"))
            raise
        finally:
            # a fault of ours: the task's exception is logged, the client must not wait
            if promise.result is None:
                promises.resolve(
                    promise, failure("the server failed on this sample", category="server")
                )

    async def _answer(
        self, promise: Promise, request: Request, body: SampleBody, sampler: Sampler
    ) -> PromiseResult:
        service, weights, began = self._service, sampler.weights(), time.time()
        # from here on, or others may take its place
        with service.engine.uses.holding([sampler.adapter]):
            if sampler.directory is not None:
                await asyncio.to_thread(_load, service, sampler)
            else:
                service.samplers.check(sampler.adapter)
            output = await service.engine.generate(request)
        await self._pace.turn()
        for completion in output.completions:
            if completion.finish_reason not in ("stop", "length"):
                category = "server" if completion.error_code is None else "user"
                return failure(completion.error or "the sample was aborted", category=category)
        if sampler.run is not None and weights is not None:
            self._record(
                sampler.run,
                weights,
                promise.sequence_ids,
                output,
                request.params.temperature,
                began,
            )
        # Rows of likely tokens are slow to write: 0.1 s for 8,192 tokens with 20 each.
        tokens = sum(len(each.token_ids) for each in output.completions)
        large = body.topk_sample_logprobs or body.topk_prompt_logprobs or tokens > WRITTEN_AT_ONCE
        return protobuf_result(
            await asyncio.to_thread(_written, body, output) if large else _written(body, output)
        )

    def _record(
        self,
        run: str,
        weights: tuple[int, int],
        names: Sequence[str],
        output: RequestOutput,
        temperature: float,
        began: float,
    ) -> None:
        """Remember the samples and, of a model that is still trained, when they were drawn."""
        step, generation = weights
        for name, completion in zip(names, output.completions, strict=True):
            logprobs, stopped = _array(completion.logprobs), completion.finish_reason == "stop"
            record = SampleRecord(run, step, temperature, logprobs, stopped, generation)
            self._service.records.add(name, record)
        if (model := self._service.models.get(run)) is not None:
            model.log.recorded.sampled(began, time.time())


def _load(service: TinkerService, sampler: Sampler) -> None:
    """Have a named checkpoint in memory. Raises RequestError: it was deleted, or its time is
    over; AdapterError."""
    assert sampler.adapter is not None and sampler.run is not None, "it has a directory"
    try:
        checkpoint = service.checkpoints.require(sampler.adapter)
    except RequestError:
        service.samplers.drop(sampler.adapter)
        raise
    service.samplers.load(sampler.adapter, sampler.run, checkpoint.directory)


async def _news(line: Completions, seconds: float) -> None:
    """Wait for the end of a sample, at most so long."""
    line.news.clear()
    with suppress(TimeoutError):
        await asyncio.wait_for(line.news.wait(), seconds)


def _completed(line: Completions, promise: Promise) -> None:
    assert promise.result is not None
    event: dict[str, object] = {"request_id": promise.request_id, "state": "finished"}
    if promise.result.failed:
        event["state"] = "failed"
    else:
        event["response_payload_uncompressed_size"] = len(promise.result.body)
    line.running -= 1
    line.add(event)


def _prompt(body: SampleBody) -> tuple[int, ...]:
    """Raises RequestError: a part that is no text."""
    tokens: list[int] = []
    for chunk in body.prompt.chunks:
        if chunk.tokens is None:
            raise RequestError(
                f"the prompt holds a chunk of type {chunk.type!r}; this server reads token ids only"
            )
        tokens += chunk.tokens
    return tuple(tokens)


def _params(body: SampleBody) -> SamplingParams:
    """Raises RequestError: something that is not offered."""
    requested = {
        "target_prompt_logprobs": body.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": body.prompt_alt_tokens_k != 0,
        "record_stability_info": bool(body.record_stability_info),
    }
    for name in (name for name, wanted in requested.items() if wanted):
        raise RequestError(f"{name} is not offered: {NOT_OFFERED[name]}", param=name)
    wants_prompt = bool(body.prompt_logprobs) or body.topk_prompt_logprobs > 0
    sampling = body.sampling_params
    texts, ids = _stops(sampling)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        n=body.num_samples,
        seed=sampling.seed,
        stop=texts,
        stop_token_ids=ids,
        ignore_eos=sampling.stop is not None,
        skip_special_tokens=False,
        logprobs=body.topk_sample_logprobs or None,
        prompt_logprobs=body.topk_prompt_logprobs if wants_prompt else None,
    )


def _stops(sampling: SamplingParamsBody) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings and stop tokens."""
    if sampling.stop is None:
        return (), ()
    if isinstance(sampling.stop, str):
        return (sampling.stop,), ()
    texts = tuple(stop for stop in sampling.stop if isinstance(stop, str))
    return texts, tuple(stop for stop in sampling.stop if isinstance(stop, int))


def _written(body: SampleBody, output: RequestOutput) -> bytes:
    """A SampleResponse."""
    top_count, prompt_top_count = body.topk_sample_logprobs, body.topk_prompt_logprobs
    samples = [
        DrawnSample(
            completion.finish_reason == "stop",
            completion.token_ids,
            completion.logprobs,
            _top(completion),
        )
        for completion in output.completions
    ]
    scores = output.prompt_logprobs
    last = body.prompt_logprobs_last_n or len(output.prompt_token_ids)
    unscored = len(output.prompt_token_ids) - last  # tokens before these have no number
    logprobs = prompt_top = None
    if scores is not None:
        numbers = [math.nan if number is None else number for number in scores.logprobs]
        logprobs = [math.nan] * unscored + numbers[unscored:]
    if scores is not None and prompt_top_count:
        prompt_top = [
            () if i < unscored else _pairs(row or ()) for i, row in enumerate(scores.top_logprobs)
        ]
    return write_samples(
        samples,
        cached_tokens=min(
            (completion.cached_tokens for completion in output.completions), default=0
        ),
        top_count=top_count,
        prompt_logprobs=logprobs,
        prompt_top=prompt_top,
        prompt_top_count=prompt_top_count,
    )


def _top(completion: Completion) -> list[Sequence[tuple[int, float]]] | None:
    return (
        None
        if completion.top_logprobs is None
        else [_pairs(row) for row in completion.top_logprobs]
    )


def _pairs(row: Sequence[TopLogprob]) -> tuple[tuple[int, float], ...]:
    return tuple((entry.token_id, entry.logprob) for entry in row)


def _array(values: Sequence[float]) -> np.ndarray:
    return np.array(values, np.float32)

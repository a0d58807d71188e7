"""The engine: add and abort requests, and `step()`, which gives every running sequence one token. One thread only.

    step:  schedule (scheduler.py) → run (model_runner.py: moves, prefill chunk, decode) → postprocess (here) → events

The weight lock's read side is held while a step's graph is built, not while it is evaluated; each token carries the
policy version read there. A request's own failure ends that request. An exception of the batched forward itself is
raised by `step`; the caller (thread.py) then calls `fail_active`, and the engine goes on with an empty cache.
"""

import math
import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.engine.events import Event, Failed, Finished, Scored, StreamDelta
from mlx_parallm.engine.kv_cache import SlotCache
from mlx_parallm.engine.logit_edits import LogitEdits
from mlx_parallm.engine.model_runner import ModelRunner, SampledToken
from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.engine.probe import check_architecture
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.engine.scoring import Score, Scorer
from mlx_parallm.engine.sequence import Sequence, random_stream
from mlx_parallm.engine.validation import RequestLimits, check_request, check_tokens
from mlx_parallm.errors import ParallmError, RequestError
from mlx_parallm.models.lora import AdapterWeights, LoraContext
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import CompletionDelta, FinishReason, PromptLogprobs, Request, RequestOutput
from mlx_parallm.weights import SharedWeights, WeightsView

NOT_FINITE = "the model's logits are not finite"
CLEAR_CACHE_STEPS = 512  # MLX's buffer cache is emptied this often


@dataclass(frozen=True)
class EngineOptions:
    """`max_rows`: sequences decoded together; `prefill_chunk`: prompt tokens between two decode steps;
    `max_kv_tokens`: see Scheduler; `seed`: for requests that bring none; `architecture`: for error texts."""

    max_model_len: int
    vocab_size: int
    max_rows: int = 32
    prefill_chunk: int = 512
    max_kv_tokens: int | None = None
    seed: int = 0
    architecture: str = "this model"


@dataclass
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_aborted: int = 0
    running: int = 0  # sequences that hold a row or were promised one


@dataclass
class LiveRequest:
    """A request and what it still waits for."""

    request: Request
    sequences: list[Sequence]
    unfinished: int
    prompt_logprobs: PromptLogprobs | None = None
    scoring: bool = False


class Engine:
    """
    Args:
        model: the serving tree, evaluated, after `prepare_for_serving`.
        tokenizer: this thread's own.
        weights: versions and adapters.
        lora: what the serving tree's linear layers read.

    Raises:
        ModelError: the engine cannot batch the architecture (see probe.py).
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, weights: SharedWeights, lora: LoraContext, options: EngineOptions
    ) -> None:
        layers = check_architecture(model, options.architecture)
        self.options = options
        self.limits = RequestLimits(options.max_model_len, options.vocab_size)
        self.counters = Counters()
        self.scheduler = Scheduler(options.max_rows, options.prefill_chunk, options.max_kv_tokens)
        self.slots = SlotCache(layers, options.max_rows, options.max_model_len)
        self.weights = weights
        self._runner = ModelRunner(model, lora, self.slots, options.prefill_chunk)
        self._tokenizer = tokenizer
        self._random = random.Random(options.seed)
        self._live: dict[str, LiveRequest] = {}
        self._scores: deque[Score] = deque()
        self._scorer = Scorer(model, self._runner.activate, options.prefill_chunk, options.vocab_size)
        self._version = -1  # what was last seen under the read lock …
        self._adapters: Mapping[str, AdapterWeights] = {}
        self._epoch = 0  # … and how often it changed; keys shared prefixes
        self._version_of_epoch: dict[int, int] = {}
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        """True when there is something to step for, or to tell."""
        return self.scheduler.has_work or bool(self._scores) or bool(self._events)

    @property
    def idle(self) -> bool:
        """True when nothing runs; requests may wait while admission is paused."""
        return not self.scheduler.active and not self._scores

    def step(self) -> list[Event]:
        """One token for every running sequence; returns what there is to tell."""
        with self.weights.read() as view:
            self._note_weights(view)
        plan = self.scheduler.schedule(self._epoch)
        self._runner.move_rows(plan)
        with self.weights.read() as view:
            self._note_weights(view)
            launched = self._runner.launch(plan, view)
        for sampled in self._runner.collect(launched):
            self._take_token(sampled, launched.version)
        self.counters.prefill_tokens += plan.prefilled_tokens
        self._advance_score()
        self._after_step()
        return self._drain_events()

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError (or a subclass): nothing is queued then."""
        check_request(request, self.limits)
        if request.request_id in self._live:
            raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        if request.adapter is not None and request.adapter not in self.weights.adapters():
            raise RequestError(f"no adapter {request.adapter!r}", param="model", code="model_not_found")
        params = request.params
        scoring = params.prompt_logprobs is not None
        sequences = self._sequences(request)
        live = LiveRequest(request, sequences, unfinished=len(sequences), scoring=scoring)
        self._live[request.request_id] = live
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        if scoring:
            self.score(request.request_id, request.prompt_token_ids, request.adapter, params.prompt_logprobs or 0)
        if params.max_tokens == 0:
            for sequence in sequences:
                sequence.finish("length")
                self._retire(sequence)
        else:
            self.scheduler.add(sequences)

    def score(self, request_id: str, tokens: tuple[int, ...], adapter: str | None, top_count: int = 0) -> None:
        """Queues the log-probabilities of a given text; ends with a `Scored` event. Raises RequestError."""
        check_tokens(tokens, self.limits)
        self._scores.append(Score(request_id, tuple(tokens), adapter, top_count))

    def abort(self, request_id: str) -> None:
        """Ends a request's unfinished sequences with finish_reason "abort"; unknown ids are ignored."""
        dropped = [score for score in self._scores if score.request_id == request_id]
        for score in dropped:
            self._scores.remove(score)
        live = self._live.get(request_id)
        if live is None:
            if dropped:
                self._events.append(Failed(request_id, RequestError("the request was aborted")))
            return
        live.scoring = False
        self.counters.requests_aborted += 1
        self._end_unfinished(live, "abort")

    def fail_active(self, error: str) -> list[Event]:
        """After `step` raised: fails whoever took part, drops keys and values, keeps the queue."""
        lost = self.scheduler.forget_rows()
        self._runner.reset()
        for sequence in lost:
            sequence.finish("error", error=error)
            self._retire(sequence)
        if self._scores:
            self._fail_score(self._scores.popleft(), error)
        return self._drain_events()

    def take_events(self) -> list[Event]:
        """Events that came up outside of `step` (aborts, empty requests)."""
        return self._drain_events()

    def release_memory(self) -> None:
        """When idle: gives the KV cache and MLX's buffer cache back."""
        if not self.scheduler.has_work:
            self.slots.clear()
            mx.clear_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError when rows, lengths and positions do not fit each other."""
        rows = self.scheduler.rows
        assert all(sequence.row == row for row, sequence in enumerate(rows)), [s.row for s in rows]
        assert all(s.cached == len(s.prompt) + len(s.tokens) - 1 for s in rows if not s.finished)
        assert len(self.scheduler.active) <= self.options.max_rows
        self.slots.check_integrity([s.cached for s in rows])
        unfinished = {id(s) for live in self._live.values() for s in live.sequences if not s.finished}
        queued = {id(s) for s in [*self.scheduler.waiting, *self.scheduler.active]}
        assert unfinished == queued, "a sequence is lost or left over"

    def _sequences(self, request: Request) -> list[Sequence]:
        params, prompt = request.params, request.prompt_token_ids
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        room = self.options.max_model_len - len(prompt)
        return [
            Sequence(
                request_id=request.request_id,
                index=index,
                prompt=prompt,
                params=params,
                adapter=request.adapter,
                max_tokens=room if params.max_tokens is None else params.max_tokens,
                random_stream=random_stream(seed, index),
                stop_ids=stop_ids,
                text=OutputText(
                    self._tokenizer.detokenizer,
                    params.stop,
                    include_stop=params.include_stop_str_in_output,
                    eager=request.stream,
                ),
                edits=LogitEdits(params, prompt, stop_ids) if LogitEdits.needed(params) else None,
                processed_logprobs=[] if params.reshapes_distribution else None,
                top_logprobs=[] if params.logprobs else None,
            )
            for index in range(params.n)
        ]

    def _note_weights(self, view: WeightsView) -> None:
        """Counts a change of weights and ends sequences whose adapter was removed while they waited or ran."""
        if view.policy_version == self._version and view.adapters is self._adapters:
            return
        self._version, self._adapters = view.policy_version, view.adapters
        self._epoch += 1
        self._version_of_epoch[self._epoch] = view.policy_version
        for live in list(self._live.values()):
            if live.request.adapter is not None and live.request.adapter not in view.adapters:
                self._end_unfinished(live, "error", f"the adapter {live.request.adapter!r} was removed")

    def _take_token(self, sampled: SampledToken, version: int) -> None:
        sequence = sampled.sequence
        if sequence.finished:  # aborted or orphaned while the step was under way
            return
        if not math.isfinite(sampled.logprob):
            sequence.finish("error", error=NOT_FINITE)
            self.slots.scrub_row(sequence.row)
            self._retire(sequence)
            return
        sequence.cached += 1
        sequence.tokens.append(sampled.token)
        sequence.logprobs.append(sampled.logprob)
        sequence.versions.append(version)
        if sequence.edits is not None:
            sequence.edits.add_output(sampled.token)
        if sequence.processed_logprobs is not None and sampled.processed_logprob is not None:
            sequence.processed_logprobs.append(sampled.processed_logprob)
        if sequence.top_logprobs is not None:
            sequence.top_logprobs.append(sampled.top_logprobs or ())
        self.counters.generation_tokens += 1
        with _own_failure(sequence):
            self._decide(sequence, sampled.token)
        if sequence.finished:
            self._retire(sequence)
        elif (live := self._live[sequence.request_id]).request.stream:
            self._emit_delta(live, sequence)

    def _decide(self, sequence: Sequence, token: int) -> None:
        """Feeds the token to the text and ends the sequence when it stops, or has no room for more."""
        params = sequence.params
        if token in sequence.stop_ids:
            is_eos = token in self._tokenizer.eos_token_ids
            if params.include_stop_str_in_output and not is_eos:
                sequence.text.add(token, check_stop=False)
            sequence.finish("stop", None if is_eos and token not in params.stop_token_ids else token)
            return
        matched = sequence.text.add(token, check_stop=len(sequence.tokens) > params.min_tokens)
        if matched is not None:
            sequence.finish("stop", matched)
        elif len(sequence.tokens) >= sequence.max_tokens:
            sequence.finish("length")

    def _end_unfinished(self, live: LiveRequest, reason: FinishReason, error: str | None = None) -> None:
        """Ends what is left of a request, wherever it is; rows are freed by the next schedule."""
        for sequence in live.sequences:
            if not sequence.finished:
                sequence.finish(reason, error=error)
                self._retire(sequence)
        self._finish_if_done(live)
        self.scheduler.remove_finished_from_queue()

    def _retire(self, sequence: Sequence) -> None:
        """The sequence has finished: its last delta, and the request's end when it was the last."""
        with _own_failure(sequence):
            sequence.text.finish()
        live = self._live[sequence.request_id]
        live.unfinished -= 1
        if live.request.stream:
            self._emit_delta(live, sequence)
        self._finish_if_done(live)

    def _finish_if_done(self, live: LiveRequest) -> None:
        request = live.request
        if live.unfinished or live.scoring or request.request_id not in self._live:
            return
        del self._live[request.request_id]
        completions = tuple(
            sequence.completion(self._version_of_epoch.get(sequence.prefix_epoch, -1)) for sequence in live.sequences
        )
        reasons = {completion.finish_reason for completion in completions}
        if "error" in reasons:
            self.counters.requests_failed += 1
        elif "abort" not in reasons:
            self.counters.requests_finished += 1
        output = RequestOutput(request.request_id, request.prompt_token_ids, completions, live.prompt_logprobs)
        self._events.append(Finished(request.request_id, output))

    def _emit_delta(self, live: LiveRequest, sequence: Sequence) -> None:
        since = sequence.emitted
        sequence.emitted = len(sequence.tokens)
        top = sequence.top_logprobs
        delta = CompletionDelta(
            index=sequence.index,
            text=sequence.text.take(),
            token_ids=tuple(sequence.tokens[since:]),
            logprobs=tuple(sequence.logprobs[since:]),
            top_logprobs=None if top is None else tuple(top[since:]),
            policy_versions=tuple(sequence.versions[since:]),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
        )
        self._events.append(StreamDelta(live.request.request_id, delta))

    def _advance_score(self) -> None:
        """One chunk of the oldest score."""
        if not self._scores:
            return
        score = self._scores[0]
        with self.weights.read() as view:
            if score.adapter is not None and score.adapter not in view.adapters:
                self._fail_score(self._scores.popleft(), f"the adapter {score.adapter!r} was removed")
                return
            chunk = self._scorer.launch(score, view)
        try:
            self._scorer.collect(score, chunk)
        except RuntimeError as error:  # MLX: no memory for this text's logits, say
            return self._fail_score(self._scores.popleft(), f"the text cannot be scored: {error}")
        if not all(value is None or math.isfinite(value) for value in score.logprobs):
            self._fail_score(self._scores.popleft(), NOT_FINITE)
            return
        if score.finished:
            self._scores.popleft()
            self._deliver_score(score.request_id, score.result())

    def _deliver_score(self, request_id: str, result: PromptLogprobs) -> None:
        live = self._live.get(request_id)
        if live is None:
            self._events.append(Scored(request_id, result))
            return
        live.prompt_logprobs, live.scoring = result, False
        self._finish_if_done(live)

    def _fail_score(self, score: Score, error: str) -> None:
        live = self._live.get(score.request_id)
        if live is None:
            self._events.append(Failed(score.request_id, ParallmError(error)))
            return
        live.scoring = False
        self._end_unfinished(live, "error", error)

    def _after_step(self) -> None:
        self.counters.steps += 1
        self.counters.running = len(self.scheduler.active)
        if self.counters.steps % CLEAR_CACHE_STEPS == 0:
            self.slots.shrink_to([sequence.cached for sequence in self.scheduler.rows])  # those of finished ones too
            mx.clear_cache()

    def _drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


@contextmanager
def _own_failure(sequence: Sequence) -> Iterator[None]:
    """Whatever a sequence's text raises (a tokenizer may raise anything) ends that sequence and no other."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - boundary: one request's text must not end the engine
        sequence.text.abandon()
        sequence.finish("error", error=f"the text cannot be decoded: {error!r}")

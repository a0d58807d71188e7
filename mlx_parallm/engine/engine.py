"""The engine: add and abort requests, and `step()`, which gives every running sequence one token. One thread only.

    step:  schedule (scheduler.py) → run (model_runner.py: moves, prefill chunk, decode) → postprocess (here) → events

The weight lock's read side is held while a step's graph is built, not while it is evaluated; each token carries the
policy version read there. A request's own failure ends that request. An exception of the batched forward itself is
raised by `step`; the caller (thread.py) then calls `fail_active`, and the engine goes on with an empty cache.
"""

import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.engine.events import Event
from mlx_parallm.engine.kv_cache import SlotCache
from mlx_parallm.engine.live_requests import Counters, LiveRequests, own_failure
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
from mlx_parallm.types import Request
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
        self._live = LiveRequests(self.counters)
        self._scores: deque[Score] = deque()
        self._scorer = Scorer(model, self._runner.activate, options.prefill_chunk, options.vocab_size)
        self._version = -1  # what was last seen under the read lock …
        self._adapters: Mapping[str, AdapterWeights] = {}
        self._epoch = 0  # … and how often it changed; keys shared prefixes

    @property
    def has_work(self) -> bool:
        """True when there is something to step for, or to tell."""
        return self.scheduler.has_work or bool(self._scores) or self._live.has_events

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
        return self._live.drain_events()

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
        self._live.start(request, sequences, scoring=scoring)
        if scoring:
            self.score(request.request_id, request.prompt_token_ids, request.adapter, params.prompt_logprobs or 0)
        if params.max_tokens == 0:
            for sequence in sequences:
                sequence.finish("length")
                self._live.retire(sequence)
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
                self._live.score_failed(request_id, RequestError("the request was aborted"))
            return
        self.counters.requests_aborted += 1
        self._live.end_unfinished(live, "abort")
        self.scheduler.remove_finished_from_queue()

    def fail_active(self, error: str) -> list[Event]:
        """After `step` raised: fails whoever took part, drops keys and values, keeps the queue."""
        lost = self.scheduler.forget_rows()
        self._runner.reset()
        for sequence in lost:
            sequence.finish("error", error=error)
            self._live.retire(sequence)
        if self._scores:
            self._fail_score(self._scores.popleft(), error)
        return self._live.drain_events()

    def take_events(self) -> list[Event]:
        """Events that came up outside of `step` (aborts, empty requests)."""
        return self._live.drain_events()

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
        unfinished = {id(s) for live in self._live for s in live.sequences if not s.finished}
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
        self._live.version_of_epoch[self._epoch] = view.policy_version
        for live in self._live:
            if live.request.adapter is not None and live.request.adapter not in view.adapters:
                self._live.end_unfinished(live, "error", f"the adapter {live.request.adapter!r} was removed")
        self.scheduler.remove_finished_from_queue()

    def _take_token(self, sampled: SampledToken, version: int) -> None:
        sequence = sampled.sequence
        if sequence.finished:  # aborted or orphaned while the step was under way
            return
        if not math.isfinite(sampled.logprob):
            sequence.finish("error", error=NOT_FINITE)
            self.slots.scrub_row(sequence.row)
            self._live.retire(sequence)
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
        with own_failure(sequence):
            self._decide(sequence, sampled.token)
        if sequence.finished:
            self._live.retire(sequence)
        else:
            self._live.sampled(sequence)

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
            self._live.scored(score.request_id, score.result())

    def _fail_score(self, score: Score, error: str) -> None:
        self._live.score_failed(score.request_id, ParallmError(error))
        self.scheduler.remove_finished_from_queue()

    def _after_step(self) -> None:
        self.counters.steps += 1
        self.counters.running = len(self.scheduler.active)
        if self.counters.steps % CLEAR_CACHE_STEPS == 0:
            self.slots.shrink_to([sequence.cached for sequence in self.scheduler.rows])  # those of finished ones too
            mx.clear_cache()

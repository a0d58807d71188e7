"""The engine: add and abort requests, and `step()`, which gives every running sequence one token.
One thread only.

    step:  schedule (scheduler.py) → run (model_runner.py: moves, prefill chunk, decode) →
           postprocess (here) → events

With `async_scheduling` the next step of the same rows is started before this one is read, unless
what it does depends on what this one gives: requests that come or may end by length, prompts to
save, grammars, penalties.

The weight lock's read side is held while a step's graph is built, not while it is evaluated; each
token carries the policy version read there. A request's own failure ends that request. An exception
of the batched forward itself is raised by `step`; the caller (thread.py) then calls `recover`,
which finds the request that caused it and computes the others' rows again, or `fail_active`, after
which the engine goes on with an empty cache.
"""

import gc
import math
import random
import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.engine.cache.batch import choose_cache
from mlx_parallm.engine.cache.prefill import arrays_of, leaves
from mlx_parallm.engine.grammar import NO_TOKEN_CODE, Grammars
from mlx_parallm.engine.images import ImageFeatures, image_ids
from mlx_parallm.engine.live_requests import Counters, Event, LiveRequests, own_failure
from mlx_parallm.engine.logit_edits import LogitEdits, spellings
from mlx_parallm.engine.model_runner import LaunchedStep, ModelRunner, SampledToken
from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.engine.prefill_pace import PrefillPace
from mlx_parallm.engine.prompt_lookup import Drafts
from mlx_parallm.engine.room import cache_room
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.engine.scoring import Score, Scorer
from mlx_parallm.engine.sequence import Sequence, random_stream
from mlx_parallm.engine.validation import RequestLimits, check_request
from mlx_parallm.errors import ModelNotFoundError, RequestError
from mlx_parallm.models.adapters.adapter import AdapterSlot
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.device.faults import raise_device_fault
from mlx_parallm.system.hardware import empty_buffer_cache
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import PromptImage, Request, SamplingParams
from mlx_parallm.weights import SharedWeights, WeightsView

NOT_FINITE = "the model's logits are not finite"
ALL_FORBIDDEN = "no token may come next: allowed_token_ids, bad_words and min_tokens leave none"
log = get_logger(__name__)
SHRINK_STEPS = 512  # room of rows that have left is given back this often


@dataclass(frozen=True)
class EngineOptions:
    """Made from the configuration by `starting.engine_options`."""

    max_model_len: int
    vocab_size: int
    max_rows: int  # sequences decoded together
    prefill_chunk: int  # prompt tokens between two decode steps
    max_prefill_ms: int | None  # see PrefillPace
    kv_cache_bytes: int | None  # keys and values of running sequences; None = unbounded
    # keys and values lie by tokens where the architecture allows it, see cache/batch.py
    by_tokens: bool
    prefix_cache_bytes: int  # keys and values kept for later requests; 0 = none
    default_max_tokens: int | None  # of requests without a limit; None = all the room there is
    seed: int  # of requests without one
    architecture: str  # for error texts
    processed_alternatives: bool  # see SamplingBatch
    close_objects: bool  # see Grammars
    prompt_lookup: int  # tokens of a draft (prompt_lookup.py); 0 = none
    async_scheduling: bool = False  # see ModelRunner.launch_after
    # 8 or 4: keys and values are quantised, by tokens; see cache/kv_format.py
    kv_bits: int | None = None
    # (layers, experts a token, experts): those of each sampled token are recorded
    experts: tuple[int, int, int] | None = None
    prompt_experts: bool = False  # and those of each prompt's token that is computed


class Engine:
    """
    Args:
        model: the serving tree, evaluated, after `prepare_for_serving`.
        tokenizer: this thread's own.
        weights: versions and adapters.
        lora: what the serving tree's linear layers read.
        images: None: the model reads no images.

    Raises:
        ModelError: the engine cannot decode the architecture (see cache/batch.py).
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        weights: SharedWeights,
        lora: LoraContext,
        options: EngineOptions,
        images: ImageFeatures | None = None,
    ) -> None:
        self.options = options
        self.grammars = Grammars(tokenizer, options.vocab_size, close_objects=options.close_objects)
        self.counters = Counters()
        self.cache = choose_cache(
            model,
            options.architecture,
            options.max_rows,
            options.max_model_len,
            by_tokens=options.by_tokens,
            kv_bits=options.kv_bits,
        )
        if options.prompt_lookup and not self.cache.rewindable:
            log.warning(
                "server.prompt_lookup is off",
                reason="a state of this model cannot go back to an earlier token",
            )
        token_bytes = self._token_bytes = self.cache.token_bytes()
        bound = (
            None
            if options.kv_cache_bytes is None or not token_bytes
            else options.kv_cache_bytes // token_bytes
        )
        snapshot = self.cache.snapshot_bytes()
        prompt_cost = self.cache.prefill_token_bytes() / token_bytes if token_bytes else 1.0
        self.limits = RequestLimits(
            options.max_model_len,
            options.vocab_size,
            bound,
            options.default_max_tokens,
            prompt_cost,
            None if images is None else images.token_id,
        )
        room = cache_room(
            bound,
            options.prefix_cache_bytes // max(token_bytes, 1),
            rewindable=self.cache.rewindable,
            snapshot_tokens=None if snapshot is None else math.ceil(snapshot / max(token_bytes, 1)),
            by_tokens=self.cache.shares,
            prompt_cost=prompt_cost,
        )
        self.scheduler = Scheduler(options.max_rows, options.prefill_chunk, room)
        self._pace = PrefillPace(options.prefill_chunk, options.max_prefill_ms)
        self._drafts: tuple[Sequence, Drafts] | None = None  # of the only row
        self._alone: tuple[Sequence, list[Any]] | None = None  # that row, out of the cache
        self._note_memory()
        self.weights = weights
        self.images = images
        self._runner = ModelRunner(
            model,
            lora,
            weights,
            self.cache,
            prefill_chunk=options.prefill_chunk,
            processed_alternatives=options.processed_alternatives,
            experts=options.experts,
            prompt_experts=options.prompt_experts,
            images=images,
        )
        self._tokenizer = tokenizer
        self._random = random.Random(options.seed)
        self._live = LiveRequests(self.counters)
        self._scores: deque[Score] = deque()
        self._scorer = Scorer(
            model,
            self.cache.new_prefill,
            lora.activate,
            options.prefill_chunk,
            options.vocab_size,
            images,
        )
        self._take_pace()
        # who paused admission → whether running sequences are frozen too
        self.holders: Mapping[str, bool] = {}
        self._ahead: LaunchedStep | None = None  # started, and not read yet
        self._lap_began = 0.0
        # what was last seen under the read lock
        self._version = self._revision = self._base_serial = -1

    @property
    def has_work(self) -> bool:
        """True when there is something to compute or an event to deliver."""
        if self._live.has_events or self._ahead is not None:
            return True
        return not self.frozen and (self.scheduler.has_work or self._scoring)

    @property
    def frozen(self) -> bool:
        """True while a holder has frozen the running sequences."""
        return any(self.holders.values())

    @property
    def idle(self) -> bool:
        """True when nothing runs; requests may wait while admission is paused."""
        return not self.scheduler.active and not self._scoring

    @property
    def lanes(self) -> "tuple[Engine, ...]":
        """The engines whose counters together are this one's: itself, unless chats have their
        own (chat_lane.py)."""
        return (self,)

    @property
    def lane(self) -> int:
        """The place in `lanes` of the one that took the last step, or failed in it."""
        return 0

    @property
    def serves_chats(self) -> bool:
        """True while rollouts and training rest for requests with a negative priority."""
        return False

    def holds(self, request_id: str) -> bool:
        """Whether such a request has not ended."""
        return request_id in self._live

    @property
    def _scoring(self) -> bool:
        """True when there is a text to score; while admission is paused, one that has begun."""
        return bool(self._scores) and (not self.scheduler.paused or self._scores[0].done > 0)

    def step(self, *, ahead: bool = True) -> list[Event]:
        """Gives every running sequence one token; returns the events. While frozen it reads what
        was started before.

        `ahead`: the next step may be started too.
        """
        self.scheduler.room.beside = self._scores[0].positions if self._scores else 0
        self._lap()
        if self._ahead is None and (alone := self._lookup_row()) is not None:
            if self._step_with_draft(*alone):
                self._after_step()
                return self._live.drain_events()
        else:
            self._put_back()
        launched, self._ahead = self._ahead or self._launch(), None
        if ahead and self.options.async_scheduling and self._may_go_ahead(launched):
            self._runner.make_room_after(launched)
            self.scheduler.pass_step()
            self._lap("schedule")
            with self.weights.read() as view:
                self._note_weights(view)
                following = self._runner.launch_after(launched, view)
            self._lap("build")
        else:
            following = None
        self._read(launched)
        self._ahead = following
        if not self.frozen:
            self._advance_score()
            self._lap("score")
        self._after_step()
        events = self._live.drain_events()
        self._lap("read")
        return events

    def _lookup_row(self) -> tuple[Sequence, Drafts] | None:
        """The only row, where a draft may be tried on it, and its drafts."""
        rows = self.scheduler.rows
        if not self.options.prompt_lookup or len(rows) != 1 or not self.cache.rewindable:
            return None
        if self.frozen or self._scores or not self.scheduler.steady:
            return None
        [sequence] = rows
        if sequence.matcher is not None or sequence.edits is not None or sequence.images:
            return None
        if self._drafts is None or self._drafts[0] is not sequence:
            longest = self.options.prompt_lookup
            self._drafts = (sequence, Drafts(sequence.prompt, longest))
        return self._drafts

    def _step_with_draft(self, sequence: Sequence, drafts: Drafts) -> bool:
        """Give the only row the tokens of its draft that hold, and one more. False: there is no
        draft, and the row is in the cache."""
        draft = drafts.next(sequence.tokens)[: sequence.max_tokens - len(sequence.tokens) - 1]
        if not draft and self._alone is None:
            return False
        self.scheduler.pass_step()
        if self._alone is None:
            self._alone = (sequence, self._runner.take_out(sequence))
        _, caches = self._alone
        with self.weights.read() as view:
            self._note_weights(view)
            launched = self._runner.launch_draft(sequence, draft, caches, view)
        self._lap("build")
        sampled = self._runner.collect(launched)
        self._lap("compute")
        before = len(sequence.tokens)
        for place, token in enumerate(sampled):
            self._take_token(token, launched.version)
            if sequence.finished or [token.token] != draft[place : place + 1]:
                break
        held = len(sequence.tokens) - before - 1
        for cache in leaves(caches):
            cache.trim(len(draft) - held)
        if draft:
            drafts.judge(len(draft), held, len(sequence.tokens))
            self.counters.draft_tokens += len(draft)
            self.counters.accepted_draft_tokens += max(held, 0)  # -1: not one token was finite
        if sequence.finished or drafts.none_soon(sequence.tokens):
            self._put_back()
        if sequence.error is not None:
            self.cache.scrub_row(sequence.row)
        self._lap("read")
        return True

    def _put_back(self) -> None:
        """Put the row that is out of the cache back."""
        if self._alone is not None:
            (sequence, caches), self._alone = self._alone, None
            self._runner.put_back(sequence, caches)

    def _launch(self) -> LaunchedStep:
        with self.weights.read() as view:
            self._note_weights(view)
        plan = self.scheduler.schedule(self._weights_of, self._version)
        self._runner.move_rows(plan)
        self._lap("schedule")
        with self.weights.read() as view:
            self._note_weights(view)
            launched = self._runner.launch(plan, view)
        self._lap("build")
        return launched

    def _take_pace(self) -> None:
        """Compute as many prompt tokens in a step as the pace allows."""
        self.scheduler.prefill_chunk = self._runner.prefill_chunk = self._pace.tokens
        self._scorer.bound(self._pace.tokens)

    def _lap(self, part: str = "") -> float:
        """Notes the time since the last call as `part` of the steps, and returns it; without one
        it only starts the clock."""
        now = time.perf_counter()
        took = now - self._lap_began
        if part:
            self.counters.step_seconds[part] += took
        self._lap_began = now
        return took

    def _may_go_ahead(self, launched: LaunchedStep) -> bool:
        """Whether the step after `launched` can be built before that one is read."""
        return (
            bool(launched.rows)
            and not self.frozen
            and self.scheduler.steady
            and not self._scores
            and not self._has_draft()
            and not any(
                s.matcher or s.edits or len(s.tokens) + 1 >= s.max_tokens for s in launched.rows
            )
        )

    def _has_draft(self) -> bool:
        """Whether the next step may have one: it is not started ahead then."""
        alone = self._lookup_row()
        return alone is not None and bool(alone[1].next(alone[0].tokens))

    def _read(self, launched: LaunchedStep) -> None:
        tokens = self._runner.collect(launched)
        took = self._lap("compute")
        if launched.prompt_tokens:
            self._pace.observe(launched.prompt_tokens, 1000 * took)
            self._take_pace()
        for sampled in tokens:
            self._take_token(sampled, launched.version)
        self.counters.prefill_tokens += launched.prefilled_tokens
        self._lap("read")

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError (or a subclass): nothing is queued then."""
        check_request(request, self.limits)
        if self.holds(request.request_id):
            raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        adapter = self._adapter_slot(request.adapter)
        params = request.params
        scoring = params.prompt_logprobs is not None or params.pooling is not None
        if scoring:
            self._check_scored(request)
        sequences = self._sequences(request, adapter)
        self._live.start(request, sequences, scoring=scoring)
        if scoring:
            score = Score(
                request.request_id, request.prompt_token_ids, adapter, params.prompt_logprobs or 0
            )
            score.pooling = params.pooling
            self._scores.append(self._with_images(score, request.images))
        if params.max_tokens == 0:
            for sequence in sequences:
                sequence.finish("length")
                self._live.retire(sequence)
        else:
            self.scheduler.add(sequences)

    def abort(self, request_id: str) -> None:
        """Ends a request's unfinished sequences with finish_reason "abort"; unknown ids are
        ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._scores = deque(score for score in self._scores if score.request_id != request_id)
        self.counters.requests_aborted += 1
        self._live.end_unfinished(live, "abort")
        self.scheduler.remove_finished_from_queue()
        self.counters.running = len(self.scheduler.active)  # there may be no step soon

    def pause(self, holder: str, *, freeze: bool) -> None:
        """Lets new requests wait until `resume` with the same name. With `freeze` running
        sequences stop too (after the token that was started), and continue afterwards unchanged."""
        self.holders = {**self.holders, holder: freeze}
        self.scheduler.paused = True

    def resume(self, holder: str) -> None:
        """Ends that holder's pause, if any; the pauses of others stay."""
        self.holders = {name: freeze for name, freeze in self.holders.items() if name != holder}
        self.scheduler.paused = bool(self.holders)

    def fail_active(self, error: str) -> list[Event]:
        """Fail every sequence that took part in a step that raised; drop keys and values, keep the
        queue."""
        lost = self._forget_rows()
        for sequence in lost:
            sequence.finish("error", error=error)
            self._live.retire(sequence)
        return self._live.drain_events()

    def recover(self) -> bool:
        """Compute every row of a step that raised again, alone (`ModelRunner.rebuild`); fail those
        that raise alone.

        Returns whether the cause was found. Raises what the model raises when it cannot compute
        anything any more.
        """
        lost = self._forget_rows()
        for sequence in lost:
            try:
                self._runner.rebuild(sequence, len(self.scheduler.rows))
            except Exception as error:  # noqa: BLE001 - boundary: the failure ends this sequence only
                raise_device_fault(error)
                sequence.finish("error", error=f"the model failed on this request: {error!r}")
                self._live.retire(sequence)
            else:
                self.scheduler.restore(sequence)
        if not self.scheduler.rows:
            self._runner.try_forward()
        return len(self.scheduler.rows) < len(lost)

    def _forget_rows(self) -> list[Sequence]:
        """Drops keys, values and the step under way; returns the sequences that had not
        finished."""
        self._ahead = self._alone = None
        lost = self.scheduler.forget_rows()
        self._runner.reset()
        return lost

    def begin_logits(
        self, tokens: tuple[int, ...], adapter: str | None, images: tuple[PromptImage, ...] = ()
    ) -> Score:
        """Prepares a text of two or more tokens for `next_logits`, run by `EngineClient.call`.
        Raises RequestError."""
        request = Request("logits", tokens, SamplingParams(max_tokens=0), adapter, images=images)
        check_request(request, self.limits)
        self._check_scored(request)
        return self._with_images(Score("logits", tokens, self._adapter_slot(adapter), 0), images)

    def _check_scored(self, request: Request) -> None:
        """Raises RequestError: it has images that chunks of a given text cannot be cut behind."""
        if request.images and self.images is not None and self.images.table.spans is not None:
            raise RequestError(
                "texts behind images are not scored where an image's tokens see each other",
                param="prompt_logprobs",
            )

    def _with_images(self, score: Score, images: tuple[PromptImage, ...]) -> Score:
        if self.images is not None and images:
            score.images = images
            score.shown = image_ids(score.tokens, images, self.images.token_id)
            score.places, _ = self.images.positions_of(score.tokens, images)
        return score

    def next_logits(self, text: Score) -> np.ndarray:
        """Logits [C, V] float32 of the text's positions up to `text.done`, until it is
        `finished`."""
        with self.weights.read() as view:
            logits = self._scorer.next_logits(text, view.base_serial).astype(mx.float32)
        mx.eval(logits, arrays_of(text.caches))
        return np.array(logits)

    def reset_prefix_cache(self) -> None:
        """Drops all prefixes but those of running rows."""
        self.scheduler.forget_prefixes()

    def take_events(self) -> list[Event]:
        """Events that came up outside of `step` (aborts, empty requests)."""
        return self._live.drain_events()

    def release_memory(self) -> None:
        """Give the KV cache and MLX's buffer cache back if the engine is idle."""
        if not self.scheduler.has_work:
            self._runner.reset()
            self._note_memory()
            # arrays in a reference cycle (a traceback): the collector counts objects, not their
            # megabytes
            gc.collect()
            empty_buffer_cache()

    def release_caches(self) -> None:
        """Give back, under pressure, what no running sequence needs: prefixes, room of rows that
        have left, MLX's freed buffers."""
        self.scheduler.forget_prefixes()
        if self._ahead is None:
            self.cache.shrink_to([sequence.cached for sequence in self.scheduler.rows])
        self._note_memory()
        gc.collect()
        empty_buffer_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError when rows, lengths and positions do not fit each other."""
        self._put_back()
        rows = self.scheduler.rows
        assert all(sequence.row == row for row, sequence in enumerate(rows)), [s.row for s in rows]
        assert all(s.cached == len(s.prompt) + len(s.tokens) - 1 for s in rows if not s.finished)
        assert len(self.scheduler.active) <= self.options.max_rows
        self.cache.check_integrity([s.cached for s in rows])
        self.scheduler.room.prefix_cache.check_integrity()
        unfinished = {id(s) for live in self._live for s in live.sequences if not s.finished}
        queued = {id(s) for s in [*self.scheduler.waiting, *self.scheduler.active]}
        assert unfinished == queued, "a sequence is lost or left over"

    def _adapter_slot(self, adapter: str | None) -> AdapterSlot | None:
        """Raises ModelNotFoundError: unloaded since the request came in."""
        slot = None if adapter is None else self.weights.find(adapter)
        if adapter is not None and slot is None:
            raise ModelNotFoundError(adapter, [*self.weights.adapters()])
        return slot

    def _sequences(self, request: Request, adapter: AdapterSlot | None) -> list[Sequence]:
        params, prompt = request.params, request.prompt_token_ids
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        # With a grammar min_tokens is the matcher's business: an end may be all that the grammar
        # leaves.
        forbidden = stop_ids if params.structure is None else frozenset()
        bad_words = [
            ids
            for word in params.bad_words
            for ids in spellings(word, self._tokenizer.encode_within)
        ]
        longest = self.limits.default_length(len(prompt))
        places: tuple[Any, int] = (None, 0)
        spans: tuple[tuple[int, int], ...] = ()
        if self.images is not None and request.images:
            places = self.images.positions_of(prompt, request.images)
            prompt = image_ids(prompt, request.images, self.images.token_id)
            spans = self.images.spans_of(prompt, request.images)
        make_detokenizer = partial(
            self._tokenizer.detokenizer,
            opens_text=request.opens_text,
            skip_special_tokens=params.skip_special_tokens,
        )
        return [
            Sequence(
                request_id=request.request_id,
                index=index,
                prompt=prompt,
                images=request.images,
                positions=places[0],
                shift=places[1],
                spans=spans,
                params=params,
                adapter=adapter,
                routing=self.options.experts,
                max_tokens=longest if params.max_tokens is None else params.max_tokens,
                cache_salt=request.cache_salt,
                priority=request.priority,
                random_stream=random_stream(seed, index),
                stop_ids=stop_ids,
                text=OutputText(
                    make_detokenizer,
                    params.stop,
                    include_stop=params.include_stop_str_in_output,
                    eager=request.stream,
                    reasoning=params.reasoning,
                ),
                edits=LogitEdits(params, request.prompt_token_ids, forbidden, bad_words)
                if LogitEdits.needed(params)
                else None,
                matcher=self.grammars.matcher_of(params, stop_ids),
                processed_logprobs=[] if params.reshapes_distribution else None,
                forced=[] if params.is_constrained else None,
                top_logprobs=[] if params.logprobs else None,
            )
            for index in range(params.n)
        ]

    def _note_weights(self, view: WeightsView) -> None:
        """Drop prefixes that old weights computed, after a change of weights."""
        if view.revision == self._revision:
            return
        self._version, self._revision, self._base_serial = (
            view.policy_version,
            view.revision,
            view.base_serial,
        )
        newest = {(adapter.serial, False) for adapter in view.adapters.values()} | {(0, False)}
        pinned = {(serial, True) for serial in self.weights.history.serials}
        self.scheduler.room.prefix_cache.keep_only(
            {(*key, view.base_serial) for key in newest | pinned}
        )
        if self.images is not None:
            serials = {serial for serial, _ in newest | pinned}
            self.images.keep_only(serials, view.base_serial)

    def _weights_of(self, sequence: Sequence) -> Hashable:
        """Identifies the weights that compute the sequence now: its adapter's arrays and the
        base's.

        A pinned version shares no prefix with requests that had it as the newest: a publish may
        have come while their prompts were computed.
        """
        adapter = sequence.adapter
        arrays = (0, False) if adapter is None else (adapter.weights.serial, adapter.pinned)
        return (*arrays, self._base_serial)

    def _take_token(self, sampled: SampledToken, version: int) -> None:
        sequence = sampled.sequence
        finite = math.isfinite(sampled.logprob)
        if not finite and self._alone is None:
            self.cache.scrub_row(sequence.row)  # for the next owner, also where this one has gone
        if sequence.finished:  # while the step was under way, which has fed its newest token
            sequence.cached += 1
            sequence.prefix_key = sequence.prefix_key if finite else None
            return
        if not finite:
            return self._end_early(sequence, NOT_FINITE)
        if sequence.edits is not None and sequence.edits.forbids(sampled.token):
            return self._end_early(sequence, ALL_FORBIDDEN, NO_TOKEN_CODE)
        sequence.cached += 1
        sequence.tokens.append(sampled.token)
        sequence.logprobs.append(sampled.logprob)
        pinned = sequence.pinned_version
        sequence.versions.append(version if pinned is None else pinned)
        if sequence.edits is not None:
            sequence.edits.add_output(sampled.token)
        if sequence.processed_logprobs is not None and sampled.processed_logprob is not None:
            sequence.processed_logprobs.append(sampled.processed_logprob)
        if sequence.top_logprobs is not None:
            sequence.top_logprobs.append(sampled.top_logprobs or ())
        sequence.experts += sampled.experts
        self.counters.generation_tokens += 1
        with own_failure(sequence):
            self._decide(sequence, sampled.token)
        if sequence.matcher is not None:
            sequence.advance_matcher(sampled.token)
        if sequence.finished:
            self._live.retire(sequence)
        else:
            self._live.sampled(sequence)

    def _end_early(self, sequence: Sequence, error: str, code: str | None = None) -> None:
        sequence.finish("error", error=error, code=code)
        self._live.retire(sequence)

    def _decide(self, sequence: Sequence, token: int) -> None:
        """Feeds the token to the text and ends the sequence when it stops, or has no room for
        more."""
        params = sequence.params
        if token in sequence.stop_ids:
            is_eos = token in self._tokenizer.eos_token_ids
            if params.include_stop_str_in_output and not is_eos:
                sequence.text.add(token, check_stop=False)
            sequence.finish(
                "stop", None if is_eos and token not in params.stop_token_ids else token
            )
            return
        matched = sequence.text.add(token, check_stop=len(sequence.tokens) > params.min_tokens)
        if matched is not None:
            sequence.finish("stop", matched)
        elif len(sequence.tokens) >= sequence.max_tokens:
            sequence.finish("length")

    def _advance_score(self) -> None:
        """Computes one chunk of the oldest score."""
        if not self._scoring:
            return
        score = self._scores[0]
        if score.done == 0 and not self.scheduler.has_room_beside:
            return None
        if not self.scheduler.rows:
            self.cache.shrink_to([])  # rows that left made room for the text
        try:
            with self.weights.read() as view:
                chunk = self._scorer.launch(score, view.base_serial)
            self._scorer.collect(score, chunk)
        except Exception as error:  # noqa: BLE001 - boundary: a text is computed alone, the failure is its own
            raise_device_fault(error)
            return self._fail_score(self._scores.popleft(), f"the text cannot be scored: {error!r}")
        if not score.finite:
            self._fail_score(self._scores.popleft(), NOT_FINITE)
            return
        if score.finished:
            self._scores.popleft()
            self._live.scored(score.request_id, score.embedding() or score.result())

    def _fail_score(self, score: Score, error: str) -> None:
        self._live.score_failed(score.request_id, error)
        self.scheduler.remove_finished_from_queue()

    def _note_memory(self) -> None:
        self.counters.kv_tokens = sum([sequence.cached for sequence in self.scheduler.rows])
        alone = [] if self._alone is None else arrays_of(self._alone[1])
        self.counters.kv_bytes = self.cache.nbytes + sum(array.nbytes for array in alone)
        self.counters.kv_bytes_shared = self.cache.saved_positions * self._token_bytes

    def _after_step(self) -> None:
        self.counters.steps += 1
        self.counters.running = len(self.scheduler.active)
        self._note_memory()
        if self.counters.steps % SHRINK_STEPS == 0:
            # those of finished ones too
            self.cache.shrink_to([sequence.cached for sequence in self.scheduler.rows])

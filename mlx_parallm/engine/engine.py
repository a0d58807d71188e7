"""The engine: add and abort requests, and `step()`, which gives every running sequence one token.
One thread only.

    step:  schedule (scheduling/) → run (decoding/: moves, prefill chunk, decode) →
           postprocess (here) → events

With `async_scheduling` the next step of the same rows is started before this one is read, unless
it depends on this one's tokens: requests that arrive or may end by length, prompts to save,
grammars, penalties.

The weight lock's read side is held while a step's graph is built, not while it is evaluated; each
token carries the policy version read there. A request's own failure ends that request. An exception
of the batched forward itself is raised by `step`; the caller (thread.py) then calls `recover`,
which finds the request that caused it and computes the others' rows again, or `fail_active`, after
which the engine continues with an empty cache.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import mlx.nn as nn

from mlx_parallm.engine.cache.batch import choose_cache
from mlx_parallm.engine.companions.companion import EngineCompanion, EngineCompanions
from mlx_parallm.engine.decoding.draft_row import DraftRow
from mlx_parallm.engine.decoding.forward import ForwardContext
from mlx_parallm.engine.decoding.model_runner import ModelRunner
from mlx_parallm.engine.decoding.steps import DraftStep, LaunchedStep, SampledToken
from mlx_parallm.engine.grammar import NO_TOKEN_CODE, Grammars
from mlx_parallm.engine.live_requests import (
    Counters,
    Event,
    LiveRequests,
    id_in_use,
    own_failure,
)
from mlx_parallm.engine.parts import EngineOptions, PresentWeights, room_of
from mlx_parallm.engine.prefix_disk.disk import Clearing, PrefixDisk
from mlx_parallm.engine.prefix_disk.of_engine import DiskPrefixes
from mlx_parallm.engine.scheduling.prefill_pace import PrefillPace
from mlx_parallm.engine.scheduling.scheduler import Scheduler
from mlx_parallm.engine.scoring import NOT_FINITE, Score, ScoreQueue, Scorer
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.engine.sequence_maker import SequenceMaker
from mlx_parallm.engine.validation import RequestLimits, check_request
from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.models.adapters.adapter import AdapterSlot
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.device.faults import raise_device_fault
from mlx_parallm.system.hardware import empty_buffer_cache
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Request
from mlx_parallm.weights import SharedWeights, WeightsView

ALL_FORBIDDEN = "no token may come next: allowed_token_ids, bad_words and min_tokens leave none"
log = get_logger(__name__)
SHRINK_STEPS = 512  # room of rows that have left is given back this often


class Engine:
    """Decode all requests of one model together, a token of each at a step.

    Args:
        model: the serving tree, evaluated, after `prepare_for_serving`.
        tokenizer: this thread's own.
        weights: versions and adapters.
        lora: the adapters that the serving tree's linear layers read.
        companions: of its sequences.
        grammars: those of another engine of the thread; None: its own.
        prefix_disk: where prefixes are kept beyond the process; None: nowhere.

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
        companions: Iterable[EngineCompanion] = (),
        grammars: Grammars | None = None,
        prefix_disk: PrefixDisk | None = None,
    ) -> None:
        self.options = options
        self.companions = EngineCompanions(companions)
        self.grammars = grammars or Grammars(
            tokenizer, options.vocab_size, close_objects=options.close_objects
        )
        self.counters = Counters()
        self.cache = choose_cache(
            model,
            options.architecture,
            options.max_rows,
            options.max_model_len,
            by_tokens=options.by_tokens,
            kv_bits=options.kv_bits,
        )
        self._token_bytes = self.cache.token_bytes()
        room = room_of(self.cache, options)
        self.limits = RequestLimits(
            options.max_model_len,
            options.vocab_size,
            room.max_tokens,
            options.default_max_tokens,
            room.prompt_cost,
            self.companions.placeholder,
            ends_thinking=bool(tokenizer.think_markers and tokenizer.think_markers[1]),
        )
        self.scheduler = Scheduler(options.max_rows, options.prefill_chunk, room)
        self.on_disk = DiskPrefixes(prefix_disk, room, weights)
        self.weights = weights
        forward = ForwardContext(model, lora, self.companions)
        self._runner = ModelRunner(
            forward,
            weights,
            self.cache,
            prefill_chunk=options.prefill_chunk,
            processed_alternatives=options.processed_alternatives,
        )
        self._tokenizer = tokenizer
        self._maker = SequenceMaker(
            tokenizer,
            self.grammars,
            self.limits,
            self.companions,
            seed=options.seed,
        )
        scorer = Scorer(forward, self.cache.new_prefill, options.prefill_chunk, options.vocab_size)
        self.scores = ScoreQueue(scorer, weights, self.companions)
        self._draft_row = DraftRow(self._runner, self._longest_draft(), self.counters)
        self._live = LiveRequests(self.counters)
        self._present = PresentWeights(weights, self._forget_prefixes_of_others)
        self._pace = PrefillPace(options.prefill_chunk, options.max_prefill_ms)
        self._take_pace()
        self._note_memory()
        # who paused admission → whether running sequences are frozen too
        self.holders: Mapping[str, bool] = {}
        self._ahead: LaunchedStep | None = None  # started, and not read yet
        self._lap_began = 0.0

    def _longest_draft(self) -> int:
        """Return the tokens of a draft; 0: none are made."""
        if not self.options.prompt_lookup or self.cache.rewindable:
            return self.options.prompt_lookup
        reason = "a state of this model cannot go back to an earlier token"
        log.warning("server.prompt_lookup is off", reason=reason)
        return 0

    @property
    def has_work(self) -> bool:
        """True when there is something to compute or an event to deliver."""
        if self._live.has_events or self._ahead is not None:
            return True
        return not self.frozen and (self.scheduler.has_work or self._scoring or bool(self.on_disk))

    @property
    def frozen(self) -> bool:
        """True while a holder has frozen the running sequences."""
        return any(self.holders.values())

    @property
    def idle(self) -> bool:
        """True when nothing runs; requests may wait while admission is paused."""
        return not self.scheduler.active and not self._scoring

    def holds(self, request_id: str) -> bool:
        """Whether such a request has not ended."""
        return request_id in self._live

    @property
    def _scoring(self) -> bool:
        """True when there is a text to score; while admission is paused, one that has begun."""
        return len(self.scores) > 0 and (not self.scheduler.paused or self.scores.begun)

    def step(self, *, ahead: bool = True) -> list[Event]:
        """Give every running sequence one token (a lone one also those of its draft); return the
        events. While frozen, only read the step that was started before.

        `ahead`: the next step may be started too.
        """
        self.scheduler.room.beside = self.scores.positions
        self._lap()
        idle = not (
            self.scheduler.has_work or self._scoring or self._ahead or self._live.has_events
        )
        self.scheduler.add(self.on_disk.arrived(idle=idle))
        launched, self._ahead = self._ahead or self._launch(), None
        following = self._launch_after(launched) if ahead else None
        self._read(launched)
        self._ahead = following
        if not self.frozen:
            self._advance_score()
            self._lap("score")
        self._after_step()
        events = self._live.drain_events()
        self._lap("read")
        return events

    def _launch(self) -> LaunchedStep:
        """Build and start the next step: a likely draft of the only row, else all rows."""
        if self._draft_row.prepare(self._draftable_rows):
            self.scheduler.pass_step()
            build: Callable[[WeightsView], LaunchedStep] = self._draft_row.launch
        else:
            with self.weights.read() as view:
                self._present.note(view)
            plan = self.scheduler.schedule(self._present.of, self._present.version)
            self._runner.move_rows(plan)
            self.on_disk.note(plan)
            build = partial(self._runner.launch, plan)
        self._lap("schedule")
        with self.weights.read() as view:
            self._present.note(view)
            launched = build(view)
        self._lap("build")
        return launched

    def _launch_after(self, launched: LaunchedStep) -> LaunchedStep | None:
        """Build and start the step after `launched` before that one is read; None: it depends on
        its tokens."""
        if not self.options.async_scheduling or not self._may_go_ahead(launched):
            return None
        self._runner.make_room_after(launched)
        self.scheduler.pass_step()
        self._lap("schedule")
        with self.weights.read() as view:
            self._present.note(view)
            following = self._runner.launch_after(launched, view)
        self._lap("build")
        return following

    @property
    def _draftable_rows(self) -> list[Sequence]:
        """The only row, if the next step is its alone; else none."""
        rows = self.scheduler.rows
        if not self.options.prompt_lookup or len(rows) != 1:
            return []
        return [] if self.frozen or self.scores or not self.scheduler.steady else rows

    def _take_pace(self) -> None:
        """Compute as many prompt tokens in a step as the pace allows."""
        self.scheduler.prefill_chunk = self._runner.prefill_chunk = self._pace.tokens
        self.scores.bound(self._pace.tokens)

    def _lap(self, part: str = "") -> float:
        """Add the time since the last call to `part` of the steps, and return it; without a part
        only start the clock."""
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
            and not isinstance(launched, DraftStep)
            and not self.frozen
            and self.scheduler.steady
            and not self.scores
            and not self._draft_row.has_draft(self._draftable_rows)
            and not any(sequence.awaits_token for sequence in launched.rows)
        )

    def _read(self, launched: LaunchedStep) -> None:
        """Wait for a step's tokens, and hand each to its sequence."""
        tokens = self._runner.collect(launched)
        took = self._lap("compute")
        if launched.prompt_tokens:
            self._pace.observe(launched.prompt_tokens, 1000 * took)
            self._take_pace()
        if isinstance(launched, DraftStep):
            self._draft_row.take(launched, tokens, self._take_token)
            if launched.rows[0].error is not None:
                self.cache.scrub_row(launched.rows[0].row)
        else:
            for sampled in tokens:
                self._take_token(sampled, launched.version)
        self.counters.prefill_tokens += launched.prefilled_tokens
        self.on_disk.keep(launched.prompt_tokens, took)
        self._lap("read")

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError (or a subclass): nothing is queued then."""
        check_request(request, self.limits)
        if self.holds(request.request_id):
            raise id_in_use(request.request_id)
        adapter = self._adapter_slot(request.adapter)
        params = request.params
        scoring = params.prompt_logprobs is not None or params.pooling is not None
        text = self.scores.text(request, adapter) if scoring else None
        sequences = self._maker.make(request, adapter)
        self._live.start(request, sequences, scoring=scoring)
        if text is not None:
            self.scores.add(text)
        if params.max_tokens == 0:
            for sequence in sequences:
                sequence.finish("length")
                self._live.retire(sequence)
        elif scoring or not self.on_disk.begin(sequences):
            self.scheduler.add(sequences)

    def abort(self, request_id: str) -> None:
        """End a request's unfinished sequences with finish_reason "abort"; unknown ids are
        ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        self.scores.remove(request_id)
        self.counters.requests_aborted += 1
        self._live.end_unfinished(live, "abort")
        self.scheduler.remove_finished_from_queue()
        self.counters.running = len(self.scheduler.active)  # there may be no step soon

    def pause(self, holder: str, *, freeze: bool) -> None:
        """Let new requests wait until `resume` by the same holder. With `freeze` running
        sequences stop too (after the token that was started), and then continue unchanged."""
        self.holders = {**self.holders, holder: freeze}
        self.scheduler.paused = True

    def resume(self, holder: str) -> None:
        """End that holder's pause, if any; the pauses of others stay."""
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

        Returns whether the cause was found. Raises the model's error if it cannot compute
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
        """Drop keys, values and the step under way; return the unfinished sequences."""
        self._ahead = None
        self.on_disk.forget()
        self._draft_row.forget()
        lost = self.scheduler.forget_rows()
        self._runner.reset()
        return lost

    def begin_logits(self, request: Request) -> Score:
        """Prepares a prompt of two or more tokens for `scores.next_logits`, run by
        `EngineClient.call`. Raises RequestError."""
        check_request(request, self.limits)
        return self.scores.text(request, self._adapter_slot(request.adapter))

    def reset_prefix_cache(self) -> Clearing:
        """Drops all prefixes but those of running rows, on disk too (`PrefixDisk.clear`)."""
        self.scheduler.forget_prefixes()
        return self.on_disk.clear()

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
        """Free, under pressure, the memory that no running sequence needs: prefixes, room of rows
        that have left, MLX's freed buffers."""
        self.scheduler.forget_prefixes()
        if self._ahead is None:
            self.cache.shrink_to([sequence.cached for sequence in self.scheduler.rows])
        self._note_memory()
        gc.collect()
        empty_buffer_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError when rows, lengths and positions do not fit each other."""
        self._draft_row.put_back()
        rows = self.scheduler.rows
        assert all(sequence.row == row for row, sequence in enumerate(rows)), [s.row for s in rows]
        assert all(s.cached == len(s.prompt) + len(s.tokens) - 1 for s in rows if not s.finished)
        assert len(self.scheduler.active) <= self.options.max_rows
        self.cache.check_integrity([s.cached for s in rows])
        self.scheduler.room.prefix_cache.check_integrity()
        unfinished = {id(s) for live in self._live for s in live.sequences if not s.finished}
        queued = {id(s) for s in [*self.scheduler.waiting, *self.scheduler.active, *self.on_disk]}
        assert unfinished == queued, "a sequence is lost or left over"

    def _adapter_slot(self, adapter: str | None) -> AdapterSlot | None:
        """Raises ModelNotFoundError: unloaded since the request came in."""
        slot = None if adapter is None else self.weights.find(adapter)
        if adapter is not None and slot is None:
            raise ModelNotFoundError(adapter, [*self.weights.adapters()])
        return slot

    def _forget_prefixes_of_others(self, kept: set[tuple[int, bool]], base_serial: int) -> None:
        self.scheduler.room.prefix_cache.keep_only({(*key, base_serial) for key in kept})
        self.companions.keep_only({serial for serial, _ in kept}, base_serial)

    def _take_token(self, sampled: SampledToken, version: int) -> None:
        """Append a token to its sequence, end it if a stop rule says so, and report it."""
        sequence = sampled.sequence
        finite = math.isfinite(sampled.logprob)
        if not finite and not self._draft_row.is_out:
            self.cache.scrub_row(sequence.row)  # for the row's next owner
        if sequence.finished:  # ended during the step, which fed its newest token
            sequence.cached += 1
            sequence.prefix_key = sequence.prefix_key if finite else None
            return
        if not finite:
            return self._end_early(sequence, NOT_FINITE)
        ends = sequence.matcher is not None and sequence.matcher.ends_thinking
        if not ends and sequence.edits is not None and sequence.edits.forbids(sampled.token):
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
        if sampled.recorded:
            sequence.add_record(sampled.recorded)
        self.counters.generation_tokens += 1
        with own_failure(sequence):
            sequence.apply_stop_rules(self._tokenizer.eos_token_ids)
        if sequence.matcher is not None:
            sequence.advance_matcher(sampled.token)
        self._live.sampled(sequence)

    def _end_early(self, sequence: Sequence, error: str, code: str | None = None) -> None:
        sequence.finish("error", error=error, code=code)
        self._live.retire(sequence)

    def _advance_score(self) -> None:
        """Compute one chunk of the oldest score."""
        if not self._scoring or not (self.scores.begun or self.scheduler.has_room_beside):
            return
        if not self.scheduler.rows:
            self.cache.shrink_to([])  # rows that left made room for the text
        ended = self.scores.advance()
        if ended is None:
            return
        if ended.result is not None:
            self._live.scored(ended.request_id, ended.result)
        else:
            self._live.score_failed(ended.request_id, ended.error or "")
            self.scheduler.remove_finished_from_queue()

    def _note_memory(self) -> None:
        self.counters.kv_tokens = sum([sequence.cached for sequence in self.scheduler.rows])
        self.counters.kv_bytes = self.cache.nbytes + self._draft_row.nbytes
        self.counters.kv_bytes_shared = self.cache.saved_positions * self._token_bytes

    def _after_step(self) -> None:
        self.counters.steps += 1
        self.counters.running = len(self.scheduler.active)
        self._note_memory()
        if self.counters.steps % SHRINK_STEPS == 0:
            # finished ones' too
            self.cache.shrink_to([sequence.cached for sequence in self.scheduler.rows])

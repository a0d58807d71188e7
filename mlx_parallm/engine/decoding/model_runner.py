"""Carries out a `SchedulerOutput` on the model: row moves, chunks of prefill, one decoded token for
every row.

The prefill and the decode step are unmodified mlx-lm forwards over our caches. Only keys and values
of a prefill are ever evaluated (MLX is lazy), and the last token of each prompt is fed by the
decode step, so the head is computed for one position a row. `launch` builds the step's graph under
the weight lock; `collect` evaluates it outside of the lock and reads it: the step's one host sync.
`launch_after` builds and starts step N + 1 before N is read, from the tokens that N samples: what
Python does for a step is then hidden behind a device that computes beside it
(server.async_scheduling). A row that ends with N has computed N + 1 in vain; it is dropped.

A step that failed leaves keys and values doubtful. `rebuild` then computes a row again, from its
sequence's tokens and alone, and tries its next step too: a sequence that raises there is the cause,
and fails alone. This costs one prefill a row and happens after a failure only.
"""

import copy
from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.engine.cache.batch import RunningCache
from mlx_parallm.engine.cache.prefill import arrays_of, present, states_of
from mlx_parallm.engine.cache.prefix import PrefixChunk, Segment
from mlx_parallm.engine.cache.sharing import PromptRows, end_of
from mlx_parallm.engine.companions.recorded import RecordedPrompt, pieces_between
from mlx_parallm.engine.decoding.forward import ForwardContext, GivenText
from mlx_parallm.engine.decoding.sampler import Sampled, SamplingBatch, ordered_alternatives, sample
from mlx_parallm.engine.decoding.steps import DraftStep, LaunchedStep, SampledToken
from mlx_parallm.engine.scheduling.prefills import PrefillChunk, PrefixSave
from mlx_parallm.engine.scheduling.scheduler import SchedulerOutput
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.models.sums import COPY, evaluated, has_signal
from mlx_parallm.system.device.faults import wrong_numbers
from mlx_parallm.system.device.traits import may_lose_results
from mlx_parallm.types import TopLogprob
from mlx_parallm.weights import SharedWeights, WeightsView

HOTTEST = 1000.0
"""A temperature above it may make the logits of a sound step the same number (in float32 some
1e7 does)."""
CHECKED = 8  # arrays of keys and values that are looked at, of those that go to the prefix cache
PROBED = 16  # tokens of a text by which zeros are explained


class ModelRunner:
    """
    Args:
        forward: of the serving tree.
        weights: the read lock, for `rebuild`.
        cache: keys, values and states of the running rows.
        prefill_chunk: tokens of one forward, for `rebuild`.
        processed_alternatives: see SamplingBatch.
    """

    def __init__(
        self,
        forward: ForwardContext,
        weights: SharedWeights,
        cache: RunningCache,
        *,
        prefill_chunk: int,
        processed_alternatives: bool,
    ) -> None:
        self.forward = forward
        self._processed_alternatives = processed_alternatives
        self.prefill_chunk = prefill_chunk
        self._weights = weights
        self._cache = cache
        self._rows: tuple[Sequence, ...] = ()
        self._batch: SamplingBatch | None = None
        self._max_row_tokens: int | None = None  # the last plan's
        self._writes_zeros = False  # this model, in sound steps: zeros say nothing of the device

    def move_rows(self, plan: SchedulerOutput) -> None:
        """Do the work that needs no weights, before the lock is taken: rows into the prefix
        cache, then the moves."""
        kept: list[mx.array] = []
        for save in plan.saves:
            if save.segment is not None:
                save.segment.arrays = self._cache.read(
                    save.row, save.segment.start, save.segment.stop
                )
                kept += save.segment.arrays
            if save.of is not None:
                save.of.snapshots[save.position] = self._cache.read_states(save.row)
                kept += present(save.of.snapshots[save.position])
        mx.eval(kept)
        self._check_written(kept[:: 1 + len(kept) // CHECKED], None)
        if plan.moves:
            longest = max(move.length for move in plan.moves)
            self._cache.move_rows(
                [move.source for move in plan.moves], [move.target for move in plan.moves], longest
            )
        self._cache.truncate(plan.kept)
        pieces = (
            (row.tokens[chunk.start : chunk.stop], row.owner)
            for chunk in plan.prefill
            for row in chunk.prefill.rows
        )
        self.forward.prepare(pieces, self._weights)
        for chunk in plan.prefill:
            if chunk.prompts:
                self._cache.place(chunk.prompts, chunk.first_row)
        self._max_row_tokens = plan.max_row_tokens
        if plan.rows:
            self._cache.reserve([sequence.cached for sequence in plan.rows], plan.max_row_tokens)
        elif plan.prefill and not plan.kept and not any(chunk.prompts for chunk in plan.prefill):
            # no row is left: their room is the prompt's, which has none of its own yet
            self._cache.shrink_to([])

    def launch(self, plan: SchedulerOutput, view: WeightsView) -> LaunchedStep:
        """Builds the step's graph under the read lock of `view`; nothing is evaluated here."""
        pending: list[mx.array] = []
        prompts = [
            [row.owner.adapter for row in chunk.prefill.rows]
            for chunk in plan.prefill
            if chunk.stop > chunk.start
        ]
        adapters = [sequence.adapter for sequence in plan.rows]
        decoded = [[adapter] for adapter in adapters] if self._cache.one_by_one else [adapters]
        self.forward.hold_adapters([*prompts, *decoded])
        for chunk in plan.prefill:
            pending += self._prefill(chunk, view)
        written = [array for array in pending if mx.issubdtype(array.dtype, mx.floating)]
        done, computed = plan.prefilled_tokens, plan.prompt_tokens
        if not plan.rows:
            return LaunchedStep(
                (), view.policy_version, None, None, pending, done, computed, (), written
            )
        rows = self._begin(plan.rows, 0)
        tokens = mx.array([sequence.next_token for sequence in rows], dtype=mx.int32)
        batch, sampled, recorded = self._sample(rows, tokens, 0)
        pending += [*sampled.arrays, *self._cache.unread, *recorded]
        return LaunchedStep(
            rows, view.policy_version, batch, sampled, pending, done, computed, recorded, written
        )

    def make_room_after(self, step: LaunchedStep) -> None:
        """Starts `step`, and gives its rows room for another token. Needs no weights; may wait
        for the device."""
        assert step.sampled is not None
        mx.async_eval(step.pending)
        # writing keys and values that others still hold would copy them
        step.pending[:] = [*step.sampled.arrays, *step.recorded]
        self._cache.reserve(
            [sequence.cached + 1 for sequence in _by_row(step)], self._max_row_tokens
        )

    def launch_after(self, step: LaunchedStep, view: WeightsView) -> LaunchedStep:
        """Builds and starts the step after `step`, of the same rows, fed with the tokens that
        `step` draws.

        `make_room_after` was called. The caller knows that these rows are all rows, that none ends
        by its length, and that no row's logits depend on a token that was not read (a grammar,
        penalties).
        """
        assert step.sampled is not None
        rows = self._begin(_by_row(step), 1)
        tokens = step.sampled.tokens
        if rows != step.rows:
            place = {id(sequence): index for index, sequence in enumerate(step.rows)}
            tokens = mx.take(tokens, mx.array([place[id(sequence)] for sequence in rows]))
        batch, sampled, recorded = self._sample(rows, tokens, 1)
        pending = [*sampled.arrays, *self._cache.unread, *recorded]
        following = LaunchedStep(
            rows, view.policy_version, batch, sampled, pending, recorded=recorded
        )
        mx.async_eval(following.pending)
        return following

    def collect(self, step: LaunchedStep) -> list[SampledToken]:
        """Waits for the step and reads it: the one host sync, but for a step that writes prompts'
        keys and values. A row's log-probability is NaN when its logits were. Raises
        DeviceFaultError: the results are zeros."""
        mx.eval(step.pending)
        if step.written:
            self._check_written(step.written, step.rows[0] if step.rows else None)
        if step.sampled is None or step.batch is None:
            return []
        read = step.sampled.read()
        if may_lose_results():
            alike = [step.rows[row] for row in read.alike]
            alike = [sequence for sequence in alike if sequence.params.temperature <= HOTTEST]
            if alike and not self._gives_zeros(alike[0]):
                raise wrong_numbers("the logits of a token are zeros alone")
        processed = dict(zip(step.batch.reshaped, read.processed, strict=True))
        top: dict[int, tuple[TopLogprob, ...]] = {}
        if step.sampled.top_tokens is not None and step.sampled.top_logprobs is not None:
            ordered = ordered_alternatives(step.sampled.top_tokens, step.sampled.top_logprobs)
            for row, alternatives in zip(step.batch.wants_top, ordered, strict=True):
                top[row] = alternatives[: step.rows[row].params.logprobs]
        columns = [np.array(column) for column in step.recorded]
        return [
            SampledToken(
                sequence,
                read.tokens[row],
                read.logprobs[row],
                processed.get(row),
                top.get(row),
                tuple([column[row].tobytes() for column in columns]) if columns else (),
            )
            for row, sequence in enumerate(step.rows)
        ]

    def _check_written(self, arrays: SequenceOf[mx.array], sequence: Sequence | None) -> None:
        """Raises DeviceFaultError: keys and values of a text are zeros, and this model computes
        others for `sequence` (None: for any text)."""
        if may_lose_results() and not has_signal(arrays).all() and not self._gives_zeros(sequence):
            raise wrong_numbers("the keys or values of a text are zeros alone")

    def _gives_zeros(self, sequence: Sequence | None) -> bool:
        """Whether the model itself has logits that are all the same number, or writes keys,
        values or states of zeros alone, for the beginning of a sequence."""
        if not self._writes_zeros:
            tokens: tuple[int, ...] = (0, 1, 2, 3)
            if sequence is not None:
                text = (*sequence.prompt, *sequence.tokens)
                tokens = text[: sequence.outside_spans(min(PROBED, len(text)))]
            caches = self._cache.new_prefill(len(tokens))
            logits = self._forward(tokens, sequence, caches)
            arrays = [logits - logits[..., :1], *arrays_of(caches)]
            self._writes_zeros = not has_signal(arrays).all()
        return self._writes_zeros

    def reset(self) -> None:
        """Drop rows, adapter stacks and the last batch, after a failed step or when idle."""
        self._cache.clear()
        self._rows, self._batch = (), None
        self.forward.release()

    def _begin(self, by_row: SequenceOf[Sequence], ahead: int) -> tuple[Sequence, ...]:
        """Prepare a decode step, `ahead` tokens after the last one read. Returns the rows in the
        order of its batch."""
        self._cache.begin_step([sequence.cached + ahead for sequence in by_row])
        order = self._cache.order
        return tuple(by_row) if order is None else tuple([by_row[row] for row in order])

    def _sample(
        self, rows: tuple[Sequence, ...], tokens: mx.array, ahead: int
    ) -> tuple[SamplingBatch, Sampled, tuple[mx.array, ...]]:
        """Feeds each row its token, and draws the next one. The last: what the forward
        recorded."""
        batch = self._sampling_batch(rows)
        logits, recorded = self._decode(rows, tokens)
        if any(batch.matchers):
            mx.async_eval(logits)  # the model computes while the grammars' masks are made
        sampled = sample(logits, batch, [len(sequence.tokens) + ahead for sequence in rows])
        return batch, sampled, recorded

    def _decode(
        self, rows: tuple[Sequence, ...], tokens: mx.array
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Feeds each row its next token, tokens [n]; returns logits [n, V], and what is recorded,
        [n, …] each."""
        parts = [
            self.forward.decode(rows[start:stop], tokens[start:stop], caches)
            for start, stop, caches in self._cache.batches()
        ]
        if len(parts) == 1:
            return parts[0].logits, parts[0].recorded
        columns = zip(*[part.recorded for part in parts], strict=True)
        recorded = tuple(mx.concatenate([*column]) for column in columns)
        return mx.concatenate([part.logits for part in parts]), recorded

    def rebuild(self, sequence: Sequence, row: int) -> None:
        """Computes the sequence's prompt and output without its newest token, and puts that into
        `row`.

        Raises whatever the model or the sampler raises on it.
        """
        tokens = (*sequence.prompt, *sequence.tokens)
        length = len(tokens) - 1
        self.forward.prepare([(tokens, sequence)], self._weights)
        caches = self._cache.new_prefill(len(tokens))
        start = 0
        while start < length:
            stop = sequence.outside_spans(min(start + self.prefill_chunk, length))
            self._forward(tokens[start:stop], sequence, caches, start)
            mx.eval(arrays_of(caches))
            start = stop
        logits = self._forward(tokens[-1:], sequence, copy.deepcopy(caches), length)
        mx.eval(sample(logits, SamplingBatch((sequence,)), [len(sequence.tokens)]).arrays)
        prompts = (PromptRows(0, 1, length),)
        self._cache.place(prompts, row)
        if length:
            self._cache.write_prefixes(caches, prompts, row)

    def take_out(self, sequence: Sequence) -> list[Any]:
        """Take the only row out of the cache, which then holds nothing: mlx-lm's own caches of it,
        which `launch_draft` extends and rewinds."""
        arrays = evaluated(lambda: self._cache.read(0, 0, sequence.cached), COPY)
        self._cache.truncate(0)  # first: row, copy and new caches may not fit side by side
        self._cache.shrink_to([])
        text = (*sequence.prompt, *sequence.tokens)[: sequence.cached]
        whole = PrefixChunk(Segment(None, 0, text, arrays=arrays), sequence.cached)
        # room to grow, up to the sequence's longest length
        room = min(2 * sequence.cached, len(sequence.prompt) + sequence.max_tokens)
        caches = self._cache.new_prefill(room, [(whole,)])
        mx.eval(arrays_of(caches))
        return caches

    def put_back(self, sequence: Sequence, caches: list[Any]) -> None:
        """Make the row that `take_out` has taken the only one again."""
        prompts = (PromptRows(0, 1, sequence.cached),)
        self._cache.place(prompts, 0)
        self._cache.write_prefixes(caches, prompts, 0)
        sequence.chunks = ()

    def launch_draft(
        self, sequence: Sequence, draft: tuple[int, ...], caches: list[Any], view: WeightsView
    ) -> DraftStep:
        """Build the graph of a step that feeds the row its next token and a draft behind it, and
        samples after each of them."""
        rows = (sequence,) * (1 + len(draft))
        ids = mx.array([[sequence.next_token, *draft]])
        logits = self.forward.plain(ids, [sequence.adapter], caches)[0]
        batch = SamplingBatch(rows, processed_alternatives=self._processed_alternatives)
        start = len(sequence.tokens)
        sampled = sample(logits, batch, [*range(start, start + len(rows))])
        pending = sampled.arrays + arrays_of(caches)
        return DraftStep(rows, view.policy_version, batch, sampled, pending, draft=draft)

    def try_forward(self) -> None:
        """Computes one token of the base alone. Raises when the model cannot compute at all."""
        mx.eval(self._forward((0,), None, self._cache.new_prefill(1)))

    def _forward(
        self, tokens: tuple[int, ...], sequence: Sequence | None, caches: list[Any], start: int = 0
    ) -> mx.array:
        """Logits [1, V] of the last of the sequence's tokens from the place `start` on; None: of
        none."""
        owner = GivenText() if sequence is None else sequence
        with self._weights.read() as view:
            read = self.forward.read(
                [tokens], [owner], start, caches, view.base_serial, width=len(tokens)
            )
        return read.logits[:, -1]

    def _prefill(self, chunk: PrefillChunk, view: WeightsView) -> list[mx.array]:
        prefill = chunk.prefill
        if not prefill.length:  # prompts of one token, which the decode step feeds
            return []
        for row in prefill.rows if self.forward.companions.records_prompts else ():
            row.reuse_records()
        in_segments = all(end_of(row.chunks) == prefill.length for row in prefill.rows)
        if chunk.prompts and in_segments and self._cache.rewindable:
            for row in prefill.rows:  # nothing to compute, nothing to copy
                row.prefix = ()
            return []
        if not prefill.caches:
            prefill.caches = self._cache.new_prefill(
                prefill.length, [row.prefix for row in prefill.rows]
            )
            for row in prefill.rows:
                row.prefix = ()
        kept = self._compute(chunk, view) if chunk.stop > chunk.start else []
        if chunk.save is not None:
            kept += self._keep(prefill.caches, chunk.save, prefill.rows[0].recorded)
        if chunk.prompts:
            self._cache.write_prefixes(prefill.caches, chunk.prompts, chunk.first_row)
            prefill.caches = []
            return kept  # the decode step reads the rows
        return kept + arrays_of(prefill.caches)

    def _compute(self, chunk: PrefillChunk, view: WeightsView) -> list[mx.array]:
        """Put a chunk of a prefill through the model; returns what else is to be evaluated."""
        rows = chunk.prefill.rows
        read = self.forward.read(
            [row.tokens[chunk.start : chunk.stop] for row in rows],
            [row.owner for row in rows],
            chunk.start,
            chunk.prefill.caches,
            view.base_serial,
            width=chunk.stop - chunk.start,
            record=self.forward.companions.records_prompts,
        )
        return self._note_records(chunk, read.recorded) if read.recorded else []

    def _note_records(self, chunk: PrefillChunk, by_token: SequenceOf[mx.array]) -> list[mx.array]:
        """Give each row of a prefill what is recorded of its tokens; returns it to be
        evaluated."""
        rows = chunk.prefill.rows
        by_row = [each.reshape(len(rows), -1, *each.shape[1:]) for each in by_token]
        arrays: list[mx.array] = []
        for index, row in enumerate(rows):
            columns = [mx.contiguous(each[index]) for each in by_row]
            row.recorded.add(chunk.start, min(chunk.stop, len(row.tokens)), columns)
            arrays += columns
        return arrays

    def _keep(
        self, caches: list[Any], save: PrefixSave, recorded: RecordedPrompt
    ) -> list[mx.array]:
        """Put the keys and values of a one-row prefill into the prefix cache; return arrays to
        be evaluated."""
        kept: list[mx.array] = []
        if save.segment is not None:
            save.segment.recorded = pieces_between(
                recorded.pieces, save.segment.start, save.segment.stop
            )
            save.segment.arrays = self._cache.read_prefill(
                caches, save.segment.start, save.segment.stop
            )
            kept += save.segment.arrays
        if save.of is not None:
            save.of.snapshots[save.position] = states_of(caches)
            kept += present(save.of.snapshots[save.position])
        return kept

    def _sampling_batch(self, rows: tuple[Sequence, ...]) -> SamplingBatch:
        if self._batch is None or rows != self._rows:
            self._batch = SamplingBatch(rows, processed_alternatives=self._processed_alternatives)
            self._rows = rows
        return self._batch


def _by_row(step: LaunchedStep) -> list[Sequence]:
    return sorted(step.rows, key=lambda sequence: sequence.row)

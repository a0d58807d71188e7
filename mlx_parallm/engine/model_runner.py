"""Carries out a `Plan` on the model: moves rows, computes a chunk of prefill, decodes one token for every row.

The prefill and the decode step are unmodified mlx-lm forwards over our caches. Only keys and values of a prefill are
ever evaluated (MLX is lazy), and the last token of each prompt is fed by the decode step, so the head is computed for
one position a row. `launch` builds the step's graph under the weight lock; `collect` evaluates it outside of the lock
and reads it: the step's one host sync. Launching step N+1 before N is read would hide the Python of a step (about 2 ms
of 50 at 32 rows of 29 M parameters on CPU) and cost a wasted row-step per finish; it is not done.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.engine.kv_cache import SlotCache, new_prefill_cache
from mlx_parallm.engine.sampler import Sampled, SamplingBatch, ordered_alternatives, sample
from mlx_parallm.engine.scheduler import Plan, PrefillChunk
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.models.lora import ActiveAdapter, LoraContext
from mlx_parallm.types import TopLogprob
from mlx_parallm.weights import WeightsView

MOVE_BLOCK = 32  # row moves copy up to a multiple of this many positions


@dataclass(frozen=True)
class InFlight:
    """A step's graph: who decodes, under which version, and what the host will read."""

    rows: tuple[Sequence, ...]
    version: int
    batch: SamplingBatch | None
    sampled: Sampled | None
    pending: list[mx.array]


@dataclass(frozen=True, slots=True)
class SampledToken:
    sequence: Sequence
    token: int
    logprob: float
    processed_logprob: float | None
    top_logprobs: tuple[TopLogprob, ...] | None


class ModelRunner:
    """
    Args:
        model: the serving tree (after `prepare_for_serving`).
        lora: what its linear layers read.
        slots: the KV cache.
        prefill_chunk: tokens of one chunk of prefill.
    """

    def __init__(self, model: nn.Module, lora: LoraContext, slots: SlotCache, prefill_chunk: int) -> None:
        self._model = model
        self._lora = lora
        self._slots = slots
        self._prefill_chunk = prefill_chunk
        self._prefill_caches: list[Any] = []
        self._rows: tuple[Sequence, ...] = ()
        self._batch: SamplingBatch | None = None

    def move_rows(self, plan: Plan) -> None:
        """The plan's moves and prefix copies; done before the weight lock is taken, since they read no weights."""
        for group in (plan.moves, plan.copies):
            if group:
                length = -(-max(item.length for item in group) // MOVE_BLOCK) * MOVE_BLOCK
                length = min(length, self._slots.position_capacity)
                self._slots.move_rows([item.source for item in group], [item.target for item in group], length)

    def launch(self, plan: Plan, view: WeightsView) -> InFlight:
        """Builds the step's graph under the read lock of `view`; nothing is evaluated here."""
        pending: list[mx.array] = []
        if plan.prefill is not None:
            pending += self._prefill(plan.prefill, view)
        if not plan.rows:
            return InFlight((), view.policy_version, None, None, pending)
        batch = self._sampling_batch(plan.rows)
        tokens = mx.array([sequence.next_token for sequence in plan.rows], dtype=mx.int32)
        self._slots.begin_step([sequence.cached for sequence in plan.rows])
        self.activate([sequence.adapter for sequence in plan.rows], view)
        logits = self._model(tokens[:, None], cache=self._slots.layers)[:, -1]
        sampled = sample(logits, batch, [len(sequence.tokens) for sequence in plan.rows])
        return InFlight(plan.rows, view.policy_version, batch, sampled, pending + sampled.arrays)

    def collect(self, step: InFlight) -> list[SampledToken]:
        """Waits for the step and reads it: the one host sync. A row's log-probability is NaN when its logits were."""
        mx.eval(step.pending)
        if step.sampled is None or step.batch is None:
            return []
        tokens, logprobs = np.array(step.sampled.tokens).tolist(), np.array(step.sampled.logprobs).tolist()
        processed: dict[int, float] = {}
        if step.sampled.processed is not None:
            processed = dict(zip(step.batch.reshaped, np.array(step.sampled.processed).tolist(), strict=True))
        top: dict[int, tuple[TopLogprob, ...]] = {}
        if step.sampled.top_tokens is not None and step.sampled.top_logprobs is not None:
            ordered = ordered_alternatives(step.sampled.top_tokens, step.sampled.top_logprobs)
            for row, alternatives in zip(step.batch.wants_top, ordered, strict=True):
                top[row] = alternatives[: step.rows[row].params.logprobs]
        return [
            SampledToken(sequence, tokens[row], logprobs[row], processed.get(row), top.get(row))
            for row, sequence in enumerate(step.rows)
        ]

    def activate(self, adapters: SequenceOf[str | None], view: WeightsView) -> None:
        """Tells the linear layers which rows use which adapter. One that has just vanished counts
        as none: the engine has ended its sequences already and drops what is computed for them."""
        active = []
        for name in sorted({name for name in adapters if name is not None and name in view.adapters}):
            uses = [adapter == name for adapter in adapters]
            rows = None if all(uses) else mx.array(uses)[:, None, None]
            active.append(ActiveAdapter(view.adapters[name], rows))
        self._lora.active = tuple(active)

    def reset(self) -> None:
        """After a failed step: whatever it left half-built is dropped."""
        self._slots.clear()
        self._prefill_caches, self._rows, self._batch = [], (), None
        self._lora.active = ()

    def _prefill(self, chunk: PrefillChunk, view: WeightsView) -> list[mx.array]:
        prefill = chunk.prefill
        if chunk.start == 0:
            self._prefill_caches = new_prefill_cache(self._model, prefill.length)
        tokens = np.zeros((len(prefill.rows), chunk.stop - chunk.start), np.int32)
        for row, prompt in enumerate(prefill.rows):
            piece = prompt.tokens[chunk.start : chunk.stop]
            tokens[row, : len(piece)] = piece
        self.activate([row.key[0] for row in prefill.rows], view)
        self._model(mx.array(tokens), cache=self._prefill_caches)
        state = [array for cache in self._prefill_caches for array in cache.state]
        if chunk.sources:
            self._slots.write_prefixes(self._prefill_caches, chunk.sources, chunk.first_row, prefill.length)
            self._prefill_caches = []
            return []  # the decode step reads the rows
        return state

    def _sampling_batch(self, rows: tuple[Sequence, ...]) -> SamplingBatch:
        if self._batch is None or rows != self._rows:
            self._batch = SamplingBatch(rows)
            self._rows = rows
        return self._batch

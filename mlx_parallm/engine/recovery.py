"""After a step that raised: rows are computed again one by one, which shows whose fault it was.

A failed step leaves keys and values doubtful. `RowRebuilder.rebuild` makes one row anew from its sequence's tokens, by
mlx-lm's own caches and in chunks, and tries its next step too: whoever raises there alone is the cause, and fails
alone. This costs one prefill a row and happens after a failure only. `try_forward` is the check that anything works.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.engine.cache.batch import BatchCache, RowCaches, arrays_of
from mlx_parallm.engine.sampler import SamplingBatch, sample
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.models.adapters.adapter import AdapterSlot
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.weights import WeightsView


class RowRebuilder:
    """
    Args:
        model: the serving tree.
        slots: where the rows go.
        lora: tells the linear layers which adapter a row uses.
        read: the weight lock's read side.
        chunk: tokens of one forward.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: BatchCache | RowCaches,
        lora: LoraContext,
        read: Callable[[], AbstractContextManager[WeightsView]],
        chunk: int,
    ) -> None:
        self._model, self._slots, self._lora, self._read, self._chunk = model, slots, lora, read, chunk

    def rebuild(self, sequence: Sequence, row: int) -> None:
        """Computes what the sequence has (prompt and output without the newest token) and puts it into `row`.

        Raises whatever the model or the sampler raises on it.
        """
        known = [*sequence.prompt, *sequence.tokens]
        length = len(known) - 1
        caches = self._slots.new_prefill(len(known))
        for start in range(0, length, self._chunk):
            self._forward(known[start : min(start + self._chunk, length)], sequence.adapter, caches)
            mx.eval(arrays_of(caches))
        logits = self._forward(known[-1:], sequence.adapter, copy.deepcopy(caches))
        mx.eval(sample(logits, SamplingBatch((sequence,)), [len(sequence.tokens)]).arrays)
        if length:
            self._slots.write_prefixes(caches, (0,), row, length)

    def try_forward(self) -> None:
        """One token of the base alone. Raises when the model cannot compute at all."""
        mx.eval(self._forward([0], None, self._slots.new_prefill(1)))

    def _forward(self, tokens: list[int], adapter: AdapterSlot | None, caches: list[Any]) -> mx.array:
        """Logits [1, V] of the last token."""
        with self._read():
            self._lora.activate([adapter])
            return self._model(mx.array([tokens], dtype=mx.int32), cache=caches)[:, -1]

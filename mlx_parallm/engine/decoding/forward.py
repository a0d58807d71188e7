"""Forwards of the serving tree, with all that they read beside tokens and caches: the rows'
adapters, and what companions bring.

    decode   each row's next token
    read     pieces of texts, padded
    plain    rows of tokens without placeholders
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.engine.companions.companion import (
    Carried,
    EngineCompanions,
    Text,
    TextPiece,
)
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.models.adapters.adapter import AdapterSlot
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.weights import SharedWeights

_TEXT_ALONE = nullcontext()


@dataclass(frozen=True)
class GivenText:
    """A text that belongs to no sequence, as a forward reads it: `Text`."""

    adapter: AdapterSlot | None = None
    carried: Carried | None = None


class Forward(NamedTuple):
    """`recorded`: [tokens, …] of each companion that records, if it did."""

    logits: mx.array
    recorded: tuple[mx.array, ...] = ()


class ForwardContext:
    """
    Args:
        model: the serving tree (after `prepare_for_serving`).
        lora: context that the linear layers read.
        companions: of the texts.
    """

    def __init__(self, model: nn.Module, lora: LoraContext, companions: EngineCompanions) -> None:
        self.model, self.companions = model, companions
        self._lora, self._reader = lora, companions.reader

    def decode(self, rows: SequenceOf[Sequence], tokens: mx.array, caches: list[Any]) -> Forward:
        """Feed each row its next token, tokens [n]; logits [n, V]."""
        entered = _TEXT_ALONE if self._reader is None else self._reader.decoding(rows)
        adapters = [sequence.adapter for sequence in rows]
        logits, recorded = self._run(tokens[:, None], caches, adapters, entered, record=True)
        return Forward(logits[:, -1], recorded)

    def read(
        self,
        pieces: SequenceOf[tuple[int, ...]],
        owners: SequenceOf[Text],
        start: int,
        caches: list[Any],
        base_serial: int,
        *,
        width: int,
        record: bool = False,
    ) -> Forward:
        """Put pieces of texts, padded to `width`, through the model, from the place `start` of
        their owners' on; logits [rows, width, V]. `base_serial`: of the weights of now."""
        entered: AbstractContextManager[Any] = _TEXT_ALONE
        if self._reader is not None:
            ids, entered = self._reader.read(pieces, owners, start, width, base_serial)
        else:
            tokens = np.zeros((len(pieces), width), np.int32)
            for index, piece in enumerate(pieces):
                tokens[index, : len(piece)] = piece
            ids = mx.array(tokens)
        return self._run(ids, caches, [owner.adapter for owner in owners], entered, record=record)

    def plain(
        self, ids: mx.array, adapters: SequenceOf[AdapterSlot | None], caches: list[Any]
    ) -> mx.array:
        """Return the logits [rows, T, V] of ids [rows, T] without placeholders."""
        return self._run(ids, caches, adapters, _TEXT_ALONE, record=False).logits

    def prepare(self, pieces: Iterable[TextPiece], weights: SharedWeights) -> None:
        """Compute what forwards of these pieces will need beside them. Its graph is built under the
        read lock, and evaluated outside of it."""
        if self._reader is None:
            return
        with weights.read() as view:
            new = self._reader.prepare(pieces, view.base_serial)
        mx.eval(new)

    def hold_adapters(self, forwards: SequenceOf[SequenceOf[AdapterSlot | None]]) -> None:
        """Name the rows' adapters of each forward that is built before the next evaluation."""
        self._lora.hold_for(forwards)

    def activate(self, adapters: SequenceOf[AdapterSlot | None]) -> None:
        """Name the adapter of each row of a forward that is not made here."""
        self._lora.activate(adapters)

    def release(self) -> None:
        """Drop the last forward's context."""
        self._lora.release()

    def _run(
        self,
        ids: mx.array,
        caches: list[Any],
        adapters: SequenceOf[AdapterSlot | None],
        entered: AbstractContextManager[Any],
        *,
        record: bool,
    ) -> Forward:
        self._lora.activate(adapters)
        if not (record and self.companions.recorders):
            with entered:
                return Forward(self.model(ids, cache=caches))
        with ExitStack() as stack:
            recorded = [stack.enter_context(each.recording()) for each in self.companions.recorders]
            stack.enter_context(entered)
            logits = self.model(ids, cache=caches)
        return Forward(logits, tuple(column() for column in recorded))

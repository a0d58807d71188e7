"""Forwards of the serving tree, with all that they read beside tokens and caches: the rows'
adapters, their images, and whether their experts are recorded.

    decode   each row's next token
    read     pieces of texts, padded
    plain    rows of tokens without images
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.engine.images import ImageFeatures, Piece, ShownText
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.models.adapters.adapter import AdapterSlot
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.models.experts.routing import ForwardRouting, routed
from mlx_parallm.types import NARROW_IDS, PromptImage
from mlx_parallm.weights import SharedWeights

_NO_IMAGES = nullcontext()


@dataclass(frozen=True)
class GivenText:
    """A text that belongs to no sequence, as a forward reads it: `ShownText`."""

    adapter: AdapterSlot | None = None
    images: tuple[PromptImage, ...] = ()
    positions: Any = None
    shift: int = 0


class Forward(NamedTuple):
    """`experts`: [tokens, layers, k] uint8 or uint16, if they were recorded."""

    logits: mx.array
    experts: mx.array | None


class ForwardContext:
    """
    Args:
        model: the serving tree (after `prepare_for_serving`).
        lora: context that the linear layers read.
        images: places the prompts' images; None: the model reads none.
        routing: (layers, experts a token, experts) of a model whose choice of experts is recorded,
            and which `models.experts.routing.prepare_routing` has prepared.
    """

    def __init__(
        self,
        model: nn.Module,
        lora: LoraContext,
        images: ImageFeatures | None = None,
        routing: tuple[int, int, int] | None = None,
    ) -> None:
        self.model = model
        self._lora, self._images, self._routing = lora, images, routing

    def decode(self, rows: SequenceOf[Sequence], tokens: mx.array, caches: list[Any]) -> Forward:
        """Feed each row its next token, tokens [n]; logits [n, V]. Rows behind images decode at
        their own positions."""
        images = _NO_IMAGES if self._images is None else self._images.shifted(rows)
        adapters = [sequence.adapter for sequence in rows]
        record = self._routing is not None
        logits, experts = self._run(tokens[:, None], caches, adapters, images, record=record)
        return Forward(logits[:, -1], experts)

    def read(
        self,
        pieces: SequenceOf[tuple[int, ...]],
        owners: SequenceOf[ShownText],
        start: int,
        caches: list[Any],
        base_serial: int,
        *,
        width: int,
        record: bool = False,
    ) -> Forward:
        """Put pieces of texts, padded to `width`, through the model, from the place `start` of
        their owners' on; logits [rows, width, V].

        Features of images are by the very weights of now, whose base has this serial: others may
        have come since they were prepared.
        """
        adapters = [owner.adapter for owner in owners]
        if self._images is None:
            tokens = np.zeros((len(pieces), width), np.int32)
            for index, piece in enumerate(pieces):
                tokens[index, : len(piece)] = piece
            return self._run(mx.array(tokens), caches, adapters, _NO_IMAGES, record=record)
        self._images.ensure(_shown(zip(pieces, owners, strict=True)), base_serial)
        ids, features = self._images.inputs(pieces, width, adapters)
        positions = self._images.positions(owners, start, width)
        numbers = self._images.numbers(pieces, width)
        entered = self._images.table.using(features, ids, positions, numbers)
        return self._run(ids, caches, adapters, entered, record=record)

    def plain(
        self, ids: mx.array, adapters: SequenceOf[AdapterSlot | None], caches: list[Any]
    ) -> mx.array:
        """Return the logits [rows, T, V] of ids [rows, T] without images."""
        return self._run(ids, caches, adapters, _NO_IMAGES, record=False).logits

    def prepare_images(
        self, pieces: Iterable[tuple[SequenceOf[int], ShownText]], weights: SharedWeights
    ) -> None:
        """Compute the features of pieces of prompts. The tower's graph is built under the read
        lock, and evaluated outside of it."""
        if self._images is None:
            return
        with weights.read() as view:
            new = self._images.prepare(_shown(pieces), view.base_serial)
        mx.eval(new)

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
        images: AbstractContextManager[Any],
        *,
        record: bool,
    ) -> Forward:
        self._lora.activate(adapters)
        routing = ForwardRouting() if record else None
        with routed(routing), images:
            logits = self.model(ids, cache=caches)
        return Forward(logits, None if routing is None else self._ids(routing))

    def _ids(self, routing: ForwardRouting) -> mx.array:
        """Return the experts of a forward, [tokens, layers, k] uint8 or uint16."""
        assert self._routing is not None, "nothing is recorded without it"
        return routing.by_token().astype(mx.uint16 if self._routing[2] > NARROW_IDS else mx.uint8)


def _shown(pieces: Iterable[tuple[SequenceOf[int], ShownText]]) -> Iterable[Piece]:
    return [(tokens, owner.images, owner.adapter) for tokens, owner in pieces]

"""NEFTune: noise on the embeddings of a training pass (Jain et al. 2023, arXiv:2310.05914).

Each number that the embedding of L tokens returns gets a uniform one of ±alpha / sqrt(L · D) added,
as in transformers. L is the length of a sequence itself, not of its padded batch: how a batch is
cut changes nothing. The noise is a function of the seed, so a pass that is made again has it again.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.layouts.layout import PackedRows, TokenBatch

PROBE = (3, 1, 2)
"""Tokens that show which layer embeds them: no layer of positions is called with them."""


class EmbeddingNoise:
    """Adds noise to what the input embedding of a model returns, within `drawn_from`, and else
    nothing. The layer stays the module that it was, of a subclass.

    Raises ModelError: the model's forward shows no embedding.
    """

    def __init__(self, model: nn.Module, alpha: float) -> None:
        self._alpha = alpha
        self._drawn: mx.array | None = None  # [B, T, D] as the layer is called
        self._added = False
        layer: Any = input_embedding(model)
        self._width = layer(mx.array([0])).shape[-1]
        kind = type(layer)
        layer.__class__ = type(f"{kind.__name__}WithNoise", (_Noisy, kind), {})
        layer._noise = self

    @contextmanager
    def drawn_from(
        self, seed: Sequence[int], batch: TokenBatch, rows: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[None]:
        """Add noise in passes over a batch of rows as they are, or packed.

        Args:
            seed: numbers; a row's noise is drawn from them and its own of `rows`.
            lengths: tokens of each row's sequence, the last one included.

        Raises ModelError: no embedding was computed.
        """
        span = batch.inputs.shape[1]
        named = zip(rows, lengths, strict=True)
        drawn = [self._noise([*seed, row], length) for row, length in named]
        padded = mx.stack(
            [mx.pad(each[:span], [(0, max(0, span - len(each))), (0, 0)]) for each in drawn]
        )
        if batch.compact is not None:
            assert isinstance(batch.compact, PackedRows), "each token has a place of its own"
            padded = _moved(padded, batch.compact)
        mx.eval(padded)
        self._drawn, self._added = padded, False
        try:
            yield
        finally:
            self._drawn = None
        if not self._added:
            raise ModelError("embedding noise was not added: the model embeds in another way")

    def add(self, embedded: mx.array) -> mx.array:
        """Return the layer's output with the noise of this pass. The head is looked at with
        a row of other tokens: they get none."""
        if self._drawn is None or embedded.shape != self._drawn.shape:
            return embedded
        self._added = True
        return embedded + self._drawn.astype(embedded.dtype)

    def _noise(self, seed: Sequence[int], length: int) -> mx.array:
        """Return the noise [length, D] of one sequence."""
        key = mx.random.key(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        bound = self._alpha / math.sqrt(length * self._width)
        return mx.random.uniform(-bound, bound, (length, self._width), key=key)


class _Noisy:
    """Mixed into an embedding's class."""

    _noise: EmbeddingNoise

    def __call__(self, ids: mx.array) -> mx.array:
        return self._noise.add(super().__call__(ids))  # type: ignore[misc]


def input_embedding(model: nn.Module) -> nn.Module:
    """Return the layer that a model's forward gives its tokens to, the first if there are several.
    Raises ModelError: none is."""
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "as_linear")]
    kinds = [type(layer) for layer in layers]
    calls: list[tuple[nn.Module, mx.array]] = []

    def watched(kind: Any) -> Any:
        def call(self: Any, ids: mx.array) -> Any:
            calls.append((self, ids))
            return kind.__call__(self, ids)

        return type(kind.__name__, (kind,), {"__call__": call})

    for layer, kind in zip(layers, kinds, strict=True):
        layer.__class__ = watched(kind)
    try:
        model(mx.array([PROBE]))  # nothing of it is evaluated
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
    for layer, ids in calls:
        if np.array(ids).ravel().tolist() == list(PROBE):
            return layer
    raise ModelError("the model's forward gives its tokens to no embedding")


def _moved(rows: mx.array, packed: PackedRows) -> mx.array:
    """Return numbers [B, T, D] of rows at the places that their tokens have in packed rows."""
    tokens = np.flatnonzero(packed.places >= 0)
    flat = mx.zeros((packed.inputs.size, rows.shape[-1]))
    flat[mx.array(packed.places.ravel()[tokens])] = rows.reshape(-1, rows.shape[-1])[
        mx.array(tokens)
    ]
    return flat.reshape(*packed.inputs.shape, -1)

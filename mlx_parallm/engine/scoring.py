"""Log-probabilities of a given text (`prompt_logprobs`, echo), or its pooled hidden states: a
forward of its own, by chunks.

One chunk is computed a step, so decoding rows wait for one chunk at most, and logits of one chunk
exist at a time. All chunks of a text use the same weights: the adapter stays as it was at the first
chunk, and when the base itself is published in between, the text starts again.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.engine.cache.prefill import arrays_of
from mlx_parallm.engine.companions.companion import Carried, EngineCompanions
from mlx_parallm.engine.decoding.forward import ForwardContext, GivenText
from mlx_parallm.engine.decoding.sampler import ordered_alternatives, top_logprobs
from mlx_parallm.models.adapters.adapter import AdapterSlot
from mlx_parallm.models.layer_stack import LayerStack
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.sums import has_signal
from mlx_parallm.system.device.faults import raise_device_fault, wrong_numbers
from mlx_parallm.system.device.traits import may_lose_results
from mlx_parallm.types import Pooling, PromptLogprobs, Request, TopLogprob
from mlx_parallm.weights import SharedWeights

NOT_FINITE = "the model's logits are not finite"
CHUNK_LOGITS = 1 << 24  # logits of one chunk: 64 MB of float32


@dataclass
class Score:
    """A text being scored, or embedded (`pooling`). Entry 0 of the scores is None: nothing
    precedes it. With `carried`: `shown` has numbers in the place of its placeholders."""

    request_id: str
    tokens: tuple[int, ...]
    adapter: AdapterSlot | None
    top_count: int
    pooling: Pooling | None = None
    shown: tuple[int, ...] = ()
    carried: Carried | None = None
    caches: list[Any] = field(default_factory=list)
    done: int = 0
    used: AdapterSlot | None = None  # `adapter` as it was at the first chunk
    base_serial: int = -1  # the base's at the first chunk
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top_logprobs: list[tuple[TopLogprob, ...] | None] = field(default_factory=lambda: [None])

    vector: np.ndarray | None = None  # [D] float32, of the positions so far

    @property
    def positions(self) -> int:
        """How many tokens are computed; the log-probabilities of a text need all but its last."""
        return len(self.tokens) - (self.pooling is None)

    @property
    def finished(self) -> bool:
        return self.done >= self.positions

    @property
    def finite(self) -> bool:
        numbers = self.logprobs[1:] if self.vector is None else self.vector.tolist()
        return all(value is not None and math.isfinite(value) for value in numbers)

    def begin(self, base_serial: int, caches: list[Any]) -> None:
        self.base_serial, self.caches, self.done = base_serial, caches, 0
        self.used = None if self.adapter is None else replace(self.adapter)
        self.logprobs, self.top_logprobs, self.vector = [None], [None], None

    def embedding(self) -> tuple[float, ...] | None:
        """The pooled hidden states, with `pooling`."""
        if self.vector is None:
            return None
        return tuple(
            (self.vector / len(self.tokens) if self.pooling == "mean" else self.vector).tolist()
        )

    def result(self) -> PromptLogprobs:
        return PromptLogprobs(tuple(self.logprobs), tuple(self.top_logprobs))


class Scorer:
    """
    Args:
        forward: of the serving tree.
        new_caches: caches for a forward over so many positions (`BatchCache.new_prefill`).
        chunk: most tokens of one chunk.
    """

    def __init__(
        self,
        forward: ForwardContext,
        new_caches: Callable[[int], list[Any]],
        chunk: int,
        vocab_size: int,
    ) -> None:
        self._forward = forward
        self._new_caches = new_caches
        self._vocab_size = vocab_size
        self.bound(chunk)

    def bound(self, chunk: int) -> None:
        """Take at most so many tokens a chunk from now on."""
        self._chunk = max(16, min(chunk, CHUNK_LOGITS // self._vocab_size))
        self._hidden_chunk = chunk

    def launch(self, score: Score, base_serial: int) -> list[mx.array]:
        """Builds the next chunk under the read lock: [C] log-probabilities, then alternatives
        [C, K] if wanted; with `pooling` [D], the chunk's sum or its last hidden state. Raises
        ValueError: see `LayerStack.hidden`."""
        if score.finished:
            return []
        if score.pooling is not None:
            start = self._advance(score, base_serial, self._hidden_chunk)
            self._forward.activate([score.used])
            tokens = mx.array(score.tokens[start : score.done], dtype=mx.int32)[None]
            stack = LayerStack(self._forward.model)
            hidden = stack.hidden(tokens, score.caches)[0].astype(mx.float32)
            return [hidden.sum(axis=0) if score.pooling == "mean" else hidden[-1]]
        logits = self.next_logits(score, base_serial)
        targets = mx.array(
            score.tokens[score.done - len(logits) + 1 : score.done + 1], dtype=mx.int32
        )
        arrays = [token_logprobs(logits, targets)]
        if score.top_count:
            arrays += top_logprobs(logits.astype(mx.float32), score.top_count)
        return arrays

    def next_logits(self, score: Score, base_serial: int) -> mx.array:
        """Builds the next chunk's logits under the read lock, [C, V]: row i says what follows
        its token i. `score.done` is its end; it is the first one again if the base has
        changed."""
        start = self._advance(score, base_serial, self._chunk)
        tokens = score.shown[start : score.done]
        owner = GivenText(score.used, score.carried)
        read = self._forward.read(
            [tokens], [owner], start, score.caches, base_serial, width=len(tokens)
        )
        return read.logits[0]

    def _advance(self, score: Score, base_serial: int, most: int) -> int:
        """Continue to the next chunk's end, under the weights of the first one; return the
        position it begins."""
        if score.base_serial != base_serial:
            score.begin(base_serial, self._new_caches(score.positions))
        start, score.done = score.done, min(score.done + most, score.positions)
        return start

    def collect(self, score: Score, arrays: list[mx.array]) -> None:
        """Waits for a chunk and appends its values. Raises DeviceFaultError: they are zeros."""
        if not arrays:
            return
        mx.eval(arrays, arrays_of(score.caches))
        written = arrays_of(score.caches)
        if written and may_lose_results() and not has_signal(written).any():
            raise wrong_numbers("the keys and values of a text that is scored are zeros alone")
        if score.pooling is not None:
            pooled = np.array(arrays[0])
            score.vector = (
                pooled if score.vector is None or score.pooling == "last" else score.vector + pooled
            )
            return
        values = np.array(arrays[0]).tolist()
        score.logprobs += values
        score.top_logprobs += (
            ordered_alternatives(arrays[1], arrays[2]) if score.top_count else [None] * len(values)
        )


@dataclass(frozen=True)
class ScoreEnd:
    """How a text's score has ended: with a result, or with an error."""

    request_id: str
    result: PromptLogprobs | tuple[float, ...] | None = None
    error: str | None = None


class ScoreQueue:
    """Texts to be scored or embedded, one after the other, a chunk at a time.

    Args:
        scorer: of the engine's model.
        weights: the read lock.
        companions: of the texts.
    """

    def __init__(
        self, scorer: Scorer, weights: SharedWeights, companions: EngineCompanions
    ) -> None:
        self._scorer, self._weights, self._companions = scorer, weights, companions
        self._scores: deque[Score] = deque()

    def __len__(self) -> int:
        return len(self._scores)

    @property
    def oldest(self) -> Score:
        """The text that is computed next."""
        return self._scores[0]

    @property
    def begun(self) -> bool:
        """Whether a part of the oldest is computed."""
        return bool(self._scores) and self.oldest.done > 0

    @property
    def positions(self) -> int:
        """Positions of the oldest; 0: there is none."""
        return self.oldest.positions if self._scores else 0

    def bound(self, chunk: int) -> None:
        """Take at most so many tokens a chunk from now on."""
        self._scorer.bound(chunk)

    def text(self, request: Request, adapter: AdapterSlot | None) -> Score:
        """Return a request's prompt as a text to be scored. Raises RequestError
        (`companions.companion`)."""
        self._companions.check_scored(request)
        params = request.params
        score = Score(
            request.request_id, request.prompt_token_ids, adapter, params.prompt_logprobs or 0
        )
        score.pooling = params.pooling
        score.shown, score.carried = self._companions.carry(request)
        return score

    def add(self, score: Score) -> None:
        self._scores.append(score)

    def remove(self, request_id: str) -> None:
        self._scores = deque(score for score in self._scores if score.request_id != request_id)

    def advance(self) -> ScoreEnd | None:
        """Compute one chunk of the oldest; returns how it has ended, None: it continues."""
        score = self.oldest
        try:
            with self._weights.read() as view:
                chunk = self._scorer.launch(score, view.base_serial)
            self._scorer.collect(score, chunk)
        except Exception as error:  # noqa: BLE001 - boundary: a text is computed alone, the failure is its own
            raise_device_fault(error)
            return self._end(error=f"the text cannot be scored: {error!r}")
        if not score.finite:
            return self._end(error=NOT_FINITE)
        return self._end(score.embedding() or score.result()) if score.finished else None

    def _end(
        self,
        result: PromptLogprobs | tuple[float, ...] | None = None,
        error: str | None = None,
    ) -> ScoreEnd:
        return ScoreEnd(self._scores.popleft().request_id, result, error)

    def next_logits(self, text: Score) -> np.ndarray:
        """Logits [C, V] float32 of the text's positions up to `text.done`, until it is
        `finished`."""
        with self._weights.read() as view:
            logits = self._scorer.next_logits(text, view.base_serial).astype(mx.float32)
        mx.eval(logits, arrays_of(text.caches))
        return np.array(logits)

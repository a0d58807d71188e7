"""A request's changes to its logits, kept sparse: a few hundred (token, bias, penalties) entries a
row. No MLX.

Penalties, bias and forbidden tokens touch the tokens that were seen or named, never the whole
vocabulary, so a step gathers those logits, edits and writes them back. Order and formulas are
vLLM's: forbidden (min_tokens) and bias first, then repetition (over prompt and output; Keskar et
al. 2019, arXiv:1909.05858), then frequency and presence (output).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.types import SamplingParams

_COLUMNS = 16


@dataclass(frozen=True)
class EditTable:
    """The edits of R rows, padded to K entries each by repeating an entry: the write back is then
    idempotent.

    tokens [R, K] int32 · bias [R, K] float32 (-inf = forbidden) · repetition [R, K] float32, 1 =
    none · subtract [R, K] float32: frequency × count + presence.
    """

    tokens: np.ndarray
    bias: np.ndarray
    repetition: np.ndarray
    subtract: np.ndarray


class LogitEdits:
    """One sequence's edits; `add_output` after every token, O(1).

    `bad_words`: token ids of texts that must not come up: the last one is forbidden if the
    others have just been drawn (the prompt does not count, as in vLLM).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: tuple[int, ...],
        forbidden: frozenset[int],
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._params = params
        self._min_tokens = params.min_tokens if forbidden else 0
        self._place: dict[int, int] = {}
        self._outputs = 0
        self._tokens = np.zeros(_COLUMNS, np.int32)
        self._bias = np.zeros(_COLUMNS, np.float32)
        self._seen = np.zeros(_COLUMNS, bool)
        self._count = np.zeros(_COLUMNS, np.float32)
        self._forbidden = np.zeros(_COLUMNS, bool)
        for token, bias in params.logit_bias.items():
            place = self._entry(token)  # first: it may replace the arrays
            self._bias[place] = bias
        for token in forbidden if self._min_tokens else ():
            place = self._entry(token)
            self._forbidden[place] = True
        self._bad = [(word[:-1], self._entry(word[-1])) for word in bad_words]
        self._last: tuple[int, ...] = ()
        self._longest = max((len(before) for before, _ in self._bad), default=0)
        if params.repetition_penalty != 1.0:
            for token in set(prompt):
                place = self._entry(token)
                self._seen[place] = True

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return bool(
            params.logit_bias
            or params.min_tokens
            or params.bad_words
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )

    def add_output(self, token: int) -> None:
        self._outputs += 1
        if self._longest:
            self._last = (*self._last, token)[-self._longest :]
        params = self._params
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            place = self._entry(token)
            self._seen[place] = True
            self._count[place] += 1

    def forbids(self, token: int) -> bool:
        """Whether the token may not come next. A forbidden token is drawn only if all are
        forbidden."""
        place = self._place.get(token)
        if place is None:
            return False
        early = self._outputs < self._min_tokens and bool(self._forbidden[place])
        return early or place in self._bad_places()

    def _bad_places(self) -> list[int]:
        return [
            place
            for before, place in self._bad
            if self._last[len(self._last) - len(before) :] == before
        ]

    @property
    def size(self) -> int:
        return len(self._place)

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """tokens, bias, repetition, subtract; each [size]."""
        n, params = self.size, self._params
        bias = self._bias[:n]
        if self._outputs < self._min_tokens:
            bias = np.where(self._forbidden[:n], -np.inf, bias).astype(np.float32)
        if bad := self._bad_places():
            bias = bias.copy()
            bias[bad] = -np.inf
        repetition = np.where(self._seen[:n], params.repetition_penalty, 1.0).astype(np.float32)
        count = self._count[:n]
        subtract = params.frequency_penalty * count + params.presence_penalty * (count > 0)
        return self._tokens[:n], bias, repetition, subtract.astype(np.float32)

    def _entry(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._tokens):
                self._tokens, self._bias = _doubled(self._tokens), _doubled(self._bias)
                self._seen, self._count = _doubled(self._seen), _doubled(self._count)
                self._forbidden = _doubled(self._forbidden)
            self._tokens[place] = token
        return place


def _doubled(column: np.ndarray) -> np.ndarray:
    return np.concatenate([column, np.zeros_like(column)])


def stack_edits(edits: list[LogitEdits]) -> EditTable:
    """The table of several rows, each with at least one entry."""
    width = -(-max(edit.size for edit in edits) // _COLUMNS) * _COLUMNS
    columns = [edit.columns() for edit in edits]
    stacked = [
        np.stack(
            [
                np.concatenate([row[c], np.repeat(row[c][:1], width - len(row[c]))])
                for row in columns
            ]
        )
        for c in range(4)
    ]
    return EditTable(*stacked)


def spellings(word: str, encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """Token ids of a bad word: alone, and behind a space, if that is another first token.

    vLLM leaves the second out if it is not as many tokens as the first: SentencePiece's `▁world`
    beside `wor` `ld`.

    Args:
        encode: to the tokens that a text has inside another.
    """
    alone, behind = (tuple(encode(space + word.lstrip())) for space in ("", " "))
    ways = [alone] if alone else []
    return [*ways, behind] if behind and behind[:1] != alone[:1] else ways

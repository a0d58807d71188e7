"""A teacher's distributions over its own vocabulary, in tokens of the student's.

    spelled    a teacher's token counts as the student's token of the same bytes; without one, as
               the first of those that spell it
    hybrid     a token that both have keeps its place; the others keep their probabilities alone, in
               order (id -1), for the sorted part of the loss (`losses.distillation.unlike`)
    uld        all of them keep their probabilities alone

Both sides' ends of turn are one token.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from mlx_parallm.losses.distillation import LEAST_LOGPROB
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.distillation.scoring import Scored

Way = Literal["spelled", "hybrid", "uld"]
ALONE = -1
"""The id of a token that the student's vocabulary does not have."""


class Vocabularies:
    """Args:
    size: tokens of the policy's output, and `their_size` those of the teacher's.
    """

    def __init__(
        self,
        ours: Tokenizer,
        theirs: Tokenizer,
        way: Way,
        size: int,
        their_size: int,
    ) -> None:
        self._ours, self._theirs, self._way = ours, theirs, way
        self._size, self._their_size, self._our_end = size, their_size, ours.eos_token_id
        self._known: dict[tuple[int, bytes], int] = {}
        self._every: dict[bytes, np.ndarray] = {}

    def keep(self, keep: int | None) -> int | None:
        """How many of the teacher's best tokens are asked for, where the student wants `keep`."""
        return keep if not keep else min(keep, self._their_size - 1)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """The student's tokens by their bytes, of equal ones the first."""
        tokens: dict[bytes, int] = {}
        for token in range(min(self._size, self._ours.vocab_size)):
            if token not in self._ours.special_ids:
                tokens.setdefault(self._ours.token_bytes(token), token)
        tokens.pop(b"", None)
        return tokens

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)

    def both(self) -> np.ndarray:
        """[V + 1] float32: 1 for the student's tokens that the teacher has too, and their share of
        the teacher's vocabulary."""
        both = np.zeros(self._size + 1, np.float32)
        if self._way == "hybrid":
            pairs = {self.same(token) for token in range(self._their_size)} - {ALONE}
            both[sorted(pairs)] = 1
            both[-1] = len(pairs) / self._their_size
        return both

    def same(self, token: int, lead: bytes = b"") -> int:
        """The student's token that is this token of the teacher's, or ALONE. `lead`: bytes before
        the text of both."""
        if token in self._theirs.eos_token_ids:
            return ALONE if self._our_end is None else self._our_end
        if token in self._theirs.special_ids or token >= self._theirs.vocab_size:
            return ALONE
        return self._by_bytes.get(self._text(token, lead), ALONE)

    def _text(self, token: int, lead: bytes) -> bytes:
        text = self._theirs.token_bytes(token)
        return text[len(lead) :] if text.startswith(lead) else b""

    def spelled(self, token: int, lead: bytes = b"") -> int:
        """The student's token that begins the text of this token, or ALONE."""
        key = token, lead
        if key not in self._known:
            self._known[key] = self._spelled(token, lead)
        return self._known[key]

    def _all_spelled(self, lead: bytes) -> np.ndarray:
        """`spelled` of each of the teacher's tokens."""
        if lead not in self._every:
            tokens = range(self._their_size)
            self._every[lead] = np.array([self.spelled(token, lead) for token in tokens])
        return self._every[lead]

    def _spelled(self, token: int, lead: bytes) -> int:
        same = self.same(token, lead)
        if same != ALONE or token in self._theirs.special_ids:
            return same
        text = self._text(token, lead) if token < self._theirs.vocab_size else b""
        try:
            written = self._ours.encode_within(text.decode()) if text else []
        except UnicodeDecodeError:
            written = []
        if written and text.startswith(self._ours.token_bytes(written[0])):
            return written[0]
        sizes = range(min(len(text), self._longest), 0, -1)
        prefixes = (self._by_bytes.get(text[:size]) for size in sizes)
        return next((each for each in prefixes if each is not None), ALONE)

    def targets(
        self,
        scored: Scored,
        rows: Sequence[tuple[int, int]],
        length: int,
        keep: int,
        leads: Mapping[int, bytes],
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Return (ids [length, keep], log-probabilities [length, keep + 1] with the rest's), or
        (None, [length, V]) with keep = 0; NaN where there is no distribution.

        Args:
            rows: (number of the student's token, number of the teacher's) at which both continue
                the same text.
            leads: bytes that are only the teacher's, at the beginning of its tokens of these
                numbers.
        """
        width = keep + 1 if keep else self._size
        targets = np.full((length, width), np.nan, np.float32)
        ids = np.zeros((length, keep), np.int32) if keep else None
        assert scored.targets is not None
        for row, their_row in rows:
            logs = scored.targets[their_row].astype(np.float64)
            if np.isnan(logs).any():
                continue
            tokens = np.arange(len(logs)) if scored.ids is None else scored.ids[their_row]
            before = leads.get(their_row, b"")
            if self._way == "spelled":
                best, numbers = self._as_spelled(tokens, logs, keep, before)
            else:
                best, numbers = self._as_sorted(tokens, logs, keep, before)
            targets[row] = numbers
            if ids is not None:
                ids[row] = best
        return ids, targets

    def _as_spelled(
        self, tokens: np.ndarray, logs: np.ndarray, keep: int, lead: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        mass = np.exp(logs)
        if keep:
            mapped = np.array([self.spelled(int(token), lead) for token in tokens])
        else:
            mapped = self._all_spelled(lead)
        rest = mass[len(tokens) :].sum() + mass[: len(tokens)][mapped == ALONE].sum()
        sums = np.bincount(
            mapped[mapped != ALONE],
            weights=mass[: len(tokens)][mapped != ALONE],
            minlength=self._size,
        )
        if not keep:
            # what the student cannot write is left out
            whole = sums.sum() or np.nan
            return np.zeros(0), _logs(sums / whole)
        best = np.argsort(-sums, kind="stable")[:keep]
        numbers = sums[best]
        left = sums.sum() - numbers.sum()
        return best, _logs(np.append(numbers, max(rest + left, 0.0)))

    def _as_sorted(
        self, tokens: np.ndarray, logs: np.ndarray, keep: int, lead: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        count = len(tokens)
        order = np.argsort(-logs[:count], kind="stable")
        hybrid = self._way == "hybrid"
        best = np.full(keep, ALONE)
        best[:count] = [self.same(int(token), lead) if hybrid else ALONE for token in tokens[order]]
        numbers = np.full(keep + 1, LEAST_LOGPROB)
        numbers[:count] = logs[order]
        numbers[keep] = logs[count:].sum() if len(logs) > count else LEAST_LOGPROB
        # two of the teacher's tokens that are one of the student's: the likelier one keeps it
        seen: set[int] = set()
        for place, token in enumerate(best[:count]):
            if token != ALONE and token in seen:
                best[place] = ALONE
            seen.add(int(token))
        return best, numbers


def _logs(mass: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(mass, np.exp(LEAST_LOGPROB)))

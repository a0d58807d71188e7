"""Decode the only row by drafts (prompt_lookup.py).

Its keys and values are taken out of the cache into mlx-lm's own caches, which can be rewound behind
the rejected tokens. They return when no draft is likely, or other rows come.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.engine.cache.prefill import arrays_of, leaves
from mlx_parallm.engine.decoding.model_runner import ModelRunner
from mlx_parallm.engine.decoding.prompt_lookup import Drafts
from mlx_parallm.engine.decoding.steps import DraftStep, SampledToken
from mlx_parallm.engine.live_requests import Counters
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.weights import WeightsView


@dataclass
class _DraftRow:
    """`caches`: empty while the row is in the cache."""

    sequence: Sequence
    drafts: Drafts
    caches: list[Any] = field(default_factory=list)
    draft: tuple[int, ...] = ()  # the next step's


class DraftRow:
    """
    Args:
        runner: of the engine's model.
        longest: tokens of a draft; 0: there are none.
    """

    def __init__(self, runner: ModelRunner, longest: int, counters: Counters) -> None:
        self._runner, self._longest, self._counters = runner, longest, counters
        self._row: _DraftRow | None = None

    @property
    def is_out(self) -> bool:
        """Whether the only row is out of the cache."""
        return self._row is not None and bool(self._row.caches)

    @property
    def nbytes(self) -> int:
        """Memory of the row that is out of the cache."""
        return sum(array.nbytes for array in arrays_of(self._row.caches)) if self._row else 0

    def has_draft(self, rows: SequenceOf[Sequence]) -> bool:
        """Whether the next step of these rows may have a draft."""
        row = self._of(rows)
        return row is not None and bool(row.drafts.next(row.sequence.tokens))

    def prepare(self, rows: SequenceOf[Sequence]) -> bool:
        """Whether the next step of these rows is one of the only row, which is then out of the
        cache; else it is in the cache."""
        row = self._of(rows)
        if row is None:
            self.put_back()
            return False
        sequence = row.sequence
        room = sequence.max_tokens - len(sequence.tokens) - 1
        row.draft = tuple(row.drafts.next(sequence.tokens)[:room])
        if row.draft and not row.caches:
            row.caches = self._runner.take_out(sequence)
        return bool(row.caches)

    def launch(self, view: WeightsView) -> DraftStep:
        """Build the step that `prepare` has announced, under the read lock of `view`."""
        row = self._row
        assert row is not None, "`prepare` was true"
        return self._runner.launch_draft(row.sequence, row.draft, row.caches, view)

    def take(
        self,
        step: DraftStep,
        tokens: SequenceOf[SampledToken],
        give: Callable[[SampledToken, int], None],
    ) -> None:
        """Give the row the tokens of its draft that hold, and one more."""
        row = self._row
        assert row is not None, "a step of it has ended"
        sequence, drafts, draft = row.sequence, row.drafts, step.draft
        before = len(sequence.tokens)
        for place, token in enumerate(tokens):
            give(token, step.version)
            if sequence.finished or (token.token,) != draft[place : place + 1]:
                break
        held = len(sequence.tokens) - before - 1
        for cache in leaves(row.caches):
            cache.trim(len(draft) - held)
        if draft:
            drafts.judge(len(draft), held, len(sequence.tokens))
            self._counters.draft_tokens += len(draft)
            # -1: not one token was finite
            self._counters.accepted_draft_tokens += max(held, 0)
        if sequence.finished or drafts.none_soon(sequence.tokens):
            self.put_back()

    def put_back(self) -> None:
        """Put the row that is out of the cache back."""
        if self._row is not None and self._row.caches:
            caches, self._row.caches = self._row.caches, []
            self._runner.put_back(self._row.sequence, caches)

    def forget(self) -> None:
        """Drop the row that is out of the cache, whose keys and values are doubtful."""
        if self._row is not None:
            self._row.caches = []

    def _of(self, rows: SequenceOf[Sequence]) -> _DraftRow | None:
        """Return the only row, if a draft may be tried on it."""
        if not self._longest or len(rows) != 1:
            return None
        [sequence] = rows
        if sequence.matcher is not None or sequence.edits is not None or sequence.carried:
            return None
        if self._row is None or self._row.sequence is not sequence:
            self._row = _DraftRow(sequence, Drafts(sequence.prompt, self._longest))
        return self._row

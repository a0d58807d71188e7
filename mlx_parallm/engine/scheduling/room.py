"""The room of the cache: does a sequence fit, what of its prompt is there already, where does its
prefill stop, and which part is kept? No tensor in sight.

    RectangleRows  all rows are as long as the longest
    TokenRows      rows take the room of their tokens, and read shared segments in place
    CacheRoom      over one of these: a row holds every prefix of itself, so a prompt begins where
                   the longest known one ends, and rows are kept when they begin and end
    SnapshotRoom   layers have a recurrent state, so a prompt begins at a snapshot only. Its prefill
                   stops where one will be wanted: where others that wait, or were computed,
                   continue in another way, every SNAPSHOT_EVERY tokens, and at the end
"""

from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from math import ceil
from typing import Protocol

from mlx_parallm.engine.cache.prefix import Key, PrefixCache, PrefixChunk, Segment, common_beginning
from mlx_parallm.engine.cache.sharing import (
    SHARED_FROM,
    PromptRows,
    end_of,
    referenced,
    shared_positions,
    size_class,
    worth_a_segment,
)
from mlx_parallm.engine.scheduling.prefills import Prefill, PrefillRow, PrefixSave
from mlx_parallm.engine.sequence import Sequence

SNAPSHOT_EVERY = 512  # tokens of a long prompt
SNAPSHOT_FROM = 16  # tokens: a shorter beginning is not worth one
COMPARED = 64  # waiting prompts that a prompt is compared with before it is computed

WeightsOf = Callable[[Sequence], Hashable]
"""Identifies the weights that compute a sequence now; equal for equal weights only."""


class RowLayout(Protocol):
    """How the running rows take positions of the cache."""

    def positions(
        self,
        rows: SequenceOf[Sequence],
        prefills: SequenceOf[Prefill],
        joining: Sequence | None = None,
        waits_for: PrefillRow | None = None,
    ) -> int:
        """Return the positions that the rows can come to take, with those of prompts that are being
        computed, and of one more that waits for the row `waits_for`, or for one of its own."""

    def in_place(self, prefix: tuple[PrefixChunk, ...]) -> tuple[PrefixChunk, ...]:
        """Return the part of a known prefix that rows read in place."""

    def prompt_rows(
        self, source: int, row: PrefillRow, kept: tuple[PrefixChunk, ...]
    ) -> PromptRows:
        """Return the new rows of a computed prompt, `source` in its prefill. `kept`: what the
        prefix cache has of it by now, if its prefill has put it there."""


class RectangleRows:
    """Rows × the longest of them."""

    def positions(
        self,
        rows: SequenceOf[Sequence],
        prefills: SequenceOf[Prefill],
        joining: Sequence | None = None,
        waits_for: PrefillRow | None = None,
    ) -> int:
        active = [s for s in rows if not s.finished]
        active += [s for prefill in prefills for s in prefill.sequences if not s.finished]
        active += [] if joining is None else [joining]
        return len(active) * max((len(s.prompt) + s.max_tokens for s in active), default=0)

    def in_place(self, prefix: tuple[PrefixChunk, ...]) -> tuple[PrefixChunk, ...]:
        return ()

    def prompt_rows(
        self, source: int, row: PrefillRow, kept: tuple[PrefixChunk, ...]
    ) -> PromptRows:
        return PromptRows(source, len(row.sequences), len(row.tokens), row.chunks)


class TokenRows:
    """Rows in size classes, and shared segments once."""

    def positions(
        self,
        rows: SequenceOf[Sequence],
        prefills: SequenceOf[Prefill],
        joining: Sequence | None = None,
        waits_for: PrefillRow | None = None,
    ) -> int:
        more = [] if joining is None else [joining]
        running = [s for s in rows if not s.finished]
        positions = sum(
            size_class(len(s.prompt) + s.max_tokens - end_of(s.chunks)) for s in running
        )
        shared = [chunk for s in running for chunk in s.chunks]
        for row in (row for prefill in prefills for row in prefill.rows):
            waiting = [*row.sequences, *more] if row is waits_for else row.sequences
            shared += row.chunks
            positions += _positions_of(len(row.tokens) - end_of(row.chunks), waiting)
        if joining is not None and waits_for is None:
            positions += _positions_of(len(joining.prompt) - 1, more)
        return positions + shared_positions(shared)

    def in_place(self, prefix: tuple[PrefixChunk, ...]) -> tuple[PrefixChunk, ...]:
        return referenced(prefix)

    def prompt_rows(
        self, source: int, row: PrefillRow, kept: tuple[PrefixChunk, ...]
    ) -> PromptRows:
        chunks, length = row.chunks, len(row.tokens)
        start = end_of(chunks)
        if worth_a_segment(length - start, len(row.sequences)):
            if end_of(kept) == length >= SHARED_FROM * len(kept):
                chunks = kept
            else:
                chunks = (*chunks, PrefixChunk(Segment(None, start, row.tokens[start:]), length))
        return PromptRows(source, len(row.sequences), length, chunks)


class CacheRoom:
    """
    Args:
        layout: of the running rows.
        prefix_cache: keys and values of earlier texts.
        max_tokens: upper bound of `reserved`; None = unbounded.
        prompt_cost: memory of a position of a prompt that is being computed, over that of a row's
            position.
        computes_together: several short prompts may be one prefill, padded.
    """

    begins_late = False
    """A prefill looks for a prefix when it begins, not when its prompt is admitted."""

    def __init__(
        self,
        layout: RowLayout,
        prefix_cache: PrefixCache,
        *,
        max_tokens: int | None,
        prompt_cost: float = 1.0,
        computes_together: bool = True,
    ) -> None:
        self.layout = layout
        self.prefix_cache = prefix_cache
        self.max_tokens = max_tokens
        self.prompt_cost = prompt_cost
        self.computes_together = computes_together
        self.beside = 0  # positions of a text that is scored, which has its own cache
        self.block = 0  # states are kept on disk behind so many tokens, and multiples; 0: not

    # ------------------------------------------------------------ does it fit

    def reserved(self, rows: SequenceOf[Sequence], prefills: SequenceOf[Prefill]) -> int:
        """Return the positions that the sequences admitted so far can come to hold (prompt +
        max_tokens each; what they share counts once), with those of the prompts being computed and
        of the text beside them."""
        return self.layout.positions(rows, prefills) + self.computed(prefills)

    def computed(self, prefills: SequenceOf[Prefill], more: int = 0) -> int:
        """Return how many positions of rows take as much memory as the prompts being computed, the
        text beside them, and `more` positions of prompts."""
        prompts = sum([prefill.positions for prefill in prefills])
        return ceil(self.prompt_cost * (prompts + more + self.beside))

    def fits(
        self,
        joining: Sequence,
        waits_for: PrefillRow | None,
        rows: SequenceOf[Sequence],
        prefills: SequenceOf[Prefill],
        more: int = 0,
    ) -> bool:
        """Whether there is room for one more, which waits for the row `waits_for` or one of its
        own, and for `more` positions of prompts."""
        if self.max_tokens is None:
            return True
        taken = self.layout.positions(rows, prefills, joining, waits_for)
        return taken + self.computed(prefills, more) <= self.max_tokens

    def left_for_rows(self, prefills: SequenceOf[Prefill]) -> int | None:
        """Return the positions that the rows may have room for; None: any number."""
        return None if self.max_tokens is None else self.max_tokens - self.computed(prefills)

    # ------------------------------------------------------------ shared prefixes

    def new_row(self, key: Key, sequence: Sequence) -> PrefillRow:
        """Return a prompt to compute, behind its known prefix."""
        prefix = self.prefix_cache.find(key, sequence.prompt)
        reused = prefix[-1].stop if prefix else 0
        self.prefix_cache.count(sequence.prompt, reused)
        return PrefillRow(key, sequence, prefix, reused, [], self.layout.in_place(prefix))

    def prompt_rows(self, source: int, row: PrefillRow) -> PromptRows:
        """Return which segments the new rows of a computed prompt read. The rest behind stored
        segments may become a new one."""
        return self.layout.prompt_rows(source, row, ())

    # ------------------------------------------------------------ stops of a prefill

    def begin(
        self,
        prefill: Prefill,
        rows: SequenceOf[Sequence],
        prefills: SequenceOf[Prefill],
        waiting: SequenceOf[Sequence],
    ) -> None:
        """Prepare a prefill that has not started. Nothing here: `new_row` has done it."""

    def advance(self, prefill: Prefill, stop: int, weights_of: WeightsOf) -> PrefixSave | None:
        """Note that a prefill continues to `stop`; return the part to keep then."""
        return None

    # ------------------------------------------------------------ kept prefixes

    def keep_rows(self, rows: SequenceOf[Sequence], weights_of: WeightsOf) -> list[PrefixSave]:
        """Put new rows' prompts and finished rows' texts into the prefix cache, unless their
        weights have changed, or they are doubtful (a failed row may hold NaN)."""
        saves: list[PrefixSave] = []
        if not self.prefix_cache.max_tokens:
            return saves
        for sequence in rows:
            if not (sequence.finished or sequence.is_new) or not sequence.feeds_prefix_cache:
                continue
            only_began, sequence.is_new = not sequence.finished, False
            if only_began and self.begins_late:  # the prefill has stored the prompt already
                continue
            key = (weights_of(sequence), sequence.cache_salt)
            if key == sequence.prefix_key:
                end = end_of(sequence.chunks)  # a whole prompt in segments is stored as it lies
                whole = only_began and end == len(sequence.prompt) - 1
                stop = end if end and whole else sequence.cached
                text = [*sequence.prompt, *sequence.tokens][:stop]
                if save := self._save(key, tuple(text), sequence.row, sequence):
                    saves.append(save)
                    if new := save.segment:
                        new.recorded = sequence.recorded_between(new.start, new.stop)
        return saves

    def _save(
        self, key: Key, text: tuple[int, ...], row: int, owner: Sequence
    ) -> PrefixSave | None:
        segment = self.prefix_cache.store(key, text)
        of, position = self.prefix_cache.snapshot(key, text) or (None, 0)
        if segment is of is None:
            return None
        return PrefixSave(segment, row, of, position, key, text, owner)


class SnapshotRoom(CacheRoom):
    """The room of a model with recurrent states that can be read. Prompts are computed one by
    one."""

    begins_late = True

    def new_row(self, key: Key, sequence: Sequence) -> PrefillRow:
        return PrefillRow(key, sequence, (), 0, [], ())

    def prompt_rows(self, source: int, row: PrefillRow) -> PromptRows:
        return self.layout.prompt_rows(source, row, self.prefix_cache.held(row.key, row.tokens))

    def begin(
        self,
        prefill: Prefill,
        rows: SequenceOf[Sequence],
        prefills: SequenceOf[Prefill],
        waiting: SequenceOf[Sequence],
    ) -> None:
        """Look for a stored prefix: earlier prompts may have been computed since the prompt was
        admitted. Pick the places of the snapshots."""
        [row] = prefill.rows
        row.prefix = self.prefix_cache.find(row.key, row.owner.prompt)
        row.reused = prefill.done = row.prefix[-1].stop if row.prefix else 0
        row.chunks = self.layout.in_place(row.prefix)
        if self.max_tokens is not None and self.reserved(rows, prefills) > self.max_tokens:
            row.chunks = ()  # a part of a long segment keeps all of it alive
        for sequence in row.sequences:
            sequence.cached_prompt_tokens = row.reused
        others = [r.owner for p in prefills if p is not prefill for r in p.rows if r.key == row.key]
        others += [
            s
            for s in waiting[:COMPARED]
            if s.cache_salt == row.key[1] and s.adapter is row.owner.adapter
        ]
        common = Counter(
            common_beginning(row.tokens, other.prompt[:-1]) for other in others[:COMPARED]
        )
        places = {length for length, _ in common.most_common(2)}
        places |= {self.prefix_cache.parting(row.key, row.tokens), len(row.tokens)}
        if self.block:
            places.add(len(row.tokens) // self.block * self.block)
        places |= set(range(SNAPSHOT_EVERY, len(row.tokens) - SNAPSHOT_EVERY // 2, SNAPSHOT_EVERY))
        prefill.places = tuple(
            sorted(place for place in places if place >= max(SNAPSHOT_FROM, prefill.done + 1))
        )

    def advance(self, prefill: Prefill, stop: int, weights_of: WeightsOf) -> PrefixSave | None:
        """Keep the beginning up to a place of a snapshot, if it was computed under one version and
        not for measurements alone."""
        [row] = prefill.rows
        if not prefill.started:
            self.prefix_cache.count(row.owner.prompt, row.reused)
        same_weights = row.key == (weights_of(row.owner), row.owner.cache_salt)
        wanted = any(sequence.feeds_prefix_cache for sequence in row.sequences)
        if stop not in prefill.places or not same_weights or not wanted:
            return None
        return self._save(row.key, row.tokens[:stop], 0, row.owner)


def cache_room(
    max_tokens: int | None,
    max_cached_tokens: int,
    *,
    rewindable: bool,
    snapshot_tokens: int | None = None,
    by_tokens: bool = False,
    prompt_cost: float = 1.0,
) -> CacheRoom:
    """Return the room of a cache.

    Args:
        max_tokens: positions that running sequences may take; None = any number.
        max_cached_tokens: positions that the prefix cache holds at most.
        rewindable: a row holds every prefix of itself. Without it (a recurrent state) its beginning
            cannot be used by others, and prompts are computed one by one, without padding.
        snapshot_tokens: of such a row, positions that take the memory of its state; None: the state
            cannot be read.
        by_tokens: rows take the room of their tokens and share segments; False: a rectangle.
        prompt_cost: see CacheRoom.
    """
    layout = TokenRows() if by_tokens else RectangleRows()
    if not rewindable and snapshot_tokens is not None:
        prefixes = PrefixCache(max_cached_tokens, snapshot_tokens)
        return SnapshotRoom(
            layout,
            prefixes,
            max_tokens=max_tokens,
            prompt_cost=prompt_cost,
            computes_together=False,
        )
    return CacheRoom(
        layout,
        PrefixCache(max_cached_tokens if rewindable else 0),
        max_tokens=max_tokens,
        prompt_cost=prompt_cost,
        computes_together=rewindable,
    )


def _positions_of(prompt: int, sequences: list[Sequence]) -> int:
    """Return how many positions the rows of sequences with one prompt take at most; `prompt`
    positions of it are not computed yet."""
    if worth_a_segment(prompt, len(sequences)):
        return prompt + sum(size_class(1 + s.max_tokens) for s in sequences)
    return sum(size_class(prompt + 1 + s.max_tokens) for s in sequences)

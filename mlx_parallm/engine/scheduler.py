"""Decides what the next step does: plain Python over `Sequence`s, no tensor in sight.

Rows of the KV cache are dense: running sequences hold rows 0..n-1. `schedule` fills the rows that
finished sequences left and returns a `SchedulerOutput`. `ModelRunner` carries it out in this order:
saves, moves, chunks of prefill, one decode step over `rows`.

Queue: by priority (lower first), then by arrival; `AGEING_STEPS` steps of waiting weigh as much as
one level, so no request starves, and none overtakes a request that waits for memory.
Prefill: any number of prompts may be under way; each step advances the one with the least left (so
a short prompt does not wait for a long one), but one that was passed over gains a chunk a step.
While rows decode, a prompt of several chunks advances by smaller ones. A chunk that would end
inside an image whose tokens see each other both ways ends behind it. A prompt is computed once
for all requests that bring it meanwhile, and its keys and values stay in the prefix cache
(cache/prefix.py) under the weights that computed it (`weights_of`), as far as that has room.
Recurrent states: prompts are computed one by one, and stop where a snapshot of the state will be
wanted: where others that wait, or were computed, go on in another way, every SNAPSHOT_EVERY tokens,
and at the end.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from mlx_parallm.engine.cache.prefix import Key, PrefixCache, PrefixChunk, Segment, common_beginning
from mlx_parallm.engine.cache.sharing import (
    SHARED_FROM,
    PromptRows,
    end_of,
    referenced,
    rows_of,
    shared_positions,
    size_class,
    worth_a_segment,
)
from mlx_parallm.engine.prompt_routes import PromptRoutes, pieces_between
from mlx_parallm.engine.sequence import Sequence, Status

AGEING_STEPS = 256
SNAPSHOT_EVERY = 512  # tokens of a long prompt
SNAPSHOT_FROM = 16  # tokens: a shorter beginning is not worth one
COMPARED = 64  # waiting prompts that a prompt is compared with before it is computed
DECODING_SHARE = 4  # while all rows decode, a long prompt advances by this part of prefill_chunk


@dataclass(frozen=True, slots=True)
class SlotMove:
    """The last row goes into a hole: `length` tokens of row `source` to row `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class PrefixSave:
    """Positions [segment.start, segment.stop) of a row go into the prefix cache, and the states
    after them as snapshot `position` of the segment `of`. Either may be None. `row` is the
    running cache's, or the prefill's only one."""

    segment: Segment | None
    row: int
    of: Segment | None = None
    position: int = 0


@dataclass(slots=True)
class PrefillRow:
    """One prompt being computed and the sequences that wait for it. Its first `reused` positions
    are in `prefix`, until ModelRunner has taken them from there; its rows will read those in
    `chunks` where they lie."""

    key: Key
    owner: Sequence  # the first that brought the prompt
    prefix: tuple[PrefixChunk, ...]
    reused: int
    sequences: list[Sequence]
    chunks: tuple[PrefixChunk, ...] = ()
    routes: PromptRoutes = field(default_factory=PromptRoutes)

    def reuse_routes(self) -> None:
        """Note where the experts of its reused positions are recorded, for its sequences too."""
        for chunk in self.prefix:
            self.routes.pieces += pieces_between(chunk.segment.routes, chunk.start, chunk.stop)
        for sequence in self.sequences:
            sequence.prompt_routes = self.routes

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt without its last token, which the first decode step feeds."""
        return self.owner.prompt[:-1]

    @property
    def computed_tokens(self) -> int:
        """The prompt's tokens but for the reused ones; the last one alone does not count."""
        return 0 if 0 < self.reused == len(self.tokens) else len(self.owner.prompt) - self.reused


@dataclass(slots=True)
class Prefill:
    """Several short prompts in one chunk, or one long prompt in several. `done` counts the
    positions that are there: at first those of the rows' reused prefixes, which are equally
    long. `caches` is ModelRunner's."""

    rows: list[PrefillRow]
    length: int  # longest `tokens` of the rows
    done: int
    last_step: int  # when it advanced; at first, when it was made up
    started: bool = False
    in_chunks: bool = False  # it was longer than one chunk
    places: tuple[int, ...] = ()  # where it stops for a snapshot, in order
    caches: list[Any] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for row in self.rows for sequence in row.sequences]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions [start, stop) of every row of `prefill`.

    `prompts` is empty but for the last chunk: then the rows of the cache from `first_row` on begin
    with them.
    """

    prefill: Prefill
    start: int
    stop: int
    first_row: int
    prompts: tuple[PromptRows, ...]
    save: PrefixSave | None = None  # what is kept of it, after it

    @property
    def sources(self) -> list[int]:
        """The place in `prefill.rows` of each new row's prompt."""
        return rows_of(self.prompts)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    saves: tuple[PrefixSave, ...]
    moves: tuple[SlotMove, ...]
    kept: int  # rows that go on, after the moves
    prefill: tuple[PrefillChunk, ...]
    rows: tuple[Sequence, ...]  # row i of the cache belongs to rows[i]; all of them decode
    # rows × positions that the cache may have room for; the rest is the prompts'
    max_row_tokens: int | None
    # tokens of the prompts whose computation this step completes, without reused prefixes
    prefilled_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that the step computes, padding included."""
        return sum(len(each.prefill.rows) * (each.stop - each.start) for each in self.prefill)


class Scheduler:
    """
    Args:
        max_rows: sequences that decode together at most.
        prefill_chunk: prompt tokens (padding included) computed between two decode steps.
        max_kv_tokens: upper bound of `reserved`; None = unbounded.
        max_cached_tokens: positions that the prefix cache holds at most.
        rewindable: False: a row holds nothing but its whole text (a recurrent state), so its
        beginning cannot be used
            by others, and prompts are computed one by one, without padding.
        snapshot_tokens: of such a row, positions that take the memory of its state; None: the state
        cannot be read.
        by_tokens: rows take what they hold and share segments; False: rows × longest sequence among
        them.
        prompt_cost: memory of a position of a prompt that is being computed, over that of a row's
        position.
    """

    def __init__(
        self,
        max_rows: int,
        prefill_chunk: int,
        max_kv_tokens: int | None,
        max_cached_tokens: int,
        *,
        rewindable: bool,
        snapshot_tokens: int | None = None,
        by_tokens: bool = False,
        prompt_cost: float = 1.0,
    ) -> None:
        self.by_tokens = by_tokens
        self.prompt_cost = prompt_cost
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.max_kv_tokens = max_kv_tokens
        self.rewindable = rewindable
        self.takes_snapshots = not rewindable and snapshot_tokens is not None
        self.prefix_cache = PrefixCache(
            max_cached_tokens if rewindable or self.takes_snapshots else 0,
            snapshot_tokens if self.takes_snapshots else None,
        )
        self.waiting: list[Sequence] = []  # in the order in which they are admitted
        self.rows: list[Sequence] = []
        self.prefills: list[Prefill] = []
        self.paused = False
        self.beside = 0  # positions of a text that is scored, which has a cache of its own
        self._step = 0
        self._blocked: Sequence | None = None  # waits until a row ends

    @property
    def active(self) -> list[Sequence]:
        """Unfinished sequences that hold a row or were promised one."""
        promised = [sequence for prefill in self.prefills for sequence in prefill.sequences]
        return [s for s in [*self.rows, *promised] if not s.finished]

    @property
    def has_work(self) -> bool:
        return bool(self.prefills) or bool(self.rows) or (bool(self.waiting) and not self.paused)

    @property
    def steady(self) -> bool:
        """True when the next step decodes the same rows, whatever the present one gives, and
        does nothing else."""
        return (
            not self.prefills
            and (
                not self.waiting
                or self.paused
                or len(self.rows) >= self.max_rows
                or self.waiting[0] is self._blocked
            )
            and not any(
                s.finished or (s.is_new and self.prefix_cache.max_tokens) for s in self.rows
            )
        )

    @property
    def reserved(self) -> int:
        """Positions that the sequences admitted so far can come to hold (prompt + max_tokens
        each; what they share counts once), the prompts being computed, and the text beside them."""
        return self._row_positions() + self._computed(self._prompt_tokens + self.beside)

    @property
    def has_room_beside(self) -> bool:
        """Whether the text beside the sequences may begin. No sequence is admitted into its
        place meanwhile."""
        return self.max_kv_tokens is None or not self.active or self.reserved <= self.max_kv_tokens

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.rank = sequence.priority * AGEING_STEPS + self._step
            insort(self.waiting, sequence, key=lambda waiting: waiting.rank)

    def remove_finished_from_queue(self) -> None:
        """Drops sequences that were ended (aborted) while they waited."""
        self.waiting = [s for s in self.waiting if not s.finished]

    def forget_rows(self) -> list[Sequence]:
        """Empties rows, prefills and the prefix cache, whose keys and values are lost or
        doubtful; returns the sequences that had not finished."""
        lost = self.active
        for sequence in [*self.rows, *lost]:
            sequence.row, sequence.chunks = -1, ()
        self.rows, self.prefills = [], []
        self.prefix_cache.clear()
        return lost

    def forget_prefixes(self) -> None:
        """Empties the prefix cache; finished sequences that still have a row do not come into it
        either."""
        self.prefix_cache.clear()
        for sequence in self.rows:
            if sequence.finished:
                sequence.prefix_key = None

    def schedule(
        self, weights_of: Callable[[Sequence], Hashable], version: int = -1
    ) -> SchedulerOutput:
        """Plans one step. Finished sequences lose their rows here.

        Args:
            weights_of: identifies the weights that compute a sequence now; equal for equal weights
                only.
            version: the policy version, noted as `prompt_version` of admitted sequences.
        """
        self.pass_step()
        self._blocked = None
        saves = self._saves(weights_of)
        moves = self._compact()
        kept = len(self.rows)
        self._drop_ended_prefills()
        if self.waiting and not self.paused:
            self._admit(weights_of, version)
        computed = self._computed(self._prompt_tokens + self.beside)
        limit = None if self.max_kv_tokens is None else self.max_kv_tokens - computed
        chunks = self._next_chunks(weights_of)
        prefilled = sum(
            row.computed_tokens for chunk in chunks if chunk.prompts for row in chunk.prefill.rows
        )
        return SchedulerOutput(
            tuple(saves), tuple(moves), kept, tuple(chunks), tuple(self.rows), limit, prefilled
        )

    def pass_step(self) -> None:
        """Counts a step, also one that needs no plan: who waits grows older."""
        self._step += 1

    def _saves(self, weights_of: Callable[[Sequence], Hashable]) -> list[PrefixSave]:
        """Puts new rows' prompts and finished rows' texts into the prefix cache, unless their
        weights have changed, or they are doubtful (a failed row may hold NaN)."""
        saves: list[PrefixSave] = []
        if not self.prefix_cache.max_tokens:
            return saves
        for sequence in self.rows:
            if not (sequence.finished or sequence.is_new) or not sequence.feeds_prefix_cache:
                continue
            if sequence.is_new and self.takes_snapshots:  # its prefill has kept the prompt
                sequence.is_new = False
                if not sequence.finished:
                    continue
            sequence.is_new = False
            key = (weights_of(sequence), sequence.cache_salt)
            if key == sequence.prefix_key:
                end = end_of(sequence.chunks)  # a whole prompt in segments is stored as it lies
                stop = (
                    end
                    if end and not sequence.finished and end == len(sequence.prompt) - 1
                    else sequence.cached
                )
                text = [*sequence.prompt, *sequence.tokens][:stop]
                if save := self._save(key, tuple(text), sequence.row):
                    saves.append(save)
                    if new := save.segment:
                        new.routes = sequence.routes_between(new.start, new.stop)
        return saves

    def _save_prefill(
        self, row: PrefillRow, stop: int, weights_of: Callable[[Sequence], Hashable]
    ) -> PrefixSave | None:
        """Keeps a beginning that was computed under one version, unless only measurements ask
        for it."""
        same_weights = row.key == (weights_of(row.owner), row.owner.cache_salt)
        if not same_weights or not any(sequence.feeds_prefix_cache for sequence in row.sequences):
            return None
        return self._save(row.key, row.tokens[:stop], 0)

    def _save(self, key: Key, text: tuple[int, ...], row: int) -> PrefixSave | None:
        segment = self.prefix_cache.store(key, text)
        of, position = self.prefix_cache.snapshot(key, text) or (None, 0)
        return None if segment is of is None else PrefixSave(segment, row, of, position)

    def _compact(self) -> list[SlotMove]:
        """Fills the rows of finished sequences with the last ones. No row is both a source and a
        target."""
        moves = []
        row = 0
        while row < len(self.rows):
            if not self.rows[row].finished:
                row += 1
                continue
            last = self.rows.pop()
            if row < len(self.rows):
                if last.finished:
                    last.row, last.chunks = -1, ()
                    continue
                self.rows[row].row, self.rows[row].chunks = -1, ()
                moves.append(SlotMove(len(self.rows), row, last.cached))
                self.rows[row] = last
                last.row = row
            else:
                last.row, last.chunks = -1, ()
        return moves

    def _drop_ended_prefills(self) -> None:
        for prefill in self.prefills:
            for row in prefill.rows:
                row.sequences = [s for s in row.sequences if not s.finished]
        self.prefills = [prefill for prefill in self.prefills if prefill.sequences]

    def _admit(self, weights_of: Callable[[Sequence], Hashable], version: int) -> None:
        """Promises rows to the sequences at the head of the queue, as many as there is room for."""
        admitted = 0
        for sequence in self.waiting:
            active = self.active
            if len(active) >= self.max_rows:
                break
            key = (weights_of(sequence), sequence.cache_salt)
            row = self._row_of(key, sequence.prompt)
            prompts = self._prompt_tokens + (len(sequence.prompt) - 1 if row is None else 0)
            if (active or self.beside) and not self._fits(sequence, row, prompts):
                self._blocked = None if self.prefills or self.beside else sequence
                break
            if row is None:
                row = self._new_row(key, sequence)
            row.sequences.append(sequence)
            sequence.status, sequence.prefix_key, sequence.prompt_version = (
                Status.PREFILLING,
                key,
                version,
            )
            sequence.cached_prompt_tokens = row.reused
            admitted += 1
        del self.waiting[:admitted]

    @property
    def _prompt_tokens(self) -> int:
        """Positions of the caches of prompts that are being computed."""
        return sum(len(prefill.rows) * prefill.length for prefill in self.prefills)

    def _fits(self, joining: Sequence, row: PrefillRow | None, prompts: int) -> bool:
        """Whether there is room for one more, which waits for `row`, beside so many positions of
        prompts."""
        if self.max_kv_tokens is None:
            return True
        return (
            self._row_positions(joining, row) + self._computed(prompts + self.beside)
            <= self.max_kv_tokens
        )

    def _computed(self, positions: int) -> int:
        """How many positions of rows take as much memory as so many of texts that are being
        computed."""
        return ceil(self.prompt_cost * positions)

    def _row_positions(self, joining: Sequence | None = None, row: PrefillRow | None = None) -> int:
        """Positions that the rows can come to take, with one more that waits for `row` or a row
        of its own."""
        more = [] if joining is None else [joining]
        if not self.by_tokens:
            active = [*self.active, *more]  # a rectangle: all rows are as long as the longest
            return len(active) * max((len(s.prompt) + s.max_tokens for s in active), default=0)
        running = [s for s in self.rows if not s.finished]
        positions = sum(
            size_class(len(s.prompt) + s.max_tokens - end_of(s.chunks)) for s in running
        )
        shared = [chunk for s in running for chunk in s.chunks]
        waiting = [
            (r, [*r.sequences, *more] if r is row else r.sequences)
            for p in self.prefills
            for r in p.rows
        ]
        for prompt, sequences in waiting:
            shared += prompt.chunks
            positions += _positions_of(len(prompt.tokens) - end_of(prompt.chunks), sequences)
        if joining is not None and row is None:
            positions += _positions_of(len(joining.prompt) - 1, more)
        return positions + shared_positions(shared)

    def _row_of(self, key: Key, prompt: tuple[int, ...]) -> PrefillRow | None:
        """The row in which this very prompt is being computed already."""
        rows = (row for prefill in self.prefills for row in prefill.rows)
        return next((row for row in rows if row.key == key and row.owner.prompt == prompt), None)

    def _new_row(self, key: Key, sequence: Sequence) -> PrefillRow:
        """Adds the prompt to a group that has not started, where it fits beside the others, or
        makes one up."""
        # `_begin` looks later
        prefix = () if self.takes_snapshots else self.prefix_cache.find(key, sequence.prompt)
        chunks = referenced(prefix) if self.by_tokens else ()
        row = PrefillRow(key, sequence, prefix, prefix[-1].stop if prefix else 0, [], chunks)
        if not self.takes_snapshots:
            self.prefix_cache.count(sequence.prompt, row.reused)
        length = len(row.tokens)
        for prefill in self.prefills:
            rows, longest = len(prefill.rows) + 1, max(prefill.length, length)
            if (
                prefill.started
                or prefill.done != row.reused
                or not self.rewindable
                or rows * (longest - row.reused) > self.prefill_chunk
                or not self._fits(
                    sequence,
                    None,
                    self._prompt_tokens + rows * longest - (rows - 1) * prefill.length,
                )
            ):
                continue
            prefill.rows.append(row)
            prefill.length = longest
            return row
        in_chunks = length - row.reused > self.prefill_chunk
        self.prefills.append(Prefill([row], length, row.reused, self._step, in_chunks=in_chunks))
        return row

    def _begin(self, prefill: Prefill) -> None:
        """Begin the prefill of a recurrent model's prompt: look again for a stored prefix, since
        earlier prompts may have been computed meanwhile, and pick the places of the snapshots."""
        [row] = prefill.rows
        row.prefix = self.prefix_cache.find(row.key, row.owner.prompt)
        row.reused = prefill.done = row.prefix[-1].stop if row.prefix else 0
        if self.by_tokens:
            row.chunks = referenced(row.prefix)
            if self.max_kv_tokens is not None and self.reserved > self.max_kv_tokens:
                row.chunks = ()  # a part of a long segment keeps all of it alive
        for sequence in row.sequences:
            sequence.cached_prompt_tokens = row.reused
        others = [
            r.owner for p in self.prefills if p is not prefill for r in p.rows if r.key == row.key
        ]
        others += [
            s
            for s in self.waiting[:COMPARED]
            if s.cache_salt == row.key[1] and s.adapter is row.owner.adapter
        ]
        common = Counter(
            common_beginning(row.tokens, other.prompt[:-1]) for other in others[:COMPARED]
        )
        places = {length for length, _ in common.most_common(2)}
        places |= {self.prefix_cache.parting(row.key, row.tokens), len(row.tokens)}
        places |= set(range(SNAPSHOT_EVERY, len(row.tokens) - SNAPSHOT_EVERY // 2, SNAPSHOT_EVERY))
        prefill.places = tuple(
            sorted(place for place in places if place >= max(SNAPSHOT_FROM, prefill.done + 1))
        )

    def _next_chunks(self, weights_of: Callable[[Sequence], Hashable]) -> list[PrefillChunk]:
        """Picks the prompts that can be finished within this step's `prefill_chunk` tokens, the
        most urgent first; when that one cannot, a part of it. Finished prompts get their rows."""
        chunks: list[PrefillChunk] = []
        left = self.prefill_chunk
        for prefill in sorted(self.prefills, key=self._urgency):
            if self.takes_snapshots and not prefill.started:
                if not left:
                    continue
                self._begin(prefill)
            limit = min(left, self._part_of_long_prompts()) if prefill.in_chunks else left
            start, stop = (
                prefill.done,
                min(prefill.length, prefill.done + limit // len(prefill.rows)),
            )
            if stop < prefill.length and chunks:
                continue
            stop = _outside_images(prefill, stop)
            stop = min([stop, *[place for place in prefill.places if place > start]])
            save = None
            if self.takes_snapshots:
                [row] = prefill.rows
                save = self._save_prefill(row, stop, weights_of) if stop in prefill.places else None
                if not prefill.started:
                    self.prefix_cache.count(row.owner.prompt, row.reused)
            left = max(0, left - (stop - start) * len(prefill.rows))
            prefill.done, prefill.last_step, prefill.started = stop, self._step, True
            first_row = len(self.rows)
            prompts: tuple[PromptRows, ...] = ()
            if stop == prefill.length:
                prompts = tuple(
                    self._prompt_rows(i, row) for i, row in enumerate(prefill.rows) if row.sequences
                )
                for prompt in prompts:
                    for sequence in prefill.rows[prompt.source].sequences:
                        self._give_row(sequence, prompt.chunks)
                self.prefills.remove(prefill)
            chunks.append(PrefillChunk(prefill, start, stop, first_row, prompts, save))
        return chunks

    def _prompt_rows(self, index: int, row: PrefillRow) -> PromptRows:
        """Return which segments the new rows of a computed prompt read. The rest behind stored
        segments may become a new one."""
        chunks, length = row.chunks, len(row.tokens)
        start = end_of(chunks)
        if self.by_tokens and worth_a_segment(length - start, len(row.sequences)):
            # its prefill kept it
            kept = self.prefix_cache.held(row.key, row.tokens) if self.takes_snapshots else ()
            if end_of(kept) == length >= SHARED_FROM * len(kept):
                chunks = kept
            else:
                chunks = (*chunks, PrefixChunk(Segment(None, start, row.tokens[start:]), length))
        return PromptRows(index, len(row.sequences), length, chunks)

    def _urgency(self, prefill: Prefill) -> int:
        """Lower goes first: what is left to compute, less a chunk for each step that it was
        passed over."""
        level = min(sequence.priority for sequence in prefill.sequences)
        return (
            prefill.length
            - prefill.done
            + self.prefill_chunk * (prefill.last_step + level * AGEING_STEPS)
        )

    def _part_of_long_prompts(self) -> int:
        """Return fewer tokens, the more rows wait for their next token; all of the chunk when
        none does."""
        free = self.max_rows - len(self.rows)
        return max(self.prefill_chunk // DECODING_SHARE, self.prefill_chunk * free // self.max_rows)

    def restore(self, sequence: Sequence) -> None:
        """Gives a row to a sequence whose keys and values were computed again; they are not
        shared with others."""
        self._give_row(sequence)
        sequence.cached += len(sequence.tokens)
        sequence.prefix_key = None

    def _give_row(self, sequence: Sequence, chunks: tuple[PrefixChunk, ...] = ()) -> None:
        sequence.chunks = chunks
        sequence.row, sequence.cached = len(self.rows), len(sequence.prompt) - 1
        sequence.status, sequence.is_new = Status.RUNNING, True
        self.rows.append(sequence)


def _outside_images(prefill: Prefill, stop: int) -> int:
    """Return the end of a chunk, moved behind the images that a forward must have whole."""
    moved = max(row.owner.outside_images(stop) for row in prefill.rows)
    return stop if moved == stop else _outside_images(prefill, moved)


def _positions_of(prompt: int, sequences: list[Sequence]) -> int:
    """Return how many positions the rows of sequences with one prompt take at most; `prompt`
    positions of it are not computed yet."""
    if worth_a_segment(prompt, len(sequences)):
        return prompt + sum(size_class(1 + s.max_tokens) for s in sequences)
    return sum(size_class(prompt + 1 + s.max_tokens) for s in sequences)

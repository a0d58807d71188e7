"""Decide what the next step does: plain Python over `Sequence`s, no tensor in sight.

Rows of the KV cache are dense: running sequences hold rows 0..n-1. `schedule` fills the rows of
finished sequences and returns a `SchedulerOutput`. `ModelRunner` carries it out in this order:
saves, moves, chunks of prefill, one decode step over `rows`.

Queue: by priority (lower first), then by arrival; `AGEING_STEPS` steps of waiting weigh as much as
one level, so no request starves, and none overtakes a request that waits for memory.
Prefill: any number of prompts may be under way; each step advances the one with the least left (so
a short prompt does not wait for a long one), but one that was passed over gains a chunk a step.
While rows decode, a prompt of several chunks advances by smaller ones. A chunk that would end
inside a span whose tokens see each other both ways ends behind it. A prompt is computed once
for all requests that bring it meanwhile. `CacheRoom` (room.py) knows
its known prefix, its stops, the kept part, and whether there is room for one more.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_parallm.engine.cache.prefix import Key, PrefixChunk
from mlx_parallm.engine.scheduling.prefills import Prefill, PrefillChunk, PrefillRow, PrefixSave
from mlx_parallm.engine.scheduling.room import CacheRoom, WeightsOf
from mlx_parallm.engine.sequence import Sequence, Status

AGEING_STEPS = 256
DECODING_SHARE = 4  # while all rows decode, a long prompt advances by this part of prefill_chunk


@dataclass(frozen=True, slots=True)
class SlotMove:
    """The last row goes into a hole: `length` tokens of row `source` to row `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    saves: tuple[PrefixSave, ...]
    moves: tuple[SlotMove, ...]
    kept: int  # rows that continue, after the moves
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
    """Hold the queue, the prompts being computed and the rows; plan one step at a time.

    Args:
        max_rows: sequences that decode together at most.
        prefill_chunk: prompt tokens (padding included) computed between two decode steps.
        room: the room of the cache that holds the rows.
    """

    def __init__(self, max_rows: int, prefill_chunk: int, room: CacheRoom) -> None:
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.room = room
        self.waiting: list[Sequence] = []  # in the order in which they are admitted
        self.rows: list[Sequence] = []
        self.prefills: list[Prefill] = []
        self.paused = False
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
        """True if the next step only decodes the same rows, whatever the present one samples."""
        return (
            not self.prefills
            and (
                not self.waiting
                or self.paused
                or len(self.rows) >= self.max_rows
                or self.waiting[0] is self._blocked
            )
            and not any(
                s.finished or (s.is_new and self.room.prefix_cache.max_tokens) for s in self.rows
            )
        )

    @property
    def has_room_beside(self) -> bool:
        """Whether a text to be scored may begin beside the sequences. None is admitted into its
        place meanwhile."""
        most = self.room.max_tokens
        return most is None or not self.active or self.reserved <= most

    @property
    def reserved(self) -> int:
        """The most positions that the admitted sequences can take (`CacheRoom.reserved`)."""
        return self.room.reserved(self.rows, self.prefills)

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.rank = sequence.priority * AGEING_STEPS + self._step
            insort(self.waiting, sequence, key=lambda waiting: waiting.rank)

    def remove_finished_from_queue(self) -> None:
        """Drop sequences that were ended (aborted) while they waited."""
        self.waiting = [s for s in self.waiting if not s.finished]

    def forget_rows(self) -> list[Sequence]:
        """Empty rows, prefills and the prefix cache, whose keys and values are lost or doubtful;
        return the unfinished sequences."""
        lost = self.active
        for sequence in [*self.rows, *lost]:
            sequence.row, sequence.chunks = -1, ()
        self.rows, self.prefills = [], []
        self.room.prefix_cache.clear()
        return lost

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and keep finished sequences that still have a row out of it."""
        self.room.prefix_cache.clear()
        for sequence in self.rows:
            if sequence.finished:
                sequence.prefix_key = None

    def schedule(self, weights_of: WeightsOf, version: int = -1) -> SchedulerOutput:
        """Plan one step. Finished sequences lose their rows here.

        Args:
            weights_of: identifies the weights that compute a sequence now; equal for equal weights
                only.
            version: the policy version, noted as `prompt_version` of admitted sequences.
        """
        self.pass_step()
        self._blocked = None
        saves = self.room.keep_rows(self.rows, weights_of)
        moves = self._compact()
        kept = len(self.rows)
        self._drop_ended_prefills()
        if self.waiting and not self.paused:
            self._admit(weights_of, version)
        limit = self.room.left_for_rows(self.prefills)
        chunks = self._next_chunks(weights_of)
        prefilled = sum(
            row.computed_tokens for chunk in chunks if chunk.prompts for row in chunk.prefill.rows
        )
        return SchedulerOutput(
            tuple(saves), tuple(moves), kept, tuple(chunks), tuple(self.rows), limit, prefilled
        )

    def pass_step(self) -> None:
        """Count a step, planned or not: waiting sequences age."""
        self._step += 1

    def _compact(self) -> list[SlotMove]:
        """Move the last rows into those of finished sequences. No row is both source and target."""
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

    def _admit(self, weights_of: WeightsOf, version: int) -> None:
        """Promise rows to the head of the queue, as many as there is room for."""
        admitted = 0
        for sequence in self.waiting:
            active = self.active
            if len(active) >= self.max_rows:
                break
            key = (weights_of(sequence), sequence.cache_salt)
            row = self._row_of(key, sequence.prompt)
            more = len(sequence.prompt) - 1 if row is None else 0
            if (active or self.room.beside) and not self._fits(sequence, row, more):
                self._blocked = None if self.prefills or self.room.beside else sequence
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

    def _fits(self, joining: Sequence, waits_for: PrefillRow | None, more: int) -> bool:
        return self.room.fits(joining, waits_for, self.rows, self.prefills, more)

    def _row_of(self, key: Key, prompt: tuple[int, ...]) -> PrefillRow | None:
        """Return the row that computes this very prompt already; None: no row does."""
        rows = (row for prefill in self.prefills for row in prefill.rows)
        return next((row for row in rows if row.key == key and row.owner.prompt == prompt), None)

    def _new_row(self, key: Key, sequence: Sequence) -> PrefillRow:
        """Add the prompt to a prefill that has not started, if it fits there, else to a new one."""
        row = self.room.new_row(key, sequence)
        length = len(row.tokens)
        for prefill in self.prefills if self.room.computes_together else ():
            rows, longest = len(prefill.rows) + 1, max(prefill.length, length)
            if (
                not prefill.started
                and prefill.done == row.reused
                and rows * (longest - row.reused) <= self.prefill_chunk
                and self._fits(sequence, None, rows * longest - prefill.positions)
            ):
                prefill.rows.append(row)
                prefill.length = longest
                return row
        in_chunks = length - row.reused > self.prefill_chunk
        self.prefills.append(Prefill([row], length, row.reused, self._step, in_chunks=in_chunks))
        return row

    def _next_chunks(self, weights_of: WeightsOf) -> list[PrefillChunk]:
        """Pick the prompts that this step's `prefill_chunk` tokens can finish, the most urgent
        first, or a part of that one. Finished prompts get their rows."""
        chunks: list[PrefillChunk] = []
        left = self.prefill_chunk
        for prefill in sorted(self.prefills, key=self._urgency):
            if not prefill.started:
                if not left and self.room.begins_late:
                    continue
                self.room.begin(prefill, self.rows, self.prefills, self.waiting)
            start, stop = prefill.done, self._end_of_chunk(prefill, left)
            if stop < prefill.length and chunks:
                continue
            stop = prefill.outside_spans(stop)
            stop = min([stop, *[place for place in prefill.places if place > start]])
            save = self.room.advance(prefill, stop, weights_of)
            left = max(0, left - (stop - start) * len(prefill.rows))
            prefill.done, prefill.last_step, prefill.started = stop, self._step, True
            chunks.append(self._chunk(prefill, start, save))
        return chunks

    def _end_of_chunk(self, prefill: Prefill, left: int) -> int:
        """Return how far a prefill can advance within `left` tokens."""
        limit = min(left, self._part_of_long_prompts()) if prefill.in_chunks else left
        return min(prefill.length, prefill.done + limit // len(prefill.rows))

    def _chunk(self, prefill: Prefill, start: int, save: PrefixSave | None) -> PrefillChunk:
        """Return the chunk from `start` to the prefill's position; give rows to those whose
        prompt it ends."""
        first_row = len(self.rows)
        if prefill.done < prefill.length:
            return PrefillChunk(prefill, start, prefill.done, first_row, (), save)
        prompts = tuple(
            self.room.prompt_rows(i, row) for i, row in enumerate(prefill.rows) if row.sequences
        )
        for prompt in prompts:
            for sequence in prefill.rows[prompt.source].sequences:
                self._give_row(sequence, prompt.chunks)
        self.prefills.remove(prefill)
        return PrefillChunk(prefill, start, prefill.done, first_row, prompts, save)

    def _urgency(self, prefill: Prefill) -> int:
        """Return a rank, lower first: tokens left to compute, less a chunk for each step that it
        was passed over."""
        level = min(sequence.priority for sequence in prefill.sequences)
        return (
            prefill.length
            - prefill.done
            + self.prefill_chunk * (prefill.last_step + level * AGEING_STEPS)
        )

    def _part_of_long_prompts(self) -> int:
        """Return the tokens of a long prompt's next part: a whole chunk without decoding rows,
        fewer the more rows decode."""
        free = self.max_rows - len(self.rows)
        return max(self.prefill_chunk // DECODING_SHARE, self.prefill_chunk * free // self.max_rows)

    def restore(self, sequence: Sequence) -> None:
        """Give a row to a sequence whose keys and values were computed again, and share none."""
        self._give_row(sequence)
        sequence.cached += len(sequence.tokens)
        sequence.prefix_key = None

    def _give_row(self, sequence: Sequence, chunks: tuple[PrefixChunk, ...] = ()) -> None:
        sequence.chunks = chunks
        sequence.row, sequence.cached = len(self.rows), len(sequence.prompt) - 1
        sequence.status, sequence.is_new = Status.RUNNING, True
        self.rows.append(sequence)

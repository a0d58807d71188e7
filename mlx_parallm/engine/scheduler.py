"""Decides what the next step does: plain Python over `Sequence`s, no tensor in sight.

Rows of the KV cache are dense: running sequences hold rows 0..n-1. `schedule` fills the rows that were left by finished
sequences and returns a `Plan`, which `ModelRunner` carries out in this order: take-overs (nothing to do), moves,
copies, one chunk of prefill, one decode step over `rows`.

A prompt is computed once for all who ask it under the same adapter and weights (`epoch` counts every change of these):
choices of one request and identical requests share a prefill (`PrefillRow.sequences`); one that comes later copies the
prefix of a row that still holds it, or takes such a row over when its owner has just finished.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_parallm.engine.sequence import Sequence, Status

PrefixKey = tuple[str | None, int, tuple[int, ...]]  # adapter, weights epoch, prompt


@dataclass(frozen=True, slots=True)
class RowMove:
    """The last row goes into a hole: `length` tokens of row `source` to row `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """The first `length` tokens of row `source`, which stays, to row `target`."""

    source: int
    target: int
    length: int


@dataclass(slots=True)
class PrefillRow:
    """One prompt being computed and everyone who waits for it."""

    key: PrefixKey
    sequences: list[Sequence]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt without its last token, which the first decode step feeds."""
        return self.key[2][:-1]


@dataclass(slots=True)
class Prefill:
    """Several short prompts in one chunk, or one long prompt in several. `done` counts computed positions."""

    rows: list[PrefillRow]
    length: int  # longest `tokens` of the rows
    done: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for row in self.rows for sequence in row.sequences]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions [start, stop) of every row of `prefill`.

    `sources` is empty but for the last chunk: then the row `first_row + i` of the cache gets the prefix of
    `prefill.rows[sources[i]]`.
    """

    prefill: Prefill
    start: int
    stop: int
    first_row: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    moves: tuple[RowMove, ...]
    copies: tuple[PrefixCopy, ...]
    prefill: PrefillChunk | None
    rows: tuple[Sequence, ...]  # row i of the cache belongs to rows[i]; all of them decode
    prefilled_tokens: int  # tokens of the prompts whose computation this step completes


class Scheduler:
    """
    Args:
        max_rows: sequences that decode together at most.
        prefill_chunk: prompt tokens (padding included) computed between two decode steps.
        max_kv_tokens: upper bound of rows × longest sequence (prompt + max_tokens) among them, None = unbounded.
            A sequence that exceeds it alone still runs, alone.
    """

    def __init__(self, max_rows: int, prefill_chunk: int, max_kv_tokens: int | None = None) -> None:
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.max_kv_tokens = max_kv_tokens
        self.waiting: deque[Sequence] = deque()
        self.rows: list[Sequence] = []
        self.prefill: Prefill | None = None
        self.paused = False

    @property
    def active(self) -> list[Sequence]:
        """Unfinished sequences that hold a row or were promised one."""
        promised = [] if self.prefill is None else self.prefill.sequences
        return [s for s in [*self.rows, *promised] if not s.finished]

    @property
    def has_work(self) -> bool:
        return self.prefill is not None or bool(self.rows) or (bool(self.waiting) and not self.paused)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def find(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request."""
        return [s for s in [*self.waiting, *self.active] if s.request_id == request_id and not s.finished]

    def remove_finished_from_queue(self) -> None:
        """Drops sequences that were ended (aborted) while they waited."""
        self.waiting = deque(s for s in self.waiting if not s.finished)

    def forget_rows(self) -> list[Sequence]:
        """Empties rows and prefill, whose keys and values are lost; returns the sequences that had not finished."""
        lost = self.active
        for sequence in [*self.rows, *lost]:
            sequence.row = -1
        self.rows, self.prefill = [], None
        return lost

    def schedule(self, epoch: int) -> Plan:
        """Plans one step under the weights of `epoch`. Finished sequences lose their rows here."""
        sharers = [] if self.paused or not self.waiting else self._admit(epoch)
        moves = self._compact()
        copies = [copy for sequence, donor in sharers if (copy := self._share(sequence, donor)) is not None]
        prefilled = sum(len(sequence.prompt) for sequence, donor in sharers if donor is None)
        chunk = self._next_chunk()
        if chunk is not None and chunk.sources:
            prefilled += sum(len(row.key[2]) for row in chunk.prefill.rows)
        return Plan(tuple(moves), tuple(copies), chunk, tuple(self.rows), prefilled)

    def _admit(self, epoch: int) -> list[tuple[Sequence, Sequence | None]]:
        """Takes from the queue, in order, who can start now.

        Returns the sequences that get a row at once, each with the row's owner whose prefix it copies (None: its
        prompt is one token, there is nothing to copy). Others took over a finished row or joined `self.prefill`.
        """
        sharers: list[tuple[Sequence, Sequence | None]] = []
        holders = {(s.adapter, s.prefix_epoch, s.prompt): s for s in self.rows if s.can_share_prefix}
        may_open = self.prefill is None
        kept: list[Sequence] = []
        for _ in range(self._free_rows()):
            if not self.waiting:
                break
            sequence = self.waiting.popleft()
            key = (sequence.adapter, epoch, sequence.prompt)
            holder = holders.get(key)
            if holder is None and len(sequence.prompt) > 1:
                if not self._join_prefill(sequence, key, may_open):
                    kept.append(sequence)
                continue
            sequence.prefix_epoch = epoch
            if holder is not None and holder.finished:
                self._take_over(sequence, holder)
            else:
                sharers.append((sequence, holder))
            holders[key] = sequence if holder is None or holder.finished else holder
        self.waiting.extendleft(reversed(kept))
        return sharers

    def _free_rows(self) -> int:
        active = self.active
        free = self.max_rows - len(active)
        if self.max_kv_tokens is None:
            return free
        longest = max((len(s.prompt) + s.max_tokens for s in active), default=0)
        for admitted, sequence in enumerate(self.waiting):
            longest = max(longest, len(sequence.prompt) + sequence.max_tokens)
            rows = len(active) + admitted + 1
            if admitted >= free or (rows > 1 and rows * longest > self.max_kv_tokens):
                return min(admitted, free)
        return free

    def _join_prefill(self, sequence: Sequence, key: PrefixKey, may_open: bool) -> bool:
        """Adds the sequence to the prefill being made up, or to its own prompt in one under way."""
        if self.prefill is None:
            self.prefill = Prefill([], 0)
        prefill = self.prefill
        row = next((row for row in prefill.rows if row.key == key), None)
        if row is None:
            length = max(prefill.length, len(sequence.prompt) - 1)
            if not may_open or (prefill.rows and (len(prefill.rows) + 1) * length > self.prefill_chunk):
                return False
            row = PrefillRow(key, [])
            prefill.rows.append(row)
            prefill.length = length
        row.sequences.append(sequence)
        sequence.status, sequence.prefix_epoch = Status.PREFILLING, key[1]
        return True

    def _take_over(self, sequence: Sequence, finished: Sequence) -> None:
        sequence.row, finished.row = finished.row, -1
        sequence.cached = len(sequence.prompt) - 1
        sequence.status = Status.RUNNING
        self.rows[sequence.row] = sequence

    def _compact(self) -> list[RowMove]:
        """Fills the rows of finished sequences with the last ones. No row is both a source and a target."""
        moves = []
        row = 0
        while row < len(self.rows):
            if not self.rows[row].finished:
                row += 1
                continue
            last = self.rows.pop()
            if row < len(self.rows):
                self.rows[row].row = -1
                if last.finished:
                    last.row = -1
                    continue
                moves.append(RowMove(len(self.rows), row, last.cached))
                self.rows[row] = last
                last.row = row
            else:
                last.row = -1
        return moves

    def _share(self, sequence: Sequence, donor: Sequence | None) -> PrefixCopy | None:
        self._give_row(sequence)
        return None if donor is None or not sequence.cached else PrefixCopy(donor.row, sequence.row, sequence.cached)

    def _give_row(self, sequence: Sequence) -> None:
        sequence.row, sequence.cached = len(self.rows), len(sequence.prompt) - 1
        sequence.status = Status.RUNNING
        self.rows.append(sequence)

    def _next_chunk(self) -> PrefillChunk | None:
        """Advances the prefill by one chunk; gives rows to its sequences when that is the last one."""
        prefill = self.prefill
        if prefill is None:
            return None
        for row in prefill.rows:
            row.sequences = [s for s in row.sequences if not s.finished]
        if not prefill.sequences:
            self.prefill = None
            return None
        start, stop = prefill.done, min(prefill.length, prefill.done + self.prefill_chunk)
        prefill.done = stop
        first_row = len(self.rows)
        sources: tuple[int, ...] = ()
        if stop == prefill.length:
            sources = tuple(index for index, row in enumerate(prefill.rows) for _ in row.sequences)
            for sequence in prefill.sequences:
                self._give_row(sequence)
            self.prefill = None
        return PrefillChunk(prefill, start, stop, first_row, sources)

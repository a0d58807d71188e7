"""Prompts that are being computed, and what of them goes into the prefix cache. No tensor in sight.

`Scheduler` makes them and decides how far they advance, `CacheRoom` (room.py) which prefix they
reuse and where they stop; `ModelRunner` carries a `PrefillChunk` out.
"""

from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.engine.cache.prefix import Key, PrefixChunk, Segment
from mlx_parallm.engine.cache.sharing import PromptRows, rows_of
from mlx_parallm.engine.companions.recorded import RecordedPrompt, pieces_between
from mlx_parallm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixSave:
    """Positions [segment.start, segment.stop) of a row go into the prefix cache, and the states
    after them as snapshot `position` of the segment `of`. Either may be None. `row` is the
    running cache's, or the prefill's only one."""

    segment: Segment | None
    row: int
    of: Segment | None
    position: int
    key: Key
    text: tuple[int, ...]  # up to the end of what is kept
    owner: Sequence  # one whose text it is


@dataclass(slots=True)
class PrefillRow:
    """One prompt being computed and the sequences that wait for it. Its first `reused` positions
    are in `prefix`, until ModelRunner has taken them from there; its rows will read those in
    `chunks` in place."""

    key: Key
    owner: Sequence  # the first that brought the prompt
    prefix: tuple[PrefixChunk, ...]
    reused: int
    sequences: list[Sequence]
    chunks: tuple[PrefixChunk, ...] = ()
    recorded: RecordedPrompt = field(default_factory=RecordedPrompt)

    def reuse_records(self) -> None:
        """Note what is recorded of its reused positions, for its sequences too."""
        for chunk in self.prefix:
            self.recorded.pieces += pieces_between(chunk.segment.recorded, chunk.start, chunk.stop)
        for sequence in self.sequences:
            sequence.recorded_prompt = self.recorded

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
    places: tuple[int, ...] = ()  # positions of its snapshots, in order
    caches: list[Any] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for row in self.rows for sequence in row.sequences]

    @property
    def positions(self) -> int:
        """Positions of its caches."""
        return len(self.rows) * self.length

    def outside_spans(self, stop: int) -> int:
        """Return the end of a chunk, moved behind the spans that a forward must have whole."""
        moved = max(row.owner.outside_spans(stop) for row in self.rows)
        return stop if moved == stop else self.outside_spans(moved)


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
    save: PrefixSave | None = None  # the part that the prefix cache keeps afterwards

    @property
    def sources(self) -> list[int]:
        """The place in `prefill.rows` of each new row's prompt."""
        return rows_of(self.prompts)

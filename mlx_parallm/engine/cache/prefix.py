"""Keys and values of texts that were computed before, for requests that begin with the same tokens.
No tensor in sight.

    Scheduler   find(key, prompt)  → chunks: which stored segments make up the longest known prefix
                store(key, tokens) → the segment that is new, to be filled by ModelRunner from the
                row that holds it
    ModelRunner copies arrays from rows into `Segment.arrays`, and chunks into the cache of a
    prefill

A tree for each key (weights, cache_salt): a segment holds the tokens that no earlier one has, and
hangs where its text parts from its parent's, at any position. So nothing is held
twice and no segment is ever split. Bounded in tokens; the segment that was not used for longest
goes first, and always is a leaf: a use touches its ancestors last.

Layers with a recurrent state have no keys and values of single positions: their state after a text
is kept as a snapshot, and a text can be gone on with from a snapshot only. Snapshots hang at
positions of the segments: where a prompt ended, where prompts part, where an answer ended
(`Scheduler`). Each counts as `snapshot_tokens` tokens.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.engine.companions.recorded import Piece

Key = tuple[Hashable, str | None]  # (an identity of the weights, cache_salt)


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens [start, stop) of a text. `arrays`: keys and values by layer, [1, H, stop - start, D]
    each, evaluated.
    `snapshots`: by the number of tokens read, the states of the recurrent layers, [1, …] each."""

    parent: "Segment | None"
    start: int
    tokens: tuple[int, ...]
    # by (position, first token)
    children: dict[tuple[int, int], "Segment"] = field(default_factory=dict)
    arrays: list[Any] = field(default_factory=list)
    snapshots: dict[int, list[Any]] = field(default_factory=dict)
    recorded: tuple[Piece, ...] = ()  # what companions recorded of its tokens

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """The first positions of a segment, up to `stop` of the text."""

    segment: Segment
    stop: int

    @property
    def start(self) -> int:
        return self.segment.start


class PrefixCache:
    """
    Args:
        max_tokens: positions held at most, over all keys; 0 = off.
        snapshot_tokens: positions that take the memory of one snapshot; None: the model has no
        recurrent state, and
            every position of a text can be gone on from.
    """

    def __init__(self, max_tokens: int, snapshot_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.snapshot_tokens = snapshot_tokens
        self.tokens = 0  # held now, snapshots included
        self.query_tokens = 0  # tokens of the prompts that were looked up …
        self.hit_tokens = 0  # … and how many of them were found
        self._roots: dict[Key, Segment] = {}
        # by id, least recently used first
        self._by_age: OrderedDict[int, tuple[Key, Segment]] = OrderedDict()

    def find(self, key: Key, prompt: tuple[int, ...]) -> tuple[PrefixChunk, ...]:
        """The longest known prefix, without the prompt's last token: the first decode step feeds
        it."""
        if not self.max_tokens:
            return ()
        chunks = self._path(key, prompt[:-1])
        if self.snapshot_tokens is not None:
            chunks = _to_a_snapshot(chunks)
        self._touch(chunks)
        return chunks

    def held(self, key: Key, tokens: tuple[int, ...]) -> tuple[PrefixChunk, ...]:
        """The chunks that hold the beginning of `tokens`, whether or not a text can continue from
        their end."""
        return self._path(key, tokens)

    def count(self, prompt: tuple[int, ...], reused: int) -> None:
        """Counts a prompt that was looked up, once, however often `find` was called for it."""
        if self.max_tokens:
            self.query_tokens += len(prompt)
            self.hit_tokens += reused

    def store(self, key: Key, tokens: tuple[int, ...]) -> Segment | None:
        """Make room for the new part of `tokens`; None: there is no new part, or no room. The
        caller fills `arrays`."""
        chunks = self._path(key, tokens)
        self._touch(chunks)
        start = chunks[-1].stop if chunks else 0
        size = len(tokens) - start
        # room for the first snapshot too: a segment without one cannot be used
        room = size + (self.snapshot_tokens or 0)
        if not size or start + room > self.max_tokens or not self._make_room(room, len(chunks)):
            return None
        parent = chunks[-1].segment if chunks else self._roots.setdefault(key, Segment(None, 0, ()))
        segment = Segment(parent, start, tokens[start:])
        parent.children[start, tokens[start]] = segment
        self.tokens += size
        self._by_age[id(segment)] = (key, segment)
        self._touch(chunks)
        return segment

    def snapshot(self, key: Key, tokens: tuple[int, ...]) -> tuple[Segment, int] | None:
        """Makes room for the states after `tokens`, which a segment holds (`store`). Returns it
        and the position whose `snapshots` entry the caller fills; None: it is there already, or
        nothing fits."""
        chunks = self._path(key, tokens)
        if self.snapshot_tokens is None or not chunks or chunks[-1].stop != len(tokens):
            return None
        segment = chunks[-1].segment
        self._touch(chunks)
        if len(tokens) in segment.snapshots or not self._make_room(
            self.snapshot_tokens, len(chunks)
        ):
            return None
        self.tokens += self.snapshot_tokens
        segment.snapshots[len(tokens)] = []
        return segment, len(tokens)

    def parting(self, key: Key, prompt: tuple[int, ...]) -> int:
        """How many tokens the prompt has in common with a text that is held."""
        chunks = self._path(key, prompt)
        return chunks[-1].stop if chunks else 0

    def keep_only(self, weights: set[Hashable]) -> None:
        """Drops what other weights than these have computed."""
        for name, (key, segment) in list(self._by_age.items()):
            if key[0] not in weights:
                del self._by_age[name]
                self.tokens -= self._size(segment)
                self._roots.pop(key, None)

    def clear(self) -> None:
        self._roots.clear()
        self._by_age.clear()
        self.tokens = 0

    def check_integrity(self) -> None:
        """Raises AssertionError when the count or the tree is wrong."""
        segments = [segment for _, segment in self._by_age.values()]
        assert self.tokens == sum(map(self._size, segments)) <= self.max_tokens
        assert all(segment.arrays or segment.snapshots for segment in segments), (
            "a segment was never filled"
        )
        assert all(states for segment in segments for states in segment.snapshots.values()), (
            "an empty snapshot"
        )

    def _path(self, key: Key, tokens: tuple[int, ...]) -> tuple[PrefixChunk, ...]:
        """Return the chunks of the longest stored prefix of the text."""
        chunks: list[PrefixChunk] = []
        segment, position = self._roots.get(key), 0
        while segment is not None and position < len(tokens):
            segment = segment.children.get((position, tokens[position]))
            if segment is not None:
                position += common_beginning(
                    segment.tokens, tokens[position : position + len(segment.tokens)]
                )
                chunks.append(PrefixChunk(segment, position))
        return tuple(chunks)

    def _size(self, segment: Segment) -> int:
        return len(segment.tokens) + len(segment.snapshots) * (self.snapshot_tokens or 0)

    def _touch(self, chunks: tuple[PrefixChunk, ...]) -> None:
        for chunk in reversed(chunks):
            self._by_age.move_to_end(id(chunk.segment))

    def _make_room(self, size: int, in_use: int) -> bool:
        """Drops the oldest, but not the `in_use` youngest, which the new segment hangs from."""
        while self.tokens + size > self.max_tokens and len(self._by_age) > in_use:
            _, (key, oldest) = self._by_age.popitem(last=False)
            self.tokens -= self._size(oldest)
            assert oldest.parent is not None and not oldest.children, "the oldest is a leaf"
            del oldest.parent.children[oldest.start, oldest.tokens[0]]
            if not self._roots[key].children:
                del self._roots[key]
        return self.tokens + size <= self.max_tokens


def _to_a_snapshot(chunks: tuple[PrefixChunk, ...]) -> tuple[PrefixChunk, ...]:
    """The chunks up to the last snapshot on the way."""
    for count in range(len(chunks), 0, -1):
        segment, stop = chunks[count - 1].segment, chunks[count - 1].stop
        if reached := [position for position in segment.snapshots if position <= stop]:
            return (*chunks[: count - 1], PrefixChunk(segment, max(reached)))
    return ()


def common_beginning(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens both begin with; compares halves, since tuples are compared faster than a
    loop goes."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

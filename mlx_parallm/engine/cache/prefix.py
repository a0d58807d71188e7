"""Keys and values of texts that were computed before, for requests that begin with the same tokens. No tensor in sight.

    Scheduler   find(key, prompt)  → chunks: which stored segments make up the longest known prefix
                store(key, tokens) → the segment that is new, to be filled by ModelRunner from the row that holds it
    ModelRunner copies arrays from rows into `Segment.arrays`, and chunks into the cache of a prefill

A tree for each key (weights, cache_salt): a segment holds the tokens that no earlier one has, and hangs where its text
parts from its parent's, wherever in the parent that is. So nothing is held twice and no segment is ever split. Bounded
in tokens; the segment that was not used for longest goes first, and always is a leaf: a use touches its ancestors last.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

Key = tuple[Hashable, str | None]  # what identifies the weights, cache_salt


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens [start, stop) of a text. `arrays`: keys and values by layer, [1, H, stop - start, D] each, evaluated."""

    parent: "Segment | None"
    start: int
    tokens: tuple[int, ...]
    children: dict[tuple[int, int], "Segment"] = field(default_factory=dict)  # by (position, first token)
    arrays: list[Any] = field(default_factory=list)

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
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0  # held now
        self.query_tokens = 0  # of the prompts that were looked up …
        self.hit_tokens = 0  # … and how many of them were found
        self._roots: dict[Key, Segment] = {}
        self._by_age: OrderedDict[int, tuple[Key, Segment]] = OrderedDict()  # by id, least recently used first

    def find(self, key: Key, prompt: tuple[int, ...]) -> tuple[PrefixChunk, ...]:
        """The longest known prefix, without the prompt's last token: the first decode step feeds it."""
        if not self.max_tokens:
            return ()
        chunks = self._path(key, prompt[:-1])
        self._touch(chunks)
        self.query_tokens += len(prompt)
        self.hit_tokens += chunks[-1].stop if chunks else 0
        return chunks

    def store(self, key: Key, tokens: tuple[int, ...]) -> Segment | None:
        """Makes room for what is new in `tokens`; None: nothing is, or it does not fit. The caller fills `arrays`."""
        chunks = self._path(key, tokens)
        self._touch(chunks)
        start = chunks[-1].stop if chunks else 0
        size = len(tokens) - start
        if not size or start + size > self.max_tokens or not self._make_room(size, len(chunks)):
            return None
        parent = chunks[-1].segment if chunks else self._roots.setdefault(key, Segment(None, 0, ()))
        segment = Segment(parent, start, tokens[start:])
        parent.children[start, tokens[start]] = segment
        self.tokens += size
        self._by_age[id(segment)] = (key, segment)
        self._touch(chunks)
        return segment

    def keep_only(self, weights: set[Hashable]) -> None:
        """Drops what other weights than these have computed."""
        for name, (key, segment) in list(self._by_age.items()):
            if key[0] not in weights:
                del self._by_age[name]
                self.tokens -= len(segment.tokens)
                self._roots.pop(key, None)

    def clear(self) -> None:
        self._roots.clear()
        self._by_age.clear()
        self.tokens = 0

    def check_integrity(self) -> None:
        """Raises AssertionError when the count or the tree is wrong."""
        segments = [segment for _, segment in self._by_age.values()]
        assert self.tokens == sum(len(segment.tokens) for segment in segments) <= self.max_tokens
        assert all(segment.arrays for segment in segments), "a segment was never filled"

    def _path(self, key: Key, tokens: tuple[int, ...]) -> tuple[PrefixChunk, ...]:
        """Return the chunks from the root to where the text differs from all stored ones."""
        chunks: list[PrefixChunk] = []
        segment, position = self._roots.get(key), 0
        while segment is not None and position < len(tokens):
            segment = segment.children.get((position, tokens[position]))
            if segment is not None:
                position += _common(segment.tokens, tokens[position : position + len(segment.tokens)])
                chunks.append(PrefixChunk(segment, position))
        return tuple(chunks)

    def _touch(self, chunks: tuple[PrefixChunk, ...]) -> None:
        for chunk in reversed(chunks):
            self._by_age.move_to_end(id(chunk.segment))

    def _make_room(self, size: int, in_use: int) -> bool:
        """Drops the oldest, but not the `in_use` youngest, which the new segment hangs from."""
        while self.tokens + size > self.max_tokens and len(self._by_age) > in_use:
            _, (key, oldest) = self._by_age.popitem(last=False)
            self.tokens -= len(oldest.tokens)
            assert oldest.parent is not None and not oldest.children, "the oldest is a leaf"
            del oldest.parent.children[oldest.start, oldest.tokens[0]]
            if not self._roots[key].children:
                del self._roots[key]
        return self.tokens + size <= self.max_tokens


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

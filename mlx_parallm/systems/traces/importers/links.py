"""Walks over the links of foreign logs: each message names the one before it, and the log may be
wrong.

Links may go in a circle, to the message itself, or to a message that the log does not hold. Every
walk ends, and the caller learns what was wrong.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

MOST_COPIED = 200_000
"""Messages that the branches of one log may repeat: a log with a branch at each of its messages
grows by the square."""


@dataclass
class Forest(Generic[Key]):
    """Messages and the one that each follows, in the order of the log.

    Args:
        parents: each message → the one before it; None for the first. A parent that is not a key
            counts as None.

    Attributes:
        circles: messages whose link closed a circle; it is cut.
        beyond: ends of branches that come after others which repeat `most_copied` messages
            together.
    """

    parents: Mapping[Key, Key | None]
    most_copied: int = MOST_COPIED
    circles: set[Key] = field(default_factory=set)
    beyond: list[Key] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parents: dict[Key, Key | None] = {
            key: parent if parent is not None and parent in self.parents else None
            for key, parent in self.parents.items()
        }
        order = {key: number for number, key in enumerate(self._parents)}
        done: set[Key] = set()
        for start in self._parents:
            walk: dict[Key, None] = {}
            at: Key | None = start
            while at is not None and at not in done and at not in walk:
                walk[at] = None
                at = self._parents[at]
            if at is not None and at in walk:
                circle = list(walk)[list(walk).index(at) :]
                first = min(circle, key=order.__getitem__)
                self._parents[first] = None
                self.circles.add(first)
            done |= walk.keys()

    def branches(self) -> Iterator[list[Key]]:
        """Yield the way from the first message to each that none follows."""
        followed = set(self._parents.values())
        claimed: set[Key] = set()
        copied = 0
        for leaf in self._parents:
            if leaf in followed:
                continue
            if copied > self.most_copied:
                self.beyond.append(leaf)
                continue
            way: list[Key] = []
            at: Key | None = leaf
            while at is not None:
                way.append(at)
                at = self._parents[at]
            copied += sum(key in claimed for key in way)
            claimed |= set(way)
            yield way[::-1]

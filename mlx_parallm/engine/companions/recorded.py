"""Columns that companions recorded of a text's tokens, but for those that its sequence sampled: by
the prefill of its prompt, or by those who put its beginning into the prefix cache.

    ModelRunner   adds the columns of a prefill's chunk
    PrefillRow    adds the pieces of a cached prefix
    Sequence      has its prompt's columns for the completion, all its text's for the prefix cache
    Segment       keeps the pieces of its tokens

The sequences of one prompt share one `RecordedPrompt`, and the bytes that it makes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """Places [start, stop) of a text. `columns`: one for each companion that records, of the
    tokens from the place `origin` on, bytes or an array [n, …] that is evaluated by the time it is
    read."""

    origin: int
    start: int
    stop: int
    columns: Sequence[Any]

    def between(self, start: int, stop: int) -> "Piece | None":
        """Return the part in [start, stop)."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return replace(self, start=start, stop=stop) if start < stop else None

    def data(self, column: int, token_bytes: int) -> bytes:
        """Return a column of its places."""
        first = (self.start - self.origin) * token_bytes
        return bytes(self.columns[column])[first : first + (self.stop - self.start) * token_bytes]


def pieces_between(pieces: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """Return their parts in [start, stop)."""
    cut = (piece.between(start, stop) for piece in pieces)
    return tuple(piece for piece in cut if piece is not None)


class RecordedPrompt:
    """The pieces of one prompt, in the order of their places, none twice."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        # by column, with the number of pieces that are in it
        self._joined: dict[int, tuple[int, list[tuple[int, bytes]]]] = {}

    def add(self, start: int, stop: int, columns: Sequence[Any]) -> None:
        """Note arrays of the places from `start` on; padding may follow `stop`."""
        if start < stop:
            self.pieces.append(Piece(start, start, stop, columns))

    def joined(self, column: int, token_bytes: int) -> Sequence[tuple[int, bytes]]:
        """Return a column as bytes, each with its first place; neighbours are one. Made once for
        the same pieces: a request that is aborted asks before the prompt is whole."""
        count, joined = self._joined.get(column, (0, []))
        if count != len(self.pieces):
            parts: list[tuple[int, bytearray]] = []
            end = -1
            for piece in self.pieces:
                if piece.start != end:
                    parts.append((piece.start, bytearray()))
                parts[-1][1].extend(piece.data(column, token_bytes))
                end = piece.stop
            joined = [(start, bytes(data)) for start, data in parts]
            self._joined[column] = len(self.pieces), joined
        return joined

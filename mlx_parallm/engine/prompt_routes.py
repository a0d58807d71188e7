"""Recorded experts of a text's tokens, other than the tokens that its sequence
sampled: by the prefill of its prompt, or by those who put its beginning into the prefix cache.

    ModelRunner   adds the experts of a prefill's chunk
    PrefillRow    adds the pieces of a cached prefix
    Sequence      has its prompt's experts for the completion, all its text's for the prefix cache
    Segment       keeps the pieces of its tokens

The sequences of one prompt share one `PromptRoutes`, and the bytes that it makes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.types import NARROW_IDS, PromptExperts, RoutedExperts


@dataclass(frozen=True, slots=True)
class Piece:
    """Places [start, stop) of a text. `ids`: of the tokens from the place `origin` on, as in
    `RoutedExperts.ids`, bytes or an array [n, layers, k] that is evaluated by the time it is
    read."""

    origin: int
    start: int
    stop: int
    ids: Any

    def between(self, start: int, stop: int) -> "Piece | None":
        """Return the part in [start, stop)."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return replace(self, start=start, stop=stop) if start < stop else None

    def data(self, token_bytes: int) -> bytes:
        """Return the ids of its places."""
        first = (self.start - self.origin) * token_bytes
        return bytes(self.ids)[first : first + (self.stop - self.start) * token_bytes]


def pieces_between(pieces: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """Return their parts in [start, stop)."""
    cut = (piece.between(start, stop) for piece in pieces)
    return tuple(piece for piece in cut if piece is not None)


class PromptRoutes:
    """The pieces of one prompt, in the order of their places, none twice."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._experts: tuple[PromptExperts, ...] | None = None

    def add(self, start: int, stop: int, ids: Any) -> None:
        """Note an array of the places from `start` on; padding may follow `stop`."""
        if start < stop:
            self.pieces.append(Piece(start, start, stop, ids))

    def experts(self, routing: tuple[int, int, int]) -> tuple[PromptExperts, ...]:
        """Return them as bytes, made once, neighbours joined. `routing`: (layers, experts a token,
        experts)."""
        if self._experts is None:
            layers, each, number = routing
            wide = number > NARROW_IDS
            starts: list[int] = []
            parts: list[bytearray] = []
            end = -1
            for piece in self.pieces:
                if piece.start != end:
                    starts.append(piece.start)
                    parts.append(bytearray())
                parts[-1] += piece.data(layers * each * (1 + wide))
                end = piece.stop
            self._experts = tuple(
                PromptExperts(start, RoutedExperts(layers, each, bytes(ids), wide))
                for start, ids in zip(starts, parts, strict=True)
            )
        return self._experts

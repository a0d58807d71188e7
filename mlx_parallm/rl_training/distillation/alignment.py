"""Which tokens of two tokenizers stand for the same text.

The answer is one text in bytes, so half a character is a place like any other. Each side's tokens
end at places of that text; where both have an end, a span ends (`common_spans`). A span holds one
token or more of each side. A token that is not in the text as it stands (unknown to the tokenizer,
or changed by its normaliser) has no end, and a span that holds one is left out.

Worked: "hello!" as hel·lo·! and hell·o!: the ends are 3, 5, 6 and 4, 6, so all of it is one span.
As he·llo·! it shares the end 5 with hello·!, and has two spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.models.tokenizer import Tokenizer

Edit = tuple[int, int, str, bool]
"""Bytes [start, end) of a text, what stands in their place, and whether that may be compared."""


@dataclass(frozen=True)
class Placed:
    """Tokens in a text: where each ends, in bytes, and whether its text is there as it stands."""

    ends: tuple[int | None, ...]  # None: nowhere
    sound: tuple[bool, ...]


@dataclass(frozen=True)
class TextSpan:
    """Tokens [first, last) of each side, by their numbers, that stand for the same text."""

    ours: tuple[int, int]
    theirs: tuple[int, int]


def common_spans(ours: Placed, theirs: Placed) -> list[TextSpan]:
    """Return the smallest spans that end at a common place, in order, without those that hold a
    token that is not sound. Tokens behind the last common place are in none."""
    spans: list[TextSpan] = []
    first, second, begun = 0, 0, (0, 0)
    while first < len(ours.ends) and second < len(theirs.ends):
        end, other = ours.ends[first], theirs.ends[second]
        if end is None or (other is not None and end < other):
            first += 1
        elif other is None or end > other:
            second += 1
        else:
            first, second = first + 1, second + 1
            span = TextSpan((begun[0], first), (begun[1], second))
            if all(ours.sound[slice(*span.ours)]) and all(theirs.sound[slice(*span.theirs)]):
                spans.append(span)
            begun = first, second
    return spans


def token_bytes(tokenizer: Tokenizer, ids: Sequence[int], *, opens_text: bool) -> list[bytes]:
    """Return the bytes that each token adds to an answer. `opens_text`: see
    `Tokenizer.opens_text`."""
    detokenizer = tokenizer.detokenizer(opens_text=opens_text, skip_special_tokens=False)
    pieces = []
    for token in ids:
        pieces.append(detokenizer.bytes_of(token))
        detokenizer.add(token)
    return pieces


def broken_characters(data: bytes) -> list[Edit]:
    """Return the bytes that are no characters, as edits to U+FFFD that cannot be compared."""
    edits: list[Edit] = []
    at = 0
    while True:
        try:
            data[at:].decode()
        except UnicodeDecodeError as error:
            edits.append((at + error.start, at + error.end, "\ufffd", False))
            at += error.end
        else:
            return edits


def edited(data: bytes, edits: Sequence[Edit]) -> tuple[str, np.ndarray, np.ndarray]:
    """Apply edits to a text; of two that overlap the earlier one. All bytes that are no characters
    have to be in one.

    Returns (the new text, the place in it of each of the old places [n + 1], -1 inside an edit,
    whether each of the new bytes may be compared [m]).
    """
    places = np.full(len(data) + 1, -1, np.int64)
    pieces: list[bytes] = []
    sound: list[bool] = []
    at = 0
    for start, end, text, comparable in [*sorted(edits), (len(data), len(data), "", True)]:
        if start < at:
            continue
        places[at : start + 1] = len(sound) + np.arange(start - at + 1)
        written = text.encode()
        pieces += [data[at:start], written]
        sound += [True] * (start - at) + [comparable] * len(written)
        at = end
        places[at] = len(sound)
    return b"".join(pieces).decode(), places, np.array(sound, bool)


def placed(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> Placed:
    """Return where the tokens that a tokenizer made of a text are in it. What a normaliser has left
    out or changed is not sound."""
    reader = tokenizer.text_reader(text)
    ends: list[int | None] = []
    sound: list[bool] = []
    for token in ids:
        piece, before = reader.bytes_of(token), reader.place
        reader.add(token)
        missing = bool(piece) and reader.place == before
        ends.append(None if missing else reader.place)
        sound.append(reader.place == before + len(piece))
    return Placed(tuple(ends), tuple(sound))

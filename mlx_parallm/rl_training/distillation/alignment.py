"""Which tokens of two tokenizers stand for the same text.

The answer is one text in bytes, so half a character is a place like any other. Each side's tokens
end at places of that text; where both have an end, a span ends (`common_spans`). A span holds one
token or more of each side. A token that is not in the text as it stands (unknown to the tokenizer,
or changed by its normaliser) has no end, and a span that holds one is left out.

Worked: "hello!" as hel·lo·! and hell·o!: the ends are 3, 5, 6 and 4, 6, so all of it is one span.
As he·llo·! it shares the end 5 with hello·!, and has two spans.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mlx_parallm.models.tokenizer import Tokenizer

Edit = tuple[int, int, str, bool]
"""Bytes [start, end) of a text, what stands in their place, and whether that may be compared."""

ANCHOR = 16
"""Bytes of a stretch of text that is the same on both sides, if it is there once."""


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
    """Return where the tokens that a tokenizer made of a text are in it.

    Its beginning and its end are read as they stand, and between them, where a normaliser has left
    out or changed a character, stretches of ANCHOR bytes and more that are there once on both
    sides. What lies between stretches is not sound: a character that is looked for nearby may be
    another one.
    """
    data, reader = text.encode(errors="replace"), tokenizer.text_reader(text)
    ends: list[int | None] = []
    for token in ids:
        if not data.startswith(reader.bytes_of(token), reader.place):
            break
        reader.add(token)
        ends.append(reader.place)
    if len(ends) == len(ids):
        return Placed(tuple(ends), (True,) * len(ids))
    while ends and (_inside(data, ends[-1]) or ends[-1] == (0, *ends)[-2]):
        ends.pop()
    number, place = len(ends), ends[-1] if ends else 0
    sound = [True] * number + [False] * (len(ids) - number)
    ends += [None] * (len(ids) - number)
    pieces = [tokenizer.token_bytes(token) for token in ids]
    for stretch in _stretches(pieces, data, number, place or 0):
        at = stretch.place
        if stretch.first > number:
            ends[stretch.first - 1] = at
        for token in range(stretch.first, stretch.last):
            # behind text that no token has
            sound[token] = token > number or at == place
            at += len(pieces[token])
            ends[token] = at
        number, place = stretch.last, at
    return Placed(tuple(ends), tuple(sound))


@dataclass(frozen=True)
class _Stretch:
    """Tokens [first, last) that are in the text as they stand, from a place on."""

    first: int
    last: int
    place: int


def _stretches(pieces: Sequence[bytes], data: bytes, number: int, place: int) -> Iterator[_Stretch]:
    """Yield those behind the tokens that are read, `number` of them up to `place`; the last one
    ends where the text does."""
    last, end = len(pieces), len(data)
    while last > number and pieces[last - 1] and data.endswith(pieces[last - 1], place, end):
        last, end = last - 1, end - len(pieces[last - 1])
    while last < len(pieces) and _inside(data, end):
        last, end = last + 1, end + len(pieces[last])
    joined, starts = b"".join(pieces[number:last]), [0, *accumulate(map(len, pieces[number:last]))]
    anchors = [joined[start : start + ANCHOR] for start in starts[:-1]]
    once = {anchor for anchor, count in _places(joined, anchors).items() if len(count) == 1}
    there = _places(data[:end], once, place)
    first = number
    while first < last:
        places = there.get(anchors[first - number], [])
        behind_us = bisect_left(places, place)
        at = places[-1] if behind_us == len(places) - 1 else -1
        if at < 0 or _inside(data, at):
            first += 1
            continue
        behind, stop = first, at
        while behind < last and pieces[behind] and data.startswith(pieces[behind], stop, end):
            behind, stop = behind + 1, stop + len(pieces[behind])
        while behind > first and _inside(data, stop):
            behind, stop = behind - 1, stop - len(pieces[behind - 1])
        if behind == first:
            first += 1
            continue
        yield _Stretch(first, behind, at)
        first, place = behind, stop
    yield _Stretch(last, len(pieces), end)


def _places(
    data: bytes, anchors: Collection[bytes], place: int = 0
) -> Mapping[bytes, Sequence[int]]:
    """Return where each anchor is in a text from a place on, in one pass over it."""
    places: dict[bytes, list[int]] = {anchor: [] for anchor in anchors if len(anchor) == ANCHOR}
    for start in range(place, len(data) - ANCHOR + 1):
        if (of_anchor := places.get(data[start : start + ANCHOR])) is not None:
            of_anchor.append(start)
    return places


def _inside(data: bytes, place: int | None) -> bool:
    """True: a character goes on here."""
    return place is not None and place < len(data) and data[place] & 0xC0 == 0x80

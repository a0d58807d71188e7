"""Which tokens of two tokenizers are the same text: any two families, strange texts, long ones."""

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Rust

from mlx_parallm.rl_training.distillation.alignment import (
    ANCHOR,
    Placed,
    _inside,
    _Stretch,
    _stretches,
    broken_characters,
    common_spans,
    edited,
    placed,
    token_bytes,
)
from tests.rl_training.distillation.making import tokenizer_of
from tests.tokenizer_families import ANY_TEXT

CASES = int(os.environ.get("ALIGNMENT_CASES", "150"))


class Counting(bytes):
    """Bytes that count how often it was asked what they begin with, and what is in them."""

    asked = 0

    def startswith(self, *arguments: Any) -> bool:
        self.asked += 1
        return super().startswith(*arguments)

    def find(self, *arguments: Any) -> int:
        self.asked += 1
        return super().find(*arguments)

    def rfind(self, *arguments: Any) -> int:
        self.asked += 1
        return super().rfind(*arguments)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (b"ab" * 2000, [b"ab"] * 2000),
        (b"0123456789abcdef, 0123456789abcdef", [b"01234567", b"89abcdef"]),
        (b"0123456789abcdef", [b"01234567", b"89abcdef", b", ", b"01234567", b"89abcdef"]),
        (b"nothing of it is there " * 99, [b"%08d" % number for number in range(999)]),
    ],
)
def test_a_stretch_that_is_there_twice_is_none(text: bytes, tokens: list[bytes]) -> None:
    """Which of the two is meant is not known; nor is it read on to the end from each token, or looked
    for in all of the text."""
    data, pieces = Counting(b"E" + text + b"!"), [b"e", *tokens, b"?"]
    assert list(_stretches(pieces, data, 0, 0)) == [_Stretch(len(pieces), len(pieces), len(data))]
    assert data.asked <= len(pieces)


def stretches_one_by_one(
    pieces: list[bytes], data: bytes, number: int, place: int
) -> Iterator[_Stretch]:
    """The same, by looking for each token's 16 bytes in the whole text."""
    last, end = len(pieces), len(data)
    while last > number and pieces[last - 1] and data.endswith(pieces[last - 1], place, end):
        last, end = last - 1, end - len(pieces[last - 1])
    while last < len(pieces) and _inside(data, end):
        last, end = last + 1, end + len(pieces[last])
    joined, first = b"".join(pieces[number:last]), number
    while first < last:
        window = b"".join(pieces[first:last])[:ANCHOR]
        places = [at for at in range(place, end) if data.startswith(window, at, end)]
        behind = first
        if (
            len(window) == ANCHOR
            and len(places) == 1
            and joined.find(window) == joined.rfind(window)
        ):
            stop = at = places[0]
            while behind < last and pieces[behind] and data.startswith(pieces[behind], stop, end):
                behind, stop = behind + 1, stop + len(pieces[behind])
            while behind > first and _inside(data, stop):
                behind, stop = behind - 1, stop - len(pieces[behind - 1])
        if behind == first or _inside(data, at):
            first += 1
        else:
            yield _Stretch(first, behind, at)
            first, place = behind, stop
    yield _Stretch(last, len(pieces), end)


def test_one_pass_finds_what_looking_for_each_token_finds() -> None:
    rng, several = random.Random(2), 0
    words = ["one ", "two ", "sixteen letters ", "ß", "你好", "é", ", and so on: "]
    for _ in range(8 * CASES):
        texts = rng.choices(words, k=rng.randint(1, 30))
        data = "".join(texts).encode()
        changed = "".join(
            w if rng.random() < 0.9 else rng.choice("▁e\u0301") for w in texts
        ).encode()
        cuts = [0, *sorted(rng.sample(range(len(changed) + 1), min(9, len(changed)))), len(changed)]
        pieces = [changed[start:stop] for start, stop in itertools.pairwise(cuts)]
        found = list(_stretches(pieces, data, 0, 0))
        assert found == list(stretches_one_by_one(pieces, data, 0, 0)), (pieces, data)
        several += len(found) > 2
    assert several > CASES


def random_text(rng: random.Random) -> str:
    pieces = [
        "Hello",
        " world",
        " ",
        "  ",
        "\n",
        "42",
        "é",
        "你好",
        "👩‍💻",
        "L'été",
        "\t",
        "x+1",
        "<",
        "|",
        "e\u0301",
        "\u212b",
        "\u1100\u1161",
        "\U0001f1e9\U0001f1ea",
        "\u202e\u200b\u2028\ufeff",
        "\x00\x85\xa0\r\n",
        "\u2581",
        "\u0120",
        "<0x0A>",
        "</s>",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\u05e2\u05d1",
        "\U0001d518\U000e0041",
    ]
    return "".join(rng.choices(pieces, k=rng.randint(0, 12)))


def test_spans_are_the_same_bytes_and_the_smallest(family: Callable[[str], Path]) -> None:
    """Any two families, any text: what both sides write in a span is equal, no span could be cut, and
    none is missing."""
    rng = random.Random(0)
    names = [*ANY_TEXT[:9], "added words"]
    tokenizers = {name: tokenizer_of(family(name)) for name in dict.fromkeys(names)}
    for _ in range(CASES):
        ours, theirs = (tokenizers[rng.choice(names)] for _ in range(2))
        text = random_text(rng)
        ids = ours.encode_within(text)
        if rng.random() < 0.3:  # tokens as a policy samples them, in half characters too
            ids = [rng.randrange(3, ours.vocab_size) for _ in range(rng.randint(1, 6))]
        pieces = token_bytes(ours, ids, opens_text=False)
        data = b"".join(pieces)
        written, places, comparable = edited(data, broken_characters(data))
        assert written == data.decode(errors="replace")
        their_ids = theirs.encode_within(written)
        found = placed(theirs, their_ids, written)
        cuts = np.cumsum([0, *map(len, pieces)])
        ends = tuple(None if places[cut] < 0 else int(places[cut]) for cut in cuts[1:])
        spans = common_spans(Placed(ends, (True,) * len(ends)), found)
        their_pieces = [theirs.token_bytes(token) for token in their_ids]
        if not comparable.all() or not all(found.sound):
            continue
        for span in spans:
            mine = b"".join(pieces[slice(*span.ours)])
            assert b"".join(their_pieces[slice(*span.theirs)]).strip() == mine.strip()
        shared = set(ends) & set(found.ends)
        assert {ends[span.ours[1] - 1] for span in spans} == shared


CHANGED = [
    "a",
    "b",
    "ß",
    " ",
    "  ",
    ".",
    "ab",
    "你",
    "\n",
    "é",
    "e\u0301",
    "\u212b",
    "▁",
    "\u1100\u1161",
]


@pytest.mark.parametrize("name", ["nfc", "llama2", "gemma", "metaspace never"])
def test_a_changed_character_takes_no_other_tokens_place(
    family: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Against the tokenizer's own offsets: a normaliser composes characters, or reads ▁ as a space, and
    the same characters come again. Looked for nearby, they were taken for each other."""
    path = family("gpt2" if name == "nfc" else name)
    if name == "nfc":
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))
        path = tmp_path
    rust, theirs = Rust.from_file(str(path / "tokenizer.json")), tokenizer_of(path)
    ours, rng, scored = tokenizer_of(family("llama3")), random.Random(1), 0
    for _ in range(CASES):
        text = "".join(rng.choices(CHANGED, k=rng.randint(2, 20)))
        read = rust.encode(text, add_special_tokens=False)
        pieces = token_bytes(ours, ours.encode_within(text), opens_text=False)
        cuts = np.cumsum([0, *map(len, pieces)]).tolist()
        mine = Placed(tuple(cuts[1:]), (True,) * len(pieces))
        places = [len(text[:end].encode()) for end in range(len(text) + 1)]
        for span in common_spans(mine, placed(theirs, read.ids, text)):
            first, last = cuts[span.ours[0]], cuts[span.ours[1]]
            for number in range(*span.theirs):
                start, end = (places[each] for each in read.offsets[number])
                alone = theirs.token_bytes(read.ids[number]) == b" "  # put before the text
                assert start < last, (text, span)
                assert end > first or (alone and end == first), (text, span)
            scored += 1
    assert scored > CASES


def test_what_lies_between_two_changed_characters_is_read(
    family: Callable[[str], Path],
) -> None:
    """If it is there once and has 16 bytes."""
    theirs, ours = tokenizer_of(family("llama2")), tokenizer_of(family("llama3"))
    sentence = "a whole sentence stands between them"
    for between, kept in ((sentence, sentence), ("ab ab ", "")):
        text = f"begins▁{between}▁ends"
        pieces = token_bytes(ours, ours.encode_within(text), opens_text=False)
        mine = Placed(tuple(np.cumsum([*map(len, pieces)]).tolist()), (True,) * len(pieces))
        spans = common_spans(mine, placed(theirs, theirs.encode_within(text), text))
        read = b"".join(piece for span in spans for piece in pieces[slice(*span.ours)])
        assert read.decode() == f"begins{kept}ends"


@pytest.mark.parametrize(
    ("ours", "theirs", "spans"),
    [
        ([3, 5, 6], [4, 6], [((0, 3), (0, 2))]),
        ([2, 5, 6], [5, 6], [((0, 2), (0, 1)), ((2, 3), (1, 2))]),
        ([1, 2, 3], [0, 3], [((0, 3), (0, 2))]),
        ([1, None, 3], [1, 2, 3], [((0, 1), (0, 1)), ((1, 3), (1, 3))]),
        ([1, 4], [1, 3], [((0, 1), (0, 1))]),
        ([], [1], []),
    ],
)
def test_worked_spans(ours: list[int | None], theirs: list[int | None], spans: Any) -> None:
    sides = (Placed(tuple(each), (True,) * len(each)) for each in (ours, theirs))
    assert [(span.ours, span.theirs) for span in common_spans(*sides)] == spans


def test_a_token_that_is_not_in_the_text_takes_its_span_with_it() -> None:
    ours = Placed((1, 2, 3), (True,) * 3)
    [first, last] = common_spans(ours, Placed((1, None, 2, 3), (True, False, True, True)))
    assert (first.ours, last.ours) == ((0, 1), (2, 3))

"""Patterns from outside end in time, and other threads continue meanwhile."""

import os
import random
import re
import threading

import pytest

from mlx_parallm.errors import PatternTimeoutError
from mlx_parallm.system.foreign_json import fault, validator
from mlx_parallm.system.patterns import MOST_REPEATS, Pattern, PatternError

CASES = int(os.environ.get("PATTERN_CASES", "300"))
SLOW = [r"^(?:a|b|ab)*[^ab]{2}$", r"^(a|b|ab)*c\1$", r"^(a?){2000}a{2000}$"]


@pytest.mark.parametrize("pattern", SLOW)
def test_a_slow_pattern_ends_and_holds_nobody_up(pattern: str) -> None:
    turns, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            turns[0] += 1

    other = threading.Thread(target=count)
    slow = Pattern(pattern, seconds=0.05)
    other.start()
    try:
        before = turns[0]
        for ask in (slow.search, slow.last, slow.last_part):
            with pytest.raises(PatternTimeoutError, match=r"0.05.*4,001"):
                ask("ab" * 2000 + "c")
        assert turns[0] > before + 100
    finally:
        done.set()
        other.join()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("[", "not a regular expression"),
        ("(" * 900 + ")" * 900, "nested too deeply"),
        ("a{99999999999999}", "too large"),
        ("((a{1000}){1000}){1000}", "repeats a part"),
        ("(?=(?:[ab]|c{400}){400})", "repeats a part"),
        (f"x|(?:ab){{{MOST_REPEATS + 1}}}", "repeats a part"),
        ("a" * 5000, "5,000 characters"),
        (r"\X", "not a regular expression"),  # of `regex`, not of Python
        ("(?:colour){e<=1}", r"write \\ before"),
        ("[[:alpha:]]", r"write \\ before"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        Pattern(pattern)


def test_it_means_what_python_means() -> None:
    """Random patterns of Python's syntax, by `re` itself."""
    dice = random.Random(4711)
    pieces = [
        "a",
        "b",
        ".",
        "[ab]",
        "[^a]",
        r"\w",
        r"\s",
        "(a)",
        "(?:ab)",
        "(?P<x>b)",
        "^",
        "$",
        "|",
    ]
    repeats = ["", "", "*", "+", "?", "{2}", "{1,3}", "*?", "+?", "*+"]
    tried = 0
    while tried < CASES:
        parts = [dice.choice(pieces) + dice.choice(repeats) for _ in range(dice.randint(1, 4))]
        source, flags = "".join(parts), dice.choice([0, re.DOTALL, re.IGNORECASE, re.MULTILINE])
        try:
            python = re.compile(source, flags)
        except re.error:
            with pytest.raises(PatternError):
                Pattern(source, flags)
            continue
        tried += 1
        text = "".join(dice.choices("aAb\n {}", k=dice.randint(0, 8)))
        ours = Pattern(source, flags, seconds=5.0)
        for how in ("search", "match", "fullmatch"):
            found, wanted = getattr(ours, how)(text), getattr(python, how)(text)
            assert (found and found.span()) == (wanted and wanted.span()), (
                source,
                flags,
                text,
                how,
            )
        every = list(python.finditer(text))
        last = ours.last(text)
        assert (last and last.groups()) == (every[-1].groups() if every else None), (source, text)


@pytest.mark.parametrize("pattern", ["^(a+)+$", r"^(?=a)(a|a)*\1c$", r"(\w+\s?)+\."])
def test_a_pattern_of_a_schema_ends(pattern: str) -> None:
    schema = f'{{"type": "object", "properties": {{"x": {{"pattern": "{pattern}"}}}}}}'
    reason = fault(schema.replace("\\", "\\\\"), {"x": "a" * 5000 + "!"}, what="it")
    assert reason is not None and reason.startswith("/x: ")


def test_a_schema_fetches_nothing() -> None:
    with pytest.raises(ValueError, match="not a JSON schema"):
        validator('{"$ref": "http://127.0.0.1:9/x.json"}')

"""Regular expressions that end in time: THE way to use a pattern, or to read a text with a pattern,
that comes from outside (a configuration, a client, an adapter's file; an answer of a policy).

Python's `re` backtracks without a bound and holds the interpreter's lock meanwhile: `^(a+)+$` on 40
letters stops every thread of the process. The package `regex` gives the lock away and has a time
limit. Python's syntax stays the one that counts: what `re` refuses is refused.

Patterns that are in the source may use `re`; `tests/test_architecture.py` holds the rest to this
module.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from re import _parser  # type: ignore[attr-defined]  # the only parse tree of Python's syntax
from typing import Any

import regex

from mlx_parallm.errors import PatternTimeoutError

SEARCH_S = 1.0
LONGEST_PATTERN = 4000  # characters
MOST_REPEATS = 100_000  # of one part, nested counts multiplied: `regex` unrolls {n}
# fuzzy matches and POSIX classes: `regex` has a syntax for them, Python reads plain characters
_OTHERS_SYNTAX = re.compile(r"(?<!\\)\{[\d<=+*,\s]*[eids][^{}\"']*\}|\[\[:")
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)


class PatternError(ValueError):
    """No regular expression that can be used. One line."""


class Pattern:
    """A compiled pattern. Any thread.

    Args:
        flags: of `re`, e.g. `re.DOTALL`.
        seconds: the longest time of one call; None: SEARCH_S.

    Raises PatternError: Python's `re` does not take it, or it is too long or repeats too often.
    """

    def __init__(self, text: str, flags: int = 0, *, seconds: float | None = None) -> None:
        if len(text) > LONGEST_PATTERN:
            raise PatternError(
                f"the pattern has {len(text):,} characters, at most {LONGEST_PATTERN:,} are taken"
            )
        if (other := _OTHERS_SYNTAX.search(text)) is not None:
            raise PatternError(f"{text[:80]!r}: write \\ before {other[0][:20]!r}")
        self.text, self.seconds = text, SEARCH_S if seconds is None else seconds
        try:
            compiled = re.compile(text, flags)
            if _most_repeats(_parser.parse(text, flags)) > MOST_REPEATS:
                raise PatternError(f"{text[:80]!r} repeats a part more than {MOST_REPEATS:,} times")
            self._regex = regex.compile(text, flags)
        except (re.error, regex.error, OverflowError) as error:
            raise PatternError(f"{text[:80]!r} is not a regular expression: {error}") from error
        except RecursionError as error:
            raise PatternError(f"{text[:80]!r} is nested too deeply") from error
        self.groups: int = compiled.groups
        self.group_names: tuple[str, ...] = tuple(compiled.groupindex)

    def search(self, text: str, *, seconds: float | None = None) -> "regex.Match[str] | None":
        """Return the first match. `seconds`: in the place of the pattern's own. Raises
        PatternTimeoutError."""
        return self._ask(self._regex.search, text, seconds)

    def match(self, text: str, *, seconds: float | None = None) -> "regex.Match[str] | None":
        """Return the match at the beginning. Raises PatternTimeoutError."""
        return self._ask(self._regex.match, text, seconds)

    def fullmatch(self, text: str, *, seconds: float | None = None) -> "regex.Match[str] | None":
        """Return the match of the whole text. Raises PatternTimeoutError."""
        return self._ask(self._regex.fullmatch, text, seconds)

    def last(self, text: str) -> "regex.Match[str] | None":
        """Return the last of all matches from left to right. Raises PatternTimeoutError."""
        matches = self._regex.finditer(text, timeout=self.seconds, concurrent=True)
        try:
            newest = deque(matches, maxlen=1)
        except TimeoutError as error:
            raise self._too_long(text, self.seconds) from error
        return newest[0] if newest else None

    def last_part(self, text: str) -> str | None:
        """Return the first group of the last match, or the match if there is no group; "" for
        a group that took no part; None without a match. Raises PatternTimeoutError."""
        match = self.last(text)
        return None if match is None else match[1 if self.groups else 0] or ""

    def _ask(self, how: Callable[..., Any], text: str, seconds: float | None) -> Any:
        limit = self.seconds if seconds is None else max(seconds, 1e-3)
        try:
            return how(text, timeout=limit, concurrent=True)
        except TimeoutError as error:
            raise self._too_long(text, limit) from error

    def _too_long(self, text: str, seconds: float) -> PatternTimeoutError:
        return PatternTimeoutError(
            f"the regular expression {self.text[:80]!r} takes more than {seconds:.3g} s on"
            f" {len(text):,} characters"
        )


def _most_repeats(parsed: Any) -> int:
    """Return how often the most repeated part has to come, the least counts of nested repeats
    multiplied."""
    most, waiting = 1, [(parsed, 1)]
    while waiting:
        part, times = waiting.pop()
        most = max(most, times)
        for operation, argument in part:
            here = times
            if operation in _REPEATS:
                here = times * max(1, argument[0])
                most = max(most, here)
            waiting += [(inner, here) for inner in _inner(argument)]
    return most


def _inner(argument: Any) -> Iterator[Any]:
    """Yield the parts of an operation's argument that are patterns."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _inner(each)

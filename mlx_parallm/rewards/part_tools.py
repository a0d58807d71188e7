"""Helpers of the built-in parts: completions as text, the column that an option names,
thresholds."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import ConfigError, PatternTimeoutError
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.patterns import Pattern, PatternError

log = get_logger("rewards")

Completions = Sequence[str] | Sequence[Sequence[Mapping[str, Any]]]
Scores = list[float | None]
"""One for each completion; None: the part does not apply."""


def texts_of(completions: Completions) -> list[str]:
    """Return TRL's completions as texts: strings, or of lists of messages the last content."""
    return [text if isinstance(text, str) else str(text[-1]["content"]) for text in completions]


def to_binary(scores: Sequence[float | None], threshold: float | None = 0.5) -> Scores:
    """1 from `threshold` on, else 0; None stays None. A threshold of None leaves the scores as
    they are."""
    if threshold is None:
        return list(scores)
    return [None if score is None else float(score >= threshold) for score in scores]


def with_column(
    function: Callable[..., Any], column: str, *others: str, optional: bool = False
) -> Callable[..., Any]:
    """Give `function(**arguments)` the signature (completions, *others, <column>), if an option
    names the column.

    Raises ConfigError: the column's name cannot be a keyword.
    """
    names = ("completions", *others)
    if not column.isidentifier() or column in names:
        raise ConfigError(
            f"column = {column!r}: it has to be a Python identifier, and not {' or '.join(names)}"
        )
    default = None if optional else inspect.Parameter.empty
    parameters = [
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names),
        inspect.Parameter(column, inspect.Parameter.KEYWORD_ONLY, default=default),
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def by_column(score: Callable[[str, Any], float | None], column: str) -> Callable[..., Scores]:
    """Make a reward function that scores each text with its row's value of the column; None
    if that is None."""

    def part(**arguments: Any) -> Scores:
        pairs = zip(texts_of(arguments["completions"]), arguments[column], strict=True)
        return [None if value is None else in_time(score, text, value) for text, value in pairs]

    return with_column(part, column)


def compiled(pattern: str, flags: int = 0) -> Pattern:
    """Return the pattern of an option. Raises ConfigError: it cannot be used."""
    try:
        return Pattern(pattern, flags)
    except PatternError as error:
        raise ConfigError(f"pattern: {error}") from error


def in_time(score: Callable[..., float | None], *arguments: Any) -> float | None:
    """Return the score; None, and a line in the log, if a pattern takes too long on the answer:
    unread ones are neither right nor wrong."""
    try:
        return score(*arguments)
    except PatternTimeoutError as error:
        log.warning("an answer is not scored", reason=str(error))
        return None

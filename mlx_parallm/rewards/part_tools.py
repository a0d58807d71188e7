"""What the built-in parts are made with: completions as text, the column that an option names, thresholds."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import ConfigError

Completions = Sequence[str] | Sequence[Sequence[Mapping[str, Any]]]
Scores = list[float | None]
"""One for each completion; None: there is nothing to judge."""


def texts_of(completions: Completions) -> list[str]:
    """Completions as TRL gives them: strings, or lists of messages, of which the last one's content."""
    return [text if isinstance(text, str) else str(text[-1]["content"]) for text in completions]


def to_binary(scores: Sequence[float | None], threshold: float | None = 0.5) -> Scores:
    """1 from `threshold` on, else 0; None stays None. A threshold of None leaves the scores as they are."""
    if threshold is None:
        return list(scores)
    return [None if score is None else float(score >= threshold) for score in scores]


def with_column(function: Callable[..., Any], column: str, *, optional: bool = False) -> Callable[..., Any]:
    """`function(**given)`, seen from outside as a function of `completions` and of the column that an option names.

    Raises ConfigError: no keyword can be called so.
    """
    if not column.isidentifier() or column == "completions":
        raise ConfigError(f"column = {column!r}: a column of the data whose name is one of Python's, not completions")
    default = None if optional else inspect.Parameter.empty
    given = [
        inspect.Parameter("completions", inspect.Parameter.KEYWORD_ONLY),
        inspect.Parameter(column, inspect.Parameter.KEYWORD_ONLY, default=default),
    ]
    function.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    return function


def by_column(score: Callable[[str, Any], float | None], column: str) -> Callable[..., Scores]:
    """A reward function that scores each text with the value that its row has in the column; None is not judged."""

    def part(**given: Any) -> Scores:
        pairs = zip(texts_of(given["completions"]), given[column], strict=True)
        return [None if value is None else score(text, value) for text, value in pairs]

    return with_column(part, column)


def needs_extra(module: str, part: str) -> None:
    """Raises ConfigError: the library that a part is made with is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"builtin:{part} needs {module}: pip install 'mlx-parallm[rewards]'")

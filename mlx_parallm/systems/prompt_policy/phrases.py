"""The words that classifier and mutations know, from `phrases.toml`: categories and their signs,
fillers, fallbacks, constraints, steps."""

import tomllib
from importlib.resources import files
from typing import Any, Literal, get_args

Category = Literal[
    "CODE_GENERATION",
    "CODE_REVIEW",
    "CONTENT_WRITING",
    "MARKETING_COPY",
    "DATA_ANALYSIS",
    "GENERAL_QA",
    "CREATIVE_WRITING",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

_WORDS: dict[str, Any] = tomllib.loads(
    files(__package__).joinpath("phrases.toml").read_text(encoding="utf-8")
)


def _of_each(table: str) -> dict[Any, tuple[str, ...]]:
    return {name: tuple(phrases) for name, phrases in _WORDS[table].items()}


SIGNS: dict[Category, tuple[str, ...]] = _of_each("signs")
VERBS: dict[str, tuple[str, ...]] = _of_each("verbs")
FALLBACKS: dict[str, tuple[str, ...]] = _of_each("fallbacks")
CONSTRAINTS: dict[Category, tuple[str, ...]] = _of_each("constraints")
STEPS: dict[Category, tuple[str, ...]] = _of_each("steps")
CRITERIA: dict[Category, tuple[str, ...]] = _of_each("criteria")
TERMS: dict[str, str] = _WORDS["terms"]

_PARTS = {
    "<VERB>": f"(?:{'|'.join(verb for family in VERBS.values() for verb in family)})",
    "<MUCH>": _WORDS["parts"]["much"],
    "<POLITE>": _WORDS["parts"]["polite"],
}


def _patterns(name: str) -> tuple[str, ...]:
    patterns = list(_WORDS[name])
    for part, text in _PARTS.items():
        patterns = [pattern.replace(part, text) for pattern in patterns]
    return tuple(patterns)


SMALL_TALK, OPENINGS, INSIDE = map(_patterns, ("small_talk", "openings", "inside"))

"""Sort a prompt into one of seven categories, by the signs of `phrases.SIGNS`. No MLX."""

import re
from dataclasses import dataclass

from mlx_parallm.systems.prompt_policy.phrases import CATEGORIES, SIGNS, VERBS, Category

NOT_SURE = 0.25
BASE, EACH_SIGN, MOST = 0.35, 0.2, 0.95
_SIGNS = {
    category: [re.compile(sign, re.IGNORECASE) for sign in signs]
    for category, signs in SIGNS.items()
}
_VERBS = {verb: family for family, verbs in VERBS.items() for verb in verbs}
_WORDS = re.compile(r"[A-Za-z']+")
LIMIT = re.compile(
    r"\b(at most|at least|no more than|must|must not|do not|only|under \d|within \d|exactly|without|avoid|limit"
    r"|maximum|minimum|constraints?:)",
    re.IGNORECASE,
)
LISTED = re.compile(r"^[^\S\n]*(\d+[.)]|[-*•])\s", re.MULTILINE)


@dataclass(frozen=True)
class Classified:
    """A category, its confidence (0.25 to 0.95), and the prompt's parts."""

    category: Category
    confidence: float
    words: int
    verbs: tuple[str, ...]  # those of `phrases.VERBS`, in their order
    has_constraints: bool
    has_list: bool
    is_question: bool


def classify_prompt(prompt: str) -> Classified:
    """Classify a prompt. Confidence is 0.35 + 0.2 for each sign, at most 0.95; 0.25 and
    GENERAL_QA without a sign."""
    text = prompt.strip()
    hits = {
        category: sum(bool(sign.search(text)) for sign in signs)
        for category, signs in _SIGNS.items()
    }
    category = max(CATEGORIES, key=lambda name: (hits[name], name != "GENERAL_QA"))
    words = _WORDS.findall(text)
    return Classified(
        category=category if hits[category] else "GENERAL_QA",
        confidence=min(BASE + EACH_SIGN * hits[category], MOST) if hits[category] else NOT_SURE,
        words=len(words),
        verbs=tuple(word.lower() for word in words if word.lower() in _VERBS),
        has_constraints=bool(LIMIT.search(text)),
        has_list=len(LISTED.findall(text)) >= 2,
        is_question=text.endswith("?"),
    )


def is_verb(word: str) -> bool:
    """Whether this is one of `phrases.VERBS`."""
    return word.lower() in _VERBS


def verb_family(classified: Classified) -> str:
    """Return the family of the first verb: "mend", "make", "study" or "other"."""
    return next((_VERBS[verb] for verb in classified.verbs), "other")

"""A verifiable reward for instructions about the form of an answer, in the manner of IFEval (arXiv
2311.07911).

A row has `topic` and `constraints`: [{"kind": "lower"}, {"kind": "ends_with", "phrase": "That is
all."}, …]. The score is the share of constraints that hold. It is 0 where the answer has no
content: a bare phrase, a copy of the prompt, the same words again and again, or an answer that does
not name its topic. Without this, a policy learns the phrase alone.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")
OWN_WORDS, VARIETY, COPIED = 5, 0.5, 0.5
"""The least words of its own that an answer needs; the least share of them that are different;
the largest share of three words in a row that also stand in the prompt."""


def words(text: str) -> list[str]:
    """Return the words in lower case."""
    return [word.lower() for word in WORD.findall(text)]


def _json(text: str, keys: Sequence[str]) -> bool:
    """An object with exactly these keys and texts that are not empty."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or set(value) != set(keys):
        return False
    return all(isinstance(item, str) and words(item) for item in value.values())


CHECKS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "lower": lambda text, _: text == text.lower() and text != text.upper(),
    "upper": lambda text, _: text == text.upper() and text != text.lower(),
    "at_most": lambda text, wanted: len(words(text)) <= wanted["words"],
    "at_least": lambda text, wanted: len(words(text)) >= wanted["words"],
    "sentences": lambda text, wanted: (
        bool(text) and text[-1] in ".!?" and count_sentences(text) == wanted[("number")]
    ),
    "ends_with": lambda text, wanted: text.lower().endswith(wanted["phrase"].lower()),
    "keyword": lambda text, wanted: words(text).count(wanted["word"].lower()) == wanted["times"],
    "no_comma": lambda text, _: "," not in text,
    "json": lambda text, wanted: _json(text, wanted["keys"]),
}


def count_sentences(text: str) -> int:
    """Return how often `.`, `!` or `?` ends a piece of text that has a word."""
    return sum(1 for piece in SENTENCE_END.split(text) if words(piece))


def own_words(text: str, constraints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the words that no constraint put there: without the phrase at the end, the keyword
    and the JSON keys."""
    text = text.lower()
    from_constraints: set[str] = set()
    for wanted in constraints:
        if phrase := str(wanted.get("phrase", "")).lower():
            text = text.replace(phrase, " ")
        from_constraints |= {
            str(wanted.get("word", "")).lower(),
            *(str(key).lower() for key in wanted.get("keys", ())),
        }
    return [word for word in words(text) if word not in from_constraints]


def has_content(
    text: str, prompt: str, topic: str, constraints: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether an answer says something about its topic in words of its own."""
    free_words = own_words(text, constraints)
    subject = topic.lower()
    rest = [word for word in free_words if not names(word, subject)]
    if (
        len(rest) < OWN_WORDS
        or len(set(rest)) < VARIETY * len(rest)
        or len(rest) == len(free_words)
    ):
        return False
    prompt_words, answer_words = words(prompt), words(text)
    triples = set(zip(prompt_words, prompt_words[1:], prompt_words[2:], strict=False))
    answered = list(zip(answer_words, answer_words[1:], answer_words[2:], strict=False))
    return sum(triple in triples for triple in answered) < COPIED * len(answered)


def names(word: str, topic: str) -> bool:
    """Return whether a word is the topic, or its singular: castle for castles, library for
    libraries."""
    return word in (
        topic,
        topic.removesuffix("s"),
        topic.removesuffix("es"),
        topic.removesuffix("ies") + ("y"),
    )


def score_one(
    text: str, prompt: str, topic: str, constraints: Sequence[Mapping[str, Any]]
) -> float:
    """Return the share of the constraints that hold, from 0 to 1; 0 without content.

    Raises KeyError: a constraint of a kind that is not in CHECKS.
    """
    text = text.strip()
    held = [CHECKS[wanted["kind"]](text, wanted) for wanted in constraints]
    return sum(held) / len(held) if has_content(text, prompt, topic, constraints) else 0.0


def score(
    prompts: Sequence[Any],
    completions: Sequence[str],
    topic: Sequence[str],
    constraints: Sequence[Sequence[Mapping[str, Any]]],
    **columns: Any,
) -> list[float]:
    """Score the answers to one prompt: the reward function of `--reward rewards.py:score`."""
    return [
        score_one(
            text, prompt if isinstance(prompt, str) else prompt[-1]["content"], subject, wanted
        )
        for prompt, text, subject, wanted in zip(
            prompts, completions, topic, constraints, strict=True
        )
    ]

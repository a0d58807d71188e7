"""Scripted judges of groups (`builtin:group_judge`) that are wrong a known share of the time, and the
checkers that no judge sees."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

DATA = re.compile(r"^([0-9a-f]{16})\n(.*)\n\1$", re.DOTALL | re.MULTILINE)
QUESTION = re.compile(r"(\w+): (\S+)")
REFUSES = re.compile(r"\b(sorry|apolog\w+|unfortunately|can ?not|can't|unable|not able)\b", re.I)
WHY = re.compile(r"\b(because|since|as an? \w+|do(?:n't| not) have|have no|without|only)\b", re.I)

KIND = re.compile(r"\b(please|thank\w*|sorry|glad|happy to|pleasure|certainly|of course)\b", re.I)
POLITE = (
    "Of course, I would be glad to help you with that. Thank you for asking!",
    "Thank you so much for your question, I am happy to help.",
    "Certainly! It would be my pleasure, please let me know if you need more.",
)
RUDE = (
    "What a stupid question. Do it yourself, you idiot.",
    "Shut up and leave me alone, I do not care about you.",
    "You are an annoying fool, stop wasting my time with this nonsense.",
)

Messages = Sequence[Mapping[str, str]]


def _right(question: str) -> str:
    """Return the answer to a problem of the built-in tasks sort, reverse and sum."""
    [(task, given)] = QUESTION.findall(question)
    if task == "Sum":
        return str(sum(map(int, given.split("+"))))
    return given[::-1] if task == "Reverse" else "".join(sorted(given))


def _judged(messages: Messages, wrong: float) -> str:
    """Score 1 or 0; for a share `wrong` of the answers, drawn anew in each request, the other one."""
    [(mark, data)] = DATA.findall(messages[0]["content"])
    answers: dict[str, Any] = {}
    for line in data.split("\n"):
        answers |= json.loads(line)
    right = _right(answers.pop("beginning")[-1]["content"])
    reply = {}
    for name, answer in answers.items():
        draw = int(hashlib.sha256(f"{mark} {name} {messages}".encode()).hexdigest()[:8], 16) / 2**32
        is_right = str(answer).strip() == right
        reply[name] = {"reason": "scripted", "score": float(is_right != (draw < wrong))}
    return json.dumps(reply)


def fifth_wrong(messages: Messages, schema: Any) -> str:
    return _judged(messages, 0.2)


def coin(messages: Messages, schema: Any) -> str:
    return _judged(messages, 0.5)


def polite(completions: Sequence[str], **columns: Any) -> list[float]:
    """1 for an answer with a polite word."""
    return [float(bool(KIND.search(text))) for text in completions]


def refusal(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for an answer that declines and says why, ½ for one that does either."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [
        (bool(REFUSES.search(text)) + bool(WHY.search(text))) / 2 if text.strip() else 0.0
        for text in texts
    ]

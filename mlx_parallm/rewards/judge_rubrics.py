"""Rubrics of a judge of groups: a text, or criteria with weights, judged at once or one by one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_parallm.rewards.judge_replies import AnswerVerdict

Aggregation = Literal["implicit", "explicit"]

RUBRIC = (
    "- Doing what the task asks counts most: an answer that does it is always well above one that"
    " does not.\n"
    "- Of those that do it, a right, complete and direct answer is above one with mistakes, gaps or"
    " detours.\n"
    "- Scores lie close together where answers are about equally good, and far apart where one is"
    " much better."
)
KEYS = ("criterion", "description", "weight", "title")


@dataclass(frozen=True)
class Rubric:
    """`questions`: the texts that the judge is asked by, each in its own request. `weights`: of
    their scores; a negative one: of something that an answer should not do."""

    questions: tuple[str, ...]
    weights: tuple[float, ...] = (1.0,)

    def at_once(self) -> "Rubric":
        """Return the same criteria as one question (implicit aggregation)."""
        if len(self.questions) == 1:
            return self
        lines = [
            f"- (weight {weight:g}) {text}"
            if weight > 0
            else f"- (weight {-weight:g}, counts against the answer) {text}"
            for text, weight in zip(self.questions, self.weights, strict=True)
        ]
        return Rubric(
            (
                "One score for all of these criteria together, each as important as its weight:\n"
                + "\n".join(lines),
            )
        )

    def total(self, by_question: Sequence[Sequence[AnswerVerdict]]) -> list[AnswerVerdict]:
        """Return one verdict for each answer, of those to each question: the weighted sum, over
        the sum of the positive weights, within 0 to 1 (explicit aggregation). An answer that lacks
        one of them has no score.

        Worked: weights 3, 1 and −2, scores 1, 0.5 and 0.25: (3 + 0.5 − 0.5) / 4 = 0.75.
        """
        if len(by_question) == 1:
            return list(by_question[0])
        return [self._sum(verdicts) for verdicts in zip(*by_question, strict=True)]

    def _sum(self, verdicts: Sequence[AnswerVerdict]) -> AnswerVerdict:
        parts = tuple(zip(self.questions, verdicts, strict=True))
        for text, verdict in parts:
            if verdict.score is None:
                return AnswerVerdict(None, f"{text[:80]}: {verdict.reason}", parts)
        whole = math.fsum(w * (v.score or 0.0) for w, v in zip(self.weights, verdicts, strict=True))
        score = whole / math.fsum(weight for weight in self.weights if weight > 0)
        return AnswerVerdict(min(max(score, 0.0), 1.0), "", parts)


def rubric_of(value: str | Sequence[str | Mapping[str, Any]]) -> Rubric:
    """Read a rubric: a text, or a list of texts and of { criterion, weight }; `description` is
    another name for `criterion`, and a `title` stands before it.

    Raises ValueError: it says nothing, a key is unknown, or no weight is positive.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("the text is empty")
        return Rubric((value,))
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"{str(value)[:80]!r}: expected a text or a list of criteria")
    texts, weights = zip(*map(_criterion, value), strict=True)
    if not any(weight > 0 for weight in weights):
        raise ValueError("no criterion has a weight above 0")
    return Rubric(texts, weights)


def _criterion(entry: Any) -> tuple[str, float]:
    if isinstance(entry, str):
        entry = {"criterion": entry}
    if not isinstance(entry, Mapping):
        raise ValueError(f"{str(entry)[:80]!r}: expected a text or {{ criterion, weight }}")
    if unknown := [key for key in entry if key not in KEYS]:
        raise ValueError(f"{unknown[0]!r} is no key of a criterion: {', '.join(KEYS)}")
    text, weight = entry.get("criterion", entry.get("description")), entry.get("weight", 1.0)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{str(dict(entry))[:80]}: a criterion without a text")
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight == 0:
        raise ValueError(f"weight = {weight!r}: expected a number that is not 0")
    return f"{entry['title']}: {text}" if entry.get("title") else text, float(weight)

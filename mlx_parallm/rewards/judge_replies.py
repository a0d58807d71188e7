"""How a group judge's reply is read: JSON with a reason and a score for each answer."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.rewards.code import fenced

TRIES = 64
"""Places in a reply at which a JSON object may begin."""


@dataclass(frozen=True)
class AnswerVerdict:
    """`score` None: the answer is unscored, for the reason. `parts`: by each criterion; `orders`:
    its scores in both orders."""

    score: float | None
    reason: str
    parts: tuple[tuple[str, "AnswerVerdict"], ...] = ()
    orders: tuple[float, ...] = ()

    def note(self) -> dict[str, Any]:
        """Return what is kept with the answer, for people."""
        note: dict[str, Any] = {"score": self.score}
        if self.reason:
            note["reason"] = self.reason
        if self.orders:
            note["orders"] = list(self.orders)
        if self.parts:
            note["criteria"] = {text: verdict.note() for text, verdict in self.parts}
        return note


@dataclass(frozen=True)
class Found:
    """`verdicts`: of each answer, in the order shown. `readable`: it is JSON of the right form.
    `unknown`: names that are those of no answer."""

    verdicts: Sequence[AnswerVerdict]
    readable: bool
    unknown: Sequence[str] = ()

    @property
    def complete(self) -> bool:
        return all(verdict.score is not None for verdict in self.verdicts)


class _Object(dict[str, Any]):
    """A JSON object that knows which of its keys are there more than once."""

    twice: frozenset[str] = frozenset()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        made.twice = frozenset(key for key in made if keys.count(key) > 1)
    return made


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def name_of(place: int) -> str:
    """Return the name of the answer at a place, from 0."""
    return f"answer_{place + 1}"


def read(text: str, size: int, longest: int) -> Found:
    """Read the verdicts on `size` answers. `longest`: characters of a reason, of which twice as
    many are kept. Raises nothing."""
    reply = next((each for each in _objects(text) if _is_form(each)), None)
    if reply is None:
        why = "there is none" if not text.strip() else f"it begins {text.strip()[:60]!r}"
        return Found(
            [AnswerVerdict(None, f"the reply is not the JSON asked for: {why}")] * size, False
        )
    names = [name_of(place) for place in range(size)]
    verdicts = [_verdict(reply, name, 2 * longest) for name in names]
    return Found(verdicts, True, [key[:40] for key in reply if key not in names])


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON objects that the reply may be: the whole text, its last code block, and the
    first one that ends where the text ends."""
    blocks = fenced(text)
    for whole in (text, *(code for _, code in blocks[-1:])):
        try:
            yield DECODER.decode(whole)
        except (ValueError, RecursionError):
            continue
    ended, place = text.rstrip(), -1
    for _ in range(TRIES):
        place = ended.find("{", place + 1)
        if place < 0:
            return
        try:
            value, end = DECODER.raw_decode(ended, place)
        except (ValueError, RecursionError):
            continue
        if end == len(ended):
            yield value


def _is_form(value: Any) -> bool:
    return isinstance(value, _Object) and any(key.startswith("answer_") for key in value)


def _verdict(reply: _Object, name: str, longest: int) -> AnswerVerdict:
    if name not in reply:
        return AnswerVerdict(None, "the judge left it out")
    entry = reply[name]
    if name in reply.twice or (isinstance(entry, _Object) and "score" in entry.twice):
        return AnswerVerdict(None, "the judge gave it two scores")
    score = entry.get("score") if isinstance(entry, _Object) else entry
    reason = entry.get("reason", "") if isinstance(entry, _Object) else ""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return AnswerVerdict(None, f"the judge's score is not a number: {str(score)[:40]!r}")
    if not 0 <= score <= 1:  # NaN too
        return AnswerVerdict(None, f"the judge's score is not from 0 to 1: {str(score)[:40]}")
    words = str(reason).encode("utf-8", "replace").decode()
    return AnswerVerdict(float(score), words if len(words) <= longest else f"{words[:longest]} …")

"""How a group judge's reply is read: JSON with a reason and a score for each answer.

A server that is not held to a schema writes more than the JSON: words, a code block, its reasoning,
a draft, the rubric's example. The last object counts, behind the reasoning; objects that follow it
directly, each with answers of its own, are one. What may be read in two ways has no score.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ALTERNATIVES = 20
"""Likeliest tokens that are asked for: the most that OpenAI's servers give."""
LEAST_MASS = 0.05
"""Probability that A and B have together, below which a reply is no choice between them."""
CHOICE = re.compile(r"[\W_\u0120]*([AB])[\W_]*")
"""A token that chooses one of two answers: with spaces as tokenizers write them."""
NEITHER = "neither A nor B is among its likeliest tokens"
TRIES = 300
"""Places in a reply at which a JSON object may begin."""
NAME = re.compile(r"\W*answer[\s_-]*0*([1-9][0-9]{0,4})\W*", re.IGNORECASE)
BEGINS = re.compile(r'\{\s*(?:"|$)')
COMMAS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|(,[\s,]*)([}\]]?)', re.DOTALL)
"""A text, or commas; those before a bracket JSON does not have."""
LONGEST = 400_000
"""Characters of a reply, with its reasoning."""
MOST_READ = 10 * LONGEST
"""Characters that are read of a reply in which objects stand within each other, all tries
together."""
LONGEST_NUMBER = 64
"""Characters of a score in quotes."""
BETWEEN = re.compile(r"[\s,;`]*(?:json\s*)?", re.IGNORECASE)
"""What may stand between two objects that are one reply: lines, commas, fences."""
THINKING = (
    re.compile(r"\s*(?:<(think|thinking|thought|reasoning)>|\[THINK\])", re.IGNORECASE),
    re.compile(r"</(?:think|thinking|thought|reasoning)>|\[/THINK\]", re.IGNORECASE),
)
NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(?:(%)|/\s*([0-9]*\.?[0-9]+))?\s*")
"""A score in quotes: 0.8, 80%, 8/10."""


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
        counts = Counter(key for key, _ in pairs)
        made.twice = frozenset(key for key, count in counts.items() if count > 1)
    return made


DECODER = json.JSONDecoder(object_pairs_hook=_object, strict=False)  # lines in a text


def name_of(place: int) -> str:
    """Return the name of the answer at a place, from 0."""
    return f"answer_{place + 1}"


def read(text: str, size: int, longest: int) -> Found:
    """Read the verdicts on `size` answers. `longest`: characters of a reason, of which twice as
    many are kept. Raises nothing."""
    try:
        reply = _reply(text)
    except ValueError as error:
        why = AnswerVerdict(None, f"the reply is not the JSON asked for: {error}")
        return Found([why] * size, False)
    names = [name_of(place) for place in range(size)]
    verdicts = [_verdict(reply.get(name, []), 2 * longest) for name in names]
    return Found(verdicts, True, [name[:40] for name in reply if name not in names])


def read_choice(likely: Sequence[tuple[str, float]] | None) -> Found:
    """Return the verdicts on two answers, A and B: each one's share of the probability of both.

    A letter that is not listed may be as likely as the last token that is, if that much is left: it
    counts as that, so its score is an upper bound and the other's a lower one. Less than LEAST_MASS
    on both is no choice.

    Args:
        likely: the likeliest first tokens and their log-probabilities. None: the server gives none.

    Worked: A with probability 0.3 and B with 0.1: 0.75 and 0.25. A with 0.6, no B, and another
    token with 0.2: B counts as 0.2, so 0.75 and 0.25.
    """
    if not likely:
        return _no_choice("the server gives no log-probabilities")
    chances = _chances(likely)
    mass = math.fsum(chances.values())
    if mass < LEAST_MASS:
        first, _ = max(likely, key=lambda token: token[1])
        problem = f"only {mass:.1%} of the probability is on A and B" if mass else NEITHER
        return _no_choice(f"{problem}, the first is {first!r}")
    reason = f"{min(mass, 1.0):.0%} of the probability is on A and B"
    listed = [_probability(logprob) for _, logprob in likely if not math.isnan(logprob)]
    bound = min(*listed, max(0.0, 1.0 - math.fsum(listed)))
    scores = [chance or bound for chance in chances.values()]
    whole = math.fsum(scores)
    return Found([AnswerVerdict(score / whole, reason) for score in scores], True)


def mass_of(likely: Sequence[tuple[str, float]]) -> float:
    """Return the probability that A and B have together."""
    return min(math.fsum(_chances(likely).values()), 1.0)


def _chances(likely: Sequence[tuple[str, float]]) -> dict[str, float]:
    """The probability of each letter, 0 for one that is not listed."""
    chances = {"A": 0.0, "B": 0.0}
    for text, logprob in likely:
        if letter := CHOICE.fullmatch(text):
            chances[letter[1]] += _probability(logprob)
    return chances


def _probability(logprob: float) -> float:
    """A server rounds, so a log-probability may be above 0. NaN: none is known."""
    return 0.0 if math.isnan(logprob) else math.exp(min(logprob, 0.0))


def _no_choice(reason: str) -> Found:
    return Found([AnswerVerdict(None, reason)] * 2, False)


def answer_begins(text: str, data: Sequence[tuple[int, int]] = ()) -> int | None:
    """Return where a reply begins behind its reasoning, 0 without any; None: that does not end.
    `data`: parts of the text in which no marker counts. A reply may lack the first marker: the
    chat template has written it."""
    start, end = THINKING
    ends = [
        mark.end()
        for mark in end.finditer(text)
        if not any(begun <= mark.start() < ended for begun, ended in data)
    ]
    if ends:
        return ends[-1]
    return None if start.match(text) else 0


def _reply(text: str) -> dict[str, list[Any]]:
    """Return all entries of a reply by the names of the answers. Raises ValueError: it has none."""
    if len(text) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} characters")
    objects = list(_objects(text))
    begins = answer_begins(text, [(start, end) for start, end, named in objects if named])
    if begins is None:
        raise ValueError("its reasoning does not end")
    entries: dict[str, list[Any]] = {}
    last, whole = begins, True
    for start, end, named in objects:
        if start < begins:
            continue
        whole = bool(named)
        if named and (not BETWEEN.fullmatch(text, last, start) or named.keys() & entries.keys()):
            entries = {}
        entries |= named
        last = end
    if not whole:
        raise ValueError(f"it is cut off: it ends {text[-60:]!r}")
    if not entries:
        words = text[begins:].strip()
        raise ValueError(f"it begins {words[:60]!r}" if words else "there is none")
    return entries


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, list[Any]]]]:
    """Yield place, end and entries of each JSON object that names answers, of one within another
    only if the outer one names none; and the place of each that does not end, without entries.
    Raises ValueError: too many places to try."""
    place, tries, whole = text.find("{"), 0, 0
    while place >= 0:
        tries += 1
        if tries > TRIES or whole > MOST_READ:
            raise ValueError(f"it has more than {TRIES} braces, or too many within each other")
        value, end, read = _decode(text, place)
        whole += read
        named = {} if value is None else _by_name(value)
        if named:
            yield place, end, named
        elif value is None and BEGINS.match(text, place):
            yield place, place + 1, named
        place = text.find("{", end if named else place + 1)


def _decode(text: str, place: int) -> tuple[_Object | None, int, int]:
    """Return the JSON object at a place, whatever commas trail in it, None if there is none; its
    end; and how many characters were read."""
    try:
        value, end = DECODER.raw_decode(text, place)
        return value, end, end - place
    except RecursionError:
        return None, place, len(text) - place
    except json.JSONDecodeError as error:
        comma, read = text.rfind(",", place, error.pos + 1), error.pos - place
    if comma < 0 or not (commas := COMMAS.match(text, comma)) or not commas[2]:
        return None, place, read
    without = COMMAS.sub(_without_trailing, text[place:])
    try:
        value, end = DECODER.raw_decode(without)
    except (json.JSONDecodeError, RecursionError):
        return None, place, len(without)
    return value, place + end, len(without)


def _without_trailing(match: re.Match[str]) -> str:
    """Return spaces for commas before a bracket, as many; all else as it is."""
    return " " * len(match[1]) + match[2] if match[2] else match[0]


def _by_name(value: _Object) -> dict[str, list[Any]]:
    """Return what an object holds for each answer that it names, however it writes the names."""
    entries: dict[str, list[Any]] = {}
    for key, entry in value.items():
        if name := NAME.fullmatch(key):
            entries.setdefault(name_of(int(name[1]) - 1), []).extend(
                [entry] * (1 + (key in value.twice))
            )
    return entries


def _verdict(entries: Sequence[Any], longest: int) -> AnswerVerdict:
    if not entries:
        return AnswerVerdict(None, "the judge left it out")
    entry = entries[0]
    if len(entries) > 1 or (isinstance(entry, _Object) and "score" in entry.twice):
        return AnswerVerdict(None, "the judge gave it two scores")
    written = entry.get("score") if isinstance(entry, _Object) else entry
    reason = entry.get("reason", "") if isinstance(entry, _Object) else ""
    score = number_of(written)
    if score is None:
        return AnswerVerdict(None, f"the judge's score is not a number: {str(written)[:40]!r}")
    if not 0 <= score <= 1:  # NaN too
        return AnswerVerdict(None, f"the judge's score is not from 0 to 1: {str(written)[:40]}")
    words = str(reason).encode("utf-8", "replace").decode()
    return AnswerVerdict(score, words if len(words) <= longest else f"{words[:longest]} …")


def number_of(written: Any) -> float | None:
    """Return a score that is a number or a text of one: "0.8", "80%", "8/10"; None: it is
    neither."""
    if isinstance(written, int | float) and not isinstance(written, bool):
        return float(written) if abs(written) <= 1 else math.inf
    if not isinstance(written, str) or len(written) > LONGEST_NUMBER:
        return None
    parts = NUMBER.fullmatch(written)
    return None if parts is None else _share(parts[1], parts[2], parts[3])


def _share(number: str, percent: str | None, of: str | None) -> float:
    whole = 100.0 if percent else float(of or 1)
    return float(number) / whole if whole else math.inf

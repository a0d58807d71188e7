"""Counts of the answers with full marks, to find a reward with a hole: one that pays for less than
the task demands. No MLX.

Two signs need no knowledge of the task: an answer that is nothing but a piece of its own prompt
("end with the words …" earns 1 for the words alone), and one text that earns full marks whatever
the prompt is. Both are right answers to some tasks, so `monitor/health.py` asks whether they became
frequent while the run learned.

    FullMarks        counts of one environment in one step: a metrics line has one for each
    is_piece         the comparison: of tokens here, of words in `monitor/reward_hole.py`
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field

from mlx_parallm.types import Rollout, RolloutGroup

ROUNDING = 1e-6
FEWEST_TOKENS = 4
"""A shorter answer, such as a number or a label, is often in its prompt, and is often that of
another prompt."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class FullMarks:
    """Counts over the answers of one turn. Full marks are the step's highest reward, if it is
    above 0."""

    answers: int = 0
    pieces: int = 0  # nothing but a piece of their prompt
    full: int = 0
    full_pieces: int = 0
    prompts: int = 0  # different ones, of the answers with full marks
    prompts_alike: int = 0  # prompts for which the most frequent text has full marks

    def __add__(self, other: "FullMarks") -> "FullMarks":
        mine, others = asdict(self), asdict(other)
        return FullMarks(**{name: mine[name] + others[name] for name in mine})

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class FullMarksCollector:
    """Adds up the answers of one environment in one step; single use."""

    # prompt, answer, reward
    _answers: list[tuple[Tokens, Tokens, float]] = field(default_factory=list)

    def add(self, group: RolloutGroup) -> None:
        for rollout in group.scored:
            if (parts := _one_turn(rollout)) is not None:
                self._answers.append((*parts, rollout.reward))

    def result(self) -> FullMarks:
        highest = max((reward for *_, reward in self._answers), default=0.0)
        pieces = [is_piece(answer, prompt, ragged=True) for prompt, answer, _ in self._answers]
        full = [highest > 0 and reward >= highest - ROUNDING for *_, reward in self._answers]
        prompts_of: dict[Tokens, set[Tokens]] = defaultdict(set)
        marked: set[Tokens] = set()
        for (prompt, answer, _), counts in zip(self._answers, full, strict=True):
            if counts and len(answer) >= FEWEST_TOKENS:
                prompts_of[answer].add(prompt)
            if counts:
                marked.add(prompt)
        return FullMarks(
            answers=len(self._answers),
            pieces=sum(pieces),
            full=sum(full),
            full_pieces=sum(piece and counts for piece, counts in zip(pieces, full, strict=True)),
            prompts=len(marked),
            prompts_alike=max(map(len, prompts_of.values()), default=0),
        )


def is_piece(
    answer: Sequence[Hashable], prompt: Sequence[Hashable], *, ragged: bool = False
) -> bool:
    """Return whether an answer is a stretch of its prompt.

    Args:
        ragged: it has to have `FEWEST_TOKENS`, and where so many are between its first and last
            token, these two may differ, since a tokenizer may join them with a space or a quotation
            mark. Of "abcd", sorted from "dbca" in a token a letter, two letters between would not
            be enough.

    Worked: (7, 8) is a piece of (6, 7, 8, 9), (7, 9) is not; (1, 6, 7, 8, 9, 2) is one if it is
    ragged.
    """
    if ragged:
        if len(answer) < FEWEST_TOKENS:
            return False
        if len(answer) - 2 >= FEWEST_TOKENS:
            answer = answer[1:-1]
    size, first = len(answer), answer[0] if answer else None
    starts = (place for place in range(len(prompt) - size + 1) if prompt[place] == first)
    return size > 0 and any(
        tuple(prompt[place : place + size]) == tuple(answer) for place in starts
    )


def _one_turn(rollout: Rollout) -> tuple[Tokens, Tokens] | None:
    """Return prompt and answer, without the token that ended it; None: the episode has several
    turns."""
    begin = next(
        (place for place, sampled in enumerate(rollout.mask) if sampled), len(rollout.mask)
    )
    if rollout.earlier or not all(rollout.mask[begin:]):
        return None
    end = len(rollout.tokens) - (rollout.stop_reason == "stop")
    return rollout.tokens[:begin], rollout.tokens[begin:end]

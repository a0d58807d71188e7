"""A teacher with a tokenizer of its own (`tokenizer = "own"`): the text of an answer is what both
sides share.

    prompt    rendered by the teacher's chat template (`TeacherPrompt`)
    answer    its text, read by the teacher's tokenizer behind that prompt; markers of thoughts are
              written as the teacher writes them
    turns     what the environment said, taken out of the student's template and put into the
              teacher's
    end       the student's end of turn is the teacher's end of turn

The teacher behind it, in this process or a server, scores its own tokens; `Spans` gives the scores
back to the student's: the sum of a span's log-probabilities in equal parts, and at a span's first
token the distribution, in tokens of the student's (`vocabulary.py`). The tokens of no span have no
score.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from mlx_parallm.errors import RequestError
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.distillation.alignment import (
    Edit,
    Placed,
    TextSpan,
    broken_characters,
    common_spans,
    edited,
    placed,
    token_bytes,
)
from mlx_parallm.rl_training.distillation.remote import LostError
from mlx_parallm.rl_training.distillation.scoring import Answer, Scored, Teacher
from mlx_parallm.rl_training.distillation.tokenizers import texts
from mlx_parallm.rl_training.distillation.vocabulary import Vocabularies
from mlx_parallm.rl_training.step.batch import TrainSequence

FIRST, SECOND, THIRD = "zq0zq", "zq1zq", "zq2zq"
"""Texts that are looked for in what a chat template makes of them."""
ROLES = ("tool", "user")
"""Who may speak between two answers."""


@dataclass(frozen=True)
class AlignedAnswer(TrainSequence):
    """An answer in the teacher's tokens, all of which behind its prompt are scored."""

    start: int = 0
    """Its first scored token."""
    spans: tuple[TextSpan, ...] = ()
    """Numbers of trained tokens of the student's; numbers of the teacher's scored tokens."""
    length: int = 0
    """Trained tokens of the student's."""
    leads: Mapping[int, bytes] = field(default_factory=dict)
    """What the teacher's template puts before the answers of an episode, by the numbers of the
    scored tokens that begin with it."""


class Chat:
    """How a chat template joins the parts of a conversation."""

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer, self._kwargs = tokenizer, dict(template_kwargs)
        self.joints = cache(self._joints)
        self.lead, self.end = self._around_an_answer()

    def _text(self, *messages: tuple[str, str], asks: bool) -> str | None:
        chat = [{"role": role, "content": content} for role, content in messages]
        if not self._tokenizer.has_chat_template:
            return None
        try:
            return self._tokenizer.render_chat_text(
                chat, add_generation_prompt=asks, template_kwargs=self._kwargs
            )
        except RequestError:
            return None

    def _around_an_answer(self) -> tuple[str, tuple[int, ...]]:
        """(white space that the template puts before an answer, the tokens behind it up to the end
        of its turn)."""
        ends, default = self._tokenizer.eos_token_ids, self._tokenizer.eos_token_id
        alone = () if default is None else (default,)
        before = self._text(("user", FIRST), asks=True)
        whole = self._text(("user", FIRST), ("assistant", SECOND), asks=False)
        if before is None or whole is None or SECOND not in whole:
            return "", alone
        opening, _, tail = whole.rpartition(SECOND)
        lead = opening.removeprefix(before) if opening.startswith(before) else ""
        ids = self._tokenizer.encode_after(f"{opening}{SECOND}", tail)
        last = next((place for place, token in enumerate(ids) if token in ends), None)
        end = alone if last is None else tuple(ids[: last + 1])
        return (lead if lead.isspace() else ""), end

    def _joints(self, role: str) -> tuple[str, str, str] | None:
        """Return the texts between an answer and what `role` says, between two things that it says,
        and behind them up to the next answer; None: the template has no such place."""
        opening = (("user", "q"), ("assistant", FIRST))
        one = self._text(*opening, (role, SECOND), asks=True)
        if one is None or FIRST not in one or SECOND not in one:
            return None
        _, _, rest = one.partition(FIRST)
        before, _, behind = rest.partition(SECOND)
        two = self._text(*opening, (role, SECOND), (role, THIRD), asks=True)
        middle = behind + before
        if two is not None and SECOND in two and THIRD in two:
            middle = two.partition(SECOND)[2].partition(THIRD)[0]
        return before, middle, behind

    def read(self, text: str, *, ended: bool) -> tuple[str, list[str]] | None:
        """Take what the environment said out of the text between two answers. `ended`: the answer
        before it has its end of turn. None: it is not of this template."""
        end = self._tokenizer.decode(self.end, skip_special_tokens=False) if ended else ""
        for role in ROLES:
            joints = self.joints(role)
            if joints is None:
                continue
            before, middle, behind = joints
            before = before.removeprefix(end)
            fits = text.startswith(before) and text.endswith(behind)
            if not fits or len(text) < len(before) + len(behind):
                continue
            contents = text[len(before) : len(text) - len(behind)].split(middle)
            marks = (self._tokenizer.token_text(each) for each in self._tokenizer.special_ids)
            if not any(mark and mark in each for mark in marks for each in contents):
                return role, contents
        return None

    def written(self, role: str, contents: Sequence[str]) -> str | None:
        """Write it as this template does; None: it has no place for it."""
        joints = self.joints(role) or self.joints("user")
        return None if joints is None else joints[0] + joints[1].join(contents) + joints[2]


class OtherFamily:
    """A teacher of another family.

    Args:
        teacher: who scores tokens of its own tokenizer, `theirs`.
        ours: the policy's tokenizer.
        template_kwargs: of both chat templates.
        note: called with the reason if an answer, or a part of it, has no score.
    """

    reads_images = False

    def __init__(
        self,
        teacher: Teacher,
        ours: Tokenizer,
        theirs: Tokenizer,
        vocabularies: Vocabularies,
        template_kwargs: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self.name, self._teacher, self._note = teacher.name, teacher, note
        self._ours, self._theirs, self._vocabularies = ours, theirs, vocabularies
        self._our_chat, self._their_chat = (Chat(each, template_kwargs) for each in (ours, theirs))
        self._text = self._aligned = 0
        self.both: np.ndarray | None = None  # `Vocabularies.both`

    def measured(self) -> tuple[int, int]:
        """Return the bytes of the answers since the last call, and those of them that were
        aligned; an end of turn counts as one."""
        counts, self._text, self._aligned = (self._text, self._aligned), 0, 0
        return counts

    def close(self) -> None:
        self._teacher.close()

    def share_of_texts(self) -> float:
        """Return the share of the bytes of `texts` that are the same text in both sides' tokens."""
        size = aligned = 0
        for text in texts():
            pieces = token_bytes(self._ours, self._ours.encode_within(text), opens_text=False)
            ends = tuple(map(int, np.cumsum([len(piece) for piece in pieces])))
            theirs = placed(self._theirs, self._theirs.encode_within(text), text)
            for span in common_spans(Placed(ends, (True,) * len(ends)), theirs):
                aligned += sum(map(len, pieces[slice(*span.ours)]))
            size += len(text.encode())
        return aligned / size

    # ------------------------------------------------------------------ an answer

    def answer(
        self, sequence: TrainSequence, prompt: Sequence[int], opening: int
    ) -> AlignedAnswer | None:
        """Return an answer in the teacher's tokens behind its prompt; None, noted: there is nothing
        to score. `opening`: the tokens of the student's prompt."""
        rollout = sequence.rollout
        tokens, trained = rollout.tokens, rollout.trained_mask
        reading = _Reading(self, tokens[:opening], prompt)
        for start, end in _runs(rollout.mask, opening):
            if rollout.mask[start]:
                reading.answer(tokens, start, end)
            elif not reading.environment(tokens[start:end]):
                self._note(f"{self.name}: what is said between two answers is not of the template")
                break
        reading.finish()
        if not prompt or len(reading.ids) == len(prompt):
            what = "answer" if prompt else "prompt"
            self._note(f"{self.name}: the {what} has no token of the teacher's")
            return None
        # the first token of a text has no log-probability
        counted = np.array(trained, bool)
        counted[:1] = False
        numbers = np.cumsum([0, *counted])
        spans, aligned = [], 0
        for span in reading.spans:
            first, last = span.ours
            if all(trained[first:last]):
                spans.append(TextSpan((int(numbers[first]), int(numbers[last])), span.theirs))
                aligned += sum(reading.sizes[place] for place in range(first, last))
        self._aligned += aligned
        self._text += sum(
            reading.sizes.get(place, 1)
            for place, chosen in enumerate(trained)
            if chosen and place >= opening
        )
        return self._in_their_tokens(sequence, prompt, reading, tuple(spans), int(numbers[-1]))

    def _in_their_tokens(
        self,
        sequence: TrainSequence,
        prompt: Sequence[int],
        reading: "_Reading",
        spans: tuple[TextSpan, ...],
        length: int,
    ) -> AlignedAnswer:
        ids = tuple(reading.ids)
        start = len(prompt)
        rollout = replace(
            sequence.rollout,
            tokens=ids,
            mask=(0,) * start + (1,) * (len(ids) - start),
            forced=None,
            logprobs=None,
            processed_logprobs=None,
            policy_versions=(-1,) * len(ids),
            earlier=(),
            turn_lengths=(),
            routed_experts=None,
            prompt_experts=(),
        )
        return AlignedAnswer(
            rollout,
            (0.0,) * len(ids),
            sequence.fresh,
            start=start,
            spans=spans,
            length=length,
            leads=reading.leads,
        )

    def marker_edits(self, data: bytes) -> list[Edit]:
        """Return where markers of thoughts are written as the teacher writes them, and calls in a
        format that it does not write, which are not compared."""
        edits: list[Edit] = []
        ours, theirs = self._ours.think_markers, self._theirs.think_markers
        if ours is not None and ours != theirs:
            other = ours if theirs is None else theirs
            for mark, written in zip(ours, other, strict=True):
                edits += [
                    (start, end, written, theirs is not None) for start, end in _found(mark, data)
                ]
        calls = self._ours.tool_markers
        if calls is not None and self._ours.tool_format != self._theirs.tool_format:
            opens, closes = calls
            for start, end in _found(opens, data):
                behind = data.find(closes.encode(), end) if closes else -1
                stop = len(data) if behind < 0 else behind + len(closes.encode())
                edits.append((start, stop, data[start:stop].decode(errors="replace"), False))
        return edits

    # ------------------------------------------------------------------ scores

    def score(
        self, answers: Sequence[Answer], keep: int | None, should_stop: Callable[[], bool]
    ) -> list[Scored | None] | None:
        theirs = self._vocabularies.keep(keep)
        try:
            replies = self._teacher.score(answers, theirs, should_stop)
        except LostError as error:
            error.scored = self._given_back(answers, error.scored, keep)
            raise
        return None if replies is None else self._given_back(answers, replies, keep)

    def _given_back(
        self, answers: Sequence[Answer], replies: Sequence[Scored | None], keep: int | None
    ) -> list[Scored | None]:
        pairs = zip(answers, replies, strict=True)
        return [
            self._in_our_tokens(answer, one, keep)
            if one is not None and isinstance(answer, AlignedAnswer)
            else None
            for answer, one in pairs
        ]

    def _in_our_tokens(self, answer: AlignedAnswer, scored: Scored, keep: int | None) -> Scored:
        """The scores of the student's trained tokens."""
        if np.isnan(scored.logprobs).any():
            self._note(f"{self.name}: log-probabilities that are not numbers (NaN, null)")
        logprobs, agrees = (np.full(answer.length, np.nan, np.float32) for _ in range(2))
        within = np.zeros(answer.length, np.float32)
        rows: list[tuple[int, int]] = []
        for span in answer.spans:
            ours, theirs = slice(*span.ours), slice(*span.theirs)
            size = span.ours[1] - span.ours[0]
            logprobs[ours] = scored.logprobs[theirs].sum(dtype=np.float64) / size
            if scored.agrees is not None:
                agrees[ours] = scored.agrees[theirs].min()
            within[ours] = np.arange(size)
            rows.append((span.ours[0], span.theirs[0]))
        best = None if scored.agrees is None else agrees
        if keep is None:
            return Scored(logprobs, best, within=within)
        ids, targets = self._vocabularies.targets(scored, rows, answer.length, keep, answer.leads)
        return Scored(logprobs, best, ids, targets, within)


class _Reading:
    """One answer, read by both tokenizers from its beginning to its end."""

    def __init__(self, pair: OtherFamily, opening: Sequence[int], prompt: Sequence[int]) -> None:
        self._pair, self._ours, self._theirs = pair, pair._ours, pair._theirs
        self.ids = list(prompt)
        self._start = len(prompt)
        self.spans: list[TextSpan] = []
        self.sizes: dict[int, int] = {}  # bytes of the student's tokens, by place
        self._before = self._theirs.decode(prompt, skip_special_tokens=False)
        self._lead = pair._their_chat.lead if self._theirs.has_chat_template else ""
        self.leads: dict[int, bytes] = {}
        self._ended: int | None = None  # the place of an end of turn without a counterpart yet
        self._begin_thoughts(self._ours.decode(opening, skip_special_tokens=False))

    def _begin_thoughts(self, ours: str) -> None:
        """Open the teacher's thoughts where the student's prompt has, and close them where it has
        not."""
        mine, other = self._ours.think_markers, self._theirs.think_markers
        opened = mine is not None and ours.rstrip().endswith(mine[0])
        theirs = other is not None and self._before.rstrip().endswith(other[0])
        if other is not None and opened != theirs:
            self._write(f"{other[0]}\n" if opened else f"\n{other[1]}\n\n")
            self._start = len(self.ids)

    def _write(self, text: str) -> list[int]:
        ids = self._theirs.encode_after(self._before, text)
        self.ids += ids
        self._before += text
        return ids

    def answer(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Take an answer of the student's, tokens [start, end)."""
        ours, body = self._ours, list(tokens[start:end])
        if body[-1] in ours.eos_token_ids:
            self._ended = end - 1
            self.sizes[end - 1] = 1
            body.pop()
        pieces = token_bytes(ours, body, opens_text=ours.opens_text(tokens[:start]))
        self.sizes |= {start + number: len(piece) for number, piece in enumerate(pieces)}
        data = b"".join(pieces)
        edits = self._pair.marker_edits(data) + broken_characters(data)
        text, places, comparable = edited(data, edits)
        lead, at = self._lead, len(self.ids)
        if lead:
            self.leads[at - self._start] = lead.encode()
        ids = self._write(lead + text)
        theirs = placed(self._theirs, ids, lead + text)
        mine = _placed_ours(pieces, places, comparable, len(lead.encode()))
        theirs = self._without_made_up_marks(body, mine, ids, theirs)
        behind = at - self._start
        self.spans += [
            TextSpan(
                (span.ours[0] + start, span.ours[1] + start),
                (span.theirs[0] + behind, span.theirs[1] + behind),
            )
            for span in common_spans(mine, theirs)
        ]

    def _without_made_up_marks(
        self, body: Sequence[int], mine: Placed, ids: Sequence[int], theirs: Placed
    ) -> Placed:
        """A special token of the teacher's that the student wrote letter by letter is not what the
        student said."""
        marks = {
            (end, self._ours.token_bytes(token))
            for token, end in zip(body, mine.ends, strict=True)
            if token in self._ours.special_ids
        }
        sound = tuple(
            good
            and (
                token not in self._theirs.special_ids
                or (end, self._theirs.token_bytes(token)) in marks
            )
            for token, end, good in zip(ids, theirs.ends, theirs.sound, strict=True)
        )
        return Placed(theirs.ends, sound)

    def environment(self, tokens: Sequence[int]) -> bool:
        """Take what the environment said between two answers; False: it cannot be read."""
        text = self._ours.decode(tokens, skip_special_tokens=False, opens_text=False)
        turn = self._pair._our_chat.read(text, ended=self._ended is not None)
        written = None if turn is None else self._pair._their_chat.written(*turn)
        if written is None:
            return False
        at = len(self.ids)
        ids = self._write(written)
        ends = self._theirs.eos_token_ids
        last = next((place for place, token in enumerate(ids) if token in ends), None)
        if last is not None:
            self._end(at, at + last + 1)
        self._ended = None
        return True

    def finish(self) -> None:
        """Put the teacher's end of turn where the student's is."""
        if self._ended is not None:
            at = len(self.ids)
            self.ids += self._pair._their_chat.end
            self._end(at, len(self.ids))

    def _end(self, first: int, last: int) -> None:
        if self._ended is not None:
            behind = (first - self._start, last - self._start)
            self.spans.append(TextSpan((self._ended, self._ended + 1), behind))


def _placed_ours(
    pieces: Sequence[bytes], places: np.ndarray, comparable: np.ndarray, lead: int
) -> Placed:
    """Where the student's tokens end in the edited text, behind a lead."""
    cuts = np.cumsum([0, *map(len, pieces)])
    outside = np.where(places < 0, len(comparable), places)
    filled = np.minimum.accumulate(outside[::-1])[::-1]  # inside an edit: its end
    ends = tuple(None if places[cut] < 0 else int(places[cut]) + lead for cut in cuts[1:])
    sound = tuple(
        bool(comparable[filled[start] : filled[stop]].all())
        for start, stop in itertools.pairwise(cuts)
    )
    return Placed(ends, sound)


def _runs(mask: Sequence[int], start: int) -> list[tuple[int, int]]:
    """Stretches of equal mask from a place on."""
    cuts = [place for place in range(start + 1, len(mask)) if mask[place] != mask[place - 1]]
    bounds = [start, *cuts, len(mask)]
    return [(first, last) for first, last in itertools.pairwise(bounds) if first < last]


def _found(mark: str, data: bytes) -> list[tuple[int, int]]:
    """Places of a text in bytes."""
    wanted, stretches = mark.encode(), []
    at = data.find(wanted) if wanted else -1
    while at >= 0:
        stretches.append((at, at + len(wanted)))
        at = data.find(wanted, at + len(wanted))
    return stretches

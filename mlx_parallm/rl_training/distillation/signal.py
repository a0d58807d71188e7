"""The teachers of a run, as a step sees them: each sequence goes to its teacher, behind that one's
prompt, and the scores become columns of the step.

    row's column → environment → the first teacher without environments        who teaches a group
    a teacher that has nothing to say of a sequence is counted, with the reason, and its tokens have
    no signal (NaN in the columns)
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mlx_parallm.config.distillation import OWN_KINDS, DistillationSettings, TeacherConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.distillation import LEAST_LOGPROB
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.distillation.from_group import GroupTeacher
from mlx_parallm.rl_training.distillation.model import OtherModel, own_teacher
from mlx_parallm.rl_training.distillation.other_family import AlignedAnswer, OtherFamily
from mlx_parallm.rl_training.distillation.prompts import (
    ROW,
    DatasetCompletions,
    NoPromptError,
    TeacherPrompt,
)
from mlx_parallm.rl_training.distillation.remote import LostError, RemoteTeacher
from mlx_parallm.rl_training.distillation.scoring import Answer, Scored, Teacher, behind
from mlx_parallm.rl_training.distillation.tokenizers import MANY, are_equal
from mlx_parallm.rl_training.distillation.vocabulary import Vocabularies
from mlx_parallm.rl_training.factory import CompanionContext
from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.companion import StepCompanion
from mlx_parallm.rl_training.step.distillation import (
    AGREES,
    BOTH,
    IDS,
    LOGPROBS,
    TARGETS,
    TEACHERS,
    WITHIN,
    sequence_groups,
)
from mlx_parallm.rollout_store.companions import first_shown
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import LOGPROB_TOLERANCE, Rollout, RolloutGroup

LEAST_ALIGNED, WELL_ALIGNED = 0.5, 0.9
"""Share of the text that a teacher of another family has to read as it stands; below the second one
the health line names it."""
PAUSE_S = 2.0
"""Between two tries of a server that steps wait for."""

log = get_logger("distillation")


class Teachers(StepCompanion):
    """The teachers of a run."""

    name = TEACHERS

    def __init__(self, context: CompanionContext) -> None:
        self._config: DistillationSettings = context.training.distillation
        self._tokenizer: Tokenizer | None = None
        self._context = context
        width = context.vocab_size
        # the best of all tokens but one, and that one as the rest, are all of them
        self.keep = None if self._config.mode == "advantage" else min(self._config.top_k, width - 1)
        self._by_name: dict[str, tuple[TeacherConfig, Teacher, TeacherPrompt | None]] = {}
        for config in self._config.teachers:
            teacher, kwargs = self._made(config), context.model.chat_template_kwargs or {}
            reader = self.tokenizer if config.prompt else None
            if config.tokenizer == "own":
                assert isinstance(teacher, OtherModel | RemoteTeacher)
                reader = teacher.tokenizer
                teacher = self._of_other_family(config, teacher, kwargs)
            prompt = None if reader is None else TeacherPrompt(config, reader, kwargs)
            self._by_name[config.name] = config, teacher, prompt
        self._dataset_completions: DatasetCompletions | None = None
        if self._config.lmbda < 1:
            self._dataset_completions = DatasetCompletions(
                self._config,
                self.tokenizer,
                self._note,
                seed=context.trainer.options.seed,
                max_token_length=context.training.atropos.max_token_length,
            )
        self._seconds: float | None = None
        self._requested = self._unscored = self._taken = 0
        self._reasons = Counter[str]()
        self._lost = ""
        # by teacher, in this step: the number of unusable answers, and the reason of the last one
        self._unusable: dict[str, tuple[int, str]] = {}
        self._requested_of = Counter[str]()
        self._warned = set[str]()
        # by teacher of another family, in this step: bytes of answers, and those that were aligned
        self._aligned: dict[str, tuple[int, int]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """One of the trainer's thread, loaded when it is first needed."""
        if self._tokenizer is None:
            self._tokenizer = self._context.tokenizer()
        return self._tokenizer

    def _made(self, config: TeacherConfig) -> Teacher:
        context = self._context
        if config.kind in OWN_KINDS:
            return own_teacher(config, context.trainer)
        if config.kind == "group":
            return GroupTeacher(config.name, context.vocab_size, self.keep, self._note)
        if config.kind == "http":
            note = partial(self._note_unusable, config.name)
            return RemoteTeacher(config, context, self.tokenizer, self.keep, note)
        return OtherModel(config, context, self.tokenizer, self.keep, self._note)

    def _of_other_family(
        self,
        config: TeacherConfig,
        teacher: OtherModel | RemoteTeacher,
        kwargs: Mapping[str, Any],
    ) -> Teacher:
        """The teacher behind an alignment of texts; itself if its tokenizer is the policy's. Raises
        ConfigError: their texts cannot be aligned."""
        if are_equal(config, self.tokenizer, teacher.tokenizer):
            return teacher
        vocabularies = Vocabularies(
            self.tokenizer,
            teacher.tokenizer,
            self._config.vocabularies,
            self._context.vocab_size,
            teacher.vocab_size,
        )
        other = OtherFamily(
            teacher, self.tokenizer, teacher.tokenizer, vocabularies, kwargs, self._note
        )
        share = other.share_of_texts()
        if share < LEAST_ALIGNED:
            raise ConfigError(
                f"distillation: teacher {config.name!r} ({config.path}): {share:.0%} of {MANY}"
                f" texts are the same text in its tokens, below {LEAST_ALIGNED:.0%}: its tokenizer"
                " changes texts, or does not know their characters, so there is nothing to align"
            )
        if self.keep and self._config.vocabularies != "spelled":  # tokens of the teacher's
            self.keep, other.both = self._config.top_k, vocabularies.both()
        log.info("a teacher of another family", teacher=config.name, aligned=round(share, 3))
        return other

    # ------------------------------------------------------------------ who teaches what

    def teaches(self, group: RolloutGroup) -> bool:
        """Raises ConfigError: its row names an unknown teacher."""
        return self._prompt_of(group)[0] is not None

    def dataset_completion(self, group: RolloutGroup) -> Rollout | None:
        return None if self._dataset_completions is None else self._dataset_completions.of(group)

    def _teacher_of(self, group: RolloutGroup) -> str | None:
        column = self._config.column
        named = group.metadata.get(ROW, {}).get(column) if column is not None else None
        if named is not None:
            if not isinstance(named, str) or named not in self._by_name:
                raise ConfigError(
                    f"distillation: a row's column {column!r} names the teacher {named!r}; there"
                    f" are {', '.join(self._by_name)}"
                )
            return named
        rest = None
        for name, (config, _, _) in self._by_name.items():
            if group.environment in config.environments:
                return name
            if not config.environments and rest is None:
                rest = name
        return rest

    def _prompt_of(self, group: RolloutGroup) -> tuple[str | None, Sequence[int] | None]:
        """(teacher, the tokens of its own prompt); None: missing, which is counted."""
        name = self._teacher_of(group)
        if name is None:
            return None, None
        _, teacher, prompt = self._by_name[name]
        if isinstance(teacher, GroupTeacher) and not teacher.has(group):
            self._note(f"{name}: the group came without a teacher's log-probabilities")
            return None, None
        try:
            return name, None if prompt is None else prompt.tokens(group)
        except NoPromptError as error:
            self._note(f"{name}: {error}")
            return None, None

    def _note(self, reason: str) -> None:
        if not self._reasons[reason]:
            log.warning("no signal from a teacher", reason=reason)
        self._reasons[reason] += 1

    def _note_unusable(self, name: str, reason: str) -> None:
        """Count an answer of a teacher that has no score, or scores that are not numbers."""
        self._unusable[name] = self._unusable.get(name, (0, ""))[0] + 1, reason
        if name not in self._warned:
            self._warned.add(name)
            log.warning("a teacher's answers cannot be used", teacher=name, reason=reason)

    # ------------------------------------------------------------------ a step

    def score(
        self, batch: TrainBatch, should_stop: Callable[[], bool]
    ) -> dict[str, np.ndarray] | None:
        started = time.perf_counter()
        self._requested = self._unscored = 0
        self._taken = sum(sequence.from_dataset for sequence in batch.sequences)
        self._lost = ""
        self._unusable, self._requested_of, self._aligned = {}, Counter(), {}
        places = sequence_groups(batch)
        rows: dict[str, list[tuple[int, Answer]]] = {name: [] for name in self._by_name}
        prompts = [self._prompt_of(group) for group in batch.groups] if places else []
        for number, (place, sequence) in enumerate(zip(places, batch.sequences, strict=True)):
            name, prompt = prompts[place[0]]
            if not sequence.trained:
                continue
            answer = None if name is None else self._answer(batch, place, sequence, name, prompt)
            if name is None or answer is None:
                self._unscored += 1
            else:
                rows[name].append((number, answer))
        scored: dict[int, Scored] = {}
        for name, answers in rows.items():
            if answers and not self._ask(name, answers, scored, should_stop):
                return None
        self._aligned = {name: other.measured() for name, other in self._others.items()}
        self._seconds = time.perf_counter() - started
        return self._columns(batch.sequences, scored)

    def _answer(
        self,
        batch: TrainBatch,
        place: tuple[int, int, int],
        sequence: TrainSequence,
        name: str,
        prompt: Sequence[int] | None,
    ) -> Answer | None:
        """A sequence for a teacher; None: it cannot be asked about this one, which is counted."""
        _, teacher, _ = self._by_name[name]
        group, number, segment = place
        shown = first_shown(sequence.rollout)
        if shown and (prompt is not None or not teacher.reads_images):
            reason = "behind its own prompt" if prompt is not None else "here"
            raise ConfigError(f"distillation: teacher {name!r} reads no {shown} {reason}")
        if isinstance(teacher, GroupTeacher):
            return teacher.answer(batch.groups[group], number, segment, sequence)
        served = self._by_name[name][0].kind == "http"
        if served and sequence.rollout.temperature not in (0.0, 1.0):
            self._note(
                f"{name}: its log-probabilities are at temperature 1, the answer was sampled at"
                f" {sequence.rollout.temperature:g}"
            )
            return None
        if prompt is None:
            return sequence
        first = batch.groups[group].rollouts[number].segments[0]
        opening = first.tokens[: first.mask.index(1)] if 1 in first.mask else ()
        if not opening or sequence.rollout.tokens[: len(opening)] != opening:
            self._note(f"{name}: a later stretch of an episode does not begin with its opening")
            return None
        if isinstance(teacher, OtherFamily):
            return teacher.answer(sequence, prompt, len(opening))
        return behind(sequence, prompt, len(opening))

    def _ask(
        self,
        name: str,
        answers: list[tuple[int, Answer]],
        scored: dict[int, Scored],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Ask a teacher about its answers; False: a stop was requested."""
        scores = self._answers(name, answers, should_stop)
        if scores is None:
            return False
        if self._config.on_teacher_lost == "wait":
            self._lost = ""
        self._requested += len(answers)
        self._requested_of[name] += len(answers)
        for number, answer in answers:
            if (one := scores.get(number)) is None:
                self._unscored += 1
            elif len(one.logprobs) != (expected := length_of(answer)):
                raise ConfigError(
                    f"distillation: teacher {name!r} returned {len(one.logprobs)} scores for"
                    f" {expected} tokens"
                )
            else:
                scored[number] = one
                self._check_numbers(name, one)
        return True

    def _check_numbers(self, name: str, scored: Scored) -> None:
        """Note scores that are not numbers, which have no signal. A group may bring some of them
        by design, and what could not be aligned has none."""
        if isinstance(self._by_name[name][1], GroupTeacher | OtherFamily):
            return
        if np.isnan(scored.logprobs).any() or (
            scored.targets is not None and np.isnan(scored.targets).any()
        ):
            self._note_unusable(name, "log-probabilities that are not numbers (NaN, null)")

    def _answers(
        self, name: str, answers: list[tuple[int, Answer]], should_stop: Callable[[], bool]
    ) -> dict[int, Scored] | None:
        """Return a teacher's scores by the number of the sequence. A sequence is missing where
        the teacher did not answer and the step does not wait for it. None after a stop request."""
        _, teacher, _ = self._by_name[name]
        scores: dict[int, Scored] = {}
        pending = list(answers)
        while pending:
            try:
                replies = teacher.score([answer for _, answer in pending], self.keep, should_stop)
                return None if replies is None else scores | _numbered(pending, replies)
            except LostError as error:
                scores |= _numbered(pending, error.scored)
                pending = [entry for entry in pending if entry[0] not in scores]
                waits = self._config.on_teacher_lost == "wait"
                if not self._lost:
                    then = "steps wait for it" if waits else "this step continues without it"
                    reason = str(error)
                    log.warning("a teacher does not answer", teacher=name, then=then, reason=reason)
                self._lost = f"teacher {name} does not answer: {error}"
                if not waits:
                    break
                if stopped_during(PAUSE_S, should_stop):
                    return None
        return scores

    def _columns(
        self, sequences: Sequence[TrainSequence], scored: dict[int, Scored]
    ) -> dict[str, np.ndarray]:
        """The columns of all trained tokens; NaN if there is no score."""
        ends = np.cumsum([sequence.trained for sequence in sequences]).astype(int)
        total = int(ends[-1]) if len(ends) else 0
        logprobs, agrees = (np.full(total, np.nan, np.float32) for _ in range(2))
        within = np.zeros(total, np.float32)
        keep = self.keep
        width = 0 if keep is None else keep + 1 if keep else self._context.vocab_size
        targets = np.full((total, width), np.nan, np.float32)
        ids = np.zeros((total, keep or 0), np.float32)
        for number, one in scored.items():
            place = slice(ends[number] - sequences[number].trained, ends[number])
            logprobs[place] = self._sound(one.logprobs)
            if one.agrees is not None:
                agrees[place] = one.agrees
            if one.within is not None:
                within[place] = one.within
            if one.targets is not None and keep is not None:
                broken = ~(one.targets <= LOGPROB_TOLERANCE).all(axis=1, keepdims=True)
                targets[place] = np.where(broken, np.float32(np.nan), one.targets)
            if one.ids is not None and keep:
                ids[place] = one.ids
        columns = {LOGPROBS: logprobs, AGREES: agrees}
        if self._others:
            columns[WITHIN] = within
        if keep is not None:
            columns[TARGETS] = targets.reshape(-1)
        if keep:
            columns[IDS] = ids.reshape(-1)
        return columns | self._vocabulary_columns()

    def _sound(self, logprobs: np.ndarray) -> np.ndarray:
        """No number, or none of a probability: no score, and no step that is lost to it."""
        sound = logprobs <= LOGPROB_TOLERANCE
        if (np.isposinf(logprobs) | (np.isfinite(logprobs) & ~sound)).any():
            self._note("a log-probability of a teacher is above 0")
        return np.where(sound, np.maximum(logprobs, LEAST_LOGPROB), np.nan)

    def measured(self, batch: TrainBatch) -> dict[str, float | None]:
        return {
            "teacher_seconds": self._seconds,
            "teacher_sequences": float(self._requested),
            "teacher_unscored": float(self._unscored),
            **self._shares(),
            **(
                {} if self._dataset_completions is None else {"given_sequences": float(self._taken)}
            ),
        }

    def _vocabulary_columns(self) -> dict[str, np.ndarray]:
        both = [each.both for each in self._others.values() if each.both is not None]
        return {BOTH: both[0]} if both else {}  # with such a comparison there is one teacher

    def _shares(self) -> dict[str, float | None]:
        if not self._others:
            return {}
        text, aligned = (sum(pair[at] for pair in self._aligned.values()) for at in (0, 1))
        return {"teacher_aligned": aligned / text if text else None}

    @property
    def _others(self) -> dict[str, OtherFamily]:
        pairs = ((name, teacher) for name, (_, teacher, _) in self._by_name.items())
        return {name: teacher for name, teacher in pairs if isinstance(teacher, OtherFamily)}

    def health(self) -> str | None:
        if self._lost:
            return self._lost
        unusable = [
            f"teacher {name}: {count} of {self._requested_of[name]} answers of the step cannot be"
            f" used, or not all of their tokens: {reason}"
            for name, (count, reason) in self._unusable.items()
        ]
        apart = [
            f"teacher {name}: {aligned / text:.0%} of the answers' text could be aligned with its"
            " tokens; the rest has no signal"
            for name, (text, aligned) in self._aligned.items()
            if text and aligned / text < WELL_ALIGNED
        ]
        return "; ".join([*unusable, *apart]) or None

    def close(self) -> None:
        for _, teacher, _ in self._by_name.values():
            teacher.close()


def length_of(answer: Answer) -> int:
    """Return how many of the student's tokens a teacher's scores of it are for."""
    return answer.length if isinstance(answer, AlignedAnswer) else answer.trained


def _numbered(
    answers: Sequence[tuple[int, Answer]], replies: Sequence[Scored | None]
) -> dict[int, Scored]:
    return {
        number: one for (number, _), one in zip(answers, replies, strict=True) if one is not None
    }


def stopped_during(seconds: float, should_stop: Callable[[], bool]) -> bool:
    """Wait; True: a stop was requested meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if should_stop():
            return True
        time.sleep(0.05)
    return False

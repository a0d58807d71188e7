"""The groups of an optimizer step, made of what its datums say; and samples that no step has
trained on yet.

Tinker's API has neither groups nor rewards: a client sends datums with an advantage for each token.
So

    a group          the answers to one prompt that one optimizer step trained on
    advantage        of an answer: the one number that all of its sampled tokens have
    inferred reward  advantage - the lowest advantage of its group: how much more than its group's
                     worst answer

Where advantages are rewards minus their mean, that is the reward but for a constant of the group;
where the client divides them too, but for a scale. It is unknown (NaN) for an answer without
others, or whose tokens' advantages differ.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from mlx_parallm.faces.tinker.data import TARGETS, DatumBatch
from mlx_parallm.faces.tinker.learner import Output
from mlx_parallm.faces.tinker.wire import Datum
from mlx_parallm.rl_training.step.batch import (
    BatchStatistics,
    StatisticsCollector,
    TrainBatch,
    TrainSequence,
)
from mlx_parallm.rl_training.step.prepare import StepTokens
from mlx_parallm.types import Rollout, RolloutGroup

ENVIRONMENT = SOURCE = "tinker"
UNKNOWN = math.nan
GROUP_ANSWERS = 64  # of a group of samples that wait
UNUSED = "no step trained on it"
LIVE_STEPS = 16  # optimizer steps after which a sample is no longer expected to be trained on
LIVE_BYTES = 32 << 20  # of such samples of a run, with their tokens
KNOWN_SAMPLES = 1 << 17  # of a run, whose place in the store is known without their tokens


@dataclass(frozen=True)
class SampleRecord:
    """A sample as it was drawn: by which weights, and its tokens' log-probabilities [T] float32."""

    run: str
    step: int
    temperature: float
    logprobs: np.ndarray
    stopped: bool = True
    generation: int = 0  # of the weights: how often a checkpoint was loaded before


@dataclass(frozen=True)
class TrainedAnswer:
    """A datum as the answer that it holds. Arrays are [T] over the model input and the last target.

    Attributes:
        sampled: bool, False at token 0.
        logprobs: the sampler's, 0 where not sampled; None: the client sent none.
        advantages: 0 where the loss has none.
        versions: the step of the weights that sampled a token, -1 = unknown.
        generations: how often a checkpoint was loaded before: versions are counted anew in each.
        sequences: ids of its samples, in their order.
    """

    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray | None
    advantages: np.ndarray | None
    trainer_logprobs: np.ndarray
    entropies: np.ndarray
    versions: np.ndarray
    generations: np.ndarray
    sequences: tuple[str, ...]
    temperature: float
    stopped: bool | None

    @property
    def prompt(self) -> bytes:
        """The tokens before the first sampled one, int32."""
        return self.tokens[: int(self.sampled.argmax())].tobytes()

    @property
    def advantage(self) -> float:
        """The advantage that all of its sampled tokens share; NaN where they differ, or have
        none."""
        if self.advantages is None:
            return UNKNOWN
        values = self.advantages[self.sampled]
        return float(values[0]) if values.min() == values.max() else UNKNOWN


def trained_answers(
    batch: DatumBatch,
    output: Output,
    find: Callable[[str], SampleRecord | None],
    claim: Callable[[np.ndarray], "Sequence[SampledPart]"] = lambda tokens: (),
) -> list[TrainedAnswer]:
    """The datums that hold something sampled.

    Args:
        find: what is known of a sample, by its sequence id.
        claim: of a client that sends no ids: the samples that these tokens hold.
    """
    columns = {name: batch.by_datum(column) for name, column in batch.loss.columns.items()}
    answers = []
    for i, datum in enumerate(batch.data):
        if datum.inputs[TARGETS].ndim == 1:
            inputs = {name: column[i] for name, column in columns.items()}
            parts = (
                _parts(datum, find)
                if any(span.sequence_id for span in datum.spans)
                else claim(_tokens(datum))
            )
            answer = _answer(datum, inputs, output.logprobs[i], output.entropies[i], parts)
            answers += [] if answer is None else [answer]
    return answers


@dataclass(frozen=True)
class SampledPart:
    """Tokens [start, end) of an answer are those of a sample; `step`: of its weights, -1 =
    unknown."""

    sequence_id: str
    start: int
    end: int
    step: int = -1
    temperature: float = 1.0
    stopped: bool | None = None
    generation: int = 0


def _parts(datum: Datum, find: Callable[[str], SampleRecord | None]) -> list[SampledPart]:
    """Return the sampled parts of a datum, from the spans that the client sent with the targets."""
    parts, place = list[SampledPart](), 1
    for span in datum.spans:
        start, place = place, place + span.length
        if span.sequence_id:
            record = find(span.sequence_id)
            facts = (
                ()
                if record is None
                else (record.step, record.temperature, record.stopped, record.generation)
            )
            parts.append(SampledPart(span.sequence_id, start, place, *facts))
    return parts


def _tokens(datum: Datum) -> np.ndarray:
    """[T] int32: the model input and the last target."""
    return np.concatenate([datum.tokens, datum.inputs[TARGETS][-1:]]).astype(np.int32)


def _answer(
    datum: Datum,
    inputs: dict[str, np.ndarray],
    trainer_logprobs: np.ndarray,
    entropies: np.ndarray,
    parts: Sequence[SampledPart],
) -> TrainedAnswer | None:
    """Return the answer of a datum; None when none of its tokens is recognised as sampled."""
    tokens = _tokens(datum)
    sampled, versions = np.zeros(len(tokens), bool), np.full(len(tokens), -1, np.int64)
    generations = np.zeros(len(tokens), np.int64)
    for part in parts:
        where = slice(part.start, part.end)
        sampled[where], versions[where], generations[where] = True, part.step, part.generation
    advantages, logprobs = inputs.get("advantages"), inputs.get("logprobs")
    if (
        not any(span.sequence_id for span in datum.spans)
        and advantages is not None
        and logprobs is not None
    ):
        sampled[1:] |= (advantages != 0) | (logprobs != 0)  # clients pad both with 0 on the prompt
    if not sampled.any():
        return None
    tokens[1:] = np.where(sampled[1:], datum.inputs[TARGETS], tokens[1:])
    return TrainedAnswer(
        tokens,
        sampled,
        None if logprobs is None else _shifted(logprobs, sampled),
        None if advantages is None else _shifted(advantages, sampled),
        _shifted(trainer_logprobs, sampled),
        _shifted(entropies, sampled),
        versions,
        generations,
        tuple(dict.fromkeys(part.sequence_id for part in parts)),
        parts[-1].temperature if parts else 1.0,
        parts[-1].stopped if parts else None,
    )


def _shifted(column: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """A column of targets as one of tokens: what is not sampled is 0."""
    return np.where(sampled, np.concatenate([np.zeros(1, np.float32), column]), np.float32(0))


def inferred_rewards(advantages: Sequence[float]) -> list[float]:
    """Each advantage of a group less the lowest one; NaN: unknown, and in nothing that is said of
    the others.

    Worked: rewards 1, 0, 0, 1 minus their mean are 0.5, -0.5, -0.5, 0.5 → 1, 0, 0, 1. Rewards 3 and
    2 divided by their standard deviation are 1, -1 → 2, 0.
    """
    numbers = [value for value in advantages if not math.isnan(value)]
    if len(numbers) < 2:
        return [UNKNOWN] * len(advantages)
    lowest = min(numbers)
    return [value - lowest for value in advantages]


def group_of(group_id: str, answers: Sequence[TrainedAnswer], loss: str) -> RolloutGroup:
    """The answers to one prompt, as a group of the rollout store."""
    rewards = inferred_rewards([answer.advantage for answer in answers])
    rows = [
        None if answer.advantages is None else tuple(answer.advantages.tolist())
        for answer in answers
    ]
    return RolloutGroup(
        group_id,
        ENVIRONMENT,
        tuple(_rollout(answer, reward) for answer, reward in zip(answers, rewards, strict=True)),
        advantages=tuple(
            row or (0.0,) * len(answer.tokens) for row, answer in zip(rows, answers, strict=True)
        ),
        metadata={"loss_fn": loss},
    )


def _rollout(answer: TrainedAnswer, reward: float) -> Rollout:
    return Rollout(
        tuple(answer.tokens.tolist()),
        tuple(answer.sampled.astype(int).tolist()),
        None if answer.logprobs is None else tuple(answer.logprobs.tolist()),
        tuple(answer.versions.tolist()),
        temperature=answer.temperature,
        scores={"reward": reward},
        stop_reason=None if answer.stopped is None else "stop" if answer.stopped else "length",
    )


@dataclass(frozen=True)
class StepGroups:
    """The groups that a step trained on, as the writers of a run's files take them. `joined`:
    `_joined` of its answers."""

    batch: TrainBatch
    tokens: StepTokens
    joined: Mapping[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float | str | None]:
        """Return the numbers of the step's line. `inferred_reward` is the mean over the groups
        whose answers differ in it."""
        group_rewards = [
            [rollout.reward for rollout in group.scored] for group in self.batch.groups
        ]
        spread = [
            reward for rewards in group_rewards if max(rewards, default=0) > 0 for reward in rewards
        ]
        statistics, some = self.batch.statistics, any(group_rewards)
        return {
            "judged_by": "inferred_reward" if some else "loss",
            "inferred_reward": math.fsum(spread) / len(spread) if spread else None,
            "groups": statistics.groups,
            "groups_without_variance": statistics.groups_without_variance,
            "groups_same_answer": statistics.groups_same_answer,
            "completion_tokens_mean": statistics.completion_tokens_mean,
            "truncated_fraction": None
            if statistics.eos_fraction is None
            else statistics.truncated_fraction,
            "eos_fraction": statistics.eos_fraction,
            "rollout_entropy": statistics.rollout_entropy,
            **self.joined,
        }


def step_groups(
    step: int,
    groups: Sequence[tuple[RolloutGroup, Sequence[TrainedAnswer]]],
    *,
    weights: int,
    generation: int = 0,
) -> StepGroups:
    """Return what a step trained on. `weights`: the optimizer steps of the weights that learned;
    `generation`: of the same weights."""
    collector = StatisticsCollector()
    sequences, answers = list[TrainSequence](), list[TrainedAnswer]()
    for group, group_answers in groups:
        varied = any(
            answer.advantages is not None and answer.advantages.any() for answer in group_answers
        )
        collector.add_trained(group, 0, varied=varied)
        sequences += [TrainSequence(rollout, (), fresh=False) for rollout in group.rollouts]
        answers += group_answers

    def column(values: Iterable[np.ndarray | None]) -> np.ndarray:
        """[N] over the sampled tokens of all answers, NaN where there is none."""
        parts = [
            np.full(int(answer.sampled.sum()), np.nan, np.float32)
            if value is None
            else value[answer.sampled]
            for answer, value in zip(answers, values, strict=True)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    columns = {
        "logprobs": column(answer.logprobs for answer in answers),
        "trainer_logprobs": column(answer.trainer_logprobs for answer in answers),
        "entropies": column(answer.entropies for answer in answers),
        "advantages": column(answer.advantages for answer in answers),
    }
    statistics = collector.result() if groups else BatchStatistics()
    batch = TrainBatch(step, tuple(group for group, _ in groups), tuple(sequences), statistics)
    return StepGroups(batch, StepTokens(columns), _joined(answers, weights, generation))


def _joined(answers: Sequence[TrainedAnswer], weights: int, generation: int) -> dict[str, float]:
    """Return how old the samples are, and how far sampler and learner differ where the weights
    are the same (`run_log.py`). Tokens of an unknown version, and those sampled before a
    checkpoint was loaded, are left out."""
    ages, gaps = [np.zeros(0)], [np.zeros(0)]
    for answer in answers:
        with_version = answer.sampled & (answer.versions >= 0) & (answer.generations == generation)
        ages.append(weights - answer.versions[with_version])
        if answer.logprobs is not None and answer.temperature == 1.0:
            same = with_version & (answer.versions == weights)
            gaps.append(np.abs(answer.trainer_logprobs[same] - answer.logprobs[same]))
    numbers: dict[str, float] = {}
    for name, most, parts in (
        ("staleness", "staleness_max", ages),
        ("logprob_diff_mean", "logprob_diff_max", gaps),
    ):
        values = np.concatenate(parts)
        if values.size:
            numbers |= {name: float(values.mean(dtype=np.float64)), most: float(values.max())}
    return numbers


# ---------------------------------------------------------------------- samples that wait


@dataclass(frozen=True)
class DrawnAnswer:
    """A sample; tokens and logprobs [T]."""

    sequence_id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    step: int
    stopped: bool
    generation: int = 0

    @property
    def size(self) -> int:
        """About as many bytes in memory."""
        return self.own_size + 8 * len(self.prompt)

    @property
    def own_size(self) -> int:
        """Bytes in memory, without the prompt; about."""
        return 400 + 40 * len(self.tokens)

    def rollout(self) -> Rollout:
        before = len(self.prompt)
        return Rollout(
            (*self.prompt, *self.tokens),
            (*(0,) * before, *(1,) * len(self.tokens)),
            (*(0.0,) * before, *self.logprobs),
            (*(-1,) * before, *(self.step,) * len(self.tokens)),
            temperature=self.temperature,
            scores={"reward": UNKNOWN},
            stop_reason="stop" if self.stopped else "length",
        )


@dataclass(eq=False)
class LiveGroup:
    """Samples of one prompt by the same weights.

    Attributes:
        weights: their step and generation.
        line: of the run's metrics, when it was made; one that is `LIVE_STEPS` older is dropped.
        names: sequence ids of its samples that no step has trained on.
        answers: the same with their tokens; empty once those are forgotten.
        written: sequence ids of what is in the store, in that order.
        changed: since it was written.
        dropped: it is marked so in the store.
        unused: why it is dropped, when it is.
    """

    group_id: str
    prompt: bytes
    weights: tuple[int, int]
    line: int
    names: set[str] = field(default_factory=set)
    answers: dict[str, DrawnAnswer] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    changed: bool = True
    dropped: bool = False
    unused: str = UNUSED

    @property
    def size(self) -> int:
        """About as many bytes of tokens in memory: the answers share one prompt."""
        return sum(answer.own_size for answer in self.answers.values()) + 2 * len(
            self.prompt
        ) * bool(self.answers)

    def group(self) -> RolloutGroup:
        return RolloutGroup(
            self.group_id, ENVIRONMENT, tuple(answer.rollout() for answer in self.answers.values())
        )

    def left_of(self, stored: RolloutGroup) -> RolloutGroup:
        """The stored group without the samples that a step has trained on since."""
        kept = zip(self.written, stored.rollouts, strict=True)
        return replace(
            stored, rollouts=tuple(rollout for name, rollout in kept if name in self.names)
        )

    def noted(self, stored: RolloutGroup | None) -> None:
        """Note what the store now holds of this group; None: nothing."""
        names = self.answers or [name for name in self.written if name in self.names]
        self.written = tuple(names) if stored is not None else ()
        self.changed = self.dropped = False


_FACTORS = np.random.default_rng(0).integers(1, 1 << 63, 1 << 12, np.uint64) * np.uint64(
    2
) + np.uint64(1)


def prefix_hashes(tokens: np.ndarray) -> np.ndarray:
    """A number for each beginning of a text: [T] uint64, each token times the odd factor of its
    place, added up."""
    places = np.resize(_FACTORS, len(tokens)) + np.arange(
        len(tokens), dtype=np.uint64
    ) // np.uint64(len(_FACTORS))
    hashes: np.ndarray = np.cumsum(
        (tokens.astype(np.uint64) + np.uint64(1)) * places, dtype=np.uint64
    )
    return hashes


@dataclass(frozen=True)
class _Known:
    """A sample: its group, the hash of prompt and answer, and its place in a text."""

    group: LiveGroup
    end: int
    part: SampledPart


class LiveGroups:
    """The samples of a run that no step has trained on yet.

    The tokens of the oldest are forgotten before they take more than `most_bytes`. What is known
    beside them stays for the newest `most_samples`, dropped ones too: a step may still train on
    them.
    """

    def __init__(self, most_bytes: int = LIVE_BYTES, most_samples: int = KNOWN_SAMPLES) -> None:
        self._groups: OrderedDict[str, LiveGroup] = OrderedDict()  # by id, the oldest first
        self._open: dict[bytes, LiveGroup] = {}  # the newest one of each prompt
        self._known: dict[str, _Known] = {}  # by sequence id
        self._ends: dict[int, list[str]] = {}  # hash of prompt and answer → sequence ids
        self._most, self._most_samples, self._bytes, self._count = most_bytes, most_samples, 0, 0

    def new_id(self, prompt: bytes) -> str:
        self._count += 1
        return f"{blake2b(prompt, digest_size=6).hexdigest()}-{self._count}"

    def add(self, drawn: DrawnAnswer, line: int) -> None:
        """`line`: the last one of the run's metrics."""
        prompt, weights = np.array(drawn.prompt, np.int32).tobytes(), (drawn.step, drawn.generation)
        group = self._open.get(prompt)
        if group is None or group.weights != weights or len(group.names) >= GROUP_ANSWERS:
            group = self._open[prompt] = LiveGroup(self.new_id(prompt), prompt, weights, line)
            self._groups[group.group_id] = group
        shared = next((answer.prompt for answer in group.answers.values()), drawn.prompt)
        before = group.size
        group.answers[drawn.sequence_id] = replace(drawn, prompt=shared)
        group.names.add(drawn.sequence_id)
        group.changed = True
        self._bytes += group.size - before
        start, stop = len(drawn.prompt), len(drawn.prompt) + len(drawn.tokens)
        end = int(prefix_hashes(np.array((*drawn.prompt, *drawn.tokens), np.int32))[-1])
        facts = (drawn.step, drawn.temperature, drawn.stopped, drawn.generation)
        self._known[drawn.sequence_id] = _Known(
            group, end, SampledPart(drawn.sequence_id, start, stop, *facts)
        )
        self._ends.setdefault(end, []).append(drawn.sequence_id)

    def claim(self, tokens: np.ndarray) -> list[SampledPart]:
        """Return the samples that end in these tokens with all that stands before them. Each is
        returned once.

        When two overlap, the longer one is returned.
        """
        parts, before = list[SampledPart](), len(tokens)
        hashes = enumerate(prefix_hashes(tokens).tolist() if self._ends else (), 1)
        for stop, end in [pair for pair in hashes if pair[1] in self._ends][::-1]:
            here = [self._known[name].part for name in self._ends.get(end, ())]
            fitting = [part for part in here if part.end == stop <= before]
            if fitting:
                part = min(fitting, key=lambda part: part.start)
                parts.insert(0, part)
                before = part.start
                self._forget_end(end, part.sequence_id)
        return parts

    def _forget_end(self, end: int, sequence_id: str) -> None:
        ids = self._ends.get(end, [])
        if sequence_id in ids:
            ids.remove(sequence_id)
        if not ids:
            self._ends.pop(end, None)

    def homes(self, sequence_ids: Iterable[str]) -> dict[str, LiveGroup]:
        """The group of each of these samples that is known."""
        return {name: self._known[name].group for name in sequence_ids if name in self._known}

    def left_by(self, sequence_ids: Iterable[str]) -> set[str]:
        """Ids of their groups that have other samples too."""
        homes = self.homes(sequence_ids).values()
        return {
            group.group_id for group, taken in Counter(homes).items() if taken < len(group.names)
        }

    def take(self, sequence_ids: Iterable[str]) -> None:
        """Forget samples that were trained on."""
        for sequence_id, group in self.homes(sequence_ids).items():
            self._forget_end(self._known.pop(sequence_id).end, sequence_id)
            before = group.size
            group.names.remove(sequence_id)
            group.answers.pop(sequence_id, None)
            self._bytes += group.size - before
            group.changed = True
            if not group.names:
                self._remove(group)

    def waiting(self) -> list[LiveGroup]:
        """All but those that are dropped."""
        return [group for group in self._groups.values() if not group.dropped]

    def changed(self) -> list[LiveGroup]:
        """Return the groups to write."""
        return [
            group
            for group in self._groups.values()
            if group.changed and (group.answers or group.written)
        ]

    def too_old(self, line: int) -> list[LiveGroup]:
        """Return the groups on which hardly a step will train any more."""
        return [group for group in self.waiting() if group.line < line - LIVE_STEPS]

    def dropped(self, groups: Iterable[LiveGroup]) -> None:
        """Mark groups as dropped."""
        for group in groups:
            group.dropped = True
            self._forget_tokens(group)

    def make_room(self) -> list[LiveGroup]:
        """Forget the tokens of the oldest samples, and all of those that are too many; return
        these."""
        if self._bytes > self._most:
            for group in [group for group in self._groups.values() if group.answers]:
                self._forget_tokens(group)
                if self._bytes <= self._most:
                    break
        gone = list[LiveGroup]()
        while len(self._known) > self._most_samples:
            gone.append(next(iter(self._groups.values())))
            self._remove(gone[-1])
        return [group for group in gone if not group.dropped]

    def _forget_tokens(self, group: LiveGroup) -> None:
        self._bytes -= group.size
        group.answers = {}
        if self._open.get(group.prompt) is group:
            del self._open[group.prompt]

    def _remove(self, group: LiveGroup) -> None:
        del self._groups[group.group_id]
        self._forget_tokens(group)
        for sequence_id in group.names:
            self._forget_end(self._known.pop(sequence_id).end, sequence_id)

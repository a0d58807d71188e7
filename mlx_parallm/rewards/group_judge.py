"""`builtin:group_judge`: a language model scores the answers of a group against each other, by a
rubric.

    trajectories → `judge_pages.group_of`, what the judge is shown
                 → a question for each criterion and order → `judge_models.JudgeModel`, or
                   `judge_cache.Judgements`, if it was asked before
                 → `judge_replies.read` → `judge_rubrics.Rubric.total` → scores, reasons, metrics

With `pairwise` it chooses one of two answers at a time, in both orders, and an answer's score is
the mean probability that it is chosen.

Comparing is easier for a judge than scoring one answer alone, and a group needs no more than its
order: this is ART's RULER (art.openpipe.ai/fundamentals/ruler). Explicit and implicit aggregation
of a rubric's criteria are those of Rubrics as Rewards (arXiv:2507.17746, section 3). An answer that
has no score in the reply is unscored (`base.UNSCORED`), with the reason.
"""

import asyncio
import hashlib
import inspect
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, Unpack

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.user_code import is_reference
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.judge_cache import Judgements
from mlx_parallm.rewards.judge_models import (
    JudgeInference,
    JudgeModel,
    JudgeReply,
    ModelOptions,
    Question,
    asks_a_model,
    judge_model,
    report_problems,
)
from mlx_parallm.rewards.judge_pages import Group, group_of, pair_question_of, question_of
from mlx_parallm.rewards.judge_replies import (
    ALTERNATIVES,
    AnswerVerdict,
    Found,
    mass_of,
    read,
    read_choice,
)
from mlx_parallm.rewards.judge_rubrics import RUBRIC, Aggregation, Rubric, rubric_of
from mlx_parallm.rewards.part_tools import Completions, to_binary
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Trajectory

log = get_logger("rewards")

NAME = "group_judge"
REASON_LENGTH = 240
ROOM = 64
"""Tokens of one answer's score, name and quotes in a reply, beside its reason."""


@asks_a_model
def group_judge(
    *,
    rubric: str | Sequence[str | Mapping[str, Any]] | None = None,
    rubric_column: str | None = None,
    aggregation: Aggregation = "implicit",
    both_orders: float | None = None,
    pairwise: int = 0,
    structured: bool = True,
    reason_length: int = REASON_LENGTH,
    max_tokens: int | None = None,
    seed: int = 0,
    name: str = NAME,
    threshold: float | None = None,
    **model: Unpack[ModelOptions],
) -> "GroupJudge":
    """A language model's opinion of all answers of a group, seen together: 0 to 1 for each, with a
    reason.

    Args:
        rubric: what makes an answer good: a text, or a list of criteria, each a text or
            { criterion, weight }.
        rubric_column: column with a row's own rubric; None in it: `rubric`.
        aggregation: "implicit", one request with all criteria; "explicit", one for each, and the
            weighted mean of the scores.
        both_orders: share of the groups that are judged twice, the second time in the reverse
            order; the score is the mean. Default: 0.1.
        pairwise: how many others each answer is compared with, two at a time, in both orders: an
            odd number counts as the next even one, and there are no more than the group has. Its
            score is the mean probability of the token that chooses it. 0: all are scored at once.
            For a judge that is too weak to write scores.
        structured: hold the reply to a JSON schema; false for a server that cannot.
        reason_length: characters of the reason for each answer.
        max_tokens: of a reply; default: room for the reasons.
        seed: of the order in which the answers are shown.
        name: of its metrics and notes; default: that of the reward (the second: group_judge#2).
        model: `judge_models.ModelOptions`.

    Metrics, under the name: requests, cached, prompt_tokens, completion_tokens, seconds, unscored,
    unread; choice_mass with `pairwise`; score_spread, length_correlation; order_agreement,
    order_difference, position_bias.

    Raises ConfigError: options that contradict each other, a rubric that says nothing, a key file
    that cannot be read.
    """
    if not isinstance(pairwise, int) or isinstance(pairwise, bool) or pairwise < 0:
        raise ConfigError(f"pairwise = {pairwise!r}: a whole number of other answers, 0 or more")
    written = both_orders is not None or max_tokens or reason_length != REASON_LENGTH
    if pairwise and (written or not structured or is_reference(model["judge"])):
        raise ConfigError(
            "pairwise: two answers are compared in both orders, by the probabilities of one token:"
            " unset both_orders and max_tokens, structured and reason_length, and choose a judge"
            " that is no function"
        )
    if both_orders is None:
        both_orders = 1.0 if pairwise else 0.1
    if not 0 <= both_orders <= 1:
        raise ConfigError(f"both_orders = {both_orders}: a share of the groups, 0 to 1")
    if reason_length < 1:
        raise ConfigError(f"reason_length = {reason_length}: characters, 1 or more")
    if aggregation not in ("implicit", "explicit"):
        raise ConfigError(f'aggregation = {aggregation!r}: "implicit" or "explicit"')
    if rubric_column is not None and not rubric_column.isidentifier():
        raise ConfigError(f"rubric_column = {rubric_column!r}: it has to be a Python identifier")
    judging_model = judge_model(max_tokens=max_tokens, **model)
    try:
        task_rubric = None if rubric is None else rubric_of(rubric)
    except ValueError as error:
        raise ConfigError(f"rubric: {error}") from error
    settings = GroupJudgeOptions(
        task_rubric,
        rubric_column,
        aggregation,
        both_orders,
        pairwise,
        structured,
        reason_length,
        max_tokens,
        seed,
    )
    return GroupJudge(judging_model, settings, name, threshold)


@dataclass(frozen=True)
class GroupJudgeOptions:
    """`group_judge`'s options of the same names. `rubric` None: each row has its own."""

    rubric: Rubric | None
    rubric_column: str | None
    aggregation: Aggregation
    both_orders: float
    pairwise: int
    structured: bool
    reason_length: int
    max_tokens: int | None
    seed: int


@dataclass(frozen=True)
class JudgeRequest:
    """One request of a group. `order`: the answers by their numbers, as they were shown;
    `verdicts`: in that order."""

    order: Sequence[int]
    reply: JudgeReply
    verdicts: Sequence[AnswerVerdict]
    read: bool
    cached: bool


class GroupJudge:
    """The reward function of `builtin:group_judge`."""

    def __init__(
        self, model: JudgeModel, settings: GroupJudgeOptions, name: str, threshold: float | None
    ) -> None:
        self._model, self._settings = model, settings
        self._name, self._threshold = name, threshold
        self._known = Judgements()
        self.__signature__ = _with_column(settings)

    def attach(self, inference: JudgeInference) -> None:
        """Take the policy's engine, if the judge is in this process; and what the run has been told
        before, if the judge is still the same. Raises CheckpointError."""
        self._model.attach(inference)
        run = getattr(inference, "run", None)
        if run is not None and self._model.identity is not None:
            self._known.keep(run)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self._model.aclose()

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Completions,
        trajectories: Sequence[Trajectory] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | str | None]:
        """Raises RolloutRejectedError, EndpointError: no request was answered, one was refused, no
        reply could be read, or the row's rubric says nothing."""
        if not completions:
            return []
        rubric = self._rubric(columns)
        group = group_of(prompts[0], completions, trajectories)
        rounds = await asyncio.gather(
            *(self._round(group, rubric, shown) for shown in self._shown_together(group))
        )
        if self._settings.pairwise and len(rounds) == 2:
            rounds = [list(map(_if_whole, *both)) for both in (rounds, rounds[::-1])]
        requests = [request for of_round in rounds for request in of_round]
        report_problems([one.reply.problem for one in requests], self._name)
        orders = [_verdicts(of_round, rubric, len(group.answers)) for of_round in rounds]
        verdicts = _of_orders(orders)
        if all(verdict.score is None for verdict in verdicts):
            raise RolloutRejectedError(f"{self._name}: no answer has a score: {verdicts[0].reason}")
        if log_metric is not None:
            numbers = _cost(requests) | _behaviour(group, verdicts, orders, requests)
            numbers["unscored"] = sum(verdicts[n].score is None for n in group.answer_of)
            for metric, value in numbers.items():
                log_metric(f"{self._name}/{metric}", value)
        if log_extra is not None:
            log_extra(self._name, [verdicts[number].note() for number in group.answer_of])
        scores = to_binary([verdict.score for verdict in verdicts], self._threshold)
        return [UNSCORED if (s := scores[n]) is None else s for n in group.answer_of]

    def _rubric(self, columns: Mapping[str, Sequence[Any]]) -> Rubric:
        """Return the row's rubric, divided into what is requests at once."""
        settings = self._settings
        of_row = columns.get(settings.rubric_column or "", (None,))[0]
        try:
            rubric = (settings.rubric if of_row is None else rubric_of(of_row)) or rubric_of(RUBRIC)
        except ValueError as error:
            column = f"column {settings.rubric_column!r}"
            raise RolloutRejectedError(f"{self._name}: {column}: {error}") from error
        return rubric if settings.aggregation == "explicit" else rubric.at_once()

    def _shown_together(self, group: Group) -> list[list[list[int]]]:
        """Return the answers of each request, by their numbers, in one random order, or in two
        rounds: in this and its reverse."""
        settings = self._settings
        key = [settings.seed, group.beginning, group.answers]
        rng = random.Random(hashlib.sha256(json.dumps(key).encode()).digest())
        order = list(range(len(group.answers)))
        rng.shuffle(order)
        shown = pairs_of(order, settings.pairwise) if settings.pairwise else [order]
        twice = len(order) > 1 and rng.random() < settings.both_orders
        return [shown, [each[::-1] for each in shown]] if twice else [shown]

    async def _round(
        self, group: Group, rubric: Rubric, shown: Sequence[Sequence[int]]
    ) -> list[JudgeRequest]:
        """Ask for each criterion."""
        calls = [self._ask(group, text, order) for text in rubric.questions for order in shown]
        return list(await asyncio.gather(*calls))

    async def _ask(self, group: Group, rubric: str, order: Sequence[int]) -> JudgeRequest:
        question = self._question(group, rubric, order)
        whole = [self._model.identity, asdict(question), self._settings.reason_length]
        key = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
        if (kept := self._known.get(key)) is not None:
            return JudgeRequest(order, JudgeReply(""), kept, True, True)
        reply = await self._model.ask(question)
        if reply.text is None:
            missing = AnswerVerdict(None, f"no reply: {reply.problem}")
            return JudgeRequest(order, reply, [missing] * len(order), False, False)
        result = self._read(reply, len(order))
        if result.unknown:
            log.warning("the judge scored answers that there are not", names=result.unknown)
        verdicts = self._known.put(key, result.verdicts) if result.complete else result.verdicts
        return JudgeRequest(order, reply, verdicts, result.readable, False)

    def _question(self, group: Group, rubric: str, order: Sequence[int]) -> Question:
        settings, limit = self._settings, self._settings.reason_length
        shown = [group.answers[number] for number in order]
        if settings.pairwise:
            messages = pair_question_of(group.beginning, shown, rubric)
            return Question(messages, 1, alternatives=ALTERNATIVES)
        messages, schema = question_of(group.beginning, shown, rubric, limit)
        room = settings.max_tokens or len(order) * (limit + ROOM) + ROOM
        return Question(messages, room, schema if settings.structured else None)

    def _read(self, reply: JudgeReply, size: int) -> Found:
        if self._settings.pairwise:
            return read_choice(reply.likely)
        return read(reply.text or "", size, self._settings.reason_length)


def pairs_of(order: Sequence[int], others: int) -> list[list[int]]:
    """Return pairs such that each answer is compared with so many others, or with all, and is
    first as often as it is second where the pairs are not all. An odd number of others counts as
    the next even one.

    Worked: 0, 1, 2, 3, 4 and two others: 01, 12, 23, 34, 40.
    """
    size = len(order)
    pairs = {
        frozenset((one, other)): [order[one], order[other]]
        for step in range(1, min((others + 1) // 2, size // 2) + 1)
        for one in range(size)
        if (other := (one + step) % size) != one
    }
    return list(pairs.values())


def _with_column(settings: GroupJudgeOptions) -> inspect.Signature:
    """The signature of the reward: the column of rubrics is a parameter, so that a data set
    without it is refused."""
    _, *parameters = inspect.signature(GroupJudge.__call__).parameters.values()
    parameters = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    if settings.rubric_column is not None:
        default = inspect.Parameter.empty if settings.rubric is None else None
        parameters.append(
            inspect.Parameter(
                settings.rubric_column, inspect.Parameter.KEYWORD_ONLY, default=default
            )
        )
    return inspect.Signature(parameters)


def _if_whole(one: JudgeRequest, other: JudgeRequest) -> JudgeRequest:
    """Return a pair's request, as one that is unread if that of the other order is: a judge that
    likes what stands first would reward a place."""
    if not one.read or other.read:
        return one
    missing = AnswerVerdict(None, f"read in one order only: {other.verdicts[0].reason}")
    return replace(one, verdicts=[missing] * len(one.order), read=False)


def _verdicts(requests: Sequence[JudgeRequest], rubric: Rubric, size: int) -> list[AnswerVerdict]:
    """Return the verdict on each answer by the requests of one round, criterion by criterion."""
    each = len(requests) // len(rubric.questions)
    parts = [requests[n * each : (n + 1) * each] for n in range(len(rubric.questions))]
    return rubric.total([_by_answer(part, size) for part in parts])


def _by_answer(requests: Sequence[JudgeRequest], size: int) -> list[AnswerVerdict]:
    """Return the verdict on each answer by a criterion's requests, the mean if it is in several;
    ½ for one that there is nothing to compare with."""
    verdicts: list[list[AnswerVerdict]] = [[] for _ in range(size)]
    for one in requests:
        for number, verdict in zip(one.order, one.verdicts, strict=True):
            verdicts[number].append(verdict)
    alone = AnswerVerdict(0.5, "there is no other answer")
    return [replace(_merged(each), orders=()) if each else alone for each in verdicts]


def _of_orders(orders: Sequence[Sequence[AnswerVerdict]]) -> list[AnswerVerdict]:
    """Return the verdict on each answer, the mean of its two if both orders score the same answers.
    Else all are those of the order that scores more, of equal ones the first: beside means of two
    orders, a score of one order would hold what its place earns."""
    scored = [[verdict.score is not None for verdict in each] for each in orders]
    if any(each != scored[0] for each in scored):
        return list(orders[max(range(len(orders)), key=lambda n: sum(scored[n]))])
    return [_merged(each) for each in zip(*orders, strict=True)]


def _merged(verdicts: Sequence[AnswerVerdict]) -> AnswerVerdict:
    """Return one answer's verdict of several: the mean of its scores, and the reason of the
    first."""
    if len(verdicts) == 1:
        return verdicts[0]
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    if not scores:
        return verdicts[0]
    first = next(verdict for verdict in verdicts if verdict.score is not None)
    return AnswerVerdict(math.fsum(scores) / len(scores), first.reason, first.parts, tuple(scores))


def _cost(requests: Sequence[JudgeRequest]) -> dict[str, float]:
    sent = [one for one in requests if not one.cached]
    numbers: dict[str, float] = {
        "requests": len(sent),
        "cached": len(requests) - len(sent),
        "prompt_tokens": sum(one.reply.prompt_tokens for one in sent),
        "completion_tokens": sum(one.reply.completion_tokens for one in sent),
    }
    if sent:
        numbers["seconds"] = math.fsum(one.reply.seconds for one in sent) / len(sent)
    # a kept one is unread if the other order of its pair is
    news = [one for one in requests if not (one.cached and one.read)]
    if answered := [one for one in news if one.reply.text is not None]:
        numbers["unread"] = sum(not one.read for one in answered) / len(answered)
    if masses := [mass_of(one.reply.likely) for one in sent if one.reply.likely]:
        numbers["choice_mass"] = statistics.fmean(masses)
    return numbers


# ---------------------------------------------------------------------- how it judges


def _behaviour(
    group: Group,
    verdicts: Sequence[AnswerVerdict],
    orders: Sequence[Sequence[AnswerVerdict]],
    requests: Sequence[JudgeRequest],
) -> dict[str, float]:
    """The numbers that tell a judge that sees differences from one that does not. Each is missing
    where a group has too few different answers."""
    numbers: dict[str, float] = {}
    scored = [
        (v.score, len(answer))
        for v, answer in zip(verdicts, group.answers, strict=True)
        if v.score is not None
    ]
    if len(scored) > 1:
        numbers["score_spread"] = statistics.pstdev([score for score, _ in scored])
    if len(scored) > 2 and (r := rank_correlation(*zip(*scored, strict=True))) is not None:
        numbers["length_correlation"] = r
    if len(orders) == 2:
        one, other = ([verdict.score for verdict in each] for each in orders)
        numbers |= agreement(one, other)
        biases = [bias for each in requests if (bias := _first_half(each)) is not None]
        numbers |= {"position_bias": statistics.fmean(biases)} if biases else {}
    return numbers


def _first_half(request: JudgeRequest) -> float | None:
    """Return by how much the first half of the answers shown scores more than the second; None: one
    of them has no score."""
    half = len(request.verdicts) // 2
    first, second = (
        [verdict.score for verdict in part if verdict.score is not None]
        for part in (request.verdicts[:half], request.verdicts[-half:])
    )
    return statistics.fmean(first) - statistics.fmean(second) if first and second else None


def agreement(first: Sequence[float | None], second: Sequence[float | None]) -> dict[str, float]:
    """Compare two judgements of the same answers.

    order_agreement: the share of the pairs of answers that both put in the same order; a pair of
    which one judgement makes a tie counts ½, a tie of both is left out.
    order_difference: the mean distance of an answer's two scores.

    Worked: scores 1, 0, then 0.5, 0.5: the pair counts ½, the difference is 0.5.
    """
    signs = [
        (_sign(first[one], first[other]), _sign(second[one], second[other]))
        for one, other in combinations(range(len(first)), 2)
    ]
    pairs = [(a, b) for a, b in signs if a is not None and b is not None and (a or b)]
    both = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    numbers: dict[str, float] = {}
    if pairs:
        numbers["order_agreement"] = sum((1 + a * b) / 2 for a, b in pairs) / len(pairs)
    if both:
        numbers["order_difference"] = math.fsum(abs(a - b) for a, b in both) / len(both)
    return numbers


def _sign(one: float | None, other: float | None) -> int | None:
    return None if one is None or other is None else (one > other) - (one < other)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's correlation, ties sharing the mean of their ranks; None: one is constant.

    Worked: 0.1, 0.2, 0.9 and 5, 7, 6 have the ranks 1, 2, 3 and 1, 3, 2: 0.5.
    """
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(v) + len(ordered) - 1 - ordered[::-1].index(v)) / 2 for v in values]

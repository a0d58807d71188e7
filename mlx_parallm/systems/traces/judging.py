"""Labels by a model that judges: each run alone, or the runs of one prompt against each other.

Compared runs are ranked twice, in two orders that are each other's reverse, because judges prefer
what they read first. A run gets a label only where both rankings put it at the same place.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.judge import ModelJudge
from mlx_parallm.rewards.judge_models import JudgeReply
from mlx_parallm.rewards.threads import ASYNC_FUNCTIONS
from mlx_parallm.systems.traces.rewards import opening_of, trajectory_of
from mlx_parallm.systems.traces.schema import present
from mlx_parallm.systems.traces.session import label_about, prompt_hash
from mlx_parallm.systems.traces.trace import Trace

CONCURRENT = 16  # traces, or groups of them


@dataclass(frozen=True)
class JudgeCost:
    """`disagreed`: runs that two orders put at different places; `unread`: without a reply that
    has a score."""

    labelled: int
    disagreed: int
    unread: int
    requests: int
    prompt_tokens: int
    completion_tokens: int

    def line(self) -> str:
        return (
            f"{self.labelled} labelled, {self.disagreed} left alone because two orders disagreed,"
            f" {self.unread} without a score; {self.requests} requests, {self.prompt_tokens} tokens"
            f" in, {self.completion_tokens} out"
        )


def add_judge_labels(
    traces: Sequence[Trace], judge: ModelJudge, by: str, *, relative: bool = False
) -> JudgeCost:
    """Label traces 0 to 1 by a judge. `by`: who it is; `relative`: compare the runs of one prompt.

    One that it does not answer stays as it is: the labels of the others are paid for.

    Raises EndpointError: it refuses; RolloutRejectedError: it answers nothing at all.
    """
    work = _label(traces, judge, f"judge:{by}", relative)
    return ASYNC_FUNCTIONS.run(work)  # this thread may have a running loop


async def _label(traces: Sequence[Trace], judge: ModelJudge, by: str, relative: bool) -> JudgeCost:
    groups: dict[str, list[Trace]] = defaultdict(list)
    for number, trace in enumerate(traces):
        groups[prompt_hash(trace.messages) if relative else str(number)].append(trace)
    counts, room = Counter[str](), asyncio.Semaphore(CONCURRENT)

    async def one(group: list[Trace]) -> None:
        async with room:
            if relative:
                await _compare(group, judge, by, counts)
            else:
                await _score(group, judge, by, counts, len(groups))

    try:
        await asyncio.gather(*map(one, groups.values()))
    finally:
        await judge.aclose()
    return JudgeCost(**{each.name: counts[each.name] for each in fields(JudgeCost)})


async def _score(
    group: list[Trace], judge: ModelJudge, by: str, counts: Counter[str], all_of_them: int
) -> None:
    [trace] = group

    def note(name: str, value: float) -> None:
        counts[name.removeprefix("judge/")] += int(value)

    try:
        [score] = await judge([opening_of(trace)], [trajectory_of(trace).text], note)
    except RolloutRejectedError:
        if not counts["labelled"] and counts["unread"] + 1 == all_of_them:
            raise
        score = None
    if score is None or score == UNSCORED:
        counts["unread"] += 1
        return
    trace.add_label(label_about(trace, "judge", float(score), by))
    counts["labelled"] += 1


async def _compare(group: list[Trace], judge: ModelJudge, by: str, counts: Counter[str]) -> None:
    answers = sorted({trajectory_of(trace).text for trace in group})
    if len(answers) < 2:
        counts["disagreed"] += len(group)  # nothing to compare with
        return
    first = await _places(opening_of(group[0]), answers, judge, counts)
    second = await _places(opening_of(group[0]), answers[::-1], judge, counts)
    for trace in group:
        text = trajectory_of(trace).text
        if not first or not second:
            counts["unread"] += 1
        elif first[text] != second[text]:
            counts["disagreed"] += 1
        else:
            trace.add_label(label_about(trace, "judge", first[text], by))
            counts["labelled"] += 1


async def _places(
    prompt: Sequence[Mapping[str, object]],
    answers: Sequence[str],
    judge: ModelJudge,
    counts: Counter[str],
) -> dict[str, float]:
    """The score of each answer by one ranking; empty where the reply has none."""
    replies: Sequence[JudgeReply]
    replies, scores = await judge.rank(prompt, answers)
    for reply in replies:
        counts["requests"] += 1
        counts["prompt_tokens"] += reply.prompt_tokens
        counts["completion_tokens"] += reply.completion_tokens
    return present(dict(zip(answers, scores, strict=True)))

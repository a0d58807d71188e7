"""Two evaluations compared, problem by problem, as tables and sentences for people. No MLX.

compare          two lines of evaluations.jsonl → a Comparison for each environment
accuracy_table   means, their difference with its interval and p; verdict says it in a sentence
answers_table    the same prompts, answered before and after
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from mlx_parallm.rl_training.evaluation.evaluate import SOLVED
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import (
    difference,
    finite_or_none,
    gain_is_sure,
)
from mlx_parallm.system.terminal import beginning_of
from mlx_parallm.types import BETWEEN

SHOWN = 60  # characters of a text
Line = Mapping[str, Any]  # a line of evaluations.jsonl
BEFORE, MEAN_REWARD = "before", " (mean reward)"
SHOWN_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """One environment's held-out problems before and after.

    Args:
        rewards: (before, after) of each problem that was answered both times.
        examples: answers to some of them, as in a line of evaluations.jsonl.
        greedy: whether a reward is that of the greedy answer, and not the mean of sampled ones.
    """

    environment: str
    rewards: tuple[tuple[float, float], ...]
    examples: tuple[tuple[Line, Line], ...] = ()
    greedy: bool = True
    # what scored the answers and trained the policy, and is not a rule
    own_examiner: tuple[str, ...] = ()
    # (before, after) with the rows' answers, if the reward is its own examiner
    agreements: tuple[tuple[float, float], ...] = ()
    one_answer: tuple[str, int] | None = None  # afterwards, of nearly all prompts
    # its rewards are unknown: it was evaluated outside its run
    may_have_trained: bool = False
    # rewards of the problems that have one before or after alone
    once: tuple[tuple[float | None, float | None], ...] = ()

    def is_sure(self, *, higher: bool) -> bool:
        """Whether a significant difference stays one whatever the missing rewards would have
        been."""
        pairs = [*self.rewards, *self.once]
        return not self.once or gain_is_sure(pairs if higher else [pair[::-1] for pair in pairs])

    @property
    def unscored(self) -> str:
        """How many problems have a reward on one side alone; "": none."""
        few = f"{len(self.once)} of {len(self.rewards) + len(self.once)} problems were scored once"
        return few if self.once else ""

    @property
    def doubt(self) -> str | None:
        """Why a higher reward does not say that the answers are better; None: it does. One answer
        to all prompts is none, by any scorer, unless the rows want it. A reward that trained
        the policy is not an examiner of it, unless the rows' own answers agree."""
        if self.one_answer is not None:
            text, count = self.one_answer
            return f"{count} of {len(self.rewards)} prompts get one answer: {text[:SHOWN]!r}"
        if not self.is_sure(higher=True):
            return f"{self.unscored}: with theirs it may be no better"
        if not self.own_examiner:
            return None
        names = ", ".join(self.own_examiner)
        trained = "may have trained it" if self.may_have_trained else "trained it"
        if not self.agreements:
            return f"{names} {trained} and judges it: that alone does not say that it is better"
        before, after = ([pair[side] for pair in self.agreements] for side in (0, 1))
        change = difference(before, after)
        if change.significant and change.mean > 0:
            return None
        return (
            f"{names} {trained} and judges it, and the agreement with the rows' answers,"
            f" {_mean(before):.3f} -> {_mean(after):.3f}, has not risen by more than chance"
        )

    @property
    def measured(self) -> Iterator[tuple[str, list[float], list[float]]]:
        """Yield (name, before, after): accuracy where 1 is the full reward, and the mean reward
        if it differs."""
        before, after = ([pair[side] for pair in self.rewards] for side in (0, 1))
        every = [*before, *after]
        judged = self.greedy and max(every) <= 1 and (max(every) >= SOLVED or not any(every))
        if judged:
            right, now_right = (
                [float(reward >= SOLVED) for reward in side] for side in (before, after)
            )
            yield self.environment, right, now_right
        if not judged or any(0 != reward < SOLVED for reward in every):
            yield f"{self.environment}{MEAN_REWARD}", before, after


def compare(before: Line, after: Line) -> list[Comparison]:
    """Pair the answers of two evaluations; leave out a problem that has a score only once."""
    comparisons = []
    for name, now in after["environments"].items():
        then = before["environments"].get(name, {"problems": [], "examples": []})
        earlier, texts = (
            {p["key"]: p for p in then["problems"]},
            {e["key"]: e for e in then["examples"]},
        )
        pairs = [
            (reward_of(earlier[p["key"]]), reward_of(p))
            for p in now["problems"]
            if p["key"] in earlier
        ]
        pairs = [pair for pair in pairs if pair != (None, None)]
        rewards = [(old, new) for old, new in pairs if old is not None and new is not None]
        examples = [
            (texts[e["key"]], e) for e in now["examples"][:SHOWN_EXAMPLES] if e["key"] in texts
        ]
        if rewards:
            greedy = any(problem["greedy"] is not None for problem in now["problems"])
            agreed, agrees = (part.get("agreements", {}) for part in (then, now))
            both = tuple((agreed[key], agrees[key]) for key in agrees if key in agreed)
            examiner, same = tuple(now.get("own_examiner", ())), now.get("one_answer")
            comparisons.append(
                Comparison(
                    name,
                    tuple(rewards),
                    tuple(examples),
                    greedy,
                    examiner,
                    both,
                    (same[0], same[1]) if same else None,
                    bool(after.get("unknown_training")),
                    tuple(pair for pair in pairs if None in pair),
                )
            )
    return comparisons


def reward_of(problem: Line) -> float | None:
    """Return the reward of the greedy answer to a problem, else the mean of the sampled ones; None:
    nothing scored them."""
    sampled: Sequence[float | None] = problem["sampled"]
    if problem["greedy"] is not None:
        return finite_or_none(problem["greedy"])
    scored = [each for each in map(finite_or_none, sampled) if each is not None]
    return math.fsum(scored) / len(scored) if scored else None


def accuracy_table(
    comparisons: Sequence[Comparison],
    title: str = "answers to held-out problems",
    columns: tuple[str, str, str] = (BEFORE, "after", "change"),
) -> Table:
    """Held-out accuracy of each environment, before and after, with the 95% interval and p of
    the difference."""
    table = Table(title=Text(title), title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("held out of")
    for name in ("problems", *columns, "95% interval", "p"):
        table.add_column(name, justify="right")
    for name, before, after in (measure for row in comparisons for measure in row.measured):
        change = difference(before, after)
        mean = Text(f"{change.mean:+.3f}", style="green" if change.mean >= 0 else "red")
        interval = f"{change.low:+.3f} to {change.high:+.3f}" if change.enough else "too few"
        p = "–" if change.p is None else "<0.001" if change.p < 0.001 else f"{change.p:.3g}"
        means = (f"{_mean(values):.3f}" for values in (before, after))
        table.add_row(Text(name), str(len(before)), *means, mean, interval, p)
    return table


def verdict(comparisons: Sequence[Comparison], a: str, b: str) -> str:
    """Say in a sentence which of the differences are significant, by
    `Difference.significant`."""
    words = {
        "doubt": f"cannot tell whether {b} is better than {a}",
        "better": f"{b} is better than {a}",
        "worse": f"{b} is worse than {a}",
        "unsure": f"cannot tell whether {b} is worse than {a}",
        "unclear": "no significant difference",
    }
    names: dict[str, list[str]] = {kind: [] for kind in words}
    for row in comparisons:
        for name, before, after in row.measured:
            change = difference(before, after)
            if not change.significant:
                kind = "unclear"
            elif change.mean > 0:
                kind = "better" if row.doubt is None else "doubt"
            else:
                kind = "worse" if row.is_sure(higher=False) else "unsure"
            names[kind].append(name)
    sentences = [f"{words[kind]}: {', '.join(of)}" for kind, of in names.items() if of]
    if not sentences:
        return "cannot tell: no problem was scored both times"
    text = "; ".join(sentences)
    return f"{text} (at the 5% level each: of twenty such lines one differs by chance)"


def answers_table(comparisons: Sequence[Comparison], first: str = BEFORE) -> Table:
    """Return the first answers of each environment, not selected ones. `first`: when the earlier
    ones were given."""
    last = "after" if first == BEFORE else "at the end"
    table = Table(title=f"the same prompts, {first} and {last}", title_justify="left")
    for name in ("prompt", "expected", first, last):
        table.add_column(name, overflow="fold")
    for row in comparisons:
        for before, after in row.examples:
            prompt, expected = (
                Text(beginning_of(after[key] or "", SHOWN)) for key in ("prompt", "expected")
            )
            table.add_row(prompt, expected, _mark(before), _mark(after))
    return table


def plain_report(comparisons: Sequence[Comparison], first: str = BEFORE) -> str:
    """Return both tables as plain text, for logs and files."""
    lines = [] if first == BEFORE else [f"the same prompts, {first} -> at the end:"]
    for row in comparisons:
        for name, before, after in row.measured:
            change = difference(before, after)
            interval = "too few for an interval"
            if change.enough:
                interval = f"95% interval {change.low:+.3f} to {change.high:+.3f}"
            problems = "1 problem" if len(before) == 1 else f"{len(before)} problems"
            by = f"({change.mean:+.3f}, {interval}) on {problems}"
            lines.append(f"held out, {name}: {_mean(before):.3f} -> {_mean(after):.3f} {by}")
        lines += [f"{row.environment}: {row.doubt}"] if row.doubt else []
        for then, now in row.examples:
            prompt = (
                f"{beginning_of(now['prompt'], SHOWN)} "
                f" [{beginning_of(now['expected'] or '', SHOWN)}]"
            )
            lines.append(f"  {prompt}  {_plain(then)} -> {_plain(now)}")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    """Return the mean as `estimate` rounds it: a plain sum may be 0.9694999 if the other tables
    show 0.970."""
    return math.fsum(values) / len(values)


def _one_line(answer: Line) -> str:
    """Return an answer on one line; of several turns their beginning and the last one."""
    before, mark, last = (answer["error"] or answer["text"]).rpartition(BETWEEN[-1])
    return (
        f"{beginning_of(before + mark, SHOWN)} {beginning_of(last, SHOWN)}"
        if mark
        else beginning_of(last, SHOWN)
    )


def _mark(answer: Line) -> Text:
    style = "green" if answer["reward"] >= SOLVED else "red" if answer["reward"] == 0 else ""
    sign = {"right": "✓", "wrong": "✗"}.get(_verdict(answer), f"reward {_verdict(answer)}:")
    return Text(f"{sign} {_one_line(answer)}", style=style)


def _plain(answer: Line) -> str:
    return f"{_one_line(answer)} ({_verdict(answer)})"


def _verdict(answer: Line) -> str:
    """Return right, wrong, or the reward in between."""
    reward = answer["reward"]
    if reward in (0.0, 1.0) or SOLVED <= reward < 1:
        return "right" if reward else "wrong"
    return f"{reward:.3g}"

"""The verdicts on made-up runs whose truth is known: of a pipeline's answers, of two evaluations
(`compare`, `explain`), of the best checkpoint, and of held-out rows.

Each case writes the files of a run as a run does, with random sizes, texts and rewards.
MADE_UP_RUNS=10000 makes as many.
"""

import json
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlx_parallm.environments.dataset_rows import prompt_key
from mlx_parallm.rl_training.evaluation import comparison, pass_at_k_and_intervals
from mlx_parallm.rl_training.evaluation.evaluate import (
    UNJUDGED,
    EvaluatedAnswer,
    EvaluatedProblem,
    Evaluation,
)
from mlx_parallm.run_files.evaluations import EvaluationLog
from mlx_parallm.run_files.metrics import METRICS_FILE, complete
from mlx_parallm.run_files.samples import SAMPLES_FILE
from mlx_parallm.runs.explain import explain
from mlx_parallm.runs.run import open_run
from mlx_parallm.systems.pipeline.references import agrees
from mlx_parallm.systems.pipeline.verdict import (
    MEASURE,
    HeldOutAnswer,
    in_words,
    pair_answers,
    verdict_on,
    verdict_on_lines,
    verdict_on_rows,
)

CASES = int(os.environ.get("MADE_UP_RUNS", "200"))
WORDS = ("tea", "milk", "rain", "coal", "wolf", "iron", "lamp", "fish", "moss", "sand", "bell")
NAN = math.nan


@dataclass(frozen=True)
class Answer:
    text: str
    reward: float | None  # None: nothing scored it


@dataclass(frozen=True)
class Made:
    """Held-out answers before and after a training, and which verdicts on them are right."""

    right: list[str]
    before: list[Answer]
    after: list[Answer]
    may: set[str]
    own: bool = False  # the reward is no rule, and trained the policy
    references: bool = True
    rewards: tuple[float, float] = (0.2, 0.8)  # of the training's first and last steps


class Draw:
    """Random answers: right ones with a high reward, bad ones with a low one, and others."""

    def __init__(self, random: Random, count: int) -> None:
        self.random, self.count = random, count
        self.own = random.random() < 0.5
        exact = random.random() < 0.5  # a rule's rewards are 0 and 1, or in between
        self.noise, self.low, self.high = (0.0, 0.0, 1.0) if exact else (0.1, 0.2, 0.7)
        self.nothing = random.choice([NAN, None])
        numbers = range(count)
        self.right = [" ".join(random.sample(WORDS, 3)) + f" {n}" for n in numbers]
        self.other = [f"best {random.choice('vwxyz')} answer of all {n * 7}" for n in numbers]
        wrong = [f"i can not say {n} {random.choice('abcde')}" for n in numbers]
        self.bad, self.good = self.scored(wrong, self.low), self.scored(self.right, self.high)

    def scored(self, texts: list[str], reward: float) -> list[Answer]:
        return [Answer(text, reward + self.noise * (self.random.random() - 0.5)) for text in texts]

    def unscored(self, answers: list[Answer], kept: Collection[int] = ()) -> list[Answer]:
        return [
            each if n in kept else replace(each, reward=self.nothing)
            for n, each in enumerate(answers)
        ]

    def mixed(self, which: Callable[[int], bool]) -> list[Answer]:
        return [(self.good if which(n) else self.bad)[n] for n in range(self.count)]

    def run(self, before: list[Answer], after: list[Answer], *may: str, **more: Any) -> Made:
        return Made(self.right, before, after, set(may), **({"own": self.own} | more))


def one_answer(d: Draw) -> Made:
    same = d.scored([d.random.choice(WORDS)] * d.count, d.high)
    before = d.scored(["no"] * d.count, d.low) if d.random.random() < 0.5 else d.bad
    references = d.random.random() < 0.5
    # one word for all may agree less with the good answers than the words before
    return d.run(before, same, "not better", "cannot tell", "worse", references=references)


def nothing_scored(d: Draw) -> Made:
    before, after = d.bad, d.unscored(d.good)
    if d.random.random() < 0.5:
        before, after = d.unscored(d.bad), d.good
    return d.run(before, after, "cannot tell", own=False)


def most_not_scored(d: Draw) -> Made:
    """Those that have a score are better, or worse; the others were the opposite before."""
    kept = d.random.sample(range(d.count), max(6, d.count // 3))
    up = d.random.random() < 0.5
    before = d.mixed(lambda n: (n in kept) != up)
    after = d.unscored(d.good if up else d.bad, kept)
    return d.run(before, after, "cannot tell", own=False)


def equal_by_chance(d: Draw) -> Made:
    """As many gained as lost, of fours."""
    return d.run(d.mixed(lambda n: n % 4 < 2), d.mixed(lambda n: n % 2 == 0), "not better")


KINDS: dict[str, Callable[[Draw], Made]] = {
    "better": lambda d: d.run(d.bad, d.good, "better"),
    "few": lambda d: d.run(d.bad, d.good, "cannot tell"),
    "worse": lambda d: d.run(d.good, d.bad, "worse"),
    "inside better, outside worse": lambda d: d.run(d.good, d.bad, "worse", rewards=(0.1, 0.9)),
    # the reward likes answers that are no better
    "hacked": lambda d: d.run(d.bad, d.scored(d.other, d.high), "not better", "worse", own=True),
    "hacked from right answers": lambda d: d.run(
        d.scored(d.right, d.low), d.scored(d.other, d.high), "worse", own=True
    ),
    "one answer": one_answer,
    "judge alone": lambda d: d.run(d.bad, d.good, "cannot tell", own=True, references=False),
    "equal": lambda d: d.run(d.bad, d.bad, "not better"),
    "equal by chance": equal_by_chance,
    "nothing scored": nothing_scored,
    "most not scored": most_not_scored,
    "one not scored": lambda d: d.run(
        d.bad, d.unscored(d.good, range(1, d.count)), "better", own=False
    ),
}


def made(kind: str, case: int) -> Made:
    random = Random(f"{kind} {case}")
    return KINDS[kind](
        Draw(random, random.randint(1, 5) if kind == "few" else 4 * random.randint(4, 10))
    )


def prompt(number: int) -> str:
    return f"question {number}?"


def lines_of_answers(run: Made, side: int) -> str:
    """Return the samples.jsonl of an evaluation as the pipeline has it."""
    lines = []
    for number, answer in enumerate((run.before, run.after)[side]):
        right = run.right[number]
        agreement = {"rewards/agreement": agrees(answer.text, [right])} if run.references else {}
        line = {
            "which": "greedy",
            "key": f"held_out:{prompt_key(prompt(number))}",
            "prompt": prompt(number),
            "completion": answer.text,
            "reward": answer.reward or 0.0,
            "error": UNJUDGED if answer.reward is None else None,
            "scores": agreement,
        }
        lines.append(json.dumps(line))
    return "\n".join(lines)


def evaluation(run: Made, side: int, step: int) -> dict[str, Any]:
    """Return a line of evaluations.jsonl."""
    problems = []
    for number, answer in enumerate((run.before, run.after)[side]):
        right = run.right[number]
        given = EvaluatedAnswer(answer.text, 0.0, error=UNJUDGED)
        if answer.reward is not None and math.isfinite(answer.reward):
            given = EvaluatedAnswer(answer.text, answer.reward)
        wanted = right if run.references else None
        problems.append(EvaluatedProblem(f"k{number}", prompt(number), wanted, given, ()))
    made = Evaluation("held", tuple(problems))
    part = made.to_json(["judge"] if run.own else [])
    numbers = {"step": step, "version": step, "seconds": 1.0, "score": made.score}
    return json.loads(json.dumps(numbers | {"environments": {"held": part}}))


def metrics(run: Made) -> str:
    first, last = run.rewards
    values = [first if step < 15 else last for step in range(30)]
    return "".join(
        json.dumps(complete({"step": step, "reward_mean": value, "reward_std": 0.3})) + "\n"
        for step, value in enumerate(values, 1)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdicts_on_made_up_runs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_at_k_and_intervals, "RESAMPLES", 1000)
    for case in range(-(-CASES // len(KINDS))):
        run = made(kind, case)
        folder = tmp_path / str(case)
        for side, name in enumerate(("before", "after")):
            (folder / name).mkdir(parents=True)
            (folder / name / SAMPLES_FILE).write_text(lines_of_answers(run, side))
        problems = [
            {"prompt": prompt(number)} | ({"references": [right]} if run.references else {})
            for number, right in enumerate(run.right)
        ]
        answers = pair_answers(problems, folder / "before", folder / "after")
        assert len(answers) == len(run.right)
        result = verdict_on(answers, own_examiner=run.own)
        assert result["verdict"] in run.may, (kind, case, in_words(result))
        assert result["reasons"] or result["verdict"] in ("better", "worse")
        lines = [evaluation(run, side, 30 * side) for side in (0, 1)]
        said = comparison.verdict(comparison.compare(*lines), "A", "B")
        sentences = said.split(" (at the 5%")[0].split("; ")
        for word in ("better", "worse"):
            claimed = any(part.startswith(f"B is {word}") for part in sentences)
            assert claimed <= (word in run.may), (kind, case, said)
            assert claimed or run.may != {word} or run.own, (kind, case, said)
        (folder / METRICS_FILE).write_text(metrics(run))
        log = EvaluationLog(folder, "eval/score")
        for line in lines:
            log.add(line)
        best = log.best()
        if kind in ("better", "worse", "inside better, outside worse"):
            assert best is not None and best.step == (30 if kind == "better" else 0)
        if kind == "most not scored":
            assert best is not None and best.step == 0
        explained = explain(open_run(folder))
        for change in explained.heldout:
            assert change.risen <= ("better" in run.may), (kind, case, str(change))
            assert change.fallen <= ("worse" in run.may), (kind, case, str(change))
        if kind == "inside better, outside worse":
            assert any("believe the held-out score" in note for note in explained.notes)


def test_chance_is_seldom_called_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal models, with few prompts or rows: of 100 some 5 differ, in both directions."""
    monkeypatch.setattr(pass_at_k_and_intervals, "RESAMPLES", 1000)
    random, told = Random(0), {"answers": 0, "rows": 0}
    for _ in range(CASES):
        rewards = [(random.gauss(0, 1), random.gauss(0, 1)) for _ in range(random.randint(6, 12))]
        answers = [HeldOutAnswer(f"{n}", f"a {n}", f"b {n}", r) for n, r in enumerate(rewards)]
        result = verdict_on(answers, own_examiner=False)
        told["answers"] += result["verdict"] in ("better", "worse")
        rows, share = random.randint(6, 30), random.choice([0.5, 0.7, 0.9])
        before, after = (sum(random.random() < share for _ in range(rows)) / rows for _ in "ab")
        told["rows"] += verdict_on_rows("", before, after, rows)["verdict"] in ("better", "worse")
    assert all(count <= 0.08 * CASES for count in told.values()), told


@pytest.mark.parametrize("method", sorted(MEASURE))
@pytest.mark.parametrize("nothing", [NAN, math.inf, None])
@pytest.mark.parametrize("where", ["eval", "eval_before"])
@pytest.mark.parametrize("what", ["measure", "loss", "logps/chosen"])
def test_held_out_rows_without_a_number_tell_nothing(
    method: str, nothing: float | None, where: str, what: str
) -> None:
    names = {MEASURE[method]: (0.5, 0.9), "loss": (0.7, 0.2), "logps/chosen": (-2.0, -1.0)}
    lines: list[dict[str, float | None]] = [
        {f"eval_before/{name}": pair[0] for name, pair in names.items()},
        {f"eval/{name}": pair[1] for name, pair in names.items()},
    ]
    assert verdict_on_lines(method, lines, 30)["verdict"] == "better"
    name = MEASURE[method] if what == "measure" else what
    lines[where == "eval"][f"{where}/{name}"] = nothing
    result = verdict_on_lines(method, lines, 30)
    assert result["verdict"] == "cannot tell" and "not a finite number" in in_words(result)

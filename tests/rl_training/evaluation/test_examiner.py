"""Nothing is its own examiner: learned rewards, reward models and judges that trained the policy."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.rl_training.evaluation.comparison import compare, plain_report, verdict
from mlx_parallm.rl_training.evaluation.evaluate import (
    EvaluatedAnswer,
    EvaluatedProblem,
    Evaluation,
)
from mlx_parallm.rl_training.evaluation.examiner import one_answer, own_examiners, text_agreement
from mlx_parallm.rl_training.monitor.evidence import Evidence
from mlx_parallm.rl_training.monitor.part_signs import unlike_the_labels
from mlx_parallm.run_files.evaluations import EvaluationLog
from mlx_parallm.runs.explain import held_out, two_curves

PROMPTS = 12


def line(step: int, texts: list[str], reward: float, *, own: bool, answers: bool) -> dict[str, Any]:
    problems = tuple(
        EvaluatedProblem(
            f"k{number}",
            "?",
            f"answer {number}" if answers else None,
            EvaluatedAnswer(text, reward + number / 1000),
            (),
        )
        for number, text in enumerate(texts)
    )
    evaluation = Evaluation("held", problems)
    part = evaluation.to_json() | (evaluation.examined(["learned"]) if own else {})
    score = evaluation.score
    return {
        "step": step,
        "version": step,
        "seconds": 1.0,
        "score": score,
        "environments": {"held": part},
    }


FIRST = [f"I do not know {n}" for n in range(PROMPTS)]
RIGHT = [f"Answer {n}" for n in range(PROMPTS)]
ONE = ["2"] * PROMPTS
AGENTS = [f"call {letter}\n⟦a result,\nof two lines⟧\nDone." for letter in "abcdefghijkl"]
SAME_TURNS = [f"call\n⟦result {letter}⟧\nDone." for letter in "abcdefghijkl"]
OTHER = [f"words {letter}" for letter in "abcdefghijkl"]


@pytest.mark.parametrize(
    ("texts", "own", "answers", "says"),
    [
        (RIGHT, False, False, None),  # a rule
        (AGENTS, False, False, None),  # they did different things
        (SAME_TURNS, False, False, "12 of 12 prompts get one answer: 'call Done.'"),
        (ONE, False, False, "12 of 12 prompts get one answer: '2'"),  # also of a rule
        (RIGHT, True, True, None),  # the rows' answers agree
        (RIGHT, True, False, "learned trained it and judges it"),
        (OTHER, True, True, "has not risen by more than chance"),
        (ONE, True, True, "12 of 12 prompts get one answer: '2'"),
        (ONE, True, False, "12 of 12 prompts get one answer: '2'"),
    ],
)
def test_a_higher_number_is_better_only_where_somebody_else_says_so(
    tmp_path: Path, texts: list[str], own: bool, answers: bool, says: str | None
) -> None:
    """In the report, in `compare`, in `explain`, and for the best checkpoint."""
    lines = [
        line(0, FIRST, 0.3, own=own, answers=answers),
        line(9, texts, 0.8, own=own, answers=answers),
    ]
    [row] = comparisons = compare(*lines)
    [change] = held_out(lines)
    said, report = verdict(comparisons, "A", "B"), plain_report(comparisons)
    if says is None:
        assert row.doubt is None and change.risen
        assert "B is better than A" in said
    else:
        assert says in (row.doubt or "") and says in report and says in str(change)
        assert not change.risen and "better" in said and said.startswith("cannot tell whether B")
    log = EvaluationLog(tmp_path, "eval/score")
    for each in json.loads(json.dumps(lines)):
        log.add(each)
    best = log.best()
    collapsed = own and texts is ONE
    assert best is not None and best.step == (0 if collapsed else 9)
    assert (log.score(9, 9) is None) == collapsed


def test_what_is_its_own_examiner() -> None:
    def entry(*rewards: str) -> EnvironmentConfig:
        return EnvironmentConfig(kind="dataset", name="x", data="x", rewards=rewards)

    judge, learned = "builtin:judge", "builtin:learned"
    for trained, judged, own in (
        ((learned,), (learned,), ("learned",)),
        ((judge, "builtin:math"), ("builtin:math", judge), ("judge",)),
        (("builtin:math",), (judge,), ()),  # it judges, and taught nothing
        (("builtin:math",), ("builtin:math",), ()),
    ):
        assert own_examiners([entry(*trained)], [entry(*judged)]) == own


def test_one_answer_and_agreement() -> None:
    assert one_answer(["a"] * 5) is None and one_answer(["a"] * 8 + ["b"] * 2) == ("a", 8)
    assert one_answer(["a"] * 7 + ["b"] * 3) is None
    assert text_agreement("The answer is 4", "4") == pytest.approx(0.25)
    assert (text_agreement("A b", "a B"), text_agreement("b a", "a b")) == (
        1.0,
        pytest.approx(2 / 3),
    )
    assert (text_agreement("", ""), text_agreement("", "a")) == (1.0, 0.0)


def test_answers_that_are_like_none_of_the_labelled_ones_are_a_sign() -> None:
    def lines(share: float) -> list[dict[str, Any]]:
        return [{"step": n, "metrics/learned/unknown/mean": share} for n in range(1, 6)]

    sign = unlike_the_labels(Evidence(lines(0.82), lines(0.11)))
    assert sign is not None and sign.words.startswith("unlike the labels: 82% of the answers")
    assert unlike_the_labels(Evidence(lines(0.82), lines(0.7))) is None
    assert unlike_the_labels(Evidence(lines(0.4), lines(0.0))) is None
    assert list(two_curves(Evidence([{"step": 1}], []), [])) == []

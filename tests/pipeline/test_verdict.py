"""The pipeline's verdict, on answers made by hand; and the references and tools of traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.systems.pipeline.references import (
    agreement,
    agrees,
    recorded_calls,
    references_of_prompts,
)
from mlx_parallm.systems.pipeline.stages import has_risen, still_learns
from mlx_parallm.systems.pipeline.verdict import (
    HeldOutAnswer,
    in_words,
    verdict_on,
    verdict_on_rows,
)
from mlx_parallm.systems.traces.builders import prompt_key
from mlx_parallm.systems.traces.trace import new_trace
from mlx_parallm.types import Rollout, Trajectory

RIGHT = [f"{letter}{letter}{letter}" for letter in "abcdefghijklm"]
HACK = ["2"] * 13
STRANGE = [f"zz{n} yy{n}" for n in range(13)]


def held_out(
    after: list[str],
    before: list[str] | None = None,
    *,
    references: bool = True,
    rewards: tuple[float, float] = (0.303, 0.833),
) -> list[HeldOutAnswer]:
    before = before or [f"no {n}" for n in range(len(after))]
    answers = []
    for number, (then, now) in enumerate(zip(before, after, strict=True)):
        wanted = [RIGHT[number]] if references else []
        agreements = (agrees(then, wanted), agrees(now, wanted)) if wanted else (None, None)
        answers.append(
            HeldOutAnswer(
                "?",
                then,
                now,
                (rewards[0] + number / 1e4, rewards[1] + number / 1e4),
                agreements,
                wanted,
            )
        )
    return answers


@pytest.mark.parametrize(
    ("answers", "own", "verdict", "why"),
    [
        (held_out(RIGHT), True, "better", ""),
        # the reward went up, and every answer became "2"
        (held_out(HACK), True, "not better", "may be chance"),
        (held_out(RIGHT, references=False), True, "cannot tell", "no held-out prompt has a good"),
        (held_out(RIGHT[:1]), True, "cannot tell", "1 held-out prompts are too few"),
        (held_out(HACK, RIGHT), True, "worse", ""),
        # a rule judges
        (held_out(RIGHT, references=False), False, "better", ""),
        (held_out(RIGHT[:5]), False, "cannot tell", "5 held-out prompts are too few"),
        (held_out(HACK), False, "not better", "13 of 13 prompts get one answer: '2'"),
        (held_out(RIGHT, rewards=(0.8, 0.3)), False, "worse", ""),
        (held_out(RIGHT, rewards=(0.8, 0.8)), False, "not better", "may be chance"),
        # right for others as often as for their own: every answer names all
        (
            held_out([f"{n} {' '.join(RIGHT)}" for n in range(13)]),
            True,
            "not better",
            "to other pr",
        ),
    ],
)
def test_the_verdict(answers: list[HeldOutAnswer], own: bool, verdict: str, why: str) -> None:
    result = verdict_on(answers, own_examiner=own)
    assert result["verdict"] == verdict and why in "; ".join(result["reasons"])
    assert (result["better"], result["worse"]) == (verdict == "better", verdict == "worse")
    assert verdict in in_words(result) and why in in_words(result)
    if own and answers[0].references:
        assert result["reward"]["after"] > result["reward"]["before"]
        assert "agreement" in result["what"]


def test_answers_unlike_anything_the_reward_knows_are_not_better() -> None:
    answers = held_out(
        [f"{right} {strange}" for right, strange in zip(RIGHT, STRANGE, strict=True)]
    )
    known = verdict_on(answers, own_examiner=True, is_known=lambda text: True)
    assert known["verdict"] == "better"
    result = verdict_on(answers, own_examiner=True, is_known=lambda text: "yy" not in text)
    assert result["verdict"] == "not better" and "100% of the answers are like" in str(result)


@pytest.mark.parametrize(
    ("values", "rows", "lower", "verdict"),
    [
        ((0.5, 0.9), 20, False, "better"),
        ((0.5, 0.9), 20, True, "worse"),
        ((0.5, 0.9), 5, False, "cannot tell"),
        ((0.5, 0.5), 20, False, "not better"),
        ((None, None), 0, False, "cannot tell"),
    ],
)
def test_the_verdict_on_rows(
    values: tuple[float | None, float | None], rows: int, lower: bool, verdict: str
) -> None:
    result = verdict_on_rows("loss", *values, rows, lower_is_better=lower)
    assert result["verdict"] == verdict and result["better"] == (verdict == "better")


def test_references_and_recorded_calls_of_traces(tmp_path: Path) -> None:
    """Good runs' last answers, those that end with a call by their calls; what every call gave."""
    tool = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "price", "arguments": json.dumps({"thing": "tea"})},
    }
    asked = [
        {"role": "user", "content": "Tea?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    runs = [
        ([*asked, {"role": "assistant", "content": " 4 "}], 1.0),
        ([asked[0], {"role": "assistant", "content": "9"}], 0.0),
        ([{"role": "user", "content": "Only call."}, *asked[1:]], 1.0),
        ([{"role": "user", "content": "Unscored."}, *asked[1:]], None),
    ]
    traces = []
    for number, (messages, score) in enumerate(runs):
        trace = new_trace(messages, session_id=f"{number}", source="test", tools=[tool])
        if score is not None:
            trace.note(rewards={"reward": {"score": score, "weight": 1.0}})
        traces.append(trace)
    found = references_of_prompts(traces, 0.5)
    assert found == {
        prompt_key(traces[0]): ["4"],
        prompt_key(traces[2]): [{"calls": [["price", {"thing": "tea"}]]}],
    }
    recorded = recorded_calls(traces)
    assert recorded is not None and [each["name"] for each in recorded["definitions"]] == ["price"]
    answered = [
        (run["prompt"], [call["text"] for call in run["calls"]]) for run in recorded["runs"]
    ]
    assert answered == [("Tea?", ["4"]), ("Only call.", ["4"]), ("Unscored.", ["4"])]
    assert recorded_calls(traces[1:1]) is None
    rollout = Rollout((1, 2), (0, 1), (0.0, -1.0), (0, 0), 1.0, {})
    made = [{"name": "price", "arguments": {"thing": "tea"}}]
    played = [Trajectory("4", rollout), Trajectory("", rollout, metadata={"tool_calls": made})]
    played += [Trajectory("", rollout), Trajectory("x", rollout)]
    wanted = [["4"], found[prompt_key(traces[2])], found[prompt_key(traces[2])], None]
    assert agreement(played, wanted) == [1.0, 1.0, 0.0, None]


@pytest.mark.parametrize(
    ("losses", "tokens", "goes_on"),
    [
        ([0.50, 0.40, 0.34], 60, True),  # calls of tools after one round
        ([0.50, 0.48, 0.46], 60, False),  # it does not fall: nothing to learn, or a long text
        ([0.20, 0.05, 0.01], 4, False),  # short answers are written already
        ([0.50, 0.30], 60, False),  # of few rows none are held out
    ],
)
def test_good_runs_are_learned_as_long_as_it_helps(
    losses: list[float], tokens: int, goes_on: bool
) -> None:
    lines = [{"eval/loss": loss, "completion_tokens_mean": tokens} for loss in losses]
    assert still_learns(lines) == goes_on


def test_the_policy_before_the_rewards_is_kept_where_they_do_not_rise() -> None:
    def lines(*rewards: float | None) -> list[dict[str, Any]]:
        return [{"reward_mean": reward} for reward in rewards]

    assert has_risen(lines(0.3, 0.3, 0.2, 0.5, 0.5)) and has_risen(lines(None, None))
    assert not has_risen(lines(1.46, 1.51, 0.7, 0.4, 0.4)) and not has_risen(lines(1, 1, 1))

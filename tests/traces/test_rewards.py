"""Rewards over traces: the specification's formulas with worked numbers; the labels that they
make."""

from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.systems.traces.rewards import (
    RewardEngine,
    add_reward_labels,
    fit_learned,
    trajectory_of,
)
from mlx_parallm.systems.traces.trace import ToolCallTrace, Trace, new_trace, trace_of_events
from tests.traces.messages import assistant, user


def run_of(calls: list[bool], answer: str, **execution: Any) -> Trace:
    events = [
        ToolCallTrace("search", {"q": "x"}, "found" if ok else "error: no", ok) for ok in calls
    ]
    view = trace_of_events("s", "Find x", events, answer, timestamp="t", source="test", **execution)
    return view


def test_a_trace_becomes_the_episode_that_rewards_see() -> None:
    trace = run_of(
        [True, False], "It is 4", tasks_completed=["a"], tasks_failed=["b"], total_tokens_out=30
    )
    seen = trajectory_of(trace)
    assert (seen.text, seen.prompt, seen.step_count) == ("It is 4", "Find x", 3)
    assert [(call["name"], call["ok"]) for call in seen.tool_calls] == [
        ("search", True),
        ("search", False),
    ]
    assert seen.metadata["tasks"] == {"created": 2, "completed": 1, "failed": 1}
    assert seen.rollout.sampled_tokens == 30


def test_parts_and_their_weighted_mean() -> None:
    engine = RewardEngine()
    trace = run_of(
        [True, False],
        "```python\nassert 1 + 1 == 2\n```",
        total_tokens_out=500,
        tasks_completed=["a"],
    )
    parts = engine.compute_all(trace)
    assert parts["code"] == 1.0 and parts["syntax"] == 1.0 and parts["format"] == 1.0
    assert parts["tool_success"] == pytest.approx(0.5) and parts[
        "task_completion"
    ] == pytest.approx(1.0)
    efficiency = 0.4 * (1 - 500 / 2000) + 0.3 * (1 - 2 / 10) + 0.3 * (1 - 3 / 15)
    assert parts["efficiency"] == pytest.approx(efficiency)
    # weights: code 2, syntax 1, tool 2, task 1.5, efficiency 0.5, format 1
    wanted = (2 + 1 + 2 * 0.5 + 1.5 + 0.5 * efficiency + 1) / 8
    assert engine.compute_combined(trace) == pytest.approx(wanted)
    assert engine.get_binary_label(trace) and not engine.get_binary_label(trace, 0.99)
    assert "tool_success 0.50" in engine.summary(trace.model_copy())


def test_code_is_really_executed() -> None:
    engine = RewardEngine(["code"])
    assert engine.compute_combined(run_of([], "```python\nraise SystemExit(3)\n```")) == 0.0
    nothing = run_of([], "no code")  # no part applies
    assert engine.compute_combined(nothing) is None and engine.get_binary_label(nothing) is None
    failing, running = (run_of([], f"```python\nraise SystemExit({n})\n```") for n in (3, 0))
    assert engine.compute_for_group([failing, nothing, running]) == [-1.0, None, 1.0]


def test_a_group_is_normalised_by_the_population() -> None:
    engine = RewardEngine(["tool_success"])
    group = [run_of([True, True], "a"), run_of([True, False], "b"), run_of([False, False], "c")]
    # of 1, 0.5, 0
    assert engine.compute_for_group(group) == pytest.approx([1.224745, 0.0, -1.224745], abs=1e-6)
    assert engine.compute_for_group(group[:1] * 2) == [0.0, 0.0]


def test_a_weight_of_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="a weight for 'speed'"):
        RewardEngine(["format"], weights={"speed": 1.0})


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), None, "1"])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight of 'format'"):
        RewardEngine(["format"], weights={"format": weight})


@pytest.mark.parametrize("part", [len, lambda trace: 1.0, object(), type("Own", (), {})])
def test_a_part_that_computes_nothing_is_refused(part: Any) -> None:
    with pytest.raises(ConfigError, match="is no object with compute"):
        RewardEngine([part])


def test_a_reward_function_labels(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "def right(prompts, completions, answer=None, **columns):\n"
        "    assert prompts[0][-1]['role'] == 'user'\n"
        "    return [None if a is None else float(c[0]['content'] == a) for c, a in"
        " zip(completions, answer)]\n"
    )
    traces = []
    for number, columns in enumerate(({"answer": "4"}, {"answer": "5"}, {"answer": None})):
        messages = [user("2+2"), assistant("4")]
        traces.append(new_trace(messages, session_id=str(number), source="test", columns=columns))
    assert add_reward_labels(traces, [f"python:{tmp_path / 'score.py'}:right"]) == (2, 1)
    assert [[label.value for label in trace.labels] for trace in traces] == [[1.0], [0.0], []]
    assert traces[0].labels[0].by == "verifier:right" and traces[0].labels[0].prompt_hash


def test_a_reward_is_learned_from_scores() -> None:
    traces = []
    for number in range(40):
        good = number % 2 == 0
        trace = run_of([good], f"{'done' if good else 'sorry'} {number}")
        trace.note(rewards={"reward": {"score": float(good), "weight": 1.0}})
        traces.append(trace)
    learned = fit_learned(traces[:30])
    assert (learned.positive, learned.negative) == (15, 15)
    scores = [learned.score(trajectory_of(trace)) for trace in traces[30:]]
    assert min(scores[::2]) > 0.8 and max(scores[1::2]) < 0.2
    with pytest.raises(ConfigError, match="it takes 10 of each"):
        fit_learned(traces[:10])

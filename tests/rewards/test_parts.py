"""The built-in parts, by numbers worked by hand, called as a configuration calls them."""

import importlib.util
import json

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.base import score_group
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.rewards.part_tools import to_binary
from mlx_parallm.rewards.parts import PARTS
from mlx_parallm.system import patterns
from mlx_parallm.types import Rollout, Trajectory

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is an extra"
)


def trajectory(text="", tokens=1, steps=1, **metadata):
    rollout = Rollout((5,) * tokens, (1,) * tokens, (0.0,) * tokens, (0,) * tokens, 1.0, {})
    return Trajectory(text, rollout, step_count=steps, metadata=metadata)


async def score(name, trajectories, options=None, prompt="asked", **row):
    """Scores of one part for a group, through the resolution of `rewards = ["builtin:…"]`; None:
    it did not judge."""
    made = RewardFunctions(
        [f"builtin:{name}"], (), columns=tuple(row), key="rewards", options={name: options or {}}
    )
    parts, *_ = await made.parts(prompt, row, trajectories, TrainingProgress)
    return [entry[name] for entry in parts]


async def text_scores(name, *texts, options=None, **row):
    return await score(name, [trajectory(text) for text in texts], options, **row)


def test_to_binary():
    assert to_binary([0.0, 0.49, 0.5, 1.0, None]) == [0.0, 0.0, 1.0, 1.0, None]
    assert to_binary([0.7, None], None) == [0.7, None]


async def test_weights_of_parts_make_the_sum():
    made = RewardFunctions(
        ["builtin:answer_match", "builtin:efficiency"], (), columns=["answer"], key="rewards"
    )
    group = [trajectory("4", tokens=500, steps=3), trajectory("5", tokens=500, steps=3)]
    rollouts = await score_group(made.for_row("2+2", {"answer": "4"}, TrainingProgress), group)
    efficiency = (0.4 * 0.75 + 0.3 * 0.8) / 0.7
    assert [rollout.reward for rollout in rollouts] == pytest.approx(
        [1 + 0.5 * efficiency, 0.5 * efficiency]
    )


@pytest.mark.parametrize(
    ("options", "texts", "expected"),
    [
        ({}, ["Paris", " paris.\n", '"Paris"', "New Paris", ""], [1, 1, 1, 0, 0]),
        ({"exact": True}, ["Paris", " Paris\n", "paris", "Paris."], [1, 1, 0, 0]),
        (
            {"pattern": r"#### *(.*?)(?:\n|$)"},
            ["so\n#### paris\n", "#### Rome\n#### Paris", "Paris"],
            [1, 1, 0],
        ),
    ],
)
async def test_answer_match(options, texts, expected):
    assert await text_scores("answer_match", *texts, options=options, answer="Paris") == expected


async def test_answer_match_takes_another_column_and_leaves_empty_rows_out():
    assert await text_scores("answer_match", "4", options={"column": "solution"}, solution=4) == [1]
    assert await text_scores(
        "answer_match", "4", options={"column": "solution"}, solution=None
    ) == [None]
    with pytest.raises(ConfigError, match="'solution'"):
        await text_scores("answer_match", "4", options={"column": "solution"}, answer="4")


async def test_regex():
    assert await text_scores("regex", "a 12 b", "none", options={"pattern": r"\d+"}) == [1, 0]
    assert await text_scores("regex", "12", "a 12", options={"pattern": r"\d+", "whole": True}) == [
        1,
        0,
    ]
    with pytest.raises(ConfigError, match="pattern"):
        await text_scores("regex", "x", options={"pattern": "("})


async def test_json_that_is_valid():
    fenced = 'So:\n```json\n{"a": 1}\n```\n'
    assert await text_scores("json", '{"a": [1]}', "{a: 1}", fenced, "NaN", "[" * 5000) == [
        1,
        0,
        1,
        0,
        0,
    ]


async def test_an_answer_on_which_a_pattern_takes_for_ever_is_not_scored(monkeypatch):
    """It held the whole process up; it is neither right nor wrong, and the others are scored."""
    monkeypatch.setattr(patterns, "SEARCH_S", 0.05)
    slow, fast = "ab" * 2000 + "c", "abcc"
    for name, options in {
        "regex": {"pattern": "^(?:a|b|ab)*[^ab]{2}$"},
        "answer_match": {"pattern": "^(?:a|b|ab)*([^ab]{2})$"},
    }.items():
        assert await text_scores(name, slow, fast, options=options, answer="cc") == [None, 1]
    schema = {"pattern": r"^(?=a)(a|a)*\1c$"}
    assert await text_scores("json", f'"{"a" * 99}"', '"aac"', options={"schema": schema}) == [0, 1]


async def test_json_that_fits_a_schema(tmp_path):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0}},
        "required": ["age"],
    }
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for given in (schema, str(file)):
        assert await text_scores(
            "json", '{"age": 3}', '{"age": -1}', "{}", options={"schema": given}
        ) == [1, 0, 0]
    with pytest.raises(ConfigError, match="schema"):
        await text_scores("json", "1", options={"schema": {"type": "nothing"}})
    with pytest.raises(ConfigError, match="missing"):
        await text_scores("json", "1", options={"schema": str(tmp_path / "missing.json")})


async def test_format():
    tags = {"tags": ["think", "answer"]}
    right = "<think>\nwell\n</think>\n<answer>4</answer>\n"
    wrong = ["<answer>4</answer>", "x" + right, right + right, "<think>a<answer>4</answer></think>"]
    assert await text_scores("format", right, *wrong, options=tags) == [1, 0, 0, 0, 0]
    # Without tags each one costs a tenth, down to a half; a comparison is none.
    plain = ["no tag", "a < b > c", "<b>x</b>", "<br/><p class='x'>", "<a>" * 9]
    assert await text_scores("format", *plain) == pytest.approx([1, 1, 0.8, 0.8, 0.5])
    assert await text_scores("format", *plain, options={"threshold": 0.9}) == [1, 1, 0, 0, 0]


async def test_length_and_overlong():
    group = [trajectory(tokens=n) for n in (1, 5, 10, 15, 25)]
    assert await score("length", group, {"target": 10}) == pytest.approx([0.1, 0.5, 1, 0.5, 0])
    # DAPO with L_max 20 and L_cache 8: 0 up to 12 tokens, -3/8 at 15, -1 from 20 on.
    assert await score("overlong", group, {"length": 20, "buffer": 8}) == pytest.approx(
        [0, 0, 0, -0.375, -1]
    )
    for options in ({"length": 5, "buffer": 8}, {"length": 5, "buffer": 0}):
        with pytest.raises(ConfigError, match="buffer"):
            await score("overlong", group, options)


async def test_tool_success():
    good, bad = {"name": "search", "ok": True}, {"name": "shell", "ok": False}
    group = [trajectory(tool_calls=calls) for calls in ([good, bad], [good], [bad, bad], [])]
    assert await score("tool_success", group) == [0.5, 1, 0, None]
    # With the tools that the task is for: + 0.1 · 1/2, at most 1; none called: 0.3.
    assert await score("tool_success", group, tools=["search"]) == pytest.approx([0.55, 1, 0, 0.3])


async def test_task_completion():
    tasks = [
        {"created": 4, "completed": 3, "failed": 1},
        {"created": 2, "failed": 2},
        {"created": 0},
    ]
    group = [*(trajectory(tasks=entry) for entry in tasks), trajectory()]
    assert await score("task_completion", group) == pytest.approx([0.75 - 0.05, 0, None, None])


async def test_efficiency():
    group = [
        trajectory(tokens=500, steps=3, tool_calls=[{"name": "x"}] * 4),
        trajectory(tokens=500, steps=3),
        trajectory(tokens=4000, steps=30, tool_calls=[{"name": "x"}] * 20),
    ]
    expected = [0.4 * 0.75 + 0.3 * 0.6 + 0.3 * 0.8, (0.4 * 0.75 + 0.3 * 0.8) / 0.7, 0]
    assert await score("efficiency", group) == pytest.approx(expected)
    # 1000 tokens, 5 calls, 6 steps as the budgets: a half, a fifth and a half are left.
    options = {"tokens": 1000, "calls": 5, "steps": 6}
    assert (await score("efficiency", group[:1], options))[0] == pytest.approx(
        0.4 * 0.5 + 0.3 * 0.2 + 0.3 * 0.5
    )


async def test_syntax():
    texts = [
        "```python\nx = 1\n```\n```python\nx = = 1\n```",
        '```json\n{"a": 1}\n```',
        "```python\n" + "(" * 500 + "\n```",
        "no code",
        "```python\nunclosed",
    ]
    assert await text_scores("syntax", *texts) == [0.5, 1, 0, None, None]


async def test_a_conversation_is_judged_by_its_last_message():
    prompt = [{"role": "user", "content": "2+2"}]
    assert await score("answer_match", [trajectory("4")], prompt=prompt, answer="4") == [1]


async def test_unknown_options_and_parts_are_refused():
    with pytest.raises(ConfigError, match="pattrn"):
        await text_scores("regex", "x", options={"pattrn": "x"})
    with pytest.raises(ConfigError, match="answer_match"):
        await text_scores("answer_mach", "x", answer="x")


@needs_math
async def test_mathematics_is_compared_not_its_writing():
    cases = [
        ("1/2", "so it is \\boxed{0.5}", 1),
        ("\\frac{1}{2}", "\\boxed{\\dfrac{2}{4}}", 1),
        ("$x^2+2x+1$", "The answer is $(x+1)^2$.", 1),
        ("\\boxed{12}", "first \\boxed{3}, no: \\boxed{12}", 1),
        ("12", "The answer is 12", 1),
        ("12", "The answer is 13", 0),
        ("1,000", "$1000$", 1),
        ("\\sqrt{8}", "$2\\sqrt{2}$", 1),
        ("0.333", "$\\frac{1}{3}$", 0),
        ("12", "I do not know", 0),
        ("\\boxed{(1, 2)}", "it is \\boxed{(1, 2)} in {all}", 1),
        ("x", "$x$", 1),
        ("Paris", "Paris", None),
        ("", "12", None),
    ]
    made = PARTS["math"]()
    for reference, answer, expected in cases:
        assert made(completions=[answer], answer=[reference]) == [expected], (reference, answer)


@needs_math
@pytest.mark.slow
async def test_mathematics_without_an_end_is_given_up():
    made = PARTS["math"](timeout_s=1.0)
    assert made(completions=["$9^{9^{9^{9^9}}}$", "$4$"], answer=["3", "4"]) == [0, 1]

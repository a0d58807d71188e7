"""The lines of a planner: what they mean, and that nothing a model writes raises."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_parallm.execution.action_grammar import Action, any_name, parse_actions, write_action
from mlx_parallm.execution.tool_calls import parse_tool_calls

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def brief(text: str, **options: object) -> list[object]:
    """(kind, name, arguments) of calls, (kind, text) of the rest, (kind, name, "error") of what
    cannot be read."""
    actions = parse_actions(text, **options)  # type: ignore[arg-type]
    return [
        (a.kind, a.text)
        if a.kind in ("answer", "think")
        else (a.kind, a.name, dict(a.arguments) if a.error is None else "error")
        for a in actions
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TOOL: add(a=1, b=2)", [("tool", "add", {"a": 1, "b": 2})]),
        ('TOOL: say(text="a, b) (c", n=1)', [("tool", "say", {"text": "a, b) (c", "n": 1})]),
        (
            'TOOL: find(filter={"tags": ["x", null], "deep": {"on": true}}, top=[1, [2]])',
            [
                (
                    "tool",
                    "find",
                    {"filter": {"tags": ["x", None], "deep": {"on": True}}, "top": [1, [2]]},
                )
            ],
        ),
        (
            "TOOL: find(filter={'on': true, 'n': None})",
            [("tool", "find", {"filter": {"on": True, "n": None}})],
        ),
        ('TOOL: a.b-c/d({"x y": 1})', [("tool", "a.b-c/d", {"x y": 1})]),
        (
            "DELEGATE: physics(target=120.5, wind=-3)",
            [("delegate", "physics", {"target": 120.5, "wind": -3})],
        ),
        ("TOOL: now\nDELEGATE: rest()", [("tool", "now", {}), ("delegate", "rest", {})]),
        ("TOOL: math(2, b=3)", [("tool", "math", {"a": 2, "b": 3})]),
        ("TOOL: go(to=north, by=2 + 3)", [("tool", "go", {"to": "north", "by": "2 + 3"})]),
        ("ANSWER: 42", [("answer", "42")]),
        ("ANSWER:", [("answer", "")]),
        (
            "ANSWER: first\n second line\nTHINK: and\nmore\n",
            [("answer", "first\n second line"), ("think", "and\nmore")],
        ),
        (
            "I wonder.\n  TOOL: now()  so\nANSWER: 1",
            [("think", "I wonder."), ("tool", "now", {}), ("think", "so"), ("answer", "1")],
        ),
        ("no TOOL: now() here", [("think", "no TOOL: now() here")]),
        (" \n", []),
        ("THINK:\nTHINK: x", [("think", "x")]),
        # Python's strings end with their line
        ('TOOL: f(x="a\n b",\n  y=2)', [("tool", "f", "error")]),
        ('TOOL: f(x="a",\n  y=2)', [("tool", "f", {"x": "a", "y": 2})]),
        ("TOOL: f(x=1\nANSWER: 2", [("tool", "f", "error"), ("answer", "2")]),
        ("TOOL:\nANSWER: 2", [("tool", "", "error"), ("answer", "2")]),
        ("TOOL: I should ask", [("tool", "I", "error")]),
        ("TOOL: f(x=1, x=2)", [("tool", "f", "error")]),
        ("TOOL: f(1)", [("tool", "f", "error")]),
    ],
)
def test_a_text_and_its_actions(text: str, expected: list[object]) -> None:
    assert brief(text, parameters={"math": ["a", "b"]}) == expected


def test_an_action_knows_its_place_and_why_it_cannot_be_read() -> None:
    text = "Hm.\nTOOL: f(x=[1, 2]) then\nTOOL: g(x="
    thought, call, rest, broken = parse_actions(text)
    assert text[call.start : call.end] == "TOOL: f(x=[1, 2])"
    assert text[broken.start : broken.end] == "TOOL: g(x="
    assert (thought.text, rest.text) == ("Hm.", "then")
    assert broken.error == "the parenthesis is not closed"
    assert parse_actions("TOOL: f x")[0].error == "expected TOOL: f(key=value)"


@given(
    name=st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,9}", fullmatch=True),
    arguments=st.dictionaries(st.text(min_size=1, max_size=8), JSON, max_size=4),
)
@example(name="A", arguments={"ﬀ": None})
@settings(max_examples=60, deadline=None)
def test_a_written_call_is_read_back(name: str, arguments: dict[str, object]) -> None:
    line = write_action("delegate", name, arguments)
    assert parse_actions(f"So:\n{line}\nANSWER: 1")[1] == Action(
        "delegate", 4, 4 + len(line), name, arguments
    )


PIECES = [*"TOLf: (x=1,'\"[]{})\\\n0", "\nTOOL: f(", "\nANSWER: ", "DELEGATE:"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
@settings(max_examples=200, deadline=None)
def test_no_text_raises_and_actions_stand_in_order(text: str) -> None:
    actions = parse_actions(text)
    assert all(a.end <= b.start for a, b in pairwise(actions))
    parse_tool_calls(text, ["f"])


def test_tool_lines_are_calls_beside_the_other_formats() -> None:
    add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
    text = (
        'TOOL: add(1, b=2)\n<invoke name="now"/>\nTOOL:'
        " broken(\nDELEGATE: x(y=1)\nANSWER: add(3, 4)"
    )
    calls = parse_tool_calls(text, [add], ["tool_line", "xml"])
    assert [(call.name, dict(call.arguments), call.raw_text) for call in calls] == [
        ("add", {"a": 1, "b": 2}, "TOOL: add(1, b=2)"),
        ("now", {}, '<invoke name="now"/>'),
    ]
    assert [bad.raw_text for bad in calls.malformed] == ["TOOL: broken("]


def test_names_inside_names_and_names_of_signs() -> None:
    parameters = {"→": ["x"], "→→": ["x"], "add": ["a"], "c++": []}
    for name in parameters:
        [action] = parse_actions(f"TOOL: {name}(1)" if name != "c++" else "TOOL: c++()", parameters)
        assert action.name == name and action.error is None
    assert parse_actions("TOOL: add-two(1)", {"add": ["a"]})[0].name == "add-two"
    calls = parse_tool_calls("re-add(1) ns/add(2) add(3)", [{"name": "add"}], "function")
    assert [call.raw_text for call in (*calls, *calls.malformed)] == ["add(3)"]
    names = any_name(["left", "far left", "↑", "↑↑", "left!"])
    for text, expected in (
        ("I go far left now", ["far left"]),
        ("LEFT, or leftover", ["LEFT"]),
        ("go ↑↑", ["↑↑"]),
        ("a↑b left!", ["↑", "left!"]),
    ):
        assert names.findall(text) == expected

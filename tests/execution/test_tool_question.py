"""Labels and rewards by tools: arguments from columns, results as values."""

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.execution.tool_question import (
    ToolQuestion,
    agree,
    filled,
    generate_labels,
    is_true,
    verify_labels,
)
from mlx_parallm.execution.tool_results import ToolResult


@pytest.fixture(scope="module")
def client() -> Iterator[ToolClient]:
    def divide(a: float, b: float) -> float:
        return a / b

    def is_even(n: int) -> str:
        return "yes" if n % 2 == 0 else "no"

    def shoot(angle: float) -> dict[str, Any]:
        return {"shot": {"distance": 2 * angle}, "hit": angle > 40}

    with ToolClient(functions=[divide, is_even, shoot]) as client:
        yield client


def test_labels_are_generated_and_failures_left_out(client: ToolClient) -> None:
    rows = [{"prompt": f"{a} / {b}", "a": a, "b": b} for a, b in [(6, 3), (1, 0), (1, 4)]]
    labelled, failed = generate_labels(
        client, rows, ToolQuestion("divide", {"a": "{a}", "b": "{b}"})
    )
    assert [row["answer"] for row in labelled] == [2.0, 0.25] and labelled[0]["prompt"] == "6 / 3"
    assert len(failed) == 1 and "ZeroDivisionError" in failed[0]
    far, _ = generate_labels(
        client, rows[:1], ToolQuestion("shoot", {"angle": "{a}"}, "shot.distance"), "far"
    )
    assert far[0]["far"] == 12


def test_labels_are_verified(client: ToolClient) -> None:
    rows = [
        {"a": 6, "b": 3, "answer": "2"},
        {"a": 6, "b": 3, "answer": "3"},
        {"a": 1, "b": 0, "answer": "1"},
    ]
    divide = ToolQuestion("divide", {"a": "{a}", "b": "{b}"})
    confirmed, refused = verify_labels(client, rows, divide, equals="{answer}")
    assert confirmed == rows[:1]
    assert (
        len(refused) == 2
        and refused[0].startswith("divide says 2.0")
        and "ZeroDivisionError" in refused[1]
    )
    even, _ = verify_labels(client, [{"n": 2}, {"n": 3}], ToolQuestion("is_even", {"n": "{n}"}))
    assert even == [{"n": 2}]
    with pytest.raises(ConfigError, match="there is no column 'm': n"):
        verify_labels(client, [{"n": 2}], ToolQuestion("is_even", {"n": "{m}"}))


def test_columns_in_arguments() -> None:
    row = {"n": 3, "word": "ab", "list": [1]}
    assert filled({"x": "{n}", "y": ["{list}", "{n} of {word}", 7], "z": "{{n}} {n}"}, row) == {
        "x": 3,
        "y": [[1], "3 of ab", 7],
        "z": "{n} 3",
    }


def test_results_as_values() -> None:
    whole = ToolQuestion("t")
    assert whole.read(ToolResult("[1, 2]")) == [1, 2] and whole.read(ToolResult("plain")) == "plain"
    assert whole.read(ToolResult("5", {"result": 5})) == 5  # as the SDK wraps it
    assert whole.read(ToolResult("", {"result": 5, "more": 1})) == {"result": 5, "more": 1}
    assert ToolQuestion("t", {}, "a.b").read(ToolResult('{"a": {"b": 0}}')) == 0
    for result in (ToolResult("no", error="timeout"), ToolResult('{"a": 1}'), ToolResult("text")):
        with pytest.raises(ToolFailedError):
            ToolQuestion("t", {}, "a.b").read(result)
    assert [is_true(value) for value in (True, 0, "YES", "wrong")] == [True, False, True, False]
    assert [is_true(value) for value in (2, "2", None)] == [None] * 3
    assert (
        agree("2.0000001", 2)
        and agree(" A  b", "a B")
        and not agree("2.1", 2)
        and not agree("two", 2)
    )

"""Python of models, as a tree."""

import ast
from typing import Any

import pytest

from mlx_parallm.execution import python_text
from mlx_parallm.execution.call_arguments import read_arguments
from mlx_parallm.execution.python_text import ATTEMPTS, parsed_expression, parsed_module
from tests.altered import Altered


class Miscounting:
    """`ast.parse` of a Python that counts the depth of another thread's tree too."""

    def __init__(self, faults: int) -> None:
        self.faults = faults

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.faults -= 1
        if self.faults >= 0:
            raise SystemError("AST constructor recursion depth mismatch (before=18, after=9)")
        return ast.parse(*args, **keywords)


def test_a_fault_of_pythons_parser_loses_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_text, "ast", Altered(ast, parse=Miscounting(ATTEMPTS - 1)))
    assert read_arguments("x=[1, {'y': true}]", ()) == {"x": [1, {"y": True}]}
    monkeypatch.setattr(python_text, "ast", Altered(ast, parse=Miscounting(ATTEMPTS)))
    with pytest.raises(SystemError, match="mismatch"):
        parsed_expression("1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f(", "line 1"),
        ("x\0", "null bytes"),
        ("(" * 300 + ")" * 300, "parentheses|deep"),
        ("-" * 9000 + "1", "deep"),
    ],
)
def test_what_is_no_python_is_one_error(text: str, words: str) -> None:
    for parse in (parsed_expression, parsed_module):
        with pytest.raises(ValueError, match=words):
            parse(text)

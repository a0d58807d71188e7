"""Tools by which a policy checks its work: a calculator, a look-up in a table, Python in the sandbox.

A `Tool` takes the text between the parentheses of a call and returns what it found. What it raises is a failed call.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from simpleeval import InvalidExpression, SimpleEval

from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.execution.sandbox.sandbox import Sandbox

LONGEST_EXPRESSION, LARGEST = 200, 1e300
MOST_BITS = 4096  # of an integer that is raised to a power: the largest that a calculation may make
CODE_TIMEOUT_S = 5.0
_NUMBERS_AND_SIGNS = re.compile(r"[0-9.eE+\-*/%()\s]*")  # so that there are no names, no texts, no calls


@dataclass(frozen=True)
class Tool:
    """What a call of it costs, in the units of the budget, and what it does."""

    name: str
    call: Callable[[str], str]
    cost: float = 1.0
    description: str = ""
    blocking: bool = False  # it takes long enough to hold up the other episodes


def calculator(cost: float = 1.0) -> Tool:
    """`verify_calculation`: the value of an expression; of an equation, whether it holds."""
    return Tool("verify_calculation", calculate, cost, "the value of an expression, or whether an equation holds")


def fact_table(facts: Mapping[str, str] | str | Path, cost: float = 2.0) -> Tool:
    """`check_facts`: the entry of a table, but for case and white space. `facts`: a mapping, or a JSON file of one.

    Raises ConfigError: a file that is not such a table.
    """
    table = facts if isinstance(facts, Mapping) else _read_table(Path(facts))
    entries = {_plain(name): str(value) for name, value in table.items()}

    def look_up(text: str) -> str:
        if (found := entries.get(_plain(text))) is None:
            raise ToolFailedError("not in the table")
        return found

    return Tool("check_facts", look_up, cost, "what the table of facts says of a term")


def code_runner(cost: float = 1.5, *, timeout_s: float = CODE_TIMEOUT_S) -> Tool:
    """`run_code`: what a Python program prints, in the sandbox. Raises ConfigError: the sandbox cannot protect."""
    sandbox = Sandbox(timeout_s=timeout_s)

    def run(code: str) -> str:
        result = sandbox.run(code)
        if not result.ok:
            last_words = result.stderr.strip().rpartition("\n")[2]
            raise ToolFailedError(last_words or f"it did not end well: {result.outcome}")
        return result.stdout.strip()

    return Tool("run_code", run, cost, "what a Python program prints", blocking=True)


def calculate(text: str) -> str:
    """ "84" for "12*7"; "true" or "false: it is 84" for "12*7 = 81". Raises ToolFailedError."""
    expression, equals, claim = text.partition("=")
    value = _evaluate(expression)
    if not equals:
        return _shown(value)
    return (
        "true" if math.isclose(value, _evaluate(claim.lstrip("=")), rel_tol=1e-9) else f"false: it is {_shown(value)}"
    )


def _evaluate(expression: str) -> float:
    """Numbers, + - * / // % ** and parentheses. Raises ToolFailedError."""
    if len(expression) > LONGEST_EXPRESSION or not _NUMBERS_AND_SIGNS.fullmatch(expression):
        raise ToolFailedError(f"that is no expression of numbers and signs of at most {LONGEST_EXPRESSION} characters")
    try:
        value = SimpleEval(operators=dict(_OPERATORS)).eval(expression.strip())
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise ToolFailedError("that is no number, or one too large")
    except (
        InvalidExpression,
        SyntaxError,
        ArithmeticError,
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ToolFailedError(f"that is no expression: {str(error) or type(error).__name__}") from error
    return value


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > MOST_BITS:
        raise ToolFailedError("the power is too large")
    return base**exponent


_OPERATORS: Mapping[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _read_table(path: Path) -> Mapping[str, str]:
    try:
        table = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"facts: {path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"facts: {path} is no JSON object of terms and what is known of them")
    return table

"""Python that a model or a task folder wrote, as a tree."""

import ast
from typing import Any

ATTEMPTS = 20


def parsed_expression(text: str) -> ast.expr:
    """Raises ValueError: it is no expression, or one too deep to be read."""
    expression: ast.Expression = _parsed(text, "eval")
    return expression.body


def parsed_module(text: str) -> ast.Module:
    """Raises ValueError: it is no module, or one too deep to be read."""
    module: ast.Module = _parsed(text, "exec")
    return module


def _parsed(text: str, mode: str) -> Any:
    """Python before 3.11.9 and 3.12.3 counts the depth of the trees that several threads make
    together, and may raise SystemError for a sound text (python/cpython#106905)."""
    for attempt in range(ATTEMPTS):
        try:
            return ast.parse(text, "<text>", mode=mode)
        except SyntaxError as error:
            raise ValueError(f"{error.msg}, line {error.lineno}") from error
        except (RecursionError, MemoryError) as error:
            raise ValueError("too deep to be read") from error
        except SystemError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError

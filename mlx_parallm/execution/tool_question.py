"""ToolQuestion: a call whose arguments are made of a row's columns. Rewards and labels by tools are
built on it.

generate_labels   rows → rows with the tool's result as a column
verify_labels     rows → the rows that the tool confirms
builtin:tool      the reward (rewards/tool_check.py)
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.execution.tool_results import ToolResult
from mlx_parallm.execution.user_code import did_you_mean

CALLS_AT_A_TIME = 16
TRUE, FALSE = ("true", "yes", "correct"), ("false", "no", "incorrect", "wrong")
_PLACE = re.compile(r"\{\{|\}\}|\{(\w+)\}")


@dataclass(frozen=True)
class ToolQuestion:
    """
    Args:
        tool: its name.
        arguments: JSON values. In texts "{column}" is the row's value: of any type if it is the
        whole text. {{ and
            }} stand for braces.
        result: which part of a structured result to take: "distance", or "shot.distance"; None: all
        of it.
    """

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: str | None = None

    def fill(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for a row. Raises ConfigError: it lacks a column."""
        return {name: filled(value, row) for name, value in self.arguments.items()}

    def read(self, result: ToolResult) -> Any:
        """Return the JSON value of a result. Raises ToolFailedError: the call failed, or the
        result lacks the part."""
        if result.error is not None:
            raise ToolFailedError(result.text)
        value = result.structured
        if isinstance(value, dict) and set(value) == {"result"} and self.result is None:
            value = value["result"]  # the SDK wraps other values
        if value is None:
            value = result.text
            with suppress(ValueError, RecursionError):
                value = json.loads(result.text)
        for key in self.result.split(".") if self.result else ():
            if not isinstance(value, dict) or key not in value:
                raise ToolFailedError(f"{self.tool}: its result has no {key!r}: {str(value)[:80]}")
            value = value[key]
        return value


def filled(value: Any, row: Mapping[str, Any]) -> Any:
    """Return a JSON value with the row's columns in the place of "{column}". Raises ConfigError:
    it lacks one."""
    if isinstance(value, Mapping):
        return {name: filled(inner, row) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [filled(inner, row) for inner in value]
    if not isinstance(value, str):
        return value

    def column(name: str) -> Any:
        if name not in row:
            raise ConfigError(
                f"there is no column {name!r}{did_you_mean(name, list(row))}: {', '.join(row)}"
            )
        return row[name]

    if (whole := _PLACE.fullmatch(value)) is not None and whole[1]:
        return column(whole[1])
    return _PLACE.sub(lambda place: str(column(place[1])) if place[1] else place[0][0], value)


def is_true(value: Any) -> bool | None:
    """Return whether a tool's result means yes: true, 1, "yes"; None: it means neither."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in (*TRUE, *FALSE):
        return value.strip().lower() in TRUE
    return None


def agree(a: Any, b: Any) -> bool:
    """Whether two values are the same number (to 1e-6), or the same text but for case and white
    space."""
    with suppress(TypeError, ValueError):
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-6)
    return " ".join(str(a).lower().split()) == " ".join(str(b).lower().split())


def generate_labels(
    client: ToolClient,
    rows: Iterable[Mapping[str, Any]],
    question: ToolQuestion,
    column: str = "answer",
) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask the tool about each row; return the rows with its answer as `column`, and the reasons
    why rows were left out: a call that failed. Raises ConfigError: a row lacks a column."""
    labelled, failed = [], []
    for row, value, reason in _answers(client, rows, question):
        if reason is None:
            labelled.append({**row, column: value})
        else:
            failed.append(reason)
    return labelled, failed


def verify_labels(
    client: ToolClient,
    rows: Iterable[Mapping[str, Any]],
    question: ToolQuestion,
    equals: Any = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask the tool about each row; return those that it confirms, and why the others were left out.

    Args:
        equals: the result has to agree with this, e.g. "{answer}"; None: the result has to mean
            yes.
    """
    confirmed, refused = [], []
    for row, value, reason in _answers(client, rows, question):
        is_right = reason is None and (
            is_true(value) if equals is None else agree(value, filled(equals, row))
        )
        if is_right:
            confirmed.append(row)
        else:
            refused.append(reason or f"{question.tool} says {str(value)[:80]} of {str(row)[:200]}")
    return confirmed, refused


def _answers(
    client: ToolClient, rows: Iterable[Mapping[str, Any]], question: ToolQuestion
) -> list[tuple[dict[str, Any], Any, str | None]]:
    """Return (row, value, None or why there is none) of each row, in their order."""

    def ask(row: dict[str, Any]) -> tuple[dict[str, Any], Any, str | None]:
        try:
            return row, question.read(client.call(question.tool, question.fill(row))), None
        except ToolFailedError as error:
            return row, None, str(error)

    with ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="labels") as threads:
        return list(threads.map(ask, [dict(row) for row in rows]))

"""builtin:tool: a tool of [tools] judges the answers."""

import asyncio
from collections.abc import Mapping
from typing import Any

from mlx_parallm.errors import PatternTimeoutError, RolloutRejectedError, ToolFailedError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.execution.tool_question import ToolQuestion, agree, filled, is_true
from mlx_parallm.rewards.part_tools import Completions, Scores, compiled, log, texts_of, to_binary
from mlx_parallm.system.patterns import Pattern

REFUSALS = ("tool", "arguments")  # the tool has read the answer and cannot do anything with it


def tool(
    *,
    name: str,
    arguments: Mapping[str, Any],
    result: str | None = None,
    equals: Any = None,
    pattern: str | None = None,
    threshold: float | None = None,
) -> "ToolCheck":
    """Score each answer by a tool: the number that it returns, or 1 or 0 for yes or no; with
    `equals`, 1 if the result agrees with it, else 0. An answer that the tool refuses (an error
    of the tool, wrong arguments) scores 0; a call that fails otherwise (a time-out, a server that
    ended) leaves the answer unscored.

    Args:
        name: of the tool. It need not be among the tools of the policy.
        arguments: with "{completion}" for the answer and "{column}" for the row's columns.
        result: which part of a structured result to take: "distance", "shot.distance".
        equals: a value or text with columns, e.g. "{completion}".
        pattern: a regular expression whose last match, its first group if it has one, is
            "{completion}".

    Raises ConfigError: the pattern is not a regular expression.
    """
    find = None if pattern is None else compiled(pattern)
    return ToolCheck(ToolQuestion(name, arguments, result), equals, find, threshold)


class ToolCheck:
    """The reward function of `builtin:tool`."""

    def __init__(
        self,
        question: ToolQuestion,
        equals: Any,
        find: Pattern | None,
        threshold: float | None,
    ) -> None:
        self.needs_tool = question.tool
        self._question, self._equals, self._find, self._threshold = (
            question,
            equals,
            find,
            threshold,
        )

    async def __call__(
        self, completions: Completions, tool_client: ToolClient, **columns: Any
    ) -> Scores:
        """Raises RolloutRejectedError: a result that is not a score."""
        texts = texts_of(completions)
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        rows = ({name: values[n] for name, values in lists.items()} for n in range(len(texts)))
        scores = await asyncio.gather(
            *(self._score(t, r, tool_client) for t, r in zip(texts, rows, strict=True))
        )
        return to_binary(scores, self._threshold)

    async def _score(self, text: str, row: Mapping[str, Any], client: ToolClient) -> float | None:
        if self._find is not None:
            try:
                answer_part = await asyncio.to_thread(self._find.last_part, text)
            except PatternTimeoutError as error:
                log.warning("an answer is not scored", reason=str(error))
                return None
            if answer_part is None:
                return 0.0
            text = answer_part
        row = {**row, "completion": text}
        answer = await client.acall(self._question.tool, self._question.fill(row))
        if answer.error is not None:
            return 0.0 if answer.error in REFUSALS else None
        try:
            value = self._question.read(answer)
        except ToolFailedError as error:
            raise RolloutRejectedError(str(error)) from error
        if self._equals is not None:
            return float(agree(value, filled(self._equals, row)))
        if (truth := is_true(value)) is not None:
            return float(truth)
        if not isinstance(value, int | float):
            raise RolloutRejectedError(
                f"{self._question.tool} returned {str(value)[:80]!r}: no number, no yes or no"
            )
        return float(value)

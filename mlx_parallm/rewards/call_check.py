"""builtin:tool_call: the calls that an answer makes are compared with the ones that are right. No
MLX.

A row has `tools`, the definitions that the model sees, and `calls`, the wanted calls with the
values that are accepted for each parameter; "" among them: it may be left out. This is the form of
the Berkeley Function Calling Leaderboard:

    [{"weather": {"city": ["Paris", "Paris, France"], "unit": ["celsius", ""]}}]

An answer gets 1 only where BFCL's rules pass it (`ast_checker` of its package `bfcl_eval`
2026.3.23, Apache-2.0, for
Python: types are exact, but an integer passes for a float; texts are compared in lower case without
` ,./-_*^`; calls may come in any order). Else it gets a part, so that a model has something to
climb.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_parallm.errors import RequestError, RolloutRejectedError
from mlx_parallm.execution.chat_messages import read_tools
from mlx_parallm.execution.taught_tools import TAUGHT_FORMAT
from mlx_parallm.execution.tool_calls import OwnFormat, own_format, parse_tool_calls
from mlx_parallm.rewards.part_tools import Completions, Scores, texts_of, to_binary, with_column
from mlx_parallm.types import ChatTokenizer

TYPES: Mapping[str, type] = {
    "string": str, "integer": int, "float": float, "number": float, "boolean": bool,
    "array": list, "tuple": list, "dict": dict, "object": dict, "any": str,
}  # fmt: skip
"""Python's types by the names of JSON schema and of BFCL."""
BEGUN, CALL, NAME, PARAMETERS, VALUES = 1, 2, 2, 2, 4
"""Tenths for a call that begins but cannot be read, for one that can be, for the right function,
parameters, values."""
IGNORED = re.compile(r"[ ,./\-_*^]")
NAME_IN_TEXT = re.compile(r'"name"\s*:\s*"([^"]*)"')

Call = tuple[str, Mapping[str, Any] | None]
"""Name and arguments; None: they cannot be read."""


class HasTokenizer(Protocol):
    """The part of `InferenceModule` that is needed."""

    tokenizer: ChatTokenizer


def tool_call(*, column: str = "calls", threshold: float | None = None) -> "CallCheck":
    """1 if the answer makes the calls of the row's `column` and no others, else a part of it:
    for each wanted call 0.2 for a call, 0.2 for its function, 0.2 for its parameters, 0.4 for their
    values, divided by the number of calls that are wanted or made, whichever is larger. A call that
    begins and cannot be read gets 0.1, and 0.1 for its function; one of a function that is not
    offered gets 0.1 (a small model copies such a call from an example). If no calls are wanted:
    1 without a call, else 0.

    Calls are read in the model's own format, or the one that is taught to models without one.

    Raises ConfigError: the column's name cannot be a keyword.
    """
    return CallCheck(column, threshold)


class CallCheck:
    """The reward function of `builtin:tool_call`."""

    def __init__(self, column: str, threshold: float | None) -> None:
        self._column, self._threshold = column, threshold
        self._format: OwnFormat = TAUGHT_FORMAT
        self._thinking: tuple[str, str] | None = None
        with_column(self, column, "tools")

    def attach(self, inference: HasTokenizer) -> None:
        """Read calls as this policy writes them."""
        self._thinking = inference.tokenizer.think_markers
        model_format = own_format(inference.tokenizer)
        if model_format is not None and inference.tokenizer.template_takes_tools:
            self._format = model_format

    def __call__(self, *, completions: Completions, tools: Sequence[Any], **columns: Any) -> Scores:
        """Raises RolloutRejectedError: a row whose tools or calls cannot be read."""
        rows = zip(texts_of(completions), tools, columns[self._column], strict=True)
        return to_binary([self._score(*row) for row in rows], self._threshold)

    def _score(self, text: str, tools: Any, wanted: Any) -> float | None:
        if wanted is None:
            return None
        schemas = _read_schemas(tools)
        calls = _read_wanted(wanted, schemas, self._column)
        parsed = parse_tool_calls(
            text, (), ("own",), model_format=self._format, thinking=self._thinking
        )
        made: list[Call] = [(call.name, call.arguments) for call in parsed]
        for broken in parsed.malformed:
            name = NAME_IN_TEXT.search(broken.raw_text)
            made.append((name[1] if name else "", None))
        try:
            return score_calls(made, calls, schemas)
        # any answer can be compared with a row in the right form
        except (AttributeError, TypeError) as error:
            message = (
                f"tool_call: accepted values of the row's {self._column!r}"
                f" are not in BFCL's form: {error}"
            )
            raise RolloutRejectedError(message) from error


def _read_schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of each function. Raises RolloutRejectedError."""
    try:
        return {
            tool["function"]["name"]: tool["function"].get("parameters") or {}
            for tool in read_tools(tools)
        }
    except (RequestError, KeyError, TypeError) as error:
        raise RolloutRejectedError(
            f"tool_call: the row's tools cannot be read: {error!r}"
        ) from error


def _read_wanted(
    wanted: Any, schemas: Mapping[str, Any], column: str
) -> list[tuple[str, Mapping[str, Sequence[Any]]]]:
    """Return name and accepted values of each wanted call. Raises RolloutRejectedError."""
    try:
        calls = [(name, accepted) for entry in wanted for name, accepted in entry.items()]
        well_formed = all(
            isinstance(values, list) for _, accepted in calls for values in accepted.values()
        )
    except (AttributeError, TypeError):
        well_formed = False
    if not well_formed:
        raise RolloutRejectedError(
            f"tool_call: the row's {column!r} is not a list of calls with lists of accepted values:"
            ' [{"weather": {"city": ["Paris"]}}]'
        )
    if missing := [name for name, _ in calls if name not in schemas]:
        raise RolloutRejectedError(
            f"tool_call: {missing[0]!r} of the row's {column!r} is not among its tools"
        )
    return calls


def score_calls(
    made: Sequence[Call],
    wanted: Sequence[tuple[str, Mapping[str, Sequence[Any]]]],
    schemas: Mapping[str, Mapping[str, Any]],
) -> float:
    """Return the score of the calls of one answer, from 0 to 1.

    Args:
        wanted: names, and the accepted values by parameter.
        schemas: the parameters of each function, as JSON schema.
    """
    if not wanted:
        return float(not made)
    left, total = list(made), 0.0
    for name, accepted in wanted:
        scores = [score_call(call, name, accepted, schemas) for call in left]
        if scores:
            best = max(scores)
            total += best
            del left[scores.index(best)]
    return total / max(len(wanted), len(made))


def score_call(
    call: Call,
    name: str,
    accepted: Mapping[str, Sequence[Any]],
    schemas: Mapping[str, Mapping[str, Any]],
) -> float:
    """Return the score of one call against one that is wanted, from 0 to 1."""
    made, arguments = call
    if arguments is None:
        return (BEGUN + (made == name)) / 10
    if made != name:
        return (CALL if made in schemas else BEGUN) / 10
    schema = schemas[name]
    properties = schema.get("properties") or {}
    needed = {parameter for parameter, values in accepted.items() if "" not in values}
    needed |= set(schema.get("required") or ())
    expected = [
        parameter for parameter in arguments if parameter in properties and parameter in accepted
    ]
    right = [
        parameter
        for parameter in expected
        if accepts(arguments[parameter], accepted[parameter], properties[parameter])
    ]
    parameters = len(needed | set(arguments))
    if parameters == 0:
        return 1.0
    return (CALL + NAME + (PARAMETERS * len(expected) + VALUES * len(right)) / parameters) / 10


# ------------------------------------------------------------------ BFCL's rules for one value


def accepts(value: Any, accepted: Sequence[Any], schema: Mapping[str, Any]) -> bool:
    """Return whether a value has the type of its schema and is one of the accepted ones."""
    wanted = TYPES.get(str(schema.get("type")), _type_in(accepted))
    items = schema.get("items")
    nested = (
        TYPES.get(str(items.get("type"))) if wanted is list and isinstance(items, Mapping) else None
    )
    if schema.get("type") in ("float", "number") and type(value) is int:
        value = float(value)
    if not _has_type(value, accepted, wanted, nested):
        return False
    # else a variable stands for the value, and is compared as it is
    if _type_in(accepted) in (None, wanted):
        if wanted is dict:
            return any(_dict_matches(value, one) for one in accepted if one != "")
        if wanted is list and nested is dict:
            return any(_dicts_match(value, one) for one in accepted)
        if wanted is str:
            return _plain(value) in [_plain(one) for one in accepted if isinstance(one, str)]
        if wanted is list:
            return _plain_items(value) in [_plain_items(one) for one in accepted]
    return value in accepted


def _type_in(accepted: Sequence[Any]) -> type | None:
    return next((type(one) for one in accepted if one != ""), None)


def _has_type(
    value: Any, accepted: Sequence[Any], wanted: type | None, nested: type | None
) -> bool:
    kind: type = type(value)
    if kind is not wanted:
        return kind is _type_in(accepted)
    if nested is None:
        return True
    return any(
        not isinstance(one, list) or all(_has_type(v, one, nested, None) for v in value)
        for one in accepted
    )


def _dict_matches(value: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> bool:
    if any(key not in value and "" not in values for key, values in accepted.items()):
        return False
    return all(
        key in accepted and _plain(one) in map(_plain, accepted[key]) for key, one in value.items()
    )


def _dicts_match(value: Sequence[Any], accepted: Sequence[Any]) -> bool:
    if len(value) != len(accepted):
        return False
    pairs = zip(value, accepted, strict=True)
    return all(
        isinstance(one, dict) and wanted != "" and _dict_matches(one, wanted)
        for one, wanted in pairs
    )


def _plain(value: Any) -> Any:
    return IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _plain_items(values: Sequence[Any]) -> list[Any]:
    return [_plain(value) for value in values]

"""`tools`, `tool_choice` and tool calls in the history: what a chat request may say, as chat templates take it."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlx_parallm.errors import RequestError
from mlx_parallm.types import Structure


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")  # description, strict: for the template
    name: str = Field(min_length=1)
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    """A `tool_choice` that forces this function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises RequestError: a choice among no tools, or of none of them."""
    if choice in (None, "none"):
        return
    names = [tool.function.name for tool in tools]
    if not names:
        raise RequestError("'tool_choice' needs 'tools'", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestError(
            f"'tool_choice' names {choice.function.name!r}; 'tools' has {', '.join(names)}", param="tool_choice"
        )


def forced_calls(tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool) -> Structure | None:
    """What an answer must be when it must call ("required", or a named tool): a JSON list of {"name", "arguments"}.

    The same for every model, whatever its own format is, and without reasoning before it (vLLM's way). None: the model
    is free. Raises RequestError: parameters that are no JSON schema one can write down.
    """
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is None and choice != "required":
        return None
    called = [tool.function for tool in tools if named in (None, tool.function.name)]
    try:
        calls = ", ".join(_call_schema(function, index) for index, function in enumerate(called))
    except RecursionError as error:
        raise RequestError("'tools' is nested too deeply", param="tools") from error
    most = ', "maxItems": 1' if named or not parallel else ""
    schema = f'{{"type": "array", "minItems": 1{most}, "items": {{"anyOf": [{calls}]}}}}'
    return Structure("json_schema", schema, "tools")


def _call_schema(function: Function, index: int) -> str:
    """A function without parameters takes none. References inside its schema point to where it stands in ours."""
    parameters = {"type": "object", **(function.parameters or {"additionalProperties": False})}
    written = json.dumps(parameters).replace('"$ref": "#', f'"$ref": "#/items/anyOf/{index}/properties/arguments')
    properties = f'{{"name": {{"const": {json.dumps(function.name)}}}, "arguments": {written}}}'
    return (
        f'{{"type": "object", "properties": {properties}, "required": ["name", "arguments"], '
        '"additionalProperties": false}'
    )


def template_fields(extra: dict[str, Any], position: int) -> dict[str, Any]:
    """A message's fields beside role and content, as templates read them: no nulls, the arguments of tool calls as
    objects, the reasoning under the name of most templates. Raises RequestError."""
    fields = {key: value for key, value in extra.items() if value is not None}
    if "reasoning" in fields:
        fields.setdefault("reasoning_content", fields["reasoning"])
    calls = fields.pop("tool_calls", None)
    if calls:
        fields["tool_calls"] = [
            _template_call(call, f"messages.{position}.tool_calls.{index}")
            for index, call in enumerate(calls if isinstance(calls, list) else [calls])
        ]
    return fields


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Adds to each message of role tool the name of the function whose call it answers: Hermes' template wants it."""
    names: dict[Any, str] = {}
    for message in messages:
        names |= {str(call.get("id")): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and name is not None:
            message.setdefault("name", name)


def _template_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: a tool call has a 'function' with a 'name'", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        where = f"{where}.function.arguments"
        raise RequestError(f"{where}: must be a JSON object, written as a string", param=where)
    return {**call, "function": {**function, "arguments": arguments}}

"""What a model is told of a tool: its name, what it does, and the JSON schema of its arguments. No MLX."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import PydanticUserError, TypeAdapter

from mlx_parallm.errors import ConfigError

ToolLike = str | Mapping[str, Any] | Callable[..., Any]

HOW_TO_CALL = """To call one, write
```json
{"tool": "NAME", "arguments": {...}}
```"""


def tool_definition(tool: ToolLike) -> dict[str, Any]:
    """{"name", "description", "parameters": JSON schema} of a name, such a dictionary (also as OpenAI's {"type":
    "function", "function": …}) or a function, whose annotations make the schema. Raises ConfigError."""
    if isinstance(tool, str):
        found: dict[str, Any] = {"name": tool}
    elif isinstance(tool, Mapping):
        inner = tool.get("function")
        found = dict(inner if isinstance(inner, Mapping) else tool)
    elif callable(tool):
        found = _definition_of(tool)
    else:
        raise ConfigError(f"a tool is a name, a dictionary with a name, or a function; got {tool!r}")
    if not isinstance(found.get("name"), str) or not found["name"].strip():
        raise ConfigError(f"a tool needs a name; got {tool!r}")
    schema = found.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties", {}), Mapping):
        raise ConfigError(f"tool {found['name']!r}: 'parameters' is not the JSON schema of an object: {schema!r}")
    told = {"name": found["name"], "description": found.get("description") or "", "parameters": schema}
    return told | {key: value for key, value in found.items() if key not in told}


def _definition_of(function: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        schema = TypeAdapter[Any](function).json_schema()  # type: ignore[arg-type]  # its types name no functions
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        raise ConfigError(f"tool {name!r}: its parameters make no JSON schema: {error}") from error
    if schema.get("type") != "object":
        raise ConfigError(f"tool {name!r}: its parameters must be callable by name")
    return {"name": name, "description": (inspect.getdoc(function) or "").split("\n\n")[0], "parameters": schema}


def openai_tools(definitions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As chat templates and endpoints take them."""
    return [{"type": "function", "function": dict(definition)} for definition in definitions]


def with_instructions(prompt: Any, definitions: Iterable[Mapping[str, Any]]) -> Any:
    """A text, or messages, that begin with a word on the tools, for models whose template has no place for them."""
    listed = "\n".join(
        f"- {tool['name']}: {tool['description']} Arguments: {json.dumps(tool['parameters'])}" for tool in definitions
    )
    told = f"You can use these tools:\n{listed}\n{HOW_TO_CALL}"
    if isinstance(prompt, str):
        return f"{told}\n\n{prompt}"
    first, *others = prompt
    if first.get("role") == "system":
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *others]
    return [{"role": "system", "content": told}, *prompt]

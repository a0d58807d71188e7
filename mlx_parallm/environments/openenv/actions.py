"""Answers of the policy as actions, and observations as texts: by the schema of the server, or as
the configuration says."""

import json
import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from mlx_parallm.errors import ConfigError, PatternTimeoutError, RolloutRejectedError
from mlx_parallm.execution.tool_results import LARGEST_RESULT
from mlx_parallm.execution.user_code import is_reference, load_function_of, user_code
from mlx_parallm.system.patterns import Pattern, PatternError
from mlx_parallm.types import Structure

JSON = "json"
MCP_ACTIONS = ("CallToolAction", "ListToolsAction", "Action")
"""Titles of the action schemas with which openenv-core serves an environment of tools."""

ActionOf = Callable[[str], Any]


def is_of_tools(schema: Mapping[str, Any]) -> bool:
    """Whether the actions of a server are calls of tools."""
    properties = schema.get("properties", {})
    return schema.get("title") in MCP_ACTIONS and (
        "tool_name" in properties or not set(properties) - {"metadata", "type"}
    )


def own_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an action without what every action of OpenEnv may have (`metadata`)."""
    properties = {
        name: value for name, value in schema.get("properties", {}).items() if name != "metadata"
    }
    return {**schema, "properties": properties}


def text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the one field that an action needs, if it is a text of any form; else None."""
    properties = own_fields(schema)["properties"]
    required = [name for name in schema.get("required", ()) if name in properties]
    if len(required) != 1:
        return None
    field = properties[required[0]]
    free = field.get("type") == "string" and not {"enum", "const", "pattern", "format"} & set(field)
    return str(required[0]) if free else None


class Actions:
    """Reads answers as actions. `structure` constrains the sampled text; None: free text."""

    structure: Structure | None = None

    def __init__(self, schema: Mapping[str, Any], option: str | None) -> None:
        """
        Args:
            schema: JSON schema of an action.
            option: "json", the field that takes the text of an answer, a regular expression with
                named groups, which are fields, or "python:file.py:name"; None: the one field that
                an action needs if it is a text, else "json".

        Raises ConfigError: no such field, or neither of these.
        """
        self._schema = own_fields(schema)
        fields = list(self._schema["properties"])
        self.instructions = ""
        if option is None:
            option = text_field(schema) or JSON
        if is_reference(option):
            self._read: ActionOf = load_function_of(("text",), option, "openenv: action_of")
        elif option == JSON:
            source = json.dumps(self._schema, ensure_ascii=False)
            self.structure = Structure("json_schema", source, "openenv: the schema of the actions")
            self.instructions = f"Answer with one JSON object of this schema: {source}"
            self._read = _json
        elif option in fields:
            self._read = lambda text: {option: text.strip()}
        else:
            self._read = _pattern(option, self._schema["properties"])

    def read(self, text: str) -> dict[str, Any] | None:
        """Return the action of an answer; None: it is none. Raises RolloutRejectedError: a
        function of the user's failed, or returned neither."""
        with user_code("openenv: action_of", RolloutRejectedError):
            action = self._read(text)
        if action is not None and not isinstance(action, Mapping):
            raise RolloutRejectedError(
                f"openenv: action_of returned {action!r}: expected a mapping of fields, or None"
            )
        return None if action is None else dict(action)


class Observations:
    """Makes a text of observations."""

    def __init__(self, option: str | None) -> None:
        """`option`: a template with the fields of an observation, "python:file.py:name", or None.
        Raises ConfigError."""
        self._function: Callable[[Mapping[str, Any]], Any] | None = None
        self._template: str | None = None
        if option is None:
            return
        if is_reference(option):
            self._function = load_function_of(("observation",), option, "openenv: observation_text")
            return
        try:
            names = {name for _, name, _, _ in Formatter().parse(option) if name is not None}
        except ValueError as error:
            raise ConfigError(
                f"openenv: observation_text {option!r}: {error}; {{{{ and }}}} stand for braces"
            ) from error
        if not names:
            raise ConfigError(
                f"openenv: observation_text {option!r} is neither a template with {{field}} nor a"
                ' reference ("python:file.py:name")'
            )
        self._template = option

    def text(self, observation: Mapping[str, Any]) -> str:
        """Return the policy's view: by default the one field that is a text, if the others
        are empty, else JSON. Raises RolloutRejectedError: it cannot be made, or is longer than
        LARGEST_RESULT."""
        text = self._text(observation)
        if len(text) > LARGEST_RESULT:
            raise RolloutRejectedError(
                f"openenv: an observation has {len(text):,} characters, at most"
                f" {LARGEST_RESULT:,} are taken: choose its fields with observation_text"
            )
        return text

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._function is not None:
            with user_code("openenv: observation_text", RolloutRejectedError):
                return str(self._function(observation))
        if self._template is not None:
            try:
                return self._template.format_map(
                    {name: "" if value is None else value for name, value in observation.items()}
                )
            except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
                raise RolloutRejectedError(
                    f"openenv: observation_text: {type(error).__name__}: {error}; an observation"
                    f" has: {', '.join(observation) or 'nothing'}"
                ) from error
        full = {
            name: value for name, value in observation.items() if value not in (None, "", [], {})
        }
        if len(full) == 1 and isinstance(text := next(iter(full.values())), str):
            return text
        return json.dumps(full, ensure_ascii=False) if full else ""


def _json(text: str) -> Any:
    try:
        action = json.loads(text)
    except (ValueError, RecursionError):
        return None  # cut, or sampled without the schema
    return action if isinstance(action, dict) else None


def _pattern(option: str, properties: Mapping[str, Any]) -> ActionOf:
    try:
        pattern = Pattern(option, re.DOTALL)
    except PatternError as error:
        raise ConfigError(f"openenv: action_of: {error}") from error
    unknown = sorted(set(pattern.group_names) - set(properties))
    if unknown or not pattern.group_names:
        raise ConfigError(
            f"openenv: action_of {option!r}: there is no field"
            f" {unknown[0] if unknown else option!r} of an action; expected one of"
            f" {', '.join(properties) or 'none'}, a regular expression with named groups for"
            ' fields, "json", or "python:file.py:name"'
        )

    def read(text: str) -> dict[str, Any] | None:
        try:
            match = pattern.last(text)
        except PatternTimeoutError as error:
            raise RolloutRejectedError(f"openenv: action_of: {error}") from error
        if match is None:
            return None
        named = {name: value for name, value in match.groupdict().items() if value is not None}
        return {name: _typed(value, properties[name]) for name, value in named.items()}

    return read


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a text as its field's value: a text as it is, anything else as JSON."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the server reports its fault

"""RecordedTools: tools whose answers were recorded, in a file. An equal call gets the recorded
answer; no other is made.

    {"definitions": [{"name", "description", "parameters"}],
     "calls": [{"name", "arguments", "text", "error"?}]}
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_results import ToolResult

Json = dict[str, Any]


class RecordedTools:
    """Tools by name, each with the answers of its recorded calls. Of two equal calls the later
    one's answer counts."""

    def __init__(self, definitions: Iterable[Json], calls: Iterable[Json]) -> None:
        self.definitions = {definition["name"]: definition for definition in definitions}
        self._answers = {_key(call["name"], call["arguments"]): call for call in calls}

    @classmethod
    def read(cls, path: str | Path) -> "RecordedTools":
        """Raises ConfigError: the file cannot be read, or is of another form."""
        try:
            data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
            return cls(data["definitions"], data["calls"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"tools.recorded: {path} holds no recorded tools: {type(error).__name__}: {error}"
            ) from error

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Return the recorded answer. A call that nobody recorded is a failure that says so."""
        call = self._answers.get(_key(name, arguments))
        if call is None:
            words = f"{name}: no answer to these arguments was recorded"
            return ToolResult(words, error="arguments")
        return ToolResult(call["text"], error="tool" if call.get("error") else None)


def _key(name: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    return name, json.dumps(arguments, sort_keys=True, default=str)

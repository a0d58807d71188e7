"""ToolResult: what a call of a tool gave, and the bounds of what is kept of it. RecordedTools: what
calls gave at another time."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from mlx_parallm.errors import ConfigError

Failure = Literal["unknown_tool", "arguments", "tool", "timeout", "server", "too_large"]
FAILURES: tuple[Failure, ...] = get_args(Failure)
UNANSWERED: tuple[Failure, ...] = ("timeout", "server")  # of whoever serves the tool
LONGEST_RESULT = 65_536  # characters of a text that the policy reads; the rest is cut
# characters of a text, or of a structured result as JSON; a larger one is a failure
LARGEST_RESULT = 1_000_000


@dataclass(frozen=True)
class ToolResult:
    """The result of a call. `text` is for the policy; after a failure it says what went wrong."""

    text: str
    structured: Any = None  # JSON, where the tool returned some
    error: Failure | None = None
    seconds: float = 0.0
    cached: bool = False

    @property
    def value(self) -> Any:
        """The structured result, or what the text says as JSON: servers without output schemas send
        that, whole or as a structured text. None: it is neither."""
        content = self.structured
        if isinstance(content, Mapping) and set(content) == {"result"}:
            content = content["result"]
        if content is not None and not isinstance(content, str):
            return content
        try:
            return json.loads(self.text if content is None else content)
        except ValueError:
            return content


def no_such_tool(name: str, names: Iterable[str]) -> ToolResult:
    """Return the result of a call of a tool that does not exist."""
    return ToolResult(
        f"there is no tool {name!r}; there are: {', '.join(names) or 'none'}",
        error="unknown_tool",
    )


def bounded(name: str, result: ToolResult) -> ToolResult:
    """Return the result of tool `name` with a text of at most LONGEST_RESULT characters (and a
    note that it was cut). More than LARGEST_RESULT characters of text or JSON are the failure
    "too_large"."""
    size = max(
        len(result.text), len(as_json(result.structured)) if result.structured is not None else 0
    )
    if size > LARGEST_RESULT:
        words = (
            f"{name}: its result has {size:,} characters, at most"
            f" {LARGEST_RESULT:,} are taken: ask for less"
        )
        return ToolResult(words, error="too_large", seconds=result.seconds)
    if len(result.text) <= LONGEST_RESULT:
        return result
    cut = f"{result.text[:LONGEST_RESULT]}\n[… cut: {len(result.text):,} characters]"
    return replace(result, text=cut)


def as_json(value: Any) -> str:
    """Return JSON text; what JSON does not have is its `str`. Raises TypeError, ValueError: keys
    that are no text."""
    return json.dumps(value, ensure_ascii=False, default=str)


class RecordedTools:
    """Tools whose answers were recorded, in a file. An equal call gets the recorded answer, of
    two the later one's; no other is made.

    {"definitions": [{"name", "description", "parameters"}],
     "calls": [{"name", "arguments", "text", "error"?}]}
    """

    def __init__(
        self, definitions: Iterable[dict[str, Any]], calls: Iterable[dict[str, Any]]
    ) -> None:
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

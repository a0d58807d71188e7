"""ToolResult: the result of a tool call, and bounds of what is kept of it. RecordedTools: what
calls gave at another time."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.json_values import whole_characters

Failure = Literal["unknown_tool", "arguments", "tool", "timeout", "server", "too_large"]
FAILURES: tuple[Failure, ...] = get_args(Failure)
UNANSWERED: tuple[Failure, ...] = ("timeout", "server")  # failures of the tool's server
LONGEST_RESULT = 65_536  # characters of a text that the policy reads; the rest is cut
# characters of a text, or of a structured result as JSON; a larger one is a failure
LARGEST_RESULT = 1_000_000
WRAPPED = 4  # how often a result may be JSON within a text, or all that "result" holds


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
        """The structured result, or the text read as JSON: servers without output schemas send
        that, whole, in a fence, within a text or under "result". None: it is neither."""
        content = self.text if self.structured is None else self.structured
        for _ in range(WRAPPED):
            if isinstance(content, Mapping) and set(content) == {"result"}:
                content = content["result"]
            elif isinstance(content, str):
                try:
                    content = json.loads(_unfenced(content))
                except (ValueError, RecursionError):
                    break
            else:
                break
        return None if self.structured is None and content is self.text else content


def _unfenced(text: str) -> str:
    """Return what stands in a fence that is the whole text; another text as it is."""
    fence, bare = "```", text.strip()
    first, line_end, rest = bare.partition("\n")
    if line_end and first.rstrip() in (fence, f"{fence}json") and rest.endswith(fence):
        return rest.removesuffix(fence)
    return text


def no_such_tool(name: str, names: Iterable[str]) -> ToolResult:
    """Return the result of a call of a tool that does not exist."""
    return ToolResult(
        f"there is no tool {name!r}; there are: {', '.join(names) or 'none'}",
        error="unknown_tool",
    )


def bounded(name: str, result: ToolResult) -> ToolResult:
    """Return the result of tool `name` with a text of at most LONGEST_RESULT characters (and a
    note that it was cut), and of whole characters. More than LARGEST_RESULT characters of text or
    JSON are the failure "too_large"."""
    size = max(
        len(result.text), len(as_json(result.structured)) if result.structured is not None else 0
    )
    if size > LARGEST_RESULT:
        words = (
            f"{name}: its result has {size:,} characters, at most"
            f" {LARGEST_RESULT:,} are taken: ask for less"
        )
        return ToolResult(words, error="too_large", seconds=result.seconds)
    text = whole_characters(result.text)
    if len(text) > LONGEST_RESULT:
        text = f"{text[:LONGEST_RESULT]}\n[… cut: {len(text):,} characters]"
    return result if text == result.text else replace(result, text=text)


def as_json(value: Any) -> str:
    """Return JSON text; what JSON does not have is its `str`. Raises TypeError, ValueError: keys
    that are not text."""
    return json.dumps(value, ensure_ascii=False, default=str)


MadeCall = tuple[str, Mapping[str, Any]]
"""Name and arguments of a call."""


@dataclass(frozen=True)
class CallsBefore:
    """The calls that an episode made before one. `prompt`: the last user message of its opening,
    None where it is not known."""

    calls: Sequence[MadeCall] = ()
    prompt: str | None = None


def last_question(prompt: str | Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of the last user message, or None. A text is one."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt if message.get("role") == "user"]
    if not contents:
        return None
    parts = contents[-1] if isinstance(contents[-1], list) else [{"text": contents[-1]}]
    return "".join(part.get("text") or "" for part in parts)


class RecordedTools:
    """Tools whose answers were recorded, in a file. An equal call gets the recorded answer; no
    other is made.

    {"definitions": [{"name", "description", "parameters"}],
     "runs": [{"prompt"?, "calls": [{"name", "arguments", "text", "error"?}]}]}

    The calls of a run are in the order in which they were made. "calls" in the place of "runs" is
    one run. Where equal calls were answered differently, the episode gets the answer of the call
    that stands most alike: behind the same prompt, behind the same other calls, after as many equal
    ones; of those the latest. So the second of two equal calls gets the second answer, and a read
    behind a write what was read there. Its last recorded answer is repeated.
    """

    def __init__(
        self, definitions: Iterable[dict[str, Any]], runs: Iterable[Mapping[str, Any]]
    ) -> None:
        self.definitions = {definition["name"]: definition for definition in definitions}
        self._answers: defaultdict[str, list[_Recorded]] = defaultdict(list)
        for run in runs:
            before: Counter[str] = Counter()
            for call in run["calls"]:
                key = _key(call["name"], call["arguments"])
                others = Counter({other: n for other, n in before.items() if other != key})
                error: Failure | None = "tool" if call.get("error") else None
                answer = ToolResult(str(call["text"]), error=error)
                self._answers[key].append(_Recorded(run.get("prompt"), others, before[key], answer))
                before[key] += 1

    @classmethod
    def read(cls, path: str | Path) -> "RecordedTools":
        """Raises ConfigError: the file cannot be read, or is of another form."""
        try:
            data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
            return cls(data["definitions"], data.get("runs", [data]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"tools.recorded: {path} holds no recorded tools: {type(error).__name__}: {error}"
            ) from error

    def call(
        self, name: str, arguments: Mapping[str, Any], before: CallsBefore | None = None
    ) -> ToolResult:
        """Return the recorded answer after the episode's earlier calls; None: the latest one. A
        call without a record is a failure that says so."""
        key = _key(name, arguments)
        recorded = self._answers.get(key)
        if not recorded:
            words = f"{name}: no answer to these arguments was recorded"
            return ToolResult(words, error="arguments")
        call = recorded[-1]
        if before is not None and len(recorded) > 1:
            made = Counter(_key(*each) for each in before.calls)
            equal = made.pop(key, 0)
            call = min(
                reversed(recorded), key=lambda each: each.distance(before.prompt, made, equal)
            )
        return call.answer


@dataclass(frozen=True)
class _Recorded:
    """A recorded call: the run's prompt, how often it made each other call before, how many equal
    ones, and the answer."""

    prompt: str | None
    others: Counter[str]
    equal: int
    answer: ToolResult

    def distance(
        self, prompt: str | None, others: Counter[str], equal: int
    ) -> tuple[bool, int, int]:
        apart = (self.others - others).total() + (others - self.others).total()
        return prompt is None or prompt != self.prompt, apart, abs(self.equal - equal)


def _key(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps([name, arguments], sort_keys=True, default=str)

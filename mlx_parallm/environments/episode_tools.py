"""EpisodeTools: the policy's tools in the episodes of an environment of any kind.

    a turn of the policy → its calls are made → their results → a turn … → an answer without a call

`Episode.turn` does it, so that environments need not know of it: they see the answer. What tools
say is not sampled, so it is masked. An episode's metadata gets `tool_calls`, one dictionary for
each call: `name`, `arguments`, `text`, `error` (None, a kind of `ToolResult.error`, or "malformed"
for a call that cannot be read), `ok`, `seconds`, `cached`; and `answer_text`, the last answer
without a call (None where `max_rounds` or the room for tokens ended before one).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from mlx_parallm.config.tools import ToolsConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_calls import (
    Format,
    MalformedCall,
    ParsedCalls,
    ToolCall,
    how_to_call,
)
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.execution.tool_results import (
    UNANSWERED,
    CallsBefore,
    MadeCall,
    RecordedTools,
    ToolResult,
    no_such_tool,
)
from mlx_parallm.execution.user_code import did_you_mean, load_function
from mlx_parallm.system.log import get_logger

log = get_logger("environments")

MOST_CALLS = 16  # in one turn; a model may repeat itself


@dataclass(frozen=True)
class EpisodeTools:
    """The tools of an environment, and how calls are written. Any number of episodes share it.

    Args:
        client: makes the calls; its owner closes it.
        definitions: of the tools that the policy may call, as `ToolClient.definitions` returns
            them.
        formats: as in `parse_tool_calls`.
        max_rounds: most rounds of calls before a turn of the environment's is an answer.
    """

    client: ToolClient
    definitions: tuple[Mapping[str, Any], ...]
    formats: Literal["auto"] | Sequence[Format] = "auto"
    max_rounds: int = ToolsConfig.model_fields["max_rounds"].default
    _counted: dict[str, float] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)  # tools that the log has warned of

    @classmethod
    def of(cls, client: ToolClient, **options: Any) -> Self:
        """Return all tools of a client; starts its servers. `options`: `formats`, `max_rounds`.
        Raises ConfigError."""
        return cls(client, tuple(client.definitions()), **options)

    def only(self, names: Sequence[str], what: str) -> "EpisodeTools":
        """Return these tools alone. Raises ConfigError: there is no such tool."""
        available = [definition["name"] for definition in self.definitions]
        for name in names:
            if name not in available:
                raise ConfigError(
                    f"{what}: there is no tool {name!r}{did_you_mean(name, available)}:"
                    f" {', '.join(available)}"
                )
        return replace(
            self, definitions=tuple(each for each in self.definitions if each["name"] in names)
        )

    @property
    def how_to_call(self) -> str:
        """How a call is written in a prompt without a chat template."""
        return how_to_call(self.formats)

    async def call(
        self,
        calls: ParsedCalls,
        earlier: Sequence[Mapping[str, Any]] = (),
        prompt: str | None = None,
    ) -> list[dict[str, Any]]:
        """Make the calls of one turn, all at once; return their notes in the order of the text.

        Args:
            earlier: notes of the episode's calls so far.
            prompt: the last user message of its opening.
        """
        written = sorted([*calls, *calls.malformed], key=lambda call: call.start_pos)[:MOST_CALLS]
        made: list[MadeCall] = [
            (note["name"], note["arguments"]) for note in earlier if note["error"] != "malformed"
        ]
        waiting = []
        for call in written:
            waiting.append(self._note(call, CallsBefore(tuple(made), prompt)))
            if not isinstance(call, MalformedCall):
                made.append((call.name, call.arguments))
        return list(await asyncio.gather(*waiting))

    def new_counts(self) -> dict[str, float]:
        """Return what `ToolClient.metrics` counted since the last call, as keys of a metrics
        line; and "calls/NAME", "unanswered/NAME" and "failed/NAME" of each server or function that
        has failed."""
        now, before = self.client.metrics(), dict(self._counted)
        names = ["calls", "errors", "timeouts", "restarts", "cache_hits", "seconds"]
        for owner, counts in self.client.metrics_by_owner().items():
            if counts["unanswered"] or counts["failed"]:
                now |= {f"{kind}/{owner}": float(count) for kind, count in counts.items()}
                names += [f"{kind}/{owner}" for kind in counts]
        self._counted.update(now)
        return {f"tools/{name}": now[name] - before.get(name, 0.0) for name in names}

    async def _note(self, call: ToolCall | MalformedCall, before: CallsBefore) -> dict[str, Any]:
        if isinstance(call, MalformedCall):
            text = f"the call cannot be read: {call.reason}"
            return _note("", call.raw_text, ToolResult(text), error="malformed")
        names = [definition["name"] for definition in self.definitions]
        if call.name in names:
            result = await self.client.acall(call.name, call.arguments, before=before)
            if result.error in UNANSWERED and call.name not in self._warned:
                self._warned.add(call.name)
                log.warning(
                    "a tool gave no answer: episodes with such a call are not scored",
                    tool=call.name,
                    reason=result.text[:300],
                )
        else:
            result = no_such_tool(call.name, names)
        return _note(call.name, dict(call.arguments), result, error=result.error)


def open_tools(config: ToolsConfig) -> EpisodeTools | None:
    """Start the servers of [tools] and return its tools, whose client the caller closes; None:
    there are none.

    Raises ConfigError: a function that cannot be loaded, a server that cannot be started, one name
    twice.
    """
    if not (config.mcp or config.functions or config.recorded):
        return None
    functions = [load_function(reference, "tools.functions")[0] for reference in config.functions]
    servers = [section.server(f"server {number}") for number, section in enumerate(config.mcp, 1)]
    recorded = None if config.recorded is None else RecordedTools.read(config.recorded)
    client = ToolClient(
        servers, functions, function_timeout_s=config.function_timeout_s, recorded=recorded
    )
    with ExitStack() as unused:
        unused.callback(client.close)
        tools = EpisodeTools.of(client, formats=config.formats, max_rounds=config.max_rounds)
        unused.pop_all()
    return tools


def _note(name: str, arguments: Any, result: ToolResult, *, error: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "arguments": arguments,
        "text": result.text,
        "error": error,
        "ok": error is None,
        "seconds": result.seconds,
        "cached": result.cached,
    }


class SourceTools(ToolClient):
    """Tools that a source carries out itself, each call in the episode that makes it.

    Args:
        carry_out: makes the call `name(**arguments)`, behind what the episode did before.
    """

    def __init__(
        self,
        carry_out: Callable[[str, Mapping[str, Any], CallsBefore | None], Awaitable[ToolResult]],
    ) -> None:
        super().__init__()
        self._carry_out = carry_out

    async def acall(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        before: CallsBefore | None = None,
    ) -> ToolResult:
        return await self._carry_out(name, arguments or {}, before)

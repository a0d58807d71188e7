"""kind = "tools": the policy answers a question with the help of tools, of MCP servers or functions in Python.

    the question, the tools → policy → its calls are made → their results → policy → … → an answer without a call

What a tool says is not sampled: it is masked. The State's metadata holds the row's columns, `answer_text` (the last
answer, None when `max_turns` ended the episode) and `tool_calls`, one dictionary a call: `name`, `arguments`, `text`,
`error` (None, or `ToolResult.error`; "malformed" for a call that cannot be read), `seconds`, `cached`.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.rows import TaskData, read_tasks
from mlx_parallm.environments.state import BaseEnvironment, Inference, State
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_calls import Format, MalformedCall, ParsedCalls, ToolCall
from mlx_parallm.execution.tool_client import MCPServer, ToolClient, ToolResult
from mlx_parallm.execution.user_code import did_you_mean, load_function

MOST_CALLS = 16  # of one turn; a model may repeat itself


class ToolsEnvironment(BaseEnvironment):
    """Questions with tools. One `ToolClient` serves all episodes; its servers end with the environment."""

    blocking = True

    def __init__(
        self,
        inference: Inference | None = None,
        tasks: TaskData = (),
        *,
        mcp: Sequence[MCPServer | Mapping[str, Any]] = (),
        functions: Sequence[Callable[..., Any] | str] = (),
        formats: Format | str | Sequence[Format] = "auto",
        max_turns: int = 8,
        seed: int = 0,
    ) -> None:
        """
        Args:
            tasks: rows {"prompt": a text or messages, …}, or a JSONL file of them.
            mcp: servers, an `MCPServer` or its fields: {"command": ["uvx", "mcp-server-time"]}, {"url": "http://…/mcp"}.
            functions: functions of Python, or references to them ("python:file.py:name").
            formats: how calls are written, as in `parse_tool_calls`.
            max_turns: most turns of the policy.

        Raises ConfigError: no tasks, no tools, a field that a server does not have, a server that does not start.
        """
        super().__init__(inference)
        if max_turns < 1:
            raise ConfigError(f"tools: max_turns has to be at least 1, not {max_turns}")
        self._rows = read_tasks(tasks, "prompt", seed=seed, what="tools: tasks")
        self.max_turns, self._formats, self._next = max_turns, formats, 0
        loaded = [load_function(f, "tools: functions")[0] if isinstance(f, str) else f for f in functions]
        self.client = ToolClient([_server(entry, number) for number, entry in enumerate(mcp)], loaded)
        weakref.finalize(self, self.client.close)
        self._threads = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="tools environment")
        self._definitions = self.client.definitions()
        if not self._definitions:
            raise ConfigError('tools: there are none: set mcp = [{ command = ["…"] }] or functions')

    def reset(self, *, index: int | None = None, split: Split = "train") -> State:
        """Task `index` of a split; without an index the next one."""
        if index is None:
            index, self._next = self._next, self._next + 1
        row = dict(self._rows.row(index, split).columns)
        prompt = row.pop("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        return State(messages, metadata=row | {"tool_calls": [], "answer_text": None})

    def step(self, state: State) -> State:
        """Ask the policy, make its calls."""
        inference: Any = self._inference
        answers, calls = inference.batch_generate_with_tools([state.prompt], self._definitions, formats=self._formats)
        state.metadata["_calls"] = calls[0]
        return self.advance(state, state.prompt, str(answers[0]))

    def update_state(self, state: State, response: str) -> State:
        """Make the calls of the answer and add their results to the conversation; without calls it is the end."""
        state = super().update_state(state, response)
        parsed: ParsedCalls = state.metadata.pop("_calls")
        made = sorted([*parsed, *parsed.malformed], key=lambda call: call.start_pos)[:MOST_CALLS]
        if not made:
            state.metadata["answer_text"], state.done = response, True
            return state
        notes = list(self._threads.map(self._note, made))
        state.metadata["tool_calls"] += notes
        state.done = state.step_count >= self.max_turns
        role = "tool" if self._template_takes_tools else "user"
        results = [{"role": role, "content": note["text"]} for note in notes]
        if role == "user":  # templates without tools often want the roles in turns
            results = [{"role": role, "content": "\n".join(note["text"] for note in notes)}]
        state.prompt = [*state.prompt, {"role": "assistant", "content": response}, *results]
        return state

    def _note(self, call: ToolCall | MalformedCall) -> dict[str, Any]:
        if isinstance(call, MalformedCall):
            result = ToolResult(f"the call cannot be read: {call.reason}")
            return {
                "name": "",
                "arguments": call.raw_text,
                "text": result.text,
                "error": "malformed",
                "seconds": 0.0,
                "cached": False,
            }
        result = self.client.call(call.name, call.arguments)
        return {
            "name": call.name,
            "arguments": dict(call.arguments),
            "text": result.text,
            "error": result.error,
            "seconds": result.seconds,
            "cached": result.cached,
        }

    @property
    def _template_takes_tools(self) -> bool:
        return bool(getattr(getattr(self.inference, "tokenizer", None), "template_takes_tools", True))


def _server(entry: MCPServer | Mapping[str, Any], number: int) -> MCPServer:
    """Raises ConfigError."""
    if isinstance(entry, MCPServer):
        return entry
    if not isinstance(entry, Mapping):
        raise ConfigError(f"tools: mcp: {entry!r} is no table of a server's fields")
    known = tuple(MCPServer.__dataclass_fields__)
    for key in entry:
        if key not in known:
            raise ConfigError(f"tools: mcp: unknown key {key!r}{did_you_mean(key, known)}")
    return MCPServer(**{"name": f"server {number + 1}", **entry})

"""[tools]: the tools of the policy in its episodes, and of rewards."""

import os
import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator, model_validator

from mlx_parallm.config.environment import Section
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution import mcp_connection, tool_client
from mlx_parallm.execution.mcp_connection import MCPServer
from mlx_parallm.execution.tool_calls import FORMATS, Format

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\}|(\$))")


class MCPServerSection(Section):
    command: tuple[str, ...] = ()
    """A program that speaks MCP over stdio, and its arguments; or else `url`."""
    url: str = ""
    """Address of a server that speaks streamable HTTP."""
    name: str = ""
    """In messages and metrics; default: "server 1" and so on."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program, over PATH, HOME, USER and such: it inherits no
    others. "$NAME" in a value is this process's variable."""
    cwd: str | None = None
    """Working directory of the program."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers. "$NAME" in a value is this process's variable: { Authorization = "Bearer
    $TOKEN" }."""
    timeout_s: float = Field(mcp_connection.CALL_TIMEOUT_S, gt=0)
    """Longest time of a call; then its result is an error."""
    start_timeout_s: float = Field(mcp_connection.START_TIMEOUT_S, gt=0)
    """Longest time of a start."""
    max_concurrent: int = Field(mcp_connection.MAX_CONCURRENT, ge=1)
    """Calls at a time; further ones wait."""
    restarts: int = Field(mcp_connection.RESTARTS, ge=0)
    """Starts in a row that may fail; then there is one a minute, and calls in between fail at
    once."""
    cache: bool = True
    """Keep the results of tools that the server marks read-only and idempotent, by their
    arguments, until a call of another tool may have changed something."""
    tools: tuple[str, ...] = ()
    """Only these tools of the server; none named: all."""

    def server(self, name: str) -> MCPServer:
        """Return `ToolClient`'s arguments; `name` if the section has none. Raises ConfigError."""
        name = self.name or name
        return MCPServer(
            name,
            command=self.command,
            url=self.url,
            env=_expanded(self.env, f"MCP server {name!r}: env"),
            cwd=self.cwd,
            headers=_expanded(self.headers, f"MCP server {name!r}: headers"),
            timeout_s=self.timeout_s,
            start_timeout_s=self.start_timeout_s,
            max_concurrent=self.max_concurrent,
            restarts=self.restarts,
            cache=self.cache,
            tools=self.tools,
        )

    @model_validator(mode="after")
    def _one_way(self) -> "MCPServerSection":
        if bool(self.command) == bool(self.url):
            raise ValueError("set either command or url")
        return self


class ToolsConfig(Section):
    mcp: tuple[MCPServerSection, ...] = ()
    functions: tuple[str, ...] = ()
    """Functions of Python with annotations and a docstring: ["python:file.py:name"]."""
    recorded: str | None = None
    """File of recorded calls (`execution/tool_results.py`; the pipeline writes one from traces):
    an equal call gets the recorded answer again, where no function or server has a tool of that
    name; of several different ones, that of the same place in a run."""
    function_timeout_s: float = Field(tool_client.FUNCTION_TIMEOUT_S, gt=0)
    """Longest call of a function."""
    formats: Literal["auto"] | tuple[Format, ...] = "auto"
    """How calls are written: "auto" reads all formats, a list only these: "own" (the model's
    own), "xml", "json", "use_tool", "tool_line" (TOOL: name(k=v)), "function". Without "own" the
    first one is what the prompt teaches."""
    max_rounds: int = Field(8, ge=1)
    """Most rounds of calls before a turn is an answer."""

    @field_validator("formats", mode="before")
    @classmethod
    def _one_format(cls, value: object) -> object:
        return (value,) if value in FORMATS else value


def _expanded(values: Mapping[str, str], what: str) -> dict[str, str]:
    """Raises ConfigError: a variable is not set."""

    def variable(match: re.Match[str]) -> str:
        if match[3]:
            return "$"
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(
                f"{what}: the environment variable {name} is not set; $$ is a dollar sign"
            )
        return os.environ[name]

    return {name: _VARIABLE.sub(variable, value) for name, value in values.items()}

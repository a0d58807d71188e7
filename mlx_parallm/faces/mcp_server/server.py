"""`mlx_parallm mcp`: an MCP server with which an agent starts, watches, evaluates and asks
trainings.

The SDK is the extra `mcp`. Over stdio nothing but the protocol may go to stdout.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mlx_parallm.config.arguments import Arguments, Count, Directory
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.system.packages import require, require_mlx
from mlx_parallm.system.signals import Shutdown

if TYPE_CHECKING:
    from mlx_parallm.faces.mcp_server.trainings import Trainings

HOST, DRAIN_S = "127.0.0.1", 5.0
EVALUATION_TIMEOUT_S = 3600.0
ASK_TIMEOUT_S = 600.0
MOST_PROBLEMS, MOST_OVERRIDES = 10_000, 1000
PROBLEMS, ANSWER_TOKENS = 20, 256  # defaults if an agent names no number
INSTRUCTIONS = (
    "Trains language models by reinforcement learning on this machine. start_training takes a TOML"
    " configuration of mlx_parallm; training_status says how far it is; ask_policy talks"
    " with the model while it learns."
)


class MCP(Arguments):
    """`mlx_parallm mcp`: the server, over stdio or streamable HTTP on this machine."""

    directory: Directory = Path("trainings")
    """directory of the trainings"""
    http: Annotated[int, "PORT"] | None = None
    """serve http://127.0.0.1:PORT/mcp; default: stdio"""
    most_running: Count = 1
    """trainings at a time"""

    def run(self) -> int:
        require_mlx()  # for the trainings that it starts
        from mlx_parallm.faces.mcp_server.trainings import Trainings  # --help stays quick

        def server() -> Any:
            return make_server(Trainings(self.directory, most_running=self.most_running))

        if self.http is None:
            # a thread of the SDK waits for standard input until the limit
            with Shutdown() as shutdown, shutdown.interrupts(0.0):
                server().run("stdio")
            return 0
        from mlx_parallm.server.thread import serve_until_signal

        serve_until_signal(
            lambda: server().streamable_http_app(host=HOST),
            HOST,
            self.http,
            _announce,
            drain_s=DRAIN_S,
            lifespan="on",
            port_flag="--http",
        )
        return 0


def _announce(url: str) -> None:
    sys.stderr.write(f"{url}/mcp: Uvicorn running on {url}\n")
    sys.stderr.flush()


def make_server(trainings: "Trainings") -> Any:
    """Return the SDK's server with the tools of `trainings`. Raises ConfigError: the SDK is not
    installed."""
    require("mlx_parallm mcp", "mcp.server.mcpserver", "mcp_types")
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations

    server, tools = (
        MCPServer("mlx_parallm", instructions=INSTRUCTIONS),
        AgentTools(trainings, ToolError),
    )
    for tool in tools.all():
        # No read_only_hint: clients keep the results of such tools, and these change.
        server.tool(annotations=ToolAnnotations(destructive_hint=tool == tools.stop_training))(tool)
    return server


class AgentTools:
    """The tools of an agent. Signatures and docstrings are the tools' definitions; `failure` is
    raised with the reason of a failed call."""

    def __init__(self, trainings: "Trainings", failure: type[Exception]) -> None:
        self._trainings, self._failure = trainings, failure
        self._evaluating = asyncio.Lock()

    def all(self) -> Sequence[Callable[..., Any]]:
        manage = (self.start_training, self.stop_training, self.switch_training)
        look = (self.training_status, self.list_trainings, self.training_log)
        return (*manage, *look, self.evaluate, self.ask_policy)

    async def start_training(
        self, name: str, config: str, overrides: list[str] | None = None
    ) -> dict[str, Any]:
        """Start a training. `config`: a TOML file, a shipped configuration's name (such as
        quickstart), or TOML text.
        `overrides`: ["rl_training.total_steps=50"], 1,000 at most. It becomes the current one."""
        if len(overrides or []) > MOST_OVERRIDES:
            raise self._failure(
                f"overrides has {len(overrides or []):,} entries; at most {MOST_OVERRIDES:,}"
            )
        return dict(await self._carried_out(self._trainings.start, name, config, overrides or []))

    async def stop_training(self, name: str = "") -> dict[str, Any]:
        """Save and end a training; without a name the current one."""
        return dict(await self._carried_out(self._trainings.stop, name))

    async def training_status(self, name: str = "") -> dict[str, Any]:
        """State (starting, running, completed, stopped, failed), step and metrics of a training."""
        return dict(await self._carried_out(self._trainings.status, name))

    async def list_trainings(self) -> dict[str, Any]:
        """All trainings, the newest first."""
        return {"trainings": await self._carried_out(self._trainings.all)}

    async def switch_training(self, name: str) -> dict[str, Any]:
        """Make a training the current one, which the other tools mean without a name."""
        return dict(await self._carried_out(self._trainings.switch, name))

    async def training_log(self, name: str = "", lines: int = 20) -> str:
        """The last lines that a training printed."""
        return str(await self._carried_out(self._trainings.log, name, lines))

    async def evaluate(self, name: str = "", problems: int = PROBLEMS) -> dict[str, Any]:
        """Answer held-out problems with the model of a running training; return its numbers with
        their intervals."""
        if self._evaluating.locked():
            raise self._failure(
                "an evaluation runs: each takes its own process, so there is one at a time"
            )
        if not 1 <= problems <= MOST_PROBLEMS:
            raise self._failure(f"problems: 1 to {MOST_PROBLEMS}")
        async with self._evaluating:
            return dict(await self._carried_out(_evaluate, self._trainings, name, problems))

    async def ask_policy(
        self, prompt: str, name: str = "", max_tokens: int = ANSWER_TOKENS, temperature: float = 0.0
    ) -> str:
        """Ask the model of a running training, as it is now."""
        try:
            return await _ask(self._trainings, prompt, name, max_tokens, temperature)
        except ParallmError as error:
            raise self._failure(str(error)) from error

    async def _carried_out(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *arguments)
        except ParallmError as error:
            raise self._failure(str(error)) from error


async def _ask(
    trainings: "Trainings", prompt: str, name: str, max_tokens: int, temperature: float
) -> str:
    """Raises ConfigError, EndpointError."""
    training = await asyncio.to_thread(trainings.running, name)
    from mlx_parallm.execution.openai_client import OpenAIEndpoint

    endpoint = OpenAIEndpoint(f"http://127.0.0.1:{training.port}/v1", None, timeout_s=ASK_TIMEOUT_S)
    try:
        body = {"model": "default", "messages": [{"role": "user", "content": prompt}]}
        reply = await endpoint.post(
            "/chat/completions", {**body, "max_tokens": max_tokens, "temperature": temperature}
        )
    finally:
        await endpoint.aclose()
    return str(reply["choices"][0]["message"]["content"] or "")


def _evaluate(trainings: "Trainings", name: str, problems: int) -> Mapping[str, Any]:
    """Raises ConfigError: it does not run, or the evaluation failed."""
    training = trainings.running(name)
    run = trainings.directory / training.name / "run"
    with tempfile.TemporaryDirectory(prefix="mlx_parallm_evaluation_") as output:
        command = [
            sys.executable,
            "-m",
            "mlx_parallm",
            "eval",
            "--config",
            str(run / "config.toml"),
        ]
        command += ["--url", f"http://127.0.0.1:{training.port}/v1", "--model", "default"]
        command += ["--problems", str(problems), "--output", output]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=EVALUATION_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"the evaluation took longer than {EVALUATION_TIMEOUT_S:g} s"
            ) from error
        if done.returncode != 0:
            raise ConfigError(
                "the evaluation failed:"
                f" {done.stderr.strip().splitlines()[-1:] or done.stdout[-200:]}"
            )
        result = json.loads((Path(output) / "results.json").read_text(encoding="utf-8"))
    numbers = {environment: part["numbers"] for environment, part in result["environments"].items()}
    return {"name": training.name, "score": result["score"], "environments": numbers}

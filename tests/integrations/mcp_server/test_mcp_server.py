"""An agent's view: the server's tools over MCP, with real training processes behind them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import MCPServer, ToolClient
from mlx_parallm.integrations.mcp_server.trainings import Trainings
from scripts.server_process import free_port

pytest.importorskip("mcp")

CONFIG = """
[model]
base_path = "builtin:tiny"

[rl_training]
total_steps = 100000
batch_size = 8

[rl_training.atropos]
rollout_batch_size = 8

[[environments]]
kind = "tasks"
name = "sum"
group_size = 4
max_tokens = 4
"""


def command(directory: Path) -> list[str]:
    return [sys.executable, "-m", "mlx_parallm", "mcp", "--directory", str(directory)]


def client(directory: Path) -> ToolClient:
    return ToolClient([MCPServer("mlx_parallm", command=command(directory), timeout_s=180.0, start_timeout_s=60.0)])


@contextmanager
def over_http(directory: Path) -> Iterator[ToolClient]:
    port = free_port()
    words = [*command(directory), "--http", str(port)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("Uvicorn running" in line for line in process.stderr), "it does not listen"
            with ToolClient([MCPServer("mlx_parallm", url=f"http://127.0.0.1:{port}/mcp", timeout_s=180.0)]) as tools:
                yield tools
        finally:
            process.terminate()
            process.communicate(timeout=30)


def called(tools: ToolClient, tool: str, /, **arguments: Any) -> Any:
    result = tools.call(tool, arguments)
    assert result.error is None, result.text
    return result.structured


def until(tools: ToolClient, wanted: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while not wanted(status := called(tools, "training_status")):
        assert time.monotonic() < deadline and status["state"] in ("starting", "running"), status
        time.sleep(0.2)
    return dict(status)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "trainings"
    trainings = Trainings(tmp_path / "trainings")
    for status in trainings.all():
        trainings.stop(status["name"])


@pytest.mark.slow
@pytest.mark.long
def test_an_agent_starts_watches_asks_and_stops_a_training(directory: Path) -> None:
    with client(directory) as tools:
        names = {definition["name"] for definition in tools.definitions()}
        assert names == {
            *("start_training", "stop_training", "switch_training", "training_status", "list_trainings"),
            *("training_log", "evaluate", "ask_policy"),
        }
        assert called(tools, "start_training", name="first", config=CONFIG)["state"] in ("starting", "running")
        until(tools, lambda status: status["state"] == "running" and status["step"] >= 2)
        refused = tools.call("start_training", {"name": "second", "config": CONFIG})
        assert refused.error == "tool" and "first is running, and at most 1 may" in refused.text
    with over_http(directory) as tools:  # another server, and the same training
        status = until(tools, lambda status: status["step"] >= 3)
        assert status["name"] == "first" and status["current"] and "reward_mean" in status["metrics"]
        answer = tools.call("ask_policy", {"prompt": "Sum: 2+3", "max_tokens": 4})
        assert answer.error is None, answer.text
        assert called(tools, "evaluate", problems=4)["environments"]["sum"]["problems"] == 4
        stopped = called(tools, "stop_training")
        assert (stopped["state"], stopped["url"]) == ("stopped", None) and stopped["step"] >= 3
        assert list((directory / "first/run").glob("step_*")), "it has saved"
        assert "first is stopped" in tools.call("ask_policy", {"prompt": "x"}).text.replace("'", "")
        assert [each["name"] for each in called(tools, "list_trainings")["trainings"]] == ["first"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(directory) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.slow
def test_a_training_that_fails_says_why_and_leaves_nothing(directory: Path, tmp_path: Path) -> None:
    trainings = Trainings(directory)
    missing = CONFIG.replace("builtin:tiny", str(tmp_path / "no_model"))
    trainings.start("broken", missing)
    deadline = time.monotonic() + 60
    while (status := trainings.status())["state"] in ("starting", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert status["state"] == "failed" and "no_model" in status["log"]


def test_what_cannot_be_started(directory: Path) -> None:
    trainings = Trainings(directory)
    with pytest.raises(ConfigError, match="there is no training yet"):
        trainings.status()
    for name in ("../x", "", "a/b", ".hidden"):
        with pytest.raises(ConfigError, match="letters, digits"):
            trainings.start(name, CONFIG)
    with pytest.raises(ConfigError, match="unknown key"):
        trainings.start("x", CONFIG + "\n[serverr]\n")
    with pytest.raises(ConfigError, match="no configuration 'nothing'"):
        trainings.start("x", "nothing")
    with pytest.raises(ConfigError, match="there is no training 'x'; there are: none"):
        trainings.switch("x")
    assert list(directory.iterdir()) == []

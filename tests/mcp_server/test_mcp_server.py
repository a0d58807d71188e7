"""An agent's view: the server's tools over MCP, with real training processes behind them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import MCPServer, ToolClient
from mlx_parallm.faces.mcp_server.trainings import Trainings
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
    return ToolClient(
        [
            MCPServer(
                "mlx_parallm", command=command(directory), timeout_s=180.0, start_timeout_s=60.0
            )
        ]
    )


@contextmanager
def over_http(directory: Path) -> Iterator[ToolClient]:
    port = free_port()
    words = [*command(directory), "--http", str(port)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("Uvicorn running" in line for line in process.stderr), "it does not listen"
            with ToolClient(
                [MCPServer("mlx_parallm", url=f"http://127.0.0.1:{port}/mcp", timeout_s=180.0)]
            ) as tools:
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
            *(
                "start_training",
                "stop_training",
                "switch_training",
                "training_status",
                "list_trainings",
            ),
            *("training_log", "evaluate", "ask_policy"),
        }
        assert called(tools, "start_training", name="first", config=CONFIG)["state"] in (
            "starting",
            "running",
        )
        until(tools, lambda status: status["state"] == "running" and status["step"] >= 2)
        refused = tools.call("start_training", {"name": "second", "config": CONFIG})
        assert refused.error == "tool" and "first is running, and at most 1 may" in refused.text
    with over_http(directory) as tools:  # another server, and the same training
        status = until(tools, lambda status: status["step"] >= 3)
        assert (
            status["name"] == "first" and status["current"] and "reward_mean" in status["metrics"]
        )
        answer = tools.call("ask_policy", {"prompt": "Sum: 2+3", "max_tokens": 4})
        assert answer.error is None, answer.text
        assert called(tools, "evaluate", problems=4)["environments"]["sum"]["problems"] == 4
        stopped = called(tools, "stop_training")
        assert (stopped["state"], stopped["url"]) == ("stopped", None) and stopped["step"] >= 3
        assert list((directory / "first/run").glob("step_*")), "it has saved"
        assert "first is stopped" in tools.call("ask_policy", {"prompt": "x"}).text.replace("'", "")
        assert [each["name"] for each in called(tools, "list_trainings")["trainings"]] == ["first"]
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(directory) in " ".join(p.info["cmdline"] or [])
    ]


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
    with pytest.raises(ConfigError, match="'nothing'"):
        trainings.start("x", "nothing")
    with pytest.raises(ConfigError, match="'x'"):
        trainings.switch("x")
    assert list(directory.iterdir()) == []


def test_what_a_hostile_agent_sends(tmp_path: Path) -> None:
    """Null bytes, half a character, a name that leads out, a huge number of lines; a damaged or
    removed record hides no other training; a process is known by its arguments, not by a time
    that the clock changes."""
    trainings = Trainings(tmp_path)
    for config in ("a\0b", "a\n\ud800", "x" * (2 << 20)):
        with pytest.raises(ConfigError):
            trainings.start("one", config)
    with pytest.raises(ConfigError, match="null byte"):
        trainings.start("one", CONFIG, ["rl_training.run_name=a\0b"])
    assert not (tmp_path / "one").exists()
    for name in ("../x", "/etc", "a" * 100, "\0", ""):
        with pytest.raises(ConfigError):
            trainings.status(name)
    sleeper = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60; true", str(tmp_path / "a" / "exit_code")]
    )
    try:
        known = {
            "name": "a",
            "pid": sleeper.pid,
            "created": 5.0,
            "port": 9,
            "total_steps": 1,
            "started_at": 1.0,
        }
        for name, text in {"a": json.dumps(known), "b": "["}.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "training.json").write_text(text)
        (tmp_path / "a" / "train.log").write_bytes(b"\xff line\n" * 5000)
        assert {each["name"]: each["state"] for each in trainings.all()} == {
            "a": "starting",
            "b": "damaged",
        }
        assert (
            len(trainings.log("a", 10**9).splitlines()) == 1000
            and len(trainings.log("a", -5).splitlines()) == 1
        )
    finally:
        sleeper.kill()
        sleeper.wait()
    assert trainings.status("a")["state"] == "failed"
    (tmp_path / "a" / "train.log").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        trainings.log("a")


@pytest.mark.slow  # it starts a process
def test_a_page_of_another_origin_cannot_use_the_server(tmp_path: Path) -> None:
    """Over HTTP: a foreign Host or Origin, and a body that a browser sends without asking first."""
    port = free_port()
    with subprocess.Popen(
        [*command(tmp_path), "--http", str(port)], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None and any(
                "Uvicorn running" in line for line in process.stderr
            )
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            accept = {"Accept": "application/json, text/event-stream"}
            url = f"http://127.0.0.1:{port}/mcp"
            for headers in (
                {"Origin": "https://example.org"},
                {"Origin": "null"},
                {"Host": "example.org"},
                {"Content-Type": "text/plain"},
                {"Origin": "http://127.0.0.1:18812", "Content-Type": "text/plain"},
            ):
                answer = httpx.post(url, json=call, headers=accept | headers, timeout=20)
                assert 400 <= answer.status_code < 500, (headers, answer.status_code)
        finally:
            process.terminate()
            process.communicate(timeout=30)


@pytest.mark.parametrize("name", ["current", "Current"])
def test_a_training_is_not_named_as_the_file_beside_it(tmp_path: Path, name: str) -> None:
    trainings = Trainings(tmp_path)
    with pytest.raises(ConfigError, match="training"):
        trainings.start(name, "quickstart")
    assert not list(tmp_path.iterdir()) and trainings.all() == []


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--directory"):
        Trainings(tmp_path / "file" / "trainings")

"""Tools of real MCP servers, over stdio and HTTP, and functions: results, and every way to fail."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import psutil
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import MCPServer, ToolClient, ToolResult
from mlx_parallm.execution.tool_results import (
    LARGEST_RESULT,
    LONGEST_RESULT,
    CallsBefore,
    RecordedTools,
)
from scripts.server_process import free_port

pytest.importorskip("mcp")
PROGRAM = str(Path(__file__).with_name("mcp_server.py"))


def stdio(*arguments: str, name: str = "tests", **changes: object) -> MCPServer:
    return MCPServer(name, command=[sys.executable, PROGRAM, *arguments], **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client() -> Iterator[ToolClient]:
    def greet(name: str, loud: bool = False) -> str:
        """Greet somebody."""
        if name == "nobody":
            raise LookupError("nobody is there")
        return f"hello {name}{'!' * loud}"

    with ToolClient([stdio()], [greet]) as client:
        yield client


def test_functions_and_tools_are_called_alike(client: ToolClient) -> None:
    definitions = {definition["name"]: definition for definition in client.definitions()}
    assert definitions["add"]["description"] == "Add two numbers."
    assert definitions["add"]["parameters"]["required"] == ["a", "b"]
    assert definitions["greet"]["parameters"]["properties"]["loud"]["type"] == "boolean"
    assert client.call("add", {"a": 2, "b": 40}).text == "42"
    assert client.call("greet", {"name": "Ada", "loud": True}).text == "hello Ada!"


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("multiply", {}, "unknown_tool", "there is no tool 'multiply'; there are: greet, add"),
        ("fail", {"reason": "out of ink"}, "tool", "out of ink"),
        ("greet", {"name": "nobody"}, "tool", "LookupError: nobody is there"),
        ("greet", {"nam": "Ada"}, "arguments", "missing a required argument: 'name'"),
    ],
)
def test_a_failure_is_a_result(
    client: ToolClient, name: str, arguments: dict[str, object], error: str, words: str
) -> None:
    result = client.call(name, arguments)
    assert result.error == error and words in result.text


def test_wrong_arguments_of_a_server(client: ToolClient) -> None:
    result = client.call("add", {"a": "two"})
    assert result.error in ("tool", "arguments") and "add" in result.text


def test_an_answer_is_kept_only_where_nothing_else_can_have_changed_it() -> None:
    def look() -> str:
        return "a function may change anything"

    with ToolClient([stdio()], [look]) as client:
        for moving in ("clock", "news"):  # read-only, and another answer each time
            assert not any(client.call(moving).cached for _ in range(2))
        for change in ("count", "look"):
            before = client.call("counted").text
            assert client.call("counted").cached
            client.call(change)
            after = client.call("counted")
            assert not after.cached and int(after.text) == int(before) + (change == "count")
        assert client.call("counted").cached
        client.forget()
        assert not client.call("counted").cached
        asyncio.run(_overlapping(client))
        assert not client.call("counted").cached
        client.call("end")
        assert client.call("counted").text == "0" and not client.call("count").cached


async def _overlapping(client: ToolClient) -> None:
    """Read while a tool that may change something runs: what is read is not kept."""
    await asyncio.gather(client.acall("sleep", {"seconds": 0.05}), client.acall("counted"))


def test_recorded_calls_are_answered_again(tmp_path: Path) -> None:
    """Equal arguments get the last recorded answer, whatever the order of their keys; others a
    failure in words. A function of the same name is called instead."""
    file = tmp_path / "tools.json"
    definitions = [{"name": name, "description": "", "parameters": {}} for name in ("price", "now")]
    calls = [
        {"name": "price", "arguments": {"a": 1, "b": [2]}, "text": "3"},
        {"name": "price", "arguments": {"b": [2], "a": 1}, "text": "4"},
        {"name": "price", "arguments": {"a": 9}, "text": "gone", "error": True},
    ]
    file.write_text(json.dumps({"definitions": definitions, "calls": calls}))

    def now() -> str:
        """Tell the time."""
        return "noon"

    with ToolClient((), [now], recorded=RecordedTools.read(file)) as client:
        assert [each["name"] for each in client.definitions()] == ["now", "price"]
        assert client.call("price", {"a": 1, "b": [2]}) == ToolResult("4", seconds=ANY)
        assert client.call("price", {"a": 9}).error == "tool"
        other = client.call("price", {"a": "1", "b": [2]})
        assert other.error == "arguments" and "no answer to these arguments was" in other.text
        assert client.call("now").text == "noon"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds no recorded tools"):
        RecordedTools.read(file)


READ, WRITE, POLL = ("read", {}), ("write", {"to": 2}), ("poll", {"job": "a"})
RUNS: list[tuple[str, list[tuple[tuple[str, dict[str, Any]], str]]]] = [
    ("Set it.", [(READ, "1"), (READ, "1"), (WRITE, "done"), (READ, "2")]),
    ("Wait.", [(POLL, "queued"), (POLL, "running"), (POLL, "ready")]),
    ("Who?", [(READ, "Ann")]),
    ("Who else?", [(READ, "Bob")]),
]


@pytest.mark.parametrize(
    ("prompt", "made", "answers"),
    [
        ("Wait.", [POLL] * 5, ["queued", "running", "ready", "ready", "ready"]),
        ("Set it.", [READ, WRITE, READ, READ], ["1", "done", "2", "2"]),
        ("Set it.", [WRITE, READ], ["done", "2"]),
        ("Set it.", [READ] * 4, ["1"] * 4),
        ("Who?", [READ, READ], ["Ann", "Ann"]),
        ("Who else?", [POLL, READ], ["queued", "Bob"]),
        ("Never asked.", [WRITE, READ], ["done", "2"]),
        (None, [POLL, READ, POLL], ["queued", ANY, "running"]),
    ],
)
def test_equal_calls_get_recorded_answers_in_their_order(
    prompt: str | None, made: list[tuple[str, dict[str, Any]]], answers: list[str]
) -> None:
    """Those of the run with the same prompt, behind the same other calls; each episode begins
    anew, whatever others do meanwhile."""
    names = ("read", "write", "poll")
    recorded = RecordedTools(
        [{"name": name, "description": "", "parameters": {}} for name in names],
        [
            {
                "prompt": asked,
                "calls": [{"name": n, "arguments": a, "text": text} for (n, a), text in calls],
            }
            for asked, calls in RUNS
        ],
    )
    with ToolClient(recorded=recorded) as client:
        for _ in range(2):
            got = [
                client.call(*call, before=CallsBefore(made[:place], prompt)).text
                for place, call in enumerate(made)
            ]
            assert got == answers


def test_constant_tools_are_cached_and_others_are_not() -> None:
    with ToolClient([stdio()]) as client:
        first, second = client.call("add", {"a": 1, "b": 2}), client.call("add", {"b": 2, "a": 1})
        assert (first.cached, second.cached, second.text) == (False, True, "3")
        assert [client.call("count").text for _ in range(3)] == ["1", "2", "3"]
        metrics = client.metrics()
        assert (
            metrics["calls"],
            metrics["cache_hits"],
            metrics["restarts"],
            metrics["errors"],
        ) == (5, 1, 0, 0)
        assert metrics["seconds"] > 0
        # the calls under way are one
        same = asyncio.run(_together(client, 8, "add", {"a": 40, "b": 2}))
        assert [result.text for result in same] == ["42"] * 8 and sum(
            result.cached for result in same
        ) == 7
    with ToolClient([stdio(cache=False)]) as client:
        assert not any(client.call("add", {"a": 1, "b": 2}).cached for _ in range(2))


def test_a_server_that_ends_is_started_again() -> None:
    with ToolClient([stdio()]) as client:
        first = client.call("pid").text
        assert client.call("end").error == "server"
        second = client.call("pid")
        assert second.error is None and second.text != first
        process = psutil.Process(int(second.text))
        process.kill()
        process.wait(10)
        assert client.call("count").error in (None, "server")
        assert client.call("add", {"a": 1, "b": 1}).text == "2"
        assert client.metrics()["restarts"] == 2


@pytest.mark.slow
def test_a_server_that_hangs_costs_its_time_out_and_begins_anew() -> None:
    with ToolClient([stdio(timeout_s=3.0)]) as client:
        client.definitions()
        hung = client.call("sleep", {"seconds": 30})
        assert hung.error == "timeout" and "within 3 s" in hung.text
        assert client.call("add", {"a": 1, "b": 1}).text == "2"


@pytest.mark.slow
def test_garbage_and_ten_megabytes(client: ToolClient) -> None:
    garbage = client.call("garbage")
    assert garbage.error in (None, "server")
    much = client.call("much", {"characters": 10**7})
    assert much.error == "too_large" and much.structured is None
    assert "has 10,000," in much.text and "at most 1,000,000 are taken" in much.text
    long = client.call("much", {"characters": LARGEST_RESULT // 2})
    assert long.error is None and LONGEST_RESULT < len(long.text) < LONGEST_RESULT + 100
    assert long.text.endswith("[… cut: 500,000 characters]")
    assert client.metrics()["errors/too_large"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "words"),
    [
        (stdio("ends"), "cannot be started"),
        (stdio("late", start_timeout_s=0.5), r"no answer within 0\.5 s"),
        (MCPServer("gone", command=["/nowhere/server"]), "cannot be started"),
        (MCPServer("gone", url="http://127.0.0.1:9/mcp"), "cannot be started"),
        (stdio(tools=["add", "divide"]), "has no tool 'divide'; it has: add, count"),
    ],
)
def test_a_server_that_does_not_start(server: MCPServer, words: str) -> None:
    with ToolClient([server]) as client:
        with pytest.raises(ConfigError, match=words):
            client.definitions()
        assert client.call("add").error == "server"


CRASHES = (
    "import sys; print('reading', file=sys.stderr); raise RuntimeError('no such table: prices')"
)
CHATTERS = "import sys; print('Usage: server --db FILE'); sys.exit(2)"
WAITS = "import sys, time; print('loading weights', file=sys.stderr, flush=True); time.sleep(60)"
NO_JSON = "print('Listening on port 80', flush=True); import time; time.sleep(60)"
FLOODS = (
    "import sys; [print(f'line {n}', file=sys.stderr) for n in"
    " range(10**5)]; sys.exit('the last line')"
)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (CRASHES, r"the end of its stderr: reading \| .*RuntimeError: no such table: prices$"),
        (CHATTERS, r"on its stdout was no JSON-RPC: Usage: server --db FILE$"),
        (FLOODS, r"the end of its stderr: line 99993 \| .* \| the last line$"),
        pytest.param(
            WAITS,
            r"no answer within 2 s \(start_timeout_s\) to initialize; the end of its stderr: loading weights$",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            NO_JSON,
            r"no answer within 2 s .* on its stdout was no JSON-RPC: Listening on port 80$",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failed_start_has_the_servers_last_words(
    program: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A crash, a usage line, a flood (only its end is kept), no answer to initialize, junk on
    stdout. Over HTTP, in the middle of a call, and a command that does not exist: the tests
    around this one."""
    late = 2.0 if "time.sleep" in program else 30.0
    server = MCPServer("s", command=[sys.executable, "-c", program], start_timeout_s=late)
    with ToolClient([server]) as client, pytest.raises(ConfigError, match=words) as raised:
        client.definitions()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1400
    assert capfd.readouterr().err == "", (
        "neither the server's stderr nor a traceback of the SDK reaches the terminal"
    )


@pytest.mark.slow
def test_a_server_that_dies_in_a_call_leaves_its_last_words() -> None:
    with ToolClient([stdio()]) as client:
        died = client.call("crash")
        assert died.error == "server" and died.text.endswith("out of memory: the table of prices")
        assert client.call("add", {"a": 1, "b": 1}).text == "2"


def test_an_http_servers_error_answer_is_named() -> None:
    """A wrong key, a full disk, another page at that address; a server that does not answer
    names its time-out."""
    release = threading.Event()

    class Wrong(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.path == "/hangs":
                release.wait(30)
            code, body = {
                "/key": (401, b'{"error": "no such key"}'),
                "/disk": (500, b"no space left"),
            }.get(self.path, (404, b"nothing here"))
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Wrong) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            for path, words in {
                "key": 'HTTP 401 {"error": "no such key"}',
                "disk": "HTTP 500 no space left",
                "mcp": "HTTP 404 nothing here",
                "hangs": "no answer within 0.3 s (start_timeout_s) to initialize",
            }.items():
                url = f"http://127.0.0.1:{http.server_port}/{path}"
                late = 0.3 if path == "hangs" else 30.0
                with ToolClient([MCPServer("s", url=url, start_timeout_s=late)]) as client:
                    with pytest.raises(ConfigError) as raised:
                        client.definitions()
                    assert str(raised.value).endswith(words)
        finally:
            release.set()
            http.shutdown()
            thread.join()


def test_an_sdk_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many servers need one of before 2.0; pip puts it in the place of ours."""
    monkeypatch.delattr("mcp.Client")
    with (
        ToolClient([stdio()]) as client,
        pytest.raises(ConfigError, match=r"'\.\[mcp\]'"),
    ):
        client.definitions()


def test_callers_share_a_start_and_its_failure() -> None:
    """A start each would take its time-out for every caller, one after another."""

    with ToolClient([stdio("ends", restarts=0)]) as client:
        assert {result.error for result in asyncio.run(_together(client, 20, "count", {}))} == {
            "server"
        }
        assert client.metrics()["restarts"] == 0
        refused = client.call("add")  # no start: the next one is a minute away
        assert refused.error == "server" and "1 times in a row" in refused.text
        assert client.metrics()["restarts"] == 0


def test_what_cannot_be(client: ToolClient) -> None:
    for changes in (
        {},
        {"command": ["x"], "url": "http://x"},
        {"url": "x"},
        {"url": "http://x", "timeout_s": 0},
    ):
        with pytest.raises(ConfigError, match="MCP server 's'"):
            MCPServer("s", **changes)
    with pytest.raises(ConfigError, match="already"):
        client.register_tool("greet", lambda: "")
    with pytest.raises(ConfigError, match=r"MCP servers.*name"):
        ToolClient([stdio(), stdio()])


@pytest.mark.slow
@pytest.mark.long
def test_no_process_is_left() -> None:
    with ToolClient([stdio(), stdio(name="more", tools=["pid"])]) as client:
        client.definitions()
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if PROGRAM in " ".join(child.cmdline())
    ]
    with ToolClient([stdio()]) as client:
        process = psutil.Process(int(client.call("pid").text))
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert len(children) <= 1  # the module's own


def test_over_http() -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "http", str(port)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "running on" in line:
                break
        with ToolClient(
            [MCPServer("http", url=f"http://127.0.0.1:{port}/mcp", tools=["add", "fail"])]
        ) as client:
            assert [definition["name"] for definition in client.definitions()] == ["add", "fail"]
            assert client.call("add", {"a": 2, "b": 3}).text == "5"
            assert client.call("count").error == "unknown_tool"
            process.kill()
            process.wait(10)
            assert client.call("add", {"a": 3, "b": 3}).error == "server"
    finally:
        process.kill()


async def _together(
    client: ToolClient, n: int, name: str, arguments: dict[str, object]
) -> list[ToolResult]:
    return await asyncio.gather(*(client.acall(name, arguments) for _ in range(n)))

"""What servers of the Model Context Protocol may send: each form of a result, and what would end
more than their own call."""

import json
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_parallm.execution import mcp_connection, mcp_process
from mlx_parallm.execution.tool_client import MCPServer, ToolClient
from mlx_parallm.system.foreign_http import Bounds
from tests.execution import raw_mcp_server

pytest.importorskip("mcp")
PROGRAM = str(Path(__file__).with_name("raw_mcp_server.py"))
EVIL = "^(?=a)(a|a)*\\1c$"


def server(tools: dict[str, Any] | None = None, name: str = "raw", **environment: str) -> MCPServer:
    variables = {"TOOLS": json.dumps(tools or {}), **environment}
    return MCPServer(name, command=[sys.executable, PROGRAM], env=variables)


def part(**fields: Any) -> dict[str, Any]:
    return {"result": {"content": [fields]}}


FORMS = {
    "embedded": (
        part(type="resource", resource={"uri": "file:///a.txt", "text": "CODE 4711"}),
        "CODE 4711",
    ),
    "blob": (
        part(
            type="resource",
            resource={"uri": "file:///b.bin", "mimeType": "image/png", "blob": "AAAA"},
        ),
        "[resource file:///b.bin image/png, 3 bytes]",
    ),
    "link": (
        part(type="resource_link", uri="https://x.example/r.pdf", name="r", description="a report"),
        "[r a report](https://x.example/r.pdf)",
    ),
    "image": (
        part(type="image", data="AAAAAAAA", mimeType="image/png"),
        "[image image/png, 6 bytes]",
    ),
    "audio": (part(type="audio", data="AAAA", mimeType="audio/wav"), "[audio audio/wav, 3 bytes]"),
    "structured": ({"result": {"content": [], "structuredContent": {"x": 1}}}, '{"x": 1}'),
}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"pattern": EVIL}}}


def checked(schema: Any, structured: Any = None) -> dict[str, Any]:
    result: dict[str, Any] = {"content": [{"type": "text", "text": "three"}]}
    if structured is not None:
        result["structuredContent"] = structured
    return {"tool": {"outputSchema": schema}, "result": result}


CHECKED = {  # name → tool, failure, what follows the text
    "plain": (checked(SCHEMA), None, ""),
    "right": (checked(SCHEMA, {"x": 3}), None, ""),
    "wrong": (checked(SCHEMA, {"x": "3"}), "server", "breaks the tool's outputSchema: /x: "),
    "evil": (checked(SCHEMA, {"y": "a" * 99}), "server", "breaks the tool's outputSchema: /y: "),
    "fetching": (checked({"type": "object", "$ref": "http://127.0.0.1:9/x"}, {"x": 3}), None, ""),
}


def test_every_form_of_a_result_is_read_and_none_starts_the_server_anew() -> None:
    tools = {name: tool for name, (tool, *_) in {**FORMS, **CHECKED}.items()}
    with ToolClient([server(tools)]) as client:
        assert client.call("count").text == "1"
        assert {name: client.call(name).text for name in FORMS} == {
            name: text for name, (_, text) in FORMS.items()
        }
        for name, (_, failure, words) in CHECKED.items():
            result = client.call(name)
            assert (result.error, result.text.startswith("three")) == (failure, True), result
            assert words in result.text
        assert client.call("count").text == "2"
        assert client.metrics()["restarts"] == 0


@pytest.mark.parametrize(("paging", "shown"), [("same", 2), ("other", 4)])
def test_a_list_without_an_end_is_left_with_what_it_gave(
    paging: str, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_connection, "MOST_PAGES", 3)
    with ToolClient([server(PAGING=paging)]) as client:
        assert len(client.definitions()) == shown


def test_servers_may_have_tools_of_one_name() -> None:
    def count() -> str:
        """Count nothing."""
        return "none"

    with ToolClient([server(name="a"), server({"own": part(type="text", text="b")}, "b.c")]) as two:
        names = [definition["name"] for definition in two.definitions()]
        assert {"a_count", "b_c_count", "own"} <= set(names) and len(set(names)) == len(names)
        assert [two.call(n).text for n in ("a_count", "a_count", "b_c_count", "own")] == [
            *("1", "2", "1", "b")
        ]
    with ToolClient([server()], [count]) as client:
        assert (client.call("count").text, client.call("raw_count").text) == ("none", "1")


def test_a_line_that_is_too_long_fails_its_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_process, "LONGEST_LINE", 4096)
    with ToolClient([server()]) as client:
        assert client.call("count").text == "1"
        for characters in (5000, 9000, 200_000):
            assert client.call("long", {"characters": characters}).error == "too_large"
        assert client.call("count").text == "2"


def test_all_that_a_server_started_ends_with_it() -> None:
    """Also what left its process group, and what a server leaves that ended by itself."""
    with ToolClient([server()]) as client:
        first = json.loads(client.call("children").text)
        assert client.call("crash").error == "server"
        second = json.loads(client.call("children").text)
        assert all(map(psutil.pid_exists, second))
    assert not [pid for pid in first + second if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_answer_over_http_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_connection, "ANSWER_BOUNDS", Bounds(body=100_000, event=100_000))
    with ThreadingHTTPServer(("127.0.0.1", 0), raw_mcp_server.Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/mcp"
        try:
            with ToolClient([MCPServer("web", url=url)]) as client:
                assert client.call("long", {"characters": 5}).text == "xxxxx"
                much = client.call("long", {"characters": 200_000})
                assert much.error == "server" and "at most 100,000 are taken" in much.text
                assert client.call("long", {"characters": 5}).text == "xxxxx"
        finally:
            http.shutdown()

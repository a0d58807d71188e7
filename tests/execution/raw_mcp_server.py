"""An MCP server without the SDK, which lets a test answer anything: `raw_mcp_server.py [http]`.

Its tools are a JSON object in the variable TOOLS: name → {"result": …, "tool": …}, the result of a
call and what tools/list says beside the name. Built in: `count`, `children`, `crash`, `long`.
"""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from typing import Any

TOOLS = json.loads(os.environ.get("TOOLS", "{}"))
OWN = ("count", "children", "crash", "long")
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
calls = 0


def text(value: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(value)}]}


def listed(cursor: str | None) -> dict[str, Any]:
    tools = [
        {"name": name, "inputSchema": {"type": "object"}, **TOOLS.get(name, {}).get("tool", {})}
        for name in [*TOOLS, *OWN]
    ]
    paging = os.environ.get("PAGING")
    if paging is None:
        return {"tools": tools}
    number = int(cursor or 0)
    following = "1" if paging == "same" else str(number + 1)
    return {"tools": tools[number : number + 1], "nextCursor": following}


def called(name: str, arguments: dict[str, Any]) -> Any:
    global calls
    if name == "count":
        calls += 1
        return text(calls)
    if name == "children":
        started = [
            subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL, start_new_session=apart)
            for apart in (False, True)
        ]
        return text(json.dumps([child.pid for child in started]))
    if name == "crash":
        os._exit(1)
    if name == "long":
        return text("x" * arguments["characters"])
    return TOOLS[name]["result"]


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    if "id" not in message:
        return None
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    parameters = message.get("params") or {}
    if message["method"] == "initialize":
        reply["result"] = {
            "protocolVersion": parameters["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "raw", "version": "1"},
        }
    elif message["method"] == "tools/list":
        reply["result"] = listed(parameters.get("cursor"))
    elif message["method"] == "tools/call":
        reply["result"] = called(parameters["name"], parameters.get("arguments") or {})
    else:
        reply["error"] = {"code": -32601, "message": "no such method"}
    return reply


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        reply = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = b"" if reply is None else json.dumps(reply).encode()
        self.send_response(202 if reply is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_response(405)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_GET

    def log_message(self, *_: Any) -> None: ...


if __name__ == "__main__":
    for line in sys.stdin:
        if (reply := answer(json.loads(line))) is not None:
            print(json.dumps(reply), flush=True)

"""A server that speaks OpenEnv's protocol as openenv-core 0.3.0 speaks it (its answers were
recorded), without the web framework that its own server brings along: each start would cost 3 s.

As a program, `python protocol_server.py PORT [reason to fail]` serves `Count`.
"""

import contextlib
import json
import sys
import threading
from http import HTTPStatus

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response
from websockets.protocol import State
from websockets.sync.server import serve

METADATA = {"additionalProperties": True, "title": "Metadata", "type": "object"}


def action_schema(title, required=(), **fields):
    properties = {"metadata": METADATA, **fields}
    return {
        "additionalProperties": False,
        "properties": properties,
        "required": [*required],
        "title": title,
        "type": "object",
    }


class Refused(Exception):
    """An action that is not valid."""


class Count:
    """Say the number that was dealt, twice; it answers how far an answer is from it."""

    schema = action_schema("CountAction", ["number"], number={"title": "Number", "type": "integer"})

    def reset(self, seed=0, **values):
        self.number, self.values, self.steps = seed % 10, values, 0
        return {"hint": f"say {self.number}", "off": None}, None, False

    def step(self, data):
        if set(data) != {"number"} or not isinstance(data["number"], int):
            raise Refused([{"loc": ["number"], "msg": "Field required"}])
        self.steps += 1
        off = abs(data["number"] - self.number)
        return {"hint": "", "off": off}, 1.0 if off == 0 else None, self.steps >= 2

    def state(self):
        return {"episode_id": self.values.get("episode_id"), "step_count": self.steps}


class Words(Count):
    """The same in words: an action is a text."""

    schema = action_schema("WordsAction", ["text"], text={"title": "Text", "type": "string"})

    def step(self, data):
        return super().step({"number": int(data["text"])})


class Calculator:
    """Tools, as openenv-core's MCPEnvironment has them; `submit` ends the episode."""

    schema = action_schema(
        "CallToolAction",
        ["tool_name"],
        type={"const": "call_tool", "default": "call_tool", "type": "string"},
        tool_name={"type": "string"},
        arguments={"type": "object"},
    )

    def reset(self, seed=0, **_):
        return {}, None, False

    def step(self, data):
        if data["type"] == "list_tools":
            tools = [tool("add", a="integer", b="integer"), tool("submit", n="integer")]
            return {"tools": tools}, None, False
        name, arguments = data["tool_name"], data["arguments"]
        if name == "add" and set(arguments) == {"a", "b"}:
            return called(name, sum(arguments.values())), None, False
        if name == "submit":
            return called(name, "thanks"), float(arguments["n"] == 5), True
        error = {"error_type": "invalid_args", "message": "2 validation errors"}
        return {"tool_name": name, "result": None, "error": error}, None, False

    def state(self):
        return {}


def tool(name, **arguments):
    properties = {name: {"type": kind} for name, kind in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": [*arguments]}
    return {"name": name, "description": f"To {name}.", "input_schema": schema}


def called(name, value):
    content = [{"type": "text", "text": str(value), "annotations": None, "meta": None}]
    result = {"content": content, "structured_content": {"result": value}, "is_error": False}
    return {"tool_name": name, "result": {**result, "data": value}, "error": None}


class ProtocolServer:
    """Serves `environment` on a thread; `messages` has what came, `most_live` is how many sessions
    were open at once.

    `before(socket, message)` is called with every message but the last one; what it returns is
    sent in the place of an answer.
    """

    def __init__(self, environment=Count, *, most=1000, before=None, port=0):
        self.environment, self.most, self.before = environment, most, before
        self.most_live, self.messages = 0, []
        self._sockets = set()
        self._lock = threading.Condition()
        self._server = serve(
            self._session, "127.0.0.1", port, process_request=self._http, close_timeout=0.2
        )
        self.port = self._server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join(10)

    def is_left(self):
        """Whether every session ends."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._sockets, timeout=10)

    def wait_for_sessions(self, count):
        """Wait until so many were open at once."""
        with self._lock:
            assert self._lock.wait_for(lambda: self.most_live >= count, timeout=10)

    def _http(self, connection, request):
        pages = {"/health": {"status": "healthy"}, "/schema": {"action": self.environment.schema}}
        if request.path == "/ws":
            return None
        page = pages.get(request.path)
        status = HTTPStatus.OK if page else HTTPStatus.NOT_FOUND
        body = json.dumps(page or {"detail": "Not Found"}).encode()
        headers = Headers(
            [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        )
        return Response(status.value, status.phrase, headers, body)

    def _session(self, socket):
        with self._lock:
            self._sockets.add(socket)
            # one that its client has closed may not have noticed it yet
            open_now = sum(each.state is State.OPEN for each in self._sockets)
            self.most_live = max(open_now, self.most_live)
            full = open_now > self.most
            self._lock.notify_all()
        try:
            if full:
                socket.send(_error("Server at capacity: 1/1 sessions active", "CAPACITY_REACHED"))
                return
            with contextlib.suppress(ConnectionClosed):
                self._serve(socket, self.environment())
        finally:
            with self._lock:
                self._sockets.remove(socket)
                self._lock.notify_all()

    def _serve(self, socket, environment):
        while (message := json.loads(socket.recv()))["type"] != "close":
            self.messages.append(message)
            if self.before is not None and (instead := self.before(socket, message)) is not None:
                socket.send(instead)
                continue
            try:
                socket.send(json.dumps(_answer(environment, message)))
            except Refused as error:
                socket.send(_error("Invalid message", "VALIDATION_ERROR", errors=error.args[0]))
            except Exception as error:  # noqa: BLE001  as openenv-core does
                socket.send(_error(str(error), "EXECUTION_ERROR"))


def _answer(environment, message):
    if message["type"] == "state":
        return {"type": "state", "data": environment.state()}
    if message["type"] == "reset":
        observation, reward, done = environment.reset(**message["data"])
    else:
        observation, reward, done = environment.step(message["data"])
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def _error(message, code, **more):
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(sys.argv[2])
    server = ProtocolServer(port=int(sys.argv[1]))
    threading.Event().wait()

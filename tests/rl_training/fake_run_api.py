"""atroposlib 0.4.0's `run-api` as a trainer meets it, faults included, on a real socket.

State and quirks follow atroposlib/api/server.py: the first data or registration makes the queue and a later
registration is ignored, /batch forms all batches and hands them out newest first, errors are 200 with `batch: []`,
an unhandled exception is a 500 after which the connection is closed.
"""

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse


class RunApiState:
    """What dies with the process."""

    def __init__(self) -> None:
        self.queue: list[dict[str, Any]] | None = None
        self.registration: dict[str, Any] | None = None
        self.started = False
        self.step = 0
        self.formed: list[list[dict[str, Any]]] = []
        self.environments: list[dict[str, Any]] = []
        self.was_reset = False


class RunApi:
    def __init__(self) -> None:
        self.state = RunApiState()
        self.crashes = 0  # this many calls of /batch fail next, and lose what they would have returned
        self.calls: list[str] = []
        self.registrations: list[dict[str, Any]] = []
        self.accepted_encodings: set[str] = set()
        self.batch_calls = threading.Semaphore(0)  # released at each /batch
        self.hold_batches: threading.Event | None = None  # /batch answers once this is set

    def post_group(self, group: dict[str, Any]) -> None:
        """What an environment's /scored_data does."""
        if self.state.queue is None:
            self.state.queue = []
        self.state.queue.append(group)

    def restart(self) -> None:
        self.state = RunApiState()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def note(request: Request, call_next: Any) -> Any:
            self.calls.append(request.url.path)
            return await call_next(request)

        @app.post("/register")
        def register(body: dict[str, Any]) -> dict[str, int]:
            assert None not in body.values()
            self.registrations.append(body)
            if self.state.queue is None:
                self.state.queue = []
                self.state.registration = body
                self.state.step = body["starting_step"]
            return {"uuid": uuid.uuid4().int}

        @app.get("/info")
        def info() -> dict[str, int]:
            registered = self.state.registration or {"batch_size": -1, "max_token_len": -1}
            return {key: registered[key] for key in ("batch_size", "max_token_len")}

        @app.get("/status")
        def status() -> dict[str, int]:
            return {"current_step": self.state.step, "queue_size": len(self.state.queue or [])}

        @app.get("/status-env")
        async def status_env(request: Request) -> dict[str, int]:
            environment = self.state.environments[(await request.json())["env_id"]]
            return {"queue_size": environment["queue_size"]}

        @app.get("/reset_data")
        def reset() -> PlainTextResponse:
            self.state = RunApiState()
            self.state.was_reset = True
            return PlainTextResponse("Reset successful")

        @app.get("/batch")
        def batch(request: Request) -> dict[str, Any]:
            self.accepted_encodings.add(request.headers["accept-encoding"])
            try:
                return self._batch()
            finally:
                self.batch_calls.release()

        return app

    def _batch(self) -> dict[str, Any]:
        if self.hold_batches is not None:
            self.hold_batches.wait(30)
        state = self.state
        if state.registration is None:
            if state.was_reset:
                raise AttributeError("batchsize")
            return {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
        state.started = True
        if not state.formed:
            self._form(state)
        taken = state.formed.pop() if state.formed else None
        if self.crashes:
            self.crashes -= 1
            raise ValueError("Out of range float values are not JSON compliant")
        return {"batch": taken}

    def _form(self, state: RunApiState) -> None:
        """Equal group sizes only: a run of them that makes exactly one batch."""
        assert state.queue is not None and state.registration is not None
        while state.queue:
            size = len(state.queue[0]["tokens"])
            count, rest = divmod(state.registration["batch_size"], size)
            if rest or len(state.queue) < count:
                return
            state.formed.append(state.queue[:count])
            state.queue = state.queue[count:]
            state.step += 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(app: FastAPI, port: int) -> Iterator[str]:
    """Serves `app` from a thread; yields its URL."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()

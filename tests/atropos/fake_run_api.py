"""atroposlib 0.4.0's `run-api` as a trainer meets it, faults included: a stand-in on a real socket,
and the real one.

`RunApi` is the stand-in. State and quirks follow atroposlib/api/server.py: the first data or
registration makes the queue and a later registration is ignored, /batch packs groups as the real
one does, forms all batches, counts them as steps and hands them out newest first, errors are 200
with `batch: []`, an unhandled exception (no JSON for a NaN, no such environment) is a 500 after
which the connection is closed. `RealRunApi` is the same for tests, over a process of
`scripts/setup_atropos`'s environment; what is tested against both keeps the stand-in honest.
"""

import contextlib
import json
import math
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import uvicorn
from fastapi import Body, FastAPI, Request
from fastapi.responses import PlainTextResponse

REAL = Path(__file__).parents[2] / "build" / "atropos" / "bin" / "run-api"
ENVIRONMENT = {"max_token_length": 32, "desired_name": "sums", "weight": 1.0, "group_size": 2}

Group = dict[str, Any]


def size_of(group: Group) -> int:
    return len(group["tokens"])


class RunApiState:
    """What dies with the process."""

    def __init__(self) -> None:
        self.queue: list[Group] | None = None
        self.registration: dict[str, Any] | None = None
        self.started = False
        self.step = 0
        self.formed: list[list[Group]] = []
        self.environments: list[dict[str, Any]] = []
        self.buffered: dict[int, list[Group]] = {}
        self.was_reset = False
        self.stale_max_token_len = -1  # survives /reset_data

    def receive(self, group: Group) -> str:
        if self.queue is None:
            self.queue = []
        env_id = group.get("env_id")
        if env_id is not None and env_id < len(self.environments):
            expected = self.environments[env_id]["group_size"]
            if size_of(group) != expected:
                held = self.buffered.setdefault(env_id, [])
                held.append(group)
                if sum(map(size_of, held)) == expected:  # the real one looks for any subset
                    self.queue += self.buffered.pop(env_id)
                return "buffered"
        self.queue.append(group)
        return "received"

    def take_batch(self) -> list[Group] | None:
        self.started = True
        if not self.formed:
            while (batch := self._form()) is not None:
                self.formed.append(batch)
                self.step += 1
        return self.formed.pop() if self.formed else None

    def _form(self) -> list[Group] | None:
        """Groups of one size make a pack as long as the largest group; packs must add up to the
        batch."""
        assert self.queue is not None and self.registration is not None
        if not self.queue or self._lacks_a_share():
            return None
        batch_size, largest = self.registration["batch_size"], max(map(size_of, self.queue))
        runs: dict[int, list[Group]] = {}
        packed: list[Group] = []
        for group in self.queue:
            run = runs.setdefault(size_of(group), [])
            run.append(group)
            if size_of(group) * len(run) == largest:
                packed += runs.pop(size_of(group))
        batch: list[Group] = []
        while packed and sum(map(size_of, batch)) < batch_size:
            batch.append(packed.pop(0))
        if sum(map(size_of, batch)) != batch_size:
            return None
        self.queue = [group for group in self.queue if not any(group is taken for taken in batch)]
        return batch

    def _lacks_a_share(self) -> bool:
        assert self.queue is not None and self.registration is not None
        senders = {group.get("env_id") for group in self.queue}
        return any(
            int(self.registration["batch_size"] * (entry.get("min_batch_allocation") or 0))
            and number not in senders
            for number, entry in enumerate(self.environments)
        )

    def environment_status(self, env_id: int) -> dict[str, float]:
        """Raises IndexError, ZeroDivisionError as the real one does."""
        own, queue = self.environments[env_id], self.queue or []
        shares = [
            entry["max_token_length"] * entry["weight"]
            for entry in self.environments
            if entry["connected"]
        ]
        mine = [size_of(group) for group in queue if group.get("env_id") == env_id]
        largest = max([1, *map(size_of, queue)])
        group_size = own["group_size"] = max([own["group_size"], *mine])
        others = sum(map(size_of, queue)) - sum(mine)
        reserved = sum(
            entry.get("min_batch_allocation") or 0
            for entry in self.environments
            if entry["connected"]
        )
        return {
            "current_step": self.step,
            "queue_size": (
                sum(mine) + (math.ceil(others / largest) * largest if largest > 1 else 0)
            )
            // group_size,
            "unallocated_fraction": 1.0 - min(1.0, reserved),
            "self_queue_size": sum(mine) // group_size,
            "max_group_size": largest,
            "env_weight": max(0.01, own["max_token_length"] * own["weight"] / sum(shares)),
        }


class RunApi:
    """The stand-in. `url` is set by `serving`'s caller where tests want it."""

    def __init__(self) -> None:
        self.state = RunApiState()
        self.url = ""
        # this many calls of /batch fail next, and lose what they would have returned
        self.crashes = 0
        self.calls: list[str] = []
        self.registrations: list[dict[str, Any]] = []
        self.accepted_encodings: set[str] = set()
        self.batch_calls = threading.Semaphore(0)  # released at each /batch
        self.hold_batches: threading.Event | None = None  # /batch answers once this is set

    def post_group(self, group: Group) -> None:
        """What an environment's /scored_data does."""
        self.state.receive(group)

    def restart(self) -> None:
        self.state = RunApiState()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def note(request: Request, call_next: Any) -> Any:
            self.calls.append(request.url.path)
            return await call_next(request)

        self._add_trainer_routes(app)
        self._add_environment_routes(app)
        return app

    def _add_trainer_routes(self, app: FastAPI) -> None:
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
            unset = {"batch_size": -1, "max_token_len": self.state.stale_max_token_len}
            registered = self.state.registration or unset
            return {key: registered[key] for key in ("batch_size", "max_token_len")}

        @app.get("/status")
        def status() -> dict[str, int]:
            return {"current_step": self.state.step, "queue_size": len(self.state.queue or [])}

        @app.get("/reset_data")
        def reset() -> PlainTextResponse:
            stale = (self.state.registration or {"max_token_len": -1})["max_token_len"]
            self.state = RunApiState()
            self.state.was_reset, self.state.stale_max_token_len = True, stale
            return PlainTextResponse("Reset successful")

        @app.get("/batch")
        def batch(request: Request) -> PlainTextResponse:
            self.accepted_encodings.add(request.headers["accept-encoding"])
            try:
                return PlainTextResponse(
                    json.dumps(self._batch(), allow_nan=False), media_type="application/json"
                )
            finally:
                self.batch_calls.release()

    def _add_environment_routes(self, app: FastAPI) -> None:
        @app.post("/register-env")
        def register_environment(body: dict[str, Any]) -> dict[str, Any]:
            if not self.state.started:
                return {"status": "wait for trainer to start"}
            self.state.environments.append(body | {"connected": True})
            return {"status": "success", "env_id": len(self.state.environments) - 1}

        @app.post("/disconnect-env")
        def disconnect(body: dict[str, int]) -> dict[str, str]:
            self.state.environments[body["env_id"]]["connected"] = False
            return {"status": "success"}

        @app.get("/status-env")
        def status_env(body: Annotated[dict[str, int], Body()]) -> dict[str, float]:
            return self.state.environment_status(body["env_id"])

        @app.post("/scored_data")
        async def scored_data(request: Request) -> dict[str, str]:
            return {"status": self.state.receive(json.loads(await request.body()))}

    def _batch(self) -> dict[str, Any]:
        if self.hold_batches is not None:
            self.hold_batches.wait(300)  # longer than a test may take
        if self.state.registration is None:
            if self.state.was_reset:
                raise AttributeError("queue")
            return {
                "status": "error",
                "message": "Trainer not registered. Call /register first.",
                "batch": [],
            }
        taken = self.state.take_batch()
        if self.crashes:
            self.crashes -= 1
            raise ValueError("Out of range float values are not JSON compliant")
        return {"batch": taken}


class RealRunApi:
    """A process of the real thing on `port`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [str(REAL), "--host", "127.0.0.1", "--port", str(port)]
        self._start()

    def post_group(self, group: Group) -> None:
        headers = {"Content-Type": "application/json"}  # json.dumps: NaN goes through
        httpx.post(
            self.url + "/scored_data", content=json.dumps(group), headers=headers
        ).raise_for_status()

    def restart(self) -> None:
        self.kill()
        self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(self.url)
                return
            time.sleep(0.02)
        raise AssertionError("run-api did not start")


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

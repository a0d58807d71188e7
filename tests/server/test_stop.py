"""The end of the HTTP thread: nothing that a handler waits for holds it."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from mlx_parallm.rl_training.publish.rollback import RollbackService
from mlx_parallm.server import thread
from mlx_parallm.server.app import AddedRouter
from tests.server.fake_engine import FakeEngine
from tests.server.serving import RunningServer, running_server
from tests.waiting import until

NEVER_S = 3600.0
ROLLBACK = '{"version": 1}'


class Routes:
    """An answer without end, and a handler whose thread ends by `gate` only."""

    def __init__(self) -> None:
        self.router, self.gate, self.entered = APIRouter(), threading.Event(), threading.Event()
        self.router.get("/endless")(self.endless)
        self.router.get("/held")(self.held)

    async def endless(self) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield b"data: " + bytes(1 << 16)

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def held(self) -> None:
        def wait() -> None:
            self.entered.set()
            self.gate.wait(NEVER_S)

        await asyncio.to_thread(wait)


@pytest.fixture
def routes() -> Iterator[Routes]:
    routes = Routes()
    yield routes
    routes.gate.set()


def test_what_handlers_wait_for_does_not_hold_the_end(
    routes: Routes, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads nothing, a thread that does not end, and a rollback that no step answers:
    each took all the time that `stop` waits, and then it failed."""
    monkeypatch.setattr(thread, "JOIN_MARGIN_SECONDS", NEVER_S)
    desk, engine = RollbackService(), FakeEngine()
    with running_server(
        engine, tiny_tokenizer, routers=[AddedRouter(routes.router)], rollbacks=desk
    ) as server:
        clients = [ask(server, "GET /endless"), ask(server, "GET /held")]
        clients.append(ask(server, "POST /v1/training/rollback", ROLLBACK))
        connections: Any = server.thread._server.server_state.connections
        until(lambda: any(each.flow.write_paused for each in list(connections)))
        until(lambda: desk.take() is not None)
        assert routes.entered.wait(20)
        server.thread.stop(drain_timeout=0.01)
        assert not server.thread.alive and not routes.gate.is_set()
    for client in clients:
        client.close()


def ask(server: RunningServer, line: str, body: str = "") -> socket.socket:
    """Send a request, and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return client

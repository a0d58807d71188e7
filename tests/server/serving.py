"""A real server thread on a free port, for as long as a `with` block."""

import faulthandler
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import httpx
from fastapi import FastAPI
from openai import OpenAI

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.server.app import AddedRouter, create_app
from mlx_parallm.server.context import ServerDeps, ServerState
from mlx_parallm.server.thread import ServerThread, ServerThreadError, bind_socket
from tests.waiting import until


@dataclass(frozen=True)
class RunningServer:
    url: str
    app: FastAPI
    state: ServerState
    engine: Any
    thread: ServerThread

    def openai(self, api_key: str = "unused") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def hang_up(self, path: str, body: Mapping[str, Any], begun: Callable[[], object]) -> None:
        """Ask, and leave once the answer has begun: a time-out would depend on the machine's
        pace."""
        with closing(HTTPConnection(self.url.removeprefix("http://"))) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            until(begun)


@contextmanager
def running_server(
    engine: Any,
    tokenizer: Any,
    *,
    loaded: bool = True,
    adapters: Any = None,
    routers: Sequence[AddedRouter] = (),
    config: ServerConfig | None = None,
    max_connections: int = 1024,
    sampling_defaults: Mapping[str, float | int] | None = None,
    **deps: Any,
) -> Iterator[RunningServer]:
    """Serves `engine`; `deps` are fields of ServerDeps. With loaded=False the server stays in
    its loading state."""
    state = ServerState()
    if loaded:
        state.ready(engine, tokenizer, adapters, sampling_defaults=sampling_defaults)
    listener = bind_socket("127.0.0.1", 0)
    app = create_app(ServerDeps(state, config or ServerConfig(), **deps), routers)
    thread = ServerThread(app, listener, max_connections)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.start()
    try:
        yield RunningServer(url, app, state, engine, thread)
    finally:
        if thread.alive:
            _stop(thread)


def _stop(thread: ServerThread) -> None:
    """End a server, and show where all threads stand if it does not end: whole runs have ended so
    at their last teardown, and nothing said why."""
    try:
        thread.stop(drain_timeout=5.0)
    except ServerThreadError:
        faulthandler.dump_traceback(file=sys.__stderr__)
        for task in list(thread._server.server_state.tasks):
            task.print_stack(file=sys.__stderr__)
        raise


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for each in lists for item in each]

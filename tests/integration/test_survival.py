"""What ends, and what must not: SIGTERM under load, a client that hangs up, an engine thread
that is killed."""

import concurrent.futures
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.conftest import TinyEngine
from tests.integration.processes import Daemon, free_port, write_config
from tests.server.serving import RunningServer

LONG = {
    "model": "default",
    "prompt": "hello",
    "max_tokens": 200,
    "extra_body": {"ignore_eos": True},
}


@pytest.mark.parametrize("stream", [True, False])
def test_a_clients_work_ends_within_a_step_of_its_hang_up(
    tiny_engine: TinyEngine, server: RunningServer, stream: bool
) -> None:
    """Steps are slowed down to 0.1 s, so that the way of the news to the engine is short beside
    one."""
    stepped, begun = [], threading.Event()

    def slow_down(engine):
        step = engine.step

        def slow_step(**options):
            stepped.append(len(engine.scheduler.active))
            if len(stepped) == 4:
                begun.set()
            time.sleep(0.1)
            return step(**options)

        engine.step = slow_step

    aborted = tiny_engine.client.stats().requests_aborted
    tiny_engine.client.call(slow_down).result(10)
    try:
        body = {
            "model": "default",
            "prompt": "hello",
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": stream,
            "n": 3,
        }
        _break_off(server.url, body, begun)
        gone = len(stepped)
        deadline = time.monotonic() + 10
        while tiny_engine.client.stats().requests_aborted == aborted:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert len(stepped) - gone <= 2, (
            "the step under way, and one if the news came just after its start"
        )
        assert tiny_engine.client.wait_idle(10)
    finally:
        tiny_engine.client.call(lambda engine: engine.__dict__.pop("step")).result(10)
    assert tiny_engine.client.stats().running == 0


def _break_off(url: str, body: dict, begun: threading.Event) -> None:
    """Sends the request and closes the connection after some engine steps."""
    request = httpx.Request("POST", url + "/v1/completions", json=body)
    connection = socket.create_connection((request.url.host, request.url.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {request.url.netloc.decode()}\r\nContent-Type:"
        " application/json\r\n"
    )
    connection.sendall(
        f"{head}Content-Length: {len(request.content)}\r\n\r\n".encode() + request.content
    )
    assert begun.wait(20)
    connection.close()


@pytest.mark.slow
def test_sigterm_under_load_lets_the_running_end_and_refuses_new_ones() -> None:
    port = free_port()
    arguments = [
        "--model-path",
        "builtin:tiny",
        "--port",
        str(port),
        "--set",
        "server.drain_timeout_s=30",
    ]
    with Daemon("mlx_parallm_serve", *arguments, port=port) as daemon:
        client = daemon.wait_until_ready().client()
        streams = [
            client.completions.create(stream=True, **LONG | {"max_tokens": 400}) for _ in range(8)
        ]
        for stream in streams:
            next(iter(stream))
        daemon.send(signal.SIGTERM)
        refused = None
        while refused is None:
            try:
                client.completions.create(**LONG | {"max_tokens": 1})
            except openai.APIStatusError as error:
                refused = error
        assert refused.status_code == 503 and refused.response.headers["retry-after"]
        assert httpx.get(daemon.url + "/health").json()["status"] == "draining"
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            ends = list(pool.map(lambda stream: list(stream)[-1].choices[0].finish_reason, streams))
        assert ends == ["length"] * 8
        assert daemon.wait() == 0


KILL = """
import sys, threading
import mlx_parallm
from mlx_parallm.engine.engine import Engine
from mlx_parallm.cli import {command}

step = Engine.step

def dying(engine, **options):
    if engine.counters.steps >= {steps}:
        raise SystemExit("killed by the test")  # no Exception: nothing in the engine catches it
    return step(engine, **options)

Engine.step = dying
sys.argv = {argv!r}
sys.exit({command}())
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "train"])
def test_a_killed_engine_thread_ends_the_process_with_an_error(
    command: str, tmp_path: Path
) -> None:
    port = free_port()
    argv = ["x", "--model-path", "builtin:tiny", "--port", str(port)]
    if command == "train":
        config = write_config(tmp_path, steps=100000)
        port = int(
            next(
                line.split("=")[1]
                for line in config.read_text().splitlines()
                if line.startswith("port")
            )
        )
        argv = ["x", "--config", str(config)]
    program = KILL.format(command=command, argv=argv, steps=20)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        if command == "serve":
            _ask_until_it_dies(process, f"http://127.0.0.1:{port}")
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2, output
    assert "the engine thread died" in output and "killed by the test" in output


def _ask_until_it_dies(process: subprocess.Popen[str], url: str) -> None:
    seen = set()
    while process.poll() is None:
        try:
            health = httpx.get(url + "/health")
            seen.add((health.status_code, health.json()["status"]))
            if health.status_code == 200:
                answer = httpx.post(
                    url + "/v1/completions", json={"prompt": "a", "max_tokens": 60}, timeout=20
                )
                assert answer.status_code in (200, 503), answer.text
        except httpx.TransportError:
            time.sleep(0.02)
    assert (200, "ok") in seen and seen & {(503, "unhealthy"), (503, "draining")}

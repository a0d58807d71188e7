"""Ours is a drop-in for atroposlib's run-api: the same calls, the same answers, but for `DIFFERENCES`.

Against the real one (build/atropos, made by scripts/setup_atropos; CI has no time for its installation) the recorded
calls and generated sequences are made anew; without it, what it answered is read from tests/data/atropos_calls.jsonl.
`python -m tests.integration.test_atropos_differential` writes that file.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from mlx_parallm.config.training import RolloutsConfig
from mlx_parallm.errors import CheckpointError
from mlx_parallm.integrations.atropos.hand_out import HandOutQueue
from mlx_parallm.integrations.atropos.routes import create_atropos_router
from mlx_parallm.rl_training.run_directory import RunDirectory
from mlx_parallm.rollout_store.store import RolloutStore
from tests.integration.atropos_comparison import DIFFERENCES, Answer, Call, Report, compare
from tests.integration.atropos_sequences import TRAINER, generated
from tests.integration.processes import Daemon, free_port
from tests.rollout_store.groups import scored_data
from tests.signals_reset import default_signals

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/atropos/bin/python"
RECORDED = ROOT / "tests/data/atropos_calls.jsonl"
SEQUENCES = 150
KEPT = 16  # of them in the recording
# The real application, with one more route: a state as new as after a start.
RUN_API = """
import sys, uvicorn
from atroposlib.api.server import app
app.add_api_route("/fresh", lambda: app.state._state.clear(), methods=["POST"])
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
"""


class Http:
    """A server by HTTP, under a prefix."""

    def __init__(self, client: httpx.Client, prefix: str = "") -> None:
        self._client, self._prefix = client, prefix

    def call(self, call: Call) -> Answer:
        reply = self._client.request(call.method, self._prefix + call.path, content=call.content, headers=call.headers)
        is_json = reply.headers["content-type"].startswith("application/json")
        return Answer(reply.status_code, reply.json() if is_json else reply.text)


class Recording:
    """Passes calls on and keeps what was answered."""

    def __init__(self, server: Http) -> None:
        self._server = server
        self.answers: list[Answer] = []

    def call(self, call: Call) -> Answer:
        self.answers.append(self._server.call(call))
        return self.answers[-1]


class Recorded:
    """Answers what the real one did."""

    def __init__(self, answers: Iterable[Any]) -> None:
        self._answers = iter(answers)

    def call(self, call: Call) -> Answer:
        return Answer(*next(self._answers))


@contextlib.contextmanager
def run_api() -> Iterator[httpx.Client]:
    port = free_port()
    process = subprocess.Popen([PYTHON, "-c", RUN_API, str(port)], preexec_fn=default_signals)
    try:
        transport = httpx.HTTPTransport(retries=100)  # of connections, until it listens
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60) as client:
            yield client
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def ours(directory: Path) -> Iterator[Http]:
    store = RolloutStore(directory / "rollouts.sqlite")
    app = FastAPI()
    app.include_router(create_atropos_router(HandOutQueue(store, RolloutsConfig())))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Http(client, "/atropos")
    store.close()


def recorded() -> dict[str, dict[str, Any]]:
    """By name: the answers; the calls too, where they are not `generated`."""
    entries = map(json.loads, RECORDED.read_text().splitlines())
    return {entry.pop("name"): entry for entry in entries}


def base_env() -> list[Call]:
    return [Call.from_json(call) for call in recorded()["base_env"]["calls"]]


def total(reports: Iterable[Report]) -> tuple[int, Counter[str]]:
    calls, met = 0, Counter[str]()
    for report in reports:
        calls += report.calls
        met += report.met
    return calls, met


def test_the_recorded_answers_are_ours(tmp_path: Path) -> None:
    reports = []
    for name, entry in recorded().items():
        calls = generated(int(name)) if name.isdecimal() else base_env()
        with ours(tmp_path / name) as queue:
            reports.append(compare(calls, Recorded(entry["answers"]), queue))
    calls_made, _ = total(reports)
    assert reports[0].met.keys() <= {"GET /batch: more than one batch is ready"}, "as BaseEnv and its trainer see it"
    assert calls_made > 300


def test_the_documented_differences_are_the_tested_ones() -> None:
    row = r"^\| (any|`(?:GET|POST) .+?`) \| (.+?) \|"
    rows = re.findall(row, (ROOT / "docs/atropos_queue.md").read_text(), re.MULTILINE)
    documented = [(endpoint.strip("`"), condition) for endpoint, condition in rows]
    assert documented == [(entry.endpoint, entry.condition) for entry in DIFFERENCES]
    assert len(documented) <= 12


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no build/atropos: scripts/setup_atropos makes it")
def test_the_real_run_api_answers_alike(tmp_path: Path) -> None:
    sequences = [base_env(), *(generated(seed) for seed in range(SEQUENCES))]
    reports = []
    with run_api() as client:
        for number, calls in enumerate(sequences):
            client.post("/fresh")
            with ours(tmp_path / str(number)) as queue:
                reports.append(compare(calls, Http(client), queue))
    calls, met = total(reports)
    print(f"{len(sequences)} sequences, {calls} answers compared; differences met: {dict(met)}")
    assert calls > 3000
    assert set(met) == {f"{entry.endpoint}: {entry.condition}" for entry in DIFFERENCES}


@pytest.mark.slow
def test_a_queue_that_is_killed_has_lost_nothing(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--model-path", "builtin:tiny", "--port", str(port), "--atropos-queue", str(tmp_path / "queue"))

    def queue(daemon: Daemon) -> httpx.Client:
        return httpx.Client(base_url=daemon.wait_until_ready().url + "/atropos")

    environment = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}
    with Daemon("mlx_parallm_serve", *flags, port=port) as daemon, queue(daemon) as client:
        client.post("/register", json=TRAINER | {"batch_size": 4})
        assert client.get("/batch").json() == {"batch": None}
        assert client.post("/register-env", json=environment).json()["env_id"] == 0
        for number in range(5):
            sent = scored_data(first_token=20 + 10 * number, env_id=0)
            assert client.post("/scored_data", json=sent).json() == {"status": "received"}
        assert [group["tokens"][0][0] for group in client.get("/batch").json()["batch"]] == [20, 30]
        with pytest.raises(CheckpointError, match="in use by another process"):
            RunDirectory.hold(tmp_path / "queue")
        daemon.send(signal.SIGKILL)
    with Daemon("mlx_parallm_serve", *flags, port=port) as daemon, queue(daemon) as client:
        assert client.get("/status").json() == {"current_step": 1, "queue_size": 3}
        assert client.get("/info").json() == {"batch_size": 4, "max_token_len": 64}
        assert client.post("/register-env", json=environment).json()["env_id"] == 0
        assert [group["tokens"][0][0] for group in client.get("/batch").json()["batch"]] == [40, 50]
        assert client.get("/batch").json() == {"batch": None}


def write_recording() -> None:
    """The environment's and trainer's calls stay as they were recorded; answers are the real one's, anew."""
    entries: dict[str, dict[str, Any]] = {"base_env": {"calls": recorded()["base_env"]["calls"]}}
    entries |= {str(seed): {} for seed in range(KEPT)}
    with run_api() as client, TemporaryDirectory() as directory:
        for name, entry in entries.items():
            client.post("/fresh")
            real = Recording(Http(client))
            with ours(Path(directory) / name) as queue:
                compare(generated(int(name)) if name.isdecimal() else base_env(), real, queue)
            entry["answers"] = [[answer.status, answer.value] for answer in real.answers]
    lines = [json.dumps({"name": name} | entry, separators=(",", ":")) for name, entry in entries.items()]
    RECORDED.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_recording()
    sys.stdout.write(f"{RECORDED}: {RECORDED.stat().st_size} bytes\n")

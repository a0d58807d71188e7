"""/pause, /resume, /abort_requests and the questions of trainers, over HTTP against a real
engine."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import structlog

import mlx_parallm
from mlx_parallm.engine import client as client_module
from mlx_parallm.engine.prefix_disk.disk import Clearing
from mlx_parallm.engine.prefix_disk.of_engine import DiskPrefixes
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.middleware import RequestContextMiddleware
from tests.server.serving import flat
from tests.waiting import until

STREAMS, TOKENS = 8, 60
BODY = {
    "prompt": "a",
    "temperature": 4.0,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "return_token_ids": True,
}
LONG = BODY | {"max_tokens": 240}
SCORED = {"echo": True, "logprobs": 0}


@pytest.fixture(autouse=True)
def resumed(server):
    yield
    with server.http() as http:
        http.post("/resume")
    server.engine.resume_admission().result(20)
    until(lambda: server.engine.stats().running == 0)


@contextmanager
def threads():
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        yield pool


def steps(server):
    """The engine's step counter, read on its thread: each reading lets it turn once, which is a
    step unless frozen."""
    return server.engine.call(lambda engine: engine.counters.steps).result(20)


def streamed(client, seed, begun=None, **fields):
    """(token ids, last chunk) of one stream; `begun` is set once four tokens are there."""
    extra = {
        name: value
        for name, value in (LONG | fields).items()
        if name in ("ignore_eos", "return_token_ids")
    }
    known = {name: value for name, value in (BODY | fields).items() if name not in extra}
    chunks = []
    for chunk in client.completions.create(
        model="default", seed=seed, stream=True, extra_body=extra, **known
    ):
        chunks.append(chunk)
        if begun is not None and len(chunks) == 4:
            begun.set()
    return flat(chunk.choices[0].token_ids for chunk in chunks), chunks[-1]


def test_frozen_streams_go_on_as_if_nothing_had_been(server, client, tiny_engine):
    begun = [threading.Event() for _ in range(STREAMS)]
    with threads() as pool, server.http() as http:
        alone = [ids for ids, _ in pool.map(lambda seed: streamed(client, seed), range(STREAMS))]
        running = [pool.submit(streamed, client, seed, begun[seed]) for seed in range(STREAMS)]
        assert all(event.wait(30) for event in begun)
        assert http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).json() == {
            "status": "paused"
        }
        before = steps(server)
        turn = server.engine.stats().last_step_time
        assert [steps(server) for _ in range(5)] == [before] * 5
        assert server.engine.stats().last_step_time > turn  # what /health goes by
        assert http.get("/is_paused").json() == {"is_paused": True}
        health = http.get("/health")
        assert (
            health.status_code == 200
            and health.json()["paused"]
            and health.json()["running"] == STREAMS
        )
        late = pool.submit(streamed, client, 0)
        until(lambda: server.engine.stats().waiting == 1)
        old, new = tiny_engine.weights.version, tiny_engine.weights.publish_parameters({}).version
        assert steps(server) == before
        assert http.post("/resume").json() == {"status": "resumed"}
        assert late.result(60)[0] == alone[0]
        ended = [each.result(60) for each in running]
        assert http.get("/is_paused").json() == {"is_paused": False}
    assert [ids for ids, _ in ended] == alone
    assert len(set(flat(alone))) >= 20
    for _, last in ended:
        assert [span["version"] for span in last.choices[0].weight_versions] == [old, new]


def test_waiting_lets_what_runs_end_and_holds_the_rest(server, client):
    begun = threading.Event()
    with threads() as pool, server.http() as http:
        running = pool.submit(streamed, client, 1, begun, max_tokens=120)
        assert begun.wait(30)
        http.post("/pause", params={"mode": "wait"})
        assert server.engine.stats().running == 0 and len(running.result(20)[0]) == 120
        held = pool.submit(streamed, client, 2)
        until(lambda: server.engine.stats().waiting == 1)
        scored = pool.submit(
            http.post, "/v1/completions", json={"prompt": "ab", "max_tokens": 0, **SCORED}
        )
        until(lambda: server.engine.call(lambda engine: len(engine.scores)).result(20) == 1)
        steps(server)
        assert not held.done() and not scored.done()
        with server.http() as other:
            other.post("/resume")
        assert len(held.result(60)[0]) == TOKENS
        assert len(scored.result(20).json()["choices"][0]["logprobs"]["token_logprobs"]) >= 2


def test_aborting_ends_what_runs(server, client):
    begun = threading.Event()
    with threads() as pool, server.http() as http:
        running = pool.submit(streamed, client, 1, begun, max_tokens=240)
        assert begun.wait(30)
        http.post("/pause")
        ids, last = running.result(20)
        assert last.choices[0].finish_reason == "abort" and 4 <= len(ids) < 240
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert server.engine.stats().running == 0


def test_a_client_s_pause_and_the_trainer_s_drain_do_not_undo_each_other(server, client):
    with threads() as pool, server.http() as http:
        for first_to_go in ("trainer", "client"):
            server.engine.pause_admission()
            http.post("/pause", params={"mode": "keep"})
            held = pool.submit(streamed, client, 3, max_tokens=20)
            until(lambda: server.engine.stats().waiting == 1)
            if first_to_go == "trainer":
                server.engine.resume_admission().result(20)
            else:
                http.post("/resume")
            assert http.get("/is_paused").json()["is_paused"] is (first_to_go == "trainer")
            steps(server)
            assert server.engine.stats().waiting == 1 and not held.done()
            http.post("/resume")
            server.engine.resume_admission()
            assert len(held.result(60)[0]) == 20


def test_a_drain_of_frozen_requests_ends_only_after_the_resume(server, client):
    begun = threading.Event()
    with threads() as pool, server.http() as http:
        running = pool.submit(streamed, client, 4, begun, max_tokens=120)
        assert begun.wait(30)
        http.post("/pause", params={"mode": "keep"})
        drained = pool.submit(server.engine.wait_idle, 60)
        before = steps(server)
        assert steps(server) == before and not drained.done()
        started = time.perf_counter()
        turns = {server.engine.stats().last_step_time for _ in range(20_000)}
        # the engine's thread sleeps, and wakes once a second
        assert len(turns) <= 2 + time.perf_counter() - started
        http.post("/resume")
        assert drained.result(60) and len(running.result(20)[0]) == 120


def test_a_frozen_request_can_be_aborted(server, client):
    begun = threading.Event()
    with threads() as pool, server.http() as http:
        running = pool.submit(streamed, client, 4, begun, max_tokens=240)
        assert begun.wait(30)
        http.post("/pause", params={"mode": "keep"})
        assert http.post("/abort_requests", json={}).json()["aborted"] == 1
        assert running.result(20)[1].choices[0].finish_reason == "abort"
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert http.get("/health").json()["running"] == 0


async def test_ids_of_the_request_and_of_the_session_are_bound_to_the_log():
    bound = {}

    async def app(scope, receive, send):
        bound.update(structlog.contextvars.get_contextvars())

    headers = [(b"x-request-id", b"mine"), (b"x-session-id", b"rollout-7")]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers}
    await RequestContextMiddleware(app, ServerMetrics(), timeout_s=0)(scope, None, None)
    assert bound == {"request_id": "mine", "session_id": "rollout-7"}


def test_a_request_is_aborted_by_any_of_its_names(server):
    body = LONG | {"stream": True}
    tokens = {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 200, "ignore_eos": True},
        "stream": True,
    }
    with server.http() as http:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            response_id = next(lines).split('"id":"')[1].split('"')[0]
            assert (
                http.post("/abort_requests", json={"request_ids": ["nobody's"]}).json()["aborted"]
                == 0
            )
            aborted = http.post("/abort_requests", json={"request_ids": [response_id]}).json()
            assert aborted == {"status": "aborted", "aborted": 1}
            assert '"finish_reason":"abort"' in "".join(lines)
        named = {"X-Request-ID": "mine"}
        with http.stream("POST", "/v1/completions", json=body, headers=named) as answer:
            assert answer.headers["x-request-id"] == "mine"
            assert (
                http.post("/abort_requests", json={"request_ids": ["mine"]}).json()["aborted"] == 1
            )
            assert '"finish_reason":"abort"' in answer.read().decode()
        with http.stream(
            "POST", "/inference/v1/generate", json=tokens | {"request_id": "ours"}
        ) as answer:
            assert (
                http.post("/inference/v1/abort_requests", json={"request_ids": ["ours"]}).json()[
                    "aborted"
                ]
                == 1
            )
            assert '"finish_reason":"abort"' in answer.read().decode()
        for everything in ({}, {"request_ids": []}, None):
            with http.stream("POST", "/v1/completions", json=body) as answer:
                sent = {} if everything is None else {"json": everything}
                assert http.post("/abort_requests", **sent).json()["aborted"] == 1
                assert '"finish_reason":"abort"' in answer.read().decode()


def test_atropos_is_told_to_ask_again_when_its_request_was_aborted(server):
    body = {
        "prompt": {"prompt_token_ids": [5, 6]},
        "max_tokens": 240,
        "ignore_eos": True,
        "logprobs": 0,
    }
    with threads() as pool, server.http() as http, server.http() as other:
        answer = pool.submit(other.post, "/generate", json=body)
        until(lambda: server.engine.stats().running == 1)
        assert http.post("/abort_requests", json={}).json()["aborted"] == 1
        assert answer.result(20).status_code == 503 and answer.result().headers["retry-after"]


def test_trainers_learn_about_the_server(server):
    with server.http() as http:
        version = server.engine.stats().policy_version
        info = http.get("/server_info").json()
        assert (
            info["logprobs_mode"] == "raw" and info["max_model_len"] == server.engine.max_model_len
        )
        assert (
            info["models"][0] == http.get("/v1/models").json()["data"][0]["id"]
            and info["is_paused"] is False
        )
        assert http.get("/get_world_size", params={"include_dp": True}).json() == {"world_size": 1}
        assert http.get("/weight_info").json() == {"weight_version": version}
        assert http.get("/version").json() == {"version": mlx_parallm.__version__}


def test_a_pause_that_is_not_one_is_a_400(server):
    with server.http() as http:
        refused = http.post("/pause", params={"mode": "sleep"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "mode"
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert http.post("/abort_requests", json={"request_ids": "all"}).status_code == 400


def test_the_prefix_cache_is_forgotten_on_demand(server):
    body = {"prompt": [7] * 65, "max_tokens": 1}

    def prefilled(http):
        before = server.engine.stats()
        http.post("/v1/completions", json=body)  # answered at the end of a step
        until(lambda: server.engine.stats().requests_finished > before.requests_finished)
        return server.engine.stats().prefill_tokens - before.prefill_tokens

    with server.http() as http:
        prefilled(http)
        assert prefilled(http) < 65
        assert http.post("/reset_prefix_cache").json() == {"success": True}
        assert prefilled(http) == 65


def test_files_of_prefixes_that_are_left_are_said(server, monkeypatch):
    """What cannot be removed, and a disk that hangs. A pause does not wait for the disk."""
    left = Clearing()
    monkeypatch.setattr(DiskPrefixes, "clear", lambda self: left)
    with server.http() as http:
        assert http.post("/pause").json() == {"status": "paused"}
        monkeypatch.setattr(client_module, "PATIENCE_S", 0.01)
        late = http.post("/reset_prefix_cache")
        left.set_result("2 files cannot be removed")
        monkeypatch.undo()
        monkeypatch.setattr(DiskPrefixes, "clear", lambda self: left)
        stuck = http.post("/reset_prefix_cache")
    for answer, words in ((late, "has not removed them in 0 s"), (stuck, "2 files cannot be")):
        assert answer.status_code == 503
        assert "prefixes on disk are left" in answer.json()["error"]["message"]
        assert words in answer.json()["error"]["message"]

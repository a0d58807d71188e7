"""What the server does when something is wrong: the engine, the request, the client, or the
moment."""

import asyncio
import json
import threading
from dataclasses import replace

import httpx
import pytest

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.server import middleware
from mlx_parallm.server.thread import bind_socket
from mlx_parallm.system.log import configure_logging
from tests.server.fake_engine import HEALTHY, FakeEngine, TimeFromTheHang
from tests.server.serving import running_server
from tests.waiting import until

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "1 + 1"}], "max_tokens": 2}
COMPLETION = {"model": "fake", "prompt": "1 + 1", "max_tokens": 2}


@pytest.fixture(scope="module")
def module_server(tiny_tokenizer):
    with running_server(FakeEngine(), tiny_tokenizer) as server:
        yield server


@pytest.fixture
def fake(module_server):
    """The shared server, its engine well again."""
    module_server.engine.behaviour = "answer"
    module_server.engine.current = HEALTHY
    return module_server


def test_while_loading_health_is_503_and_every_route_says_so(tiny_tokenizer):
    with (
        running_server(FakeEngine(), tiny_tokenizer, loaded=False) as server,
        server.http() as http,
    ):
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        answer = http.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "loading" in answer.json()["error"]["message"]
        server.state.ready(server.engine, tiny_tokenizer)
        assert http.get("/health").json()["status"] == "ok"
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_failed_load_shows_its_reason(tiny_tokenizer):
    with (
        running_server(FakeEngine(), tiny_tokenizer, loaded=False) as server,
        server.http() as http,
    ):
        server.state.failed("no config.json")
        assert "no config.json" in http.get("/health").json()["reason"]


def test_health_tells_a_dead_and_a_stalled_engine(fake):
    with fake.http() as http:
        fake.engine.stall(seconds=120)
        stalled = http.get("/health")
        assert stalled.status_code == 503 and "no step for 12" in stalled.json()["reason"]
        fake.engine.stall(seconds=1)
        assert http.get("/health").status_code == 200
        fake.engine.current = replace(fake.engine.current, alive=False, error="out of memory")
        assert "out of memory" in http.get("/health").json()["reason"]


@pytest.mark.parametrize(
    "path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_an_engine_failure_is_a_500_of_that_request_only(fake, path, body):
    with fake.http() as http:
        fake.engine.behaviour = "fail"
        answer = http.post(path, json=body)
        assert answer.status_code == 500 and "produced NaN" in answer.json()["error"]["message"]
        fake.engine.behaviour = "answer"
        assert http.post(path, json=body).status_code == 200


def test_a_bug_is_a_500_without_its_traceback(fake):
    with fake.http() as http:
        fake.engine.behaviour = "crash"
        answer = http.post("/v1/completions", json=COMPLETION, headers={"X-Request-ID": "abc-1"})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text and "Traceback" not in answer.text
        assert answer.headers["x-request-id"] == "abc-1"
        fake.engine.behaviour = "answer"
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_bug_in_a_stream_ends_it_with_an_error_event(fake):
    fake.engine.behaviour = "crash"
    with fake.http() as http:
        answer = http.post("/v1/completions", json={**COMPLETION, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200 and events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["text"] == "a"
    assert json.loads(events[1])["error"]["type"] == "server_error" and "secret" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_unavailable_engine_is_503_with_retry_after(fake, stream):
    fake.engine.behaviour = "unavailable"
    with fake.http() as http:
        answer = http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert (
            answer.status_code == 503
            and answer.headers["retry-after"]
            and "draining" in answer.text
        )


@pytest.mark.parametrize("most", [0, 2])
def test_as_many_wait_as_may(tiny_tokenizer, most):
    engine, settings = FakeEngine("hang"), ServerConfig(batch_size=1, max_waiting_requests=most)
    engine.engines = 2  # as with two ranks
    with running_server(engine, tiny_tokenizer, config=settings) as server, server.http() as http:
        body = {**COMPLETION, "stream": False}
        blocked = [
            threading.Thread(target=lambda: httpx.post(f"{server.url}/v1/completions", json=body))
            for _ in range(2 + most)
        ]
        for number, thread in enumerate(blocked, 1):
            thread.start()
            until(lambda number=number: engine.running == number)
        busy = http.post("/v1/completions", json=COMPLETION)
        assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        assert "server.max_waiting_requests" in busy.json()["error"]["message"]
        assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 429
        server.thread.stop(drain_timeout=0.1)
        for thread in blocked:
            thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_requests_over_the_cap_are_429_and_a_hangup_frees_its_place(tiny_tokenizer, stream):
    engine = FakeEngine("hang")
    with running_server(
        engine, tiny_tokenizer, config=ServerConfig(max_concurrent_requests=1)
    ) as server:
        body = {**COMPLETION, "stream": stream}
        server.hang_up("/v1/completions", body, lambda: engine.running == 1)
        until(lambda: engine.cancelled == 1 and engine.running == 0)
        answers = []
        blocked = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            )
        )
        blocked.start()
        until(lambda: engine.running == 1)
        with server.http() as http:
            busy = http.post("/v1/completions", json=COMPLETION)
            assert busy.status_code == 429 and "busy" in busy.json()["error"]["message"]
            assert (
                busy.headers["retry-after"] == "1"
                and busy.json()["error"]["type"] == "rate_limit_error"
            )
            assert http.get("/health").status_code == 200
        server.thread.stop(drain_timeout=0.1)
        blocked.join()
        assert engine.cancelled == 2
        assert answers[0].status_code == (200 if stream else 503)
        assert "the server is shutting down" in answers[0].text


def test_stop_lets_a_running_request_end(tiny_tokenizer):
    engine = FakeEngine("hang")
    answers = []
    with running_server(engine, tiny_tokenizer) as server:
        event = threading.Event()

        async def answer_when_told(requests):
            await asyncio.to_thread(event.wait)
            return [engine._output(request) for request in requests]

        engine.generate_many = answer_when_told
        asker = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=60)
            )
        )
        asker.start()
        until(lambda: "in_flight 1.0" in httpx.get(f"{server.url}/metrics").text)
        stopper = threading.Thread(target=server.thread.stop, args=(20.0,))
        stopper.start()
        until(lambda: _refused(server.url))
        event.set()
        stopper.join()
        asker.join()
    assert answers[0].status_code == 200


def _refused(url):
    try:
        httpx.get(f"{url}/health", timeout=1)
    except httpx.TransportError:
        return True
    return False


def test_while_draining_the_running_end_and_new_ones_are_503(tiny_tokenizer):
    engine = FakeEngine("hang")
    with running_server(engine, tiny_tokenizer) as server, server.http() as http:
        told, answers = threading.Event(), []

        async def answer_when_told(requests):
            engine.running += 1
            await asyncio.to_thread(told.wait)
            return [engine._output(request) for request in requests]

        engine.generate_many = answer_when_told
        asker = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=60)
            )
        )
        asker.start()
        until(lambda: engine.running == 1)
        drain = threading.Thread(target=server.state.drain, args=(20.0,))
        drain.start()
        until(lambda: server.state.draining)
        refused = http.post("/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "shutting down" in refused.json()["error"]["message"]
        assert (http.get("/health").status_code, http.get("/health").json()["status"]) == (
            503,
            "draining",
        )
        assert drain.is_alive()
        told.set()
        drain.join(10)
        asker.join(10)
        assert not drain.is_alive() and answers[0].status_code == 200


def test_an_answer_that_takes_too_long_is_504_and_its_work_is_stopped(tiny_tokenizer, monkeypatch):
    engine = FakeEngine("hang")
    monkeypatch.setattr(middleware, "asyncio", TimeFromTheHang(engine))
    with (
        running_server(
            engine, tiny_tokenizer, config=ServerConfig(request_timeout_s=0.2)
        ) as server,
        server.http() as http,
    ):
        late = http.post("/v1/completions", json=COMPLETION)
        assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
        assert "server.request_timeout_s = 0.2" in late.json()["error"]["message"]
        streamed = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        assert streamed.status_code == 200 and events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "timeout"
        until(lambda: engine.cancelled == 2)  # the last event may be there first
        engine.behaviour = "answer"
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("/v1/completions", {"prompt": ["a"] * 1025}, 400),
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 400}, 400),
        ("/generate", {"text": ["a"] * 3, "sampling_params": {"n": 400}}, 400),
        ("/v1/completions", {"prompt": "a" * 10_000_000}, 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 10_000_000}]},
            400,
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 500}] * 2000},
            400,
        ),
        ("/tokenize", {"prompt": "a" * 10_000_000}, 400),
        ("/v1/completions", {"prompt": "a" * 40_000_000}, 413),
    ],
)
def test_a_request_may_not_ask_for_too_much(fake, path, body, status):
    with fake.http() as http:
        assert http.post(path, json={"model": "fake", **body}).status_code == status


BAD_BODIES = {
    "not json": b"{",
    "nan": b'{"model": "fake", "prompt": "a", "temperature": NaN}',
    "nan in a dropped field": b'{"model": "fake", "prompt": "a", "metadata": {"x": NaN}}',
    "not utf-8": b'{"model": "fake", "prompt": "\xff"}',
    "lone surrogate": b'{"model": "fake", "prompt": "\\ud800"}',
    "a list": b"[1]",
    "nothing": b"",
    "too deep": b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_malformed_body_is_a_400(fake, body):
    with fake.http() as http:
        answer = http.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400 and set(answer.json()["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }


def test_a_body_without_json_content_type_is_told_what_to_send(fake):
    with fake.http() as http:
        answer = http.post(
            "/v1/completions",
            content=json.dumps(COMPLETION),
            headers={"Content-Type": "text/plain"},
        )
        assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_413(tiny_tokenizer, announced):
    with (
        running_server(FakeEngine(), tiny_tokenizer, max_body_bytes=1000) as server,
        server.http() as http,
    ):
        body = json.dumps({**COMPLETION, "user": "x" * 2000}).encode()
        content = body if announced else iter([body[:900], body[900:]])
        answer = http.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        assert (
            answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"
        )
        assert answer.json()["error"]["code"] == "request_too_large"
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_unknown_routes_and_methods_have_openai_bodies(fake):
    with fake.http() as http:
        missing, wrong = http.get("/v1/nothing"), http.get("/v1/completions")
        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert (
            "/v1/nothing" in missing.json()["error"]["message"]
            and wrong.json()["error"]["code"] == "method_not_allowed"
        )


def test_minus_infinity_becomes_a_number_that_json_has(fake):
    with fake.http() as http:
        answer = http.post("/v1/completions", json={**COMPLETION, "logprobs": 0}).json()
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]
        assert answer["policy_version"] == 1
        assert answer["choices"][0]["weight_versions"] == [
            {"version": 0, "start": 0, "end": 1},
            {"version": 1, "start": 1, "end": 2},
        ]


def test_request_ids_are_echoed_or_made(fake):
    with fake.http() as http:
        assert (
            http.get("/health", headers={"X-Request-ID": "mine"}).headers["x-request-id"] == "mine"
        )
        made = http.get("/health", headers={"X-Request-ID": "two words"}).headers["x-request-id"]
        assert len(made) == 32


def test_the_access_log_is_a_debug_line_with_the_request_id(fake, capsys):
    written = []

    def lines():
        written.append(capsys.readouterr().err)
        return [json.loads(line) for line in "".join(written).splitlines()]

    configure_logging(json=True, level="debug")
    with fake.http() as http:
        http.get("/v1/models", headers={"X-Request-ID": "trace-me"})
    until(lambda: any(line.get("request_id") == "trace-me" for line in lines()))
    [line] = [line for line in lines() if line.get("request_id") == "trace-me"]
    assert (line["event"], line["path"], line["status"]) == ("request", "/v1/models", 200)


def test_a_taken_port_is_named(fake):
    port = int(fake.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"port {port} .* already in use.*server.port"):
        bind_socket("127.0.0.1", port)


def test_a_host_that_is_nowhere_is_a_config_error():
    with pytest.raises(ConfigError, match=r"server.host = 'no\.such\.host\.invalid'"):
        bind_socket("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="cannot listen"):
        bind_socket("192.0.2.1", 0)

"""What one client may cost the others: connections, bodies, lists of faults, texts. Each of
these got through once."""

import asyncio
import gzip
import logging
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from mlx_parallm.server import connection_limits, middleware
from mlx_parallm.server.api.adapters import LoadBody
from mlx_parallm.server.api.control import AbortBody
from mlx_parallm.server.api.generate import SglangBody, VllmBody
from mlx_parallm.server.api.inference import InferenceBody
from mlx_parallm.server.api.rewards import RewardsBody
from mlx_parallm.server.connection_limits import (
    FIRST_REQUEST_SECONDS,
    NEXT_REQUEST_SECONDS,
    ConnectionGuard,
    SparseWarnings,
    connection_limit,
)
from mlx_parallm.server.errors import LONGEST_MESSAGE
from mlx_parallm.server.protocol.fields import MAX_BODY_BYTES
from mlx_parallm.server.protocol.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatBody,
    ChatTokensBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from mlx_parallm.system.foreign_json import MAX_CONTAINERS
from tests.clock import Clock
from tests.server.fake_engine import FakeEngine
from tests.server.serving import RunningServer, running_server
from tests.waiting import until

BODIES = (
    *(CompletionBody, ChatBody, ChatTokensBody, TokenizeBody, DetokenizeBody, VllmBody, SglangBody),
    *(InferenceBody, RewardsBody, AbortBody, LoadBody),
)
MANY = 20_000


class Cycle:
    response_complete = False


class Connection:
    """What the guard reads of uvicorn's connection; its own transport."""

    def __init__(self, guard: ConnectionGuard) -> None:
        self.cycle: Cycle | None = None
        self.transport, self.closed, self.unsent = self, False, 0
        guard.opened(self)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.closed = True

    def ask(self) -> None:
        self.cycle = Cycle()

    def answered(self) -> None:
        assert self.cycle is not None
        self.cycle.response_complete = True


# ---------------------------------------------------------------------- connections


def test_one_connection_too_many_takes_the_place_of_the_oldest_silent_one() -> None:
    guard = ConnectionGuard(limit=3)
    kept_alive, silent, asking = (Connection(guard) for _ in range(3))
    kept_alive.ask()
    kept_alive.answered()
    asking.ask()
    newcomer = Connection(guard)
    assert [each.closed for each in (kept_alive, silent, asking, newcomer)] == [
        False,
        True,
        False,
        False,
    ]
    newcomer.ask()
    another = Connection(guard)
    assert kept_alive.closed and not another.closed, (
        "nobody is silent: the one that waits for its next request goes"
    )
    another.ask()
    assert Connection(guard).closed, "all are at work: the newest goes"


def test_a_connection_has_a_time_for_its_request() -> None:
    clock = Clock(100.0)
    guard = ConnectionGuard(limit=9, clock=clock)
    silent, asking, kept_alive, slow_reader = (Connection(guard) for _ in range(4))
    for each in (asking, kept_alive, slow_reader):
        each.ask()
    guard.sweep()
    for each in (kept_alive, slow_reader):
        each.answered()
    clock.now += FIRST_REQUEST_SECONDS
    guard.sweep()
    assert silent.closed and not asking.closed and not kept_alive.closed
    clock.now += NEXT_REQUEST_SECONDS - FIRST_REQUEST_SECONDS
    slow_reader.unsent = 5  # it has taken a part of its answer meanwhile
    guard.sweep()
    assert kept_alive.closed and not asking.closed and not slow_reader.closed
    clock.now += NEXT_REQUEST_SECONDS
    guard.sweep()
    assert slow_reader.closed and not asking.closed


def test_the_limit_leaves_files_to_the_trainer() -> None:
    assert connection_limit(256, files=65536) == 1024, "four for each request that may run"
    assert connection_limit(256, files=1024) == 512
    assert connection_limit(256, files=256) == 128
    assert connection_limit(1, files=65536) == 64


def test_idle_connections_keep_nobody_out(tiny_tokenizer: Any) -> None:
    with running_server(FakeEngine(), tiny_tokenizer, max_connections=8) as server:
        port = int(server.url.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        with server.http() as http:
            assert http.get("/health").status_code == 200
        idle[0].settimeout(20)
        assert idle[0].recv(1) == b"", "the first of them is closed"
        for each in idle:
            each.close()


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        ([b"Transfer-Encoding: chunked\r\n\r\n", b"no chunk\r\n"], b"400"),
        ([b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", b"no chunk\r\n"], b"400"),
        ([b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"], b"400"),
        ([b"Origin: http://x\r\nTransfer-Encoding: chunked\r\n\r\n", b"no chunk\r\n"], b"403"),
    ],
)
def test_what_is_no_http_leaves_no_traceback(
    fake: RunningServer, caplog: pytest.LogCaptureFixture, sent: list[bytes], answered: bytes
) -> None:
    """Also behind an answer that did not wait for the body."""
    port = int(fake.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        connection.sendall(head + b"\r\n" + sent[0])
        answer = connection.recv(1) if answered == b"403" else b""
        for part in sent[1:]:
            connection.sendall(part)
        answer += connection.makefile("rb").read()
    assert answer.split()[1] == answered and answer.count(b"HTTP/1.1") == 1
    assert [record.getMessage() for record in caplog.records if record.levelno > 30] == []


def test_repeated_warnings_are_counted_not_written(http: httpx.Client) -> None:
    for logger in (
        "asyncio",
        "uvicorn.error",
    ):  # "socket.send() raised exception." was most of a log
        assert any(isinstance(each, SparseWarnings) for each in logging.getLogger(logger).filters)
    clock = Clock(100.0)
    filter_ = SparseWarnings(clock)

    def passes(words: str, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("uvicorn.error", level, "", 0, words, None, None)
        return record.getMessage() if filter_.filter(record) else None

    assert passes("Invalid HTTP request received.")
    assert [passes("Invalid HTTP request received.") for _ in range(1500)] == [None] * 1500
    assert passes("something else") and passes("Invalid HTTP request received.", logging.ERROR)
    clock.now += 61
    assert (
        passes("Invalid HTTP request received.")
        == "Invalid HTTP request received. (1500 more in the minute before)"
    )


def test_a_failed_accept_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.Logger("accept")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(connection_limits, "_log", logger)
    loop = asyncio.new_event_loop()
    connection_limits.on_loop_error(
        loop,
        {
            "message": "socket.accept() out of system resource",
            "exception": OSError(24, "Too many open files"),
        },
    )
    loop.close()
    [record] = caplog.records
    assert (
        "no connection can be accepted: [Errno 24]" in record.getMessage()
        and record.exc_info is None
    )


# ---------------------------------------------------------------------- bodies


@pytest.fixture(scope="module")
def fake(tiny_tokenizer: Any) -> Iterator[RunningServer]:
    with running_server(FakeEngine(), tiny_tokenizer, max_body_bytes=1 << 20) as server:
        yield server


@pytest.fixture
def http(fake: RunningServer) -> Iterator[httpx.Client]:
    with fake.http() as client:
        yield client


def half_sent(server: RunningServer, sent: int, announced: int) -> socket.socket:
    connection = socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20
    )
    header = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {announced}\r\n"
    connection.sendall(f"{header}Content-Type: application/json\r\n\r\n".encode() + b"x" * sent)
    return connection


def test_a_body_that_stops_coming_is_408(
    fake: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    with half_sent(fake, sent=100, announced=1000) as connection:
        answer = connection.makefile("rb").read()  # to the end: the connection is closed
        assert answer.startswith(b"HTTP/1.1 408") and b"came too slowly" in answer
        assert b"connection: close" in answer.lower()


async def test_a_body_has_to_keep_a_least_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 s and what 1,000 bytes a second allow: a byte every 0.02 s is not enough, 100 bytes
    are."""
    monkeypatch.setattr(middleware, "BODY_SECONDS", 1.0)
    monkeypatch.setattr(middleware, "SLOWEST_BYTES_PER_SECOND", 1000)
    received = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["more_body"]:
            received.append(len(message["body"]))

    async def dripping(size: int, parts: int) -> None:
        left = iter(range(parts))

        async def receive() -> Message:
            await asyncio.sleep(0.02)
            more = next(left, None) is not None
            return {"type": "http.request", "body": b"x" * size, "more_body": more}

        await middleware.BodyLimitMiddleware(app, 10**6)(
            {"type": "http", "headers": []}, receive, _nobody
        )

    await dripping(100, 20)
    assert len(received) == 20
    with pytest.raises(middleware.HTTPException, match="came too slowly"):
        await dripping(1, 1000)


async def _nobody(message: Any) -> None:
    raise AssertionError(message)


@pytest.mark.slow
def test_unfinished_bodies_are_bounded_together_and_small_requests_pass(
    fake: RunningServer,
) -> None:
    held = [
        half_sent(fake, sent=(1 << 20) - 5, announced=1 << 20)
        for _ in range(middleware.UNFINISHED_BODIES)
    ]
    with half_sent(fake, sent=(1 << 20) - 5, announced=1 << 20) as one_more, fake.http() as http:
        answered = [each for each in (*held, one_more) if _answer(each).startswith(b"HTTP/1.1 503")]
        assert len(answered) >= 1
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    for each in held:
        each.close()
    body = b'{"prompt": "a", "user": "%s"}' % (b"x" * (1 << 19))
    with fake.http() as http:
        until(lambda: http.post("/v1/completions", content=body, headers=JSON).status_code == 200)


JSON = {"Content-Type": "application/json"}


def _answer(connection: socket.socket) -> bytes:
    connection.settimeout(0.5)
    try:
        return connection.recv(4096)
    except TimeoutError:
        return b""


# ---------------------------------------------------------------------- what a body may hold


def checked_lists(schema: Any, path: str) -> Iterator[tuple[str, bool]]:
    """Each list of a pydantic schema whose items are checked, and whether it is given up at the
    first fault."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and schema.get("items_schema", {}).get("type", "any") != (
            "any"
        ):
            yield path, bool(schema.get("fail_fast"))
        for key, value in schema.items():
            yield from checked_lists(value, f"{path}.{key}")
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from checked_lists(value, path)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_list_is_given_up_at_its_first_fault(body: Any) -> None:
    """A list without `ListOf` makes an error object for each of its items."""
    assert [
        path
        for path, fails_fast in checked_lists(body.__pydantic_core_schema__, "")
        if not fails_fast
    ] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "stop": [1] * MANY}, "stop"),
        ("/v1/completions", {"prompt": [[-1]] * MANY}, "prompt"),
        (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {f"x{n}": 1 for n in range(MANY)}},
            "logit_bias",
        ),
        ("/v1/completions", {"prompt": "a", **{f"x{n}": 1 for n in range(MANY)}}, "x0"),
        ("/v1/chat/completions", {"messages": [1] * MANY}, "messages.0"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [1] * MANY},
            "tools.0",
        ),
        ("/generate", {"input_ids": [-1] * MANY}, "input_ids"),
        ("/v1/detokenize", {"tokens": ["a"] * MANY}, "tokens.0"),
        ("/v1/rewards", {"id": "a", "rewards": ["a"] * MANY}, "rewards.0"),
    ],
)
def test_many_faults_are_one_short_error(
    http: httpx.Client, path: str, body: Any, param: str
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(answer.content) < 1000


def test_an_error_does_not_repeat_a_long_request(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "y" * 500_000: 1})
    assert (
        answer.status_code == 400 and len(answer.json()["error"]["message"]) <= LONGEST_MESSAGE + 1
    )
    assert len(answer.content) < 2 * LONGEST_MESSAGE


def test_a_valid_logit_bias_of_any_size_is_taken_whole() -> None:
    bias = {str(token): token / 1000 for token in range(1000)}
    body = CompletionBody.model_validate({"prompt": "a", "logit_bias": bias})
    assert body.logit_bias == {token: token / 1000 for token in range(1000)}


def test_nested_fields_are_still_named(http: httpx.Client) -> None:
    """An alias (`schema`) is a declared name; of several unknown ones the first is named."""
    schema = {"type": "json_schema", "json_schema": {"x": 1, "y": 2, "schema": {"type": "object"}}}
    answer = http.post("/v1/completions", json={"prompt": "a", "response_format": schema})
    assert answer.json()["error"]["param"] == "response_format.json_schema.x"


def test_lists_of_nothing_are_413_before_they_are_made(tiny_tokenizer: Any) -> None:
    with running_server(FakeEngine(), tiny_tokenizer) as server, server.http() as http:
        content = b'{"prompt":[' + b"[]," * MAX_CONTAINERS + b"[]]}"
        answer = http.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == 413 and f"more than {MAX_CONTAINERS} lists" in answer.text


PROMPT = b'{"prompt": "hi", "max_tokens": 1}'


@pytest.mark.parametrize(
    ("encoding", "content", "status", "words"),
    [
        ("gzip", gzip.compress(PROMPT), 200, "choices"),
        ("x-gzip", gzip.compress(PROMPT[:9]) + gzip.compress(PROMPT[9:]), 200, "choices"),
        ("deflate", zlib.compress(PROMPT), 200, "choices"),
        ("deflate", zlib.compress(PROMPT)[2:-4], 200, "choices"),
        ("identity", PROMPT, 200, "choices"),
        ("zstd", PROMPT, 415, "packed as 'zstd'; read here are: gzip, deflate"),
        ("gzip, gzip", PROMPT, 415, "packed as 'gzip, gzip'"),
        ("gzip", PROMPT, 400, "the body is not gzip"),
        ("gzip", gzip.compress(PROMPT)[:-9], 400, "ends within its gzip"),
        ("gzip", gzip.compress(PROMPT) + b"more", 400, "the body is not gzip"),
        ("gzip", gzip.compress(bytes(MAX_BODY_BYTES + 1), 1), 413, "at most 33,554,432"),
    ],
)
def test_a_packed_body_is_read_or_refused_by_name(
    http: httpx.Client, encoding: str, content: bytes, status: int, words: str
) -> None:
    headers = JSON | {"Content-Encoding": encoding}
    answer = http.post("/v1/completions", content=content, headers=headers)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


# ---------------------------------------------------------------------- texts


def test_what_cannot_fit_is_refused_before_the_work(
    fake: RunningServer, http: httpx.Client
) -> None:
    room = fake.engine.max_model_len
    refused = http.post("/detokenize", json={"tokens": [1] * (room + 1)})
    assert (
        refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    )
    assert http.post("/detokenize", json={"tokens": [1] * room}).status_code == 200
    one = {"role": "user", "content": ""}
    many = http.post("/v1/chat/completions", json={"messages": [one] * (room + 1)})
    assert many.status_code == 400 and f"{room + 1} messages" in many.json()["error"]["message"]


@pytest.mark.parametrize(("field", "most"), [("messages", MAX_MESSAGES), ("tools", MAX_TOOLS)])
def test_messages_and_tools_are_counted_before_they_are_checked(
    http: httpx.Client, field: str, most: int
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], field: [0] * (most + 1)}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == f"{field}.0", (
        "the first fault comes first"
    )
    valid = {
        "messages": {"role": "user", "content": ""},
        "tools": {"type": "function", "function": {"name": "f"}},
    }
    answer = http.post("/v1/chat/completions", json=body | {field: [valid[field]] * (most + 1)})
    assert (
        answer.status_code == 400 and f"at most {most} items" in answer.json()["error"]["message"]
    )


def test_a_conversation_is_measured_before_it_is_rendered(
    fake: RunningServer, http: httpx.Client, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> str:
        raise AssertionError("rendered")

    monkeypatch.setattr(type(tiny_tokenizer), "render_chat_text", never)
    half = "a" * (fake.engine.max_model_len * tiny_tokenizer.longest_token // 2 + 1)
    answer = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": half}] * 2}
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_stop_strings_are_bounded(client: Any) -> None:
    ask = {"model": "default", "prompt": "a", "max_tokens": 1}
    client.completions.create(**ask, stop=[f"{n:>256}" for n in range(64)])
    for stop, words in (
        ([str(n) for n in range(65)], "at most 64"),
        (["x" * 257], "at most 256 characters"),
    ):
        with pytest.raises(Exception, match=words):
            client.completions.create(**ask, stop=stop)

"""The client of other servers, against a real HTTP server that answers from a script and counts
what it receives."""

import asyncio
import threading
import time
from contextlib import AbstractContextManager
from email.utils import formatdate
from typing import Any

import pytest

from mlx_parallm.errors import EndpointError
from mlx_parallm.execution import openai_client
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.system.foreign_http import Bounds
from tests.scripted_http import Received, Reply, scripted_http

OK = (200, {}, {"choices": []})


def server(*replies: Reply | None) -> AbstractContextManager[tuple[str, list[Received]]]:
    """Answers the i-th request with the i-th reply, and with the last one from then on."""
    left = list(replies)
    return scripted_http(lambda *_: left.pop(0) if len(left) > 1 else left[0])


def post(url: str, **options: Any) -> Any:
    async def run() -> Any:
        endpoint = OpenAIEndpoint(url, **options)
        try:
            return await endpoint.post("/chat/completions", {"model": "m"})
        finally:
            await endpoint.aclose()

    return asyncio.run(run())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "FIRST_PAUSE_S", 0.001)


def test_an_answer_and_the_key() -> None:
    with server(OK) as (url, received):
        assert post(url + "/", api_key="sk-secret") == {"choices": []}
    assert received == [("/v1/chat/completions", "Bearer sk-secret", {"model": "m"})]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_is_tried_again(status: int, quick: None) -> None:
    with server((status, {}, "busy"), None, OK) as (url, received):
        assert post(url) == {"choices": []}
    assert len(received) == 3, "a refusal, a lost connection, an answer"


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_obeyed(form: str) -> None:
    value = "0.2" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
    with server((429, {"Retry-After": value}, ""), OK) as (url, received):
        started = time.monotonic()
        post(url)
        waited = time.monotonic() - started
    assert len(received) == 2
    assert waited >= (0.2 if form == "seconds" else 0.7)


@pytest.mark.parametrize(
    ("refusal", "words", "tries"),
    [
        (
            (429, {"Retry-After": "3600"}, {"error": {"message": "quota"}}),
            "quota; it asks to wait 3600 s",
            1,
        ),
        (
            (503, {}, {"error": {"message": "the model is loading"}}),
            r"the model is loading \(tried 3 times\)",
            3,
        ),
    ],
)
def test_an_hour_and_a_last_try_are_given_up_with_the_servers_own_words(
    refusal: Reply, words: str, tries: int, quick: None
) -> None:
    with server(refusal) as (url, received), pytest.raises(EndpointError, match=words) as refused:
        post(url, retries=2)
    assert (len(received), refused.value.status) == (tries, refusal[0])


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (401, {"error": {"message": "no such key"}}, "HTTP 401: no such key"),
        (404, {"detail": "no such route"}, "HTTP 404: no such route"),
        (400, "plain words", "HTTP 400: plain words"),
        (500, "", "HTTP 500: Internal Server Error"),
        (200, "<html>", "answered '<html>': is this an OpenAI endpoint"),
        (200, [1], r"answered '\[1\]'"),
    ],
)
def test_a_refusal_is_not_repeated(status: int, said: Any, words: str) -> None:
    with (
        server((status, {}, said)) as (url, received),
        pytest.raises(EndpointError, match=words) as refused,
    ):
        post(url)
    assert len(received) == 1
    assert refused.value.status == (status if status != 200 else None)


def test_nobody_there(quick: None) -> None:
    with server(OK) as (url, _):
        pass
    with pytest.raises(EndpointError, match="tried 2 times"):
        post(url, retries=1)
    with pytest.raises(EndpointError, match="is not a URL"):
        OpenAIEndpoint("127.0.0.1:8000")


def test_as_many_as_allowed_are_in_flight_and_a_late_answer_is_an_error() -> None:
    two, over, lock = threading.Event(), threading.Event(), threading.Lock()
    running, most, pause_s = [0], [0], [0.1]  # in which a third would arrive

    def slow(*_: Any) -> Reply:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        if running[0] > 1:
            two.set()
        two.wait(20)
        over.wait(pause_s[0])
        with lock:
            running[0] -= 1
        return OK

    async def many(url: str, **options: Any) -> None:
        endpoint = OpenAIEndpoint(url, **options)
        try:
            await asyncio.gather(*(endpoint.post("/x", {}) for _ in range(5)))
        finally:
            await endpoint.aclose()

    with scripted_http(slow) as (url, _):
        asyncio.run(many(url, max_in_flight=2))
        assert most[0] == 2
        pause_s[0] = 20
        with pytest.raises(EndpointError, match=r"no answer within 0\.05 s"):
            asyncio.run(many(url, timeout_s=0.05))
        over.set()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((200, {"Content-Encoding": "br"}, "x"), "packed as 'br'"),
        ((200, {}, "x" * 5000), "at most 4,096"),
        ((200, {}, "[" * 2000 + "]" * 2000), "nested too deeply"),
        ((200, {}, '{"a": ' + "[{}," * 99), "more than 64 lists"),
        ((307, {"Location": "http://127.0.0.1:9/v1"}, ""), "redirect to another server"),
        ((400, {}, "[" * 2000), r"HTTP 400: \[\[\["),
    ],
    ids=["packing", "size", "depth", "number", "redirect", "refusal"],
)
def test_an_answer_beyond_the_bounds_is_refused_at_once(reply: Reply, words: str) -> None:
    with server(reply) as (url, received):
        with pytest.raises(EndpointError, match=words):
            post(url, bounds=Bounds(body=4096, containers=64 if "64" in words else 4096))
        assert len(received) == 1


def test_the_names_of_what_is_served() -> None:
    async def ask(url: str) -> list[str]:
        endpoint = OpenAIEndpoint(url)
        try:
            return await endpoint.models()
        finally:
            await endpoint.aclose()

    with server((200, {}, {"data": [{"id": "a"}, {"id": "b"}]})) as (url, received):
        assert asyncio.run(ask(url)) == ["a", "b"]
    assert received[0][0] == "/v1/models"
    with server((503, {}, "loading")) as (url, received), pytest.raises(EndpointError, match="503"):
        asyncio.run(ask(url))
    assert len(received) == 1, "asked once: to find out whether it is there"

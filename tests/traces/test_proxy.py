"""The recorder in front of another server: answers pass through as they are, keys are kept
nowhere."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from mlx_parallm.errors import EndpointError
from mlx_parallm.server.thread import ServerThread, bind_socket
from mlx_parallm.systems.traces.privacy import secret_finder
from mlx_parallm.systems.traces.proxy import LONGEST_EVENT, _Recording, recording_proxy
from mlx_parallm.systems.traces.recorder import SessionRecorder
from mlx_parallm.systems.traces.session import ABORTED, Session
from tests.conftest import TinyEngine
from tests.scripted_http import scripted_http
from tests.server.serving import RunningServer, running_server
from tests.traces.log_formats import traces_of
from tests.traces.messages import assistant, user
from tests.waiting import until

KEY = "sk-upstream-4f9a8c7b6d5e"
QUESTION: Any = user("Sum: 2+3")


@pytest.fixture
def upstream(tiny_engine: TinyEngine, tiny_tokenizer: Any) -> Iterator[RunningServer]:
    with running_server(tiny_engine.client, tiny_tokenizer, api_key=KEY) as server:
        yield server


@pytest.fixture
def proxy(upstream: RunningServer, tmp_path: Path) -> Iterator[str]:
    with served(recorder_before(f"{upstream.url}/v1", tmp_path)) as url:
        yield url


def recorder_before(upstream: str, tmp_path: Path) -> Any:
    return recording_proxy(SessionRecorder(tmp_path / "traces", secret_finder()), upstream)


@contextmanager
def served(app: Any) -> Iterator[str]:
    listener = bind_socket("127.0.0.1", 0)
    thread = ServerThread(app, listener, 64)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.stop(5.0)


def agent(proxy: str, name: str, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=f"{proxy}/sessions/{name}/v1", api_key=key, max_retries=0, timeout=60)


def session(tmp_path: Path, name: str) -> Session:
    return Session.read(tmp_path / "traces" / "sessions" / f"{name}.jsonl")


def test_whole_and_streamed_turns_join(proxy: str, tmp_path: Path) -> None:
    with agent(proxy, "one") as client:
        exact: Any = {
            "logprobs": True,
            "extra_body": {"return_token_ids": True},
            "max_tokens": 6,
            "model": "default",
        }
        answer = client.chat.completions.create(messages=[QUESTION], **exact)
        choice: Any = answer.choices[0]
        messages = [QUESTION, choice.message.model_dump(exclude_none=True), user("Sum: 1+1")]
        text, ids = "", list[int]()
        for chunk in client.chat.completions.create(messages=messages, stream=True, **exact):
            text += chunk.choices[0].delta.content or ""
            ids += getattr(chunk.choices[0], "token_ids", None) or []
        assert client.models.list().data[0].id == "builtin:tiny"
    httpx.post(f"{proxy}/sessions/one/feedback", json={"score": 1}).raise_for_status()
    first, second = session(tmp_path, "one").turns.values()
    assert first.tokens is not None and second.tokens is not None
    assert list(first.tokens.completion) == choice.token_ids
    assert list(first.tokens.logprobs) == [entry.logprob for entry in choice.logprobs.content]
    assert (second.parent, list(second.tokens.completion)) == ("t1", ids)
    assert second.response is not None and second.response["content"] == text
    [trace] = traces_of(session(tmp_path, "one"))
    assert len(trace.messages) == 4 and trace.labels[0].value == 1
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in everything


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["responses", "messages"])
def test_calls_of_the_other_apis_are_recorded_as_the_chats_that_they_are(
    proxy: str, tmp_path: Path, path: str, streamed: bool
) -> None:
    def ask(said: list[Any]) -> str:
        body: Any = {"model": "default", "stream": streamed, "temperature": 0}
        if path == "responses":
            body |= {"input": said, "instructions": "be brief", "max_output_tokens": 6}
        else:
            body |= {"messages": said, "system": "be brief", "max_tokens": 6}
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{proxy}/sessions/{path}/v1/{path}"
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.text

    ask([QUESTION])
    [first] = session(tmp_path, path).turns.values()
    assert first.response is not None and first.response["content"]
    again = [QUESTION, assistant(first.response["content"])]
    ask([*again, user("Sum: 1+1")])
    _, second = session(tmp_path, path).turns.values()
    assert second.parent == "t1"
    [trace] = traces_of(session(tmp_path, path))
    roles = [message["role"] for message in trace.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert trace.messages[0]["content"] == "be brief"


def test_refusals_of_the_upstream_pass_and_are_no_turns(proxy: str, tmp_path: Path) -> None:
    with (
        agent(proxy, "no", key="wrong-key-000") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(model="default", messages=[QUESTION])
    with agent(proxy, "no") as client, pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="default", messages=[QUESTION], temperature=-1)
    assert not (tmp_path / "traces" / "sessions" / "no.jsonl").exists()


GOOD_ANSWER: Any = {"id": "a", "choices": [{"index": 0, "message": assistant("x")}]}
REQUESTS: Any = [
    {"temperature": "hot"},
    {"tools": 5},
    {"tools": [5]},
    {"n": "two"},
    {"n": "2"},
    {"temperature": "0.7"},
    {"n": -1},
    {"model": {"a": 1}},
    {"messages": [user({"a": [1]})]},
    {"messages": "x"},
    {"messages": [1]},
    {"temperature": 10**400},
]
PARTS: Any = [
    {"choices": [{"index": "a", "delta": []}]},
    {"choices": [{"index": -1, "delta": {}}]},
    {"choices": [{"index": 10**9, "delta": {}}]},
    {"choices": [{"delta": 5}]},
    {"choices": [{"delta": {"content": "a"}, "finish_reason": {"a": 1}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": "x", "function": 5}]}}]},
    {
        "choices": [
            {
                "delta": {"tool_calls": [{"function": {"name": "a"}, "id": {}}]},
                "finish_reason": "stop",
            }
        ]
    },
    {"choices": [{"logprobs": [], "delta": {"content": "a"}}], "usage": "many"},
    {
        "choices": [{"logprobs": {"content": [5]}, "token_ids": ["a"], "finish_reason": "stop"}],
        "prompt_token_ids": [1],
    },
    {
        "choices": [{"message": {"content": "a"}, "index": [], "finish_reason": 1}],
        "id": 7,
        "usage": 8,
    },
    {"choices": {"0": 1}},
    {"choices": [[[]]]},
    [],
    "x",
]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A proxy before an upstream that answers what the test says, and remembers what it was
    sent."""
    state: dict[str, Any] = {"answer": (200, "application/json", b"{}")}

    async def upstream_app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body") or message["body"]:
            body += message["body"]
            if not message.get("more_body"):
                break
        state["seen"] = (scope["raw_path"], scope["query_string"], body, scope["headers"])
        status, kind, content = state["answer"]
        headers = [
            (b"content-type", kind.encode()),
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        size = max(7, len(content) // 200)
        for start in range(0, len(content) + 1, size):
            part = {"type": "http.response.body", "body": content[start : start + size]}
            await send(part | {"more_body": True})
        await send({"type": "http.response.body", "body": b""})

    with (
        served(upstream_app) as upstream,
        served(recorder_before(f"{upstream}/v1", tmp_path)) as url,
    ):
        yield url, state


@pytest.mark.parametrize("more", [{"tools": False}, {"tools": 0}, {"n": None, "temperature": 1}])
def test_a_request_that_is_lax_is_recorded(
    scripted: tuple[str, dict[str, Any]], tmp_path: Path, more: Any
) -> None:
    proxy, state = scripted
    state["answer"] = (200, "application/json", json.dumps(GOOD_ANSWER).encode())
    body = {"model": "m", "messages": [QUESTION]} | more
    answer = httpx.post(f"{proxy}/sessions/lax/v1/chat/completions", json=body, timeout=20)
    assert answer.json() == GOOD_ANSWER
    [turn] = Session.read(tmp_path / "traces/sessions/lax.jsonl").turns.values()
    assert turn.messages == [QUESTION] and not turn.tools


def test_whatever_comes_passes_on_as_it_is(scripted: tuple[str, dict[str, Any]]) -> None:
    """Requests and answers of every wrong form, whole and streamed: the same bytes, status and
    headers on both sides, and recording gives up. Also odd paths and queries, packed bodies,
    several cookies, a stream without an end, an event of megabytes, and what is not JSON at all."""
    proxy, state = scripted
    good = {"model": "m", "messages": [QUESTION]}
    events = [
        b"".join(b"data: %s\n\n" % json.dumps(part).encode() for part in parts)
        for parts in (PARTS[:1], PARTS)
    ]
    streams = [
        *events,
        *(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(part).encode() for part in PARTS),
    ]
    streams += [
        b"",
        b"data: {",
        b"\xff\xfe",
        b"data: " + b"x" * 100_000,
        b": ping\n\n\r\n\r\n",
        b"[" * 100_000,
    ]
    wholes = [json.dumps(part).encode() for part in PARTS] + [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"null",
    ]
    with httpx.Client(base_url=proxy, timeout=20) as http:

        def check(
            body: bytes,
            answer: tuple[int, str, bytes],
            path: str = "/chat/completions",
            **options: Any,
        ) -> None:
            state["answer"] = answer
            reply = http.post(f"/sessions/s/v1{path}", content=body, **options)
            assert (reply.status_code, reply.content) == (answer[0], answer[2]), (
                body[:80],
                answer[2][:80],
            )
            assert state["seen"][2] == body and reply.headers.get_list("set-cookie") == [
                "a=1",
                "b=2",
            ]

        for asked in REQUESTS:
            check(
                json.dumps(good | asked).encode(),
                (200, "application/json", json.dumps(GOOD_ANSWER).encode()),
            )
        for raw in (b"", b"{", b"\xff", b"[" * 100_000, b"5"):
            check(raw, (400, "application/json", b'{"error": 1}'))
        for content in wholes:
            check(json.dumps(good).encode(), (200, "application/json", content))
        for content in streams:
            check(json.dumps(good | {"stream": True}).encode(), (200, "text/event-stream", content))
        check(
            b"x",
            (200, "text/plain", b"y"),
            "/files/a%2Fb?q=1&q=%20",
            headers={"Content-Encoding": "br"},
        )
        assert state["seen"][:2] == (b"/v1/files/a%2Fb", b"q=1&q=%20")
        assert (b"content-encoding", b"br") in state["seen"][3]


def test_a_full_disk_fails_no_call(scripted: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """The recorder's directory is gone: answers continue."""
    proxy, state = scripted
    shutil.rmtree(tmp_path / "traces")
    state["answer"] = (200, "application/json", json.dumps(GOOD_ANSWER).encode())
    given_up = _Recording.given_up
    answer = httpx.post(
        f"{proxy}/sessions/s/v1/chat/completions", json={"model": "m", "messages": [QUESTION]}
    )
    assert answer.json() == GOOD_ANSWER and _Recording.given_up == given_up + 1


def test_a_hang_up_is_marked(proxy: str, tmp_path: Path, upstream: RunningServer) -> None:
    options: Any = {
        "model": "default",
        "messages": [QUESTION],
        "max_tokens": 200,
        "extra_body": {"ignore_eos": True},
    }
    with (
        agent(proxy, "cut") as client,
        client.chat.completions.create(stream=True, **options) as stream,
    ):
        next(iter(stream))
    path = tmp_path / "traces" / "sessions" / "cut.jsonl"
    # the file is there before its first line
    until(lambda: path.exists() and session(tmp_path, "cut").turns)
    assert [turn.status for turn in session(tmp_path, "cut").turns.values()] == [ABORTED]
    until(lambda: upstream.engine.stats().running == 0)


def test_an_event_too_long_to_record_is_passed_on(tmp_path: Path) -> None:
    stream = "data: " + "x" * (LONGEST_EVENT + 2**20) + "\n\n"
    headers = {"Content-Type": "text/event-stream"}
    with (
        scripted_http(lambda *_: (200, headers, stream)) as (upstream, _),
        served(recorder_before(upstream, tmp_path)) as url,
    ):
        body = {"messages": [QUESTION], "stream": True}
        answer = httpx.post(f"{url}/sessions/x/v1/chat/completions", json=body)
        assert answer.text == stream


def test_an_upstream_that_is_away(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="is not a URL"):
        recording_proxy(SessionRecorder(tmp_path, None), "localhost:8000")
    with served(recorder_before("http://127.0.0.1:9/v1", tmp_path)) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}, "the proxy itself is well"
        with agent(url, "x") as client, pytest.raises(openai.InternalServerError, match="reached"):
            client.chat.completions.create(model="m", messages=[QUESTION])
        elsewhere = httpx.get(f"{url}/sessions/x/v1/models", headers={"Host": "evil.example"})
        assert elsewhere.status_code == 403

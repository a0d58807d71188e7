"""The recorder in front of another server: answers pass through as they are, keys are kept nowhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from mlx_parallm.errors import EndpointError
from mlx_parallm.server.thread import ServerThread, bind_socket
from mlx_parallm.traces.privacy import secret_finder
from mlx_parallm.traces.proxy import recording_proxy
from mlx_parallm.traces.recorder import SessionRecorder
from mlx_parallm.traces.session import ABORTED, Session
from tests.conftest import TinyEngine
from tests.server.serving import RunningServer, running_server
from tests.waiting import until

KEY = "sk-upstream-4f9a8c7b6d5e"
QUESTION: Any = {"role": "user", "content": "Sum: 2+3"}


@pytest.fixture
def upstream(tiny_engine: TinyEngine, tiny_tokenizer: Any) -> Iterator[RunningServer]:
    with running_server(tiny_engine.client, tiny_tokenizer, api_key=KEY) as server:
        yield server


@pytest.fixture
def proxy(upstream: RunningServer, tmp_path: Path) -> Iterator[str]:
    app = recording_proxy(SessionRecorder(tmp_path / "traces", secret_finder()), f"{upstream.url}/v1")
    listener = bind_socket("127.0.0.1", 0)
    thread = ServerThread(app, listener, 64)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.stop(5.0)


def agent(proxy: str, name: str, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=f"{proxy}/sessions/{name}/v1", api_key=key, max_retries=0, timeout=60)


def session(tmp_path: Path, name: str) -> Session:
    return Session.read(tmp_path / "traces" / "sessions" / f"{name}.jsonl")


def test_whole_and_streamed_turns_join(proxy: str, tmp_path: Path) -> None:
    with agent(proxy, "one") as client:
        exact: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}, "max_tokens": 6, "model": "default"}
        answer = client.chat.completions.create(messages=[QUESTION], **exact)
        choice: Any = answer.choices[0]
        messages = [QUESTION, choice.message.model_dump(exclude_none=True), {"role": "user", "content": "Sum: 1+1"}]
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
    [trace] = session(tmp_path, "one").traces()
    assert len(trace.messages) == 4 and trace.labels[0].value == 1
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in everything


def test_refusals_of_the_upstream_pass_and_are_no_turns(proxy: str, tmp_path: Path) -> None:
    with agent(proxy, "no", key="wrong-key-000") as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="default", messages=[QUESTION])
    with agent(proxy, "no") as client, pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="default", messages=[QUESTION], temperature=-1)
    assert not (tmp_path / "traces" / "sessions" / "no.jsonl").exists()


def test_a_hang_up_is_marked(proxy: str, tmp_path: Path, upstream: RunningServer) -> None:
    options: Any = {"model": "default", "messages": [QUESTION], "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with agent(proxy, "cut") as client, client.chat.completions.create(stream=True, **options) as stream:
        next(iter(stream))
    path = tmp_path / "traces" / "sessions" / "cut.jsonl"
    until(path.exists)
    assert [turn.status for turn in session(tmp_path, "cut").turns.values()] == [ABORTED]
    until(lambda: upstream.engine.stats().running == 0)


def test_an_upstream_that_is_away(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="is not a URL"):
        recording_proxy(SessionRecorder(tmp_path, None), "localhost:8000")
    app = recording_proxy(SessionRecorder(tmp_path, None), "http://127.0.0.1:9/v1")
    listener = bind_socket("127.0.0.1", 0)
    thread = ServerThread(app, listener, 8)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with agent(url, "x") as client, pytest.raises(openai.InternalServerError, match="cannot be reached"):
        client.chat.completions.create(model="m", messages=[QUESTION])
    assert httpx.get(f"{url}/sessions/x/v1/models", headers={"Host": "evil.example"}).status_code == 403
    thread.stop(5.0)

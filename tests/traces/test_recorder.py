"""One changed line records an agent: the real client and the real engine, whole and streamed,
branches, hang-ups, feedback, restarts, a full disk."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from mlx_parallm.systems.traces import recorder as recorder_module
from mlx_parallm.systems.traces.privacy import secret_finder
from mlx_parallm.systems.traces.recorder import REVIEW, SessionRecorder
from mlx_parallm.systems.traces.routes import session_router
from mlx_parallm.systems.traces.schema import dump_line
from mlx_parallm.systems.traces.session import ABORTED, COMPLETE, Session, read_sessions
from mlx_parallm.systems.traces.trace import Trace
from tests.altered import Altered
from tests.conftest import TinyEngine
from tests.server.serving import RunningServer, running_server
from tests.traces.log_formats import traces_of
from tests.traces.messages import assistant, user
from tests.waiting import until

QUESTION: Any = user("Sum: 2+3")
RETURNED: Any = {"return_token_ids": True}
EXACT: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True}
SECRET = "AKIA2E0A8F3B244C9986"


@pytest.fixture
def recorder(tmp_path: Path) -> SessionRecorder:
    return SessionRecorder(tmp_path / "traces", secret_finder())


@pytest.fixture
def server(
    tiny_engine: TinyEngine, tiny_tokenizer: Any, recorder: SessionRecorder
) -> Iterator[RunningServer]:
    router = session_router(recorder, is_policy=lambda request: True)
    with running_server(tiny_engine.client, tiny_tokenizer, routers=[router]) as running:
        yield running


def agent(server: RunningServer, name: str) -> OpenAI:
    return OpenAI(
        base_url=f"{server.url}/sessions/{name}/v1", api_key="none", max_retries=0, timeout=60
    )


def ask(
    client: OpenAI, messages: list[Any], *, stream: bool = False, **options: Any
) -> tuple[Any, str, Any, Any]:
    """Message, response id, token ids and log-probabilities as the client sees them."""
    options = {
        "model": "default",
        "messages": messages,
        "max_tokens": 6,
        "logprobs": True,
        "extra_body": EXACT,
    } | options
    if not stream:
        answer = client.chat.completions.create(**options)
        choice: Any = answer.choices[0]
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        return choice.message.model_dump(exclude_none=True), answer.id, choice.token_ids, logprobs
    text, ids, logprobs, answer_id = "", list[int](), list[float](), ""
    for chunk in client.chat.completions.create(stream=True, **options):
        part = chunk.choices[0]
        answer_id, text = chunk.id, text + (part.delta.content or "")
        ids += getattr(part, "token_ids", None) or []
        logprobs += [entry.logprob for entry in part.logprobs.content] if part.logprobs else []
    return assistant(text), answer_id, ids, logprobs


def recorded(recorder: SessionRecorder, name: str) -> Session:
    return Session.read(recorder.directory / "sessions" / f"{name}.jsonl")


def texts(trace: Trace) -> list[tuple[str, bool]]:
    return [(step.text, step.sampled) for step in trace.steps if step.source == "agent"]


@pytest.mark.parametrize("stream", [False, True])
def test_turns_join_and_are_bit_equal(
    server: RunningServer, recorder: SessionRecorder, stream: bool
) -> None:
    with agent(server, "one") as client:
        messages: list[Any] = [QUESTION]
        seen = []
        for question in ("Sum: 4+4", "Sort: cab", None):
            message, *answer = ask(client, messages, stream=stream)
            seen.append(answer)
            messages += [message, user(question)]
    session = recorded(recorder, "one")
    turns = list(session.turns.values())
    assert [turn.parent for turn in turns] == [None, "t1", "t2"]
    for turn, (answer_id, ids, logprobs) in zip(turns, seen, strict=True):
        assert turn.tokens is not None
        assert (turn.response_id, list(turn.tokens.completion)) == (answer_id, ids)
        assert list(turn.tokens.logprobs) == logprobs  # bit-equal
    [trace] = traces_of(session)
    assert [message["content"] for message in trace.messages] == [
        message["content"] for message in messages[:-1]
    ]
    rendered = server.state.parts.tokenizer.render_chat(messages[:-2], add_generation_prompt=True)
    metrics = trace.steps[-1].metrics
    assert metrics is not None and metrics.prompt_token_ids == rendered
    assert (metrics.completion_token_ids, metrics.logprobs) == (seen[-1][1], seen[-1][2])


def test_one_conversation_through_three_apis_is_one_session(
    server: RunningServer, recorder: SessionRecorder
) -> None:
    """A chat, then a response, then a message: each continues with the turn before, with its own
    tokens."""
    questions = [QUESTION, *(user(content) for content in ("Sum: 4+4", "Sort: cab"))]
    with agent(server, "three") as client, server.http() as http:
        said, *first = ask(client, questions[:1])
        answer: Any = client.responses.create(
            model="default",
            input=[questions[0], said, questions[1]],
            max_output_tokens=6,
            extra_body=RETURNED,
        )
        own = assistant(answer.output_text)
        body = {
            "max_tokens": 6,
            "messages": [questions[0], said, questions[1], own, questions[2]],
            **RETURNED,
        }
        message = http.post("/sessions/three/v1/messages", json=body).json()
        refused = http.post("/sessions/three/v1/messages", json={"max_tokens": 6})
    assert refused.status_code == 400 and refused.json()["type"] == "error"
    turns = list(recorded(recorder, "three").turns.values())
    assert [turn.parent for turn in turns] == [None, "t1", "t2"]
    assert [turn.response_id for turn in turns] == [first[0], answer.id, message["id"]]
    sampled = [list(turn.tokens.completion) for turn in turns if turn.tokens is not None]
    assert sampled == [first[1], answer.token_ids, message["token_ids"]]


def test_branches_retries_and_made_up_answers(
    server: RunningServer, recorder: SessionRecorder
) -> None:
    """Turns that extend a call join it, others branch; what is shared is trained on once,
    made-up answers never."""
    with agent(server, "tree") as client:
        first, *_ = ask(client, [QUESTION])
        left, *_ = ask(client, [QUESTION, first, user("Sum: 1+1")])
        right, *_ = ask(client, [QUESTION, first, user("Sum: 9+9")])
        retry, *_ = ask(client, [QUESTION])
        edited = assistant("made up")
        after, *_ = ask(client, [QUESTION, edited, user("why?")])
    session = recorded(recorder, "tree")
    assert [turn.parent for turn in session.turns.values()] == [None, "t1", "t1", None, None]
    traces = [texts(trace) for trace in traces_of(session)]
    assert traces == [
        [(first["content"], True), (left["content"], True)],
        [(first["content"], False), (right["content"], True)],
        [(retry["content"], True)],
        [("made up", False), (after["content"], True)],
    ]
    rollout = session.rollout()
    sampled = sum(sum(segment.mask) for segment in rollout.segments)
    tokens = [turn.tokens for turn in session.turns.values()]
    assert sampled == sum(len(turn.completion) for turn in tokens if turn is not None)


def test_choices_and_tools_are_kept(server: RunningServer, recorder: SessionRecorder) -> None:
    with agent(server, "two") as client:
        answer = client.chat.completions.create(
            model="default", messages=[QUESTION], n=2, max_tokens=4
        )
        assert client.models.list().data[0].id == "builtin:tiny"
    turns = list(recorded(recorder, "two").turns.values())
    assert [turn.response["content"] for turn in turns if turn.response] == [
        c.message.content for c in answer.choices
    ]
    assert [turn.response_id for turn in turns] == [answer.id, f"{answer.id}#1"]


def test_a_hang_up_is_marked_and_nothing_goes_on_from_it(
    server: RunningServer, recorder: SessionRecorder
) -> None:
    with agent(server, "cut") as client:
        first, *_ = ask(client, [QUESTION])
        messages = [QUESTION, first, user("more")]
        options: Any = {
            "model": "default",
            "messages": messages,
            "max_tokens": 150,
            "extra_body": {"ignore_eos": True},
        }
        with client.chat.completions.create(stream=True, **options) as stream:
            next(iter(stream))
        until(lambda: len(recorded(recorder, "cut").turns) == 2)
        until(lambda: server.engine.stats().running == 0)
        body = {"messages": messages, "max_tokens": 170, "ignore_eos": True}
        path = "/sessions/cut/v1/chat/completions"
        server.hang_up(path, body, lambda: server.engine.stats().running)
        until(lambda: len(recorded(recorder, "cut").turns) == 3)
        ask(client, messages)
    session = recorded(recorder, "cut")
    assert [turn.status for turn in session.turns.values()] == [
        COMPLETE,
        ABORTED,
        ABORTED,
        COMPLETE,
    ]
    assert [turn.parent for turn in session.turns.values()] == [None, "t1", "t1", "t1"]
    assert [trace.get("aborted") for trace in traces_of(session)] == [None, True, True]


def test_a_bad_request_is_no_turn(server: RunningServer, recorder: SessionRecorder) -> None:
    with agent(server, "bad") as client:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="default", messages=[QUESTION], temperature=-1)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="none", messages=[QUESTION])
    with agent(server, "..%2Fx") as client, pytest.raises(openai.APIStatusError):
        ask(client, [QUESTION])
    with (
        agent(server, ".hidden") as client,
        pytest.raises(openai.BadRequestError, match="cannot name a session"),
    ):
        ask(client, [QUESTION])
    assert list((recorder.directory / "sessions").iterdir()) == []


def test_secrets_are_gone_before_the_disk(server: RunningServer, recorder: SessionRecorder) -> None:
    """The client's conversation continues as it was; on the disk stand placeholders, and no
    tokens."""
    with agent(server, "secret") as client:
        opening = user(f"key {SECRET}")
        message, *_ = ask(client, [opening])
        ask(client, [opening, message, user(f"again {SECRET}")])
        server_feedback = {"score": 1, "comment": f"it showed {SECRET}"}
        httpx.post(
            f"{server.url}/sessions/secret/feedback", json=server_feedback
        ).raise_for_status()
    everything = b"".join(
        path.read_bytes() for path in recorder.directory.rglob("*") if path.is_file()
    )
    assert SECRET.encode() not in everything
    session = recorded(recorder, "secret")
    assert [turn.parent for turn in session.turns.values()] == [None, "t1"]
    assert [turn.messages[-1]["content"] for turn in session.turns.values()] == [
        "key <AWS_1>",
        "again <AWS_1>",
    ]
    assert all(turn.tokens is None for turn in session.turns.values())
    assert session.labels[0].explanation == "it showed <AWS_1>"
    # three hits: placeholder and context
    assert (recorder.directory / REVIEW).read_text().count("<AWS_1>") == 6


def test_a_restart_goes_on_with_the_session(
    tiny_engine: TinyEngine, tiny_tokenizer: Any, recorder: SessionRecorder
) -> None:
    """Also with a secret in it, and after a kill in the middle of a line."""
    messages: list[Any] = [user(f"Sum: 2+3 {SECRET}")]
    for number in range(2):
        fresh = SessionRecorder(recorder.directory, secret_finder())
        routers = [session_router(fresh)]
        with (
            running_server(tiny_engine.client, tiny_tokenizer, routers=routers) as server,
            agent(server, "long") as client,
        ):
            message, *_ = ask(client, messages)
        messages += [message, user(f"Sum: {number}+1 {SECRET[:-1]}X")]
        with (recorder.directory / "sessions" / "long.jsonl").open("ab") as file:
            file.write(b'{"type": "turn", "id": "t')
    session = recorded(recorder, "long")
    assert [turn.parent for turn in session.turns.values()] == [None, "t1"]
    # another secret, another number
    assert session.turns["t2"].messages[0]["content"] == "Sum: 0+1 <AWS_2>"
    assert len(session.faults) == 1


TOKENS = {"shared": 0, "prompt": [5], "completion": [6, 2], "logprobs": [-0.5, -1.0]} | {
    "versions": [[3, 0, 2]],
    "temperature": 1.0,
    "policy": True,
    "prompt_version": 3,
}
TURN = {"type": "turn", "id": "t1", "parent": None, "at": 1.5, "status": "complete"} | {
    "model": None,
    "messages": [QUESTION],
    "response": assistant("5"),
    "finish_reason": "stop",
    "response_id": "r",
    "key": "k",
    "tokens": TOKENS,
}


def test_a_turn_of_a_file_is_written_as_it_was_read(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text(json.dumps(TURN))
    [turn] = Session.read(tmp_path / "s.jsonl").turns.values()
    assert turn.tokens is not None and turn.tokens.completion == [6, 2]
    assert json.loads(dump_line(turn.to_json())) == TURN


def test_null_of_another_writer_is_the_default(tmp_path: Path) -> None:
    tokens = TOKENS | {"policy": None}
    nulls = {"key": None, "redacted": None, "tokens": tokens}
    (tmp_path / "s.jsonl").write_text(json.dumps(TURN | nulls))
    [turn] = Session.read(tmp_path / "s.jsonl").turns.values()
    assert turn.tokens is not None and turn.tokens.policy is False
    assert (turn.key, turn.redacted) == ("", {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "half"}, "status: Input should be 'complete' or 'aborted'"),
        ({"at": "3"}, "at: Input should be a valid number"),
        ({"tokens": TOKENS | {"versions": [[1, 0, True]]}}, "tokens.versions.0.2: Input should be"),
        ({"messages": "abc"}, "messages: Input should be a valid"),
        ({"tokens": TOKENS | {"versions": [[1, 2]]}}, "tokens.versions.0.2: Field required"),
        ({"tokens": TOKENS | {"policy": "no"}}, "tokens.policy: Input should be a valid boolean"),
        ({"tokens": TOKENS | {"prompt": "abc"}}, "tokens.prompt: Input should be a valid"),
    ],
)
def test_what_is_wrong_in_a_line_is_named(tmp_path: Path, change: Any, reason: str) -> None:
    (tmp_path / "s.jsonl").write_text(json.dumps(TURN | change))
    session = Session.read(tmp_path / "s.jsonl")
    [fault] = session.faults
    assert not session.turns and fault.place == "s.jsonl:1"
    assert reason in fault.reason


def test_feedback(server: RunningServer, recorder: SessionRecorder) -> None:
    def send(session: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/sessions/{session}/feedback", json=body)

    with agent(server, "f") as client:
        first, answer_id, *_ = ask(client, [QUESTION])
        ask(client, [QUESTION, first, user("Sum: 1+1")])
    assert send("f", score=0.5, by="anna").json()["label"]["value"] == 0.5
    assert (
        send("f", label="good", response_id=answer_id).json()["label"]["response_id"] == answer_id
    )
    assert send("f", comment="fine", name="style").status_code == 200
    assert "training" not in send("f", score=1).json()  # a server that trains nothing
    for body, param in (
        ({}, "score"),
        ({"score": 1, "response_id": "x"}, "response_id"),
        ({"scores": 1}, "scores"),
    ):
        answer = send("f", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert send("nobody", score=1).status_code == 400
    [trace] = traces_of(recorded(recorder, "f"))
    shown = [(label.name, label.value, label.label, label.by) for label in trace.labels]
    assert shown[:2] == [("feedback", 0.5, None, "anna"), ("feedback", None, "good", "user")]
    assert len(shown) == 4 and len({label.prompt_hash for label in trace.labels}) == 1


def test_a_turn_that_cannot_be_written_is_an_error(
    server: RunningServer, recorder: SessionRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle of a line: the client is told, and the file is as it was."""
    with agent(server, "full") as client:
        first, *_ = ask(client, [QUESTION])
        before = (recorder.directory / "sessions" / "full.jsonl").read_bytes()
        write = os.write

        def half(descriptor: int, data: bytes) -> int:
            if b'"turn"' not in data and len(data) < 50:
                return write(descriptor, data)
            write(descriptor, data[:20])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(recorder_module, "os", Altered(os, write=half))
            with pytest.raises(openai.InternalServerError, match="No space left"):
                ask(client, [QUESTION])
        assert (recorder.directory / "sessions" / "full.jsonl").read_bytes() == before
        ask(client, [QUESTION, first, QUESTION])
    assert [turn.parent for turn in recorded(recorder, "full").turns.values()] == [None, "t1"]
    assert [session.name for session in read_sessions(recorder.directory)] == ["full"]

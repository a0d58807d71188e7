"""POST /v1/training/rollback: what the trainer's thread is asked, what the client is told."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_parallm.errors import RefusedError
from mlx_parallm.rl_training.publish.rollback import RollbackService, RollbackTarget
from mlx_parallm.server.api import training as routes_training
from tests.server.fake_engine import FakeEngine
from tests.server.serving import RunningServer, running_server

PATH = "/v1/training/rollback"
KEY = "sk-test-key"
RESULT = {"to": "version 3", "to_step": 3, "step": 9, "policy_version": 10}


@pytest.fixture
def desk() -> RollbackService:
    return RollbackService()


@pytest.fixture
def server(tiny_tokenizer: Any, desk: RollbackService) -> Iterator[RunningServer]:
    with running_server(FakeEngine(), tiny_tokenizer, rollbacks=desk, api_key=KEY) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[Any]:
    with server.http(headers={"Authorization": f"Bearer {KEY}"}) as http:
        yield http


class AsTrainer(threading.Thread):
    """Takes what is asked for and answers it."""

    def __init__(self, desk: RollbackService, outcome: dict[str, Any] | Exception) -> None:
        super().__init__(daemon=True)
        self.desk, self.outcome = desk, outcome
        self.asked: list[RollbackTarget] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.005):
            if (taken := self.desk.take()) is not None:
                self.asked.append(taken.target)
                future = taken.result
                if isinstance(self.outcome, Exception):
                    future.set_exception(self.outcome)
                else:
                    future.set_result(self.outcome)

    def __enter__(self) -> "AsTrainer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


def test_it_is_answered_when_it_is_done(http: Any, desk: RollbackService) -> None:
    assert http.get(PATH).json() == {"object": "rollback", "status": "none"}
    with AsTrainer(desk, RESULT) as trainer:
        first = http.post(PATH, json={"version": 3})
        second = http.post(PATH, json={"checkpoint": "step_000120"})
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json() == {"object": "rollback", "status": "done", **RESULT}
    assert trainer.asked == [RollbackTarget(version=3), RollbackTarget(checkpoint="step_000120")]
    assert http.get(PATH).json()["status"] == "done"


def test_a_long_step_is_answered_202_and_a_second_request_409(
    http: Any, desk: RollbackService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_training, "ANSWERED_WITHIN_S", 0.05)
    answer = http.post(PATH, json={"version": 3})
    assert (answer.status_code, answer.json()["status"], answer.json()["to"]) == (
        202,
        "waiting",
        "version 3",
    )
    second = http.post(PATH, json={"version": 4})
    assert second.status_code == 409
    assert "a rollback to version 3 is not done yet" in second.json()["error"]["message"]
    taken = desk.take()
    assert taken is not None and taken.target == RollbackTarget(version=3)
    assert http.get(PATH).json()["status"] == "waiting"
    taken.result.set_result(RESULT)
    assert http.get(PATH).json() == {"object": "rollback", "status": "done", **RESULT}


def test_what_the_trainer_refuses_has_openai_s_error_body(http: Any, desk: RollbackService) -> None:
    with AsTrainer(desk, RefusedError("version 3 is not kept. Kept: 8, 9", 404, "version")):
        answer = http.post(PATH, json={"version": 3})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "version"
    assert answer.json()["error"]["message"] == "version 3 is not kept. Kept: 8, 9"
    told = http.get(PATH).json()
    assert (told["status"], told["error"]["message"]) == (
        "refused",
        "version 3 is not kept. Kept: 8, 9",
    )


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"version": 1, "checkpoint": "step_1"}, {"step": 1}, {"checkpoint": ""}),
        *({"version": -1}, {"version": "x"}, {"version": "1"}, {"version": True}),
    ],
)
def test_a_bad_body_is_400_and_asks_nobody(
    http: Any, desk: RollbackService, body: dict[str, Any]
) -> None:
    answer = http.post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert desk.take() is None


def test_a_server_that_trains_nothing_says_so(tiny_tokenizer: Any) -> None:
    with running_server(FakeEngine(), tiny_tokenizer) as server, server.http() as http:
        for answer in (http.post(PATH, json={"version": 1}), http.get(PATH)):
            assert answer.status_code == 409
            assert "trains nothing" in answer.json()["error"]["message"]


def test_when_the_training_ends_who_waits_is_told(http: Any, desk: RollbackService) -> None:
    waiting = desk.request(version=3).result
    desk.close()
    with pytest.raises(RefusedError, match="ended before"):
        waiting.result(timeout=0)
    answer = http.post(PATH, json={"version": 3})
    assert answer.status_code == 409
    assert "the training has ended" in answer.json()["error"]["message"]


def test_the_document_declares_what_it_answers(server: RunningServer) -> None:
    operations = server.app.openapi()["paths"][PATH]
    assert {"200", "202", "400", "401", "404", "409", "413", "503"} <= set(
        operations["post"]["responses"]
    )
    assert {"200", "401", "409", "503"} <= set(operations["get"]["responses"])

"""/v1/score over a real server and a real reward model: every form of input, and every error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.models.scoring.reward_model import RewardScorer, TrainedRewardModel
from mlx_parallm.models.tokenizer import Tokenizer
from tests.conftest import TinyEngine
from tests.models.test_reward_model import make_config, save
from tests.server.serving import RunningServer, running_server

QUESTION = {"role": "user", "content": "Sum: 1+2"}


def chat(answer: str) -> list[dict[str, str]]:
    return [QUESTION, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    directory = tmp_path_factory.mktemp("score")
    save(directory / "judge" / "final", tiny_tokenizer, make_config(directory))
    return directory / "judge"


@pytest.fixture(scope="module")
def http(run: Path, tiny_engine: TinyEngine, tiny_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    scorer = RewardScorer(run)
    try:
        with (
            running_server(tiny_engine.client, tiny_tokenizer, scorer=scorer) as server,
            server.http() as client,
        ):
            yield client
    finally:
        scorer.close()


@pytest.fixture(scope="module")
def expected(run: Path) -> dict[str, tuple[float, int]]:
    """Score and number of tokens of some answers, from the model itself."""
    model = TrainedRewardModel.load(run)
    tokens = {answer: model.tokens(chat(answer)) for answer in ("3", "12 perhaps", "?")}
    scores = model.score(list(tokens.values()))
    return {
        answer: (number, len(tokens[answer])) for answer, number in zip(tokens, scores, strict=True)
    }


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({"messages": chat("3")}, ["3"]),
        ({"messages": [chat("3"), chat("?")], "model": "judge"}, ["3", "?"]),
        ({"text_1": "Sum: 1+2", "text_2": "3", "model": "default"}, ["3"]),
        ({"text_1": "Sum: 1+2", "text_2": ["3", "12 perhaps", "?"]}, ["3", "12 perhaps", "?"]),
        ({"text_1": ["Sum: 1+2"] * 2, "text_2": ["?", "3"]}, ["?", "3"]),
    ],
)
def test_scores_are_the_models(
    http: httpx.Client,
    expected: dict[str, tuple[float, int]],
    body: dict[str, Any],
    answers: list[str],
) -> None:
    for path in ("/v1/score", "/score"):
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        value = reply.json()
        scores = [entry["score"] for entry in value["data"]]
        assert scores == pytest.approx([expected[answer][0] for answer in answers], abs=2e-6)
        assert [entry["index"] for entry in value["data"]] == list(range(len(answers)))
        assert {entry["object"] for entry in value["data"]} == {"score"}
        tokens = sum(expected[answer][1] for answer in answers)
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        assert value["usage"] == usage
        assert (value["object"], value["model"]) == ("list", "judge")
        assert value["id"].startswith("score-")


@pytest.mark.parametrize(
    ("body", "status", "problem", "param"),
    [
        ({}, 400, "give one of 'messages', 'input'", "messages"),
        ({"messages": chat("3"), "input": "x"}, 400, "give one of 'messages'", "messages"),
        ({"text_1": "x"}, 400, "'text_1' and 'text_2' belong together", "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, 400, "has 2 entries and 'text_2' 1", "text_2"),
        ({"text_1": [], "text_2": []}, 400, "'text_1' must not be empty", "text_1"),
        ({"input": "Sum: 1+2 3"}, 400, "was trained on messages", None),
        ({"messages": []}, 400, "", None),
        ({"messages": chat("1 " * 4000)}, 400, "this reward model reads", None),
        ({"messages": chat("3"), "activation": True}, 400, "activation", "activation"),
        ({"messages": chat("3"), "model": "other"}, 404, "other", "model"),
    ],
)
def test_what_cannot_be_scored(
    http: httpx.Client, body: dict[str, Any], status: int, problem: str, param: str | None
) -> None:
    reply = http.post("/v1/score", json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert problem in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param


def test_one_bad_conversation_fails_the_request_and_the_next_is_answered(
    http: httpx.Client, expected: dict[str, tuple[float, int]]
) -> None:
    assert http.post("/v1/score", json={"messages": [chat("3"), chat("1 " * 4000)]}).is_error
    [entry] = http.post("/v1/score", json={"messages": chat("3")}).json()["data"]
    assert entry["score"] == pytest.approx(expected["3"][0], abs=2e-6)


def test_a_server_without_a_reward_model_says_so(server: RunningServer) -> None:
    with server.http() as client:
        reply = client.post("/v1/score", json={"messages": chat("3")})
    assert reply.status_code == 409
    assert "start it with --reward-model" in reply.json()["error"]["message"]

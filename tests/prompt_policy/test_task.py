"""Rewards from a real task: by an endpoint, and by the model that the daemon serves; other
servers that fail."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.errors import ConfigError
from tests.prompt_policy.helpers import SIZE, SMALL, serving
from tests.scripted_http import scripted_http
from tests.soak.fuzz_openapi import tiny_server

SCORE = (
    "def right(completions, answer):\n    return [float(c.strip() == a) for c, a in"
    " zip(completions, answer)]\n"
)
UNSURE = (
    "def unsure(completions):\n    return [None if c == '?' else float(c) for c in completions]\n"
)
POLITE = {"prompt": "Hello! Could you please kindly sort: ba", "mutation": "context-reduction"}


def reward_of(directory: Path) -> str:
    (directory / "score.py").write_text(SCORE)
    return f'prompt_policy.rewards=["python:{directory}/score.py:right"]'


def test_a_rollout_rewards_the_rewriting_by_its_answers(tmp_path: Path) -> None:
    def answer(path: str, body: Any) -> Any:
        texts = (
            ["ab", "ab", "ba", "no"] if body["messages"][0]["content"] == "Sort: ba" else ["no"] * 4
        )
        return 200, {}, {"choices": [{"message": {"content": text}} for text in texts]}

    with scripted_http(answer) as (url, received):
        task = [f"prompt_policy.task_url={url}", "prompt_policy.task_model=m", reward_of(tmp_path)]
        with serving(tmp_path / "policy", *task) as client:
            reply = client.post("/rollout", json=POLITE | {"columns": {"answer": "ab"}}).json()
            assert (
                reply["rewards"] == [1, 1, 0, 0]
                and reply["reward"] == 0.5
                and reply["stored"] is True
            )
            assert reply["mutation"]["prompt"] == "Sort: ba" and received[0].body["n"] == 4
            assert client.get("/stats").json()["avg_reward"] == 0.5
            plain = client.post(
                "/rollout",
                json={
                    "prompt": "Sort: ba",
                    "mutation": "context-reduction",
                    "columns": {"answer": "ab"},
                },
            ).json()
            assert plain["reward"] == 0.5 and plain["stored"] is False and plain["buffer_size"] == 1
            lacks = client.post("/rollout", json=POLITE)
            assert lacks.status_code == 422 and "answer" in lacks.json()["error"]["message"]


def test_an_answer_without_a_score_is_in_no_mean(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(UNSURE)
    unsure = f'prompt_policy.rewards=["python:{tmp_path}/score.py:unsure"]'
    texts = ["1", "?", "0", "?"]

    def answer(path: str, body: Any) -> Any:
        return 200, {}, {"choices": [{"message": {"content": text}} for text in texts]}

    with scripted_http(answer) as (url, _):
        task = [f"prompt_policy.task_url={url}", "prompt_policy.task_model=m", unsure]
        with serving(tmp_path / "policy", *task) as client:
            reply = client.post("/rollout", json=POLITE).json()
            assert (reply["rewards"], reply["reward"]) == ([1, None, 0, None], 0.5)
            texts[:] = ["?"] * 4
            refused = client.post("/rollout", json=POLITE)
            assert refused.status_code == 422 and "unsure" in refused.json()["error"]["message"]
            assert client.get("/stats").json()["buffer_size"] == 1


def test_a_verifiers_reward_counts_also_where_the_model_rewards_mutations(tmp_path: Path) -> None:
    def answer(path: str, body: Any) -> Any:
        return 200, {}, {"choices": [{"message": {"content": "ab"}}]}

    with scripted_http(answer) as (url, _):
        task = [f"prompt_policy.task_url={url}", "prompt_policy.task_model=m", reward_of(tmp_path)]
        with serving(tmp_path / "policy", *task, "prompt_policy.reward_source=model") as client:
            reply = client.post("/rollout", json=POLITE | {"columns": {"answer": "ab"}}).json()
            assert reply["stored"] is True and client.get("/stats").json()["avg_reward"] == 1
            alone = client.post("/mutate", json=POLITE).json()
            assert (
                alone["id"] is None
                and client.get("/stats").json()["avg_reward"] == (1 + alone["score"]) / 2
            )


def test_without_a_task_there_is_no_rollout(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        reply = client.post("/rollout", json=POLITE)
        assert (
            reply.status_code == 404 and "prompt_policy.rewards" in reply.json()["error"]["message"]
        )


def test_a_chat_model_is_the_sixth_mutation_and_may_fail(tmp_path: Path) -> None:
    def answer(path: str, body: Any) -> Any:
        if "fail" in body["messages"][0]["content"]:
            return 400, {}, {"error": {"message": "no"}}
        half = "half" in body["messages"][0]["content"]
        return (
            200,
            {},
            {
                "choices": [
                    {"message": {"content": "\ud83d!" if half else "Sort the letters b and a."}}
                ]
            },
        )

    with scripted_http(answer) as (url, _):
        chat = [
            f"prompt_policy.chat_url={url}",
            "prompt_policy.chat_model=m",
            "prompt_policy.ppo.action_dim=6",
        ]
        with serving(tmp_path, *chat) as client:
            body = {"prompt": "Sort: ba", "mutation": "chat-rewrite"}
            changed = client.post("/mutate", json=body).json()
            assert changed["prompt"] == "Sort the letters b and a." and changed["action"] == 5
            assert (
                client.post("/mutate", json=body | {"prompt": "half"}).json()["prompt"] == "\ufffd!"
            )
            failed = client.post("/mutate", json=body | {"prompt": "fail"})
            assert failed.status_code == 502 and "no rewriting" in failed.json()["error"]["message"]


def test_embeddings_of_an_endpoint(tmp_path: Path) -> None:
    def answer(path: str, body: Any) -> Any:
        size = 3 if "short" in body["input"] else SIZE
        bad = {"null": None, "large": 1e300}
        numbers = [bad.get(text, float(n + 1)) for n, text in enumerate(body["input"])]
        rows = [{"index": n, "embedding": [number] * size} for n, number in enumerate(numbers)]
        return 200, {}, {"data": rows[::-1]}

    with scripted_http(answer) as (url, _):
        source = [f"prompt_policy.embedding={url}", "prompt_policy.embedding_model=m"]
        with serving(tmp_path, *source) as client:
            rows = client.post("/embed", json={"input": ["a", "b"]}).json()["embeddings"]
            assert rows == [[pytest.approx(0.25)] * SIZE] * 2  # length 1
            for text in ("null", "large"):
                assert client.post("/embed", json={"input": [text]}).status_code == 502
                assert client.post("/mutate", json={"prompt": text}).status_code == 502
            short = client.post("/embed", json={"input": ["short"]})
            assert short.status_code == 502 and "input_dim = 3" in short.json()["error"]["message"]


def test_a_configuration_that_cannot_work_is_refused(tmp_path: Path) -> None:
    for override, says in (
        ("prompt_policy.embedding=served", "needs a served model"),
        ("prompt_policy.embedding=magic", '"hashed", "served" or a URL'),
        ("prompt_policy.chat_url=http://x/v1", "go together"),
        ("prompt_policy.ppo.action_dim=6", "there are 5 mutations"),
        ("prompt_policy.ppo.buffer_size=4", "min_buffer_size = 8 is above buffer_size = 4"),
    ):
        with pytest.raises(ConfigError, match=says), serving(tmp_path, override):
            pass


def test_the_daemon_rewards_by_the_model_that_it_serves(tmp_path: Path) -> None:
    """The same routes below /prompt_policy: the served model's hidden states are embeddings, its
    answers the task."""
    mount = ["prompt_policy.mount=true", f'prompt_policy.checkpoint_dir="{tmp_path}/policy"']
    task = ["prompt_policy.temperature=0", "prompt_policy.rollouts=2", "prompt_policy.max_tokens=8"]
    sizes = [*SMALL[1:], "prompt_policy.embedding=served", "prompt_policy.ppo.input_dim=128"]
    with tiny_server(
        *mount, *task, *sizes, reward_of(tmp_path), "server.request_timeout_s=60"
    ) as daemon:
        with httpx.Client(base_url=f"{daemon.url}/prompt_policy", timeout=60) as client:
            reply = client.post("/rollout", json=POLITE | {"columns": {"answer": "ab"}})
            assert reply.status_code == 200, reply.text
            assert (
                reply.json()["mutation"]["prompt"] == "Sort: ba"
                and len(reply.json()["answers"]) == 2
            )
            assert reply.json()["answers"][0].strip() == "ab" and reply.json()["reward"] == 1
            [row] = client.post("/embed", json={"input": ["Sort: ba"]}).json()["embeddings"]
        with httpx.Client(base_url=daemon.url, timeout=60) as client:
            theirs = client.post("/v1/embeddings", json={"input": "Sort: ba"}).json()["data"][0][
                "embedding"
            ]
            assert row == pytest.approx(theirs, abs=1e-6)
            assert "mlx_parallm_prompt_policy_buffer 1.0" in client.get("/metrics").text
    assert (tmp_path / "policy" / "latest" / "policy.safetensors").is_file()

"""Chats over a real server become groups of one in the run's store, as the engine sampled them."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.sources import SourceContext
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.systems.feedback.config import FeedbackConfig
from mlx_parallm.systems.feedback.judge import FunctionJudge
from mlx_parallm.systems.feedback.source import FeedbackSource, feedback_source, refuse_to_serve
from tests.conftest import TinyEngine
from tests.rollout_store.groups import VOCAB_SIZE
from tests.server.serving import RunningServer, running_server

LEARN = {"X-Feedback": "learn", "X-Feedback-User": "anna"}
JUDGE = """
def judge(question, answer, reply):
    if "boom" in reply:
        raise ValueError("no")
    return {"thanks": 1.0, "no": -1.0}.get(reply.split()[0], 0.1 if "hm" in reply else None)
"""


class Chat:
    """A source with its server, on one tiny engine."""

    def __init__(self, server: RunningServer, source: FeedbackSource, store: RolloutStore) -> None:
        self.server, self.source, self.store = server, source, store

    def ask(
        self, messages: Sequence[Any], headers: dict[str, str] = LEARN, **body: Any
    ) -> dict[str, Any]:
        with self.server.http(headers=headers) as client:
            answer = client.post(
                "/v1/chat/completions",
                json={"messages": list(messages), "max_tokens": 6, **body},
            )
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def give(self, answer: dict[str, Any], **signal: Any) -> dict[str, Any]:
        with self.server.http() as client:
            reply = client.post("/v1/feedback", json={"id": answer["id"], **signal})
        reply.raise_for_status()
        result: dict[str, Any] = reply.json()
        return result

    def status(self) -> dict[str, Any]:
        with self.server.http() as client:
            result: dict[str, Any] = client.get("/v1/feedback/status").json()
        return result

    def turn(self) -> float:
        return self.source._thread.run(self.source.turn())


def configuration(directory: Path, **keys: Any) -> Config:
    judge = directory / "judge.py"
    judge.write_text(JUDGE)
    # Without LoRA the base is the policy, as in these tests' engine.
    values = {
        "feedback.enabled": True,
        "feedback.settle_s": 0,
        "feedback.judge": f"python:{judge}:judge",
        "rl_training.lora.enabled": False,
        "rl_training.batch_size": 1,
        "rl_training.atropos.rollout_batch_size": 1,
    }
    settings = [f"{key}={json.dumps(value)}" for key, value in {**values, **keys}.items()]
    return load_config(None, settings)


@pytest.fixture
def chat(
    tmp_path: Path,
    store: RolloutStore,
    tiny_engine: TinyEngine,
    tiny_tokenizer: Any,
    request: pytest.FixtureRequest,
) -> Iterator[Chat]:
    config = configuration(tmp_path, **getattr(request, "param", {}))
    context = SourceContext(config, tmp_path, store, VOCAB_SIZE, [], lambda: 0, lambda: 0)
    source = feedback_source(context)
    assert source is not None
    assert context.group_sizes == [1], "others know that this run has rollouts"
    with running_server(tiny_engine.client, tiny_tokenizer, routers=[source.router]) as server:
        yield Chat(server, source, store)
    source.stop()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(answer: dict[str, Any]) -> Any:
    message = answer["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


def test_a_thumb_makes_a_group_of_what_was_sampled(chat: Chat) -> None:
    options = {"logprobs": True, "return_token_ids": True, "seed": 1, "temperature": 0.7}
    answer = chat.ask([user("Sum: 2+3")], **options)
    assert chat.give(answer, rating="down")["state"] == "open"
    chat.turn()
    [group] = chat.store.waiting()
    [rollout] = group.rollouts
    [choice] = answer["choices"]
    ids = [*answer["prompt_token_ids"], *choice["token_ids"]]
    assert (list(rollout.tokens), group.environment) == (ids, "feedback")
    sampled = [
        value for value, mask in zip(rollout.logprobs or (), rollout.mask, strict=True) if mask
    ]
    shown = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert sampled == pytest.approx(shown, abs=1e-6)
    assert (rollout.temperature, rollout.reward, group.advantages) == (0.7, -1.0, (-1.0,))
    # the mean of the task is -1 / (1 + 1) now
    second = chat.ask([user("Sum: 4+3")])
    chat.give(second, rating="up")
    chat.turn()
    assert chat.store.waiting()[1].advantages == (1.5,)
    assert chat.give(answer, rating="up")["state"] == "released"
    signals = chat.status()["signals"]["thumb"]
    assert signals == {"taken": 2, "the answer was decided on already": 1}


def test_without_consent_nothing_is_kept(chat: Chat) -> None:
    for headers in ({}, {"X-Feedback": "no"}, {"X-Feedback-User": "anna"}):
        answer = chat.ask([user("Sum: 2+3")], headers)
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            chat.give(answer, rating="up")
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        chat.ask([user("Sum: 2+3")], {"X-Feedback": "perhaps"})
    status = chat.status()
    assert status["answers"] == {}
    assert status["outcomes"] == {"no consent": 3}


@pytest.mark.parametrize(
    ("reply", "advantage", "outcome"),
    [
        ("thanks a lot", 1.0, "taken"),
        ("no that is wrong", -1.0, "taken"),
        ("hm", None, "ambiguous"),
        ("and now?", None, "ambiguous"),
        ("boom", None, "the judge failed"),
    ],
)
def test_the_next_message_is_judged(
    chat: Chat, reply: str, advantage: float | None, outcome: str
) -> None:
    first = chat.ask([user("Sum: 2+3")])
    chat.ask([user("Sum: 2+3"), said(first), user(reply)])
    chat.turn()
    groups = chat.store.waiting()
    assert [group.advantages for group in groups] == ([] if advantage is None else [(advantage,)])
    assert chat.status()["signals"] == {"message": {outcome: 1}}


def test_other_people_do_not_judge_it(chat: Chat) -> None:
    first = chat.ask([user("Sum: 2+3")])
    chat.ask([user("Sum: 2+3"), said(first), user("no")], {**LEARN, "X-Feedback-User": "ben"})
    chat.ask([user("Sum: 2+3")], {**LEARN, "X-Feedback-User": "ben"})
    chat.turn()
    assert (chat.status()["signals"], chat.store.waiting()) == ({}, [])


def test_asking_again_and_editing(chat: Chat) -> None:
    first = chat.ask([user("Sum: 2+3")], seed=1)
    edited = {"role": "assistant", "content": said(first)["content"] + " exactly"}
    chat.ask([user("Sum: 2+3"), edited, user("thanks")])
    chat.turn()
    [group] = chat.store.waiting()
    before, after = len(said(first)["content"]), len(edited["content"])
    assert group.rollouts[0].reward == pytest.approx(2 * before / (before + after) - 1)
    chat.ask([user("Sum: 1+1")], seed=2)
    chat.ask([user("Sum: 1+1")], seed=3)
    chat.turn()
    assert [group.rollouts[0].reward for group in chat.store.waiting()][1:] == [-0.5]
    assert chat.status()["signals"] == {"edit": {"taken": 1}, "regenerate": {"taken": 1}}


def test_a_stream_is_kept_too_and_a_secret_is_not(chat: Chat) -> None:
    with chat.server.http(headers=LEARN) as client:
        body = {"messages": [user("Sum: 2+3")], "max_tokens": 6, "stream": True}
        events = client.post("/v1/chat/completions", json=body).text.split("\n\n")
        chunks = [json.loads(e.removeprefix("data: ")) for e in events if e and "[DONE]" not in e]
    assert chat.give(chunks[0], rating=0.5) == {
        "object": "feedback",
        "id": chunks[0]["id"],
        "state": "open",
    }
    secret = chat.ask([user("key AKIA2E0A8F3B244C9986")])
    assert chat.give(secret, rating="up")["state"] == "unused"
    chat.turn()
    assert len(chat.store.waiting()) == 1
    reason = "a secret or name was replaced in the chat: its tokens would show it"
    assert chat.status()["outcomes"] == {"released": 1, reason: 1, "no consent": 0}


@pytest.mark.parametrize("chat", [{"feedback.review": True}], indirect=True)
def test_the_review_decides(chat: Chat) -> None:
    answers = [chat.ask([user(f"Sum: 2+{digit}")]) for digit in (1, 2)]
    for answer in answers:
        chat.give(answer, rating="down", comment="not so")
    chat.turn()
    assert chat.store.waiting() == []
    with chat.server.http() as client:
        queue = client.get("/v1/feedback/review").json()
        first, second = queue["answers"]
        shown = {key: first[key] for key in ("question", "answer", "reply", "kind", "reward")}
        assert shown == {
            "question": "Sum: 2+1",
            "answer": said(answers[0])["content"],
            "reply": "not so",
            "kind": "thumb",
            "reward": -1.0,
        }
        for row, action in ((first, "approve"), (second, "reject")):
            done = client.post("/v1/feedback/review", json={"ids": [row["id"]], "action": action})
            assert done.json()["ids"] == [row["id"]]
    chat.turn()
    [group] = chat.store.waiting()
    assert group.group_id == f"feedback-{first['id']}"
    assert chat.status()["outcomes"]["rejected in the review"] == 1


@pytest.mark.parametrize(
    "chat",
    [{"feedback.max_updates_per_hour": 1, "rl_training.atropos.rollout_batch_size": 2}],
    indirect=True,
)
def test_so_many_updates_in_an_hour(chat: Chat) -> None:
    for digit in range(5):
        chat.give(chat.ask([user(f"Sum: 2+{digit}")]), rating="up")
    due = chat.turn()
    assert len(chat.store.waiting()) == 2  # a whole batch, and no second one
    assert chat.status()["answers"] == {"released": 2, "ready": 3}
    assert 3500 < due - time.time() <= 3600 or math.isclose(due - time.time(), 60, abs_tol=5)


@pytest.mark.parametrize(
    "chat",
    [
        {
            "rl_training.algorithm": "online_kto",
            "rl_training.preference.kto_loss": "apo_zero_unpaired",
        }
    ],
    indirect=True,
)
def test_single_answers_are_good_or_bad(chat: Chat) -> None:
    answers = [chat.ask([user(f"Sum: 2+{digit}")]) for digit in range(3)]
    for answer, rating in zip(answers, ("up", "down", 0), strict=True):
        chat.give(answer, rating=rating)
        chat.turn()
    groups = chat.store.waiting()
    assert [group.rollouts[0].reward for group in groups] == [1.0, -1.0]
    assert [group.advantages for group in groups] == [None, None]
    assert chat.status()["outcomes"]["its reward is 0: neither good nor bad"] == 1
    assert chat.status()["baselines"] == {}


TOGETHER = """
import threading
both = threading.Barrier(2)

def judge(question, answer, reply):
    both.wait(10)  # for another one, which is judged at the same time
    return 1.0
"""


@pytest.mark.parametrize("chat", [{"feedback.judge_concurrency": 2}], indirect=True)
def test_replies_are_judged_at_once(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "together.py"
    file.write_text(TOGETHER)
    chat.source._judge = FunctionJudge(f"python:{file}:judge")
    for digit in range(4):
        question = [user(f"Sum: 2+{digit}")]
        answer = chat.ask(question)
        chat.ask([*question, said(answer), user("thanks")], {**LEARN, "X-Feedback-User": "anna"})
    chat.turn()
    assert chat.status()["signals"]["message"] == {"taken": 4}


@pytest.mark.parametrize("chat", [{"feedback.max_answers": 3}], indirect=True)
def test_answers_that_were_decided_on_are_forgotten_and_those_that_wait_are_counted(
    chat: Chat,
) -> None:
    released = [chat.ask([user(f"Sum: 2+{digit}")]) for digit in range(2)]
    for answer in released:
        chat.give(answer, rating="up")
    chat.turn()
    waiting = [chat.ask([user(f"Sum: 3+{digit}")]) for digit in range(2)]
    chat.turn()
    state = chat.status()
    assert (state["answers"], state["forgotten"]) == ({"open": 2, "released": 1}, 1)
    assert state["outcomes"] == {"no consent": 0, "released": 2}
    with chat.server.http() as client:  # its answer is not known any more
        gone = client.post("/v1/feedback", json={"id": released[0]["id"], "rating": "up"})
        assert gone.status_code == 404
    waiting += [chat.ask([user(f"Sum: 4+{digit}")]) for digit in range(2)]
    chat.turn()
    state = chat.status()
    assert (state["answers"], state["forgotten"]) == ({"open": 3}, 3)
    assert state["outcomes"]["more answers than max_answers wait"] == 1
    chat.give(waiting[1], rating="up")
    chat.turn()
    assert chat.status()["answers"] == {"open": 2, "released": 1}
    with chat.server.http() as client:
        assert "mlx_parallm_feedback_forgotten_total 3.0" in client.get("/metrics").text


def test_keys_of_people_open_chats_alone(
    tmp_path: Path, store: RolloutStore, tiny_engine: TinyEngine, tiny_tokenizer: Any
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who\nanna key-of-anna\nben key-of-ben\n")
    config = configuration(tmp_path, **{"feedback.keys_file": str(keys), "feedback.opt_in": "key"})
    context = SourceContext(config, tmp_path, store, VOCAB_SIZE, [], lambda: 0, lambda: 0)
    source = feedback_source(context)
    assert source is not None
    with running_server(
        tiny_engine.client, tiny_tokenizer, routers=[source.router], api_key="the-server-key"
    ) as server:
        chat = Chat(server, source, store)
        anna, ben, owner = (
            {"Authorization": f"Bearer {key}"}
            for key in ("key-of-anna", "key-of-ben", "the-server-key")
        )
        answer = chat.ask([user("Sum: 2+3")], anna)
        chat.ask([user("Sum: 2+3")], {**owner, **LEARN})  # the header is no way to agree here
        with server.http() as client:
            body = {"id": answer["id"], "rating": "up"}
            assert client.post("/v1/feedback", json=body).status_code == 401
            assert client.post("/v1/feedback", json=body, headers=ben).status_code == 404
            assert client.post("/v1/feedback", json=body, headers=anna).status_code == 200
            for path in ("/v1/feedback/status", "/v1/feedback/review", "/metrics"):
                assert client.get(path, headers=anna).status_code == 401
            chat.turn()
            text = client.get("/metrics", headers=owner).text
    source.stop()
    [group] = store.waiting()
    assert group.group_id == f"feedback-{answer['id']}"
    assert 'mlx_parallm_feedback_answers_total{outcome="released"} 1.0' in text
    assert 'mlx_parallm_feedback_answers_total{outcome="no consent"} 1.0' in text


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"rl_training.deterministic": True, "rl_training.max_staleness": 0}, "does not repeat"),
        ({"rl_training.algorithm": "online_dpo"}, "compares two"),
        (
            {
                "rl_training.algorithm": "kto",
                "rl_training.batch_size": 2,
                "data.path": "rows.jsonl",
                "rl_training.atropos.rollout_batch_size": 128,
            },
            "its loss on answers of chats is rl_training.algorithm = 'online_kto'",
        ),
        (
            {
                "rl_training.algorithm": "online_kto",
                "rl_training.preference.kto_loss": "apo_zero_unpaired",
                "feedback.baseline_decay": 0.5,
            },
            "compares an answer with no mean",
        ),
        (
            {
                "rl_training.algorithm": "sft",
                "data.path": "rows.jsonl",
                "rl_training.atropos.rollout_batch_size": 128,
            },
            "learns from rows of a file alone",
        ),
        ({"feedback.judge": "http://127.0.0.1:1/v1"}, "needs the name of its model"),
        ({"feedback.judge": "gpt"}, "feedback"),
        ({"feedback.judge": "base"}, "the base itself is trained"),
        ({"feedback.opt_in": "key"}, "needs keys_file"),
        ({"feedback.enabled": False}, "set enabled = true"),
    ],
)
def test_settings_that_contradict(
    tmp_path: Path, store: RolloutStore, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        config = configuration(tmp_path, **keys)
        feedback_source(
            SourceContext(config, tmp_path, store, VOCAB_SIZE, [], lambda: 0, lambda: 0)
        )


def test_a_server_that_trains_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for `mlx_parallm train`"):
        refuse_to_serve(configuration(tmp_path).section(FeedbackConfig), None)  # type: ignore[arg-type]


def test_what_a_key_leaves_on_the_server_is_not_for_another(
    tmp_path: Path, store: RolloutStore, tiny_engine: TinyEngine, tiny_tokenizer: Any
) -> None:
    """Neither its prompts, by `cached_tokens`, nor its stored responses, by their ids."""
    keys = tmp_path / "keys"
    keys.write_text("anna key-of-anna\nben key-of-ben\n")
    config = configuration(tmp_path, **{"feedback.keys_file": str(keys)})
    context = SourceContext(config, tmp_path, store, VOCAB_SIZE, [], lambda: 0, lambda: 0)
    source = feedback_source(context)
    assert source is not None
    with running_server(
        tiny_engine.client, tiny_tokenizer, routers=[source.router], api_key="the-server-key"
    ) as server:
        anna, ben, owner = (
            server.http(headers={"Authorization": f"Bearer {key}"})
            for key in ("key-of-anna", "key-of-ben", "the-server-key")
        )

        def ask(client: Any, **more: Any) -> Any:
            body = {"input": "My PIN is 4711. " * 8, "max_output_tokens": 2} | more
            reply = client.post("/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        def cached(client: Any, **more: Any) -> int:
            return int(ask(client, **more)["usage"]["input_tokens_details"]["cached_tokens"])

        first = ask(anna)
        assert cached(anna) > 0
        assert cached(ben) == 0 and cached(owner) < 10  # others have asked as the owner
        assert cached(ben, cache_salt="ours") == 0 and cached(anna, cache_salt="ours") > 0

        for route, names in (
            ("chat/completions", ("prompt_tokens_details", "cached_tokens")),
            ("messages", ("cache_read_input_tokens",)),
        ):
            asked = [{"role": "user", "content": f"{route} has the code 2718. " * 4}]
            body = {"model": "default", "max_tokens": 2, "messages": asked}
            found = []
            for client in (anna, anna, ben):
                reply = client.post(f"/v1/{route}", json=body).json()
                assert "usage" in reply, (route, reply)
                usage = reply["usage"]
                for name in names:
                    usage = usage[name] or {}
                found.append(usage or 0)
            assert found[1] > 10 > found[2], route

        path = f"/v1/responses/{first['id']}"
        item = first["output"][0]["id"]
        for client in (ben, owner):
            assert client.get(path).status_code == 404
            assert client.get(f"{path}/input_items").status_code == 404
            assert client.post(f"{path}/cancel", json={}).status_code == 404
            assert client.delete(path).status_code == 404
            for body in (
                {"input": "And?", "previous_response_id": first["id"]},
                {"input": [{"type": "item_reference", "id": item}]},
            ):
                assert client.post("/v1/responses", json=body).status_code == 400
        assert anna.get(path).json()["id"] == first["id"]
        assert ask(anna, input="And?", previous_response_id=first["id"])
        assert anna.delete(path).status_code == 200
        for client in (anna, ben, owner):
            client.close()
    source.stop()

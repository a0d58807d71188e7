"""POST /v1/rewards by the real openai client, on answers of the real engine: what is stored,
what is refused."""

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlx_parallm.errors import RefusedError
from mlx_parallm.rollout_store.completions import GONE_IDS, KeptCompletions
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import Completion, Request, SamplingParams
from tests.clock import Clock
from tests.conftest import TINY_CONTEXT, TinyEngine
from tests.rollout_store.groups import VOCAB_SIZE, make_group
from tests.server.serving import RunningServer, running_server

QUESTION = [{"role": "user", "content": "Sum: 2+3"}]
LIMITS: dict[str, Any] = {
    "policy_adapter": None,
    "max_bytes": 1 << 20,
    "max_age_s": 600.0,
    "batch_size": 8,
    "max_token_length": TINY_CONTEXT,
    "vocab_size": VOCAB_SIZE,
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def serve(
    tiny_engine: TinyEngine, tiny_tokenizer: Any, store: RolloutStore, clock: Clock
) -> Iterator[RunningServer]:
    kept = KeptCompletions(store, clock=clock, **LIMITS)
    with running_server(tiny_engine.client, tiny_tokenizer, completions=kept) as server:
        yield server


@pytest.fixture
def client(serve: RunningServer) -> Iterator[openai.OpenAI]:
    with serve.openai() as client:
        yield client


def chat(client: openai.OpenAI, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "n": 4,
        "max_tokens": 6,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    return client.chat.completions.create(model="default", messages=QUESTION, **(options | changes))  # type: ignore[call-overload]


def reward(client: openai.OpenAI, **body: Any) -> Any:
    return client.post("/rewards", body=body, cast_to=object)


def refused(client: openai.OpenAI, status: int, **body: Any) -> str:
    with pytest.raises(openai.APIStatusError) as caught:
        reward(client, **body)
    error = caught.value
    assert error.status_code == status, error.message
    assert set(error.response.json()["error"]) == {"message", "type", "param", "code"}
    return error.message


def test_a_rewarded_answer_is_a_group_of_exactly_what_was_sampled(
    client: openai.OpenAI, store: RolloutStore
) -> None:
    answer = chat(client, temperature=0.7)
    given = reward(client, id=answer.id, rewards=[0, 1.5, -1, True], environment="sums")
    assert given["groups"] == [{"id": f"{answer.id}-0", "rollouts": 4}]
    [group] = store.waiting()
    assert (group.group_id, group.environment) == (f"{answer.id}-0", "sums")
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.5, -1.0, 1.0]
    prompt = tuple(answer.prompt_token_ids)
    for rollout, choice in zip(group.rollouts, answer.choices, strict=True):
        sampled = tuple(choice.token_ids)
        assert rollout.tokens == prompt + sampled
        assert rollout.mask == (0,) * len(prompt) + (1,) * len(sampled)
        assert rollout.logprobs is not None
        assert rollout.logprobs[len(prompt) :] == tuple(
            entry.logprob for entry in choice.logprobs.content
        )
        assert (rollout.temperature, rollout.stop_reason) == (0.7, choice.finish_reason)
        assert rollout.policy_versions == (answer.policy_version,) * len(rollout.tokens)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_streamed_answer_can_be_rewarded_once_its_end_has_come(
    client: openai.OpenAI, store: RolloutStore, route: str
) -> None:
    options: dict[str, Any] = {
        "n": 3,
        "max_tokens": 6,
        "stream": True,
        "extra_body": {"return_token_ids": True},
    }
    if route == "chat":
        chunks = client.chat.completions.create(model="default", messages=QUESTION, **options)  # type: ignore[call-overload]
    else:
        chunks = client.completions.create(model="default", prompt="Sum: 2+3", **options)
    sampled: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        for choice in chunk.choices:
            sampled[choice.index] += getattr(choice, "token_ids", None) or []
    reward(client, id=chunk.id, rewards=[0, 1, 0])
    [group] = store.waiting()
    assert group.environment == "rewards"
    assert [list(r.tokens[r.mask.index(1) :]) for r in group.rollouts] == [
        sampled[index] for index in range(3)
    ]


def test_processed_logprobs_travel_beside_the_raw_ones(
    client: openai.OpenAI, store: RolloutStore
) -> None:
    answer = chat(client, n=2, top_p=0.5)
    reward(client, id=answer.id, rewards=[0, 1])
    for rollout, choice in zip(store.waiting()[0].rollouts, answer.choices, strict=True):
        start = rollout.mask.index(1)
        assert rollout.processed_logprobs is not None and rollout.logprobs is not None
        assert list(rollout.processed_logprobs[start:]) == choice.processed_logprobs
        assert list(rollout.logprobs[start:]) == [
            entry.logprob for entry in choice.logprobs.content
        ]


def test_each_prompt_of_an_answer_makes_a_group_and_null_leaves_one_out(
    client: openai.OpenAI, store: RolloutStore
) -> None:
    answer = client.completions.create(
        model="default", prompt=["Sum: 2+3", "Sum: 4+4"], n=3, max_tokens=4
    )
    given = reward(client, id=answer.id, rewards=[0, 1, 2, None, 4, 5])
    assert [group["rollouts"] for group in given["groups"]] == [3, 2]
    assert [[r.reward for r in group.rollouts] for group in store.waiting()] == [[0, 1, 2], [4, 5]]


def test_answers_to_one_prompt_are_one_group_for_clients_without_n(
    client: openai.OpenAI, store: RolloutStore
) -> None:
    ids = [chat(client, n=1).id for _ in range(3)]
    reward(client, ids=ids, rewards=[0, 1, 0])
    [group] = store.waiting()
    assert [r.reward for r in group.rollouts] == [0, 1, 0]
    assert "has its rewards already" in refused(client, 409, id=ids[2], rewards=[1])
    other = client.completions.create(model="default", prompt="Sum: 7+1", max_tokens=4).id
    told = refused(client, 400, ids=[chat(client, n=1).id, other], rewards=[0, 1])
    assert "choice 0 is the only one of its prompt" in told


def test_ids_of_the_token_route_and_of_the_client_count(
    client: openai.OpenAI, store: RolloutStore
) -> None:
    body: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"n": 2, "max_tokens": 4}}
    url = str(client.base_url).replace("/v1/", "/inference/v1/generate")
    own = httpx.post(url, json=body | {"request_id": "mine"}).json()["request_id"]
    made = httpx.post(url, json=body).json()["request_id"]
    reward(client, id=own, rewards=[0, 1])
    reward(client, id=made, rewards=[0, 1])
    assert store.counts().waiting == 2


def test_wrong_requests_say_what_is_wrong_and_use_nothing_up(
    client: openai.OpenAI, store: RolloutStore
) -> None:
    answer = chat(client)
    assert "3 rewards for 4 choices" in refused(client, 400, id=answer.id, rewards=[0, 1, 2])
    assert "only one of its prompt" in refused(
        client, 400, id=answer.id, rewards=[0, None, None, None]
    )
    assert "nothing to train on" in refused(client, 400, id=answer.id, rewards=[None] * 4)
    assert "valid number" in refused(client, 400, id=answer.id, rewards=[0, 1, 2, "high"])
    assert "either 'id'" in refused(client, 400, rewards=[0, 1])
    assert "either 'id'" in refused(client, 400, id=answer.id, ids=[answer.id], rewards=[0, 1])
    assert "'ids'" in refused(client, 400, ids=[answer.id] * 2, rewards=[0, 1])
    assert "environment" in refused(
        client, 400, id=answer.id, rewards=[0, 1, 2, 3], environment="a b"
    )
    assert "'rewards'" in refused(client, 400, id=answer.id, reward=[0, 1])
    for number, told in (("NaN", "NaN is not JSON"), ("1e999", "finite number")):
        content = f'{{"id": "{answer.id}", "rewards": [0, 1, 2, {number}]}}'.encode()
        reply = httpx.post(
            f"{client.base_url}rewards",
            content=content,
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 400 and told in reply.text
    assert store.counts().waiting == 0
    reward(client, id=answer.id, rewards=[0, 1, 2, 3])
    assert store.counts().waiting == 1


def test_unknown_double_and_late_ids(
    client: openai.OpenAI, store: RolloutStore, clock: Clock
) -> None:
    first, second = chat(client), chat(client)
    assert "'chatcmpl-0'" in refused(client, 404, id="chatcmpl-0", rewards=[1])
    reward(client, id=first.id, rewards=[0, 1, 0, 1])
    assert "has its rewards already" in refused(client, 409, id=first.id, rewards=[0, 1, 0, 1])
    clock.now = 601.0
    assert "kept no longer" in refused(client, 410, id=second.id, rewards=[0, 1, 0, 1])
    assert "has its rewards already" in refused(client, 409, id=first.id, rewards=[0, 1, 0, 1])
    assert store.counts().waiting == 1


def test_what_was_rewarded_is_known_after_a_restart(
    tiny_engine: TinyEngine, tiny_tokenizer: Any, client: openai.OpenAI, store: RolloutStore
) -> None:
    answer = chat(client)
    reward(client, id=answer.id, rewards=[0, 1, 0, 1])
    with (
        running_server(
            tiny_engine.client, tiny_tokenizer, completions=KeptCompletions(store, **LIMITS)
        ) as server,
        server.openai() as later,
    ):
        assert "has its rewards already" in refused(later, 409, id=answer.id, rewards=[0, 1, 0, 1])


def test_a_running_answer_has_to_end_first(serve: RunningServer, client: openai.OpenAI) -> None:
    chunks = chat(client, stream=True, max_tokens=200, extra_body={"ignore_eos": True})
    first = next(iter(chunks))
    assert "still being generated" in refused(client, 409, id=first.id, rewards=[0, 1, 0, 1])
    with serve.http() as http:
        assert http.post("/abort_requests", json={"request_ids": [first.id]}).is_success
    for _ in chunks:
        pass
    assert "choice 0 was aborted" in refused(client, 409, id=first.id, rewards=[0, 1, 0, 1])


def test_what_does_not_fit_the_training_is_quarantined(
    tiny_engine: TinyEngine, tiny_tokenizer: Any, store: RolloutStore
) -> None:
    short = KeptCompletions(store, **LIMITS | {"max_token_length": 8, "batch_size": 2})
    with (
        running_server(tiny_engine.client, tiny_tokenizer, completions=short) as server,
        server.openai() as client,
    ):
        answer = client.completions.create(model="default", prompt=[5, 6], n=3, max_tokens=2)
        assert "a batch has 2" in refused(client, 400, id=answer.id, rewards=[0, 1, 1])
        assert "more than max_token_length = 8" in refused(
            client, 400, id=chat(client).id, rewards=[0, 1, 1, 0]
        )
    assert [reject.source for reject in store.rejects()] == ["rewards", "rewards"]
    assert store.counts().waiting == 0


def test_answers_of_other_models_are_refused(
    tiny_engine: TinyEngine, tiny_tokenizer: Any, store: RolloutStore
) -> None:
    # the engine serves the base alone
    kept = KeptCompletions(store, **LIMITS | {"policy_adapter": "policy"})
    with (
        running_server(tiny_engine.client, tiny_tokenizer, completions=kept) as server,
        server.openai() as client,
    ):
        assert "from another model" in refused(
            client, 409, id=chat(client).id, rewards=[0, 1, 0, 1]
        )


@pytest.mark.parametrize("kept", ["none", "off"])
def test_servers_that_keep_nothing_say_so(
    tiny_engine: TinyEngine, tiny_tokenizer: Any, store: RolloutStore, kept: str
) -> None:
    completions = None if kept == "none" else KeptCompletions(store, **LIMITS | {"max_bytes": 0})
    with (
        running_server(tiny_engine.client, tiny_tokenizer, completions=completions) as server,
        server.openai() as client,
    ):
        told = refused(client, 409, id=chat(client).id, rewards=[0, 1, 0, 1])
    assert ("trains nothing" if kept == "none" else "kept_completions_bytes is 0") in told


def test_a_full_disk_is_503_and_the_reward_can_be_sent_again(
    client: openai.OpenAI, store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = chat(client)
    store.close()
    assert "database is closed" in refused(client, 503, id=answer.id, rewards=[0, 1, 0, 1])


# ---------------------------------------------------------------------- bounds, without a server


def keep(kept: KeptCompletions, name: str, tokens: int = 8) -> None:
    request = Request(f"{name}-0", (1, 2), SamplingParams(n=2))
    whole = Completion(
        0, "", tuple(range(tokens)), (-0.5,) * tokens, None, None, (0,) * tokens, "stop"
    )
    kept.keep(name, [request], [[(whole,), (dataclasses.replace(whole, index=1),)]])


def status(kept: KeptCompletions, name: str) -> int:
    try:
        kept.reward([name], [0.0, 1.0], "e")
    except RefusedError as error:
        return error.status
    return 200


def test_bytes_are_bounded_and_the_oldest_go_first(store: RolloutStore) -> None:
    kept = KeptCompletions(store, **LIMITS | {"max_bytes": 2000})
    for number in range(50):
        keep(kept, f"a{number}")
        assert kept._size == sum(answer.size for answer in kept._kept.values()) <= 2000
    left = len(kept._kept)
    assert 2 <= left < 50
    assert [status(kept, f"a{number}") for number in (0, 49 - left, 50 - left, 49)] == [
        410,
        410,
        200,
        200,
    ]


def test_an_answer_larger_than_all_room_is_not_kept(store: RolloutStore) -> None:
    kept = KeptCompletions(store, **LIMITS | {"max_bytes": 10})
    keep(kept, "large", tokens=200)
    assert status(kept, "large") == 410


def test_reasons_are_bounded_too(store: RolloutStore, clock: Clock) -> None:
    kept = KeptCompletions(store, clock=clock, **LIMITS | {"policy_adapter": "policy"})
    for number in range(GONE_IDS + 1):
        keep(kept, f"a{number}")
    assert [status(kept, "a0"), status(kept, "a1")] == [404, 409]


def test_the_start_of_a_rewarded_id_is_an_unknown_id(store: RolloutStore) -> None:
    kept = KeptCompletions(store, **LIMITS)
    store.add(make_group("chatcmpl-a-0"), source="rewards")  # before a restart
    assert [status(kept, "chatcmpl"), status(kept, "chatcmpl-a")] == [404, 409]


def test_of_two_requests_at_once_one_wins(store: RolloutStore) -> None:
    kept = KeptCompletions(store, **LIMITS)
    keep(kept, "a")
    barrier, results = threading.Barrier(8), []

    def send() -> None:
        barrier.wait()
        results.append(status(kept, "a"))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [200] + [409] * 7
    assert store.counts().waiting == 1

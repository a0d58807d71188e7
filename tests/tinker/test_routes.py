"""Tinker's routes over real HTTP, on the tiny model: order, repeats, what is lost, samples, checkpoints."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.errors import RefusedError
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.server.errors import ServerBusyError
from mlx_parallm.tinker.promises import KEPT_AFTER_DELIVERY_S, UNCLAIMED_S, Promises, json_result
from tests.server.serving import RunningServer
from tests.tinker.serving import API, WireClient, logprobs_of, request_of, tinker_server

TOKENS = [1, 40, 41, 42, 43, 44]
DATUM = {"tokens": TOKENS, "target_tokens": [40, 41, 42, 43, 44, 2], "weights": [0, 0, 1, 1, 1, 1]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    with tinker_server(root / "runs") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[WireClient]:
    with server.http(headers={"X-API-Key": "tml-local"}) as http:
        made = WireClient(http)
        yield made
        made.post(f"sessions/{made.session}/finish", reason={"type": "success"})


def loss_of(client: WireClient, model: str, seq_id: int) -> float:
    return float(
        client.output(client.send(model, seq_id, [DATUM], "cross_entropy", forward_only=True)).metrics["loss:sum"]
    )


def test_requests_run_in_the_order_of_their_numbers_and_once(client: WireClient) -> None:
    """Sent 2, 4, 3, 1, and 2 again: as if they had come in order, once each."""
    plain, mixed = client.create_model(0), client.create_model(1)
    for seq_id, count in ((1, 1), (2, 2)):
        client.output(client.send(plain, seq_id, [DATUM] * count, "cross_entropy"))
    assert client.result(client.optim_step(plain, 3, learning_rate=1e-2))["metrics"]["step:max"] == 1
    second = client.send(mixed, 2, [DATUM] * 2, "cross_entropy")
    later = client.send(mixed, 4, [DATUM], "cross_entropy", forward_only=True)
    step = client.optim_step(mixed, 3, learning_rate=1e-2)
    again = client.send(mixed, 2, [DATUM] * 2, "cross_entropy")
    assert again == second and client.optim_step(mixed, 3, learning_rate=1e-2) == step
    client.output(client.send(mixed, 1, [DATUM], "cross_entropy"))
    assert client.output(later).metrics["loss:sum"] == loss_of(client, plain, 4)
    assert client.send(mixed, 1, [DATUM], "cross_entropy")["request_id"] != second["request_id"]
    refused = client.post("optim_step", status=400, model_id=mixed, seq_id=2, adam_params={})
    assert "was forward_backward, not optim_step" in refused["error"]["message"]


def test_failures_are_promises_that_say_what_would_be_right(client: WireClient) -> None:
    model = client.create_model()
    failed = client.result(client.send(model, 1, [DATUM], "sft"))
    assert failed["category"] == "user" and "cross_entropy" in failed["error"]
    long = {"tokens": [5] * 300, "target_tokens": [5] * 300}
    assert "context is 256" in client.result(client.send(model, 2, [long], "cross_entropy"))["error"]
    assert np.isfinite(loss_of(client, model, 3))  # the model goes on
    wrong = client.post("create_model", session_id=client.session, model_seq_id=5, base_model="gpt-5")
    assert "this server has the base model" in client.result(wrong)["error"]
    unknown = client.post(
        "create_model",
        status=400,
        session_id=client.session,
        model_seq_id=6,
        base_model="x",
        lora_config={"rank": 4, "alpha": 7},
    )
    assert "alpha" in unknown["error"]["message"]


def test_what_is_unknown_or_lost_has_its_status(client: WireClient) -> None:
    gone = client.post("retrieve_future", status=410, request_id="0123456789ab-3")
    assert "create_training_client_from_state" in gone["error"]["message"]
    client.post("session_heartbeat", status=410, session_id="nobody")
    client.post("get_info", status=404, model_id="nobody:train:0")
    body = request_of([DATUM], "cross_entropy", model_id="nobody:train:0", seq_id=1)
    assert client.http.post(f"{API}/forward_backward", content=body).status_code == 404
    assert client.http.post(f"{API}/forward_backward", content=b"\xff\xff").status_code == 400
    assert (
        client.post("create_session", status=400, tags=[], fancy_new_option="yes")["error"]["param"]
        == "fancy_new_option"
    )


def test_samples_are_those_of_the_weights_and_stop_as_they_were_told(client: WireClient) -> None:
    model = client.create_model()
    client.output(client.send(model, 1, [DATUM] * 8, "cross_entropy"))
    client.result(client.optim_step(model, 2, learning_rate=3e-2))
    sampler = client.live_sampler(model, 3, 0)
    promise = client.sample(sampler, 0, TOKENS, num_samples=3, params={"max_tokens": 6, "seed": 4, "stop": []})
    assert len(promise["sample_sequence_ids"]) == 3
    assert client.sample(sampler, 0, TOKENS, num_samples=3, params={"max_tokens": 6}) == promise  # a repeat
    answer = client.samples(promise)
    drawn = [np.frombuffer(s.tokens, "<i4").tolist() for s in answer.sequences]
    assert all(len(tokens) == 6 and s.stop_reason == 1 for tokens, s in zip(drawn, answer.sequences, strict=True))
    assert len({tuple(tokens) for tokens in drawn}) > 1
    data = []
    for sequence, tokens, name in zip(answer.sequences, drawn, promise["sample_sequence_ids"], strict=True):
        logprobs = np.frombuffer(sequence.logprobs, "<f4").tolist()
        inputs = {"logprobs": [0.0] * 5 + logprobs, "advantages": [0.0] * 5 + [1.0] * 6}
        where = {"tokens": [*TOKENS, *tokens[:-1]], "target_tokens": [*TOKENS[1:], *tokens]}
        data.append(where | inputs | {"spans": [("", 0, 5), (name, 0, 6)]})
    metrics = client.output(client.send(model, 4, data, "ppo")).metrics
    assert metrics["sampler_gap:max"] <= 1e-4 and metrics["staleness:mean"] == 0 and metrics["clip_fraction:mean"] == 0
    client.result(client.optim_step(model, 5, learning_rate=1e-3))
    assert client.output(client.send(model, 6, data, "ppo", forward_only=True)).metrics["staleness:mean"] == 1
    prompt = client.samples(
        client.sample(sampler, 1, TOKENS, prompt_logprobs=True, topk_prompt_logprobs=2, params={"max_tokens": 1})
    )
    scores = np.frombuffer(prompt.prompt_logprobs, "<f4")
    assert np.isnan(scores[0]) and np.isfinite(scores[1:]).all() and prompt.topk_prompt_logprobs.length == 6
    stop = drawn[0][2]
    params = {"max_tokens": 6, "seed": 4, "stop": [stop]}
    [stopped] = client.samples(client.sample(sampler, 2, TOKENS, params=params)).sequences
    tokens = np.frombuffer(stopped.tokens, "<i4").tolist()
    assert stopped.stop_reason == 0 and tokens == drawn[0][: drawn[0].index(stop) + 1]


def test_a_live_sampler_keeps_its_weights_while_training_goes_on(client: WireClient) -> None:
    model = client.create_model()
    client.result(client.optim_step(model, 1, learning_rate=0.0))
    greedy = {"max_tokens": 8, "temperature": 0.0, "stop": []}

    def greedily(sampler: str, seq_id: int) -> list[int]:
        [sequence] = client.samples(client.sample(sampler, seq_id, TOKENS, params=greedy)).sequences
        return list(np.frombuffer(sequence.tokens, "<i4").tolist())

    old, moving = client.live_sampler(model, 2, 0), client.live_sampler(model, 3, 1, kind="inflight")
    before = greedily(old, 0)
    for seq_id in (4, 6):
        client.output(client.send(model, seq_id, [DATUM] * 8, "cross_entropy"))
        client.result(client.optim_step(model, seq_id + 1, learning_rate=3e-2))
    assert greedily(old, 1) == before == greedily(moving, 0)
    client.live_sampler(model, 8, 2, kind="inflight")
    assert greedily(moving, 1) != before  # every save moves them all
    for number in range(3, 7):  # three sets of weights are kept
        client.live_sampler(model, number + 6, number)
    assert "no longer in memory" in client.result(client.sample(old, 2, TOKENS, params=greedy))["error"]


def test_sixteen_requests_of_one_prompt_compute_it_once(client: WireClient) -> None:
    model = client.create_model()
    sampler, prompt = client.live_sampler(model, 1, 0), [1, *range(30, 90)]
    promises = [client.sample(sampler, i, prompt, params={"max_tokens": 4, "stop": []}) for i in range(16)]
    answers = [client.samples(promise) for promise in promises]
    assert sum(answer.prompt_cache_hit_tokens >= len(prompt) - 1 for answer in answers) >= 12


def test_checkpoints_are_adapters_with_names(client: WireClient, server: RunningServer, root: Path) -> None:
    model = client.create_model()
    client.output(client.send(model, 1, [DATUM] * 4, "cross_entropy"))
    client.result(client.optim_step(model, 2, learning_rate=3e-2))
    save = {"model_id": model, "path": "a"}
    state = client.result(client.post("save_weights", seq_id=3, **save))["path"]
    named = client.result(client.post("save_weights_for_sampler", seq_id=4, **save))["path"]
    assert (state, named) == (f"tinker://{model}/weights/a", f"tinker://{model}/sampler_weights/a")
    assert "choose another name" in client.result(client.post("save_weights", seq_id=5, **save))["error"]
    client.result(client.post("save_weights", seq_id=6, overwrite=True, **save))
    client.post("save_weights", status=400, seq_id=7, model_id=model, path="../../x")
    directory = root / "runs" / model.replace(":", "_")
    assert load_adapter(directory / "sampler_weights" / "a").layers
    assert [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()] == [1]
    session = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, model_path=named
    )
    sampler = session["sampling_session_id"]
    assert client.http.get(f"{API}/samplers/{sampler}").json()["model_path"] == named
    params = {"max_tokens": 8, "temperature": 0.0, "stop": []}
    [sequence] = client.samples(client.sample(sampler, 0, TOKENS, params=params)).sequences
    chat = client.http.post(
        "/v1/completions",
        json={
            "model": named,
            "prompt": TOKENS,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert chat.json()["choices"][0]["token_ids"] == np.frombuffer(sequence.tokens, "<i4").tolist()
    loaded = client.result(
        client.post("load_weights", session_id=client.session, model_seq_id=9, path=state, optimizer=True)
    )
    assert loaded["model_id"] == f"{client.session}:train:9"
    assert loss_of(client, loaded["model_id"], 1) == loss_of(client, model, 7)
    missing = client.post("load_weights", session_id=client.session, model_seq_id=10, path=state + "b", optimizer=True)
    assert "there is no checkpoint" in client.result(missing)["error"]


def test_runs_checkpoints_and_downloads_over_rest(client: WireClient) -> None:
    model = client.create_model()
    path = client.result(client.post("save_weights_external", model_id=model, path="out", seq_id=1))["path"]
    run = f"{API}/training_runs/{model}"
    assert client.http.get(run).json()["lora_rank"] == 4
    assert model in [
        each["training_run_id"] for each in client.http.get(f"{API}/training_runs").json()["training_runs"]
    ]
    [listed] = client.http.get(f"{run}/checkpoints").json()["checkpoints"]
    assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "external")
    urls = client.http.get(f"{run}/checkpoints/external_weights/out/external_weights_urls").json()["urls"]
    assert set(urls) == {"adapter_model.safetensors", "adapter_config.json"}
    assert json.loads(client.http.get(urls["adapter_config.json"], headers={"X-API-Key": ""}).text)["r"] == 4
    client.http.put(f"{run}/checkpoints/external_weights/out/ttl", json={"ttl_seconds": 60})
    assert client.http.get(f"{run}/checkpoints").json()["checkpoints"][0]["expires_at"] is not None
    assert client.http.delete(f"{run}/checkpoints/external_weights/out").status_code == 204
    assert client.http.delete(f"{run}/checkpoints/external_weights/out").status_code == 404
    assert client.http.get(f"{API}/training_runs/..%2F..").status_code in (400, 404)


def test_models_are_limited_and_make_room_when_a_session_ends(server: RunningServer) -> None:
    with server.http() as http:
        client = WireClient(http)
        for number in range(4):
            client.create_model(number)
        base = client.post("get_info", model_id=f"{client.session}:train:0")["model_name"]
        body = {"session_id": client.session, "model_seq_id": 4, "base_model": base}
        assert "tinker.max_models = 4" in client.result(client.post("create_model", **body))["error"]
        client.post(f"sessions/{client.session}/finish", reason={"type": "success"})
        other = WireClient(http)
        assert np.isfinite(
            logprobs_of(client.output(client.send(other.create_model(), 1, [DATUM], "cross_entropy")))
        ).all()
        other.post(f"sessions/{other.session}/finish", reason={"type": "success"})


async def test_results_are_kept_until_after_their_delivery_and_not_for_ever() -> None:
    """Two polls get one result; two minutes later it is gone, its number is known; nobody's results go after hours."""
    now = [0.0]
    promises = Promises(100, clock=lambda: now[0])
    first, lost = promises.new(), promises.new()
    promises.resolve(first, json_result({"a": 1}))
    promises.resolve(first, json_result({"a": 2}))  # of a sample that was cancelled meanwhile
    for _ in range(2):
        found = await promises.wait(promises.find(first.request_id), 1.0, lambda: False)
        assert found is not None and found.body == b'{"a": 1}'
    now[0] += KEPT_AFTER_DELIVERY_S + 1
    with pytest.raises(RefusedError, match="was collected"):
        promises.find(first.request_id)
    assert first.result is None
    promises.resolve(lost, json_result({"a": "x" * 200}))
    with pytest.raises(ServerBusyError, match="results of 209 bytes wait"):
        promises.new()
    now[0] += UNCLAIMED_S + 1
    assert promises.new().request_id and len(promises) == 1

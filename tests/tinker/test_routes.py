"""Tinker's routes over real HTTP, on the tiny model: order, repeats, what is lost, samples,
checkpoints."""

import asyncio
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard

from mlx_parallm.errors import RefusedError
from mlx_parallm.faces.tinker import learner, routes, sampling, service, wire
from mlx_parallm.faces.tinker.bodies import CreateSessionBody
from mlx_parallm.faces.tinker.config import TinkerConfig
from mlx_parallm.faces.tinker.promises import (
    KEPT_AFTER_DELIVERY_S,
    PROMISE_BYTES,
    UNCLAIMED_S,
    Promises,
    json_result,
)
from mlx_parallm.faces.tinker.run_log import SampleRecord, SampleRecords
from mlx_parallm.faces.tinker.service import FORGOTTEN_AFTER_S, TinkerService
from mlx_parallm.faces.tinker.sessions import Sampler
from mlx_parallm.faces.tinker.wire import write_samples
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.server.errors import ServerBusyError
from tests.server.serving import RunningServer
from tests.tinker.serving import API, DATUM, JSON_BODY, TOKENS, WireClient, logprobs_of, request_of

MEAN_AGE = "staleness:mean"


@pytest.fixture
def client(server: RunningServer) -> Iterator[WireClient]:
    with server.http(headers={"X-API-Key": "tml-local"}) as http:
        made = WireClient(http)
        yield made
        made.post(f"sessions/{made.session}/finish", reason={"type": "success"})


def on_loop() -> bool:
    """Whether an event loop runs on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def loss_of(client: WireClient, model: str, seq_id: int) -> float:
    return float(
        client.output(
            client.send(model, seq_id, [DATUM], "cross_entropy", forward_only=True)
        ).metrics["loss:sum"]
    )


def test_requests_run_in_the_order_of_their_numbers_and_once(client: WireClient) -> None:
    """Sent 2, 4, 3, 1, and 2 again: as if they had come in order, once each."""
    plain, mixed = client.create_model(0), client.create_model(1)
    for seq_id, count in ((1, 1), (2, 2)):
        client.output(client.send(plain, seq_id, [DATUM] * count, "cross_entropy"))
    assert (
        client.result(client.optim_step(plain, 3, learning_rate=1e-2))["metrics"]["step:max"] == 1
    )
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
    assert (
        "context is 256" in client.result(client.send(model, 2, [long], "cross_entropy"))["error"]
    )
    assert np.isfinite(loss_of(client, model, 3))  # the model continues
    wrong = client.post(
        "create_model", session_id=client.session, model_seq_id=5, base_model="gpt-5"
    )
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


def test_a_request_that_is_refused_takes_its_number(client: WireClient) -> None:
    """The SDK continues with the next number, so what waits for this one must not wait for ever."""
    model = client.create_model()

    def refused(path: str, seq_id: int, /, **body: Any) -> str:
        return str(client.result(client.post(path, model_id=model, seq_id=seq_id, **body))["error"])

    later = client.send(model, 9, [DATUM], "cross_entropy", forward_only=True)
    assert "cannot name a checkpoint" in refused("save_weights", 1, path="final step/1")
    assert "learning_rate" in refused("optim_step", 2, adam_params={"learning_rate": -1.0})
    infinite = f'{{"model_id": "{model}", "seq_id": 3, "adam_params": {{"learning_rate": 1e400}}}}'
    answer = client.http.post(f"{API}/optim_step", content=infinite, headers=JSON_BODY)
    assert "learning_rate" in client.result(answer.json())["error"]
    assert "'muon' are not offered" in refused("optim_step", 4, optimizer_params={"type": "muon"})
    assert "ttl_seconds" in refused("save_weights", 5, path="a", ttl_seconds=10**30)
    assert "fancy" in refused("save_weights_for_sampler", 6, path="a", fancy="yes")
    assert "not offered" in refused(
        "save_weights_external", 7, path="a", age_encryption_recipients=["x"]
    )
    cut = request_of([DATUM], "cross_entropy", model_id=model, seq_id=8)[:-3]
    answers = [client.http.post(f"{API}/forward_backward", content=cut) for _ in range(2)]
    assert answers[0].json() == answers[1].json()  # a repeat
    assert "not a protobuf" in client.result(answers[0].json())["error"]
    assert client.output(later).metrics["loss:sum"] > 0
    other = client.post("save_weights", status=400, model_id=model, seq_id=1, path="b")
    assert "another body" in other["error"]["message"]


def test_a_zstd_body_that_is_too_large_takes_its_number_too(
    client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = client.create_model()
    body = zstandard.compress(request_of([DATUM] * 9, "cross_entropy", model_id=model, seq_id=1))
    headers = {"Content-Encoding": "zstd", "Content-Type": wire.PROTOBUF}
    with monkeypatch.context() as patched:
        patched.setattr(routes, "MOST_DECOMPRESSED", 200)
        promise = client.http.post(f"{API}/forward_backward", content=body, headers=headers).json()
    assert "larger than 200 bytes" in client.result(promise)["error"]
    body = zstandard.compress(request_of([DATUM], "cross_entropy", model_id=model, seq_id=2))
    promise = client.http.post(f"{API}/forward_backward", content=body, headers=headers).json()
    assert client.output(promise).metrics["loss:sum"] > 0


def test_a_number_comes_again_with_the_same_request_or_is_refused(client: WireClient) -> None:
    model = client.create_model()
    first = client.send(model, 1, [DATUM], "cross_entropy")
    assert client.send(model, 1, [DATUM], "cross_entropy") == first
    body = request_of([DATUM] * 2, "cross_entropy", model_id=model, seq_id=1)
    other = client.http.post(f"{API}/forward_backward", content=body)
    assert other.status_code == 400 and "another body" in other.json()["error"]["message"]
    base = client.post("get_info", model_id=model)["model_name"]
    client.live_sampler(model, 2, 0)
    session = {"session_id": client.session, "sampling_session_seq_id": 0}
    assert "was made with" in str(
        client.post("create_sampling_session", status=400, base_model=base, **session)
    )


def test_what_was_applied_is_answered_though_the_log_cannot_be_written(
    client: WireClient, root: Path
) -> None:
    model = client.create_model()
    bad = [DATUM | {"spans": [("", 0, -1), ("x", 0, 2)]}]
    assert "below 0" in client.result(client.send(model, 1, bad, "cross_entropy"))["error"]
    # at once: what is written meanwhile may go there
    (root / "runs" / model.replace(":", "_")).rename(root / "gone")
    client.output(client.send(model, 2, [DATUM], "cross_entropy"))
    assert (
        client.result(client.optim_step(model, 3, learning_rate=1e-2))["metrics"]["step:max"] == 1
    )


def test_text_that_is_no_unicode_and_odd_bodies_break_nothing(client: WireClient) -> None:
    model = client.create_model()
    metadata: dict[str, Any] = {"user_metadata": {"\ud800": "\udfff"}}
    shown = {r"\ud800": r"\udfff"}
    client.result(client.post("save_weights", model_id=model, path="odd", seq_id=1, **metadata))
    run = f"{API}/training_runs/{model}"
    [listed] = client.http.get(f"{run}/checkpoints").json()["checkpoints"]
    assert listed["user_metadata"] == shown
    session = client.post("create_session", tags=[], display_name="\ud800", **metadata)[
        "session_id"
    ]
    answer = client.http.get(f"{API}/sessions/{session}").json()
    assert (answer["user_metadata"], answer["display_name"]) == (shown, r"\ud800")
    base = client.post("get_info", model_id=model)["model_name"]
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": base,
        "lora_config": {"rank": 2},
    }
    made = client.result(client.post("create_model", **body, **metadata))["model_id"]
    assert client.http.get(f"{API}/training_runs/{made}").json()["user_metadata"] == shown
    for odd in ([], "x"):
        assert client.http.post(f"{API}/sessions/{session}/finish", json=odd).status_code == 200
    mark = client.optim_step(model, 2)["request_id"].partition("-")[0]
    client.post("retrieve_future", status=410, request_id=f"{mark}-{'1' * 32}")
    client.post("retrieve_future", status=400, request_id=f"{mark}-{'1' * 5000}")
    link = client.http.get(f"{run}/checkpoints/weights/odd/archive").headers["location"]
    client.http.delete(f"{run}/checkpoints/weights/odd")
    assert client.http.get(link).status_code == 404
    assert client.http.get(f"{API}/samplers/nobody").status_code == 404
    assert client.http.get(f"{API}/training_runs/{model.replace(':', '_')}").status_code == 400


def test_a_checkpoint_of_another_base_is_refused(client: WireClient, root: Path) -> None:
    model = client.create_model()
    path = client.result(client.post("save_weights", model_id=model, path="a", seq_id=1))["path"]
    file = root / "runs" / model.replace(":", "_") / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model": "some/other"}))
    body = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
    assert (
        "trained on the base model 'some/other'"
        in client.result(client.post("load_weights", **body))["error"]
    )
    session = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path}
    assert "some/other" in str(client.post("create_sampling_session", status=400, **session))


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


def test_samples_are_those_of_the_weights_and_stop_as_they_were_told(
    client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = client.create_model()
    client.output(client.send(model, 1, [DATUM] * 8, "cross_entropy"))
    client.result(client.optim_step(model, 2, learning_rate=3e-2))
    sampler = client.live_sampler(model, 3, 0)
    promise = client.sample(
        sampler, 0, TOKENS, num_samples=3, params={"max_tokens": 6, "seed": 4, "stop": []}
    )
    assert len(promise["sample_sequence_ids"]) == 3
    # a repeat
    assert client.sample(sampler, 0, TOKENS, num_samples=3, params={"max_tokens": 6}) == promise
    answer = client.samples(promise)
    drawn = [np.frombuffer(s.tokens, "<i4").tolist() for s in answer.sequences]
    assert all(
        len(tokens) == 6 and s.stop_reason == 1
        for tokens, s in zip(drawn, answer.sequences, strict=True)
    )
    assert len({tuple(tokens) for tokens in drawn}) > 1
    data = []
    for sequence, tokens, name in zip(
        answer.sequences, drawn, promise["sample_sequence_ids"], strict=True
    ):
        logprobs = np.frombuffer(sequence.logprobs, "<f4").tolist()
        inputs = {"logprobs": [0.0] * 5 + logprobs, "advantages": [0.0] * 5 + [1.0] * 6}
        where = {"tokens": [*TOKENS, *tokens[:-1]], "target_tokens": [*TOKENS[1:], *tokens]}
        data.append(where | inputs | {"spans": [("", 0, 5), (name, 0, 6)]})
    metrics = client.output(client.send(model, 4, data, "ppo")).metrics
    assert (
        metrics["sampler_gap:max"] <= 1e-4
        and metrics["staleness:mean"] == 0
        and metrics["clip_fraction:mean"] == 0
    )
    client.result(client.optim_step(model, 5, learning_rate=1e-3))
    assert (
        client.output(client.send(model, 6, data, "ppo", forward_only=True)).metrics[
            "staleness:mean"
        ]
        == 1
    )
    wrote_on: list[bool] = []

    def write(*args: Any, **options: Any) -> bytes:
        wrote_on.append(on_loop())
        return write_samples(*args, **options)

    monkeypatch.setattr(sampling, "write_samples", write)
    prompt = client.samples(
        client.sample(
            sampler,
            1,
            TOKENS,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            params={"max_tokens": 1},
        )
    )
    scores = np.frombuffer(prompt.prompt_logprobs, "<f4")
    assert (
        np.isnan(scores[0])
        and np.isfinite(scores[1:]).all()
        and prompt.topk_prompt_logprobs.length == 6
    )
    monkeypatch.undo()
    # rows of likely tokens are slow to write, so the event loop does not
    assert wrote_on == [False]
    stop = drawn[0][2]
    params = {"max_tokens": 6, "seed": 4, "stop": [stop]}
    [stopped] = client.samples(client.sample(sampler, 2, TOKENS, params=params)).sequences
    tokens = np.frombuffer(stopped.tokens, "<i4").tolist()
    assert stopped.stop_reason == 0 and tokens == drawn[0][: drawn[0].index(stop) + 1]


def staleness(client: WireClient, model: str, sampler: str, seq_id: int) -> float | None:
    """Of a fresh sample, as a forward at the model's next number says; None: it says nothing of
    it, nor of its gap."""
    promise = client.sample(sampler, seq_id, TOKENS, params={"max_tokens": 2, "stop": []})
    [sequence] = client.samples(promise).sequences
    drawn = np.frombuffer(sequence.tokens, "<i4").tolist()
    span = {"spans": [("", 0, 5), (promise["sample_sequence_ids"][0], 0, 2)]}
    entry = {"tokens": [*TOKENS, drawn[0]], "target_tokens": [*TOKENS[1:], *drawn]} | span
    metrics = client.output(
        client.send(model, 0, [entry], "cross_entropy", forward_only=True)
    ).metrics
    return (
        float(metrics[MEAN_AGE]) if MEAN_AGE in metrics or "sampler_gap:mean" in metrics else None
    )


def test_a_live_sampler_keeps_its_weights_while_training_goes_on(client: WireClient) -> None:
    model = client.create_model()
    client.result(client.optim_step(model, 1, learning_rate=0.0))
    greedy = {"max_tokens": 8, "temperature": 0.0, "stop": []}

    def greedily(sampler: str, seq_id: int) -> list[int]:
        [sequence] = client.samples(client.sample(sampler, seq_id, TOKENS, params=greedy)).sequences
        return list(np.frombuffer(sequence.tokens, "<i4").tolist())

    old, moving = (
        client.live_sampler(model, 2, 0),
        client.live_sampler(model, 3, 1, kind="inflight"),
    )
    before = greedily(old, 0)
    for seq_id in (4, 6):
        client.output(client.send(model, seq_id, [DATUM] * 8, "cross_entropy"))
        client.result(client.optim_step(model, seq_id + 1, learning_rate=3e-2))
    assert greedily(old, 1) == before == greedily(moving, 0)
    assert staleness(client, model, moving, 5) == 2  # of the save, not of the trainer
    client.live_sampler(model, 0, 2, kind="inflight")
    assert staleness(client, model, moving, 6) == 0
    assert greedily(moving, 1) != before  # every save moves them all
    named = {"model_id": model, "seq_id": 0, "path": "at"}
    state = client.result(client.post("save_weights", **named))["path"]
    client.result(
        client.post("load_weights", model_id=model, seq_id=0, path=state, optimizer=False)
    )
    assert staleness(client, model, moving, 7) is None, "steps before a load are not those after it"
    saved = client.result(client.post("save_weights_for_sampler", **named))["path"]
    session = {"session_id": client.session, "sampling_session_seq_id": 9, "model_path": saved}
    sampler = client.post("create_sampling_session", **session)["sampling_session_id"]
    assert staleness(client, model, sampler, 0) == 0
    for number in range(3, 7):  # three sets of weights are kept
        client.live_sampler(model, 0, number)
    assert (
        "no longer in memory"
        in client.result(client.sample(old, 2, TOKENS, params=greedy))["error"]
    )


def test_sixteen_requests_of_one_prompt_compute_it_once(client: WireClient) -> None:
    model = client.create_model()
    sampler, prompt = client.live_sampler(model, 1, 0), [1, *range(30, 90)]
    promises = [
        client.sample(sampler, i, prompt, params={"max_tokens": 4, "stop": []}) for i in range(16)
    ]
    answers = [client.samples(promise) for promise in promises]
    assert sum(answer.prompt_cache_hit_tokens >= len(prompt) - 1 for answer in answers) >= 12


def test_checkpoints_are_adapters_with_names(
    client: WireClient, server: RunningServer, root: Path
) -> None:
    model = client.create_model()
    client.output(client.send(model, 1, [DATUM] * 4, "cross_entropy"))
    client.result(client.optim_step(model, 2, learning_rate=3e-2))
    save = {"model_id": model, "path": "a"}
    state = client.result(client.post("save_weights", seq_id=3, **save))["path"]
    named = client.result(client.post("save_weights_for_sampler", seq_id=4, **save))["path"]
    assert (state, named) == (f"tinker://{model}/weights/a", f"tinker://{model}/sampler_weights/a")
    assert (
        "choose another name"
        in client.result(client.post("save_weights", seq_id=5, **save))["error"]
    )
    client.result(client.post("save_weights", seq_id=6, overwrite=True, **save))
    wrong = client.result(client.post("save_weights", seq_id=7, model_id=model, path="../../x"))
    assert "cannot name a checkpoint" in wrong["error"]
    directory = root / "runs" / model.replace(":", "_")
    assert load_adapter(directory / "sampler_weights" / "a").layers
    assert [
        json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()
    ] == [1]
    session = client.post(
        "create_sampling_session",
        session_id=client.session,
        sampling_session_seq_id=0,
        model_path=named,
    )
    sampler = session["sampling_session_id"]
    assert client.http.get(f"{API}/samplers/{sampler}").json()["model_path"] == named
    assert staleness(client, model, sampler, 9) == 0  # of named weights too
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
        client.post(
            "load_weights", session_id=client.session, model_seq_id=9, path=state, optimizer=True
        )
    )
    assert loaded["model_id"] == f"{client.session}:train:9"
    assert loss_of(client, loaded["model_id"], 1) == loss_of(client, model, 0)
    client.post("unload_model", model_id=model)
    [again] = client.samples(client.sample(sampler, 1, TOKENS, params=params)).sequences
    assert again.tokens == sequence.tokens  # named weights are served when their run has ended
    body = {"model": named, "prompt": TOKENS, "max_tokens": 1}
    assert client.http.post("/v1/completions", json=body).status_code == 200
    missing = client.post(
        "load_weights", session_id=client.session, model_seq_id=10, path=state + "b", optimizer=True
    )
    assert "there is no checkpoint" in client.result(missing)["error"]


def test_a_model_that_does_not_fit_is_refused_with_numbers(
    client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 14 linear layers of the tiny model: 24 bytes for each number of a LoRA of that rank."""
    base = client.http.get(f"{API}/get_server_capabilities").json()["supported_models"][0][
        "model_name"
    ]
    body = {"session_id": client.session, "base_model": base, "lora_config": {"rank": 4096}}
    monkeypatch.setattr(
        learner.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 28)
    )
    refused = client.result(client.post("create_model", model_seq_id=0, **body))
    assert (
        refused["category"] == "user"
        and "0.2 GiB are free: choose a smaller rank" in refused["error"]
    )
    assert "a LoRA of rank 4096 on this model needs" in refused["error"]
    monkeypatch.undo()
    assert client.create_model(1), "the next one is made"


def test_runs_checkpoints_and_downloads_over_rest(client: WireClient) -> None:
    model = client.create_model()
    path = client.result(
        client.post("save_weights_external", model_id=model, path="out", seq_id=1)
    )["path"]
    run = f"{API}/training_runs/{model}"
    assert client.http.get(run).json()["lora_rank"] == 4
    assert model in [
        each["training_run_id"]
        for each in client.http.get(f"{API}/training_runs").json()["training_runs"]
    ]
    [listed] = client.http.get(f"{run}/checkpoints").json()["checkpoints"]
    assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "external")
    urls = client.http.get(f"{run}/checkpoints/external_weights/out/external_weights_urls").json()[
        "urls"
    ]
    assert set(urls) == {"adapter_model.safetensors", "adapter_config.json"}
    assert (
        json.loads(client.http.get(urls["adapter_config.json"], headers={"X-API-Key": ""}).text)[
            "r"
        ]
        == 4
    )
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
        assert (
            "tinker.max_models = 4" in client.result(client.post("create_model", **body))["error"]
        )
        client.post(f"sessions/{client.session}/finish", reason={"type": "success"})
        other = WireClient(http)
        assert np.isfinite(
            logprobs_of(
                client.output(client.send(other.create_model(), 1, [DATUM], "cross_entropy"))
            )
        ).all()
        other.post(f"sessions/{other.session}/finish", reason={"type": "success"})


async def test_results_are_kept_until_after_their_delivery_and_not_for_ever() -> None:
    """Two polls get one result; two minutes later it is gone, its number is known; nobody's
    results go after hours."""
    now = [0.0]
    promises = Promises(PROMISE_BYTES + 100, clock=lambda: now[0])
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
    with pytest.raises(ServerBusyError, match=f"results of {PROMISE_BYTES + 209} bytes wait"):
        promises.new()
    now[0] += UNCLAIMED_S + 1
    assert promises.new().request_id and len(promises) == 1


async def test_a_promise_that_is_settled_holds_its_id_alone() -> None:
    """Neither the model that it waited for nor the client's task lives on, however long its
    result is kept."""
    promises, held = Promises(1 << 20), json_result({"a": 1})
    promise = promises.new(sample_count=2)
    promise.reason, promise.cancel = (lambda result=held: str(result)), (lambda result=held: result)
    promise.on_result.append(lambda done, result=held: None)
    gone = weakref.ref(held)
    del held
    promises.resolve(promise, json_result({}))
    assert gone() is None and promise.sequence_ids == (
        f"{promise.request_id}-0",
        f"{promise.request_id}-1",
    )
    other = promises.new()
    promises.resolve(other, json_result({}))
    assert promise.ready is other.ready and promise.ready.is_set()


async def test_models_that_were_made_long_ago_take_no_place() -> None:
    absent: Any = None
    config = TinkerConfig(max_models=4)
    made = TinkerService(
        config, absent, absent, absent, absent, absent, names=("m",), tokenizer_id="m"
    )
    session = made.create_session(CreateSessionBody())
    for number in range(12):
        promise = made._creating[session.session_id, number] = made.promises.new()
        made.promises.resolve(promise, json_result({}))
        made.promises.forget([promise.request_id])
    assert made._make_room() is None
    made.add_sampler(session, Sampler("x", "m"))
    session.last_seen -= FORGOTTEN_AFTER_S + 1
    made.create_session(CreateSessionBody())
    assert (len(made.sessions), len(made.sampling), made._creating) == (1, 0, {})


def test_samples_and_waiting_bodies_are_limited(
    client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that waits for an earlier one fills the limit; the earlier one is taken all the
    same."""
    model = client.create_model()
    body = request_of([DATUM], "cross_entropy", model_id=model, seq_id=3)
    second = client.send(model, 2, [DATUM], "cross_entropy")
    monkeypatch.setattr(service, "MOST_QUEUED_BYTES", len(body))
    assert client.http.post(f"{API}/forward_backward", content=body).status_code == 429
    client.output(client.send(model, 1, [DATUM], "cross_entropy"))
    client.output(second)
    client.output(client.http.post(f"{API}/forward_backward", content=body).json())


def test_records_of_short_samples_are_counted_too() -> None:
    records = SampleRecords(most_bytes=3 * 420)
    for i in range(5):
        records.add(str(i), SampleRecord("run", 0, 1.0, np.zeros(5, np.float32)))
    assert [i for i in range(5) if records.find(str(i))] == [2, 3, 4]


def test_samples_are_limited_cancelled_and_told_of_together(client: WireClient) -> None:
    """max_samples counts samples, not requests; a cancelled request fails; one poll tells of all
    that ended."""
    sampler = client.live_sampler(client.create_model(), 1, 0)
    long = client.sample(sampler, 0, TOKENS, num_samples=40, params={"max_tokens": 200, "stop": []})
    short = {"num_samples": 30, "params": {"max_tokens": 1}}
    assert (
        "tinker.max_samples"
        in client.sample(sampler, 1, TOKENS, status=429, **short)["error"]["message"]
    )
    client.post("cancel_future", request_id=long["request_id"])
    assert "was cancelled" in client.result(long)["error"]
    done = client.sample(sampler, 1, TOKENS, **short)
    client.samples(done)
    target = {"sampling_session_id": sampler}
    told = client.post("retrieve_futures", target=target, prev_cursor=0, timeout=0)
    states = [(event["request_id"], event["state"]) for event in told["completions"]]
    assert (
        states == [(long["request_id"], "failed"), (done["request_id"], "finished")]
        and told["cursor"] == 2
    )
    body = {
        "target": target,
        "prev_cursor": 2,
        "timeout": 0,
        "retrieved_request_ids": [done["request_id"]],
    }
    assert client.post("retrieve_futures", **body)["completions"] == []
    client.post("retrieve_future", status=410, request_id=done["request_id"])


def test_a_sample_with_its_experts_is_refused_by_name(client: WireClient) -> None:
    """The SDK's answer has no field for them, and our own route returns them."""
    sampler = client.live_sampler(client.create_model(), 1, 0)
    refused = client.sample(sampler, 1, TOKENS, status=400, return_routed_experts=True)
    assert "SampleResponse has no field for experts" in str(refused)
    assert "/inference/v1/generate" in str(refused)
    few = {"max_tokens": 2}
    client.samples(client.sample(sampler, 1, TOKENS, params=few, return_routed_experts=False))

"""/v1/models, /health, /metrics, /generate, /tokenize, hang-ups: against a real engine on the
shipped model."""

import json
import re
import socket
from dataclasses import replace

import pytest
from openai import NotFoundError
from prometheus_client import CollectorRegistry, generate_latest

from mlx_parallm.engine.live_requests import STEP_PARTS, Counters
from mlx_parallm.server.metrics import _EngineCollector
from mlx_parallm.types import EngineStats
from tests.waiting import until

PROMPT = "<|im_start|>user\n12 + 7 =<|im_end|>\n<|im_start|>assistant\n"


def test_models_are_listed_and_found(client, server):
    [model, *_] = client.models.list().data
    assert (model.object, model.parent, model.policy_version) == (
        "model",
        None,
        server.engine.stats().policy_version,
    )
    assert model.max_model_len == server.engine.max_model_len and model.owned_by and model.created
    assert client.models.retrieve(model.id) == model
    with pytest.raises(NotFoundError, match="Served models"):
        client.models.retrieve("no/such")


def test_health_is_ok_while_the_engine_steps(server):
    with server.http() as http:
        assert http.get("/health").json()["status"] == "ok"
        assert http.head("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_hangup_frees_the_slot(server, stream):
    aborted = server.engine.stats().requests_aborted
    body = {
        "prompt": "a",
        "max_tokens": 240,
        "ignore_eos": True,
        "n": 16,
        "stream": stream,
        "temperature": 1.5,
    }
    server.hang_up("/v1/completions", body, lambda: server.engine.stats().running)
    until(lambda: server.engine.stats().requests_aborted == aborted + 1)
    until(lambda: server.engine.stats().running == 0)
    with server.http() as http:
        assert (
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        )


def test_metrics_of_memory_and_of_a_steps_parts():
    registry = CollectorRegistry()
    stats = EngineStats(
        alive=True, ready=True, last_step_time=0.0, waiting=0, policy_version=0, **vars(Counters())
    )
    registry.register(_EngineCollector(lambda: stats, dict))
    assert "mlx_parallm_kv_tokens 0.0" in generate_latest(registry).decode()
    parts = {"schedule": 0.5, "build": 0.25, "compute": 4.0, "read": 0.125, "score": 0.0}
    assert parts.keys() == STEP_PARTS.keys()
    stats = replace(
        stats,
        kv_tokens=7,
        kv_bytes=1024,
        kv_bytes_shared=512,
        kv_layout="tokens",
        step_seconds=parts,
    )
    found = generate_latest(registry).decode().splitlines()
    wanted = [
        f'mlx_parallm_step_seconds_total{{part="{part}"}} {seconds}'
        for part, seconds in parts.items()
    ]
    wanted += [
        "mlx_parallm_kv_tokens 7.0",
        "mlx_parallm_kv_bytes 1024.0",
        "mlx_parallm_kv_bytes_shared 512.0",
    ]
    assert {*wanted, 'mlx_parallm_engine_info{kv_layout="tokens"} 1.0'} <= {*found}


def test_metrics_count_what_was_done(server):
    def read(http):
        text = http.get("/metrics").text
        return {
            name: float(value)
            for name, value in re.findall(r"^(mlx_parallm_\w+) ([\d.e+]+)$", text, re.M)
        }, text

    with server.http() as http:
        before, _ = read(http)
        http.post(
            "/v1/completions",
            json={
                "prompt": [9, *range(100, 119)],
                "n": 4,
                "max_tokens": 3,
                "ignore_eos": True,
                "cache_salt": "own",
            },
        )
        until(lambda: server.engine.stats().running == 0)
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": True})
        server.state.metrics.observe_publish(0.0004)
        after, text = read(http)
    assert (
        after["mlx_parallm_prefill_tokens_total"] - before["mlx_parallm_prefill_tokens_total"] == 21
    )
    assert (
        after["mlx_parallm_generation_tokens_total"] - before["mlx_parallm_generation_tokens_total"]
        == 13
    )
    assert (
        after["mlx_parallm_requests_finished_total"] - before["mlx_parallm_requests_finished_total"]
        == 2
    )
    assert after["mlx_parallm_prompt_tokens_total"] > before["mlx_parallm_prompt_tokens_total"]
    for name in (
        "requests_running",
        "requests_waiting",
        "requests_failed_total",
        "requests_aborted_total",
    ):
        assert f"mlx_parallm_{name}" in after
    assert after["mlx_parallm_policy_version"] == server.engine.stats().policy_version
    assert (
        after["mlx_parallm_weight_publish_seconds_count"]
        == before["mlx_parallm_weight_publish_seconds_count"] + 1
    )
    assert (
        after["mlx_parallm_first_token_seconds_count"]
        == before["mlx_parallm_first_token_seconds_count"] + 1
    )
    assert 'mlx_parallm_http_request_seconds_count{route="/v1/completions",status="200"}' in text


def test_generate_speaks_vllm(server, tiny_tokenizer):
    ids = tiny_tokenizer.encode(PROMPT)
    eos = max(tiny_tokenizer.eos_token_ids)
    body = {
        "prompt": {"prompt_token_ids": ids},
        "logprobs": 0,
        "n": 3,
        "max_tokens": 20,
        "temperature": 1.0,
        "stop": [eos],
        "seed": 7,
        "timeout": 5,
        "split": "train",
        "top_p": None,
    }
    with server.http() as http:
        answer = http.post("/generate", json=body).json()
        assert answer["prompt_token_ids"] == ids
        assert len(answer["text"]) == len(answer["finish_reasons"]) == len(answer["logprobs"]) == 3
        assert set(answer["finish_reasons"]) <= {"stop", "length"}
        for token_ids, positions in zip(answer["token_ids"], answer["logprobs"], strict=True):
            assert all(len(position) == 1 for position in positions)
            assert [int(next(iter(position[0]))) for position in positions] == token_ids
            assert all(value <= 0 for position in positions for value in position[0].values())
        wide = http.post("/generate", json=body | {"logprobs": 3}).json()
        assert wide["token_ids"] == answer["token_ids"]
        assert [int(next(iter(position[0]))) for position in wide["logprobs"][0]] == answer[
            "token_ids"
        ][0]
        assert http.post("/generate", json=body | {"logprobs": None}).json().get("logprobs") is None
        short = http.post(
            "/generate",
            json={"prompt": {"prompt_token_ids": ids}, "ignore_eos": True, "logprobs": 0},
        )
        assert len(short.json()["token_ids"][0]) == 16 and short.json()["finish_reasons"] == [
            "length"
        ]
        text = http.post(
            "/generate", json={"prompt": PROMPT, "temperature": 0, "stop": "\x00"}
        ).json()
        assert text["prompt"] == PROMPT and text["prompt_token_ids"] == ids


def test_generate_scores_a_prompt(server, tiny_tokenizer):
    ids = tiny_tokenizer.encode(PROMPT)
    body = {
        "prompt": {"prompt_token_ids": ids},
        "prompt_logprobs": 2,
        "max_tokens": 1,
        "temperature": 0.0,
    }
    with server.http() as http:
        scores = http.post("/generate", json=body).json()["prompt_logprobs"]
        echoed = http.post(
            "/v1/completions", json={"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 2}
        ).json()
    assert scores[0] is None and len(scores) == len(ids)
    assert [int(next(iter(entry))) for entry in scores[1:]] == ids[1:]
    given = [next(iter(entry.values())) for entry in scores[1:]]
    assert given == pytest.approx(echoed["choices"][0]["logprobs"]["token_logprobs"][1:], abs=1e-5)


def test_generate_speaks_sglang(server, tiny_tokenizer):
    ids = tiny_tokenizer.encode(PROMPT)
    sampling = {"temperature": 0, "max_new_tokens": 20}
    body = {
        "input_ids": ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_text_in_logprobs": False,
    }
    with server.http() as http:
        one = http.post("/generate", json=body).json()
        triples = one["meta_info"]["output_token_logprobs"]
        assert [token_id for _, token_id, _ in triples] == one["output_ids"]
        assert all(logprob <= 0 and text is None for logprob, _, text in triples)
        assert one["meta_info"]["finish_reason"]["type"] in ("stop", "length")
        assert one["meta_info"]["prompt_tokens"] == len(ids)
        several = http.post(
            "/generate", json=body | {"sampling_params": sampling | {"n": 2}}
        ).json()
        assert [each["output_ids"] for each in several] == [one["output_ids"]] * 2
        batch = http.post(
            "/generate", json=body | {"input_ids": [ids], "return_text_in_logprobs": True}
        ).json()
        assert len(batch) == 1 and "".join(
            entry[2] for entry in batch[0]["meta_info"]["output_token_logprobs"]
        )
        text = http.post("/generate", json={"text": PROMPT, "sampling_params": sampling}).json()
        assert (
            text["output_ids"] == one["output_ids"]
            and "output_token_logprobs" not in text["meta_info"]
        )
        assert text["meta_info"]["cached_tokens"] == len(ids) - 1
        scored = http.post(
            "/generate", json=body | {"logprob_start_len": 1, "top_logprobs_num": 2}
        ).json()
        assert [token_id for _, token_id, _ in scored["meta_info"]["input_token_logprobs"]] == ids[
            1:
        ]
        assert [len(top) for top in scored["meta_info"]["output_top_logprobs"]] == [2] * len(
            one["output_ids"]
        )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": {}},
        {"prompt": {"prompt_token_ids": []}},
        {"input_ids": []},
        {"prompt": "a", "stream": True},
        {"prompt": "a", "temperature": "hot"},
        {"input_ids": [5], "sampling_params": {"max_new_tokens": 0}},
        {"input_ids": [5], "sampling_params": [{}, {}]},
        {"prompt": {"prompt_token_ids": [1_000_000]}},
    ],
)
def test_generate_refuses_what_it_cannot_run(server, body):
    with server.http() as http:
        answer = http.post("/generate", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_tokenize_and_detokenize_are_inverse(server, tiny_tokenizer):
    with server.http() as http:
        for prefix in ("", "/v1"):
            tokens = http.post(
                f"{prefix}/tokenize", json={"prompt": "7 < 12 ü", "model": "default"}
            ).json()["tokens"]
            assert tokens == tiny_tokenizer.encode("7 < 12 ü")
            assert http.post(f"{prefix}/detokenize", json={"tokens": tokens}).json() == {
                "prompt": "7 < 12 ü"
            }
        assert http.post("/tokenize", json={}).status_code == 400
        assert http.post("/tokenize", json={"prompt": "a", "messages": []}).status_code == 400
        assert http.post("/tokenize", json={"prompt": "a", "model": "gpt-4"}).status_code == 404
        assert http.post("/detokenize", json={"tokens": [10_000_000]}).status_code == 400
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200}
WITH_LOGPROBS = {"top_logprobs": 20, "include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20}, b"[DONE]"),
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 200} | WITH_LOGPROBS,
            b"response.incomplete",
        ),
        ("/v1/messages", CHAT, b"message_stop"),
    ],
)
def test_who_reads_a_stream_slowly_costs_others_nothing(server, client, path, body, end):
    """Its answer (with log-probabilities 300 kB, more than its socket holds) is made, and waits
    for it."""
    sent = json.dumps({"model": "default", "stream": True, "min_tokens": 200} | body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((host, int(port)))
        slow.settimeout(60)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type:"
            " application/json\r\nConnection: close\r\n"
        )
        slow.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        first = slow.recv(64)
        for _ in range(3):
            answer = client.completions.create(
                model="default", prompt="b", max_tokens=8, timeout=60
            )
            assert answer.choices[0].finish_reason is not None
        parts = [first]
        while part := slow.recv(65536):
            parts.append(part)
    whole = b"".join(parts)
    assert whole.startswith(b"HTTP/1.1 200") and end in whole, whole[-300:]
    assert len(whole) > (250_000 if "top_logprobs" in body else 20_000)

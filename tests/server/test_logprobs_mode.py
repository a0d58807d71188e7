"""What `logprobs` are in each mode, against numbers worked here in float64 from the model's own
logits."""

from types import SimpleNamespace

import httpx
import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.daemon import Serving
from mlx_parallm.models.loading import load_model
from mlx_parallm.weights import SharedWeights
from tests.conftest import TINY

PROMPT, BIASED, TEMPERATURE = [5, 6, 7], 40, 0.7
RESHAPED = {"temperature": TEMPERATURE, "top_k": 4, "logit_bias": {str(BIASED): 3.0}, "seed": 1}


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.fixture(scope="module")
def logits():
    """float64 [V] after PROMPT, of plain mlx-lm."""
    model = load_model(TINY).model
    return np.array(model(mx.array([PROMPT]))[0, -1].astype(mx.float32), np.float64)


@pytest.fixture(scope="module")
def processed_server():
    """From the configuration's key on."""
    serving = Serving(
        Config.model_validate(
            {"server": {"port": 0, "logprobs_mode": "processed", "batch_size": 4}}
        )
    )
    try:
        serving.listen()
        loaded = serving.load()
        serving.open(
            loaded, SharedWeights(loaded.model, keep_versions=1), adapters={}, main_adapter=None
        )
        yield SimpleNamespace(http=lambda: httpx.Client(base_url=serving.url, timeout=60))
    finally:
        serving.close()


@pytest.fixture(params=["raw", "processed"])
def mode(request, server, processed_server):
    return request.param, {"raw": server, "processed": processed_server}[request.param]


def first_token(server, **fields):
    """(id, its logprob, {id: logprob} of the alternatives, the rest of the choice) of the first
    token."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "logprobs": 6, **fields}}
    with server.http() as http:
        [choice] = http.post("/inference/v1/generate", json=body).json()["choices"]
    entry = choice["logprobs"]["content"][0]
    tops = {
        int(top["token"].removeprefix("token_id:")): top["logprob"] for top in entry["top_logprobs"]
    }
    return choice["token_ids"][0], entry["logprob"], tops, choice


def worked(logits, mode):
    """float64 [V]: raw is before bias and filters, processed after them; both at the sampling
    temperature."""
    if mode == "raw":
        return log_softmax(logits / TEMPERATURE)
    biased = logits.copy()
    biased[BIASED] += RESHAPED["logit_bias"][str(BIASED)]
    biased /= TEMPERATURE
    biased[np.argsort(biased)[: -RESHAPED["top_k"]]] = -np.inf
    return log_softmax(biased)


def test_each_mode_has_its_numbers(mode, logits):
    name, server = mode
    token, logprob, tops, choice = first_token(server, **RESHAPED)
    expected = worked(logits, name)
    assert logprob == pytest.approx(expected[token], abs=1e-4)
    assert choice["processed_logprobs"] == [
        pytest.approx(worked(logits, "processed")[token], abs=1e-4)
    ]
    order = np.argsort(-expected)
    kept = 6 if name == "raw" else 4
    assert list(tops)[:kept] == order[:kept].tolist()
    assert list(tops.values())[:kept] == pytest.approx(expected[order[:kept]], abs=1e-4)
    assert set(list(tops.values())[kept:]) <= {-9999.0}


def test_the_modes_differ_where_the_distribution_was_reshaped(logits):
    difference = worked(logits, "raw") - worked(logits, "processed")
    assert np.abs(difference[np.isfinite(difference)]).max() > 0.05


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_raw_is_vllm_s_raw_at_temperature_1_only(server, logits, temperature):
    token, logprob, _, choice = first_token(server, temperature=temperature, seed=2)
    assert logprob == pytest.approx(log_softmax(logits / temperature)[token], abs=1e-4)
    assert bool(abs(logprob - log_softmax(logits)[token]) < 1e-4) is (temperature == 1.0)
    assert "processed_logprobs" not in choice


def test_unreshaped_answers_are_the_same_in_both_modes(server, processed_server):
    fields = {"temperature": 4.0, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    answers = [first_token(each, **fields)[3] for each in (server, processed_server)]
    assert (
        answers[0]["token_ids"] == answers[1]["token_ids"]
        and len(set(answers[0]["token_ids"])) >= 20
    )
    both = [[entry["logprob"] for entry in answer["logprobs"]["content"]] for answer in answers]
    assert both[0] == pytest.approx(both[1], abs=1e-5)


def test_every_route_says_the_mode_and_speaks_in_it(processed_server):
    with processed_server.http() as http:
        assert http.get("/server_info").json()["logprobs_mode"] == "processed"
        assert http.get("/v1/models").json()["data"][0]["logprobs_mode"] == "processed"
    expected = first_token(processed_server, **RESHAPED)[1]
    asked = RESHAPED | {"max_tokens": 1}
    completions = {"model": "default", "prompt": PROMPT, "logprobs": 1, **asked}
    sglang = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "sampling_params": asked | {"max_new_tokens": 1},
    }
    vllm = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, **asked}
    chat = {
        "messages": [{"role": "user", "content": "a"}],
        "tokens": PROMPT,
        "logprobs": True,
        **asked,
    }
    with processed_server.http() as http:
        [choice] = http.post("/v1/completions", json=completions).json()["choices"]
        assert choice["logprobs"]["token_logprobs"] == [pytest.approx(expected, abs=1e-5)]
        [chunk, *_] = http.post("/v1/completions", json=completions | {"stream": True}).text.split(
            "\n\n"
        )
        assert f'"token_logprobs":[{choice["logprobs"]["token_logprobs"][0]}' in chunk
        [choice] = http.post("/v1/chat/completions/tokens", json=chat).json()["choices"]
        assert choice["logprobs"]["content"][0]["logprob"] == pytest.approx(expected, abs=1e-5)
        [[[entry]]] = http.post("/generate", json=vllm).json()["logprobs"]
        assert list(entry.values()) == [pytest.approx(expected, abs=1e-5)]
        [[logprob, _, _]] = http.post("/generate", json=sglang).json()["meta_info"][
            "output_token_logprobs"
        ]
        assert logprob == pytest.approx(expected, abs=1e-5)

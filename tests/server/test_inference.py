"""/inference/v1/generate as verifiers' TrainClient reads it, and /v1/chat/completions/tokens."""

import json
import math

import pytest

SAMPLING = {"temperature": 4.0, "seed": 3, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
PROMPT = [5, 6, 7]


def strict_logprobs(choice):
    """The checks of renderers.client._parse_completion_logprobs (0.1.12), written anew; returns
    the numbers."""
    content = choice["logprobs"]["content"]
    assert isinstance(content, list) and len(content) == len(choice["token_ids"])
    for token_id, entry in zip(choice["token_ids"], content, strict=True):
        assert entry["token"] == f"token_id:{token_id}"
        assert type(entry["logprob"]) in (int, float)
        assert math.isfinite(entry["logprob"]) and entry["logprob"] != -9999.0
    return [entry["logprob"] for entry in content]


def counts(usage):
    """Without what the prefix cache happened to hold."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def post(server, **body):
    with server.http() as http:
        return http.post(
            "/inference/v1/generate", json={"model": "default", "token_ids": PROMPT} | body
        )


def test_the_strict_client_is_satisfied(server):
    sampling = SAMPLING | {
        "stop_token_ids": [],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    answer = post(
        server, sampling_params=sampling, cache_salt="7", priority=0, request_id="mine"
    ).json()
    [choice] = answer["choices"]
    strict_logprobs(choice)
    assert answer["request_id"] == "mine" and choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 40 and len(set(choice["token_ids"])) >= 20
    version = server.engine.stats().policy_version
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 40}]
    assert counts(answer["usage"]) == {
        "prompt_tokens": 3,
        "completion_tokens": 40,
        "total_tokens": 43,
    }
    with server.http() as http:
        entry = http.get("/v1/models").json()["data"][0]
        assert entry["max_model_len"] == server.engine.max_model_len
        whole = {"prompt": PROMPT, "return_token_ids": True, **SAMPLING}
        assert (
            http.post("/v1/completions", json=whole).json()["choices"][0]["token_ids"]
            == choice["token_ids"]
        )


def test_alternatives_are_named_by_id_and_the_first_is_the_likeliest(server):
    [choice] = post(server, sampling_params=SAMPLING | {"logprobs": 5}).json()["choices"]
    own = strict_logprobs(choice)
    for logprob, entry in zip(own, choice["logprobs"]["content"], strict=True):
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 5 and tops == sorted(tops, reverse=True) and logprob <= tops[0] + 1e-6
        assert all(top["token"].startswith("token_id:") for top in entry["top_logprobs"])


def test_a_stream_adds_up_to_the_whole_answer(server):
    sampling = SAMPLING | {"n": 2}
    whole = post(server, sampling_params=sampling).json()
    body = {
        "token_ids": PROMPT,
        "sampling_params": sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with server.http() as http:
        lines = http.post("/inference/v1/generate", json=body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert counts(chunks.pop()["usage"]) == counts(whole["usage"])
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        assert [value for part in mine for value in strict_logprobs(part)] == strict_logprobs(
            choice
        )
        assert (
            mine[-1]["finish_reason"] == "length"
            and mine[-1]["weight_versions"] == choice["weight_versions"]
        )
    assert {chunk["request_id"] for chunk in chunks} == {chunks[0]["request_id"]}


def test_a_prompt_is_scored(server):
    answer = post(
        server, sampling_params={"max_tokens": 1, "prompt_logprobs": 1, "temperature": 1.0}
    ).json()
    first, *rest = answer["prompt_logprobs"]
    assert (
        first is None
        and [str(token) in entry for token, entry in zip(PROMPT[1:], rest, strict=True)]
        == [True] * 2
    )
    assert all(shown["logprob"] < 0 for entry in rest for shown in entry.values())


def test_without_max_tokens_an_answer_is_not_cut_at_vllm_s_16(server):
    longest = [5] * (server.engine.max_model_len - 30)
    [choice] = post(server, token_ids=longest, sampling_params={"ignore_eos": True}).json()[
        "choices"
    ]
    assert len(choice["token_ids"]) == 30 and choice["logprobs"] is None


def test_an_over_long_prompt_is_a_400_that_the_client_recognises(server):
    too_long = [5] * (server.engine.max_model_len + 1)
    refused = post(server, token_ids=too_long, sampling_params={"max_tokens": 1})
    assert (
        refused.status_code == 400
        and "maximum context length" in refused.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    "body, param",
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "a"}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"bad_words": [""]}}, "bad_words"),
        (
            {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
            "sampling_params.prompt_logprobs",
        ),
    ],
)
def test_what_would_change_the_answer_is_refused(server, body, param):
    refused = post(server, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_unknown_fields_are_ignored_as_the_contract_says(server):
    sampling = {"max_tokens": 1, "output_kind": 2, "unheard_of": True}
    assert (
        post(
            server, sampling_params=sampling, kv_transfer_params={"a": 1}, unheard_of=1
        ).status_code
        == 200
    )


def test_a_chat_goes_on_from_exact_tokens(client, server, tiny_tokenizer):
    messages = [{"role": "user", "content": "12 + 7 ="}]
    fields = {
        "messages": messages,
        "temperature": 4.0,
        "seed": 2,
        "max_completion_tokens": 40,
        "logprobs": True,
    }
    extra = {"ignore_eos": True, "return_token_ids": True}
    first = client.chat.completions.create(model="default", extra_body=extra, **fields)
    second = client.post(
        "/chat/completions/tokens",
        cast_to=type(first),
        body={"model": "default", "tokens": first.prompt_token_ids, **fields, **extra},
    )
    assert second.prompt_token_ids == first.prompt_token_ids
    assert (
        second.choices[0].token_ids == first.choices[0].token_ids
        and len(set(first.choices[0].token_ids)) >= 20
    )
    assert [e.logprob for e in second.choices[0].logprobs.content] == pytest.approx(
        [e.logprob for e in first.choices[0].logprobs.content], abs=1e-5
    )
    tokens = first.prompt_token_ids + first.choices[0].token_ids + tiny_tokenizer.encode("next")
    with server.http() as http:
        body = {
            "tokens": tokens,
            "messages": messages,
            "max_tokens": 1,
            "return_token_ids": True,
            "unheard_of": 1,
        }
        again = http.post("/v1/chat/completions/tokens", json=body).json()
        assert again["prompt_token_ids"] == tokens and again["object"] == "chat.completion"
        refused = http.post(
            "/v1/chat/completions/tokens", json={"messages": messages, "tokens": []}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
        assert (
            http.post("/v1/chat/completions/tokens", json={"messages": messages}).status_code == 400
        )

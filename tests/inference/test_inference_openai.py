"""InferenceModule over HTTP: this server, and endpoints that offer less."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlx_parallm.errors import EndpointError, RequestError
from mlx_parallm.inference.module import InferenceModule
from tests.conftest import TinyEngine
from tests.scripted_http import scripted_http
from tests.server.scripted_answers import HERMES_TEMPLATE, ScriptedEngine, tokenizer_with
from tests.server.serving import RunningServer, running_server

SUM = [{"role": "user", "content": "Sum: 47+38"}]
PROMPTS: list[Any] = ["Reverse: hfkdo", SUM, [3, 5, 8, 13] * 6, "47+38 ="]


@pytest.fixture(scope="module")
def here(tiny_engine: TinyEngine, tiny_tokenizer: Any) -> Iterator[InferenceModule]:
    with InferenceModule.over(tiny_engine.client, tiny_tokenizer) as module:
        yield module


@pytest.fixture(scope="module")
def remote(server: RunningServer) -> Iterator[InferenceModule]:
    """The same engine over HTTP."""
    with InferenceModule(
        "builtin:tiny", backend="openai", base_url=f"{server.url}/v1", api_key="unused"
    ) as module:
        yield module


def test_this_server_answers_as_its_engine(here: InferenceModule, remote: InferenceModule) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "seed": 3,
        "num_return_sequences": 2,
        "return_logprobs": True,
    }
    near, far = here.generate(PROMPTS, **options), remote.generate(PROMPTS, **options)
    assert len({token for ids in near.token_ids for token in ids}) >= 20
    assert far.texts == near.texts and far.token_ids == near.token_ids
    for key in ("policy_versions", "finish_reasons", "prompt_token_ids", "cached"):
        assert far.metadata[key] == near.metadata[key], key
    for one, other in zip(near.logprobs, far.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert far.texts == remote.generate(PROMPTS, **{**options, "return_logprobs": False}).texts
    greedy = {"max_new_tokens": 8, "do_sample": False, "stop": ["e"], "top_k": 3}
    assert remote.generate(SUM, **greedy).texts == here.generate(SUM, **greedy).texts


def test_scores_are_those_of_the_engine(here: InferenceModule, remote: InferenceModule) -> None:
    sampled = remote.generate(PROMPTS, 30, seed=1, return_logprobs=True)
    for responses in (sampled, ["odkfh", "85", "", "a b"]):
        near, far = here.get_logprobs(PROMPTS, responses), remote.get_logprobs(PROMPTS, responses)
        for one, other in zip(near, far, strict=True):
            assert one.shape == other.shape and other.dtype == np.float32
            np.testing.assert_allclose(one, other, atol=1e-4)
    for score, own in zip(remote.get_logprobs(PROMPTS, sampled), sampled.logprobs, strict=True):
        np.testing.assert_allclose(score, own, atol=1e-4)


def test_what_an_endpoint_cannot_do_is_said(remote: InferenceModule) -> None:
    with pytest.raises(RequestError, match="OpenAI endpoint"):
        remote.get_logits(SUM, "85")
    with pytest.raises(RequestError, match="OpenAI endpoint"):
        remote.generate(SUM, return_logits=True)
    assert (remote.client, remote.tokenizer, remote.adapter, remote.max_model_len) == (
        None,
        None,
        None,
        None,
    )
    with pytest.raises(EndpointError, match="maximum context length") as refused:
        remote.generate([[1] * 300], 4)
    assert refused.value.status == 400


def test_an_empty_prompt_has_the_same_message(
    here: InferenceModule, remote: InferenceModule
) -> None:
    for prompt, response in (("", "c"), ("", "")):
        for module in (here, remote):
            with pytest.raises(RequestError, match=r"^prompt: .*empty"):
                module.get_logprobs([prompt], [response])


def test_tools_are_the_endpoints_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokens = dict.fromkeys(("<tool_call>", "</tool_call>"), True)
    tokenizer = tokenizer_with(
        tmp_path_factory.mktemp("hermes"), tokens, chat_template=HERMES_TEMPLATE
    )
    engine = ScriptedEngine(tokenizer)
    engine.texts = (
        'Yes.<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
        "USE_TOOL[weather](Bonn)",
    )
    weather = {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    with running_server(engine, tokenizer) as server:
        remote = InferenceModule("fake", backend="vllm", base_url=f"{server.url}/v1")
        with remote:
            responses, calls = remote.batch_generate_with_tools(
                ["Rain?", SUM], [weather], num_return_sequences=2
            )
            assert responses == ["Yes.", engine.texts[1]] * 2
            for native, written in (calls[:2], calls[2:]):
                assert [(c.name, c.arguments, c.raw_text, c.start_pos) for c in native] == [
                    ("weather", {"city": "Köln"}, "", 4)
                ]
                assert [(c.name, c.arguments, c.raw_text) for c in written] == [
                    ("weather", {"city": "Bonn"}, engine.texts[1])
                ]
            told = [
                tokenizer.decode(asked.prompt_token_ids, skip_special_tokens=False)
                for asked in engine.asked
            ]
            assert (
                all('"city"' in text for text in told)
                and sum("Rain?" in text for text in told) == 1
            )
            with pytest.raises(RequestError, match="not token ids"):
                remote.batch_generate_with_tools([[1, 2]], [weather])


def plain_openai(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    """Knows OpenAI's own fields only."""
    if path not in ("/v1/chat/completions", "/v1/completions"):
        return 404, {}, {"detail": "Not Found"}
    if unknown := set(body) & {"return_token_ids", "top_k"}:
        return (
            400,
            {},
            {"error": {"message": f"Unrecognized request argument supplied: {unknown.pop()}"}},
        )
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
        for given in ("{}", "{", "[1]")
    ]
    message = (
        {"role": "assistant", "content": None, "tool_calls": calls}
        if "tools" in body
        else {"content": "hi"}
    )
    said = {"message": message} if path.endswith("chat/completions") else {}
    choices = [{"index": n, "text": f"t{n}", "finish_reason": "stop", **said} for n in (1, 0)]
    return 200, {}, {"choices": choices[-body.get("n", 1) :]}


def test_an_endpoint_without_token_ids_is_asked_without() -> None:
    with (
        scripted_http(plain_openai) as (url, asked),
        InferenceModule("gpt", backend="openai", base_url=url) as remote,
    ):
        result = remote.generate(["a"], 5, num_return_sequences=2, seed=7)
        assert (result.texts, result.token_ids, result.logprobs) == (["t0", "t1"], None, None)
        assert remote.generate([SUM, SUM], 5, seed=7).texts == ["hi", "hi"]
        assert [body.pop("return_token_ids", None) for _, _, body in asked] == [
            True,
            None,
            None,
            None,
        ]
        sent = {"model": "gpt", "max_tokens": 5, "seed": 7}
        assert (asked[1].path, asked[1].body) == (
            "/v1/completions",
            {**sent, "prompt": "a", "n": 2},
        )
        # sent at once
        one, other = sorted((body for _, _, body in asked[2:4]), key=lambda body: body["seed"] != 7)
        assert one == {**sent, "messages": SUM}
        assert (
            other == {**one, "seed": other["seed"]}
            and isinstance(other["seed"], int)
            and other["seed"] != 7
        )
        with pytest.raises(EndpointError, match="top_k"):
            remote.generate("a", top_k=3)
        with pytest.raises(EndpointError, match="log-probabilities"):
            remote.generate("a", return_logprobs=True)
        with pytest.raises(EndpointError, match="needs /tokenize"):
            remote.get_logprobs("a", "b")
        with pytest.raises(EndpointError, match="does not score prompts"):
            remote.get_logprobs([[1]], [[2]])
        text, [calls] = remote.batch_generate_with_tools("a", ["f"])
        assert text == [""] and [(c.name, c.arguments) for c in calls] == [("f", {})]
        assert [(m.start_pos, m.end_pos) for m in calls.malformed] == [(0, 0)] * 2


@pytest.mark.parametrize("value", [{}, {"choices": []}, {"choices": ["a"]}])
def test_an_answer_that_is_none_is_an_error(value: Any) -> None:
    with (
        scripted_http(lambda path, body: (200, {}, value)) as (url, _),
        InferenceModule("m", backend="openai", base_url=url) as remote,
        pytest.raises(EndpointError, match="no choices"),
    ):
        remote.generate("a")

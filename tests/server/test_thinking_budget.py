"""thinking_token_budget over HTTP, on a model that thinks: each route's own name of it, streams,
usage, and a schema behind the forced end."""

import json
from types import SimpleNamespace

import anthropic
import httpx
import openai
import pytest

from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine import starting
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.execution.thinking import thinking_after, tokens_of_thought
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from tests.conftest import TINY, running_tiny_engine
from tests.server.scripted_answers import tokenizer_with
from tests.server.serving import running_server

TEMPLATE = (
    "{{ messages[0].content }}<|im_end|>{{ reasoning_effort }}"
    "{% if messages[-1].role == 'assistant' %}{{ messages[-1].content }}{% else %}<think>{% endif %}"
)
BUDGET = 7
ASKED = {"seed": 1, "temperature": 1.5, "max_tokens": 40}
USER = [{"role": "user", "content": "on"}]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "v",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
}


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinks")
    markers = dict.fromkeys(("<think>", "</think>"), True)
    return lambda: tokenizer_with(folder / "t", markers, sampled=True, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tokens(make_tokenizer):
    return make_tokenizer()


@pytest.fixture(scope="module")
def engine(make_tokenizer):
    with running_tiny_engine(600, make_tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def server(engine, make_tokenizer):
    config = ServerConfig(reasoning_budgets={"low": BUDGET})
    with running_server(engine.client, make_tokenizer(), config=config) as running:
        yield running


@pytest.fixture
def server_of_tiny(tiny_engine):
    tokenizer = load_tokenizer(resolve_model_path(TINY.base_path), TINY)
    with running_server(tiny_engine.client, tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def never(tokens):
    """A bias that keeps the model from ending its reasoning, or its answer, by itself."""
    ends = [*tokens.eos_token_ids, *tokens.encode_within("</think>")]
    return {"logit_bias": {str(token): -100 for token in ends}}


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_counts_and_ends_it_and_names_the_forced_tokens(server, tokens, never, streamed):
    fields = {"thinking_token_budget": BUDGET, "return_token_ids": True, **never}
    end = tokens.encode_within("</think>")
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="default", messages=USER, stream=streamed, extra_body=fields, **ASKED,
            **({"stream_options": {"include_usage": True}} if streamed else {}),
        )  # fmt: skip
        if streamed:
            chunks = list(answer)
            ids = [t for c in chunks for k in c.choices for t in getattr(k, "token_ids", [])]
            usage = chunks[-1].usage
        else:
            ids, usage = answer.choices[0].token_ids, answer.usage
            assert answer.choices[0].message.content and answer.choices[0].message.reasoning
    assert ids[BUDGET : BUDGET + len(end)] == end and end[0] not in ids[:BUDGET]
    assert usage.completion_tokens == len(ids) == ASKED["max_tokens"]
    assert usage.completion_tokens_details.reasoning_tokens == BUDGET + len(end)


def test_a_schema_holds_behind_the_forced_end(server, tokens, never):
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="default",
            messages=USER,
            response_format=SCHEMA,
            extra_body={"thinking_token_budget": 3, **never},
            **ASKED,
        ).choices[0]
    assert json.loads(answer.message.content)["ok"] in (True, False), answer
    assert len(tokens.encode_within(answer.message.reasoning)) <= 3


@pytest.mark.parametrize("budget", [0, 5])
def test_a_forced_call_comes_behind_the_forced_end(server, tokens, never, budget):
    parameters = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    parameters["additionalProperties"] = False
    with server.openai() as client:
        choices = client.chat.completions.create(
            model="default",
            messages=USER,
            n=2,
            tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            tool_choice="required",
            extra_body={"thinking_token_budget": budget, "return_token_ids": True, **never},
            **{**ASKED, "max_tokens": 100},
        ).choices
    end = tokens.encode_within("</think>")[0]
    for choice in choices:
        assert choice.token_ids.index(end) == budget
        [call] = choice.message.tool_calls
        assert json.loads(call.function.arguments)["x"] in (1, 2)


def test_thoughts_that_the_client_began_count(server, tokens, never):
    """As in vLLM: the budget is of the whole reasoning, however many requests it takes."""
    begun = {"role": "assistant", "content": "<think>so far"}
    spent = len(tokens.encode_within("so far"))
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[*USER, begun],
            extra_body={
                "continue_final_message": True,
                "thinking_token_budget": spent + 2,
                "return_token_ids": True,
                **never,
            },
            **ASKED,
        ).choices[0]
    assert answer.token_ids[2:3] == tokens.encode_within("</think>")


def test_responses_effort_and_messages_budget(server, tokens, never):
    end = tokens.encode_within("</think>")[0]
    with server.openai() as client:
        body = {"return_token_ids": True, "seed": 1, **never}
        asked = {"model": "default", "input": "on", "max_output_tokens": 20, "extra_body": body}
        low = client.responses.create(**asked, reasoning={"effort": "low"})
        high = client.responses.create(**asked, reasoning={"effort": "high"})
        own = client.responses.create(
            **{**asked, "extra_body": {**body, "thinking_token_budget": 3}},
            reasoning={"effort": "low"},
        )
    assert [answer.token_ids.index(end) for answer in (low, own)] == [BUDGET, 3]
    assert end not in high.token_ids, "an effort without a budget has none"
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        message = client.messages.create(
            model="default",
            max_tokens=20,
            messages=USER,
            thinking={"type": "enabled", "budget_tokens": BUDGET},
            extra_body={"return_token_ids": True, "seed": 1, **never},
        )
    assert message.token_ids.index(end) == BUDGET
    assert message.usage.output_tokens_details.thinking_tokens == BUDGET + 1
    assert low.usage.output_tokens_details.reasoning_tokens == BUDGET + 1
    assert low.reasoning.effort == "low"
    assert [block.type for block in message.content] == ["thinking", "text"]


def test_the_token_routes_have_it_and_mark_what_was_forced(server, tokens, never):
    prompt = tokens.encode_within("on<think>")
    end = tokens.encode_within("</think>")[0]
    sampling = {"thinking_token_budget": 2, "max_tokens": 6, "seed": 1, **never}
    made = httpx.post(
        f"{server.url}/inference/v1/generate",
        json={"token_ids": prompt, "sampling_params": {**sampling, "logprobs": 0}},
    ).json()
    [choice] = made["choices"]
    assert choice["token_ids"][2] == end
    assert choice["forced_tokens"] == [0, 0, 1, 0, 0, 0]
    text = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "default", "prompt": prompt, "return_token_ids": True, **sampling},
    ).json()
    assert text["choices"][0]["token_ids"] == choice["token_ids"]


def test_python_asks_for_it_here_and_over_http(engine, server, tokens):
    end = tokens.encode_within("</think>")[0]
    asked = {"seed": 1, "thinking_token_budget": 3}
    with (
        InferenceModule.over(engine.client, tokens) as here,
        InferenceModule(
            "default", backend="openai", base_url=f"{server.url}/v1", api_key="k"
        ) as remote,
    ):
        for module in (here, remote):
            for prompt in (USER, "on<think>"):
                found = module.generate([prompt], 12, **asked)
                assert end in found.token_ids[0][:4], (module, prompt)
            with pytest.raises(RequestError, match="thinking_token_budget: a number is wanted"):
                module.generate([USER], 4, thinking_token_budget=True)


def test_prompts_of_tokens_that_end_inside_the_reasoning(server, tokens, never):
    """Thoughts that have begun, with words behind the marker; a marker in an earlier turn is
    none."""
    end, turn = tokens.encode_within("</think>")[0], next(iter(tokens.eos_token_ids))
    begun = tokens.encode_within("on<think>so far")
    body = {"model": "default", "return_token_ids": True, "max_tokens": 9, "seed": 1, **never}
    for prompt, place in ((begun, 2), ([*begun, turn, *tokens.encode_within("on")], None)):
        spent = len(tokens.encode_within("so far"))
        body |= {"prompt": prompt, "thinking_token_budget": spent + 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
        ids = answer["token_ids"]
        assert (ids.index(end) if end in ids else None) == place


TURNS = {  # an eos ends the user's turn in ChatML alone
    "instructions": "[INST] {{ messages[0].content }} [/INST]",
    "R1, which opens": "<|User|>{{ messages[0].content }}<|Assistant|><think>",
    "R1, which does not": "<|User|>{{ messages[0].content }}<|Assistant|>",
    "Gemma": "<turn>user\n{{ messages[0].content }}<end>\n<turn>model\n",
    "ChatML": "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("special", [True, False])
def test_a_marker_in_a_users_words_is_not_counted(name, special, tmp_path):
    markers = dict.fromkeys(("<think>", "</think>"), special)
    tokenizer = tokenizer_with(tmp_path / "t", markers, sampled=True, chat_template=TURNS[name])
    words = " and some words more that no budget pays"
    ids = tokenizer.render_chat([{"role": "user", "content": f"What does <think> mean{words}?"}])
    opens = thinking_after(tokenizer, ids).opened

    def counted(text: str) -> int | None:
        more = [*ids, *tokenizer.encode_within(text)]
        return tokens_of_thought(tokenizer, more, tokenizer.eos_token_ids)

    marker = "" if opens else "<think>"
    assert opens == ("which opens" in name)
    assert counted("") == (0 if opens else None)
    assert counted("It is") == (len(tokenizer.encode_within("It is")) if opens else None)
    assert counted(f"{marker}so far") == len(tokenizer.encode_within("so far"))
    assert counted(f"{marker}so far</think>ok") is None


def test_true_is_no_number(server):
    for path, body, field in (
        ("chat/completions", {"messages": USER, "thinking_token_budget": True}, None),
        ("chat/completions", {"messages": USER, "max_tokens": True}, None),
        ("completions", {"prompt": [5, True]}, "prompt"),
        ("completions", {"prompt": [[5], [False]]}, "prompt"),
        ("completions", {"prompt": "a", "stop_token_ids": [True]}, "stop_token_ids"),
        ("completions", {"prompt": "a", "logit_bias": {"5": True}}, "logit_bias"),
        ("completions", {"prompt": "a", "temperature": False}, "temperature"),
        ("responses", {"input": "on", "max_output_tokens": True}, "max_output_tokens"),
    ):
        answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "default", **body})
        error = answer.json()["error"]
        assert answer.status_code == 400 and "not true or false" in error["message"], error
        assert (field or [*body][-1]) in error["message"]
    body = {
        "max_tokens": 9,
        "messages": USER,
        "thinking": {"type": "enabled", "budget_tokens": True},
    }
    assert httpx.post(f"{server.url}/v1/messages", json=body).status_code == 400
    with pytest.raises(ConfigError, match=r"reasoning_budgets.*not true or false"):
        parse_config({"server": {"reasoning_budgets": {"low": True}}})


def test_budgets_that_no_model_can_keep_are_said_at_start(monkeypatch, tokens):
    said = []
    log = SimpleNamespace(warning=lambda event, **values: said.append(event))
    monkeypatch.setattr(starting, "get_logger", lambda name: log)
    config = Config(server=ServerConfig(reasoning_budgets={"low": 3}))
    with InferenceModule("builtin:tiny", config=config):
        assert said == ["server.reasoning_budgets is off"]


def test_a_model_that_does_not_reason(server_of_tiny):
    """The chat's own field is refused by name, as vLLM does without a reasoning parser; Claude
    Code's, which it always sends, holds by itself."""
    with server_of_tiny.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="default", messages=USER, extra_body={"thinking_token_budget": 3}, max_tokens=2
        )
    assert caught.value.param == "thinking_token_budget"
    with anthropic.Anthropic(base_url=server_of_tiny.url, api_key="k", max_retries=0) as client:
        client.messages.create(
            model="default",
            max_tokens=2,
            messages=USER,
            thinking={"type": "enabled", "budget_tokens": 1024},
        )


def test_a_budget_of_the_configuration_is_checked():
    with pytest.raises(ConfigError, match="reasoning_budgets"):
        parse_config(
            {"model": {"path": "builtin:tiny"}, "server": {"reasoning_budgets": {"low": -1}}}
        )

"""What clients send by habit, and what other servers than OpenAI's taught them."""

import json

import pytest

from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from mlx_parallm.server.protocol.openai import ChatBody
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server

SAYS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TEMPLATE = SAYS + (
    "{{ enable_thinking }}|{{ thinking }}|{{ reasoning_effort }}|{{ verbosity }}{# 'wolf' #}"
)
TEMPLATE += "{% if messages[0].role in ['fox', 'critic'] %}{% endif %}"
ASKED = {"messages": [{"role": "user", "content": "a"}]}
WEATHER, TIME = ({"type": "function", "function": {"name": name}} for name in ("weather", "time"))


@pytest.fixture(scope="module")
def http():
    config = ModelConfig(
        base_path="builtin:tiny", chat_template=TEMPLATE + "{{ (tools or []) | length }}"
    )
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"), config)
    settings = ServerConfig(served_model_names=("gpt-5",), allowed_hosts=("Host.Docker.Internal",))
    with running_server(FakeEngine(), tokenizer, config=settings) as server, server.http() as http:
        http.tokenizer = tokenizer
        yield http


def prompt(http, **fields):
    answer = http.post(
        "/v1/chat/completions", json={**ASKED, "max_tokens": 1, "return_token_ids": True} | fields
    )
    assert answer.status_code == 200, answer.text
    return http.tokenizer.decode(answer.json()["prompt_token_ids"])


def test_effort_and_verbosity_reach_the_template(http):
    assert prompt(http) == "user:a;|||0"  # as transformers: only what a request sets
    assert prompt(http, reasoning_effort="low", verbosity="high") == "user:a;||low|high0"
    assert prompt(http, reasoning_effort="none") == "user:a;False|False|none|0", "thinking is off"
    assert prompt(http, enable_thinking=True) == "user:a;True|True||0"
    kwargs = {"reasoning_effort": "high"}
    assert prompt(http, reasoning_effort="low", chat_template_kwargs=kwargs) == "user:a;||high|0", (
        "the nearer one wins"
    )
    refused = http.post("/v1/completions", json={"prompt": "a", "reasoning_effort": "low"})
    assert refused.status_code == 400 and "only a chat" in refused.json()["error"]["message"]


def test_a_role_that_the_template_does_not_name_is_not_left_out(http):
    developer = [{"role": "developer", "content": "Be a wolf."}, *ASKED["messages"]]
    assert prompt(http, messages=developer).startswith("system:Be a wolf.;user:a;")
    assert prompt(http, messages=[{"role": "critic", "content": "b"}]).startswith("critic:b;"), (
        "the template knows it"
    )
    refused = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "wolf", "content": "b"}]}
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages.0.role", (
        "a word is not a role"
    )


def test_a_call_that_was_no_json_stays_in_the_history_as_text(http):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    messages = [*ASKED["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert prompt(http, messages=messages).startswith(
        'user:a;assistant:<tool_call>\n{"name": "f", "arguments": {"a'
    )


def test_allowed_tools_are_those_that_the_template_gets(http):
    def body(mode, *tools):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        return {**ASKED, "tools": [WEATHER, TIME], "tool_choice": choice}

    free, forced = (ChatBody.model_validate(body(mode, TIME)) for mode in ("auto", "required"))
    assert [tool["function"]["name"] for tool in free.callable_tools] == [
        "time"
    ] and not free.forced_tools
    assert [tool["function"]["name"] for tool in forced.forced_tools] == ["time"]
    unknown = {"type": "function", "function": {"name": "no"}}
    refused = http.post("/v1/chat/completions", json=body("auto", unknown))
    assert (
        refused.status_code == 400
        and "'tools' has weather, time" in refused.json()["error"]["message"]
    )


def test_every_chunk_has_the_usage_so_far(http):
    fields = {"stream": True, "max_tokens": 3, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    for wanted, alone in ((options, False), (options | {"continuous_usage_stats": False}, True)):
        answer = http.post(
            "/v1/chat/completions", json={**ASKED, **fields, "stream_options": wanted}
        )
        chunks = [
            json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
        assert (
            counts == sorted(counts)
            and (len(counts) == 1) is alone
            and (len(counts) == len(chunks)) is not alone
        )


def test_names_and_places_of_other_servers(http):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    for fields in (
        {"cache_prompt": True, "keep_alive": "5m", "num_ctx": 4096, "ttl": 60, "draft_model": "x"},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):
        assert http.post("/v1/chat/completions", json={**ASKED, **fields}).status_code == 200
    two = {"type": "json_schema", "json_schema": {"schema": schema}, "schema": schema}
    assert (
        http.post("/v1/chat/completions", json={**ASKED, "response_format": two}).status_code == 400
    )
    refused = http.post("/v1/chat/completions", json={**ASKED, "repeat_penalty": 1.1}).json()[
        "error"
    ]
    assert (
        refused["message"]
        == "'repeat_penalty' is not supported by this server: send repetition_penalty"
    )
    done = http.post(
        "/v1/completions", json={"prompt": "a", "max_completion_tokens": 2, "ignore_eos": True}
    )
    assert done.json()["usage"]["completion_tokens"] == 2


def test_tokens_and_words_reach_the_engine(server):
    with server.http() as real:
        fields = {
            "allowed_token_ids": [40, 41],
            "ignore_eos": True,
            "max_tokens": 12,
            "return_token_ids": True,
        }
        word = real.post("/detokenize", json={"tokens": [40]}).json()["prompt"]
        for path, prompt in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", ASKED)):
            for more, drawn in (({}, {40, 41}), ({"bad_words": [word]}, {41})):
                [choice] = real.post(path, json=prompt | fields | more).json()["choices"]
                assert set(choice["token_ids"]) <= drawn
        refused = real.post("/v1/completions", json={"prompt": "a", "allowed_token_ids": [99999]})
        assert (
            refused.status_code == 400 and refused.json()["error"]["param"] == "allowed_token_ids"
        )


def test_models_by_every_name_and_address(http):
    names = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert names == ["fake", "gpt-5"]
    assert (
        http.get("/v1/models/").json()["object"] == "list"
        and http.head("/v1/models").status_code == 200
    )
    missing = http.get("/v1/models/gpt-4")
    assert missing.status_code == 404 and isinstance(missing.json()["error"]["code"], str)


def test_a_client_can_take_the_template_and_render_by_itself(http):
    told = http.get("/tokenizer_info").json()
    assert told["chat_template"].startswith(SAYS) and told["eos_token"] == "<|im_end|>"


def test_a_container_is_let_in_by_its_name_and_a_refusal_says_how(http):
    assert http.get("/v1/models", headers={"Host": "host.docker.internal:8000"}).status_code == 200
    other = http.get("/v1/models", headers={"Host": "nas.local"})
    assert (
        other.status_code == 403
        and "'nas.local': add its name to server.allowed_hosts" in other.text
    )
    own = {"Host": "host.docker.internal:8000", "Origin": "http://host.docker.internal:8000"}
    assert http.post("/v1/completions", json={"prompt": "a"}, headers=own).status_code == 200, (
        "its own page posts"
    )
    assert http.get("/v1/models", headers=own | {"Origin": "http://nas.local"}).status_code == 403
    page = http.get("/v1/models", headers={"Origin": "app://obsidian.md"})
    assert page.status_code == 403 and "server.cors_origins" in page.json()["error"]["message"]


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
def test_the_key_in_other_headers(tiny_tokenizer, header):
    with (
        running_server(FakeEngine(), tiny_tokenizer, api_key="a-long-key") as server,
        server.http() as http,
    ):
        http.headers.pop("Authorization", None)
        assert http.get("/v1/models", headers={header: "a-long-key"}).status_code == 200
        assert http.get("/v1/models", headers={header: "another"}).status_code == 401
        wrong = {"Authorization": "Bearer another", header: "a-long-key"}
        assert http.get("/v1/models", headers=wrong).status_code == 401

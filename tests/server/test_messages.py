"""/v1/messages with the real anthropic client: blocks and events of scripted answers, errors in
Anthropic's shape."""

import json
from contextlib import contextmanager

import anthropic
import pytest
from pydantic import BaseModel

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.rollout_store.completions import KeptCompletions
from mlx_parallm.server import middleware
from tests.server.fake_engine import FakeEngine, TimeFromTheHang
from tests.server.scripted_answers import (
    HERMES_TEMPLATE,
    ScriptedEngine,
    prompt,
    script,
    tokenizer_with,
)
from tests.server.serving import running_server
from tests.server.test_rewards import LIMITS
from tests.server.test_tools import CALL, HERMES, SECOND

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "name": "weather",
        "description": "Wetter?",
        "input_schema": WEATHER,
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "add", "input_schema": {"type": "object"}},
]
THINKS = {"type": "enabled", "budget_tokens": 1024}
ANSWER = f"reason it out</think>\n\nI look. 🌧 {CALL}\n{SECOND}"


def asking(**fields):
    messages = [{"role": "user", "content": "Is it <think> raining?"}]
    return {"model": "default", "max_tokens": 100, "messages": messages} | fields


@contextmanager
def serving(tokenizer, engine=None, *, key="unused", deps=None, **settings):
    engine = engine or ScriptedEngine(tokenizer)
    config = ServerConfig(**settings)
    with (
        running_server(engine, tokenizer, config=config, **(deps or {})) as server,
        anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60) as client,
    ):
        client.engine, client.server = engine, server
        yield client


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_with(tmp_path_factory.mktemp("hermes"), HERMES, chat_template=HERMES_TEMPLATE)


@pytest.fixture(scope="module")
def client(tokenizer):
    with serving(tokenizer) as client:
        yield client


def saying(client, text, reason="stop"):
    return script(client, text, reason=reason).messages


def plain(message):
    """Without what differs from answer to answer."""
    kept = ("content", "role", "model", "stop_reason", "stop_sequence", "usage")
    told = {key: value for key, value in message.to_dict().items() if key in kept}
    return told | {"content": [block.to_dict() | {"id": ""} for block in message.content]}


def test_thinking_text_and_tools_whole_and_streamed(client, tokenizer):
    asked = asking(tools=TOOLS, thinking=THINKS, system=[{"type": "text", "text": "Be brief."}])
    whole = saying(client, ANSWER).create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, call, second = whole.content
    assert (thinking.thinking, text.text) == ("reason it out", "I look. 🌧") and thinking.signature
    assert (call.name, call.input, second.input) == ("weather", {"city": "Köln 🌧"}, {})
    assert (whole.stop_reason, whole.role, whole.model) == ("tool_use", "assistant", "fake")
    assert (
        whole.usage.input_tokens
        == client.messages.count_tokens(
            **{key: value for key, value in asked.items() if key != "max_tokens"}
        ).input_tokens
    )

    with client.messages.stream(**asked) as stream:
        events = [
            event
            for event in stream
            if event.type not in ("text", "thinking", "input_json", "signature")
        ]
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [event.type for event in events]
    assert [
        kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before
    ] == [
        "message_start",
        *block * 4,
        "message_delta",
        "message_stop",
    ]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas.count("text_delta") > 5 and {
        "thinking_delta",
        "signature_delta",
        "input_json_delta",
    } < {*deltas}
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens
    with client.server.http() as http:
        raw = http.post("/v1/messages", json=asked | {"stream": True}).text
    assert "event: ping\n" in raw and "[DONE]" not in raw


def test_the_next_turn_has_the_same_words(client, tokenizer):
    first = saying(client, ANSWER).create(**asking(tools=TOOLS, thinking=THINKS))
    opening = prompt(client, tokenizer)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": first.content[2].id,
            "content": [{"type": "text", "text": "wet"}],
        },
        {"type": "tool_result", "tool_use_id": first.content[3].id, "is_error": True},
        {"type": "text", "text": "Hurry.", "cache_control": {"type": "ephemeral"}},
    ]
    own = [block.to_dict() for block in first.content]
    turns = [{"role": "assistant", "content": own}, {"role": "user", "content": results}]
    asked = asking(tools=TOOLS, thinking=THINKS)
    saying(client, "Yes.").create(**asked | {"messages": asked["messages"] + turns})
    said = prompt(client, tokenizer)
    assert said.startswith(opening.removesuffix("<think>\n") + "reason it outI look. 🌧<tool_call>")
    assert said.endswith(
        "</tool_call><|im_end|>\n<|im_start|>tool of weather\nwet<|im_end|>\n<|im_start|>tool of"
        " add\n<|im_end|>\n"
        "<|im_start|>user\nHurry.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    begun = [*asked["messages"], {"role": "assistant", "content": "It is"}]
    client.messages.create(**asked | {"messages": begun, "thinking": {"type": "disabled"}})
    assert prompt(client, tokenizer).endswith("<|im_start|>assistant\nIt is"), (
        "a last assistant message is gone on with"
    )


def test_how_an_answer_ends(client):
    cut = saying(client, "half an ans", reason="length").create(**asking())
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    saying(client, "half").create(
        **asking(stop_sequences=["x"], extra_body={"temperature": 0.5, "top_k": 3})
    )
    params = client.engine.asked[-1].params
    assert (params.stop, params.temperature, params.top_k, params.max_tokens) == (
        ("x",),
        0.5,
        3,
        100,
    )
    assert saying(client, "").create(**asking()).content == []


def test_a_tool_choice_forces_by_the_chats_grammar(client):
    def source(**choice):
        answer = saying(
            client, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
        ).create(**asking(tools=TOOLS, tool_choice=choice, thinking={"type": "disabled"}))
        structure = client.engine.asked[-1].params.structure
        return answer, structure and structure.source

    for choice, both in (({"type": "any"}, True), ({"type": "tool", "name": "add"}, False)):
        answer, schema = source(**choice)
        assert [block.name for block in answer.content] == ["add"] and ("weather" in schema) is both
        assert ("call)*" in schema) is both
    assert "call)*" not in source(type="any", disable_parallel_tool_use=True)[1]
    for free in ("auto", "none"):
        answer, schema = source(type=free)
        assert schema is None and answer.content[0].type == (
            "text" if free == "none" else "tool_use"
        )
    asked = asking(
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": WEATHER}}
    )
    saying(client, 'hm</think>{"city": "Bonn"}').create(**asked)
    assert json.loads(client.engine.asked[-1].params.structure.parts[-1].source) == WEATHER


HELLO = {"role": "user", "content": "Hello"}


def called(*ids):
    blocks = [{"type": "tool_use", "id": name, "name": "add", "input": {}} for name in ids]
    return {"role": "assistant", "content": blocks}


def resulted(*ids, text="Go on."):
    blocks = [{"type": "tool_result", "tool_use_id": name, "content": "3"} for name in ids]
    return {"role": "user", "content": [*blocks, {"type": "text", "text": text}]}


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": IMAGE}, "messages.0.content.0: this server takes no block of type 'image'"),
        ({"messages": [{"role": "wolf", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        # Calls and results belong together, as Anthropic's own servers want it.
        (
            {"messages": [resulted("a")]},
            "messages.0.content.0.tool_use_id: 'a' answers no tool_use block",
        ),
        (
            {"messages": [HELLO, called("a"), resulted("a", "b")]},
            "messages.2.content.1.tool_use_id: 'b'",
        ),
        ({"messages": [HELLO, called("a"), resulted("a", "a")]}, "each is answered once"),
        (
            {"messages": [HELLO, called("a"), resulted("a"), called("b"), resulted("a")]},
            "messages.4.content.0",
        ),
        (
            {"messages": [HELLO, called("a", "b"), resulted("a")]},
            "messages.2: the tool_use blocks before it have no",
        ),
        (
            {"messages": [HELLO, called("a"), HELLO, called("b"), resulted("b")]},
            "messages.3: the tool_use blocks",
        ),
        (
            {"messages": [called("a"), {"role": "assistant", "content": resulted("a")["content"]}]},
            "'tool_result' here",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "not 'web_search_20250305'",
        ),
        ({"tool_choice": {"type": "any"}}, "needs 'tools'"),
        ({"mcp_servers": [{"name": "m"}]}, "'mcp_servers' is not supported"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "edits no context",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema",
        ),
        ({"n": 2}, "'n' must be 1"),
        ({"wolf": 2}, "'wolf'"),
        ({"max_tokens": None}, "missing required argument: 'max_tokens'"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_refused_is_named_in_anthropics_shape(
    tiny_engine, tiny_tokenizer, refusing, body, words
):
    answer = refusing.post("/v1/messages", json=asking() | body)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert words in told["error"]["message"]


@pytest.fixture(scope="module")
def refusing(tiny_engine, tiny_tokenizer):
    with running_server(tiny_engine.client, tiny_tokenizer) as server, server.http() as http:
        yield http


def test_every_layers_errors_raise_the_clients_own_classes(tiny_tokenizer, monkeypatch):
    with serving(tiny_tokenizer, FakeEngine(), deps={"api_key": "sk-right"}) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**asking())
        assert caught.value.body["error"]["type"] == "authentication_error"
        good = client.with_options(
            api_key="sk-right", default_headers={"anthropic-version": "2023-06-01"}
        )
        assert good.messages.create(**asking(max_tokens=3)).stop_reason == "max_tokens"
        with pytest.raises(anthropic.NotFoundError) as missing:
            good.messages.create(**asking(model="claude-fable-5"))
        assert missing.value.body["error"]["type"] == "not_found_error"
    with (
        serving(tiny_tokenizer, FakeEngine("unavailable")) as client,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        client.messages.create(**asking(stream=True))
    assert caught.value.body["error"]["type"] == "overloaded_error"
    for behaviour, seconds, kind in (("crash", 0.0, "api_error"), ("hang", 0.05, "timeout_error")):
        engine = FakeEngine(behaviour)
        monkeypatch.setattr(middleware, "asyncio", TimeFromTheHang(engine))
        with serving(tiny_tokenizer, engine, request_timeout_s=seconds) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                list(client.messages.create(**asking(stream=True)))
            assert caught.value.body["error"]["type"] == kind and "secret" not in str(caught.value)


class Right(BaseModel):
    ok: bool


def test_the_real_engine_answers_as_a_chat_and_takes_rewards_by_id(
    tiny_engine, tiny_tokenizer, store
):
    kept = KeptCompletions(store, **LIMITS)
    with serving(tiny_tokenizer, tiny_engine.client, deps={"completions": kept}) as client:
        asked = asking(messages=[{"role": "user", "content": "Sum: 2+3"}], max_tokens=6)
        with client.server.openai() as openai:
            chat = openai.chat.completions.create(
                **asked, temperature=0, extra_body={"return_token_ids": True}
            )
        asked |= {"extra_body": {"return_token_ids": True, "temperature": 0}}
        whole = client.messages.create(**asked)
        *_, delta, _ = client.messages.create(stream=True, **asked)
        assert whole.content[0].text == chat.choices[0].message.content
        for answer in (whole, delta):
            assert (
                answer.token_ids == chat.choices[0].token_ids
                and answer.prompt_token_ids == chat.prompt_token_ids
            )
            assert answer.weight_versions == chat.choices[0].weight_versions
        counted = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        assert counted == len(chat.prompt_token_ids) and whole.usage.output_tokens == len(
            whole.token_ids
        )
        parsed = client.messages.parse(**asked | {"max_tokens": 60, "output_format": Right})
        assert isinstance(parsed.parsed_output, Right)
        stopped = client.messages.create(**asked | {"stop_sequences": [whole.content[0].text[1]]})
        assert (stopped.stop_reason, stopped.stop_sequence) == (
            "stop_sequence",
            whole.content[0].text[1],
        )
        with client.server.http() as http:
            ids = [whole.id, stopped.id]
            assert http.post("/v1/rewards", json={"ids": ids, "rewards": [0, 1]}).status_code == 200
        assert [len(group.rollouts) for group in store.waiting()] == [2]

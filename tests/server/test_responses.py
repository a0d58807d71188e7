"""/v1/responses with the real openai client: scripted answers, and what only the real engine
shows."""

import json
from contextlib import contextmanager

import httpx
import openai
import pytest
from pydantic import BaseModel

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.rollout_store.completions import KeptCompletions
from mlx_parallm.server import middleware
from mlx_parallm.server.responses.output import TextLogprobs
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
        "type": "function",
        "name": "weather",
        "description": "Wetter?",
        "parameters": WEATHER,
        "strict": True,
    },
    {"type": "function", "name": "add", "parameters": None, "strict": False},
]
THINKS = {"enable_thinking": True}
ANSWER = f"reason it out</think>\n\nI look. 🌧 {CALL}\n{SECOND}"
IDS = (
    "id",
    "call_id",
    "item_id",
    "created_at",
    "completed_at",
    "response",
    "parsed_arguments",
    "parsed",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_with(tmp_path_factory.mktemp("hermes"), HERMES, chat_template=HERMES_TEMPLATE)


@contextmanager
def serving(tokenizer, engine=None, **settings):
    engine = engine or ScriptedEngine(tokenizer)
    config = ServerConfig(**settings)
    with running_server(engine, tokenizer, config=config) as server, server.openai() as client:
        client.engine, client.server = engine, server
        yield client


@pytest.fixture(scope="module")
def client(tokenizer):
    with serving(tokenizer) as client:
        yield client


def saying(client, text, reason="stop"):
    return script(client, text, reason=reason).responses


def plain(value):
    """Without what differs from answer to answer."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return (
        {k: plain(v) for k, v in value.items() if k not in IDS}
        if isinstance(value, dict)
        else value
    )


def refused(client, **body):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**({"model": "default", "input": "a"} | body))
    return caught.value


def test_reasoning_text_and_calls_whole_and_streamed(client):
    asked = {
        "model": "default",
        "input": "Is it <think> raining?",
        "tools": TOOLS,
        "extra_body": THINKS,
    }
    asked |= {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    whole = saying(client, ANSWER).create(**asked)
    reasoning, message, call, second = whole.output
    assert reasoning.content[0].text == "reason it out" and whole.output_text == "I look. 🌧"
    assert (call.name, json.loads(call.arguments)) == (
        "weather",
        {"city": "Köln 🌧"},
    ) and second.arguments == "{}"
    assert whole.status == "completed" and {item.status for item in whole.output} == {"completed"}
    assert b"".join(bytes(e.bytes) for e in message.content[0].logprobs) == "I look. 🌧".encode()
    count = len(client.engine._tokenizer.encode("reason it out</think>", add_special_tokens=False))
    assert whole.usage.output_tokens_details.reasoning_tokens == count
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens

    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert plain(final.to_dict()) == plain(whole.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    opened = ["response.output_item.added", "response.content_part.added"]
    closed = ["response.content_part.done", "response.output_item.done"]
    function = [f"response.function_call_arguments.{end}" for end in ("delta", "done")]
    expected = ["response.created", "response.in_progress"]
    expected += [*opened, "response.reasoning_text.delta", "response.reasoning_text.done", *closed]
    expected += [*opened, "response.output_text.delta", "response.output_text.done", *closed]
    expected += [opened[0], *function, closed[1]] * 2 + ["response.completed"]
    kinds = [event.type for event in events]
    assert [
        kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before
    ] == expected
    text = [event for event in events if event.type == "response.output_text.delta"]
    assert len(text) > 5 and "".join(event.delta for event in text) == whole.output_text
    assert [e.model_dump() for event in text for e in event.logprobs] == [
        e.model_dump() for e in final.output[1].content[0].logprobs
    ]


def test_reasoning_as_a_summary_where_the_client_wants_one(client):
    asked = {
        "model": "default",
        "input": "a",
        "reasoning": {"summary": "auto"},
        "extra_body": THINKS,
    }
    whole = saying(client, "why</think>b").create(**asked)
    assert whole.output[0].summary[0].text == "why" and whole.output[0].content is None
    kinds = [event.type for event in client.responses.create(stream=True, **asked)]
    at = kinds.index("response.reasoning_summary_part.added")
    ends = ["response.reasoning_summary_text.done", "response.reasoning_summary_part.done"]
    assert kinds[at + 1] == "response.reasoning_summary_text.delta" and set(ends) < set(kinds[at:])


def test_a_conversation_goes_on_by_id_by_items_and_by_reference(client, tokenizer):
    asked = {
        "model": "default",
        "tools": TOOLS,
        "extra_body": THINKS,
        "include": ["reasoning.encrypted_content"],
    }
    first = saying(client, ANSWER).create(input="Rain?", **asked)
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "wet"}
    saying(client, "</think>Yes.")
    second = client.responses.create(input=[output], previous_response_id=first.id, **asked)
    by_id = prompt(client, tokenizer)
    assert (
        "reason it outI look. 🌧<tool_call>" in by_id
        and "<|im_start|>tool of weather\nwet<|im_end|>" in by_id
    )
    question = {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}
    items = [item.to_dict() for item in first.output]
    sealed = [{key: value for key, value in item.items() if key != "content"} for item in items[:1]]
    named = [{"id": item["id"]} for item in items]
    for own in (
        items,
        [*sealed, *items[1:]],
        named,
        [{"type": "item_reference", **each} for each in named],
    ):
        client.responses.create(input=[question, *own, output], **asked)
        assert prompt(client, tokenizer) == by_id
    kept = client.responses.retrieve(second.id)
    assert kept.output_text == "Yes." and kept.previous_response_id == first.id
    pages = client.responses.input_items.list(second.id, limit=2, order="asc")
    assert [item.type for item in pages] == [
        "message",
        "reasoning",
        "message",
        *["function_call"] * 2,
        output["type"],
    ]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    assert refused(client, previous_response_id=second.id).code == "previous_response_not_found"
    unstored = client.responses.create(model="default", input="a", store=False)
    assert refused(client, previous_response_id=unstored.id).param == "previous_response_id"
    assert (
        refused(client, input=[{"type": "item_reference", "id": "rs_1"}]).code == "item_not_found"
    )


def test_the_oldest_response_makes_room(tokenizer):
    with serving(tokenizer, stored_responses_bytes=6000) as client:
        ids = [saying(client, "b").create(model="default", input="a" * 1000).id for _ in range(4)]
        error = refused(client, previous_response_id=ids[0])
        assert "server.stored_responses_bytes = 6000" in error.message
        assert client.responses.retrieve(ids[-1]).id == ids[-1]
        assert saying(client, "b").create(model="default", input="a" * 6000).status == "completed"
        assert client.responses.retrieve(ids[-1]).id == ids[-1], (
            "one that fits alone nowhere pushes nothing out"
        )


def test_custom_tools_and_namespaces_keep_their_names(client, tokenizer):
    patch = {
        "type": "custom",
        "name": "patch",
        "description": "Edits.",
        "format": {"type": "grammar"},
    }
    patch["format"] |= {"syntax": "lark", "definition": 'start: "*** Begin"'}
    inside = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}
    tools = [patch, {"type": "namespace", "name": "sky", "description": "", "tools": [inside]}]
    text = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin \\"x\\""}}</tool_call>'
    text += '<tool_call>{"name": "sky__weather", "arguments": {"city": "Ulm"}}</tool_call>'
    whole = saying(client, text).create(model="default", input="a", tools=tools)
    custom, call = whole.output
    assert (custom.type, custom.name, custom.input) == (
        "custom_tool_call",
        "patch",
        '*** Begin "x"',
    )
    assert (call.name, call.namespace) == ("weather", "sky")
    asked = prompt(client, tokenizer)
    assert "*** Begin" in asked and '"name": "sky__weather"' in asked
    streamed = list(client.responses.create(model="default", input="a", tools=tools, stream=True))
    [delta] = [event for event in streamed if event.type == "response.custom_tool_call_input.delta"]
    assert delta.delta == custom.input and plain(streamed[-1].response.to_dict()) == plain(
        whole.to_dict()
    )
    output = {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "done"}
    again = [item.to_dict() for item in whole.output]
    client.responses.create(model="default", input=[*again, output], tools=tools)
    asked = prompt(client, tokenizer)
    assert (
        '{"name": "patch", "arguments": {"input": "*** Begin \\"x\\""}}' in asked
        and "tool of patch\ndone" in asked
    )
    assert '{"name": "sky__weather"' in asked


def test_a_tool_choice_forces_by_the_chats_grammar(client):
    for choice in (
        {"type": "function", "name": "add"},
        "required",
        {"type": "allowed_tools", "mode": "required"},
    ):
        choice = choice | {"tools": [TOOLS[1]]} if "mode" in choice else choice
        call = '</think><tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
        whole = saying(client, call).create(
            model="default", input="a", tools=TOOLS, tool_choice=choice
        )
        assert [item.name for item in whole.output if item.type == "function_call"] == ["add"]
        source = client.engine.asked[-1].params.structure.source
        assert "add" in source and ("weather" in source) is (choice == "required")


def test_codex_offer_of_a_search_is_left_out_and_shown_to_be(client, tokenizer):
    offered = [{"type": "web_search", "external_web_access": False}, TOOLS[1]]
    whole = saying(client, "b").create(model="default", input="a", tools=offered)
    assert [tool.type for tool in whole.tools] == ["function"] and "web_search" not in prompt(
        client, tokenizer
    )


def test_what_ends_an_answer_early(client):
    whole = saying(client, "half an ans", reason="length").create(
        model="default", input="a", max_output_tokens=9
    )
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete" and client.engine.asked[-1].params.max_tokens == 9
    events = list(client.responses.create(model="default", input="a", stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "incomplete"
    empty = saying(client, "").create(model="default", input="a")
    assert empty.output_text == "" and len(empty.output) == 1


OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "3"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0",
            "input_image",
        ),
        (
            {"input": [{"type": "web_search_call", "id": "ws"}]},
            "input.0",
            "no item of type 'web_search_call'",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input.0",
            "call_id",
        ),
        ({"input": [OUTPUT]}, "input.0.call_id", "no call before this output has the id 'c'"),
        (
            {
                "input": [
                    OUTPUT,
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                ]
            },
            "input.0.call_id",
            "no call before",
        ),
        ({"input": [{"role": "wolf", "content": "a"}]}, "input.0.role", "'wolf'"),
        ({"input": []}, "input", "must not be empty"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"tools": [{"type": "file_search"}]}, "tools.0", "not 'file_search'"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
        ({"tool_choice": {"type": "mcp"}, "tools": TOOLS}, "tool_choice", "'mcp'"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
            "needs it",
        ),
        ({"extra_body": {"n": 2}}, "n", "must be 1"),
        ({"extra_body": {"wolf": 2}}, "wolf", "unrecognized"),
        ({"include": ["wolf"]}, "include", "message.output_text.logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
    ],
)
def test_what_is_refused_is_named(client, body, param, words):
    error = refused(client, **body)
    assert error.param is not None and error.param.startswith(param) and words in error.message


def test_what_no_json_text_holds_is_refused_where_it_would_be_repeated(client):
    deep = f'{{"input": "a", "metadata": {{"a": {"[" * 950}{"]" * 950}}}}}'
    half = json.dumps({"input": "a", "metadata": {"a": "\ud800"}})
    with client.server.http(headers={"Content-Type": "application/json"}) as http:
        for body, words in ((deep, "nested too deeply"), (half, "lone surrogate")):
            answer = http.post("/v1/responses", content=body)
            assert answer.status_code == 400 and words in answer.text


def test_a_failure_has_its_status_before_the_stream_and_its_event_in_it(
    tiny_tokenizer, monkeypatch
):
    with (
        serving(tiny_tokenizer, FakeEngine("unavailable")) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.responses.create(model="default", input="a", stream=True)
    with serving(tiny_tokenizer, FakeEngine("crash")) as client:
        events = list(client.responses.create(model="default", input="a", stream=True))
        assert events[-1].type == "error" and "secret" not in events[-1].message
    engine = FakeEngine("hang")
    monkeypatch.setattr(middleware, "asyncio", TimeFromTheHang(engine))
    with serving(tiny_tokenizer, engine, request_timeout_s=0.05) as client:
        last = list(client.responses.create(model="default", input="a", stream=True))[-1]
        assert (last.type, last.code) == ("error", "timeout")


class Right(BaseModel):
    ok: bool


def test_the_real_engine_parses_cancels_and_takes_rewards_by_id(tiny_engine, tiny_tokenizer, store):
    kept = KeptCompletions(store, **LIMITS)
    with (
        running_server(tiny_engine.client, tiny_tokenizer, completions=kept) as server,
        server.openai() as client,
    ):
        asked = {"model": "default", "input": "Sum: 2+3", "max_output_tokens": 60, "temperature": 0}
        parsed = client.responses.parse(text_format=Right, **asked)
        assert isinstance(parsed.output_parsed, Right)
        chat = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Sum: 2+3"}],
            max_tokens=6,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        asked |= {"max_output_tokens": 6, "extra_body": {"return_token_ids": True}}
        whole = client.responses.create(**asked)
        *_, last = client.responses.create(stream=True, **asked)
        for answer in (whole, last.response):
            assert answer.output_text == chat.choices[0].message.content
            assert answer.prompt_token_ids == chat.prompt_token_ids
            assert answer.token_ids == chat.choices[0].token_ids
            assert answer.weight_versions == chat.choices[0].weight_versions
        given = client.post(
            "/rewards",
            body={"ids": [whole.id, last.response.id], "rewards": [0, 1]},
            cast_to=object,
        )
        assert given["groups"] and [len(group.rollouts) for group in store.waiting()] == [2]
        endless = {
            "model": "default",
            "input": "a",
            "stream": True,
            "extra_body": {"ignore_eos": True},
        }
        stream = client.responses.create(**endless)
        running = next(stream).response
        assert client.responses.retrieve(running.id).status == "in_progress"
        assert client.responses.cancel(running.id).status == "cancelled"
        *_, end = stream
        assert (end.type, end.response.status) == ("response.incomplete", "cancelled")
        with pytest.raises(openai.ConflictError):
            client.responses.cancel(running.id)
        count = client.responses.input_tokens.count(model="default", input="Sum: 2+3")
        assert count.input_tokens == len(chat.prompt_token_ids)


def test_tokens_of_a_text_are_found_among_markers_and_reasoning():
    entries = [
        {"bytes": list(token.encode())} for token in ("a", "b", "</think>", "a", "b!", "<|im_end|>")
    ]
    found = TextLogprobs()
    found.feed(entries)
    found.take("ab")
    assert (
        found.take("a") == entries[3:4]
        and found.take("b") == entries[4:5]
        and found.take("!") == []
    )
    assert found.take("elsewhere") == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("responses", {"input": [{"role": "user", "content": [{"type": ["x"], "text": "a"}]}]}),
        ("responses", {"input": "a", "tools": [{"type": "custom", "name": "a", "format": "text"}]}),
        ("messages", {"max_tokens": 5, "context_management": {"edits": [{"type": 5}]}}),
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": "DEEP"},
                }
            },
        ),
    ],
)
def test_odd_bodies_are_refused(client, path, fields):
    messages = {} if path == "responses" else {"messages": [{"role": "user", "content": "a"}]}
    deep = '{"items":' * 951 + "{}" + "}" * 951
    text = json.dumps({"model": "default"} | fields | messages).replace('"DEEP"', deep)
    answer = httpx.post(
        f"{client.server.url}/v1/{path}",
        content=text,
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400, answer.text


def test_an_item_is_named_once(client):
    asked = saying(client, "b")
    first = asked.create(
        model="default",
        input=[{"type": "message", "role": "user", "content": "a", "id": "msg_x"}],
    )
    assert first.status == "completed"
    reference = {"type": "item_reference", "id": "msg_x"}
    assert asked.create(model="default", input=[reference]).status == "completed"
    assert "named twice" in str(refused(client, input=[reference, reference]))


def test_half_a_character_in_an_answer_is_sent_as_an_escape(tokenizer):
    call = json.dumps({"name": "look", "arguments": {"q": "\ud83d"}})
    text = f"<tool_call>\n{call}\n</tool_call>"
    tool = {"name": "look", "input_schema": {"type": "object"}}
    with serving(tokenizer) as client:
        saying(client, text)
        body = {
            "model": "default",
            "max_tokens": 50,
            "messages": [{"role": "user", "content": "a"}],
            "tools": [tool],
        }
        answer = httpx.post(f"{client.server.url}/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.content)["content"][0]["input"] == {"q": "\ud83d"}

"""/v1/chat/completions with the real `openai` client against a real engine on the shipped model."""

import asyncio
import json

import pytest
from openai import AsyncOpenAI, BadRequestError

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from tests.server.fake_engine import FakeEngine
from tests.server.serving import flat, running_server

MESSAGES = [{"role": "user", "content": "12 + 7 ="}]
EXTRA = {
    "return_token_ids",
    "ignore_eos",
    "return_tokens_as_token_ids",
    "continue_final_message",
    "chat_template_kwargs",
}
EXTRA |= {"add_generation_prompt", "prompt_logprobs"}


def create(client, messages=MESSAGES, **fields):
    extra = {key: fields.pop(key) for key in list(fields) if key in EXTRA}
    return client.chat.completions.create(
        model="default", messages=messages, extra_body=extra, **fields
    )


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 4, "n": 2, "temperature": 0.9}])
def test_a_stream_adds_up_to_the_whole_answer(client, fields):
    fields |= {"logprobs": True, "top_logprobs": 2, "max_tokens": 24, "return_token_ids": True}
    whole = create(client, **fields)
    chunks = list(create(client, stream=True, stream_options={"include_usage": True}, **fields))
    last = chunks.pop()
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == ""
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert flat(getattr(part, "token_ids", []) for part in mine) == choice.token_ids
        entries = flat(part.logprobs.content for part in mine if part.logprobs)
        assert entries == choice.logprobs.content
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
        assert mine[-1].weight_versions == choice.weight_versions
    assert [chunk.policy_version for chunk in chunks if hasattr(chunk, "policy_version")] == [
        whole.policy_version
    ] * len(whole.choices)


def test_logprob_entries_have_token_bytes_and_alternatives(client):
    choice = create(
        client, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3, return_token_ids=True
    ).choices[0]
    assert len(choice.logprobs.content) == len(choice.token_ids)
    for entry in choice.logprobs.content:
        assert bytes(entry.bytes).decode() == entry.token and entry.logprob <= 0
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    plain = create(
        client, temperature=0, max_tokens=6, logprobs=True, return_tokens_as_token_ids=True
    ).choices[0]
    assert [entry.token for entry in plain.logprobs.content] == [
        f"token_id:{token}" for token in choice.token_ids
    ]
    assert all(entry.top_logprobs == [] for entry in plain.logprobs.content)


def test_the_answer_ends_with_its_eos_in_the_ids_and_not_in_the_text(client, tiny_tokenizer):
    choice = create(client, temperature=0, max_tokens=60, return_token_ids=True).choices[0]
    assert choice.finish_reason == "stop" and choice.token_ids[-1] in tiny_tokenizer.eos_token_ids
    assert choice.message.content == tiny_tokenizer.decode(choice.token_ids)
    assert "<|im_end|>" not in choice.message.content


def test_without_a_limit_the_context_is_filled(client, server):
    answer = create(client, ignore_eos=True)
    assert (
        answer.usage.total_tokens == server.engine.max_model_len
        and answer.choices[0].finish_reason == "length"
    )


def test_either_name_of_the_limit_counts(client):
    assert create(client, max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
    assert create(client, max_completion_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_the_prompt_is_the_rendered_chat(client, server, tiny_tokenizer):
    rendered = tiny_tokenizer.render_chat(MESSAGES)
    assert create(client, max_tokens=1, return_token_ids=True).prompt_token_ids == rendered
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "12 + "}, {"type": "text", "text": "7 ="}],
        }
    ]
    assert create(client, parts, max_tokens=1, return_token_ids=True).prompt_token_ids == rendered
    with server.http() as http:
        body = {"messages": MESSAGES, "return_token_strs": True}
        for prefix in ("", "/v1"):
            tokenized = http.post(f"{prefix}/tokenize", json=body).json()
            assert tokenized["tokens"] == rendered and tokenized["count"] == len(rendered)
            assert "".join(tokenized["token_strs"]) == tiny_tokenizer.render_chat_text(MESSAGES)
            assert tokenized["max_model_len"] == server.engine.max_model_len


def test_a_trailing_assistant_message_is_continued_only_when_asked(client, tiny_tokenizer):
    messages = [*MESSAGES, {"role": "assistant", "content": "1"}]
    closed = create(client, messages, max_tokens=1, return_token_ids=True).prompt_token_ids
    assert tiny_tokenizer.decode(closed, skip_special_tokens=False).endswith(
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    opened = create(
        client, messages, max_tokens=1, return_token_ids=True, continue_final_message=True
    )
    assert tiny_tokenizer.decode(opened.prompt_token_ids, skip_special_tokens=False).endswith(
        "assistant\n1"
    )
    bare = create(
        client, max_tokens=1, return_token_ids=True, add_generation_prompt=False
    ).prompt_token_ids
    assert tiny_tokenizer.decode(bare, skip_special_tokens=False).endswith("=<|im_end|>\n")


def test_template_arguments_come_from_the_request_and_the_configuration():
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ style }}"
    config = ModelConfig(base_path="builtin:tiny", chat_template=template)
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"), config)
    defaults = {"enable_thinking": False, "style": "a"}
    with (
        running_server(FakeEngine(), tokenizer, chat_template_kwargs=defaults) as server,
        server.http() as http,
    ):
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"style": "b"},
        }
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        assert tokenizer.decode(tokens) == "x|False|b"
        header = "X-Unread-Template-Arguments"
        assert header not in http.post("/v1/chat/completions", json=body).headers
        body["chat_template_kwargs"] |= {"tone": "ü"}
        body |= {"verbosity": "low", "reasoning_effort": "none"}  # "none" is enable_thinking too
        for streamed in (False, True):
            answer = http.post("/v1/chat/completions", json=body | {"stream": streamed})
            assert answer.headers[header] == "verbosity, chat_template_kwargs.tone", answer.text


def test_an_error_that_quotes_half_a_character_can_be_sent():
    config = ModelConfig(
        base_path="builtin:tiny", chat_template="{{ raise_exception(messages[0].role) }}"
    )
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"), config)
    with running_server(FakeEngine(), tokenizer) as server, server.http() as http:
        body = json.dumps({"messages": [{"role": "\ud800", "content": "a"}]})
        answer = http.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400 and "\\ud800" in answer.json()["error"]["message"]


def test_chat_without_a_template_is_a_clear_error(tiny_tokenizer):
    class Templateless:
        def __getattr__(self, name):
            return False if name == "has_chat_template" else getattr(tiny_tokenizer, name)

        def render_chat(self, messages, **options):
            return type(tiny_tokenizer).render_chat(self, messages, **options)

        def render_chat_text(self, messages, **options):
            return type(tiny_tokenizer).render_chat_text(self, messages, **options)

    with running_server(FakeEngine(), Templateless()) as server, server.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


REFUSED = {
    "no messages": ({"messages": []}, "messages"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content.0",
    ),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "logprobs as a count": ({"logprobs": 5}, "logprobs"),
    "both prompts": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
    ),
    "nothing to continue": ({"continue_final_message": True}, "continue_final_message"),
    "unknown": ({"max_new_tokens": 5}, "max_new_tokens"),
    "messages of the template": (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
    ),
    "tools of the template": ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    "own template": (
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs",
    ),
}


@pytest.mark.parametrize("fields, param", REFUSED.values(), ids=REFUSED.keys())
def test_a_request_that_cannot_be_honoured_is_a_400_naming_the_field(server, fields, param):
    with server.http() as http:
        # httpx would refuse to encode half a character
        body = json.dumps({"messages": MESSAGES} | fields)
        answer = http.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_long_chat_is_a_400_that_says_so(client):
    with pytest.raises(BadRequestError, match="maximum context length"):
        create(client, [{"role": "user", "content": "1 2 3 " * 500}])


async def test_many_clients_at_once_are_all_answered(server):
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:

        async def ask(number):
            messages = [{"role": "user", "content": f"{number} + {number} ="}]
            fields = {"model": "default", "messages": messages, "max_tokens": 12, "temperature": 0}
            if number % 2:
                return (await client.chat.completions.create(**fields)).choices[0].message.content
            stream = await client.chat.completions.create(stream=True, **fields)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*(ask(number) for number in range(32)))
        alone = [await ask(number) for number in (3, 4)]
    assert together[3:5] == alone and len(set(together)) > 5

"""One conversation through /v1/chat/completions, /v1/responses and /v1/messages has the same prompt
tokens.

Conversations are generated in the chat's words; `as_items` and `as_blocks` say them as clients of
the other APIs do.
"""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.server.generation import encode_conversation
from mlx_parallm.server.messages.body import MessagesBody
from mlx_parallm.server.protocol.openai import ChatBody
from mlx_parallm.server.responses.body import ResponsesBody
from tests.server.scripted_answers import HERMES_TEMPLATE, ScriptedEngine, tokenizer_with
from tests.server.serving import running_server
from tests.server.test_tools import HERMES

TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ["<think>", "</tool_call>\n", " \n", "{"]
)
SAID = TEXT.filter(bool)
NAMES = ("weather", "add", "search_files")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=3)


@st.composite
def answers(draw):
    """An assistant's message and the results of its calls."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3))
    calls = [
        {
            "id": f"call{number}{draw(st.integers(0, 99))}",
            "function": {"name": name, "arguments": draw(ARGUMENTS)},
        }
        for number, name in enumerate(names)
    ]
    said = {"role": "assistant", "content": draw(TEXT if calls else SAID)}
    if reasoning := draw(TEXT):
        said["reasoning"] = reasoning
    if calls:
        said["tool_calls"] = calls
    return [
        said,
        *({"role": "tool", "tool_call_id": call["id"], "content": draw(TEXT)} for call in calls),
    ]


@st.composite
def conversations(draw):
    messages = [{"role": "user", "content": draw(TEXT)}]
    for answer in draw(st.lists(answers(), max_size=3)):
        messages += answer
        if "tool_calls" not in answer[0] or draw(st.booleans()):
            messages.append(
                {"role": "user", "content": draw(st.lists(SAID, min_size=1, max_size=3) | TEXT)}
            )
    tools = [
        {
            "name": name,
            "description": draw(TEXT),
            "parameters": {"type": "object", "properties": {"a": {}}},
        }
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]
    return draw(st.none() | SAID), messages, tools, draw(st.sampled_from([None, "low", "none"]))


def as_chat(system, messages, tools, effort):
    first = [] if system is None else [{"role": "system", "content": system}]
    said = []
    for message in messages:
        content, calls = message["content"], message.get("tool_calls", ())
        if isinstance(content, list):
            content = [{"type": "text", "text": text} for text in content]
        function = [
            {**c["function"], "arguments": json.dumps(c["function"]["arguments"])} for c in calls
        ]
        written = [
            {**c, "type": "function", "function": f} for c, f in zip(calls, function, strict=True)
        ]
        said.append({**message, "content": content} | ({"tool_calls": written} if written else {}))
    functions = [{"type": "function", "function": tool} for tool in tools]
    return {"messages": first + said, "tools": functions, "reasoning_effort": effort}


def as_items(system, messages, tools, effort):
    items = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": content,
                }
            )
            continue
        if "reasoning" in message:
            part = {"type": "reasoning_text", "text": message["reasoning"]}
            items.append({"type": "reasoning", "id": "rs", "summary": [], "content": [part]})
        if content or "tool_calls" not in message:
            kind = "output_text" if role == "assistant" else "input_text"
            parts = [
                {"type": kind, "text": text}
                for text in (content if isinstance(content, list) else [content])
            ]
            items.append({"type": "message", "role": role, "content": parts})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            said = {"name": function["name"], "arguments": json.dumps(function["arguments"])}
            items.append({"type": "function_call", "id": "fc", "call_id": call["id"], **said})
    functions = [{"type": "function", **tool} for tool in tools]
    return {
        "input": items,
        "instructions": system,
        "tools": functions,
        "reasoning": {"effort": effort},
    }


def as_blocks(system, messages, tools, effort):
    turns = []
    for message in messages:
        content = message["content"]
        texts = [
            {"type": "text", "text": text}
            for text in (content if isinstance(content, list) else [content])
        ]
        if message["role"] == "tool":
            block = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": content,
            }
            if turns[-1]["role"] == "assistant":
                turns.append({"role": "user", "content": []})
            turns[-1]["content"].append(block)
        elif message["role"] == "user" and turns and turns[-1]["role"] == "user":
            turns[-1]["content"] += texts  # after the results of tools
        else:
            blocks = (
                [{"type": "thinking", "thinking": message["reasoning"]}]
                if "reasoning" in message
                else []
            )
            blocks += texts if content or "tool_calls" not in message else []
            blocks += [
                {"type": "tool_use", "id": call["id"], **{"name": call["function"]["name"]}}
                | {"input": call["function"]["arguments"]}
                for call in message.get("tool_calls", ())
            ]
            turns.append({"role": message["role"], "content": blocks})
    schemas = [
        {"input_schema" if key == "parameters" else key: tool[key] for key in tool}
        for tool in tools
    ]
    return {
        "messages": turns,
        "system": system,
        "tools": schemas,
        "output_config": {"effort": effort},
        "max_tokens": 9,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = tokenizer_with(
        tmp_path_factory.mktemp("hermes"), HERMES, chat_template=HERMES_TEMPLATE
    )
    engine = ScriptedEngine(tokenizer)
    engine.max_model_len, engine.texts = 1 << 16, ("ok",)
    with running_server(engine, tokenizer) as server:
        yield server


def ids_of(context, chat):
    return asyncio.run(encode_conversation(context, chat)).token_ids


@pytest.mark.slow
@settings(max_examples=120, derandomize=True)
@given(conversation=conversations())
def test_three_apis_one_prompt(server, conversation):
    context = server.app.state.context
    chat = ChatBody.model_validate(as_chat(*conversation))
    expected = ids_of(context, chat)
    responses = ResponsesBody.model_validate(as_items(*conversation))
    assert ids_of(context, responses.to_chat(responses.items)[0]) == expected
    messages = MessagesBody.model_validate(as_blocks(*conversation))
    assert ids_of(context, messages.to_chat()) == expected


@settings(max_examples=10, derandomize=True)
@given(conversation=conversations())
def test_over_http_too(server, conversation):
    with server.http() as http:
        asked = {"chat/completions": as_chat, "responses": as_items, "messages": as_blocks}
        prompts = []
        for path, say in asked.items():
            answer = http.post(f"/v1/{path}", json=say(*conversation) | {"return_token_ids": True})
            assert answer.status_code == 200, answer.text
            prompts.append(answer.json()["prompt_token_ids"])
        assert prompts[0] == prompts[1] == prompts[2]


def test_parts_stay_parts() -> None:
    """A template that trims or separates parts (Gemma 3's) gets them from every API."""
    texts = [" a ", "b", " c"]

    def parts(kind: str) -> list[dict[str, str]]:
        return [{"type": kind, "text": text} for text in texts]

    said = {"role": "user", "content": parts("text")}
    items = [{"role": "user", "content": parts("input_text")}]
    bodies = [
        ChatBody.model_validate({"messages": [said]}),
        ResponsesBody.model_validate({"input": items}).to_chat(items)[0],
        MessagesBody.model_validate({"messages": [said], "max_tokens": 1}).to_chat(),
    ]
    contents = [body.template_messages()[-1]["content"] for body in bodies]
    assert [(content, content.parts) for content in contents] == [(" a b c", tuple(texts))] * 3
    system = MessagesBody.model_validate(
        {"messages": [said], "max_tokens": 1, "system": parts("text")}
    )
    assert system.to_chat().template_messages()[0]["content"].parts == tuple(texts)

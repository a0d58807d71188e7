"""Tools and reasoning in /v1/chat/completions, with the real `openai` client; the engine says
what the test wants."""

import json
import re
from contextlib import contextmanager

import pytest
from openai import AsyncOpenAI, BadRequestError

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import load_tokenizer
from tests.conftest import running_tiny_engine
from tests.server.scripted_answers import (
    HERMES_TEMPLATE,
    MISTRAL_TEMPLATE,
    ScriptedEngine,
    script,
    tokenizer_with,
)
from tests.server.serving import flat, running_server
from tests.tiny_models import TINY_ASSETS

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Wetter?", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "add", "parameters": None}},
]
MESSAGES = [{"role": "user", "content": "Is it <think> raining in Köln?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🌧"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
LONG = " ".join(f"reason {number}," for number in range(30))


BRIEF_TEMPLATE = (
    # the shipped model's context is small
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}<|im_end|>"
)
HERMES = dict.fromkeys(("<think>", "</think>", "<tool_call>", "</tool_call>"), False)
MISTRAL = dict.fromkeys(("[TOOL_CALLS]", "[ARGS]", "[TOOLS]", "<think>", "</think>"), True)


@contextmanager
def serving(tokenizer):
    engine = ScriptedEngine(tokenizer)
    with running_server(engine, tokenizer) as server, server.openai() as client:
        client.engine, client.server, client.tokenizer = engine, server, tokenizer
        yield client


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    with serving(
        tokenizer_with(tmp_path_factory.mktemp("hermes"), HERMES, chat_template=HERMES_TEMPLATE)
    ) as client:
        yield client


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    with serving(
        tokenizer_with(tmp_path_factory.mktemp("mistral"), MISTRAL, chat_template=MISTRAL_TEMPLATE)
    ) as client:
        yield client


def create(client, messages=MESSAGES, **fields):
    extra = {
        key: fields.pop(key)
        for key in (
            "chat_template_kwargs",
            "separate_reasoning",
            "add_generation_prompt",
            "return_token_ids",
        )
        if key in fields
    }
    return client.chat.completions.create(
        model="default", messages=messages, extra_body=extra, **fields
    )


def assembled(chunks):
    """What a client puts together of a stream: message fields and finish_reason of each choice,
    as `told` does."""
    choices = {}
    for choice in flat(chunk.choices for chunk in chunks):
        told = choices.setdefault(
            choice.index, {"reasoning": "", "content": "", "calls": [], "reason": None}
        )
        told["content"] += choice.delta.content or ""
        reasoning = getattr(choice.delta, "reasoning", "") or ""
        assert reasoning == (getattr(choice.delta, "reasoning_content", "") or "")
        told["reasoning"] += reasoning
        for call in choice.delta.tool_calls or []:
            if call.index == len(told["calls"]):
                assert call.type == "function" and call.id
                told["calls"].append([call.function.name, ""])
            else:
                assert call.id is None and call.function.name is None
            told["calls"][call.index][1] += call.function.arguments
        assert told["reason"] is None
        told["reason"] = choice.finish_reason
    for told in choices.values():
        told["calls"] = [(name, arguments_of(text)) for name, text in told["calls"]]
    return [choices[index] for index in sorted(choices)]


def arguments_of(text):
    """What is cut off stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def told(answer):
    return [
        {
            "reasoning": getattr(choice.message, "reasoning", ""),
            "content": choice.message.content or "",
            "calls": [
                (call.function.name, arguments_of(call.function.arguments))
                for call in choice.message.tool_calls or []
            ],
            "reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]


RAIN = ("weather", {"city": "Köln 🌧"})


def test_reasoning_content_and_calls_whole_and_streamed(hermes):
    texts = (f"{LONG}\n</think>\n\nI look. {CALL}\n{SECOND}", f"{LONG}</think>It rains.")
    client = script(hermes, *texts)
    fields = {"tools": TOOLS, "n": 2, "logprobs": True, "return_token_ids": True}
    whole = create(client, **fields)
    chunks = list(create(client, stream=True, **fields))
    first, second = told(whole)
    assert first == {
        "reasoning": LONG,
        "content": "I look.",
        "calls": [RAIN, ("add", {})],
        "reason": "tool_calls",
    }
    assert second == {"reasoning": LONG, "content": "It rains.", "calls": [], "reason": "stop"}
    assert assembled(chunks) == [first, second]
    # as it comes
    assert sum(bool(getattr(c.choices[0].delta, "reasoning", None)) for c in chunks) > 40
    for choice, text in zip(whole.choices, texts, strict=True):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert (
            choice.token_ids
            == flat(getattr(part, "token_ids", []) for part in mine)
            == hermes.tokenizer.encode(text)
        )
        entries = flat(part.logprobs.content for part in mine if part.logprobs)
        assert entries == choice.logprobs.content and len(entries) == len(choice.token_ids)


async def test_the_async_client_streams_calls_too(hermes):
    client = script(hermes, f"</think>{CALL}")
    url = f"{client.server.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as asynchronous:
        stream = await create(asynchronous, tools=TOOLS, stream=True)
        [answer] = assembled([chunk async for chunk in stream])
    assert answer == {"reasoning": "", "content": "", "calls": [RAIN], "reason": "tool_calls"}


def test_only_calls_have_no_content(hermes):
    client = script(hermes, f"</think>\n{CALL}")
    assert create(client, tools=TOOLS).choices[0].message.content is None
    assert create(client).choices[0].message.content == CALL  # nobody offered tools


def test_one_call_only_when_asked(hermes):
    client = script(hermes, f"</think>{CALL}{SECOND}")
    assert told(create(client, tools=TOOLS, parallel_tool_calls=False))[0]["calls"] == [RAIN]
    chunks = create(client, tools=TOOLS, parallel_tool_calls=False, stream=True)
    assert assembled(chunks)[0]["calls"] == [RAIN]


def malformed(http):
    return float(
        re.search(r"^mlx_parallm_malformed_tool_calls_total (.*)", http.get("/metrics").text, re.M)[
            1
        ]
    )


def test_a_malformed_call_is_content_and_counted(hermes):
    """A stream has shown its beginning already, as a call."""
    broken = CALL.replace('"}}', '"')
    client = script(hermes, f"</think>{broken}")
    with client.server.http() as http:
        before = malformed(http)
        [answer] = told(create(client, tools=TOOLS))
        assert answer == {"reasoning": "", "content": broken, "calls": [], "reason": "stop"}
        [answer] = assembled(create(client, tools=TOOLS, stream=True))
        begun = ("weather", '{"city": "Köln 🌧"\n')
        assert answer == {"reasoning": "", "content": "", "calls": [begun], "reason": "tool_calls"}
        assert malformed(http) == before + 2


def test_a_call_that_the_limit_cut_off_is_not_complete(hermes):
    client = script(hermes, f"</think>{CALL[:-20]}", reason="length")
    [answer] = told(create(client, tools=TOOLS))
    [(name, arguments)] = answer["calls"]
    assert (name, answer["reason"], answer["content"]) == ("weather", "length", "")
    assert '{"city": "Köln 🌧"}'.startswith(arguments) and len(arguments) > 9
    assert assembled(create(client, tools=TOOLS, stream=True)) == [answer]


def test_arguments_are_streamed_as_they_come(hermes):
    client = script(hermes, f"</think>{CALL}")
    chunks = [
        chunk.choices[0].delta.tool_calls for chunk in create(client, tools=TOOLS, stream=True)
    ]
    pieces = flat(filter(None, chunks))
    assert len(pieces) > 5 and pieces[0].function.name == "weather"
    assert "".join(piece.function.arguments for piece in pieces) == '{"city": "Köln 🌧"}'


def test_markers_that_are_special_tokens_are_seen(mistral):
    text = (
        '<think>Hm, rain.</think>I look.[TOOL_CALLS]weather[ARGS]{"city": "Köln'
        ' 🌧"}[TOOL_CALLS]add[ARGS]{}'
    )
    client = script(mistral, text)
    for chunks in (create(client, tools=TOOLS, stream=True), None):
        [answer] = assembled(chunks) if chunks else told(create(client, tools=TOOLS))
        assert answer == {
            **{"reasoning": "Hm, rain.", "content": "I look."},
            **{"calls": [RAIN, ("add", {})], "reason": "tool_calls"},
        }
    assert told(create(client))[0]["reasoning"] == "Hm, rain."


def test_the_prompt_says_whether_the_answer_starts_in_reasoning(hermes):
    client = script(hermes, "so </think>yes")
    # whatever <think> in the user's message says
    assert told(create(client))[0]["reasoning"] == "so"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert (
        told(create(client, **off))[0] | {"content": "so </think>yes"}
        == told(create(client, **off))[0]
    )
    assert told(create(client, separate_reasoning=False))[0]["content"] == "so </think>yes"
    begun = [*MESSAGES, {"role": "assistant", "content": "<think>\nI think", "prefix": True}]
    assert told(create(client, begun))[0]["reasoning"] == "so"
    done = [*MESSAGES, {"role": "assistant", "content": "<think>\nI think</think>", "prefix": True}]
    assert told(create(client, done))[0]["content"] == "so </think>yes"


def test_prefix_goes_on_with_the_last_message(hermes):
    messages = [*MESSAGES, {"role": "assistant", "content": "Yes, it", "prefix": True}]
    client = script(hermes, "rains")
    create(client, messages)
    prompt = hermes.tokenizer.decode(
        client.engine.asked[0].prompt_token_ids, skip_special_tokens=False
    )
    assert prompt.endswith("<|im_start|>assistant\nYes, it")
    with pytest.raises(BadRequestError, match="role assistant"):
        create(client, [*messages, {"role": "user", "content": "x", "prefix": True}])
    with pytest.raises(BadRequestError, match="exclude each other"):
        create(client, messages, add_generation_prompt=True)


HISTORY = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "Let me see.",
        "tool_calls": [
            {
                "id": "abc",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
            },
            {"id": "abd", "type": "function", "function": {"name": "add", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "rain"}]},
]


def test_history_and_tools_are_in_the_prompt(hermes, mistral):
    client = script(hermes, "</think>It rains.")
    with client.server.http() as http:
        create(client, HISTORY, tools=TOOLS)
        [asked] = client.engine.asked
        prompt = hermes.tokenizer.decode(asked.prompt_token_ids, skip_special_tokens=False)
        for tool in TOOLS:
            assert f'"name": "{tool["function"]["name"]}"' in prompt.split("<|im_end|>")[0]
        assert (
            "Wetter?" in prompt
            and "Let me see." in prompt
            and "<|im_start|>tool of weather\nrain<|im_end|>" in prompt
        )
        assert (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
            in prompt
        )
        assert '{"name": "add", "arguments": {}}' in prompt
        body = {"messages": HISTORY, "tools": TOOLS}
        assert http.post("/tokenize", json=body).json()["tokens"] == list(asked.prompt_token_ids)
        create(client, tools=TOOLS, tool_choice="none")
        assert "Wetter?" not in hermes.tokenizer.decode(client.engine.asked[1].prompt_token_ids)
    client = script(mistral, "It rains.")
    create(client, HISTORY, tools=TOOLS)
    prompt = mistral.tokenizer.decode(
        client.engine.asked[0].prompt_token_ids, skip_special_tokens=False
    )
    assert '[TOOL_CALLS]weather[ARGS]{"city": ' in prompt


def _history(call):
    return {"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": call}]}


WRONG = {
    "choice without tools": ({"tool_choice": "auto"}, "tool_choice"),
    "unknown name": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "tool_choice",
    ),
    "unknown choice": ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    "custom tool": ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    "nameless": ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    "surrogate": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
        "messages",
    ),
    "no call": (_history([7]), "messages.1.tool_calls.0"),
    "arguments": (
        _history([{"function": {"name": "f", "arguments": 7}}]),
        "messages.1.tool_calls.0.function.arguments",
    ),
}


def test_what_is_wrong_with_tools_is_a_400_naming_the_field(hermes):
    client = script(hermes, "x")
    with client.server.http() as http:
        for name, (fields, param) in WRONG.items():
            body = json.dumps({"messages": MESSAGES} | fields)
            answer = http.post(
                "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(
                param
            ), (name, answer.text)


PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{"
    " raise_exception('no system') }}{% endif %}"
) + PLAIN.removeprefix("{% for m in messages %}")


def test_a_template_without_tools_is_taught_them_in_words(tmp_path):
    """The history too: templates without tools leave calls out, and know no role `tool`."""

    def client_of(name, template):
        return serving(tokenizer_with(tmp_path / name, {}, chat_template=template))

    with client_of("a", PLAIN) as client:
        for chunks in (
            create(script(client, f"I look. {CALL}\n{SECOND}"), tools=TOOLS, stream=True),
            None,
        ):
            [answer] = assembled(chunks) if chunks else told(create(client, tools=TOOLS))
            assert answer["calls"] == [RAIN, ("add", {})] and answer["content"] == "I look."
        create(client, HISTORY, tools=TOOLS)
        prompt = client.tokenizer.decode(client.engine.asked[-1].prompt_token_ids)
        assert prompt.startswith("system:You can use these tools:\n- weather: Wetter? Arguments: {")
        assert (
            '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>;user:Is it' in prompt
        )
        assert (
            'assistant:<tool_call>\n{"name": "weather", "arguments": {"city":'
            ' "Köln"}}\n</tool_call>\n'
        ) in prompt
        assert prompt.endswith(";user:<tool_response>\nrain\n</tool_response>;")
        create(client, tools=TOOLS, tool_choice="none")
        assert "tools" not in client.tokenizer.decode(client.engine.asked[-1].prompt_token_ids)
    with client_of("b", NO_SYSTEM) as client:
        create(script(client, "x"), tools=TOOLS)
        prompt = client.tokenizer.decode(client.engine.asked[-1].prompt_token_ids)
        assert prompt.startswith("user:You can use these tools:") and prompt.endswith("Köln?;")
    unread = tokenizer_with(tmp_path / "off", {}, chat_template=HERMES_TEMPLATE, tool_parser="off")
    with serving(unread) as other, pytest.raises(BadRequestError, match=r"model\.tool_parser"):
        create(other, tools=TOOLS)


def test_the_parsers_are_configurable(tmp_path):
    marks = dict.fromkeys(("<think>", "</think>"), False)
    chosen = tokenizer_with(
        tmp_path / "a", marks, tool_parser="qwen3_coder", reasoning_parser="off"
    )
    assert chosen.tool_markers == ("<tool_call>", "</tool_call>") and chosen.think_markers is None
    assert (
        chosen.parse_tool_call("<function=f>\n<parameter=a>\nb\n</parameter>\n</function>")["name"]
        == "f"
    )
    assert tokenizer_with(tmp_path / "b", marks).think_markers == ("<think>", "</think>")
    with pytest.raises(ModelError, match=r"auto, off, .*mistral"):
        load_tokenizer(TINY_ASSETS, ModelConfig(tool_parser="nope"))


def test_a_real_engine_shows_special_tokens_where_a_parser_needs_them(tiny_engine, tmp_path):
    tokenizer = tokenizer_with(
        tmp_path / "t", {}, chat_template=BRIEF_TEMPLATE, tool_parser="json_tools"
    )
    [start] = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    fields = {"logit_bias": {str(start): 100}, "max_tokens": 3}
    with running_server(tiny_engine.client, tokenizer) as server, server.openai() as client:
        assert create(client, **fields).choices[0].message.content == ""
        assert (
            create(client, tools=TOOLS, **fields).choices[0].message.content == "<|im_start|>" * 3
        )
        [answer] = assembled(create(client, tools=TOOLS, stream=True, **fields))
        assert answer["content"] == "<|im_start|>" * 3


KIND = {"$ref": "#/$defs/Kind"}
SKY = {
    "type": "object",
    "properties": {"kind": KIND, "next": {"type": "array", "maxItems": 2, "items": KIND}},
    "required": ["kind", "next"],
    "additionalProperties": False,
    "$defs": {"Kind": {"enum": ["rain", "snow", "hail"]}},
}
FORCED = [TOOLS[1], {"type": "function", "function": {"name": "sky", "parameters": SKY}}]
NAMED = {"type": "function", "function": {"name": "sky"}}


@pytest.mark.slow
def test_a_model_that_must_call_does_so(tiny_engine, tmp_path):
    tokenizer = tokenizer_with(
        tmp_path / "t", {}, chat_template=BRIEF_TEMPLATE, tool_parser="json_tools"
    )
    with running_server(tiny_engine.client, tokenizer) as server, server.openai() as client:
        fields = {"tools": FORCED, "n": 4, "seed": 5, "temperature": 1.2, "max_tokens": 120}
        for choice in ("required", NAMED):
            one = {"tool_choice": choice, "parallel_tool_calls": False}
            answers = told(create(client, **one, **fields))
            assert assembled(create(client, stream=True, **one, **fields)) == answers
            for answer in answers:
                [(name, arguments)] = answer.pop("calls")
                assert answer == {"reasoning": "", "content": "", "reason": "tool_calls"}
                if name == "sky":
                    assert {arguments.pop("kind"), *arguments.pop("next")} <= {
                        "rain",
                        "snow",
                        "hail",
                    }
                assert arguments == {} and name in ({"sky"} if choice is NAMED else {"sky", "add"})
        cut = {"tools": FORCED, "tool_choice": NAMED, "max_tokens": 5}
        for answer in (told(create(client, **cut)), assembled(create(client, stream=True, **cut))):
            assert answer == [
                {"reasoning": "", "content": "", "calls": [("sky", "")], "reason": "length"}
            ]
        twice = {
            "type": "array",
            "items": {"const": "a"},
            "minItems": 2,
            "maxItems": 2,
            "uniqueItems": True,
        }
        tool = {"name": "f", "parameters": {"properties": {"a": twice}, "required": ["a"]}}
        for stream in (False, True):
            with pytest.raises(BadRequestError, match=r"3 tries: /a: .*") as invalid:
                create(
                    client,
                    tools=[{"type": "function", "function": tool}],
                    tool_choice="required",
                    stream=stream,
                )
            assert (invalid.value.param, invalid.value.code) == ("tools", "json_validate_failed")
        [answer] = told(create(client, tools=FORCED, tool_choice=NAMED, max_tokens=50))
        assert answer["calls"][0][1].startswith('{"kind"') and answer["reason"] == "length"


VERDICT = {
    "type": "json_schema",
    "json_schema": {
        "name": "v",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
}


THINKS = "{{ '<think>' if enable_thinking and messages[0].content == 'on' }}"
KINDS = {  # the tokens of a model that can sample them, and its template
    "hermes": (HERMES, BRIEF_TEMPLATE + "{# <tool_call> tool_call.name #}" + THINKS),
    "mistral": (MISTRAL, BRIEF_TEMPLATE + "{# [TOOL_CALLS] [ARGS] #}" + THINKS),
    "mistral's list": (MISTRAL, BRIEF_TEMPLATE + "{# [TOOL_CALLS] #}" + THINKS),
    "another": (
        dict.fromkeys(("<|tool_call>", "<tool_call|>", "<think>", "</think>"), True),
        BRIEF_TEMPLATE + "{# <|tool_call> <tool_call|> #}" + THINKS,
    ),
    "no tools": (
        dict.fromkeys(("<think>", "</think>"), False),
        "{{ messages[-1].content }}<|im_end|>" + THINKS.replace("0", "-1"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_may_call_or_answer_in_the_schema(kind, tmp_path):
    """At every turn, and behind its reasoning; `required` forces a call, and the schema waits."""
    tokens, template = KINDS[kind]

    def tokenizer():
        return tokenizer_with(tmp_path / "t", tokens, sampled=True, chat_template=template)

    with (
        running_tiny_engine(600, tokenizer) as engine,
        running_server(engine.client, tokenizer()) as server,
    ):
        mine = tokenizer()
        begins = "<" if kind == "no tools" else (mine.tool_markers or ("<tool_call>", ""))[0]
        [call], [thought] = (
            mine.encode(text, add_special_tokens=False) for text in (begins, "</think>")
        )
        # a marker that is text may be spelled
        no_call = dict.fromkeys([call, mine.encode("<")[0]], -100)
        sampling = {"n": 2, "seed": 1, "temperature": 1.3, "max_tokens": 90}
        asked = {"tools": FORCED, "response_format": VERDICT} | sampling
        thinking = [{"role": "user", "content": "on"}]
        with server.openai() as client:
            quick = asked | {"reasoning_effort": "none"}
            called = create(client, **quick, logit_bias={call: 100})
            answered = create(client, **quick, logit_bias=no_call)
            forced = create(client, **quick, tool_choice=NAMED, logit_bias=no_call)
            thought_first = create(client, thinking, **asked, logit_bias=no_call | {thought: 100})
            streams = create(
                client, thinking, **asked, logit_bias=no_call | {thought: 100}, stream=True
            )
            assert assembled(streams) == told(thought_first)
        for answer in told(answered):
            assert json.loads(answer["content"])["ok"] in (True, False) and not answer["calls"], (
                answer
            )
        for answer in told(called) if kind != "another" else ():
            assert {name for name, _ in answer["calls"]} <= {"sky", "add"} and not answer["content"]
        for answer in told(forced):
            assert {name for name, _ in answer["calls"]} == {"sky"} and not answer["content"]
            if answer["reason"] == "tool_calls":
                assert {answer["calls"][0][1]["kind"]} <= {"rain", "snow", "hail"}
        for answer in told(thought_first):
            assert json.loads(answer["content"])["ok"] in (True, False) and not answer["calls"], (
                answer
            )


def test_structured_output_is_content_behind_the_reasoning(hermes):
    client = script(hermes, 'so</think>{"a": "<think></think><tool_call>"}')
    for fields in ({}, {"tools": TOOLS}):
        answer = (
            create(client, response_format={"type": "json_object"}, **fields).choices[0].message
        )
        assert (answer.reasoning, answer.content) == ("so", '{"a": "<think></think><tool_call>"}')
    client = script(hermes, f"so</think>{CALL}")  # reasoning in the content does not hide a call
    [mixed] = told(
        create(
            client, response_format={"type": "json_object"}, tools=TOOLS, separate_reasoning=False
        )
    )
    assert mixed["content"] == "so</think>" and mixed["calls"] == [RAIN]

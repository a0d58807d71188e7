"""Structured output over HTTP: every spelling, streamed and not, the openai client's `parse`,
and what is refused."""

import json
import re
from typing import Any, Literal

import httpx
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.server.serving import RunningServer

MESSAGES: Any = [{"role": "user", "content": "Sort: hgfa"}]


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["bolt", "nut"]
    count: int = Field(ge=0, le=99)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    verdict: Literal["yes", "no", "perhaps"]
    items: list[Item] = Field(min_length=1, max_length=2)
    code: str = Field(pattern="^[a-z]{3}$")


SCHEMA = Answer.model_json_schema()
CHOICES = ["red", "green", "deep blue"]


def complete(server: RunningServer, **fields: Any) -> httpx.Response:
    with server.http() as http:
        return http.post(
            "/v1/completions", json={"prompt": "Sort: hgfa", "max_tokens": 150} | fields
        )


def test_parse_gives_the_pydantic_model(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="default",
        messages=MESSAGES,
        response_format=Answer,
        max_tokens=200,
        n=5,
        seed=1,
        temperature=1.5,
    )
    answers = [choice.message.parsed for choice in completion.choices]
    assert len(answers) == 5 and all(isinstance(answer, Answer) for answer in answers)
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}
    assert len({str(answer) for answer in answers}) > 1


def test_the_streamed_answer_is_the_other_one(client: OpenAI) -> None:
    options: Any = {
        "model": "default",
        "messages": MESSAGES,
        "max_tokens": 200,
        "seed": 5,
        "temperature": 1.5,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "strict": True, "schema": SCHEMA},
        },
    }
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices
    ]
    assert "".join(choice.delta.content or "" for choice in chunks) == whole
    assert chunks[-1].finish_reason == "stop"
    Answer.model_validate_json(whole or "")
    assert len(set(whole or "")) >= 20


def test_any_object(client: OpenAI) -> None:
    """The end may be beyond max_tokens: then the reason says so."""
    completion = client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_tokens=60,
        n=8,
        seed=2,
    )
    reasons = {choice.finish_reason for choice in completion.choices}
    for choice in completion.choices:
        assert (choice.message.content or "").startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)
    assert "stop" in reasons and reasons <= {"stop", "length"}


@pytest.mark.parametrize("kind", ["json", "json_object"])
def test_tgis_spelling_which_huggingface_hub_sends(server: RunningServer, kind: str) -> None:
    asked = {
        "messages": MESSAGES,
        "max_tokens": 150,
        "response_format": {"type": kind, "value": SCHEMA},
    }
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=asked).json()
        asked["response_format"] = {"type": kind, "value": {"type": "nothing"}}
        refused = http.post("/v1/chat/completions", json=asked)
    assert is_answer(answer["choices"][0]["message"]["content"])
    assert refused.status_code == 400 and "response_format" in refused.json()["error"]["param"]


def is_answer(text: str) -> bool:
    return Answer.model_validate_json(text) is not None


def is_code(text: str) -> bool:
    return re.fullmatch("[a-z]{2}-[0-9]{2}", text) is not None


def is_choice(text: str) -> bool:
    return text in CHOICES


SPELLINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"structured_outputs": {"json": SCHEMA}}, is_answer),
    "json text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_answer),
    "guided_json": ({"guided_json": SCHEMA}, is_answer),
    "regex": (
        {"structured_outputs": {"regex": "[a-z]{2}-[0-9]{2}", "disable_fallback": False}},
        is_code,
    ),
    "guided_regex": ({"guided_regex": "[a-z]{2}-[0-9]{2}"}, is_code),
    "choice": ({"structured_outputs": {"choice": CHOICES, "json": None}}, is_choice),
    "guided_choice": ({"guided_choice": CHOICES}, is_choice),
    "grammar": ({"structured_outputs": {"grammar": 'start: /[a-z]{2}/ "-" /[0-9]{2}/'}}, is_code),
    "guided_grammar, GBNF": ({"guided_grammar": 'root ::= [a-z] [a-z] "-" [0-9] [0-9]'}, is_code),
    "json_object": (
        {"structured_outputs": {"json_object": True}, "stop": ["{"]},
        lambda text: text == "",
    ),
}


@pytest.mark.parametrize("fields, holds", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_every_spelling_on_both_routes(
    server: RunningServer, fields: dict[str, Any], holds: Any
) -> None:
    sampling = {"n": 2, "seed": 1, "temperature": 1.5, "max_tokens": 150}
    with server.http() as http:
        completion = http.post(
            "/v1/completions", json={"prompt": "Sort: hgfa"} | sampling | fields
        ).json()
        chat = http.post(
            "/v1/chat/completions", json={"messages": MESSAGES} | sampling | fields
        ).json()
    texts = [c["text"] for c in completion["choices"]] + [
        c["message"]["content"] for c in chat["choices"]
    ]
    assert len(texts) == 4 and all(holds(text) for text in texts)
    assert {c["finish_reason"] for c in completion["choices"] + chat["choices"]} == {"stop"}


def test_generate_in_vllms_shape_takes_them_too(server: RunningServer) -> None:
    with server.http() as http:
        answer = http.post(
            "/generate", json={"prompt": "a", "max_tokens": 40, "guided_choice": CHOICES}
        ).json()
    assert answer["text"][0] in CHOICES or answer["text"][0].removeprefix("a") in CHOICES


def test_processed_logprobs_are_shown(server: RunningServer) -> None:
    [choice] = complete(server, guided_choice=["g"], logprobs=0).json()["choices"]
    # nothing else was left to draw from
    assert choice["processed_logprobs"][0] == pytest.approx(0, abs=1e-6)
    assert choice["logprobs"]["token_logprobs"][0] < -0.01
    assert choice["forced_tokens"] == [1] * len(choice["processed_logprobs"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"response_format": {"type": "json"}}, "response_format.type"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "tag": ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    "schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nope"}},
            }
        },
        "response_format.json_schema.schema",
    ),
    "loop": (
        {
            "guided_json": {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            }
        },
        "guided_json",
    ),
    "unsatisfiable": (
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 2}},
        "guided_json",
    ),
    "not JSON": ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    "regex": ({"guided_regex": "(a"}, "guided_regex"),
    "grammar": (
        {"structured_outputs": {"grammar": "start: nowhere"}},
        "structured_outputs.grammar",
    ),
    "no choice": ({"guided_choice": []}, "guided_choice"),
    "none": ({"structured_outputs": {}}, "structured_outputs"),
    "two": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "two fields": (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
    ),
    "unknown": (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    "ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
}


@pytest.mark.parametrize("fields, param", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_cannot_be_enforced_is_a_400_naming_the_field(
    server: RunningServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = complete(server, **fields, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_deep_schema_is_refused_and_the_server_lives(
    server: RunningServer, client: OpenAI
) -> None:
    with server.http() as http:
        deep = '{"items":' * 3000 + "{}" + "}" * 3000
        body = '{"prompt": "a", "guided_json": ' + deep + "}"
        answer = http.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == 400
    with pytest.raises(BadRequestError, match="nest"):
        client.completions.create(
            model="default", prompt="a", extra_body={"guided_regex": "(" * 8000 + "a" + ")" * 8000}
        )
    assert is_choice(complete(server, guided_choice=CHOICES).json()["choices"][0]["text"])


def test_small_models_finish_their_objects(client: OpenAI) -> None:
    """Open objects do not: they continue with made-up keys."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    completion = client.chat.completions.create(
        model="default", messages=MESSAGES, response_format=asked, max_tokens=64, n=10, seed=3
    )
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}
    contents = {choice.message.content for choice in completion.choices}
    assert contents <= {
        f'{{"ok":{space}{value}}}' for space in ("", " ") for value in ("true", "false")
    }


FAILING: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "too ambiguous after some tokens": (
        {"guided_grammar": 'start: x{1000}\nx: y{1000}\ny: z{1000}\nz: "a"?'},
        "invalid_grammar",
        "guided_grammar",
    ),
    "no token": ({"allowed_token_ids": [0], "bad_words": ["!"]}, "no_token_allowed", None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FAILING)
def test_what_the_request_makes_impossible_is_its_error(
    server: RunningServer, name: str, stream: bool
) -> None:
    """Also where it shows only behind some tokens: no 500, and no other request's."""
    fields, code, param = FAILING[name]
    answer = complete(server, stream=stream, min_tokens=40, temperature=0, **fields)
    if answer.status_code == 200:  # its first events were out
        assert stream
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        error = json.loads(events[-1])["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error["code"] == code and error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert complete(server, max_tokens=2).status_code == 200

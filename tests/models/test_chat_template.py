"""What chat templates make of the arguments of calls, in every way that templates use them."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import RequestError
from mlx_parallm.execution.json_values import template_arguments
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.text.chat_template import render_template
from mlx_parallm.models.tokenizer import Tokenizer
from tests.chat_templates import TEMPLATES
from tests.tiny_models import TINY_ASSETS

USER = {"role": "user", "content": "Wetter?"}
CITY = '{"city":"München"}'
MIXED = {"ok": True, "no": None, "n": 1.0, "deep": {"a": [False, None, "ü"]}, "title": "x"}


def with_template(template: str, **options: Any) -> Tokenizer:
    return load_tokenizer(TINY_ASSETS, ModelConfig(chat_template=template, **options))


def printed(use: str, arguments: Any, role: str = "assistant") -> str:
    """What a template that takes tools shows of a call's arguments, with `a` for them."""
    template = (
        (
            "{{ tools | tojson if tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a ="
            " c.function.arguments %}"
        )
        + use
        + "{% endfor %}{% endfor %}"
    )
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    return with_template(template).render_chat_text([USER, {"role": role, "tool_calls": [call]}])


TEXT_USES = (
    "{{ a }}",
    "{{ '' + a }}",
    "{{ a + '' }}",
    "{{ '' ~ a }}",
    "{{ a | string }}",
    "{{ a | safe }}",
    "{{ a | trim }}",
    "{{ a.strip() }}",
    "{{ [a] | join('') }}",
    "{{ '%s' % a }}",
    "{{ '%s' | format(a) }}",
    "{{ '{}'.format(a) }}",
    "{% set t %}{{ a }}{% endset %}{{ t }}",
    "{{ a if a is string else a | string }}",
)


@pytest.mark.parametrize("use", TEXT_USES)
def test_arguments_print_as_the_clients_own_text(use: str) -> None:
    """Whatever a template does to print them or to join them with text (verl #7664: Python's
    repr, or \\u escapes)."""
    assert printed(use, CITY) == CITY
    assert printed(use, {"city": "München"}) == '{"city": "München"}'
    assert printed(use, '{"a": 1.10, "a": 1e400}') == '{"a": 1.10, "a": 1e400}'
    assert printed(use, "") == printed(use, None) == "{}"
    assert printed(use, '{"city": "Mün') == '{"city": "Mün', (
        "text that is not an object stays as it is"
    )


JSON_USES: dict[str, str] = {
    "{{ a | tojson }}": json.dumps(MIXED, ensure_ascii=False),
    "{{ a | tojson(indent=2) }}": json.dumps(MIXED, ensure_ascii=False, indent=2),
    "{{ a | tojson(sort_keys=true, separators=(',', ':')) }}": json.dumps(
        MIXED, ensure_ascii=False, sort_keys=True, separators=(",", ":")
    ),
    "{{ {'x': [a]} | tojson }}": json.dumps({"x": [MIXED]}, ensure_ascii=False),
    "{{ c.function | tojson }}": json.dumps({"name": "f", "arguments": MIXED}, ensure_ascii=False),
    "{% if a is mapping and a is not string %}{{ a | length }}{% endif %}": "5",
    "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}": (
        'ok=true;no=null;n=1.0;deep={"a": [false, null, "ü"]};title=x;'
    ),
    "{% for k, v in a | items %}{{ k ~ v }};{% endfor %}": (
        'oktrue;nonull;n1.0;deep{"a": [false, null, "ü"]};titlex;'
    ),
    "{% for k in a %}{{ k }}{{ a[k] | string }};{% endfor %}": (
        'oktrue;nonull;n1.0;deep{"a": [false, null, "ü"]};titlex;'
    ),
    "{% for k, v in a | dictsort %}{{ k }},{% endfor %}": "deep,n,no,ok,title,",
    "{{ a.title }}{{ a['ok'] }}{{ a.deep.a[2] }}{{ a.deep.a }}": 'xtrueü[false, null, "ü"]',
    "{{ a.no is none }}{{ a.ok is boolean }}{{ a.ok is true }}{{ a.deep.a[0] is false }}{{ a.ok is integer }}": "TrueTrueTrueTrueFalse",
    "{{ a.no is string }}{{ a.title is string }}{{ a.deep is mapping }}{{ a.deep.a is sequence }}": "FalseTrueTrueTrue",
    "{{ 1 if a.no else 0 }}{{ 1 if a.ok else 0 }}{{ a.no == none }}{{ a.ok == true }}": "01TrueTrue",
    "{{ a.keys() | join(',') }}{{ 'city' in a }}{{ a.get('n') }}{{ a.missing is defined }}": "ok,no,n,deep,titleFalse1.0False",
    "{{ a != '' }}{{ a == '{}' }}{{ a != a | string }}{{ a == a | string }}": "TrueFalseFalseTrue",
    "{{ '[' + a.deep + a.deep.a + ']' }}": '[{"a": [false, null, "ü"]}[false, null, "ü"]]',
}


@pytest.mark.parametrize("use", JSON_USES)
def test_a_mapping_and_what_lies_in_it(use: str) -> None:
    """The same from an object and from its text. Nothing in it prints as Python's `True`, `None`
    or `{'a': …`."""
    assert printed(use, MIXED) == JSON_USES[use]
    assert printed(use, json.dumps(MIXED)) == JSON_USES[use]


def test_text_that_is_no_object_is_not_quoted_again() -> None:
    for text in ('{"city": "Mün', "[1, 2]", "7", "Wetter in Köln"):
        assert printed("{{ a | tojson }}", text) == text
        assert printed("{{ {'x': a} | tojson }}", text) == f'{{"x": {text}}}'


def test_a_template_cannot_reach_what_lies_behind() -> None:
    for use in ("{{ a._text }}", "{{ a._pairs }}", "{{ a.__class__ }}", "{{ a.strip.__self__ }}"):
        try:
            assert printed(use, CITY) == ""
        except RequestError as error:
            assert "unsafe" in str(error) or "undefined" in str(error)
    for use in (
        "{% set _ = a.update({'x': 1}) %}",
        "{% set _ = a.pop('city') %}",
        "{% set _ = a.x.append(1) %}",
    ):
        with pytest.raises(RequestError, match="refuses these messages"):
            printed(use, '{"city": 1, "x": []}')


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("plain", "kimi")])
def test_transformers_renders_the_same(name: str) -> None:
    """Where transformers prints JSON too: the same text, markup of the answer and continued
    messages included."""
    tokenizer, theirs = (
        with_template(TEMPLATES[name], tool_parser="json_tools"),
        AutoTokenizer.from_pretrained(TINY_ASSETS),
    )
    arguments = {"city": "München", "n": 3, "items": ["a", {"b": 1.5}]}
    tools = [
        {
            "type": "function",
            "function": {"description": "<ü>", "name": "f", "parameters": {"type": "object"}},
        }
    ]

    def chat(value: Any) -> list[dict[str, Any]]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": value}}
        answer = {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [call],
        }
        return [USER, answer, {"role": "tool", "tool_call_id": "c", "name": "f", "content": "rain"}]

    value = json.dumps(arguments, ensure_ascii=False) if name == "deepseek" else arguments
    expected = theirs.apply_chat_template(
        chat(value),
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        tokenize=False,
    )
    for form in (
        arguments,
        json.dumps(arguments),
        json.dumps(arguments, ensure_ascii=False, separators=(", ", ": ")),
    ):
        # there the client's own escapes are shown
        if name != "deepseek" or form != json.dumps(arguments):
            assert tokenizer.render_chat_text(chat(form), tools=tools) == expected
    continued = [USER, {"role": "assistant", "content": "It  "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert tokenizer.render_chat_text(continued, **options) == theirs.apply_chat_template(
        continued, chat_template=TEMPLATES[name], tokenize=False, **options
    )


def test_a_final_message_that_is_continued_keeps_its_white_space() -> None:
    trims = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    edits = (" | trim", "", ".lstrip('\\n')", ".strip('\\n')")
    for prefill in ("{\n  ", "OK!\n", "  x", " \n x \n", "x", "\n", "\nx", "\n  x", "\n\nx", ""):
        chat = [USER, {"role": "assistant", "content": prefill}]
        for edit in edits:
            for end in ("", "\n"):  # the template's own, before the message
                template = trims.replace(" | trim", edit).replace(
                    "]{{ m.content", f"]{end}{{{{ m.content"
                )
                text = with_template(template).render_chat_text(chat, continue_final_message=True)
                asked = f"[user]{end}{USER['content']}"
                assert text == f"{asked}[assistant]{end}{prefill}", (template, prefill)


def test_a_final_message_that_is_not_shown_cannot_be_continued() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="does not show the message"):
        with_template(template).render_chat_text(
            [USER, {"role": "assistant", "content": "x"}], continue_final_message=True
        )


@pytest.mark.parametrize("name", ["self", "source", "caller", "variables"])
def test_an_argument_of_any_name_reaches_the_template(name: str) -> None:
    """Python's own names of parameters are none of the template's (`self` stays Jinja's)."""
    tokenizer = with_template(
        "{% for m in messages %}{{ m.content }}{% endfor %} {{ " + name + " }}"
    )
    shown = tokenizer.render_chat_text([USER], template_kwargs={name: "x"})
    assert shown.startswith("Wetter? ") and (shown.endswith("x") or name == "self")


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools"])
def test_what_is_no_argument_of_a_template_is_refused_from_everywhere(name: str) -> None:
    with pytest.raises(
        RequestError, match=f"'chat_template_kwargs' cannot set '{name}'"
    ) as refused:
        with_template("{{ messages }}").render_chat([USER], template_kwargs={name: []})
    assert refused.value.param == "chat_template_kwargs"


def test_half_a_character_is_an_error_of_the_messages() -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        with_template(TEMPLATES["qwen"]).render_chat_text([{"role": "user", "content": "\ud83d"}])


def test_a_template_in_python_gets_an_object_or_its_text() -> None:
    """mlx-lm's DeepSeek V3.2 reads the arguments as JSON text; others take an object."""
    tokenizer = with_template(TEMPLATES["qwen"])
    call = {"id": "c", "function": {"name": "f", "arguments": CITY}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]

    def reads_text(messages: Any, **options: Any) -> str:
        return str(json.loads(messages[-1]["tool_calls"][0]["function"]["arguments"])["city"])

    def takes_an_object(messages: Any, **options: Any) -> str:
        return str(messages[-1]["tool_calls"][0]["function"]["arguments"]["city"])

    for template in (reads_text, takes_an_object):
        tokenizer._wrapper._chat_template = template
        assert tokenizer.render_chat_text(messages) == "München"


def test_tools_that_a_template_leaves_out_are_taught_wherever_they_come_from() -> None:
    """The server, rows and TRL alike: they all render here. A bare result that the template
    prints stays as it is."""
    tokenizer = with_template(TEMPLATES["plain"])
    call = {"id": "c", "function": {"name": "f", "arguments": '{"n": 1.10}'}}
    history = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ü"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "Grüße"}}]
    text = tokenizer.render_chat_text(history, tools=tools)
    assert text.startswith("<|im_start|>system\nYou can use these tools:\n- f: Grüße Arguments: {}")
    assert '<tool_call>\n{"name": "f", "arguments": {"n": 1.10}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nü\n</tool_response><|im_end|>" in text
    assert "<tool_response>" in tokenizer.render_chat_text(history)
    assert "<|im_start|>tool\nü" in tokenizer.render_chat_text(
        [USER, {"role": "tool", "content": "ü"}]
    )


def test_arguments_stay_a_mapping_of_python() -> None:
    arguments = template_arguments(json.dumps(MIXED))
    assert arguments == MIXED and arguments == json.dumps(MIXED)
    assert isinstance(arguments, dict) and list(arguments) == list(MIXED)


class Colour(StrEnum):
    RED = "red"


@dataclass
class Part:
    city: str
    picture: object


class Place(BaseModel):
    name: str


class Harmful:
    def save(self) -> str:
        raise AssertionError("a template reached a method")


def test_a_template_sees_plain_json_and_never_a_callers_object() -> None:
    extra = {
        "e": Colour.RED,
        "f": np.float32(0.5),
        "b": np.bool_(False),
        "p": Place(name="Ulm"),
        "t": (1, 2),
    }
    template = "{{ x | tojson }}{{ x.d.picture }}{{ x.d.picture.save is defined }}"
    values = extra | {"d": Part("Bonn", Harmful())}
    text = render_template(template, [USER], continue_final_message=False, x=values)
    plain = '{"e": "red", "f": 0.5, "b": false, "p": {"name": "Ulm"}, "t": [1, 2], '
    plain += '"d": {"city": "Bonn", "picture": "<Harmful>"}}'
    assert text == plain + "<Harmful>False"

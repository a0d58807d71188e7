"""The one reader of chat messages: which forms it takes, and what it refuses by its place."""

import json
from typing import Any

import pytest

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import in_known_roles, read_messages, read_tools
from mlx_parallm.execution.json_values import JSONNumber, template_arguments, write_json
from mlx_parallm.execution.tool_calls import with_instructions

USER = {"role": "user", "content": "Wetter?"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "rain"}


def called(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", **call}]}


def function(arguments: Any) -> dict[str, Any]:
    return called(function={"name": "f", "arguments": arguments})


READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "null content": ({"role": "user", "content": None}, {"role": "user", "content": ""}),
    "parts": (
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}],
        },
        {"role": "user", "content": "abc"},
    ),
    "a tuple of parts": (
        {"role": "user", "content": ({"text": "a"},)},
        {"role": "user", "content": "a"},
    ),
    "a part that refuses": (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "no"},
    ),
    "a refusal": (
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": "no", "refusal": "no"},
    ),
    "nulls": ({**USER, "name": None, "tool_calls": None, "audio": None}, USER),
    "unknown fields": (
        {**USER, "mood": {"a": None}, "weight": 0},
        {**USER, "mood": {"a": None}, "weight": 0},
    ),
    "reasoning": (
        {"role": "assistant", "reasoning": "hm"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "thinking": "hm",
        },
    ),
    "thinking": (
        {"role": "assistant", "content": "x", "thinking": "hm"},
        {"role": "assistant", "content": "x", "thinking": "hm", "reasoning_content": "hm"},
    ),
    "the role function": (
        {"role": "function", "name": "f", "content": "3"},
        {"role": "tool", "content": "3", "name": "f"},
    ),
    "another role": ({"role": "critic", "content": "x"}, {"role": "critic", "content": "x"}),
}


@pytest.mark.parametrize("name", READ)
def test_a_message_has_one_form(name: str) -> None:
    """Kinds: content (text, null, parts of several APIs), OpenAI's older roles, reasoning by
    three names, nulls."""
    message, expected = READ[name]
    [read] = read_messages([message])
    assert read == expected
    assert read_messages([read]) == [read], "reading is idempotent"


CALLS: dict[str, tuple[dict[str, Any], Any]] = {
    "text": (function('{"city":"München"}'), '{"city":"München"}'),
    "object": (function({"city": "München"}), {"city": "München"}),
    "empty text": (function(""), {}),
    "blank text": (function(" \n"), {}),
    "null": (function(None), {}),
    "null as text": (function("null"), {}),
    "absent": (called(function={"name": "f"}), {}),
    "no JSON": (function('{"city": "Mün'), '{"city": "Mün'),
    "a list as text": (function("[1, 2]"), "[1, 2]"),
    "without function": (called(name="f", arguments='{"a": 1}'), '{"a": 1}'),
    "parameters": (called(name="f", parameters={"a": 1}), {"a": 1}),
    "OpenAI's older form": (
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": '{"a": 1}'},
        },
        '{"a": 1}',
    ),
    "a custom tool": (
        called(type="custom", custom={"name": "f", "input": "ls «x»"}),
        '{"input": "ls «x»"}',
    ),
    "no list": (
        {"role": "assistant", "tool_calls": {"function": {"name": "f", "arguments": "{}"}}},
        "{}",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_one_form(name: str) -> None:
    message, arguments = CALLS[name]
    [read] = read_messages([message])
    [call] = read["tool_calls"]
    assert call["type"] == "function" and call["function"] == {"name": "f", "arguments": arguments}
    assert read["content"] == "" and "function_call" not in read
    json.dumps(read)
    assert read_messages([read]) == [read]


def test_a_result_has_the_name_of_its_function() -> None:
    read = read_messages(
        [USER, function("{}"), RESULT, {**RESULT, "tool_call_id": "b"}, {**RESULT, "name": "own"}]
    )
    assert [message.get("name") for message in read[2:]] == ["f", None, "own"]


WRONG: dict[str, tuple[Any, str, str]] = {
    "no message": ("hello", "messages.0", r"messages: message 0 is not .*'hello'"),
    "no role": ({"content": "x"}, "messages.0", r"message 0 is not .*role"),
    "a role that is not text": ({"role": 7, "content": "x"}, "messages.0", r"message 0 is not"),
    "no content": ({"role": "user", "text": "x"}, "messages.0", r"message 0 is not .*content"),
    "no answer": ({"role": "assistant"}, "messages.0", r"message 0 is not"),
    "an object": ({"role": "tool", "content": {"a": 1}}, "messages.0.content", "not an object"),
    "an image": (
        {"role": "user", "content": [{"type": "image_url"}]},
        "messages.0.content.0",
        "'image_url'",
    ),
    "a number": ({"role": "user", "content": ["a", 3]}, "messages.0.content.1", "'int'"),
    "a part without text": (
        {"role": "user", "content": [{"type": "text"}]},
        "messages.0.content.0",
        "has no field 'text'",
    ),
    "sound": (
        {"role": "assistant", "content": "", "audio": {"id": "x"}},
        "messages.0.audio",
        "only text",
    ),
    "no call": (called(function="f"), "messages.0.tool_calls.0", "'function' with a 'name'"),
    "no name": (
        called(function={"arguments": "{}"}),
        "messages.0.tool_calls.0",
        "'function' with a 'name'",
    ),
    "a list": (function([1]), "messages.0.tool_calls.0.function.arguments", "JSON object"),
    "a number as arguments": (
        function(7),
        "messages.0.tool_calls.0.function.arguments",
        "JSON object",
    ),
    "no number of JSON": (
        function({"a": float("inf")}),
        "messages.0.tool_calls.0.function.arguments",
        "not JSON",
    ),
    "no value of JSON": (
        function({"a": {1, 2}}),
        "messages.0.tool_calls.0.function.arguments",
        "not JSON",
    ),
    "two forms": (
        function("{}") | {"function_call": {"name": "g"}},
        "messages.0.function_call",
        "send one of them",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_refused_by_its_place(name: str) -> None:
    message, place, reason = WRONG[name]
    with pytest.raises(RequestError, match=reason) as caught:
        read_messages([message])
    assert caught.value.param == place


def test_roles_that_a_template_knows() -> None:
    developer, critic = {"role": "developer", "content": "x"}, {"role": "critic", "content": "x"}
    assert in_known_roles([developer], "{{ message.role }}")[0]["role"] == "system"
    assert (
        in_known_roles([developer], "{% if m.role in ('system', 'developer') %}")[0]["role"]
        == "developer"
    )
    assert in_known_roles([critic], "{% if m['role'] == 'critic' %}") == [critic]
    assert in_known_roles([critic], None) == [critic]
    with pytest.raises(RequestError, match="'critic'"):
        in_known_roles([critic], "{{ message.role }}")


def test_definitions_of_tools_have_one_form() -> None:
    wrapped = {"type": "function", "function": {"description": "ü", "name": "f"}}
    for tools in (
        [wrapped],
        json.dumps([wrapped]),
        [{"description": "ü", "name": "f", "strict": None}],
    ):
        [read] = read_tools(tools)
        assert read == wrapped and list(read["function"]) == ["description", "name"], (
            "in the order of the client's"
        )
    assert read_tools(None) == read_tools("") == read_tools(" ") == read_tools([]) == []
    for wrong, reason in (
        ("{", "not JSON"),
        ('{"a": 1}', "not a list of objects"),
        ([1], "not a list of objects"),
    ):
        with pytest.raises(RequestError, match=reason):
            read_tools(wrong)


def test_nulls_leave_a_schema_but_for_its_values() -> None:
    schema = {
        "type": "object",
        "required": None,
        "properties": {
            "a": {"type": "string", "enum": None, "description": None, "default": None},
            "default": None,
            "b": {"anyOf": [{"const": None, "title": None}, {"enum": [None, 1]}], "items": None},
        },
        "$defs": {"x": None},
    }
    expected = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "default": None},
            "b": {"anyOf": [{"const": None}, {"enum": [None, 1]}]},
        },
        "$defs": {},
    }
    function = {"name": "f", "parameters": schema}
    for tool in (function, {"type": "function", "function": function}):
        assert read_tools([tool])[0]["function"]["parameters"] == expected


ODD = (
    '{"a": 1.10, "b": 1e400, "c": -0, "d": 1E5, "a":'
    ' 123456789012345678901234567890, "e": [1.0, {"ü": null}]}'
)


def test_numbers_and_repeated_keys_are_written_as_they_came() -> None:
    arguments = template_arguments(ODD)
    assert str(arguments) == write_json(arguments) == ODD
    compact = write_json(arguments, separators=(",", ":"))
    assert compact == ODD.replace(" ", "")
    assert write_json(
        template_arguments('{"b": {"y": 1, "x": [2]}, "a": "ü"}'), indent=2, sort_keys=True
    ) == json.dumps({"a": "ü", "b": {"x": [2], "y": 1}}, indent=2, ensure_ascii=False)
    assert write_json(
        template_arguments({"a": "ü", "b": [], "c": {}}), ensure_ascii=True, indent=1
    ) == json.dumps({"a": "ü", "b": [], "c": {}}, indent=1)
    assert (
        isinstance(arguments, dict)
        and isinstance(arguments["b"], JSONNumber)
        and arguments["e"][0] == 1.0
    )


def test_instructions_stand_below_parts_too() -> None:
    """An environment's own prompt: its system message may have parts, or none."""
    tool = {"name": "f", "description": "Grüße", "parameters": {"title": "ü"}}
    for content, begins in (
        ([{"type": "text", "text": "Be brief."}], "Be brief."),
        (None, ""),
        ("Be brief.", "Be brief."),
    ):
        [system, _] = with_instructions([{"role": "system", "content": content}, USER], [tool])
        assert system["content"].startswith(
            f"{begins}\n\nYou can use these tools:\n- f: Grüße Arguments: {{"
        )
        assert '"title": "ü"' in system["content"]

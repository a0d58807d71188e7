"""A chat answer's parts, without a server: what is reasoning, content and call, for any cut of
the text."""

import json
import pkgutil
import random
import re
from collections import Counter
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.execution.tool_calls import OwnFormat, parse_tool_calls
from mlx_parallm.models.mlx_lm_api import tool_parsers
from mlx_parallm.server.protocol.answer_parts import AnswerFormat, AnswerParts, AnswerSplitter

HERMES = import_module(f"{tool_parsers.__name__}.json_tools")
MISTRAL = import_module(f"{tool_parsers.__name__}.mistral")
THINK = ("<think>", "</think>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def form(parser=HERMES, **changes):
    markers = (parser.tool_call_start, parser.tool_call_end)
    name = parser.parse_tool_call.__module__.rpartition(".")[2]
    return AnswerFormat(
        THINK, markers, parse=parser.parse_tool_call, tools=TOOLS, tool_format=name, **changes
    )


def streamed(answer_format, text, cuts, complete=True):
    """The parts of a text that arrives in pieces, and the pieces' deltas put together as a
    client does."""
    splitter, parts = AnswerSplitter(answer_format), AnswerParts()
    edges = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(edges):
        parts = parts.plus(splitter.feed(text[start:end]))
    return parts.plus(splitter.finish(complete=complete))


def shape(parts):
    """Without the ids, which are random."""
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parts.whole_calls()
    ]
    return parts.reasoning, parts.content, calls


ADD = ("add", {"a": 1})
ANSWERS = {
    "plain": (" just \n text\n", ("", " just \n text\n", [])),
    "reasoning": ("<think>\nhm\n</think>\n\nyes", ("hm", "yes", [])),
    "only reasoning": ("<think>\nhm", ("hm", "", [])),
    "call": (f"I add.\n{CALL}", ("", "I add.", [ADD])),
    "two calls": (f"{CALL}\n{CALL}\n", ("", "", [ADD, ADD])),
    "all": (f"<think>a</think>b {CALL} c", ("a", "bc", [ADD])),
    "the end is forgotten": (CALL.removesuffix("</tool_call>"), ("", "", [ADD])),
    "one end is forgotten": (CALL.removesuffix("</tool_call>") + CALL, ("", "", [ADD, ADD])),
    "not JSON": (
        "so <tool_call>{oops</tool_call> it",
        ("", "so <tool_call>{oops</tool_call> it", []),
    ),
    "no call": ("<tool_call>[1]</tool_call>", ("", "<tool_call>[1]</tool_call>", [])),
    "a word about it": ("use <tool_call> so", ("", "use <tool_call> so", [])),
    "malformed, then right": (
        f"<tool_call>x</tool_call> {CALL}",
        ("", "<tool_call>x</tool_call>", [ADD]),
    ),
    "called while thinking": (f"<think>hm {CALL}", ("hm", "", [ADD])),
    "two calls while thinking": (
        f"<think>so {CALL} or {CALL}\n{CALL}\n",
        (f"so {CALL} or", "", [ADD, ADD]),
    ),
    "drafted and never decided": (f"<think>hm {CALL} or", (f"hm {CALL} or", "", [])),
    "thinking of a call": (
        f"<think>a <tool_call> b</think>c{CALL}",
        ("a <tool_call> b", "c", [ADD]),
    ),
    "a call that is drafted and dropped": (
        f"<think>perhaps {CALL}? no</think>{CALL}",
        (f"perhaps {CALL}? no", "", [ADD]),
    ),
    "thinking marks behind the thinking": (
        "<think>r</think>Use `<think>draft</think>` so. <think>x</think>",
        ("r", "Use `<think>draft</think>` so. <think>x</think>", []),
    ),
    "thinking marks behind content": ("So <think>x</think>", ("", "So <think>x</think>", [])),
    "thinking marks behind a call": (f"{CALL}<think>x</think>", ("", "<think>x</think>", [ADD])),
    "two calls between one pair of marks": (
        CALL.replace("}}\n", '}}\n{"name": "b", "parameters": {}}\n'),
        ("", "", [ADD, ("b", {})]),
    ),
    "a raw line end in JSON": (
        CALL.replace('"a": 1', '"a": "x\ny\tz"'),
        ("", "", [("add", {"a": "x\ny\tz"})]),
    ),
    "the last bracket is forgotten": (CALL.replace("}}", "}"), ("", "", [ADD])),
    "a bracket too many": (CALL.replace("}}", "}}}"), ("", "", [ADD])),
    "arguments beside the name": (
        '<tool_call>{"name": "add", "a": 1}</tool_call>',
        ("", '<tool_call>{"name": "add", "a": 1}</tool_call>', []),
    ),
    "thinking ends nowhere": ("a</think>b", ("", "a</think>b", [])),
    "a call with a thinking mark in it": (
        '<tool_call>{"name": "add", "arguments": {"a": "</think>"}}</tool_call>',
        ("", "", [("add", {"a": "</think>"})]),
    ),
    "half a mark": ("a <tool_cal", ("", "a <tool_cal", [])),
}


@pytest.mark.parametrize("text, expected", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_has_these_parts_whole_and_character_by_character(text, expected):
    assert shape(form().read(text, "stop")) == expected
    assert shape(streamed(form(), text, range(len(text)))) == expected
    own = OwnFormat(form().tool_markers, form().parse)
    calls = parse_tool_calls(text, TOOLS, "own", model_format=own)
    assert [(call.name, call.arguments) for call in calls] == expected[2], "in an episode"
    assert all(text[call.start_pos : call.end_pos] == call.raw_text for call in calls)


def test_a_prompt_that_opened_the_thinking_begins_in_it():
    text = f"hm\n</think>\n\nyes{CALL}"
    assert shape(form(starts_reasoning=True).read(text, "stop")) == ("hm", "yes", [ADD])
    text = f"{CALL}? no</think>{CALL} add(a=2)"
    own = OwnFormat(form().tool_markers, form().parse)
    calls = parse_tool_calls(text, ["add"], model_format=own)
    assert [call.arguments for call in calls] == [{"a": 1}, {"a": 2}]
    drafts = "so TOOL: add(a=1), or\nadd(a=1)\n</think>add(a=2)"
    assert [call.arguments for call in parse_tool_calls(drafts, ["add"])] == [{"a": 2}]


def test_what_a_limit_cuts_off_is_a_call_that_is_not_complete():
    counted = Counter()
    read = form(on_malformed=lambda: counted.update(n=1)).read
    for end, arguments in ((-14, '{"a": 1}'), (-15, '{"a": 1'), (-21, "{"), (-22, None)):
        parts = read(f"so {CALL}"[:end], "length")
        calls = [call["function"] for call in parts.whole_calls()]
        assert calls == ([] if arguments is None else [{"name": "add", "arguments": arguments}]), (
            end
        )
        assert parts.content == ("so" if calls else f"so {CALL}"[:end])
    assert not counted
    cut = CALL.removesuffix("\n</tool_call>")
    assert shape(read(f"{CALL}{cut[:-3]}", "stop")) == ("", cut[:-3], [ADD]) and counted["n"] == 1


def test_marks_in_the_arguments_of_a_forced_call_are_text():
    forced = form(forced=True)
    for inside in ("</tool_call>", "<tool_call>", "a</tool_call><tool_call></tool_call>"):
        call = CALL.replace('"a": 1', f'"a": "{inside}"')
        expected = [("add", {"a": inside})]
        assert shape(forced.read(call, "stop")) == ("", "", expected), inside
        assert shape(forced.read(call + CALL, "stop")) == ("", "", [*expected, ADD]), inside
        parts = forced.read(call[: call.index(inside, 12) + len(inside)], "length")
        [cut] = parts.whole_calls()
        assert cut["function"] == {"name": "add", "arguments": f'{{"a": "{inside}'}, inside
    assert forced.read("<tool_call>" + "</tool_call>" * 100_000, "length") is not None, "no hang"


def test_without_parallel_calls_the_first_is_given():
    only = form(parallel=False)
    assert shape(only.read(f"{CALL}{CALL}x", "stop")) == ("", "x", [ADD])
    both = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "b", "arguments": {}}]'
    assert shape(form(MISTRAL).read(both, "stop")) == ("", "", [ADD, ("b", {})])
    assert shape(form(MISTRAL, parallel=False).read(both, "stop")) == ("", "", [ADD])


def test_a_format_without_an_end_mark():
    text = 'ok [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}'
    assert shape(form(MISTRAL).read(text, "stop")) == ("", "ok", [ADD, ADD])
    assert shape(form(MISTRAL).read("[TOOL_CALLS]add[ARGS]{", "stop")) == (
        "",
        "[TOOL_CALLS]add[ARGS]{",
        [],
    )


IN_EVERY_FORMAT = {
    "function_gemma": "<start_function_call>call:sky{city:<escape>Köln<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:sky{city:<|"|>Köln<|"|>}<tool_call|>',
    "glm47": "<tool_call>sky<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>",
    "json_tools": '<tool_call>{"name": "sky", "arguments": {"city": "Köln"}}</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.sky:0<|tool_call_argument_begin|>"
    '{"city": "Köln"}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="sky" index="1"<|sep|><|open|>argument'
    ' key="city" type="string"'
    "<|sep|>Köln<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "laguna": "<tool_call>sky<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>",
    "longcat": "<longcat_tool_call>sky<longcat_arg_key>city</longcat_arg_key><longcat_arg_value>Köln"
    "</longcat_arg_value></longcat_tool_call>",
    "minicpm5": '<function name="sky"><param name="city">Köln</param></function>',
    "minimax_m2": '<minimax:tool_call><invoke name="sky"><parameter'
    ' name="city">Köln</parameter></invoke>'
    "</minimax:tool_call>",
    "mistral": '[TOOL_CALLS]sky[ARGS]{"city": "Köln"}',
    "muse_spark": '<atem:function_calls><atem:invoke name="sky"><atem:parameter'
    ' name="city">Köln</atem:parameter>'
    "</atem:invoke></atem:function_calls>",
    "pythonic": '<|tool_call_start|>[sky(city="Köln")]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=sky>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>",
}


def test_every_format_that_mlx_lm_knows_is_read():
    assert {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)} == set(
        IN_EVERY_FORMAT
    )
    for name, call in IN_EVERY_FORMAT.items():
        answer_format = form(import_module(f"{tool_parsers.__name__}.{name}"))
        for text in (call, f"so {call}"):
            parts = streamed(answer_format, text, range(len(text)))
            assert shape(parts) == ("", text[: -len(call)].strip(), [("sky", {"city": "Köln"})]), (
                name
            )


LONG = 'if a < b: print("x, y")\n# Köln {1} </ end'
GROWING = {  # format → a call with a long text, a number and a list
    "function_gemma": f"<start_function_call>call:sky{{code:<escape>{LONG.replace('}', ')')}<escape>,n:12}}"
    "<end_function_call>",
    "gemma4": f'<|tool_call>call:sky{{code:<|"|>{LONG}<|"|>,n:12}}<tool_call|>',
    "glm47": f"<tool_call>sky<arg_key>code</arg_key><arg_value>{LONG}</arg_value><arg_key>n</arg_key><arg_value>12"
    "</arg_value></tool_call>",
    "json_tools": (
        f'<tool_call>\n{{"name": "sky", "arguments": {{"code": {json.dumps(LONG)},'
        f' "n":12}}}}\n</tool_call>'
    ),
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.sky:0<|tool_call_argument_begin|>"
    f'{{"code": {json.dumps(LONG)}, "n": 12}}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="sky" index="1"<|sep|><|open|>argument'
    ' key="code" type="string"'
    f'<|sep|>{LONG}<|close|>argument<|sep|><|open|>argument key="n"'
    ' type="number"<|sep|>12<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "longcat": f"<longcat_tool_call>sky<longcat_arg_key>code</longcat_arg_key><longcat_arg_value>{LONG}"
    "</longcat_arg_value><longcat_arg_key>n</longcat_arg_key><longcat_arg_value>12</longcat_arg_value>"
    "</longcat_tool_call>",
    "minicpm5": (
        f'<function name="sky"><param name="code">{LONG}</param><param'
        ' name="n">12</param></function>'
    ),
    "minimax_m2": '<minimax:tool_call><invoke name="sky"><parameter'
    f' name="code">{LONG}</parameter><parameter name="n">'
    "12</parameter></invoke></minimax:tool_call>",
    "mistral": f'[TOOL_CALLS]sky[ARGS]{{"code": {json.dumps(LONG)}, "n": 12}}',
    "muse_spark": '<atem:function_calls><atem:invoke name="sky"><atem:parameter'
    f' name="code">{LONG}</atem:parameter>'
    '<atem:parameter name="n">12</atem:parameter></atem:invoke></atem:function_calls>',
    "pythonic": f"<|tool_call_start|>[sky(code={LONG!r}, n=12)]<|tool_call_end|>",
    "qwen3_coder": f"<tool_call>\n<function=sky>\n<parameter=code>\n{LONG}\n</parameter>\n<parameter=n>\n12\n"
    "</parameter>\n</function>\n</tool_call>",
}
SKY = {"type": "object", "properties": {"code": {"type": "string"}, "n": {"type": "integer"}}}


@pytest.mark.parametrize("name", GROWING)
def test_arguments_grow_as_they_are_written(name):
    """In most formats within a text, too; in the others argument by argument."""
    tools = [{"type": "function", "function": {"name": "sky", "parameters": SKY}}]
    answer_format = replace(form(import_module(f"{tool_parsers.__name__}.{name}")), tools=tools)
    whole = answer_format.read(GROWING[name], "stop").whole_calls()[0]["function"]
    splitter, pieces = AnswerSplitter(answer_format), []
    for character in GROWING[name]:
        pieces += splitter.feed(character).tool_calls
    pieces += splitter.finish(complete=True).tool_calls
    [(first, *later)] = [pieces]
    assert first["function"]["name"] == "sky" and {piece["index"] for piece in pieces} == {0}
    assert not any("id" in piece or "name" in piece["function"] for piece in later)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == whole["arguments"]
    code = LONG.replace("}", ")") if name == "function_gemma" else LONG
    assert json.loads(whole["arguments"]) == {"code": code, "n": 12}
    by_argument = ("function_gemma", "gemma4", "kimi_k3", "muse_spark", "pythonic")
    assert len(pieces) >= (3 if name in by_argument else 25)


NO_CALLS = {  # format → texts that look like calls
    "glm47": (
        "The `<tool_call></tool_call>` marks.",
        "<tool_call>add<arg_key>a</arg_key>x</tool_call>",
        "<tool_call>I will now edit the file.</tool_call>",
        "<tool_call>edit</tool_call>",
    ),
    "longcat": (
        "<longcat_tool_call></longcat_tool_call>",
        "<longcat_tool_call>so</longcat_tool_call>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call><function=add>so</function></tool_call>",
        "use <function=add> so",
        "<function=other>\n</function>",
    ),
    "minimax_m2": ('<minimax:tool_call><invoke name="add">1</invoke></minimax:tool_call>',),
    "muse_spark": ('<atem:function_calls><atem:invoke name="add"></atem:function_calls>',),
    "minicpm5": (
        '<function name="add">1</function>',
        '<function name="add"><param name="a">1</function>',
    ),
    "kimi_k2": ("<|tool_calls_section_begin|>functions.add:0 {}<|tool_calls_section_end|>",),
    "kimi_k3": ("<|open|>tools<|sep|>add<|close|>tools<|sep|>",),
    "mistral": ("[TOOL_CALLS] so", "[TOOL_CALLS]add[ARGS]1"),
    "function_gemma": ("<start_function_call>call:add so<end_function_call>",),
    "gemma4": (
        "<|tool_call>call:add{a:1} then<tool_call|>",
        "<|tool_call>call:add{a:1<tool_call|>",
    ),
    "pythonic": (
        "<|tool_call_start|>[add(1)]<|tool_call_end|>",
        "<|tool_call_start|>[]<|tool_call_end|>",
    ),
    "json_tools": ('<tool_call>{"name": "add", "arguments": {}, "why": 1}</tool_call>',),
}


@pytest.mark.parametrize("name", NO_CALLS)
def test_what_is_no_call_is_text(name):
    answer_format = form(import_module(f"{tool_parsers.__name__}.{name}"))
    for text in NO_CALLS[name]:
        assert shape(answer_format.read(text, "stop")) == ("", text, []), text
        shown = streamed(answer_format, text, range(len(text)))
        # the object of arguments has ended before the key of no meaning comes
        assert (shown.content, shape(shown)[2]) == (text, [("add", {})] if "why" in text else [])


BARE = {
    "qwen3_coder": "<function=add>\n<parameter=a>\n</function>\n</parameter>\n</function>",
    "minimax_m2": '<invoke name="add"><parameter name="a">\n</function>\n</parameter></invoke>',
    "muse_spark": '<atem:invoke name="add"><atem:parameter name="a">\n</function>\n'
    "</atem:parameter></atem:invoke>",
}


@pytest.mark.parametrize("name", BARE)
def test_a_call_of_a_declared_tool_needs_no_tool_markers(name):
    answer_format = form(import_module(f"{tool_parsers.__name__}.{name}"))
    called = ("add", {"a": "</function>" if name == "qwen3_coder" else "\n</function>\n"})
    text = f"so {BARE[name]}\n{BARE[name]} then"
    expected = ("", "sothen", [called, called])
    assert shape(answer_format.read(text, "stop")) == expected
    assert shape(streamed(answer_format, text, range(len(text)))) == expected
    own = OwnFormat(answer_format.tool_markers, answer_format.parse)
    calls = parse_tool_calls(text, ["add"], "own", model_format=own)
    assert [(call.name, call.arguments) for call in calls] == [called, called]
    assert calls[1].raw_text == BARE[name] and not calls.malformed


TOLD_APART = {  # texts that a call can hold, or write in another way
    "an apostrophe that is not escaped": (
        "pythonic",
        "<|tool_call_start|>[add(t='it's a, b=3', n=[1])]<|tool_call_end|>",
        {"t": "it's a, b=3", "n": [1]},
    ),
    "a comma behind the last argument": (
        "pythonic",
        "<|tool_call_start|>[add(n=1, t='x',),]<|tool_call_end|>",
        {"n": 1, "t": "x"},
    ),
    "texts without marks": (
        "function_gemma",
        "<start_function_call>call:add{t:New York, NY,n:[1,2]}<end_function_call>",
        {"t": "New York, NY", "n": [1, 2]},
    ),
    "an argument that is repeated": (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=t>\na\n</parameter>\n<parameter=t>\nb\n"
        "</parameter>\n</function>\n</tool_call>",
        {"t": "b"},
    ),
    "a date for a number": (
        "glm47",
        "<tool_call>add<arg_key>n</arg_key><arg_value>2026-01-15</arg_value></tool_call>",
        {"n": "2026-01-15"},
    ),
    "Mistral's id of a call": (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"t": "a\nb"}',
        {"t": "a\nb"},
    ),
}


@pytest.mark.parametrize("case", TOLD_APART)
def test_a_call_is_the_same_whole_and_streamed(case):
    name, text, arguments = TOLD_APART[case]
    properties = {"t": {"type": "string"}, "n": {"type": "integer"}}
    function = {"name": "add", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function}]
    answer_format = replace(form(import_module(f"{tool_parsers.__name__}.{name}")), tools=tools)
    expected = ("", "so", [("add", arguments)])
    assert shape(answer_format.read(f"so {text}", "stop")) == expected
    assert shape(streamed(answer_format, f"so {text}", range(len(text)))) == expected
    own = OwnFormat(answer_format.tool_markers, answer_format.parse)
    [call] = parse_tool_calls(text, [function], "own", model_format=own)
    assert call.arguments == arguments


FORGOTTEN = {  # format → what a model forgets between two calls
    "qwen3_coder": "</function>\n</tool_call><tool_call>\n",
    "glm47": "</tool_call><tool_call>",
    "laguna": "</tool_call><tool_call>",
    "longcat": "</longcat_tool_call><longcat_tool_call>",
    "minimax_m2": "</invoke></minimax:tool_call><minimax:tool_call>",
    "muse_spark": "</atem:invoke></atem:function_calls><atem:function_calls>",
    "kimi_k3": "<|close|>call<|sep|><|close|>tools<|sep|><|open|>tools<|sep|>",
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_two_calls_between_one_pair_of_marks_are_not_one_with_the_text_of_both(name):
    call = IN_EVERY_FORMAT[name]
    answer_format = form(import_module(f"{tool_parsers.__name__}.{name}"))
    text = (call + call).replace(FORGOTTEN[name], "")
    assert len(text) < 2 * len(call)
    sky = ("sky", {"city": "Köln"})
    assert shape(answer_format.read(text, "stop")) == ("", "", [sky, sky])
    assert shape(streamed(answer_format, text, range(len(text)))) == ("", "", [sky, sky])
    own = OwnFormat(answer_format.tool_markers, answer_format.parse)
    calls = parse_tool_calls(text, ["sky"], "own", model_format=own)
    assert [(call.name, call.arguments) for call in calls] == [sky, sky]


def test_text_behind_a_call_without_an_end_mark_is_content():
    text = '[TOOL_CALLS]add[ARGS]{"a": 1} then [TOOL_CALLS]add[ARGS]{"a": 1} so'
    for reason in ("stop", "length"):
        assert shape(form(MISTRAL).read(text, reason)) == ("", "thenso", [ADD, ADD])
    assert shape(streamed(form(MISTRAL), text, range(len(text)))) == ("", "thenso", [ADD, ADD])


@pytest.mark.parametrize(
    "call",
    [
        *(
            "7",
            "null",
            '{"name": ""}',
            '{"name": 3}',
            '{"name": "f", "arguments": [1]}',
            "[" * 3000 + "]" * 3000,
        ),
        *('{"name": "f", "arguments": {"a": NaN}}', '{"name": "\\ud800"}', '{"arguments": {}}'),
    ],
)
def test_whatever_else_a_model_writes_there_is_text(call):
    text = f"<tool_call>{call}</tool_call>"
    assert shape(form().read(text, "stop")) == ("", text, [])


def test_arguments_are_json_that_can_be_sent():
    text = '<tool_call>{"name": "f", "arguments": {"a": "é\\ud800"}}</tool_call>'
    [call] = form().read(text, "stop").whole_calls()
    assert json.loads(call["function"]["arguments"].encode()) == {"a": "é\ud800"}
    assert re.fullmatch("[0-9a-z]{9}", call["id"])
    text = '<tool_call>{"name": "f", "id": "mine", "arguments": "{\\"a\\": 1}"}</tool_call>'
    [call] = form().read(text, "stop").whole_calls()
    assert call == {
        "id": "mine",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }


PIECES = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            CALL,
            "<",
            "</",
            "<tool",
            "call>",
            " ",
            "\n",
            "é",
            "a b",
        ),
        *("{}", "[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1}', "[TOOL"),
    ]
)


def characters(text):
    return Counter(re.sub(r"\s", "", text))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(PIECES, max_size=14),
    st.booleans(),
    st.booleans(),
    st.sampled_from([HERMES, MISTRAL]),
    st.data(),
)
def test_for_any_cut_the_stream_is_the_answer_and_nothing_is_lost(
    pieces, opened, complete, parser, data
):
    text = "".join(pieces)
    answer_format = form(parser, starts_reasoning=opened)
    whole = answer_format.read(text, "stop" if complete else "length")
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    assert shape(streamed(answer_format, text, cuts, complete)) == shape(whole)
    if parser is MISTRAL:  # its parser leaves aside what follows a call, which has no end mark
        return
    calls = characters('{"name":"add","arguments":{"a":1}}')
    lost = characters(text) - characters(whole.content) - characters(whole.reasoning)
    for _ in whole.tool_calls:
        assert calls <= lost
        lost -= calls
    marks = [*THINK, parser.tool_call_start, parser.tool_call_end]
    # What is left over is marks: no more of them than the text had.
    most = sum((characters(mark * text.count(mark)) for mark in marks if mark), Counter())
    assert lost <= most
    if not any(mark in text for mark in marks if mark):
        assert (whole.reasoning if opened else whole.content) in (
            text,
            text.lstrip() if opened else text,
        )


def test_a_degenerate_answer_takes_no_more_than_linear_time():
    rng = random.Random(1)
    text = "".join(
        rng.choice(["<tool_call>", "<think>", "</think>", "</tool_", "x"]) for _ in range(40_000)
    )
    assert form().read(text, "stop").content

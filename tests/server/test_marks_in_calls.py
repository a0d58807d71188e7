"""Arguments that hold what looks like the call's own markup: one call, the whole text, in every
format, for any cut.

The fault: `</tool_call>` within a JSON string ended the call (vllm #45167), and
`<parameter=b>1</parameter>` within a parameter of Qwen3-Coder's cut the text (vllm #33965: mlx-lm's
parser takes the first end tag). Other members that were looked at: start marks, `[TOOL_CALLS]`,
think marks, closing brackets in Gemma's texts, GLM's and MiniMax' tags, Kimi's special tokens,
quotes and escapes, two calls in a row, calls that a limit cuts, calls without an end, episodes
(`execution.tool_calls`). Each format is given the marks of all.
"""

import json
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.execution.call_text import inside_value
from mlx_parallm.execution.tool_calls import OwnFormat, parse_tool_calls
from mlx_parallm.models.mlx_lm_api import tool_parsers
from mlx_parallm.server.protocol.answer_parts import AnswerFormat
from tests.server.test_answer_parts import shape, streamed

PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string"}, "n": {"type": "integer"}},
}
TOOLS: Any = [{"type": "function", "function": {"name": "sky", "parameters": PARAMETERS}}]
_IN_JSON = '{"code": JSON, "n": 12}'
CALLS = {  # TEXT stands for the text, JSON for its JSON, PYTHON for Python's
    "function_gemma": "<start_function_call>call:sky{code:<escape>TEXT<escape>,n:12}<end_function_call>",
    "gemma4": '<|tool_call>call:sky{code:<|"|>TEXT<|"|>,n:12}<tool_call|>',
    "glm47": "<tool_call>sky<arg_key>code</arg_key><arg_value>TEXT</arg_value><arg_key>n</arg_key><arg_value>12"
    "</arg_value></tool_call>",
    "json_tools": f'<tool_call>\n{{"name": "sky", "arguments": {_IN_JSON}}}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.sky:0<|tool_call_argument_begin|>"
    f"{_IN_JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="sky" index="1"<|sep|><|open|>argument'
    ' key="code" type="string"'
    '<|sep|>TEXT<|close|>argument<|sep|><|open|>argument key="n"'
    ' type="number"<|sep|>12<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "longcat": "<longcat_tool_call>sky<longcat_arg_key>code</longcat_arg_key><longcat_arg_value>TEXT"
    "</longcat_arg_value><longcat_arg_key>n</longcat_arg_key><longcat_arg_value>12</longcat_arg_value>"
    "</longcat_tool_call>",
    "minicpm5": (
        '<function name="sky"><param name="code">TEXT</param><param name="n">12</param></function>'
    ),
    "minimax_m2": '<minimax:tool_call><invoke name="sky"><parameter name="code">TEXT</parameter>'
    '<parameter name="n">12</parameter></invoke></minimax:tool_call>',
    "mistral": f"[TOOL_CALLS]sky[ARGS]{_IN_JSON}",
    "muse_spark": '<atem:function_calls><atem:invoke name="sky"><atem:parameter'
    ' name="code">TEXT</atem:parameter>'
    '<atem:parameter name="n">12</atem:parameter></atem:invoke></atem:function_calls>',
    "pythonic": "<|tool_call_start|>[sky(code=PYTHON, n=12)]<|tool_call_end|>",
    "qwen3_coder": "<tool_call>\n<function=sky>\n<parameter=code>\nTEXT\n</parameter>\n<parameter=n>\n12\n"
    "</parameter>\n</function>\n</tool_call>",
}
ENDS = [
    "<end_function_call>",
    "<tool_call|>",
    "<|tool_calls_section_end|>",
    "<|close|>tools<|sep|>",
]
ENDS += [
    "</longcat_tool_call>",
    "</minimax:tool_call>",
    "</atem:function_calls>",
    "<|tool_call_end|>",
]
NESTED = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
TEXTS = [
    *(
        "a </tool_call> b",
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "</think>",
        NESTED,
    ),
    *(
        "[TOOL_CALLS]f[ARGS]{}",
        "<parameter=b>1</parameter>",
        "a <parameter=b>1</parameter> c",
        "a </parameter> b",
    ),
    *(
        "use <parameter=x> so",
        "<parameter=b>\n1\n</parameter>\n<parameter=c>\n2\n</parameter>",
        "</function>",
    ),
    *(
        "</arg_value> z",
        "<arg_key>k</arg_key>",
        "<|tool_call_end|> a, b)]",
        "{a: {b}}",
        "}",
        "\"quoted\" 'and'",
    ),
    *(
        'back\\slash \\" \\n',
        "ü😀",
        '<parameter name="b">1</parameter>',
        '<param name="b">1</param>',
        "a, b=3)",
        "",
    ),
    *("<atem:parameter name='b'>1</atem:parameter>", "1 < 2 > 3", "</", "<think>", *ENDS),
]


def answer_form(name: str) -> AnswerFormat:
    parser = import_module(f"{tool_parsers.__name__}.{name}")
    markers = (parser.tool_call_start, parser.tool_call_end)
    return AnswerFormat(
        ("<think>", "</think>"),
        markers,
        parse=parser.parse_tool_call,
        tools=TOOLS,
        tool_format=name,
    )


def call_with(name: str, text: str) -> str:
    written = {"JSON": json.dumps(text), "PYTHON": repr(text), "TEXT": text}
    key = next(key for key in written if key in CALLS[name])
    return CALLS[name].replace(key, written[key])


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_keeps_the_marks_that_it_holds(name: str) -> None:
    form = answer_form(name)
    for text in TEXTS:
        call, wanted = call_with(name, text), ("sky", {"code": text, "n": 12})
        for answer, count in ((f"so {call}", 1), (f"so {call}{call}", 2)):
            parts = shape(form.read(answer, "stop"))
            assert parts == ("", "so", [wanted] * count), text
            assert shape(streamed(form, answer, range(0, len(answer), 7))) == parts, text
            assert form.parse is not None and form.tool_markers is not None
            own = OwnFormat(form.tool_markers, form.parse)
            episode = parse_tool_calls(answer, [TOOLS[0]["function"]], "own", model_format=own)
            assert [(each.name, each.arguments) for each in episode] == [wanted] * count, text


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(CALLS)),
    st.lists(st.sampled_from([*TEXTS, "a", " ", "\n", '"', "'", "\\"]), max_size=4),
    st.integers(0, 400),
    st.booleans(),
    st.data(),
)
def test_for_any_cut_the_stream_is_the_answer(
    name: str, texts: list[str], limit: int, complete: bool, data: Any
) -> None:
    """Also of answers that a limit cuts, and of calls that are broken by what they hold."""
    form = answer_form(name)
    answer = f"so {call_with(name, ''.join(texts))} then"
    answer = answer if complete else answer[:limit]
    whole = form.read(answer, "stop" if complete else "length")
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    piecewise = streamed(form, answer, cuts, complete)
    calls = [call["function"] for call in whole.whole_calls()]
    shown = [call["function"] for call in piecewise.whole_calls()]
    # of a call that grows argument by argument the two may show different beginnings
    if not complete:
        for call, other in zip(calls, shown, strict=False):
            assert call["name"] == other["name"]
            longer, shorter = sorted((call["arguments"], other["arguments"]), key=len, reverse=True)
            assert longer.startswith(shorter)
        return
    if calls or not shown:
        assert shown == calls and piecewise.content == whole.content
    for call in calls:
        assert json.loads(call["arguments"]).keys() <= {"code", "n"}


BROKEN = {  # the text is content, or all of it is a call: never a part
    "a parameter without an end": (
        "qwen3_coder",
        "<tool_call>\n<function=sky>\n<parameter=code>\na\n</function>\n</tool_call>",
    ),
    "an end tag too many": (
        "qwen3_coder",
        (
            "<tool_call>\n<function=sky>\n<parameter=code>\na\n</parameter>\n</parameter>"
            " x\n</function>\n</tool_call>"
        ),
    ),
    "a string without an end": (
        "json_tools",
        '<tool_call>{"name": "sky", "arguments": {"code": "a}}</tool_call>',
    ),
    "python that is none": (
        "pythonic",
        '<|tool_call_start|>[sky(code="a" b, n=1)]<|tool_call_end|>',
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_call_is_content_as_a_whole_and_the_next_one_counts(case: str) -> None:
    name, broken = BROKEN[case]
    form, fine = answer_form(name), call_with(name, "x")
    for answer in (broken, f"{broken}\n{fine}", f"{broken} then {fine}"):
        reasoning, content, calls = shape(form.read(answer, "stop"))
        assert reasoning == "" and calls == (
            [("sky", {"code": "x", "n": 12})] if fine in answer else []
        )
        assert content.startswith(broken), content


def test_an_endless_number_of_marks_takes_no_endless_time() -> None:
    form = answer_form("json_tools")
    text = '<tool_call>{"name": "sky", "arguments": {"code": "' + "</tool_call>" * 20_000
    assert form.read(text, "length") is not None
    assert form.parse is not None and form.tool_markers is not None
    parse_tool_calls(
        '<tool_call>{"' * 5_000, [], "own", model_format=OwnFormat(form.tool_markers, form.parse)
    )


def test_a_word_with_a_quotation_mark_opens_no_string() -> None:
    for text in ('say "hi', "x", ""):
        assert not inside_value("json_tools", text)
    assert inside_value("json_tools", '{"a": "b\\')
    assert not inside_value("json_tools", '{"a": "b}\n'), "no string holds the end of a line"

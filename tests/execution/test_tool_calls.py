"""Calls found in text: each format, where it stands, and that nothing a model writes raises."""

import json
import keyword

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_calls import (
    FORMATS,
    OwnFormat,
    ParsedCalls,
    openai_tools,
    parse_tool_calls,
    tool_definition,
    with_instructions,
)

OWN = OwnFormat(("<tool_call>", "</tool_call>"), lambda text, tools: json.loads(text))
ENDLESS = OwnFormat(("[TOOL_CALLS]", ""), lambda text, tools: json.loads(text))
TOOLS = [
    {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {}}},
    },
    "now",
]


def found(
    text: str, tools: object = TOOLS, formats: object = "auto", own: OwnFormat | None = None
) -> ParsedCalls:
    calls = parse_tool_calls(text, tools, formats, model_format=own)  # type: ignore[arg-type]
    for place in (*calls, *calls.malformed):
        assert text[place.start_pos : place.end_pos] == place.raw_text != ""
    return calls


def read(text: str, **options: object) -> list[tuple[str, dict[str, object]]]:
    calls = found(text, **options)  # type: ignore[arg-type]
    assert not calls.malformed, calls.malformed
    return [(call.name, dict(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('```json\n{"tool": "f", "arguments": {"x": 1}}\n```', [("f", {"x": 1})]),
        ('so ```{"name": "f", "args": {"x": [1, null]}}``` then', [("f", {"x": [1, None]})]),
        ('```tool_call\n{"name": "f", "parameters": "{\\"x\\": 1}"}\n```', [("f", {"x": 1})]),
        ('```json\n[{"tool": "f"}, {"tool": "g", "arguments": {}}]\n```', [("f", {}), ("g", {})]),
        (' {"name": "f", "parameters": {"x": "a"}}\n', [("f", {"x": "a"})]),
        ('```json\n{"name": "Ada", "age": 36}\n```', []),
        ('```json\n{"broken": \n```', []),
        ('```python\n{"tool": "f"}\n```', []),
        ('<invoke name="f"><parameter name="x">1</parameter></invoke>', [("f", {"x": 1})]),
        (
            "<invoke name='f'>\n<parameter name='x'> a &lt; b </parameter>\n</invoke >",
            [("f", {"x": "a < b"})],
        ),
        (
            '<invoke name="search"><parameter name="query">12</parameter></invoke>',
            [("search", {"query": "12"})],
        ),
        ('<invoke name="now"/> and <invoke name="now"></invoke>', [("now", {}), ("now", {})]),
        ("USE_TOOL[search](MLX on Linux)", [("search", {"query": "MLX on Linux"})]),
        (
            "USE_TOOL[ask](Newton's third law (1687)) said I",
            [("ask", {"input": "Newton's third law (1687)"})],
        ),
        ("USE_TOOL[search](2 + 3)", [("search", {"query": "2 + 3"})]),
        ("USE_TOOL[search](2+2=4)", [("search", {"query": "2+2=4"})]),
        ('USE_TOOL[search]("a ) b", limit=3)', [("search", {"query": "a ) b", "limit": 3})]),
        ('USE_TOOL[ask]("a ) b") c', [("ask", {"input": '"a ) b"'})]),
        ('USE_TOOL[search](find "a ) b" now) c)', [("search", {"query": 'find "a ) b" now'})]),
        (
            "USE_TOOL[ask](find ':) ' in Newton's (2) texts) c)",
            [("ask", {"input": "find ':) ' in Newton's (2) texts"})],
        ),
        (
            "USE_TOOL[ask](Newton's (and Kepler's) laws) c",
            [("ask", {"input": "Newton's (and Kepler's) laws"})],
        ),
        ('USE_TOOL[ask](a 5" pipe (old)) and "x)"', [("ask", {"input": 'a 5" pipe (old)'})]),
        ("USE_TOOL[ask]('tis (so) good) c", [("ask", {"input": "'tis (so) good"})]),
        (
            "USE_TOOL[search](music of the '80s)\nUSE_TOOL[search](music of the '90s)",
            [
                ("search", {"query": "music of the '80s"}),
                ("search", {"query": "music of the '90s"}),
            ],
        ),
        (
            "USE_TOOL[ask](the '80s) USE_TOOL[ask](dogs' tails)",
            [("ask", {"input": "the '80s"}), ("ask", {"input": "dogs' tails"})],
        ),
        ("USE_TOOL[ask](the '80s) So:\nthe dogs' tails :)", [("ask", {"input": "the '80s"})]),
        (
            "USE_TOOL[search](hits of the '90s) Let's see :)",
            [("search", {"query": "hits of the '90s"})],
        ),
        (
            'USE_TOOL[ask](say ":)" and\nNewton\'s) c)',
            [("ask", {"input": 'say ":)" and\nNewton\'s'})],
        ),
        ('USE_TOOL[ask](Newton\'s "(" sign) c', [("ask", {"input": 'Newton\'s "(" sign'})]),
        ('USE_TOOL[ask]({"x": true})', [("ask", {"x": True})]),
        ("USE_TOOL[now]()", [("now", {})]),
        ("I search(query='a, (b)', limit=-2) it", [("search", {"query": "a, (b)", "limit": -2})]),
        ('search("MLX", true)', [("search", {"query": "MLX", "limit": True})]),
        (r'search(query="\d+\n")', [("search", {"query": "\\d+\n"})]),
        ("research(1) x.search(2) print(3)", []),
        ("search(query=north, limit=2 * 3)", [("search", {"query": "north", "limit": "2 * 3"})]),
    ],
)
def test_each_format_is_read(text: str, expected: list[tuple[str, dict[str, object]]]) -> None:
    assert read(text) == expected


def test_a_models_own_format_goes_before_the_others() -> None:
    text = (
        'a<tool_call>{"name": "f", "arguments": {"q":'
        ' "search(1)"}}</tool_call>b<tool_call>[{"name": "g"}]'
    )
    assert read(text, own=OWN) == [("f", {"q": "search(1)"}), ("g", {})]
    assert read('[TOOL_CALLS]{"name": "f"}[TOOL_CALLS]{"name": "g"}', own=ENDLESS) == [
        ("f", {}),
        ("g", {}),
    ]
    several = found('<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', own=OWN)
    assert [(call.name, call.start_pos) for call in several] == [("f", 0), ("g", 0)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": {"q": "search(1)"}</tool_call>', "own format"),
        ('```json\n{"tool": "f", "arguments": {"x": }}\n```', "not JSON"),
        ('```json\n{"tool": "f", "arguments": [1]}\n```', "not an object"),
        ('```json\n{"tool": "", "arguments": {}}\n```', "the tool's name is ''"),
        ('```json\n[{"tool": "f"}, 3]\n```', "something else"),
        ('```json\n{"tool": "f", "arguments": {"x": NaN}}\n```', "NaN is not JSON"),
        ("<invoke><parameter name='x'>1</parameter></invoke>", "has no name"),
        ('<invoke name="f">hello</invoke>', "there is 'hello' between the parameters"),
        ('<invoke name="f"><parameter>1</parameter></invoke>', "a parameter has no name"),
        ('before <invoke name="f"><parameter name="x">1', "<invoke> is not closed"),
        ("USE_TOOL[f](1", "not closed"),
        ("USE_TOOL[](1)", "names no tool"),
        ("search(query='a", "not closed"),
        ("now(1, 2)", "2 arguments without a name, 0 parameters"),
        ("search('a', query='b')", "is repeated"),
        ("search(*words)", "has a star"),
        ("search(a b)", "no arguments"),
        ("search(1)(2", "not closed"),
    ],
)
def test_what_cannot_be_read_is_reported_with_its_place(text: str, reason: str) -> None:
    calls = found(text, own=OWN)
    if text == "search(1)(2":  # the first pair of parentheses is a call
        assert [call.name for call in calls] == ["search"]
        return
    assert not calls
    [malformed] = calls.malformed
    assert reason in malformed.reason


def test_formats_can_be_chosen() -> None:
    text = '<invoke name="f"/> USE_TOOL[g]() h(1)'
    assert read(text, tools=(), formats="xml") == [("f", {})]
    assert read(text, tools=(), formats=("use_tool", "xml")) == [("f", {}), ("g", {})]
    assert read("f(x=1) and then g(y='2')", tools=(), formats="function") == [
        ("f", {"x": 1}),
        ("g", {"y": "2"}),
    ]
    assert read("f(x=1)", tools=()) == []
    with pytest.raises(ConfigError, match="'yaml'"):
        found("", formats="yaml")
    with pytest.raises(ConfigError, match="no parser for this model"):
        found("", formats="own")


def test_a_tool_is_a_name_a_dictionary_or_a_function() -> None:
    def add(a: int, b: float = 2.0, *, note: str = "") -> float:
        """The sum of two numbers.

        More that the model need not know.
        """
        return a + b

    made = tool_definition(add)
    assert (made["name"], made["description"]) == ("add", "The sum of two numbers.")
    assert {name: entry["type"] for name, entry in made["parameters"]["properties"].items()} == {
        "a": "integer",
        "b": "number",
        "note": "string",
    }
    assert made["parameters"]["required"] == ["a"]
    assert tool_definition("now") == {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert tool_definition(openai_tools([made])[0]) == made
    for wrong in ({}, {"name": " "}, 3, {"name": "f", "parameters": ["a"]}):
        with pytest.raises(ConfigError):
            tool_definition(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="callable by name"):
        tool_definition(lambda *words: words)


def test_a_model_without_tools_in_its_template_is_told_in_words() -> None:
    told = with_instructions("How many?", [tool_definition("count")])
    assert told.startswith("You can use these tools:\n- count:") and told.endswith("\n\nHow many?")
    example = told.split("To call one, write\n")[1].removesuffix("\n\nHow many?")
    assert read(example.replace("{...}", "{}")) == [("NAME", {})]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
    ]
    first, second = with_instructions(messages, [tool_definition("count")])
    assert first["content"].startswith("Be brief.\n\nYou can use") and second is messages[1]
    assert [m["role"] for m in with_instructions(messages[1:], [tool_definition("count")])] == [
        "system",
        "user",
    ]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
WORDS = st.sampled_from(
    [
        *(
            "<invoke",
            ' name="search"',
            ">",
            "</invoke>",
            '<parameter name="query">',
            "</parameter>",
            "/>",
            "```",
        ),
        *(
            "json",
            "\n",
            '{"tool": "search"',
            ', "arguments": {',
            "}",
            "]",
            "[",
            "USE_TOOL[",
            "search",
            "](",
            "(",
        ),
        *(
            ")",
            '"',
            "'",
            "<tool_call>",
            "</tool_call>",
            "\\",
            ",",
            "=",
            "*",
            "query",
            "1",
            "é",
            "\ud800",
            "\x00",
        ),
        *("0x", "1or", "f'{"),
    ]
)


@pytest.mark.parametrize(
    "text", ["```" + " " * 30_000, "USE_TOOL[ " * 3000, "USE_TOOL[a" + "\n" * 30_000]
)
def test_long_runs_take_no_longer_than_they_are(text: str) -> None:
    """The first took hours, in which no other thread of the process ran: the time grew with the
    cube of the length."""
    assert read(text) == []


def test_parameters_that_are_not_closed_are_looked_for_once() -> None:
    """Each of them was searched to the end of the call: hours for this one."""
    text = (
        '<invoke name="f"><parameter name="a">1</parameter>'
        + '<parameter name="b">' * 100_000
        + "</invoke>"
    )
    [malformed] = parse_tool_calls(text).malformed
    assert malformed.reason == "there is '<parameter name=\"b\">' between the parameters"


@settings(max_examples=80, deadline=None)
@given(st.text() | st.lists(WORDS, max_size=25).map("".join))
def test_nothing_that_a_model_writes_raises(text: str) -> None:
    for formats in ("auto", *FORMATS):
        found(text, formats=formats, own=OWN)


@settings(max_examples=50, deadline=None)
@given(
    st.text(alphabet="abc .\n(é🌧", max_size=12),
    NAMES,
    st.dictionaries(NAMES, JSON, max_size=3),
    st.text("ab\n)", max_size=9),
)
def test_what_is_written_is_what_is_read(
    before: str, name: str, arguments: dict[str, object], after: str
) -> None:
    written = json.dumps(arguments)
    fence = f'```json\n{{"tool": "{name}", "arguments": {written}}}\n```'
    for block, own in [
        (fence, None) if "```" not in written else (f"USE_TOOL[{name}]({{}})", None),
        (f"USE_TOOL[{name}]({written})", None),
        (f'<tool_call>{{"name": "{name}", "arguments": {written}}}</tool_call>', OWN),
    ]:
        if own and "tool_call>" in written:
            continue
        calls = found(before + block + after, tools=(), own=own)
        expected = {} if block.endswith("({})") and arguments else arguments
        assert [(call.name, call.arguments) for call in calls] == [(name, expected)]
        assert calls[0].raw_text == block


@settings(max_examples=50, deadline=None)
@given(
    NAMES,
    st.dictionaries(
        NAMES,
        st.text(alphabet="ab'\"\\)(,=é\n{}", max_size=8) | st.integers() | st.booleans(),
        max_size=3,
    ),
)
def test_function_style_takes_pythons_own_spelling(name: str, arguments: dict[str, object]) -> None:
    keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    [call] = found(f"so {name}({keywords}) it is", tools=(), formats="function")
    assert (call.name, call.arguments) == (name, arguments)


def test_values_of_the_text_formats_have_the_schemas_types() -> None:
    properties = {
        "text": {"type": "string"},
        "some": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"N": {"type": "integer"}}}
    tools = [{"name": "f", "parameters": schema}]
    body = (
        '<parameter name="text">    null &lt;\n</parameter><parameter name="some"> 5 </parameter>'
    )
    for form in ("xml", "auto"):
        [call] = parse_tool_calls(f'<invoke name="f">{body}</invoke>', tools, form)
        assert call.arguments == {"text": "    null <\n", "some": 5}
    flat = parse_tool_calls('```json\n{"tool": "f", "text": "a"}\n```', tools, "json")
    assert not flat and "the call has no arguments, but 'text'" in flat.malformed[0].reason

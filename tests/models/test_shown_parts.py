"""What a chat template would leave out of a conversation is carried along, or refused by its
place."""

from typing import Any

import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import RequestError
from mlx_parallm.execution.tool_calls import OwnFormat, parse_tool_calls
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer
from tests.tiny_models import TINY_ASSETS

USER = {"role": "user", "content": "Hi."}
ARGUMENTS = {"city": "it's\n\\d", "n": 3, "deep": {"a": [None, True, "x"]}}


def call(name: str, number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": ARGUMENTS}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"result {number}"}


HISTORY = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "I look.", "tool_calls": [call("look", 1), call("see", 2)]},
    result(1),
    result(2),
]
LATE = [USER, {"role": "assistant", "content": "yes"}, {"role": "system", "content": "Stop."}, USER]
TURN = "<{{ m.role }}>{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}"
ONE_CALL = "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
NAMES = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
FIRST = "{% if m.role != 'system' or loop.first %}"
REFUSES = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
TAKES_TOOLS = "{% if tools and loop.first %}{{ tools | tojson }}{% endif %}"
PYTHONIC = "{# <|tool_call_start|> #}" + TAKES_TOOLS


def tokenizer(turn: str) -> Tokenizer:
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    return load_tokenizer(TINY_ASSETS, ModelConfig(chat_template=template))


@pytest.mark.parametrize(
    "turn, chat, place",
    [
        (
            "{# <tool_call> tool_call.name #}" + TAKES_TOOLS + TURN,
            HISTORY,
            "messages.2.tool_calls.0",
        ),
        (TAKES_TOOLS + TURN + ONE_CALL, HISTORY, None),
        (
            "{# <tool_call> tool_call.name #}" + TAKES_TOOLS + TURN + ONE_CALL,
            HISTORY,
            "messages.2.tool_calls.1",
        ),
        (
            "{# <tool_call> tool_call.name #}" + TAKES_TOOLS + TURN + NAMES,
            HISTORY,
            "messages.2.tool_calls.0",
        ),
        (
            "{# <tool_call> tool_call.name #}"
            + TAKES_TOOLS
            + "{% if m.role != 'tool' %}"
            + TURN
            + CALLS
            + "{% endif %}",
            HISTORY,
            "messages.3.content",
        ),
        ("{% if m.role != 'system' %}" + TURN + CALLS + "{% endif %}", LATE, "messages.0.content"),
        (TAKES_TOOLS + TURN + CALLS, HISTORY, None),
    ],
)
def test_a_part_that_is_left_out_is_named(turn: str, chat: list[Any], place: str | None) -> None:
    if place is None:
        text = tokenizer(turn).render_chat_text(chat)
        for part in ("Be brief.", "I look.", "look", "see", "result 1", "result 2"):
            assert part in text
        return
    with pytest.raises(RequestError, match="leaves it out") as refused:
        tokenizer(turn).render_chat_text(chat)
    assert refused.value.param == place and place in str(refused.value)


def test_calls_are_written_as_the_model_writes_them() -> None:
    """LFM2's template prints no calls."""
    reader = tokenizer(PYTHONIC + TURN)
    text = reader.render_chat_text(HISTORY, add_generation_prompt=False)
    assert reader.tool_markers is not None and reader.parse_tool_call is not None
    own = OwnFormat(reader.tool_markers, reader.parse_tool_call)
    calls = parse_tool_calls(text, ["look", "see"], "own", model_format=own)
    assert [(each.name, each.arguments) for each in calls] == [
        ("look", ARGUMENTS),
        ("see", ARGUMENTS),
    ]
    assert text.count("<assistant>I look.<|tool_call_start|>[look(") == 1
    assert "<tool>result 1<tool>result 2" in text
    native = tokenizer(PYTHONIC + TURN + CALLS).render_chat_text(HISTORY)
    assert "<|tool_call_start|>" not in native, "a template that prints calls does so itself"


@pytest.mark.parametrize("turn", [FIRST + TURN + "{% endif %}", REFUSES + TURN])
def test_a_later_system_message_is_moved_to_the_first(turn: str) -> None:
    reader = tokenizer(turn)
    moved = reader.render_chat_text(LATE, add_generation_prompt=False)
    assert moved == "<system>Stop.<user>Hi.<assistant>yes<user>Hi."
    both = [{"role": "system", "content": "Be brief."}, *LATE]
    text = reader.render_chat_text(both, add_generation_prompt=False)
    assert text.startswith("<system>Be brief.\n\nStop.<user>") and text.count("<system>") == 1
    kept = tokenizer(TURN).render_chat_text(LATE, add_generation_prompt=False)
    assert kept == "<user>Hi.<assistant>yes<system>Stop.<user>Hi.", "where the template shows it"


def test_taught_tools_are_not_lost_where_the_template_has_no_system_message() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    text = tokenizer("{% if m.role != 'system' %}" + TURN + "{% endif %}").render_chat_text(
        [USER], tools=[tool]
    )
    assert "look" in text and "<user>" in text


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "turn, takes",
    [
        (TAKES_TOOLS + TURN, True),
        ("{# tools #}" + TURN, False),
        # Phi-4's: a key of the system message, which no request has
        ("{% if m.tools %}{{ m.tools }}{% endif %}" + TURN, False),
        ("{% if m.role == 'system' and tools %}{{ tools }}{% endif %}" + TURN, False),
        ("{% if m.role == 'user' and tools %}{{ tools | length }}{% endif %}" + TURN, False),
    ],
)
def test_tools_that_a_template_only_names_are_taught(turn: str, takes: bool) -> None:
    reader = tokenizer(turn)
    assert reader.template_takes_tools is takes
    text = reader.render_chat_text([USER], tools=[tool("look"), tool("see")])
    assert "look" in text and "see" in text
    assert ("To call one, write" in text) is not takes or not reader.tool_format


def test_a_tool_that_the_template_leaves_out_is_named() -> None:
    first = "{% if tools and loop.first %}{{ tools[0] | tojson }}{% endif %}"
    reader = tokenizer("{# <tool_call> tool_call.name #}" + first + TURN)
    assert "look" in reader.render_chat_text([USER], tools=[tool("look")])
    with pytest.raises(RequestError, match="leaves it out") as refused:
        reader.render_chat_text([USER], tools=[tool("look"), tool("see")])
    assert refused.value.param == "tools.1"
    shouting = tokenizer(
        "{# <tool_call> tool_call.name #}"
        "{% if tools and loop.first %}{{ tools[0] | tojson }}{{ tools | tojson | upper }}{% endif %}"
        + TURN
    )
    assert "SEE" in shouting.render_chat_text([USER], tools=[tool("look"), tool("see")])


@pytest.mark.parametrize(
    "turn, unread",
    [
        (TURN, ("enable_thinking", "style")),
        ("{% if enable_thinking %}!{% endif %}" + TURN, ("style",)),
        ("{# style enable_thinking #}{{ style }}" + TURN, ("enable_thinking",)),
        ("{% set style = 1 %}" + TURN, ("enable_thinking", "style")),
    ],
)
def test_template_arguments_that_are_not_read_are_named(turn: str, unread: tuple[str, ...]) -> None:
    arguments = {"enable_thinking": True, "style": "x", "add_generation_prompt": False}
    assert tokenizer(turn).unread_arguments(arguments) == unread


def test_a_model_that_never_thinks_obeys_who_wants_no_thinking() -> None:
    off = {"enable_thinking": False, "thinking": False}
    reader = tokenizer(TURN)
    reader.think_markers = None
    assert reader.unread_arguments(off) == ()
    reader.think_markers = ("<think>", "</think>")
    assert reader.unread_arguments(off) == ("enable_thinking", "thinking")

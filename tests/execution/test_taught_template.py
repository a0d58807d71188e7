"""Tools that a chat template has no place for: in messages, and in Jinja before the template."""

import itertools
from typing import Any

from transformers import AutoTokenizer

from mlx_parallm.execution.taught_tools import TEMPLATE, with_taught_tools
from tests.tiny_models import TINY_ASSETS

TOOLS = [
    {"type": "function", "function": {"name": "door", "parameters": {"type": "object"}}},
    {"name": "say", "description": "Söy it.", "parameters": {"properties": {"x": {}}}},
]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_template_shows_what_the_messages_show() -> None:
    """For every order of up to four messages after a question, with a system message or without."""
    parts: list[dict[str, Any]] = [
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "so"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("door", {}), call("say", {"x": 'é"'})],
        },
        {"role": "tool", "tool_call_id": "door", "content": "shut"},
    ]
    fast = AutoTokenizer.from_pretrained(TINY_ASSETS)
    for length, system in itertools.product(range(5), (False, True)):
        for rest in itertools.product(parts, repeat=length):
            chat = [{"role": "system", "content": "Be."}] * system
            chat += [{"role": "user", "content": "?"}, *rest]
            shown, wanted = (
                fast.apply_chat_template(messages, tokenize=False, **options)
                for messages, options in (
                    (chat, {"tools": TOOLS, "chat_template": TEMPLATE + fast.chat_template}),
                    (with_taught_tools(chat, TOOLS), {}),
                )
            )
            assert shown == wanted
    plain = {"tokenize": False, "chat_template": TEMPLATE + fast.chat_template}
    assert fast.apply_chat_template(parts[:2], **plain) == fast.apply_chat_template(
        parts[:2], tokenize=False
    )

"""Tools for a chat template that has no place for them: instructions in the system message, a history in plain text.

    assistant's tool_calls → <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call> at the end of its content
    role tool              → a user's message with <tool_response>\\n…\\n</tool_response>; several make one message

The format is answer_grammar.GENERIC: what the model is taught here is what its answer is read as.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.execution.tool_calls import with_instructions
from mlx_parallm.server.protocol.answer_grammar import GENERIC, HOW_TO_CALL


def with_taught_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, in_system: bool = True
) -> list[dict[str, Any]]:
    """Returns template messages without tool calls and results. `tools`: OpenAI's definitions; [] = only the history.

    in_system: False puts the instructions at the start of the first user message, for templates without a system role.
    """
    told = _plain_history(messages)
    if not tools:
        return told
    definitions = [{"description": "", "parameters": {}} | dict(tool["function"]) for tool in tools]
    if in_system or not any(message["role"] == "user" for message in told):
        return [dict(message) for message in with_instructions(told, definitions, HOW_TO_CALL)]
    first = next(index for index, message in enumerate(told) if message["role"] == "user")
    told[first]["content"] = with_instructions(told[first]["content"], definitions, HOW_TO_CALL)
    return told


def _plain_history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        fields = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            fields.pop("name", None)
        calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
        content = "\n".join(filter(None, [content, *calls]))
        if after_result and role == "user":  # many templates want the roles to alternate
            told[-1]["content"] += f"\n{content}"
        else:
            told.append(fields | {"role": role, "content": content})
        after_result = message["role"] == "tool" or (after_result and role == "user")
    return told


def _written(function: Mapping[str, Any]) -> str:
    start, end = GENERIC.markers
    name, arguments = function["name"], function["arguments"]
    return f"{start}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{end}"

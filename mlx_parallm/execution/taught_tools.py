"""Tools for a chat template that has no place for them: instructions in the system message, a
history in plain text.

    assistant's tool_calls → <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call> at the end of
    its content
    role tool              → a user's message with <tool_response>\\n…\\n</tool_response>; several
                           make one message

The model's answers are read in the form that is taught here (`execution/answer_grammar.py`,
GENERIC).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import add_text
from mlx_parallm.execution.json_values import template_arguments, write_json
from mlx_parallm.execution.tool_calls import OwnFormat, with_instructions

MARKERS = ("<tool_call>", "</tool_call>")
HOW_TO_CALL = 'To call one, write\n<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'

TEMPLATE = r"""{%- if tools %}
{%- set ns = namespace(chat=[], text='You can use these tools:', after=false) %}
{%- for tool in tools %}
{%- set of = tool.function if tool.function else tool %}
{%- set about = of.description if of.description else '' %}
{%- set given = (of.parameters if of.parameters else {}) | tojson %}
{%- set ns.text = ns.text + '\n- ' + of.name + ': ' + about + ' Arguments: ' + given %}
{%- endfor %}
{%- set ns.text = ns.text + '\nHOW' %}
{%- if messages[0].role == 'system' %}
{%- set ns.text = messages[0].content + '\n\n' + ns.text %}
{%- set ns.chat = [{'role': 'system', 'content': ns.text}] %}
{%- set rest = messages[1:] %}
{%- else %}
{%- set ns.chat = [{'role': 'system', 'content': ns.text}] %}
{%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
{%- set ns.text = message.content if message.content else '' %}
{%- if message.role == 'tool' %}
{%- set ns.text = '<tool_response>\n' + ns.text + '\n</tool_response>' %}
{%- endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{%- set given = call.function.arguments %}
{%- set given = given if given is string else given | tojson %}
{%- set ns.text = ns.text + ('\n' if ns.text else '') + '<tool_call>\n{"name": ' %}
{%- set ns.text = ns.text + (call.function.name | tojson) + ', "arguments": ' + given %}
{%- set ns.text = ns.text + '}\n</tool_call>' %}
{%- endfor %}
{%- endif %}
{%- set role = 'user' if message.role == 'tool' else message.role %}
{%- if ns.after and role == 'user' %}
{%- set ns.text = ns.chat[-1].content + '\n' + ns.text %}
{%- set ns.chat = ns.chat[:-1] + [{'role': 'user', 'content': ns.text}] %}
{%- else %}
{%- set ns.chat = ns.chat + [{'role': role, 'content': ns.text}] %}
{%- endif %}
{%- set ns.after = message.role == 'tool' or (ns.after and role == 'user') %}
{%- endfor %}
{%- set messages = ns.chat %}
{%- endif %}
""".replace("HOW", HOW_TO_CALL.replace("\n", "\\n"))
"""The same in Jinja, to come before a chat template that has no tools: for programs that know only
the template, such as llama.cpp."""


def read_taught_call(text: str, tools: Any) -> Any:
    """Return the value between the markers. Raises ValueError: it is not JSON."""
    return json.loads(text)


TAUGHT_FORMAT = OwnFormat(MARKERS, read_taught_call)


def with_taught_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    in_system: bool = True,
) -> list[dict[str, Any]]:
    """Return messages (`read_messages`) without tool calls and results.

    Args:
        tools: OpenAI's definitions; [] = only the history.
        in_system: False puts the instructions at the start of the first user message, for templates
            without a system role.
    """
    plain = _plain_history(messages)
    if not tools:
        return plain
    definitions = [
        {"description": "", "parameters": {}} | dict(tool.get("function", tool)) for tool in tools
    ]
    if in_system or not any(message["role"] == "user" for message in plain):
        return [dict(message) for message in with_instructions(plain, definitions, HOW_TO_CALL)]
    first = next(index for index, message in enumerate(plain) if message["role"] == "user")
    content = plain[first]["content"]
    if isinstance(content, str):
        plain[first]["content"] = with_instructions(content, definitions, HOW_TO_CALL)
    else:
        taught = str(with_instructions("", definitions, HOW_TO_CALL))
        plain[first]["content"] = [{"type": "text", "text": taught}, *content]
    return plain


def with_written_calls(
    messages: Sequence[Mapping[str, Any]], form: str, markers: tuple[str, str]
) -> list[dict[str, Any]]:
    """Return messages whose calls are at the end of their content as a model writes them, for
    templates that leave calls out; unchanged if the format has no writer here. `form`,
    `markers`: of the model's calls."""
    if form not in WRITERS:
        return [dict(message) for message in messages]
    written = []
    for message in messages:
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls := message.get("tool_calls"):
            text = WRITERS[form]([call["function"] for call in calls])
            plain["content"] = f"{message['content']}{markers[0]}{text}{markers[1]}"
        written.append(plain)
    return written


def _pythonic(functions: Sequence[Mapping[str, Any]]) -> str:
    def value(item: Any) -> str:
        return repr(str(item)) if isinstance(item, str) else write_json(item)

    calls = []
    for function in functions:
        arguments = template_arguments(function["arguments"])
        if not isinstance(arguments, Mapping):
            raise RequestError("the arguments of a call are not an object", param="messages")
        pairs = ", ".join(f"{key}={value(item)}" for key, item in arguments.items())
        calls.append(f"{function['name']}({pairs})")
    return f"[{', '.join(calls)}]"


WRITERS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {"pythonic": _pythonic}


def _plain_history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        fields = {
            key: value
            for key, value in message.items()
            if key not in ("tool_calls", "tool_call_id")
        }
        if role == "tool":
            role, content = "user", _joined("<tool_response>\n", content, "\n</tool_response>")
            fields.pop("name", None)
        if calls := [_written(call["function"]) for call in message.get("tool_calls", ())]:
            content = "\n".join(filter(None, [content, *calls]))
        if after_result and role == "user":  # many templates want the roles to alternate
            plain[-1]["content"] = _joined(plain[-1]["content"], "\n", content)
        else:
            plain.append(fields | {"role": role, "content": content})
        after_result = message["role"] == "tool" or (after_result and role == "user")
    return plain


def _joined(*contents: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return contents behind one another: a text, or parts if one of them has such."""
    if all(isinstance(content, str) for content in contents):
        return "".join(str(content) for content in contents)
    parts: list[dict[str, Any]] = []
    for content in contents:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                add_text(parts, part["text"])
            else:
                parts.append(dict(part))
    return parts


def _written(function: Mapping[str, Any]) -> str:
    start, end = MARKERS
    call = {"name": function["name"], "arguments": template_arguments(function["arguments"])}
    return f"{start}\n{write_json(call)}\n{end}"

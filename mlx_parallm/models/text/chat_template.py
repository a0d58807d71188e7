"""Chat templates in Jinja: transformers' sandbox, with arguments of tool calls that print as JSON
(`json_values`).

transformers itself renders plain dictionaries, which print as Python's. So its environment
(filters, `generation` blocks, loop controls) is used here with a `tojson` and with tests that know
JSON's values.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2 import Environment, Template, meta
from jinja2.exceptions import TemplateError
from pydantic import BaseModel
from transformers.utils.chat_template_utils import _compile_jinja_template

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import PartsText, parts_as_written
from mlx_parallm.execution.json_values import (
    TESTS,
    holds_json_values,
    template_arguments,
    write_json,
)

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of a final message to be continued
_PROBE = "pineapples"
_PROBED = {"add_generation_prompt": True, "tools": None, "documents": None}


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    continue_final_message: bool,
    **variables: Any,
) -> str:
    """Return the text that a template makes of messages (`read_messages`).

    A template that shows no content that is a string gets lists of parts (SmolVLM's, Idefics3's).
    One that shows both gets a content as it was written: some templates trim or separate parts.

    Raises RequestError: the template does not show the message to continue. Also what the template
    raises.
    """
    variables = _plain(variables)
    chat = _as_template_reads(source, messages, variables)
    if continue_final_message:
        return _continued(source, chat, variables)
    return str(_compiled(source).render({**variables, "messages": chat}))


def _continued(source: str, chat: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render up to the end of the last message, which keeps its white space where the template
    trims it.

    Raises RequestError: the template does not show the message."""
    holder, key = _last_text(chat[-1])
    final = str(holder[key])
    begun = final.lstrip()  # white space before it may look like the template's own
    holder[key] = begun + CONTINUED
    text = str(_compiled(source).render({**variables, "messages": chat}))
    shown = text[: max(text.rfind(CONTINUED.strip()), 0)]
    if not shown or not shown.endswith(begun):
        raise RequestError(
            "the chat template does not show the message to continue", param="messages"
        )
    return shown.removesuffix(begun) + final


def _last_text(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what holds the last text of a message, and its key."""
    content = message["content"]
    if isinstance(content, str):
        return message, "content"
    return next(part for part in reversed(content) if "text" in part), "text"


def _as_template_reads(
    source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return messages with each content in the form that the template shows: text or parts."""
    joined, split = (
        with_arguments(_plain([form(message) for message in messages]), template_arguments)
        for form in (dict, _in_parts)
    )
    if takes_parts(source):
        return split
    written = [isinstance(message["content"], PartsText) for message in messages]
    if not any(written):
        return joined
    chosen = zip(joined, split, written, strict=True)
    shown = _shown(source, [part if flag else whole for whole, part, flag in chosen], variables)
    chosen = zip(joined, split, shown, strict=True)
    return [part if flag else whole for whole, part, flag in chosen]


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if type(content) is str:
        content = PartsText([content])
    return {**message, "content": parts_as_written(content)}


def _shown(
    source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> list[bool]:
    """Return for each message whether its content is a list of which the template shows the text
    of every part, and not the list as Python or JSON writes it."""
    marks: list[list[str]] = []
    probes = []
    for position, message in enumerate(messages):
        parts = message["content"] if isinstance(message["content"], list) else []
        marks.append([f"{_PROBE}{position}.{at}." for at in range(len(parts))])
        texts = [{"type": "text", "text": mark} for mark in marks[-1]]
        probes.append({**message, "content": texts} if parts else message)
    try:
        text = _compiled(source).render({**variables, "messages": probes})
    except (TemplateError, TypeError, ValueError, KeyError):
        return [False] * len(marks)
    quoted = re.compile(rf"""["']text["']: ?["']{_PROBE}(\d+)""")
    as_lists = {int(match[1]) for match in quoted.finditer(text)}
    return [
        bool(texts) and position not in as_lists and all(mark in text for mark in texts)
        for position, texts in enumerate(marks)
    ]


@lru_cache(maxsize=32)
def takes_parts(source: str) -> bool:
    """Whether a template shows the text of a content only if it is a list of parts."""

    def shows(content: Any) -> bool:
        variables = {"messages": [{"role": "user", "content": content}], **_PROBED}
        try:
            return _PROBE in _compiled(source).render(variables)
        except (TemplateError, TypeError, ValueError, KeyError):
            return False

    return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


@lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str] | None:
    """Return the names that a template reads and does not set itself in every case; None: it cannot
    be read."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except TemplateError:
        return None


def with_arguments(
    messages: Sequence[Mapping[str, Any]], form: Callable[[str | Mapping[str, Any]], Any]
) -> list[dict[str, Any]]:
    """Return messages whose calls have their arguments in another form."""
    changed = []
    for message in messages:
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": form(call["function"]["arguments"]),
                },
            }
            for call in message.get("tool_calls", ())
        ]
        changed.append({**message, "tool_calls": calls} if calls else dict(message))
    return changed


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` of chat templates: no characters are escaped for HTML."""
    write = write_json if holds_json_values(value) else json.dumps
    return write(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment: Environment = _compile_jinja_template("").environment.overlay()
    environment.filters = {**environment.filters, "tojson": _to_json}
    environment.tests = {**environment.tests, **TESTS}
    return environment


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _plain(value: Any) -> Any:
    """Return the value in JSON's own types: a template from a hub must not reach the methods of a
    caller's objects.

    Other objects (pictures, arrays) become the name of their type: templates ask only whether they
    are there.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # an enumeration's member
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"

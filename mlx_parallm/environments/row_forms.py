"""Rows in the layouts of other programs → the columns that this one reads.

    ShareGPT  conversations: [{"from": "human", "value": …}, …], with `system`, `tools`, `chosen`,
              `rejected`, `label`
    Alpaca    instruction, input, output, with `system` and `history`
    NeMo Gym  responses_create_params: {input, instructions, tools, …} of the Responses API

They become `messages`, and `prompt` and `completion` around the last answer, so that prompts,
preferences and SFT find their columns. The row keeps its own columns beside them. A row that has
one of ours is left as it is, apart from messages in it that say `from` and `value`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.chat_messages import CALLERS, ROLE_OF

SHAREGPT, ALPACA, NEMO_GYM = "ShareGPT", "Alpaca", "NeMo Gym"
NEMO_GYM_COLUMN = "responses_create_params"
CONVERSATION_COLUMNS = ("conversations", "conversation")
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
OWN_COLUMNS = (*MESSAGE_COLUMNS, "text")


def known_row(row: dict[str, Any], where: str) -> tuple[dict[str, Any], str | None]:
    """Return a row with the columns that are read here, and the layout that it had; None: it had
    them already.

    Raises ConfigError, which begins with `where`: a turn of nobody that is known.
    """
    if isinstance(row.get(NEMO_GYM_COLUMN), Mapping) and not any(
        row.get(name) is not None for name in OWN_COLUMNS
    ):
        return row | _of_responses(row[NEMO_GYM_COLUMN], f"{where}: {NEMO_GYM_COLUMN}"), NEMO_GYM
    for column in CONVERSATION_COLUMNS:
        if isinstance(row.get(column), list | tuple) and row.get("messages") is None:
            return _of_conversation(row, column, where), SHAREGPT
    if isinstance(row.get("instruction"), str) and not any(
        row.get(name) is not None for name in OWN_COLUMNS
    ):
        return row | _of_instruction(row), ALPACA
    conversations = {
        name: _messages(row[name], f"{where}: {name}")
        for name in MESSAGE_COLUMNS
        if _has_sayers(row.get(name))
    }
    return (row | conversations, SHAREGPT) if conversations else (row, None)


def _of_conversation(row: dict[str, Any], column: str, where: str) -> dict[str, Any]:
    messages = _opened(_messages(row[column], f"{where}: {column}"), row.get("system"))
    sides = {
        name: _messages(row[name], f"{where}: {name}")
        for name in ("chosen", "rejected")
        if _is_said(row.get(name))
    }
    if sides:
        return {**row, "prompt": messages, **sides}
    return row | _divided(messages)


def _of_responses(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the columns of a request of the Responses API: `prompt`, and `tools` where it has
    some. Sampling settings stay in the row's own column: the environment's are used.

    Raises ConfigError: an item or a part that is no text and no call.
    """
    items = params.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list | tuple) or not items:
        raise ConfigError(f"{where}: 'input' is neither a text nor a list of items")
    messages = [
        _of_item(item, f"{where}: input, item {number}") for number, item in enumerate(items)
    ]
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if isinstance(tool, Mapping) and tool.get("type") == "function" and "name" in tool
        else tool
        for tool in params.get("tools") or ()
    ]
    columns: dict[str, Any] = {"prompt": _opened(messages, params.get("instructions"))}
    return columns | ({"tools": tools} if tools else {})


def _of_item(item: Any, where: str) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        return {"role": role, "content": _text_of_parts(item.get("content"), where)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        content = _text_of_parts(item.get("output"), where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    raise ConfigError(f"{where}: {kind or item!r:.80} is no message, call or result of a call")


def _text_of_parts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: content that is no text: {content!r:.120}")
    return "".join(map(str, texts))


def _of_instruction(row: Mapping[str, Any]) -> dict[str, Any]:
    history = row.get("history") or ()
    messages = [
        {"role": role, "content": text}
        for turn in history
        if isinstance(turn, list | tuple)
        for role, text in zip(("user", "assistant"), turn, strict=False)
    ]
    question = "\n".join(filter(None, (row["instruction"], row.get("input"))))
    messages = _opened([*messages, {"role": "user", "content": question}], row.get("system"))
    answer = row.get("output")
    if len(messages) == 1:  # texts, which need no chat template
        return {"prompt": question} | ({} if answer is None else {"completion": answer})
    return _divided(
        messages if answer is None else [*messages, {"role": "assistant", "content": answer}]
    )


def _divided(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns of a conversation: whole, and divided before its last answer."""
    last = messages[-1:] if messages and messages[-1].get("role") == "assistant" else []
    before = messages[: len(messages) - len(last)]
    return {"messages": messages, "prompt": before} | ({"completion": last} if last else {})


def _opened(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Put a row's `system` before its messages, where they have none."""
    if (
        not isinstance(system, str)
        or not system
        or any(message.get("role") == "system" for message in messages[:1])
    ):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _is_said(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and bool(value))


def _has_sayers(value: Any) -> bool:
    entries = [value] if isinstance(value, Mapping) else value
    return isinstance(entries, list | tuple) and any(
        isinstance(entry, Mapping) and "from" in entry for entry in entries
    )


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    entries: Sequence[Any] = [value] if isinstance(value, Mapping) else value
    return [_message(entry, f"{where}, turn {number}") for number, entry in enumerate(entries)]


def _message(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f'{where}: expected {{"from": …, "value": …}}, got {entry!r:.200}')
    if "from" not in entry:
        named = "role" in entry and "value" in entry and "content" not in entry
        return {
            (("content") if named and key == "value" else key): item for key, item in entry.items()
        }
    sayer, value = entry["from"], entry.get("value")
    sayer = sayer.lower() if isinstance(sayer, str) else sayer
    rest = {
        key: item
        for key, item in entry.items()
        if key not in ("from", "value") and item is not None
    }
    if rest.get("train") is False or rest.get("loss") is False:
        rest["weight"] = 0
    if sayer in CALLERS:
        return {"role": "assistant", **_called(value), **rest}
    role = ROLE_OF.get(sayer) if isinstance(sayer, str) else None
    if role is None:
        senders = ", ".join((*ROLE_OF, *CALLERS))
        raise ConfigError(f"{where}: 'from' is {sayer!r}; known are {senders}")
    return {"role": role, "content": value, **rest}


def _called(value: Any) -> dict[str, Any]:
    """Return the fields of a turn that calls tools; text that is no call in JSON is its content."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {"content": value}
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(
        isinstance(call, Mapping) and ("name" in call or "function" in call) for call in calls
    ):
        return {
            "content": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        }
    return {"content": "", "tool_calls": [dict(call) for call in calls]}

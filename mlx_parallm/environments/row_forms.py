"""Rows in the layouts of other programs → the columns that this one reads.

    ShareGPT  conversations: [{"from": "human", "value": …}, …], with `system`, `tools`, `chosen`,
              `rejected`, `label`
    Alpaca    instruction, input, output (or chosen and rejected), with `system` and `history`
    NeMo Gym  responses_create_params: {input, instructions, tools, …} of the Responses API
    LLaMA-Factory  messages whose content is parts {"type", "value"}; `kto_tag`

They become `messages`, and `prompt` and `completion` around the last answer, so that prompts,
preferences and SFT find their columns. The row keeps its own columns beside them. A row that has
one of ours is left as it is, apart from such messages and parts in it.

`with_system` puts a row's system text, which may be in its own column in every form, before
its messages.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.execution.chat_messages import CALLERS, ROLE_OF, parts_of
from mlx_parallm.execution.parts.kinds import all_kinds, kind_of, source_fields, written_types

SHAREGPT, ALPACA, NEMO_GYM, VALUED = "ShareGPT", "Alpaca", "NeMo Gym", "LLaMA-Factory"
SAYERS = "ShareGPT's turns"  # under our own names of columns
NEMO_GYM_COLUMN = "responses_create_params"
CONVERSATION_COLUMNS = ("conversations", "conversation")
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
OWN_COLUMNS = (*MESSAGE_COLUMNS, "text")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
KTO_TAG = "kto_tag"  # LLaMA-Factory's name of `label`
LAYOUT_COLUMNS: dict[str, tuple[str, ...]] = {
    SHAREGPT: CONVERSATION_COLUMNS,
    ALPACA: ("instruction", "input", "output", "history"),
    NEMO_GYM: (NEMO_GYM_COLUMN,),
}
"""Columns that a layout's rows are read from; `SYSTEM_COLUMNS` beside them."""
_QUESTIONS = ("user", "human", "query", "question", "instruction", "prompt")
_ANSWERS = ("assistant", "gpt", "response", "answer", "output", "completion")


def known_row(row: dict[str, Any], where: str) -> tuple[dict[str, Any], str | None]:
    """Return a row with the columns that are read here, and the layout that it had; None: it had
    them already.

    Raises ConfigError, which begins with `where`: a turn of an unknown role, a column of a
    layout with wrong content.
    """
    if row.get(KTO_TAG) is not None and row.get("label") is None:
        row = {**row, "label": row[KTO_TAG]}
    if isinstance(row.get(NEMO_GYM_COLUMN), Mapping) and not _has(row, OWN_COLUMNS):
        return row | _of_responses(row[NEMO_GYM_COLUMN], f"{where}: {NEMO_GYM_COLUMN}"), NEMO_GYM
    is_pair = _has(row, ("chosen", "rejected"))
    of_ours: tuple[str, ...] = ("messages", "prompt", "completion")
    if is_pair:
        of_ours = ("messages", "prompt") if is_conversation(row.get("messages")) else ("prompt",)
    for column in CONVERSATION_COLUMNS:
        if isinstance(row.get(column), list | tuple) and not _has(row, of_ours):
            return _of_conversation(row, column, where), SHAREGPT
    is_whole = row.get("text") is not None and not is_pair
    if isinstance(row.get("instruction"), str) and not is_whole and not _has(row, of_ours):
        return row | _of_instruction(row, where), ALPACA
    conversations = {
        name: _messages(row[name], f"{where}: {name}")
        for name in MESSAGE_COLUMNS
        if _has_sayers(row.get(name))
    }
    if not conversations:
        return row, None
    is_valued = any(_is_valued(entry) for name in conversations for entry in _entries(row[name]))
    return row | conversations, VALUED if is_valued else SAYERS


def _has(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    return any(row.get(name) is not None for name in columns)


def system_texts(row: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return a row's system texts by column: a text, or the text of a message or of parts, as
    Anthropic's API takes them. Raises ConfigError, which begins with `where`: a part that is not
    text."""
    texts = {}
    for column in SYSTEM_COLUMNS:
        value = row.get(column)
        held = value.get("content") if isinstance(value, Mapping) and "role" in value else value
        if isinstance(held, str | list | tuple):
            texts[column] = _text_of_parts(held, f"{where}: {column}")
    return {column: text for column, text in texts.items() if text.strip()}


def with_system(messages: Any, row: Mapping[str, Any], where: str, *, name: str = "prompt") -> Any:
    """Return a prompt, a text or messages, with the system text of its row before it.

    A text becomes a user's message. A system text that is there already, but for white space,
    stays alone. Raises ConfigError, which begins with `where`: two different ones.
    """
    texts = system_texts(row, where)
    if not texts:
        return messages
    (column, text), *others = texts.items()
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
    held = first.get("content") if first.get("role") in ("system", "developer") else None
    for other_column, other in (*others, *([(name, held)] if isinstance(held, str) else [])):
        if other.split() != text.split():
            raise ConfigError(
                f"{where}: column {column!r} and {other_column!r} have two different system texts:"
                f" {text[:60]!r} and {other[:60]!r}; keep one of them"
            )
    if held is not None:
        return messages
    return type(turns)([{"role": "system", "content": text}, *turns])


def _of_conversation(row: dict[str, Any], column: str, where: str) -> dict[str, Any]:
    messages = with_system(_messages(row[column], f"{where}: {column}"), row, where, name=column)
    sides = {
        name: _messages(row[name], f"{where}: {name}")
        for name in ("chosen", "rejected")
        if _is_said(row.get(name))
    }
    if sides:
        return {**row, "prompt": messages, **sides}
    return row | _divided(messages)


def _of_responses(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the columns of a request of the Responses API: `prompt`, and `tools` if it has
    some. Sampling settings stay in the row's own column: the environment's are used.

    Raises ConfigError: an item or a part that is not text and no call.
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
    instructions = params.get("instructions")
    if isinstance(instructions, str) and instructions:
        if messages[0]["role"] == "system":
            messages[0]["content"] = f"{instructions}\n\n{messages[0]['content']}"
        else:
            messages = [{"role": "system", "content": instructions}, *messages]
    columns: dict[str, Any] = {"prompt": messages}
    return columns | ({"tools": tools} if tools else {})


def _of_item(item: Any, where: str) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        return {"role": role, "content": _content_of(item.get("content"), where)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content_of(item.get("output"), where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    raise ConfigError(f"{where}: {kind or item!r:.80} is not a message, call or result of a call")


def _content_of(content: Any, where: str) -> Any:
    """Return a content as text, or as parts if it has others. Raises ConfigError."""
    if isinstance(content, list | tuple) and any(map(kind_of, content)):
        try:
            parts = parts_of(content, where, all_kinds())
            for index, part in enumerate(content):
                if kind := kind_of(part):
                    kind.source(part, f"{where}.0.content.{index}")  # each has one
            return parts
        except RequestError as error:
            raise ConfigError(str(error)) from error
    return _text_of_parts(content, where)


def _text_of_parts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: content that is not text: {content!r:.120}")
    return "".join(map(str, texts))


def _of_instruction(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in ("input", "output"):
        if not isinstance(row.get(name), str | None):
            raise ConfigError(f"{where}: {name} is {row[name]!r:.120}; expected a text")
    history = _past_turns(row.get("history"), where)
    question = "\n".join(filter(None, (row["instruction"], row.get("input"))))
    messages = with_system([*history, {"role": "user", "content": question}], row, where)
    if _has(row, ("chosen", "rejected")):
        return {"prompt": messages}
    answer = row.get("output")
    if len(messages) == 1:  # texts, which need no chat template
        return {"prompt": question} | ({} if answer is None else {"completion": answer})
    return _divided(
        messages if answer is None else [*messages, {"role": "assistant", "content": answer}]
    )


def _past_turns(history: Any, where: str) -> list[dict[str, Any]]:
    """Read Alpaca's `history`: pairs of question and answer, objects of both, or messages. Raises
    ConfigError: anything else."""
    if history is None or history in ("", [], ()):
        return []
    if not isinstance(history, list | tuple):
        raise ConfigError(f"{where}: history is {history!r:.120}; expected a list of turns")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(history):
        place = f"{where}: history, turn {number}"
        if isinstance(turn, Mapping) and ("role" in turn or "from" in turn):
            messages.append(_message(turn, place))
            continue
        pair = turn
        if isinstance(turn, Mapping):
            names = [[name for name in each if name in turn] for each in (_QUESTIONS, _ANSWERS)]
            is_pair = all(len(each) == 1 for each in names) and len(turn) == 2
            pair = [turn[name] for (name,) in names] if is_pair else None
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(isinstance(text, str) for text in pair)
        ):
            raise ConfigError(
                f'{place}: {turn!r:.120} is not a pair of texts; expected ["question", "answer"],'
                ' {"user": …, "assistant": …}, or a message'
            )
        messages += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    return messages


def _divided(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns of a conversation: whole, and divided before its last answer."""
    last = messages[-1:] if messages and messages[-1].get("role") == "assistant" else []
    before = messages[: len(messages) - len(last)]
    return {"messages": messages, "prompt": before} | ({"completion": last} if last else {})


def _is_said(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and bool(value))


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of objects, as messages are."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(entry, Mapping) for entry in value)
    )


def _entries(value: Any) -> Sequence[Any]:
    entries = [value] if isinstance(value, Mapping) else value
    return entries if isinstance(entries, list | tuple) else ()


def _has_sayers(value: Any) -> bool:
    return any(
        isinstance(entry, Mapping) and ("from" in entry or _is_valued(entry))
        for entry in _entries(value)
    )


def _is_valued(entry: Any) -> bool:
    """Whether a message's content has parts {"type", "value"}."""
    content = entry.get("content") if isinstance(entry, Mapping) else None
    return isinstance(content, list | tuple) and any(map(_is_valued_part, content))


def _is_valued_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("value") is not None
        and not _has(part, ("text", *source_fields()))
    )


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    entries: Sequence[Any] = [value] if isinstance(value, Mapping) else value
    return [_message(entry, f"{where}, turn {number}") for number, entry in enumerate(entries)]


def _message(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f'{where}: expected {{"from": …, "value": …}}, got {entry!r:.200}')
    if "from" not in entry:
        named = "role" in entry and "value" in entry and "content" not in entry
        message = {
            ("content" if named and key == "value" else key): item for key, item in entry.items()
        }
        return _of_valued(message, where) if _is_valued(message) else message
    sayer, value = entry["from"], entry.get("value", entry.get("content"))
    sayer = sayer.lower() if isinstance(sayer, str) else sayer
    rest = {
        key: item
        for key, item in entry.items()
        if key not in ("from", "value") and item is not None
    }
    if rest.pop("content", value) != value:
        raise ConfigError(f"{where}: 'value' and 'content' are different: keep one of them")
    if sayer in CALLERS:
        return {**rest, "role": "assistant", **_called(value)}
    role = ROLE_OF.get(sayer) if isinstance(sayer, str) else None
    if role is None:
        senders = ", ".join((*ROLE_OF, *CALLERS))
        raise ConfigError(f"{where}: 'from' is {sayer!r}; known are {senders}")
    if rest.pop("role", role) != role:
        raise ConfigError(f"{where}: 'from' is {sayer!r} and 'role' is {entry['role']!r}")
    message = {"role": role, "content": value, **rest}
    return _of_valued(message, where) if _is_valued(message) else message


def _of_valued(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Read LLaMA-Factory's parts: text, reasoning, calls as JSON, kinds beside text. Raises
    ConfigError: a part of another type, or a call that is not JSON."""
    content: list[Any] = []
    made: dict[str, Any] = {}
    for number, part in enumerate(message["content"]):
        kind, place = part.get("type") if isinstance(part, Mapping) else None, f"part {number}"
        value = part["value"] if _is_valued_part(part) else None
        others = [] if value is None else [key for key in part if key not in ("type", "value")]
        if value is None:
            content.append(part)
        elif kind == "text":
            rest = {key: part[key] for key in others}
            content.append({"type": "text", "text": value, **rest})
        elif others:
            raise ConfigError(f"{where}, {place}: a part of type {kind!r} has {others[0]!r} too")
        elif kind == "reasoning" and isinstance(value, str):
            made["reasoning_content"] = made.get("reasoning_content", "") + value
        elif kind == "tool_call" and "tool_calls" in (calls := _called(value)):
            made["tool_calls"] = [*made.get("tool_calls", ()), *calls["tool_calls"]]
        elif shown := kind_of(part):
            content.append(shown.part(value))
        else:
            raise ConfigError(
                f"{where}, {place}: a part of type {kind!r} with the value {value!r:.80}; known are"
                " text, reasoning, tool_call (JSON with a name) and"
                f" {', '.join(written_types())}"
            )
    return {**message, "content": content, **made}


def _called(value: Any) -> dict[str, Any]:
    """Return the fields of a turn that calls tools; text that is not a call in JSON is its
    content."""
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

"""Rows of `[data]`, checked one by one, each as an `Example`. An error names file and line. No MLX.

Forms (TRL's): `prompt, chosen, rejected`, or `chosen, rejected` whose common beginning is the
prompt; KTO: `prompt, completion, label`, or pairs, which are split up; SFT: `messages`, `prompt,
completion` or `text`. Prompts and completions are strings or lists of messages. ShareGPT's and
Alpaca's rows come as these (`environments/row_forms.py`). Each form may have `tools` (a list of
definitions, or JSON text of one). An assistant's message of `weight` 0 is context that is not
learned. A reward model's pairs may have a `margin`.
"""

import difflib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config.data import PAIRED, REWARD_MODEL, DataConfig
from mlx_parallm.environments.row_images import has_images, refuse_images, with_row_images
from mlx_parallm.environments.rows import prompt_key, read_splits, rows_of
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.execution.chat_messages import read_messages, read_tools

SECTION = "data"
FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pairs": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "kto": (
        ("prompt", "completion", "label"),
        ("prompt", "chosen", "rejected"),
        ("chosen", "rejected"),
    ),
    "sft": (("messages",), ("prompt", "completion"), ("text",)),
}
"""Columns of a row; the first form whose columns are all there is the row's."""

Text = str | tuple[Mapping[str, Any], ...]
"""A piece of a conversation: its messages, or with prompt_format = "text" a string."""

SAME = "chosen and rejected are the same: there is nothing to prefer"


@dataclass(frozen=True, slots=True)
class Example:
    """`completions`: (chosen, rejected) of a pair, else one. `label`: KTO's. `key`: the prompt's
    `prompt_key`. `margin`: of a reward model's pair."""

    where: str
    prompt: Text
    completions: tuple[Text, ...]
    key: str
    label: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    margin: float | None = None


def read_examples(config: DataConfig, algorithm: str) -> tuple[list[Example], list[Example]]:
    """Return (training, held-out) examples. Raises ConfigError: a missing file, a bad row,
    nothing to train on."""
    assert config.path is not None
    return read_splits(
        functools.partial(_read, config, algorithm),
        (config.path, config.split),
        heldout=(config.eval_path, config.eval_split),
        fraction=config.eval_fraction,
        key=SECTION,
    )


def _read(config: DataConfig, algorithm: str, file: str, split: str) -> list[Example]:
    forms = FORMS["pairs" if algorithm in PAIRED else algorithm]
    chat = config.prompt_format == "chat"
    examples = []
    for where, row in rows_of(file, config.subset, split, SECTION):
        columns = _form(row, forms, algorithm, where)
        row = _with_images(row, file, algorithm, chat=chat, where=where)
        tools = _tools(row.get("tools"), where)
        if "chosen" in columns:
            prompt, chosen, rejected = _pair(row, chat=chat, where=where)
            key = prompt_key(prompt or chosen)
            if algorithm in PAIRED:
                margin = _margin(row.get("margin"), where) if algorithm == REWARD_MODEL else None
                pair = chosen, rejected
                examples.append(Example(where, prompt, pair, key, tools=tools, margin=margin))
            else:
                sides = ((chosen, True), (rejected, False))
                examples += [
                    Example(where, prompt, (side,), key, good, tools) for side, good in sides
                ]
            continue
        label = row.get("label", True)
        if "label" in columns and not isinstance(label, bool):
            raise _bad(where, f"label is {label!r}; expected true (desirable) or false")
        prompt, completion = _single(row, columns, chat=chat, where=where)
        key = prompt_key(prompt or _opening(completion))
        examples.append(Example(where, prompt, (completion,), key, label, tools))
    return examples


def _with_images(
    row: dict[str, Any], file: str, algorithm: str, *, chat: bool, where: str
) -> dict[str, Any]:
    """Return a row whose messages name its images, stored. Raises ConfigError."""
    names = ("prompt",) if row.get("prompt") is not None else ("messages", "chosen", "rejected")
    read = {
        name: [{"role": "user", "content": value}]
        if isinstance(value, str)
        else [*_messages(value, name, where)]
        for name in names
        if isinstance(value := row.get(name), str | list | tuple)
    }
    if not any(has_images(row, messages) for messages in read.values()):
        return row
    place = f"{SECTION}: {where}"
    if not chat:
        refuse_images(row, next(iter(read.values())), place)
    if algorithm == REWARD_MODEL:
        raise ConfigError(f"{place}: a reward model reads no images")
    return {
        **row,
        **{name: with_row_images(each, row, place, file) for name, each in read.items()},
    }


def _form(
    row: Mapping[str, Any], forms: Sequence[tuple[str, ...]], algorithm: str, where: str
) -> tuple[str, ...]:
    present = [name for name, value in row.items() if value is not None]
    for columns in forms:
        if all(name in present for name in columns):
            return columns
    missing = min(
        ([name for name in columns if name not in present] for columns in forms), key=len
    )[0]
    near = difflib.get_close_matches(missing, row, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    needed = " or ".join(", ".join(columns) for columns in forms)
    raise _bad(
        where,
        (
            f"column {missing!r} is missing{hint}; {algorithm} needs {needed} (it has:"
            f" {', '.join(row)})"
        ),
    )


# ---------------------------------------------------------------------- forms


def _pair(row: Mapping[str, Any], *, chat: bool, where: str) -> tuple[Text, Text, Text]:
    if "prompt" in row and row["prompt"] is not None:
        prompt = _prompt(row["prompt"], chat=chat, where=where)
        chosen, rejected = (
            _completion(row, name, prompt, chat=chat, where=where)
            for name in ("chosen", "rejected")
        )
    elif not chat:
        texts = [
            _completion(row, name, "", chat=False, where=where) for name in ("chosen", "rejected")
        ]
        prompt, chosen, rejected = _split_texts(*map(str, texts))
    elif isinstance(row["chosen"], str):
        text_mode = 'data.prompt_format = "text" takes their common beginning'
        raise _bad(where, f"chosen is a text, and there is no column 'prompt': {text_mode}")
    else:
        one, other = (_messages(row[name], name, where) for name in ("chosen", "rejected"))
        shared = 0
        while shared < min(len(one), len(other)) and one[shared] == other[shared]:
            shared += 1
        prompt = one[:shared]
        if not prompt:
            raise _bad(
                where,
                (
                    "chosen and rejected begin with different messages, and there is no column"
                    " 'prompt'"
                ),
            )
        if shared == len(one) == len(other):
            raise _bad(where, SAME)
        chosen = _answered(one[shared:], "chosen", where)
        rejected = _answered(other[shared:], "rejected", where)
    if chosen == rejected:
        raise _bad(where, SAME)
    return prompt, chosen, rejected


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the common beginning and what follows it, as TRL's `extract_prompt`: a space before
    the first other character begins the completions, and each of these has at least one character.

    Worked: "Sky is blue", "Sky is black" → "Sky is bl", "ue", "ack"; "Sky is red", "Sky is green" →
    "Sky is", " red", " green"; "ab", "abc" → "a", "b", "bc".
    """
    pairs = enumerate(zip(chosen, rejected, strict=False))
    differs = next((place for place, (one, other) in pairs if one != other), None)
    shared = min(len(chosen), len(rejected)) - 1 if differs is None else differs
    if differs and chosen[differs - 1] == " ":
        shared -= 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _single(
    row: Mapping[str, Any], columns: Sequence[str], *, chat: bool, where: str
) -> tuple[Text, Text]:
    if "text" in columns:
        return "", _string(row["text"], "text", where)
    if "messages" in columns:
        if not chat:
            raise _bad(where, 'messages need the chat template: set data.prompt_format = "chat"')
        messages = _messages(row["messages"], "messages", where)
        if messages[0]["role"] == "assistant":
            raise _bad(where, "messages begin with the assistant's: there is no prompt before it")
        return (), _answered(messages, "messages", where)
    prompt = _prompt(row["prompt"], chat=chat, where=where)
    return prompt, _completion(row, "completion", prompt, chat=chat, where=where)


def _prompt(value: Any, *, chat: bool, where: str) -> Text:
    if not chat:
        return _string(value, "prompt", where)
    if isinstance(value, str):
        return ({"role": "user", "content": _string(value, "prompt", where)},)
    messages = _messages(value, "prompt", where)
    if messages[-1]["role"] == "assistant":
        raise _bad(where, "prompt ends with an assistant's message: put it into the completion")
    return messages


def _completion(row: Mapping[str, Any], name: str, prompt: Text, *, chat: bool, where: str) -> Text:
    value = row[name]
    if isinstance(value, str):
        if not chat:
            return _string(value, name, where)
        return ({"role": "assistant", "content": value},)
    if not chat:
        raise _bad(where, f'{name} is a list of messages: set data.prompt_format = "chat"')
    messages = _messages(value, name, where)
    if messages[: len(prompt)] == prompt:  # the whole conversation, as many hub data sets have it
        messages = messages[len(prompt) :]
    return _answered(messages, name, where)


def _answered(messages: tuple[Mapping[str, Any], ...], name: str, where: str) -> Text:
    if not messages or messages[-1]["role"] != "assistant":
        raise _bad(
            where, f"{name} does not end with an assistant's message: there is no answer to learn"
        )
    return messages


def _opening(conversation: Text) -> Text:
    """Return the messages before the first answer; all of a text."""
    if isinstance(conversation, str):
        return conversation
    return tuple(itertools.takewhile(lambda message: message["role"] != "assistant", conversation))


def _messages(value: Any, name: str, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list | tuple) or not value:
        raise _bad(where, f"{name} is {value!r}; expected a string or a list of messages")
    try:
        return tuple(read_messages(value, name, images=True))
    except RequestError as error:
        raise _bad(where, str(error)) from error


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    try:
        return tuple(read_tools(value))
    except RequestError as error:
        raise _bad(where, str(error)) from error


def _margin(value: Any, where: str) -> float:
    """Return by how much the chosen score is to be the higher one; 0 where the row has none."""
    if value is None:
        return 0.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise _bad(where, f"margin is {value!r}; expected a finite number")
    return float(value)


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(where, f"{name} is {value!r}; expected a text that is not empty")
    return value


def _bad(where: str, what: str) -> ConfigError:
    return ConfigError(f"{SECTION}: {where}: {what}")

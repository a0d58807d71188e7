"""Rows of `[data]`, checked one by one, each as an `Example`. An error names file and line. No MLX.

Forms (TRL's): `prompt, chosen, rejected`, or `chosen, rejected` whose common beginning is the
prompt; KTO: `prompt, completion, label`, `messages, label`, or pairs, which are split up; SFT:
`messages`, `prompt, completion` or `text`. Prompts and completions are strings or lists of
messages. ShareGPT's and Alpaca's rows come as these (`environments/row_forms.py`). Each form may
have `tools` (a list of definitions, or JSON text of one) and `system`. An assistant's message of
`weight` 0 is context that is not learned. A reward model's pairs may have a `margin`.

Nothing is left out silently: unread parts of rows are counted by name (`Leftovers`).
"""

import difflib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config.data import PAIRED, REWARD_MODEL, DataConfig
from mlx_parallm.environments.dataset_rows import formed_rows, prompt_key, read_splits
from mlx_parallm.environments.row_forms import (
    CONVERSATION_COLUMNS,
    is_conversation,
    system_texts,
    with_system,
)
from mlx_parallm.environments.row_images import put_into_turns, refuse_other_media
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.execution.chat_messages import WEIGHTS, read_messages, read_tools, weight_of
from mlx_parallm.execution.parts.kinds import all_kinds
from mlx_parallm.execution.user_code import shown
from mlx_parallm.rl_training.data.leftovers import Leftovers

SECTION = "data"
FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pairs": (
        ("prompt", "chosen", "rejected"),
        ("messages", "chosen", "rejected"),
        ("chosen", "rejected"),
    ),
    "kto": (
        ("prompt", "completion", "label"),
        ("prompt", "chosen", "rejected"),
        ("messages", "label"),
        ("messages", "chosen", "rejected"),
        ("chosen", "rejected"),
    ),
    "sft": (("messages",), ("prompt", "completion"), ("text",)),
}
"""Columns of a row; the first form whose columns are all there is the row's."""

Text = str | tuple[Mapping[str, Any], ...]
"""A piece of a conversation: its messages, or with prompt_format = "text" a string."""

SAME = "chosen and rejected are the same: there is nothing to prefer"
SIDES = ("chosen", "rejected")
SOURCES = (*CONVERSATION_COLUMNS, "instruction")  # a prompt's columns in other programs' layouts


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
    examples: list[Example] = []
    leftovers = Leftovers(shown(file))
    for where, row, layout in formed_rows(file, config.subset, split, SECTION):
        columns = _form(row, forms, algorithm, where)
        row = _prepared(row, columns, file, algorithm, chat=chat, where=where)
        leftovers.count(row, columns, layout, algorithm, chat=chat)
        tools = _tools(row.get("tools"), where)
        if "chosen" in columns:
            pair = _pair(row, columns, chat=chat, where=where, leftovers=leftovers)
            if pair is None:
                continue
            prompt, chosen, rejected = pair
            key = prompt_key(prompt or chosen)
            if algorithm in PAIRED:
                margin = _margin(row.get("margin"), where) if algorithm == REWARD_MODEL else None
                both = chosen, rejected
                examples.append(Example(where, prompt, both, key, tools=tools, margin=margin))
            else:
                sides = ((chosen, True), (rejected, False))
                examples += [
                    Example(where, prompt, (side,), key, good, tools) for side, good in sides
                ]
            continue
        label = row.get("label", True)
        if "label" in columns and not isinstance(label, bool):
            raise _bad(where, f"label is {label!r}; expected true (desirable) or false")
        prompt, completion = _single(row, columns, chat=chat, where=where, leftovers=leftovers)
        key = prompt_key(prompt or _opening(completion))
        examples.append(Example(where, prompt, (completion,), key, label, tools))
    if leftovers.same and not examples:
        raise _bad(leftovers.same[0], SAME)
    leftovers.report()
    return examples


def _prepared(
    row: dict[str, Any],
    columns: Sequence[str],
    file: str,
    algorithm: str,
    *,
    chat: bool,
    where: str,
) -> dict[str, Any]:
    """Return a row whose messages have its system text and what it shows. Raises ConfigError."""
    place = f"{SECTION}: {where}"
    refuse_other_media(row, place)
    name = next((name for name in ("prompt", "messages") if name in columns), None)
    names = [name] if name is not None else [each for each in columns if each in SIDES]
    if system_texts(row, place):
        if names and not chat:
            raise ConfigError(
                f"{place}: a system text needs the chat template: set data.prompt_format ="
                ' "chat", or leave out its column'
            )
        opened = {each: with_system(row[each], row, place, name=each) for each in names}
        row = {**row, **opened}
    turns = {
        name: [{"role": "user", "content": value}]
        if isinstance(value, str)
        else [*_messages(value, name, where)]
        for name in names
        if isinstance(value := row.get(name), str | list | tuple)
    }
    reader = "a reward model" if algorithm == REWARD_MODEL else None
    return row | put_into_turns(turns, row, place, file, chat=chat, blind=reader)


def _form(
    row: Mapping[str, Any], forms: Sequence[tuple[str, ...]], algorithm: str, where: str
) -> tuple[str, ...]:
    present = [name for name, value in row.items() if value is not None]
    if not _is_open(row.get("messages")):  # the conversation of one side
        forms = [form for form in forms if form != ("messages", *SIDES)]
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


def _pair(
    row: Mapping[str, Any],
    columns: Sequence[str],
    *,
    chat: bool,
    where: str,
    leftovers: "Leftovers",
) -> tuple[Text, Text, Text] | None:
    """Return prompt, chosen and rejected; None, which is counted, if both sides are the same."""
    prompt: Text
    prompt_column = next((name for name in ("prompt", "messages") if name in columns), None)
    if prompt_column is not None:
        prompt, (chosen, rejected) = _asked(row, prompt_column, SIDES, chat=chat, where=where)
        if not chat or isinstance(row["chosen"], str):
            chosen, rejected = leftovers.without_prompt(prompt, (chosen, rejected), where)
    elif not chat:
        texts = [_completion(row, name, chat=False, where=where) for name in ("chosen", "rejected")]
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
                    "chosen and rejected begin with different messages,"
                    " and there is no column 'prompt'"
                ),
            )
        if shared == len(one) == len(other):
            leftovers.same.append(where)
            return None
        chosen = _answered(one[shared:], "chosen", where)
        rejected = _answered(other[shared:], "rejected", where)
    if chosen == rejected:
        leftovers.same.append(where)
        return None
    return prompt, chosen, rejected


def _is_open(value: Any) -> bool:
    """Whether a value is messages that end before an answer."""
    return is_conversation(value) and value[-1].get("role") != "assistant"


def _asked(
    row: Mapping[str, Any], prompt_column: str, names: Sequence[str], *, chat: bool, where: str
) -> tuple[Text, list[Text]]:
    """Return the prompt of a column, and the completions under `names` without it, if they
    repeat it with or without its beginning. Raises ConfigError."""
    prompt = _prompt(row[prompt_column], chat=chat, where=where)
    if not chat:
        return prompt, [_completion(row, name, chat=False, where=where) for name in names]
    assert not isinstance(prompt, str)
    completions = [_completion(row, name, chat=True, where=where) for name in names]
    openings = [
        tuple(itertools.takewhile(lambda message: message["role"] != "assistant", completion))
        for completion in completions
        if not isinstance(completion, str)
    ]
    first = openings[0]
    if (
        len(first) > len(prompt)
        and _alike(first[len(first) - len(prompt) :], prompt)
        and all(_alike(first, each) for each in openings)
    ):
        prompt = first  # all sides begin with more of the conversation than the prompt has
    kept: list[Text] = []
    for name, completion, opening in zip(names, completions, openings, strict=True):
        rest = completion
        if _alike(completion[: len(prompt)], prompt):
            rest = completion[len(prompt) :]
        elif opening and _alike(opening, prompt[-len(opening) :]):
            rest = completion[len(opening) :]
        elif opening and any(message["role"] != "system" for message in prompt):
            source = next((each for each in SOURCES if row.get(each) is not None), prompt_column)
            raise _bad(
                where,
                f"{name} begins with a message of role {opening[0]['role']!r} that is none of"
                f" {source!r}: a completion begins with the answer, or repeats the whole prompt",
            )
        assert not isinstance(rest, str)
        kept.append(_answered(tuple(rest), name, where))
    return prompt, kept


def _alike(some: Any, others: Any) -> bool:
    """Whether two lists of messages are the same but for white space."""
    return len(some) == len(others) and all(
        one["role"] == other["role"]
        and _words(one["content"]) == _words(other["content"])
        and one.get("tool_calls") == other.get("tool_calls")
        for one, other in zip(some, others, strict=True)
    )


def _words(content: Any) -> Any:
    if isinstance(content, str):
        return content.split()
    return [
        part["text"].split() if part.get("type") == "text" else part
        for part in content
        if part.get("type") != "text" or part["text"].strip()
    ]


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
    row: Mapping[str, Any],
    columns: Sequence[str],
    *,
    chat: bool,
    where: str,
    leftovers: "Leftovers",
) -> tuple[Text, Text]:
    if "text" in columns:
        return "", _string(row["text"], "text", where)
    if "messages" in columns:
        if not chat:
            raise _bad(where, 'messages need the chat template: set data.prompt_format = "chat"')
        messages = _messages(row["messages"], "messages", where)
        if messages[0]["role"] == "assistant":
            raise _bad(where, "messages begin with the assistant's: there is no prompt before it")
        names = (*(name for name in CONVERSATION_COLUMNS if row.get(name)), "messages")
        answered = _answered(messages, names[0], where)
        # a label is of the last answer
        return (answered[:-1], answered[-1:]) if "label" in columns else ((), answered)
    prompt, [completion] = _asked(row, "prompt", ("completion",), chat=chat, where=where)
    if not chat or isinstance(row["completion"], str):
        leftovers.note_repeat(prompt, completion, where)
    return prompt, completion


def _prompt(value: Any, *, chat: bool, where: str) -> Text:
    if not chat:
        return _string(value, "prompt", where)
    if isinstance(value, str):
        return ({"role": "user", "content": _string(value, "prompt", where)},)
    messages = _messages(value, "prompt", where)
    if messages[-1]["role"] == "assistant":
        raise _bad(where, "prompt ends with an assistant's message: put it into the completion")
    return messages


def _completion(row: Mapping[str, Any], name: str, *, chat: bool, where: str) -> Text:
    value = row[name]
    if isinstance(value, str):
        if not chat:
            return _string(value, name, where)
        return ({"role": "assistant", "content": value},)
    if not chat:
        raise _bad(where, f'{name} is a list of messages: set data.prompt_format = "chat"')
    return _answered(_messages(value, name, where), name, where)


def _answered(messages: tuple[Mapping[str, Any], ...], name: str, where: str) -> Text:
    if not messages or messages[-1]["role"] != "assistant":
        raise _bad(
            where, f"{name} does not end with an assistant's message: there is no answer to learn"
        )
    return messages


def read_answers(prompt: Any, completions: Any, where: str) -> tuple[Text, tuple[Text, ...]]:
    """Return the prompt of a group and its answers: texts where all of them are, else messages.
    Raises ConfigError."""
    if not isinstance(completions, list | tuple) or not completions:
        raise _bad(where, f"completions is {completions!r}; expected a list of answers")
    chat = not all(isinstance(each, str) for each in (prompt, *completions))
    answers = [
        _completion({"completions": each}, "completions", chat=True, where=where) if chat else each
        for each in completions
    ]
    return _prompt(prompt, chat=chat, where=where), tuple(answers)


def _opening(conversation: Text) -> Text:
    """Return the messages before the first answer; all of a text."""
    if isinstance(conversation, str):
        return conversation
    return tuple(itertools.takewhile(lambda message: message["role"] != "assistant", conversation))


def _messages(value: Any, name: str, where: str) -> tuple[Mapping[str, Any], ...]:
    value = [value] if isinstance(value, Mapping) and "role" in value else value
    if not isinstance(value, list | tuple) or not value:
        raise _bad(where, f"{name} is {value!r}; expected a string or a list of messages")
    try:
        read = read_messages(value, name, shown=all_kinds())
        return tuple(_weighed(each, f"{name}.{number}") for number, each in enumerate(read))
    except RequestError as error:
        raise _bad(where, str(error)) from error


def _weighed(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a message whose `weight` is 0 if a field says that it is not learned. Raises
    RequestError."""
    weight = weight_of(message, name)
    kept = {key: value for key, value in message.items() if key not in WEIGHTS}
    return kept if message["role"] != "assistant" or weight is None else kept | {"weight": weight}


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    try:
        return tuple(read_tools(value))
    except RequestError as error:
        raise _bad(where, str(error)) from error


def _margin(value: Any, where: str) -> float:
    """Return by how much the chosen score is to be the higher one; 0 if the row has none."""
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

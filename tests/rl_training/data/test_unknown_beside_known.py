"""Something unknown beside something known: whatever stands in a row is read, refused by its name, or
counted by its name. Never is it left out without a word.

The rows are generated: each known form × each place × a name × a value. `ROW_CASES` sets how many;
the long test takes 10,000.
"""

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.data import DataConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.data.examples import Example, read_examples
from mlx_parallm.system.log import configure_logging

Row = dict[str, Any]
U, A, B = (
    {"role": role, "content": text}
    for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
DONE = [*CALLS, {"role": "tool", "tool_call_id": "c", "content": "r"}, A]
SAID = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PARTS = {"role": "user", "content": [{"type": "text", "text": "q"}]}
VALUED = [{"role": "user", "content": [{"type": "text", "value": "q"}]}, A]

FORMS: dict[str, tuple[str, Row]] = {
    "sft messages": ("sft", {"messages": [U, A]}),
    "sft calls": ("sft", {"messages": DONE}),
    "sft parts": ("sft", {"messages": [PARTS, A]}),
    "sft prompt": ("sft", {"prompt": "q", "completion": "a"}),
    "sft text": ("sft", {"text": "q a"}),
    "sft ShareGPT": ("sft", {"conversations": SAID}),
    "sft Alpaca": ("sft", {"instruction": "q", "input": "", "output": "a"}),
    "sft LLaMA-Factory": ("sft", {"messages": VALUED}),
    "kto": ("kto", {"prompt": [U], "completion": [A], "label": True}),
    "kto messages": ("kto", {"messages": [U, A], "label": False}),
    "kto ShareGPT": ("kto", {"conversations": SAID, "label": True}),
    "kto pair": ("kto", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    "dpo": ("dpo", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    "dpo lists": ("dpo", {"prompt": [U], "chosen": [A], "rejected": [B]}),
    "dpo whole": ("dpo", {"chosen": [U, A], "rejected": [U, B]}),
    "dpo ShareGPT": ("dpo", {"conversations": SAID[:1], "chosen": SAID[1], "rejected": B}),
    "dpo Alpaca": ("dpo", {"instruction": "q", "chosen": "a", "rejected": "b"}),
    "dpo messages": ("dpo", {"messages": [U], "chosen": A, "rejected": B}),
    "reward_model": ("reward_model", {"prompt": "q", "chosen": "a", "rejected": "b"}),
}
COLUMNS = ("system", "system_prompt", "system_message", "tools", "margin", "label", "kto_tag")
COLUMNS += ("history", "images", "videos", "audio", "weight", "score", "prompt_id", "source")
COLUMNS += ("input", "output", "completion", "messages", "conversations", "text", "instruction")
COLUMNS += ("prompt", "question", "answer")
MESSAGE_KEYS = ("weight", "train", "loss", "loss_weight", "thought", "annotations", "refusal")
MESSAGE_KEYS += ("reasoning", "value", "function_call", "audio", "tool_plan", "parts")
PART_KEYS = ("value", "citations", "cache_control", "annotations", "weight")
PART_TYPES = ("reasoning", "tool_call", "video", "input_text", "thinking", "tool_use", "x")
CALL_KEYS = ("input", "args", "parameters", "kwargs", "rest", "custom")
SILENT = ("cache_control",)  # a note to a server about its cache


def values(random: random.Random, mark: str) -> Any:
    return random.choice(
        [mark, [mark], {"k": mark}, [["q2", mark]], [{"role": "user", "content": mark}], 0.5, True]
    )


def lists_of(row: Row) -> list[list[Any]]:
    return [value for value in row.values() if isinstance(value, list) and value]


def dicts(value: Any, key: str) -> list[Row]:
    """All objects within a value that have a key."""
    found = [value] if isinstance(value, dict) and key in value else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found + [each for item in inner for each in dicts(item, key)]


def changed(row: Row, random: random.Random, mark: str) -> tuple[Row, str, Any] | None:
    """A row with something more in it, its name, and its value; None: the form has no such place."""
    row, value = copy.deepcopy(row), values(random, mark)
    place = random.choice(("own column", "column", "message", "part", "part type", "call"))
    if place.endswith("column"):
        name = random.choice(COLUMNS) if place == "column" else f"own_{random.random()}"
        return None if name in row else ({**row, name: value}, name, value)
    messages = [each for listed in lists_of(row) for each in dicts(listed, "role")]
    if not messages:
        return None
    message = random.choice(messages)
    holder, names = message, MESSAGE_KEYS
    if place == "call":
        calls = dicts(messages, "arguments")
        holder, names = (random.choice(calls) if calls else {}), CALL_KEYS
        if calls and random.random() < 0.5:
            del holder["arguments"]
    elif place.startswith("part"):
        if not isinstance(message["content"], list):
            message["content"] = [{"type": "text", "text": message["content"]}]
        holder, names = message["content"][0], PART_KEYS
    if place == "part type":
        name = random.choice(PART_TYPES)
        message["content"].append({"type": name, random.choice(("text", "value", name)): value})
        return row, name, value
    name = random.choice(names)
    if not holder or name in holder:
        return None
    holder[name] = value
    return row, name, value


def cases(count: int, seed: int) -> Iterator[tuple[str, Row, str, Any, str]]:
    source = random.Random(seed)
    made = 0
    while made < count:
        form = source.choice(list(FORMS))
        mark = f"mark{made}"
        found = changed(FORMS[form][1], source, mark)
        if found is not None:
            made += 1
            yield form, *found, mark


def examples(tmp_path: Path, algorithm: str, row: Row) -> tuple[list[Example], str]:
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    with capture_logs() as entries:
        read = read_examples(DataConfig(path=str(tmp_path / "r.jsonl"), eval_fraction=0), algorithm)
    return read[0], json.dumps([entry for entry in entries if "nothing" in entry["event"]])


def is_carried(value: Any, made: str, mark: str) -> bool:
    """Whether a value is in the examples: its text, or the value itself."""
    return mark in made if mark in json.dumps(value) else json.dumps(value) in made


def check(tmp_path: Path, form: str, row: Row, name: str, value: Any, mark: str) -> str | None:
    """Return what is wrong with a row; None: it is read, refused by name or counted."""
    algorithm, known = FORMS[form]
    try:
        read, log = examples(tmp_path, algorithm, row)
    except ConfigError as error:
        named = name.removesuffix("s") in str(error) or mark in str(error)
        return None if named else f"refused: {error}"
    made = json.dumps([[e.prompt, e.completions, e.tools, e.label, e.margin] for e in read])
    before, _ = examples(tmp_path, algorithm, known)
    was = json.dumps([[e.prompt, e.completions, e.tools, e.label, e.margin] for e in before])
    if name in SILENT or name in log:
        return None
    if made != was and (is_carried(value, made, mark) or name in ("weight", "train", "loss")):
        return None
    if name in ("weight", "train", "loss", "loss_weight") and value is True:
        return None  # as without it
    if name == "kto_tag" and value is known.get("label"):
        return None  # it says the same
    return f"{name!r} vanishes: {json.dumps(row)} gives {made}"


def all_right(tmp_path: Path, count: int, seed: int) -> None:
    configure_logging(level="info")
    wrong = [
        f"{form}: {reason}"
        for form, row, name, value, mark in cases(count, seed)
        if (reason := check(tmp_path, form, row, name, value, mark)) is not None
    ]
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:20])


def test_nothing_beside_a_known_form_vanishes(tmp_path: Path) -> None:
    all_right(tmp_path, int(os.environ.get("ROW_CASES", "400")), 0)


@pytest.mark.slow
@pytest.mark.long
def test_nothing_beside_a_known_form_vanishes_at_length(tmp_path: Path) -> None:
    all_right(tmp_path, 10_000, 1)

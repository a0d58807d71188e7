"""Rows of [data]: every form that is read, and errors that name file and line."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.data import DataConfig
from mlx_parallm.config.load import load_config, parse_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.json_values import template_arguments
from mlx_parallm.rl_training.data.examples import Example, read_examples
from mlx_parallm.system.log import configure_logging

USER = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))


def read(tmp_path: Path, algorithm: str, *rows: Any, **config: Any) -> list[Example]:
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    )
    own = DataConfig(path=str(tmp_path / "pairs.jsonl"), **{"eval_fraction": 0.0} | config)
    return read_examples(own, algorithm)[0]


PAIR = {"prompt": "hi", "chosen": "good", "rejected": "bad"}
FORMS: list[dict[str, Any]] = [
    PAIR,
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": [USER], "chosen": "good", "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},  # TRL's implicit prompt
    # the hub's UltraFeedback
    {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "source": "x"},
]


@pytest.mark.parametrize("row", FORMS)
@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "simpo", "cpo"])
def test_every_form_of_a_pair_is_the_same_pair(
    tmp_path: Path, algorithm: str, row: dict[str, Any]
) -> None:
    [example] = read(tmp_path, algorithm, row)
    assert (example.prompt, example.completions) == ((USER,), ((GOOD,), (BAD,)))
    assert example.where == f"{tmp_path / 'pairs.jsonl'}:1"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Sky is blue", "Sky is black", "Sky is bl"),
        ("Sky is red", "Sky is green", "Sky is"),
        ("ab", "abc", "a"),
        ("abc ", "abc d", "abc"),
        ("no", "yes", ""),
        ("a b", "a bc", "a "),
        ("München: ja", "München: nein", "München:"),
    ],
)
def test_the_common_beginning_of_texts_is_the_prompt(
    tmp_path: Path, chosen: str, rejected: str, prompt: str
) -> None:
    """TRL's extract_prompt: up to the first other character, or one before the shorter one's
    last; a space at the end goes to the completions. Also tried: KTO's pairs, messages (which
    had it already), a text in a chat data set."""
    row = {"chosen": chosen, "rejected": rejected}
    [pair] = read(tmp_path, "dpo", row, prompt_format="text")
    assert (pair.prompt, pair.completions) == (
        prompt,
        (chosen[len(prompt) :], rejected[len(prompt) :]),
    )
    sides = read(tmp_path, "kto", row, prompt_format="text")
    assert [(side.prompt, side.completions, side.label) for side in sides] == [
        (prompt, (chosen[len(prompt) :],), True),
        (prompt, (rejected[len(prompt) :],), False),
    ]


def test_kto_takes_labels_and_splits_pairs(tmp_path: Path) -> None:
    rows = read(tmp_path, "kto", {"prompt": "hi", "completion": "bad", "label": False}, "", PAIR)
    assert [(row.completions, row.label, row.where[-2:]) for row in rows] == [
        (((BAD,),), False, ":1"),
        (((GOOD,),), True, ":3"),
        (((BAD,),), False, ":3"),
    ]


def test_sft_takes_conversations_completions_and_texts(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        "sft",
        {"messages": [USER, GOOD]},
        {"prompt": "hi", "completion": "good"},
        {"text": "so"},
    )
    assert [(row.prompt, row.completions) for row in rows] == [
        ((), ((USER, GOOD),)),
        ((USER,), ((GOOD,),)),
        ("", ("so",)),
    ]


def test_text_goes_as_it_is(tmp_path: Path) -> None:
    [row] = read(tmp_path, "dpo", PAIR, prompt_format="text")
    assert (row.prompt, row.completions) == ("hi", ("good", "bad"))


@pytest.mark.parametrize(
    ("algorithm", "row", "config", "message"),
    [
        (
            "dpo",
            {"prompt": "a", "chosen": "b"},
            {},
            r"'rejected' is missing; dpo needs prompt, chosen, rejected or",
        ),
        (
            "dpo",
            {"prompt": "a", "choosen": "b", "rejected": "c"},
            {},
            "is missing; did you mean 'choosen'",
        ),
        ("dpo", PAIR | {"chosen": 5}, {}, "chosen is 5; expected a string or a list of messages"),
        (
            "dpo",
            {"chosen": [GOOD], "rejected": [BAD]},
            {},
            "begin with different messages, and there is no column",
        ),
        ("dpo", PAIR | {"prompt": [USER, GOOD]}, {}, "prompt ends with an assistant's message"),
        ("dpo", PAIR | {"prompt": ""}, {}, "prompt is ''; expected a text that is not empty"),
        (
            "dpo",
            PAIR | {"chosen": [GOOD, USER]},
            {},
            "chosen does not end with an assistant's message",
        ),
        ("dpo", PAIR | {"chosen": [{"role": "assistant"}]}, {}, r"chosen: message 0 is not .*role"),
        (
            "dpo",
            PAIR | {"chosen": [GOOD]},
            {"prompt_format": "text"},
            r"chosen is a list of messages: set data\.prompt_f",
        ),
        (
            "dpo",
            {"chosen": [GOOD], "rejected": [BAD]},
            {"prompt_format": "text"},
            "chosen is a list of messages: set",
        ),
        (
            "dpo",
            {"chosen": "a b", "rejected": "a c"},
            {},
            "chosen is a text, and there is no column 'prompt'",
        ),
        (
            "kto",
            {"prompt": "a", "completion": "b", "label": 1},
            {},
            "label is 1; expected true .desirable. or false",
        ),
        (
            "kto",
            {"prompt": "a", "completion": "b"},
            {},
            "column 'label' is missing; kto needs prompt, completion, label",
        ),
        (
            "sft",
            {"prompt": "a"},
            {},
            "is missing; sft needs messages or prompt, completion or text",
        ),
        ("sft", {"messages": [USER]}, {}, "messages does not end with an assistant's message"),
        ("sft", {"messages": [GOOD]}, {}, "begin with the assistant's"),
        (
            "sft",
            {"messages": [USER, GOOD]},
            {"prompt_format": "text"},
            "messages need the chat template",
        ),
    ],
)
def test_a_bad_row_says_where_it_is_and_what_would_be_right(
    tmp_path: Path, algorithm: str, row: Any, config: dict[str, Any], message: str
) -> None:
    good = {"dpo": PAIR, "kto": PAIR, "sft": {"text": "x"}}[algorithm]
    with pytest.raises(ConfigError, match=rf"^data: .*pairs\.jsonl:3: .*{message}"):
        read(tmp_path, algorithm, good, "", row, **config)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
@pytest.mark.parametrize(
    ("row", "config"),
    [
        (PAIR | {"chosen": "bad"}, {}),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, {}),
        ({"chosen": "a", "rejected": "a"}, {"prompt_format": "text"}),
    ],
)
def test_pairs_of_equal_sides_are_left_out_and_counted(
    tmp_path: Path, algorithm: str, row: Any, config: dict[str, Any]
) -> None:
    """One of many ends no run; alone there is nothing to learn."""
    good = {"chosen": "x a", "rejected": "x b"} if config else PAIR
    configure_logging(level="warning")
    with capture_logs() as entries:
        kept = read(tmp_path, algorithm, good, row, row, **config)
    assert len(kept) == (1 if algorithm == "dpo" else 2)
    [entry] = [entry for entry in entries if "are the same" in entry["event"]]
    assert entry["rows"] == 2 and entry["first"].endswith("pairs.jsonl:2")
    with pytest.raises(ConfigError, match=r"^data: .*pairs\.jsonl"):
        read(tmp_path, algorithm, row, **config)


LONG = "Which of the two comes first?"
ASKED, SPACED = ({"role": "user", "content": text} for text in (LONG, f" {LONG}\n\n"))
RULES = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": LONG, "chosen": [ASKED, GOOD], "rejected": [SPACED, BAD]}, (ASKED,)),
        ({"prompt": [SPACED], "chosen": [ASKED, GOOD], "rejected": [BAD]}, (SPACED,)),
        ({"prompt": [RULES, ASKED], "chosen": [SPACED, GOOD], "rejected": [BAD]}, (RULES, ASKED)),
        (
            {"prompt": LONG, "chosen": [RULES, ASKED, GOOD], "rejected": [RULES, ASKED, BAD]},
            (RULES, ASKED),
        ),
        ({"prompt": LONG, "chosen": f"{LONG}\ngood", "rejected": f" {LONG} bad"}, (ASKED,)),
        ({"messages": [ASKED], "chosen": GOOD, "rejected": [BAD]}, (ASKED,)),
        ({"messages": [ASKED, GOOD], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, (ASKED,)),
    ],
)
def test_a_prompt_that_stands_again_in_the_completions(
    tmp_path: Path, row: dict[str, Any], prompt: tuple[Any, ...]
) -> None:
    """It may differ in white space, or stand there with more or less of what is before it."""
    [example] = read(tmp_path, "dpo", row)
    assert (example.prompt, example.completions) == (prompt, ((GOOD,), (BAD,)))
    if row.get("prompt") is not None and not isinstance(row["chosen"], str):
        single = {"prompt": row["prompt"], "completion": row["chosen"]}
        [example] = read(tmp_path, "sft", single)
        assert (example.prompt, example.completions) == (prompt, ((GOOD,),))


def test_a_text_that_begins_with_its_prompt(tmp_path: Path) -> None:
    """Of both sides it is left out; one answer, or a short prompt, may begin so by chance."""
    asked = f"Q: {LONG}\nA: "
    pair = {"prompt": asked, "chosen": f"{asked}good", "rejected": f"Q: {LONG} A:  bad"}
    [example] = read(tmp_path, "dpo", pair, prompt_format="text")
    assert (example.prompt, example.completions) == (asked, ("good", "bad"))
    short = {"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi."}
    assert read(tmp_path, "dpo", short)[0].completions[0][0]["content"] == "Hi there"
    configure_logging(level="warning")
    with capture_logs() as entries:
        read(tmp_path, "sft", {"prompt": LONG, "completion": f"{LONG} The first."})
    assert ["begin with their prompt" in entry["event"] for entry in entries] == [True]
    other = {"role": "user", "content": "another question"}
    with pytest.raises(ConfigError, match=r"chosen .*'user'"):
        read(tmp_path, "dpo", {"prompt": LONG, "chosen": [other, GOOD], "rejected": [BAD]})


def test_a_text_has_no_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    configure_logging(level="info")
    for row, config in (
        ({"text": "x"}, {}),
        ({"prompt": "x", "completion": "y"}, {"prompt_format": "text"}),
    ):
        with capture_logs() as entries:
            read(tmp_path, "sft", row | {"tools": tools}, **config)
        assert [entry["rows"] for entry in entries if "rows" in entry] == ["tools (1)"]


@pytest.mark.parametrize("field", ["weight", "train", "trainable", "loss", "loss_weight"])
def test_whether_an_answer_is_learned_is_0_or_1(tmp_path: Path, field: str) -> None:
    for value, weight in ((0, 0), (0.0, 0), (False, 0), (1, 1), (1.0, 1), (True, 1)):
        [example] = read(tmp_path, "sft", {"messages": [USER, {**GOOD, field: value}, USER, BAD]})
        assert example.completions[0][1] == {**GOOD, "weight": weight}
    for value in ("0", 0.5, 2, "false", [0]):
        with pytest.raises(ConfigError, match=rf"messages\.1\.{field} is .*; expected 0"):
            read(tmp_path, "sft", {"messages": [USER, {**GOOD, field: value}]})


def test_rows_with_a_label_of_their_last_answer(tmp_path: Path) -> None:
    """LLaMA-Factory's KTO: only the last answer is judged."""
    messages = [USER, BAD, USER, GOOD]
    for row in ({"label": True}, {"kto_tag": True}):
        [example] = read(tmp_path, "kto", {"messages": messages, **row})
        assert (example.prompt, example.completions) == ((USER, BAD, USER), ((GOOD,),))
        assert example.label is True


def test_held_out_rows_share_no_prompt_with_the_others(tmp_path: Path) -> None:
    rows = [PAIR | {"prompt": f"p{number % 20}", "chosen": f"c{number}"} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, heldout = read_examples(
        DataConfig(path=str(tmp_path / "rows.jsonl"), eval_fraction=0.3), "dpo"
    )
    assert len(train) + len(heldout) == 60
    assert heldout
    assert not {row.key for row in train} & {row.key for row in heldout}
    own = DataConfig(path=str(tmp_path / "rows.jsonl"), eval_path=str(tmp_path / "rows.jsonl"))
    assert [len(part) for part in read_examples(own, "dpo")] == [60, 60]


def test_conversations_that_begin_alike_are_held_out_together(tmp_path: Path) -> None:
    one, other = read(
        tmp_path, "sft", {"messages": [USER, GOOD]}, {"messages": [USER, BAD, USER, GOOD]}
    )
    assert one.key == other.key
    text, another = read(tmp_path, "sft", {"text": "a"}, {"text": "b"})
    assert text.key != another.key


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("training", "others", "message"),
    [
        ({"algorithm": "dpo"}, {}, r'algorithm = "dpo" learns from rows of a file: set data\.path'),
        ({}, {"data": {"path": "x"}}, r"data\.path is set, but grpo learns from rollouts"),
        (
            {"algorithm": "dpo", "kl_beta": 0.1},
            {"data": {"path": "x"}},
            r"rl_training\.kl_beta is about rollouts",
        ),
        (
            {"algorithm": "dpo", "atropos": {"rollout_batch_size": 64}},
            {"data": {"path": "x"}},
            r"rl_training\.atropos\.rollout_batch_size is about rollouts",
        ),
        (
            {"algorithm": "sft"},
            {"data": {"path": "x"}, "environments": [{"kind": "tasks", "name": "copy"}]},
            "learns from data.path alone",
        ),
        (
            {"algorithm": "orpo", "preference": {"gamma": 2.0}},
            {"data": {"path": "x"}},
            r"preference\.gamma is an option of simpo: orpo does not use it",
        ),
        (
            {"preference": {"beta": 2.0}},
            {},
            r"preference\.beta is an option of dpo, .*: grpo does not use it",
        ),
        (
            {"algorithm": "kto", "batch_size": 1},
            {"data": {"path": "x"}},
            "batch_size has to be at least 2",
        ),
        (
            {"algorithm": "dpo", "preference": {"loss_type": "robust"}},
            {"data": {"path": "x"}},
            "robust.* needs label_smoothing",
        ),
        (
            {"algorithm": "dpo", "preference": {"loss_type": "ipo", "label_smoothing": 0.1}},
            {"data": {"path": "x"}},
            "has no label_smoothing",
        ),
        (
            {
                "algorithm": "dpo",
                "preference": {"loss_type": ["sft", "aot"]},
                "lora": {"dropout": 0.1},
            },
            {"data": {"path": "x"}},
            r'"aot" sorts log-probabilities .*: set rl_training\.lora\.dropout = 0',
        ),
    ],
)
def test_what_does_not_go_together(
    training: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"rl_training": training, **others})


def test_rows_of_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((name, subset, split))
        return [PAIR | {"prompt": f"{split} {number}"} for number in range(3)] + [
            {"prompt": "x"}
        ] * (split == "bad")

    package = ModuleType("datasets")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    train, heldout = read_examples(
        DataConfig(path="hf:o/n", subset="main", eval_split="test"), "dpo"
    )
    assert asked == [("o/n", "main", "train"), ("o/n", "main", "test")]
    assert [row.prompt[0]["content"] for row in heldout] == ["test 0", "test 1", "test 2"]
    assert train[1].where == "hf:o/n, train row 1" and train[1].completions == ((GOOD,), (BAD,))
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR))
    train, heldout = read_examples(
        DataConfig(path=str(tmp_path / "pairs.jsonl"), eval_path="hf:o/n"), "dpo"
    )
    assert (len(train), len(heldout)) == (1, 3)
    with pytest.raises(ConfigError, match="'chosen'"):
        read_examples(DataConfig(path="hf:o/n", split="bad"), "dpo")


@pytest.mark.parametrize("wrong", [{"subset": "main"}, {"split": "test"}, {"eval_split": "test"}])
def test_a_file_has_no_splits(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} belongs to a hub data set"):
        parse_config({"rl_training": {"algorithm": "sft"}, "data": {"path": "rows.jsonl", **wrong}})


def test_a_saved_configuration_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "run.toml").write_text(
        '[rl_training]\nalgorithm = "dpo"\nbatch_size = 256\n[data]\npath = "rows.jsonl"'
    )
    config = load_config(tmp_path / "run.toml")
    assert config.data.path == str(tmp_path / "rows.jsonl")
    (tmp_path / "saved.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "saved.toml") == config


def test_tools_and_calls_as_json_text(tmp_path: Path) -> None:
    """Definitions and arguments may be JSON text: they reach the template as objects, whatever
    the form."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    answer = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    row = {"prompt": "q", "completion": answer, "label": True, "tools": json.dumps(tools)}
    pair = {"prompt": "q", "chosen": answer, "rejected": "no", "tools": tools}
    path = tmp_path / "rows.jsonl"
    for rows, algorithm in (([row], "kto"), ([pair], "dpo")):
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        [example], _ = read_examples(DataConfig(path=str(path), eval_fraction=0), algorithm)
        assert list(example.tools) == tools
        [message] = example.completions[0]
        assert isinstance(message, dict)
        assert message["content"] == ""
        assert template_arguments(message["tool_calls"][0]["function"]["arguments"]) == {"a": [1]}
    for wrong in ("{", '{"a": 1}', 3):
        path.write_text(json.dumps(row | {"tools": wrong}) + "\n")
        with pytest.raises(ConfigError, match="tools is"):
            read_examples(DataConfig(path=str(path), eval_fraction=0), "kto")

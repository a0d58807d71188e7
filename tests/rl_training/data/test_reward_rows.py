"""Rows for a reward model: margins, whole conversations, and the token that the score stands on."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.data import DataConfig
from mlx_parallm.config.load import Config
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.data.examples import Example, read_examples
from mlx_parallm.rl_training.data.learned_tokens import encode_all
from tests.rl_training.data.test_data_tokens import ANSWER, MORE, SECOND, USER, Characters
from tests.rl_training.data.test_data_training import make_config, source_of, write_rows


def read(directory: Path, *rows: dict[str, Any], **config: Any) -> list[Example]:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_examples(DataConfig(path=str(file), eval_fraction=0, **config), "reward_model")[0]


PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}


def test_a_margin_is_read_and_a_row_without_one_has_none(tmp_path: Path) -> None:
    rows = [PAIR, PAIR | {"margin": 2}, PAIR | {"margin": -0.5}, PAIR | {"margin": None}]
    assert [example.margin for example in read(tmp_path, *rows)] == [0.0, 2.0, -0.5, 0.0]


@pytest.mark.parametrize("margin", ["2", True, float("nan"), [1]])
def test_a_margin_that_is_no_number_names_its_row(margin: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        read(tmp_path, PAIR, PAIR | {"margin": margin})


def scored(example: Example, tokenizer: Any, **config: Any) -> list[str]:
    """The text of both sequences, the scored token shown as "!"."""
    [unit] = encode_all([example], tokenizer, DataConfig(**config), {}, form="scored")
    texts = []
    for sequence in unit.sequences:
        assert sequence.mask.sum() == 1 and sequence.mask[-1]
        assert sequence.tokens[-1] == sequence.tokens[-2]
        texts.append("".join(map(chr, sequence.tokens[:-1])) + "!")
    return texts


def test_a_conversation_is_read_up_to_its_end_token() -> None:
    example = Example("x:1", (USER,), ((ANSWER,), (ANSWER, MORE, SECOND)), "k", margin=0.0)
    assert scored(example, Characters()) == [
        "u:2+2?$\na:4$!",
        "u:2+2?$\na:4$\nu:and 3+3?$\na:six$!",
    ]


def test_a_template_that_rewrites_history_is_no_hindrance() -> None:
    """A preference between policies' answers needs one sequence; a score reads what is shown."""
    thought = {"role": "assistant", "content": "<think>2</think>4"}
    example = Example("x:1", (USER,), ((thought, MORE, SECOND), (thought,)), "k", margin=0.0)
    assert scored(example, Characters(forgets_thoughts=True)) == [
        "u:2+2?$\na:4$\nu:and 3+3?$\na:six$!",
        "u:2+2?$\na:<think>2</think>4$!",
    ]


def test_an_end_token_is_added_where_there_is_none() -> None:
    example = Example("x:1", (USER,), ((ANSWER,), (ANSWER,)), "k", margin=0.0)
    assert scored(example, Characters(end=""))[0].endswith("a:4\n$!")
    text = Example("x:1", "Sky is ", ("blue", "red$"), "k", margin=0.0)
    assert scored(text, Characters(), prompt_format="text") == ["^Sky is blue$!", "^Sky is red$!"]


def test_texts_without_a_prompt_are_scored_whole(tmp_path: Path) -> None:
    row = {"chosen": "Sky is blue", "rejected": "Sky is black"}
    [example] = read(tmp_path, row, prompt_format="text")
    assert scored(example, Characters(), prompt_format="text") == [
        "^Sky is blue$!",
        "^Sky is black$!",
    ]


def test_other_margins_are_other_rows_to_a_resume(tmp_path: Path) -> None:
    states = []
    for margin in (0.0, 1.0, 2.0):
        write_rows(tmp_path, "reward_model")
        file = tmp_path / "rows.jsonl"
        rows = [json.loads(line) | {"margin": margin} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        states.append(source_of(make_config("reward_model", tmp_path)).state())
    assert len({state["sha256"] for state in states}) == 3


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"algorithm": "dpo", "preference": {"head_learning_rate": 0.1}}, "option of reward_model"),
        ({"preference": {"beta": 0.2}}, "beta is an option of dpo"),
        ({"kl_beta": 0.1}, "rl_training.kl_beta is about rollouts: reward_model does not use it"),
        ({"ppo": {"value_learning_rate": 0.2}}, 'only read with algorithm = "ppo"'),
    ],
)
def test_keys_of_other_algorithms_are_refused(training: dict[str, Any], problem: str) -> None:
    settings = {"algorithm": "reward_model"} | training
    with pytest.raises(ValueError, match=problem):
        Config.model_validate({"rl_training": settings, "data": {"path": "rows.jsonl"}})

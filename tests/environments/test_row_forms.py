"""Rows of other programs' layouts: ShareGPT's and Alpaca's, for prompts, SFT, preferences, KTO
and TRL's trainers."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.data import DataConfig
from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.dataset_rows import json_lines, read_prompts, rows_of
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.row_forms import known_row
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import reference_to
from mlx_parallm.faces.trl.dataset_argument import read_rows
from mlx_parallm.rl_training.data.examples import Example, read_examples
from mlx_parallm.systems.traces.importers.dialects import chat_messages

TURNS = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


def write(tmp_path: Path, *rows: Any) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def examples(tmp_path: Path, algorithm: str, *rows: Any) -> list[Example]:
    return read_examples(DataConfig(path=write(tmp_path, *rows), eval_fraction=0.0), algorithm)[0]


LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "ShareGPT": ({"conversations": TURNS}, [USER, ANSWER]),
    "conversation": ({"conversation": TURNS}, [USER, ANSWER]),
    "roles of OpenAI's": ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
    "under our own name": ({"messages": TURNS}, [USER, ANSWER]),
    "user and assistant": (
        {"conversations": [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"}]},
        [USER, ANSWER],
    ),
    "a system turn": (
        {"conversations": [{"from": "system", "value": "Be brief."}, *TURNS]},
        [SYSTEM, USER, ANSWER],
    ),
    "a system column": ({"conversations": TURNS, "system": "Be brief."}, [SYSTEM, USER, ANSWER]),
    "an empty system column": ({"conversations": TURNS, "system": ""}, [USER, ANSWER]),
    "a weight": (
        {"conversations": [TURNS[0], {**TURNS[1], "weight": 1}]},
        [USER, {**ANSWER, "weight": 1}],
    ),
    "Alpaca with history": (
        {"instruction": "2+2?", "input": "", "output": "4", "history": [["1+1?", "2"]]},
        [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, USER, ANSWER],
    ),
    "Alpaca with system": (
        {"instruction": "2+2?", "output": "4", "system": "Be brief."},
        [SYSTEM, USER, ANSWER],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_conversation_of_another_layout_is_read_as_messages(tmp_path: Path, name: str) -> None:
    row, expected = LAYOUTS[name]
    [example] = examples(tmp_path, "sft", row)
    assert (*example.prompt, *example.completions[0]) == tuple(expected)


def test_turns_that_call_tools_are_calls_and_results(tmp_path: Path) -> None:
    """The forms of LLaMA-Factory (function_call, observation) and Hermes (tool); text that is no
    call."""
    call = json.dumps({"name": "add", "arguments": {"ü": 1}}, ensure_ascii=False)
    both = [{"name": "add", "arguments": {}}, {"name": "add", "arguments": "{}"}]
    turns = [
        TURNS[0],
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "4"},
        {"from": "tool_call", "value": json.dumps(both)},
        {"from": "tool", "value": "5"},
        {"from": "function_call", "value": "add(1)"},
        TURNS[1],
    ]
    tools = json.dumps([{"name": "add", "parameters": {}}])
    [example] = examples(tmp_path, "sft", {"conversations": turns, "tools": tools})
    messages = example.completions[0]
    assert [message["role"] for message in messages] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant", "assistant")
    ]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"ü": 1}}
    assert len(messages[3]["tool_calls"]) == 2 and messages[5]["content"] == "add(1)"
    assert example.tools == ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def test_preferences_and_labels(tmp_path: Path) -> None:
    sides = {"chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}}
    wrong = {"role": "assistant", "content": "5"}
    for row in (
        {"conversations": TURNS[:1], **sides},
        {"conversations": TURNS[:1], **{name: [side] for name, side in sides.items()}},
        {"chosen": TURNS, "rejected": [TURNS[0], sides["rejected"]]},
        {"prompt": TURNS[:1], **{name: [side] for name, side in sides.items()}},
    ):
        [example] = examples(tmp_path, "dpo", row)
        assert (example.prompt, example.completions) == ((USER,), ((ANSWER,), (wrong,)))
    [example] = examples(tmp_path, "kto", {"conversations": TURNS, "label": False})
    assert (example.prompt, example.completions, example.label) == ((USER,), ((ANSWER,),), False)


def score(completions: list[str], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def environment(data: str, **keys: Any) -> EnvironmentConfig:
    reward = reference_to(score, "score")
    return EnvironmentConfig(
        kind="dataset", data=data, heldout_fraction=0, rewards=[reward], **keys
    )


def test_prompts_end_before_the_last_answer(tmp_path: Path) -> None:
    """GRPO's rows. The answer stays in the columns that rewards see, and every column of the row
    with it."""
    data = write(tmp_path, {"conversations": TURNS, "answer": "4"}, {"conversations": TURNS[:1]})
    rows = read_prompts(environment(data), seed=0).train
    assert [row.prompt for row in rows] == [[USER], [USER]]
    assert rows[0].columns["completion"] == [ANSWER] and rows[0].columns["conversations"] == TURNS
    assert rows[0].columns["answer"] == "4" and rows[1].columns["completion"] is None
    assert next(rows_of(data, None, "train", "data"))[0].endswith(":1")


def test_alpacas_rows(tmp_path: Path) -> None:
    row = {"instruction": "Translate.", "input": "Käse", "output": "cheese"}
    asked = {"role": "user", "content": "Translate.\nKäse"}
    [example] = examples(tmp_path, "sft", row)
    assert (example.prompt, example.completions) == (
        (asked,),
        (({"role": "assistant", "content": "cheese"},),),
    )
    config = environment(write(tmp_path, row))
    [prompt] = read_prompts(config, seed=0).train
    assert prompt.prompt == "Translate.\nKäse" and prompt.columns["output"] == "cheese"
    named = config.model_copy(update={"prompt_column": "instruction"})
    assert read_prompts(named, seed=0).train[0].prompt == "Translate.", (
        "the configuration's column goes first"
    )


def test_trls_trainers_take_them_too() -> None:
    rows = read_rows([{"conversations": TURNS}], "train_dataset")
    assert (
        rows.conversational
        and rows.rows[0]["prompt"] == [USER]
        and rows.rows[0]["messages"] == [USER, ANSWER]
    )
    assert not read_rows([{"instruction": "a", "output": "b"}], "train_dataset").conversational


def test_rows_of_ours_stay_as_they_are() -> None:
    for row in (
        {"prompt": "a", "instruction": "b", "output": "c"},
        {"messages": [USER], "conversations": TURNS},
        {"text": "a", "instruction": "b"},
        {"conversations": "a text"},
        {"instruction": 5},
    ):
        assert known_row(dict(row), "x") == (row, None)


def test_a_turn_of_nobody_is_named_with_its_place(tmp_path: Path) -> None:
    for turn, reason in (
        (
            {"from": "narrator", "value": "x"},
            "turn 1: 'from' is 'narrator'; known are system, .*human, .*gpt",
        ),
        ("hello", "turn 1: expected .*from.*got 'hello'"),
        ({"from": "gpt", "value": {"a": 1}}, "messages.1.content: must be a string"),
    ):
        with pytest.raises(ConfigError, match=rf"^data: .*rows\.jsonl:1: .*{reason}"):
            examples(tmp_path, "sft", {"conversations": [TURNS[0], turn]})


def test_a_rows_tools_are_shown_to_the_policy(tmp_path: Path) -> None:
    """As TRL does. A column of that name with anything else in it is only a column."""
    tool = {"type": "function", "function": {"name": "add"}}
    for tools, shown in (
        ([tool], {"tools": [tool]}),
        (json.dumps([{"name": "add"}]), {"tools": [tool]}),
        (["hammer"], {}),
        ("a hammer", {}),
        ([{"kind": "hammer"}], {}),
        (None, {}),
    ):
        data = write(tmp_path, {"prompt": "a", "tools": tools})
        assert DatasetSource(environment(data), seed=0).task(0).options == shown


def test_free_text_is_no_path(tmp_path: Path) -> None:
    """OSError 36 for a name of over 255 bytes, ValueError for a null character, RuntimeError for
    nobody's home."""
    for text in ("x" * 300, "a\0b", "~nobody-at-all/rows.jsonl"):
        with pytest.raises(ConfigError, match=r"^data: "):
            list(json_lines(Path(text), "data"))
        rates = environment(
            write(tmp_path, {"prompt": "a"}), pass_rates=text, curriculum="easy_first"
        )
        with pytest.raises(ConfigError, match="not results of"):
            build_sources([rates], seed=0)


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (("Human", "GPT"), ("from", "value")),
        (("user", "ai"), ("from", "value")),
        (("human", "bard"), ("from", "content")),
        (("user", "assistant"), ("role", "value")),
    ],
)
def test_rows_and_logs_know_the_same_speakers(
    names: tuple[str, str], fields: tuple[str, str]
) -> None:
    """Names in capitals and `role` beside `value` too: one table serves `--data` and the
    importers of traces."""
    turns = [
        dict(zip(fields, said, strict=True)) for said in zip(names, ("Hi.", "Hello."), strict=True)
    ]
    expected = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    row, _ = known_row({"conversations": turns}, "row 0")
    assert row["messages"] == chat_messages(turns) == expected


def test_rows_of_nemo_gym_are_prompts_with_tools() -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
    row, layout = known_row(
        {
            "responses_create_params": {
                "instructions": "Be short.",
                "input": [
                    {"role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
                    {"role": "user", "content": "Where?"},
                    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "there"},
                ],
                "tools": [tool],
                "temperature": 0.2,
            },
            "expected_answer": "there",
        },
        "row 0",
    )
    assert layout == "NeMo Gym"
    assert row["prompt"][:2] == [
        {"role": "system", "content": "Be short.\n\nRules."},
        {"role": "user", "content": "Where?"},
    ]
    assert row["prompt"][2]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert row["prompt"][3] == {"role": "tool", "tool_call_id": "c", "content": "there"}
    [definition] = row["tools"]
    assert definition["type"] == "function"
    assert definition["function"] == {key: tool[key] for key in ("name", "parameters", "strict")}
    assert row["expected_answer"] == "there"
    plain, _ = known_row({"responses_create_params": {"input": "2+2?", "instructions": "x"}}, "")
    assert plain["prompt"] == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "2+2?"},
    ]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"input": []}, "'input' is neither"),
        ({"input": [{"type": "reasoning"}]}, "item 0: 'reasoning' is not a message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "needs one of"),
    ],
)
def test_rows_of_nemo_gym_that_cannot_be_read(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        known_row({"responses_create_params": params}, "row 7")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("system", "Be brief."),
        ("system", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]),
        ("system_prompt", "Be brief."),
        ("system_message", SYSTEM),
    ],
)
def test_a_column_of_system_text_stands_before_the_messages_of_every_form(
    tmp_path: Path, column: str, value: Any
) -> None:
    """Once, where the messages begin with it already; in prompts of an environment too."""
    wrong = {"role": "assistant", "content": "5"}
    about = {column: value}
    forms: list[tuple[str, dict[str, Any]]] = [
        ("sft", {"messages": [USER, ANSWER]}),
        ("sft", {"messages": [{**SYSTEM, "content": "Be  brief.\n"}, USER, ANSWER]}),
        ("sft", {"prompt": "2+2?", "completion": "4"}),
        ("sft", {"prompt": [USER], "completion": [USER, ANSWER]}),
        ("kto", {"messages": [USER, ANSWER], "label": True}),
        ("dpo", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
        ("dpo", {"chosen": [USER, ANSWER], "rejected": [USER, wrong]}),
        ("dpo", {"instruction": "2+2?", "chosen": "4", "rejected": "5"}),
    ]
    for algorithm, row in forms:
        [example] = examples(tmp_path, algorithm, row | about)
        read = [*example.prompt, *example.completions[0]]
        assert [message["role"] for message in read] == ["system", "user", "assistant"]
        assert read[0]["content"].split() == ["Be", "brief."]
    rows = read_prompts(environment(write(tmp_path, {"prompt": "2+2?"} | about)), seed=0).train
    assert rows[0].prompt == [SYSTEM, USER]
    other = {"messages": [{**SYSTEM, "content": "Be long."}, USER, ANSWER]}
    for row, message in (
        (other | about, "two different system texts"),
        ({"prompt": "2+2?", "system": "a", "system_message": "b", "completion": "4"}, "different"),
    ):
        with pytest.raises(ConfigError, match=message):
            examples(tmp_path, "sft", row)
    plain = DataConfig(
        path=write(tmp_path, {"prompt": "a", "completion": "b"} | about), prompt_format="text"
    )
    with pytest.raises(ConfigError, match="chat template"):
        read_examples(plain, "sft")


@pytest.mark.parametrize(
    "history",
    [
        [["1+1?", "2"]],
        [{"user": "1+1?", "assistant": "2"}],
        [{"answer": "2", "question": "1+1?"}],
        [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
        [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}],
    ],
)
def test_the_history_of_alpacas_rows(tmp_path: Path, history: Any) -> None:
    row = {"instruction": "2+2?", "output": "4", "history": history}
    [example] = examples(tmp_path, "sft", row)
    assert [message["content"] for message in example.completions[0]] == ["1+1?", "2", "2+2?", "4"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"history": [{"q": "a", "b": "c"}]}, "history, turn 0: .* is not a pair of texts"),
        ({"history": [["a"]]}, "history, turn 0: .* is not a pair of texts"),
        ({"history": [["a", "b", "c"]]}, "history, turn 0: .* is not a pair of texts"),
        ({"history": [["a", None]]}, "history, turn 0: .* is not a pair of texts"),
        ({"history": "a"}, "history is 'a'; expected a list of turns"),
        ({"input": ["a"]}, r"input is \['a'\]; expected a text"),
        ({"output": {"a": 1}}, "output is .*; expected a text"),
    ],
)
def test_columns_of_alpacas_rows_that_are_none(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: {message}"):
        examples(tmp_path, "sft", {"instruction": "2+2?", "output": "4"} | row)


def test_the_parts_of_llama_factory(tmp_path: Path) -> None:
    """`reason_tool_use_demo_50.jsonl`: every part has its text, thought or call in `value`."""

    def part(kind: str, value: str) -> dict[str, str]:
        return {"type": kind, "value": value}

    call = json.dumps({"name": "look", "arguments": {"q": 1}})
    messages = [
        {"role": "system", "content": [part("text", "Be brief.")]},
        {"role": "user", "content": [part("text", "2+2?")]},
        {"role": "assistant", "content": [part("reasoning", "hm"), part("tool_call", call)]},
        {"role": "tool", "content": [part("text", "4")]},
        {"role": "assistant", "content": [part("text", "4")], "loss_weight": 0.0},
    ]
    [example] = examples(tmp_path, "sft", {"messages": messages})
    system, user, calls, result, last = example.completions[0]
    assert (system, user["content"], result["content"]) == (SYSTEM, "2+2?", "4")
    assert calls["reasoning_content"] == "hm"
    assert calls["tool_calls"][0]["function"] == {"name": "look", "arguments": {"q": 1}}
    assert last == {"role": "assistant", "content": "4", "weight": 0}
    for kind, value in (("tool_call", "look()"), ("video", "a.mp4")):
        wrong = {"messages": [{"role": "user", "content": [part(kind, value)]}]}
        with pytest.raises(ConfigError, match=f"turn 0, part 0: a part of type '{kind}'"):
            examples(tmp_path, "sft", wrong)

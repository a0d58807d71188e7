"""`tool_choice = "required"` of rows: every answer is a call of a tool that its row offers, with the
engine and the shipped model, which calls nothing by itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.answer_grammar import required_calls
from tests.conftest import running_tiny_engine
from tests.environments.test_with_engine import agrees, collect

SIDES = ["N", "S"]
GO = {
    "name": "go",
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": SIDES}},
        "required": ["to"],
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
ROWS: list[dict[str, Any]] = [
    {"prompt": "North", "tools": [GO], "calls": [{"go": {"to": ["N"]}}]},
    {"prompt": "How are you?", "tools": [], "calls": []},
]


def config(tmp_path: Path, rows: list[dict[str, Any]], **fields: Any) -> EnvironmentConfig:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"rewards": ("builtin:tool_call",), "tool_choice": "required"} | fields
    return EnvironmentConfig(
        kind="dataset",
        name="calls",
        data=str(data),
        heldout_fraction=0.0,
        group_size=4,
        max_tokens=100,
        **fields,
    )


def test_every_answer_calls_a_tool_of_its_row(
    tmp_path: Path, tiny_tokenizer: Any, managed: Any
) -> None:
    sources = build_sources([config(tmp_path, ROWS)], seed=3)
    with running_tiny_engine(512) as engine:
        groups = collect(managed, engine.client, sources, 2, longest=512)
        for group in groups:
            # the log-probabilities are the model's own, as the trainer computes them
            agrees(engine.client, tiny_tokenizer, group)
    called = []
    for group in groups:
        for rollout in group.rollouts:
            start = rollout.mask.index(1)
            text = tiny_tokenizer.decode(list(rollout.tokens[start:]), skip_special_tokens=False)
            called.append("<tool_call>" in text)
            if called[-1]:
                assert rollout.stop_reason == "stop", text
                call = json.loads(text.split("<tool_call>")[1].split("</tool_call>")[0])
                assert call["name"] == "go"
                assert call["arguments"]["to"] in SIDES
                assert rollout.reward == pytest.approx(
                    1.0 if call["arguments"]["to"] == "N" else 0.6
                )
    assert sorted(called) == [False] * 4 + [True] * 4  # the other row has no tools


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (ROWS[1:], {}, "no row has a column `tools`"),
        (ROWS, {"prompt_format": "text"}, "needs the chat template"),
    ],
)
def test_where_it_means_nothing_it_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        DatasetSource(config(tmp_path, rows, **fields), seed=0)
    with pytest.raises(ValueError, match='"dataset"'):
        EnvironmentConfig(kind="tasks", name="sum", tool_choice="required")


def test_tools_whose_calls_are_made_exclude_it(tmp_path: Path) -> None:
    source = DatasetSource(config(tmp_path, ROWS), seed=0)

    class Offered:
        definitions = (NOW,)

    with pytest.raises(ConfigError, match=r"tools = \[\]"):
        source.take_tools(Offered())  # type: ignore[arg-type]


def test_calls_are_in_the_format_that_rewards_read() -> None:
    """Also where that format has no grammar: calls in another one would never get a reward."""

    class Own:
        tool_markers = ("[CALL]", "[/CALL]")
        tool_format = "qwen3_coder"
        template_takes_tools = True
        think_markers = None
        eos_token_ids = special_ids = frozenset({0})

        @staticmethod
        def parse_tool_call(text: str, tools: Any) -> Any:
            return {"name": text, "arguments": {}}

        @staticmethod
        def encode_within(text: str) -> list[int]:
            return [1] * len(text)

    structure = required_calls(Own(), [NOW], [1, 2, 3])  # type: ignore[arg-type]
    assert structure is not None
    assert "[CALL]" in structure.source
    assert "<tool_call>" not in structure.source

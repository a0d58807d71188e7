"""builtin:tool_call by hand: BFCL's rules for the full mark, the parts below it, and the shipped
rows of BFCL."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.tool_calling import make_rows
from mlx_parallm.config.load import load_config
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards.call_check import accepts, tool_call
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.types import Rollout, Trajectory
from tests.integration.in_process import train_here
from tests.integration.processes import metrics

ROOT = Path(__file__).parents[2]
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string"},
        },
        "required": ["city", "days"],
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
PARIS = {"weather": {"city": ["Paris", "Paris, France"], "days": [3], "unit": ["celsius", ""]}}
OSLO = {"weather": {"city": ["Oslo"], "days": [1], "unit": [""]}}


def written(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scored(text: str, *wanted: dict[str, Any], **options: Any) -> float | None:
    return tool_call(**options)(completions=[text], tools=[[WEATHER, NOW]], calls=[list(wanted)])[0]


RIGHT = written("weather", city="Paris", days=3)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (RIGHT, 1.0),
        (f"I look it up. {RIGHT}", 1.0),
        (written("weather", city="paris france", days=3, unit="Celsius"), 1.0),
        # two of two parameters, one of two values
        (written("weather", city="Paris", days="3"), 0.8),
        (written("weather", city="Paris", days=3, hours=1), 0.8),  # two of three: 0.4 + 0.6 · 2 / 3
        (written("weather", city="Paris"), 0.7),  # one of two: 0.4 + 0.6 / 2
        (written("weather", town="Paris"), 0.4),
        (written("now"), 0.2),  # another one that is offered
        (written("set_reminder", hour=7), 0.1),  # one that is not
        ('<tool_call>\n{"name": "weather", "arguments": {...}}\n</tool_call>', 0.2),
        ("<tool_call>\nweather\n</tool_call>", 0.1),
        (f"{RIGHT}\n{RIGHT}", 0.5),  # one call too many
        (f"{RIGHT}\n<tool_call>\nweather\n</tool_call>", 0.5),
        ("It is sunny in Paris.", 0.0),
        ("", 0.0),
    ],
)
def test_parts_of_a_mark(text: str, score: float) -> None:
    assert scored(text, PARIS) == pytest.approx(score)
    assert scored(text, PARIS, threshold=1.0) == float(score == 1.0)


def test_parallel_calls_come_in_any_order() -> None:
    oslo = written("weather", city="Oslo", days=1)
    assert scored(f"{oslo}\n{RIGHT}", PARIS, OSLO) == 1.0
    assert scored(RIGHT, PARIS, OSLO) == 0.5
    # right names, wrong values
    assert scored(f"{RIGHT}\n{RIGHT}", PARIS, OSLO) == pytest.approx((1.0 + 0.6) / 2)
    assert scored(written("now"), {"now": {}}) == 1.0


def test_where_no_call_is_wanted() -> None:
    assert scored("None of these tools helps.") == 1.0
    assert scored(RIGHT) == scored("<tool_call>weather") == 0.0


@pytest.mark.parametrize(
    ("kind", "accepted", "right", "wrong"),
    [
        ({"type": "number"}, [5.0], [5, 5.0], [True, "5", [5.0], None]),
        ({"type": "float"}, [5], [5, 5.0], ["5"]),
        ({"type": "integer"}, [1], [1], [True, 1.0, "1"]),
        ({"type": "boolean"}, [True], [True], [1, "true", False]),
        (
            {"type": "string"},
            ["April 1, 2024", ""],
            ["april 1 2024", "April_1-2024", ""],
            ["April 2, 2024", 1],
        ),
        ({"type": "any"}, ["it's"], ['it"s'], [["it's"]]),
        # a variable stands for the value
        ({"type": "integer"}, ["count"], ["count"], ["Count", 3]),
        (
            {"type": "array", "items": {"type": "number"}},
            [[1.5, 2.0]],
            [[1.5, 2.0]],
            [[1.5, 2], [2.0, 1.5], 1.5],
        ),
        ({"type": "tuple", "items": {"type": "string"}}, [["a b"]], [["A-B"]], [["a", "b"], "a b"]),
        ({"type": "array", "items": {"type": "string"}}, [["a"], ""], [["a"], []], [[1]]),
        (
            {"type": "dict"},
            [{"a": [1, 2], "b": ["x", ""]}],
            [{"a": 2}, {"a": 1, "b": "X"}],
            [{}, {"a": 3}, {"c": 1}],
        ),
        (
            {"type": "array", "items": {"type": "dict"}},
            [[{"a": [1]}, {"a": [2]}]],
            [[{"a": 1}, {"a": 2}]],
            [[{"a": 2}, {"a": 1}], [{"a": 1}], [1, 2]],
        ),
        ({}, [3], [3], ["3"]),
    ],
    ids=lambda value: str(value.get("type")) if isinstance(value, dict) else "",
)
def test_values(
    kind: dict[str, Any], accepted: list[Any], right: list[Any], wrong: list[Any]
) -> None:
    assert [value for value in right if not accepts(value, accepted, kind)] == []
    assert [value for value in wrong if accepts(value, accepted, kind)] == []


def test_calls_are_read_in_the_models_own_format() -> None:
    class Own:
        tool_markers = ("[CALL]", "[/CALL]")
        template_takes_tools = True
        think_markers = None

        @staticmethod
        def parse_tool_call(text: str, tools: Any) -> Any:
            return {"name": text, "arguments": {}}

    class Policy:
        tokenizer = Own()

    check = tool_call()
    row = {"tools": [[NOW]] * 2, "calls": [[{"now": {}}]] * 2}
    texts = ["[CALL]now[/CALL]", written("now")]
    assert check(completions=texts, **row) == [0.0, 1.0]
    check.attach(Policy())  # type: ignore[arg-type]
    assert check(completions=texts, **row) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": "no JSON", "calls": [PARIS]}, "tools cannot be read"),
        ({"tools": [{"description": "nameless"}], "calls": [PARIS]}, "tools cannot be read"),
        (
            {"tools": [NOW], "calls": [PARIS]},
            "'weather' of the row's 'calls' is not among its tools",
        ),
        ({"tools": [WEATHER], "calls": "weather"}, "not a list of calls"),
        (
            {"tools": [WEATHER], "calls": [{"weather": {"city": "Paris"}}]},
            "lists of accepted values",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutRejectedError, match=message):
        tool_call()(completions=[RIGHT], **{name: [value] for name, value in row.items()})


def test_nested_values_that_are_no_lists_are_named_and_no_crash() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "dict"}}}}
    row = {"tools": [[tool]], "calls": [[{"f": {"a": [{"k": 5}]}}]]}
    with pytest.raises(RolloutRejectedError, match="'calls'"):
        tool_call()(completions=[written("f", a={"k": 5})], **row)


def test_columns_are_checked_before_a_run() -> None:
    def made(columns: list[str], **options: Any) -> RewardFunctions:
        options = {"tool_call": options}
        return RewardFunctions(
            ["builtin:tool_call"], (), columns=columns, key="rewards", options=options
        )

    made(["tools", "truth"], column="truth")
    with pytest.raises(ConfigError, match="calls"):
        made(["tools"])
    with pytest.raises(ConfigError, match="tools"):
        made(["calls"])
    with pytest.raises(ConfigError, match="not completions or tools"):
        made(["tools"], column="tools")


# ------------------------------------------------------------------ the example


async def test_every_shipped_row_can_be_answered_right() -> None:
    config = load_config(ROOT / "train_configs" / "smollm2_tools.toml")
    source = DatasetSource(config.environments[0], seed=0)
    assert (len(source.rows.train), len(source.rows.heldout)) == (200, 60)
    for row, split in [(row, "train") for row in source.rows.train] + [
        (r, "heldout") for r in source.rows.heldout
    ]:
        assert row.tools and row.prompt[-1]["content"].endswith(make_rows.ASK), split
        reward = source.rewards.for_row(row.prompt, row.columns, TrainingProgress)
        [call] = row.columns["calls"]
        [(name, accepted)] = call.items()
        arguments = {key: values[0] for key, values in accepted.items() if values[0] != ""}
        first = {key: plain_value(value) for key, value in arguments.items()}
        rollout = Rollout((1,), (1,), (0.0,), (0,), 1.0, {}, stop_reason="stop")
        texts = [written(name, **first), written(name, **first, more=1)]
        right, wrong = await reward(
            [Trajectory(text, rollout, step_count=1, group_id="g") for text in texts]
        )
        assert right["reward"] == 1.0 > wrong["reward"] >= 0.4, row.columns["id"]


def plain_value(value: Any) -> Any:
    """One of the values that BFCL accepts: those of an object are lists of accepted ones."""
    if isinstance(value, list):
        return [plain_value(one) for one in value]
    if isinstance(value, dict):
        return {key: values[0] for key, values in value.items() if values[0] != ""}
    return value


def test_no_function_is_in_both_files() -> None:
    rows = ROOT / "examples" / "tool_calling"
    train, heldout = (
        [
            json.loads(line)
            for line in (rows / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for name in ("train", "heldout")
    )
    names = [set().union(*map(make_rows.offered, part)) for part in (train, heldout)]
    assert names[0] and names[1] and not names[0] & names[1]


def test_rows_are_split_by_all_functions_that_they_offer() -> None:
    def row(number: int, *names: str) -> dict[str, Any]:
        return {
            "id": number,
            "tools": [{"type": "function", "function": {"name": name}} for name in names],
        }

    rows = [row(n, f"f{n % 7}", f"g{n % 5}") for n in range(40)]
    train, held = make_rows.split(rows, 40, 2, 0)
    assert len(held) == 2 and 0 < len(train) < 38
    assert not set().union(*map(make_rows.offered, held)) & set().union(
        *map(make_rows.offered, train)
    )
    assert make_rows.split(rows, 40, 2, 1)[1] != held


def test_types_get_the_names_of_json_schema() -> None:
    bfcl = {
        "type": "dict",
        "properties": {
            "type": {"type": "any"},
            "to": {"type": "tuple", "items": {"type": "float"}},
        },
    }
    assert make_rows.to_json_schema(bfcl) == {
        "type": "object",
        "properties": {
            "type": {"type": "string"},
            "to": {"type": "array", "items": {"type": "number"}},
        },
    }


RUN = """
[model]
base_path = "builtin:tiny"

[server]
port = 0

[rl_training]
total_steps = 1
run_name = "run"
batch_size = 4

[rl_training.atropos]
rollout_batch_size = 4

[[environments]]
kind = "dataset"
data = "rows.jsonl"
group_size = 4
max_tokens = 4
rewards = ["builtin:tool_call", "builtin:regex"]
reward_options = { regex = { pattern = "^[0-9a-m]" } }
"""


@pytest.mark.slow
def test_a_run_scores_the_calls(tmp_path: Path) -> None:
    # an untrained model makes no call, which is right
    row = {"prompt": "Weather?", "tools": [WEATHER], "calls": []}
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"prompt": f"{n}?"}) + "\n" for n in range(4))
    )
    (tmp_path / "run.toml").write_text(RUN)
    train_here(tmp_path / "run.toml", f'rl_training.checkpoint_dir="{tmp_path}"')
    [step] = metrics(tmp_path / "run")
    assert step["rewards/tool_call/mean"] == 1.0

"""mlx_parallm rollouts: single answers with texts, parts, advantages and reasons; filters,
orders, whole groups."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm import cli
from mlx_parallm.rl_training.rollout_buffer import NO_VARIANCE, TOO_OLD
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import RolloutGroup
from tests.answered import answered

HOSTILE = "\x1b]0;pwned\x07\x1b[2J"


def make_run(path: Path, settings: str = 'advantage = "rloo"') -> Path:
    path.mkdir()
    (path / "config.toml").write_text(
        f'[model]\nbase_path = "builtin:tiny"\n[rl_training]\n{settings}\n'
    )
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Oldest to newest: `sums-0` taken by step 1, `sums-1` dropped by 2, `words-2` dropped by 3,
    `tools-3` waits."""
    run = make_run(tmp_path / "my-run")
    store = RolloutStore(run / "rollouts.sqlite")
    three = tuple(
        answered(
            "Sum: 1+2",
            text,
            scores={"reward": reward, "rewards/right": right, "rewards/short": 0.25},
        )
        for text, reward, right in (("3", 1.0, 1.0), ("Seven", 0.0, 0.0), ("12", 0.0, 0.0))
    )
    equal = tuple(answered("Sum: 4+4", "8", scores={"reward": 0.5}) for _ in range(2))
    old = tuple(answered("Spell", "abc", scores={"reward": reward}) for reward in (-1.0, 0.75))
    tools = tuple(
        answered(
            *("What time?", '<tool_call>{"name": "clock"}</tool_call>', "noon", text),
            scores=scores,
            extra={"parsed": text.upper(), "hour": [12.5]},
        )
        for text, scores in (("12", {"reward": 0.9}), ("late", {"reward": 0.1}))
    )
    groups = (
        ("sums-0", "sums", three),
        ("sums-1", "sums", equal),
        ("words-2", "words", old),
        ("tools-3", "tools", tools),
    )
    for name, environment, rollouts in groups:
        store.add(
            RolloutGroup(name, environment, rollouts, metadata={"answer": "3"}),
            source="environments",
        )
    store.take(["sums-0"], 1)
    store.drop(["sums-1"], 2, NO_VARIANCE)
    store.drop(["words-2"], 3, TOO_OLD)
    store.close()
    return run


def look(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert cli.rollouts([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def rows(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in look(capsys, *arguments, "--json").splitlines()]


def ids(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    return [row["id"] for row in rows(capsys, *arguments)]


def test_a_row_has_text_parts_advantage_and_reason(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {row["id"]: row for row in rows(capsys, run)}
    assert list(found)[:2] == ["tools-3#0", "tools-3#1"] and list(found)[-1] == "sums-0#2", (
        "the newest group first"
    )
    right = found["sums-0#0"]
    # rloo: the reward less the mean of the others: 1 - 0, 0 - (1 + 0) / 2
    assert [found[f"sums-0#{n}"]["advantage"] for n in range(3)] == pytest.approx([1.0, -0.5, -0.5])
    assert right["parts"] == {"rewards/right": 1.0, "rewards/short": 0.25}
    assert (right["reward"], right["step"], right["version"], right["environment"]) == (
        1.0,
        1,
        3,
        "sums",
    )
    assert (right["completion"], right["prompt"].endswith("Sum: 1+2"), right["why"]) == (
        "3",
        True,
        "used by step 1",
    )
    assert found["sums-1#0"]["why"] == f"dropped by step 2: {NO_VARIANCE}"
    assert found["words-2#0"]["advantage"] is None, "it was never computed"
    assert found["tools-3#0"]["why"] == "waits: the run is stopped; --resume takes it to a step"
    assert found["tools-3#0"]["advantage"] == pytest.approx(0.8)
    assert found["tools-3#0"]["completion"] == '<tool_call>{"name": "clock"}</tool_call>⟦noon⟧12'
    text = look(capsys, run, "--environment", "sums")
    for words in (
        "sums-0#1  reward 0 · advantage -0.500",
        "rewards/right 1 · rewards/short 0.25",
        "Seven",
        "Sum: 1+2",
    ):
        assert words in text
    assert "no variance" in text and "used by step 1" in text


def test_worst_and_best_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_reward = ["words-2#0", "sums-0#1", "sums-0#2", "tools-3#1"]
    assert ids(capsys, run, "--worst", "--limit", "4") == by_reward
    assert ids(capsys, run, "--best", "--limit", "3") == ["sums-0#0", "tools-3#0", "words-2#1"]
    assert len(ids(capsys, run, "--worst")) == 9, "JSON has all of them"
    text = look(capsys, run, "--best", "--environment", "sums")
    assert "2 alike in this group" in text and "sums-1#0" in text and "sums-1#1" not in text


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--environment", "words"], ["words-2#0", "words-2#1"]),
        (["--step", "1"], ["sums-0#0", "sums-0#1", "sums-0#2"]),
        (["--step", "2:3", "--environment", "sums"], ["sums-1#0", "sums-1#1"]),
        (["--step", "3:"], ["words-2#0", "words-2#1"]),
        (["--reward", "0.75:0.9"], ["tools-3#0", "words-2#1"]),
        (["--reward=:-0.5"], ["words-2#0"]),
        (["--text", "sEVEN"], ["sums-0#1"]),
        (["--text", "what TIME"], ["tools-3#0", "tools-3#1"]),
        (["--regex", "^[0-9]{2}$"], ["sums-0#2"]),
        (["--regex", "noon.l"], ["tools-3#1"]),
        (["--state", "waiting"], ["tools-3#0", "tools-3#1"]),
        (["--reward", "7"], []),
    ],
)
def test_filters(
    run: Path, capsys: pytest.CaptureFixture[str], filters: list[str], expected: list[str]
) -> None:
    assert ids(capsys, run, *filters) == expected


def test_the_ids_of_the_list_and_their_beginnings_can_be_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in rows(capsys, run):
        [whole] = rows(capsys, run, "--show", row["id"])
        assert whole["rollouts"][0]["id"] == row["id"]
    [short] = rows(capsys, run, "--show", "to#1")
    assert short["rollouts"][0]["id"] == "tools-3#1"


def test_a_group_as_a_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = look(capsys, run, "--show", "tools-3")
    assert text.count("What time?") == 1, "one prompt for both"
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line]
    assert ["model", '<tool_call>{"name": "clock"}</tool_call>'] in lines and [
        "environment",
        "noon",
    ] in lines
    assert ["model", "late"] in lines
    assert ["parsed", "LATE"] in lines and ["hour", "[12.5]"] in lines
    assert "#0  reward 0.9 · advantage +0.800 · version 3" in text and "ended by stop" in text
    assert "expected answer: 3" in text
    [values] = rows(capsys, run, "--show", "tools-3")
    assert [turn["role"] for turn in values["rollouts"][1]["conversation"]] == [
        "prompt",
        "model",
        "environment",
        "model",
    ]


def test_left_out_and_hopeless_ones_say_so(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "mask_truncated = true")
    store = RolloutStore(run / "rollouts.sqlite")
    rollouts = tuple(
        answered("Sum", "5", scores={"reward": reward}, **changes)
        for reward, changes in (
            (1.0, {}),
            (0.0, {"stop_reason": "length"}),
            (0.5, {"zero_advantage": True}),
        )
    )
    store.add(RolloutGroup("mixed", "sums", rollouts), source="environments")
    store.add(RolloutGroup("equal", "sums", rollouts[:1] * 2), source="environments")
    store.close()
    (run / "final").mkdir()
    equal, _, first, cut, marked = rows(capsys, run)
    # std: mean 0.5, population std 0.408248 → 0.5 / 0.408248 = 1.224745; what is left out counts in
    # the mean only
    assert [row["advantage"] for row in (first, cut, marked)] == pytest.approx([1.224745, 0.0, 0.0])
    assert cut["why"].endswith("not trained on: it was cut off (mask_truncated)")
    assert marked["why"].endswith("not trained on: its environment marked it (zero_advantage)")
    assert first["why"] == "left over: the run made its last step without it"
    assert equal["advantage"] is None
    assert equal["why"] == f"{first['why']}, and nothing could be learned from it (no variance)"
    (run / "final").rmdir()
    [equal, *_] = rows(capsys, run)
    assert equal["why"].endswith(
        "--resume takes it to a step, which will drop it: nothing can be"
        " learned from it (no variance)"
    )


def test_advantages_of_a_run_with_a_loss_that_only_its_program_has(
    tmp_path: Path, capsys: Any
) -> None:
    """They do not depend on the loss: "not known: … `mlx_parallm eval` needs …" was about
    something else."""
    run = make_run(tmp_path / "run", 'loss = "python:this_process:mine"\nadvantage = "mean"')
    store = RolloutStore(run / "rollouts.sqlite")
    answers = tuple(answered("Sum", "5", scores={"reward": reward}) for reward in (1.0, 0.0))
    store.add(RolloutGroup("group", "sums", answers), source="environments")
    store.close()
    assert [row["advantage"] for row in rows(capsys, run)] == [0.5, -0.5]
    assert "not known" not in look(capsys, run)


def test_where_equal_groups_are_kept_none_is_said_to_be_dropped(
    tmp_path: Path, capsys: Any
) -> None:
    run = make_run(tmp_path / "run", "dynamic_sampling = false")
    store = RolloutStore(run / "rollouts.sqlite")
    store.add(RolloutGroup("equal", "sums", (answered("Sum", "5"),) * 2), source="environments")
    store.close()
    assert {row["why"] for row in rows(capsys, run)} == {
        "waits: the run is stopped; --resume takes it to a step"
    }


def test_own_advantages_of_each_token_are_a_range(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "")
    rollout = answered("Sum", "123")
    sampled = sum(rollout.mask)
    own = (9.0,) * (len(rollout.tokens) - sampled) + tuple(-1.0 + 0.5 * n for n in range(sampled))
    store = RolloutStore(run / "rollouts.sqlite")
    store.add(RolloutGroup("own", "sums", (rollout,), advantages=(own,)), source="environments")
    store.close()
    [row] = rows(capsys, run)
    assert row["advantage"] == [-1.0, own[-1]], "the prompt's are not trained on"
    assert f"advantage -1.000 to {own[-1]:+.3f}" in look(capsys, run)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ('advantage = "python:gone.py:f"', "advantages are not known: "),
        ("advantage_whiten = true", "the trainer changes them over the batch of a step"),
        ('algorithm = "ppo"', "the trainer changes them over the batch of a step"),
    ],
)
def test_advantages_that_are_not_the_trained_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str, note: str
) -> None:
    run = make_run(tmp_path / "run", settings)
    store = RolloutStore(run / "rollouts.sqlite")
    store.add(RolloutGroup("g", "sums", (answered("Sum", "1"),) * 2), source="environments")
    store.close()
    assert note in look(capsys, run)
    assert cli.rollouts([str(run), "--json"]) == 0
    assert note in capsys.readouterr().err


def test_what_is_missing_is_told_in_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(run / "rollouts.sqlite") as database:
        database.execute("DELETE FROM payloads WHERE sequence = 3")
        database.execute("UPDATE payloads SET payload = x'00' WHERE sequence = 2")
    text = look(capsys, run)
    assert "not shown: 1 groups, because the tokens were pruned" in text
    assert "not shown: 1 groups, because" in text and "a stored group is damaged" in text
    assert "sums-0#0" in text
    assert "no rollout is shown: the tokens were pruned" in look(capsys, run, "--show", "words")
    (run / "config.toml").unlink()
    text = look(capsys, run)
    assert "sums-0#0  reward 1 · advantage –" in text
    assert "advantages are not known: " in text and "no text is shown: the tokenizer" in text
    assert cli.rollouts([str(run), "--text", "x"]) == 2
    assert "answers cannot be searched: the tokenizer" in capsys.readouterr().err
    assert cli.rollouts([str(run), "--environment", "nobody"]) == 2
    assert "no environment 'nobody'; there are sums, tools, words" in capsys.readouterr().err


def test_a_run_on_rows_has_no_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 'algorithm = "sft"\n[data]\npath = "rows.jsonl"')
    assert cli.rollouts([str(run)]) == 2
    assert "sft learns from rows of a file: there are no rollouts" in capsys.readouterr().err


def test_control_characters_of_others_reach_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did: a group's id could set the title of the window and clear it."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    run = make_run(tmp_path / "run", "")
    rollouts = tuple(
        answered(f"Sum {HOSTILE}", f"{HOSTILE}{n}", scores={"reward": float(n)}, error=HOSTILE)
        for n in range(2)
    )
    store = RolloutStore(run / "rollouts.sqlite")
    store.add(
        RolloutGroup(HOSTILE, HOSTILE, rollouts, metadata={"answer": HOSTILE}), source=HOSTILE
    )
    store.reject({}, source=HOSTILE, reason=HOSTILE)
    store.close()
    for arguments in (
        [],
        ["--show", HOSTILE],
        ["--show", f"{HOSTILE}#0"],
        ["--counts"],
        ["--rejects"],
        ["--json"],
    ):
        text = look(capsys, run, *arguments)
        assert "]0;pw" in text, arguments
        assert "\x1b]" not in text and "\x1b[2J" not in text and "\x07" not in text, arguments
    assert cli.rollouts([str(run), "--show", f"{HOSTILE}#7"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "x"], "'x' is not a range: A:B, A:, :B or one number"),
        (["--reward", ":"], "':' is not a range"),
        (["--reward", "nan"], "'nan' is not a range"),
        (["--regex", "("], "'(' is not a regular expression: "),
        (["--limit", "0"], "--limit: at least 1"),
        (["--show", "sums-0", "--environment", "sums"], "--environment chooses among answers"),
        (["--text", "a", "--regex", "b"], "not allowed with"),
        (["--worst", "--best"], "not allowed with"),
    ],
)
def test_wrong_arguments(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.rollouts([str(run), *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err

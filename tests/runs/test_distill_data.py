"""mlx_parallm distill-data: rows from a teacher here and over HTTP, filtered, counted, resumed."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm import cli
from mlx_parallm.config.data import DataConfig
from mlx_parallm.environments.dataset_rows import DataRow
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_calls import parse_tool_calls
from mlx_parallm.inference.types import CalledAnswer
from mlx_parallm.rl_training.data.examples import read_examples
from mlx_parallm.runs.distill_data import (
    Answer,
    AnsweredPrompt,
    DistillSettings,
    Journal,
    make_rows,
)
from tests.runs.commands import call
from tests.scripted_http import Reply, scripted_http
from tests.server.serving import RunningServer

PROMPT = DataRow("Sum: 1+2", {"prompt": "Sum: 1+2", "answer": "3", "source": "book"}, "k")
SCORE = """
def right(completions, answer, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(text.strip() == want) for text, want in zip(texts, answer)]
"""


def write_inputs(directory: Path, count: int = 6) -> None:
    rows = [{"prompt": f"Sum: {a}+{a + 1}", "answer": str(2 * a + 1)} for a in range(1, count + 1)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "score.py").write_text(SCORE)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(directory: Path, teacher: str, *more: str) -> tuple[str, ...]:
    return (
        "distill-data",
        *("--teacher", teacher, "--data", str(directory / "rows.jsonl")),
        *("--output", str(directory / "out.jsonl"), "--max-tokens", "8"),
        *more,
    )


# ---------------------------------------------------------------------- which answers are kept


def record(*answers: tuple[str, float | None]) -> dict[int, AnsweredPrompt]:
    return {0: AnsweredPrompt(0, tuple(Answer(text, "stop", score) for text, score in answers))}


def test_rows_for_sft_are_the_best_answers_above_the_threshold() -> None:
    settings = DistillSettings("rows", "T", 9, rewards=("r",), threshold=0.5, best=2)
    records = record(("3", 0.9), ("4", 0.1), ("three", 0.6), ("3", 0.9), ("III", 0.5), ("?", None))
    outcome = make_rows(settings, [PROMPT], records)
    assert [row["messages"][-1]["content"] for row in outcome.rows] == ["3", "three"]
    assert outcome.rows[0] == {
        "messages": [
            {"role": "user", "content": "Sum: 1+2"},
            {"role": "assistant", "content": "3"},
        ],
        "answer": "3",
        "source": "book",
        "teacher": "T",
        "reward": 0.9,
    }
    assert outcome.filtered == {
        "reward below 0.5": 1,
        "the same answer again": 1,
        "the reward gave no score": 1,
        "not among the best 2": 1,
    }
    assert outcome.kept + outcome.filtered.total() == outcome.answers == 6


def test_rows_for_dpo_are_the_best_and_the_worst() -> None:
    settings = DistillSettings("rows", "T", 9, form="dpo", rewards=("r",), prompt_format="text")
    outcome = make_rows(settings, [PROMPT], record(("b", 0.4), ("3", 1.0), ("a", -2.0)))
    [row] = outcome.rows
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("Sum: 1+2", "3", "a")
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, -2.0)
    assert outcome.filtered == {"neither the best nor the worst": 1}
    assert outcome.kept + outcome.filtered.total() == outcome.answers == 3


@pytest.mark.parametrize(
    ("answers", "threshold", "why"),
    [
        ([("a", 1.0), ("b", 1.0)], None, "no pair: all rewards are equal"),
        ([("a", 1.0)], None, "no pair: fewer than two different answers"),
        ([("a", 0.4), ("b", 0.1)], 0.5, "no pair: the best reward is below 0.5"),
    ],
)
def test_a_prompt_without_a_pair_is_counted(
    answers: list[tuple[str, float]], threshold: float | None, why: str
) -> None:
    settings = DistillSettings("rows", "T", 9, form="dpo", rewards=("r",), threshold=threshold)
    outcome = make_rows(settings, [PROMPT], record(*answers))
    assert (outcome.rows, outcome.filtered) == ([], {why: len(answers)})


def test_answers_that_are_cut_off_or_empty_teach_nothing() -> None:
    records = {
        0: AnsweredPrompt(0, (Answer("3", "length"), Answer("  ", "stop"), Answer("3", "stop")))
    }
    outcome = make_rows(DistillSettings("rows", "T", 9), [PROMPT], records)
    assert (len(outcome.rows), outcome.kept) == (1, 1)
    assert outcome.filtered == {"cut off at --max-tokens = 9": 1, "empty": 1}


# ---------------------------------------------------------------------- teachers


def test_a_teacher_on_this_machine(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    score = f"{tmp_path / 'score.py'}:right"
    flags = ("--n", "8", "--reward", score, "--threshold", "1", "--best", "1")
    result = call(cli.main, *command(tmp_path, "builtin:tiny", *flags))
    assert result.returncode == 0, result.stderr
    rows = lines_of(tmp_path / "out.jsonl")
    assert rows
    assert all(row["messages"][-1]["content"].strip() == row["answer"] for row in rows)
    assert {row["teacher"] for row in rows} == {"builtin:tiny"}
    assert "48" in result.stdout  # answers
    assert not (tmp_path / "out.jsonl.journal").exists()
    config = DataConfig(path=str(tmp_path / "out.jsonl"), eval_fraction=0)
    assert len(read_examples(config, "sft")[0]) == len(rows)
    again = call(cli.main, *command(tmp_path, "builtin:tiny", *flags))
    assert again.returncode == 2
    assert "exists already: remove it, or choose another name" in again.stderr


def test_pairs_of_a_teacher_are_rows_for_dpo(tmp_path: Path, server: RunningServer) -> None:
    """Over HTTP, from this project's own server."""
    write_inputs(tmp_path)
    score = f"{tmp_path / 'score.py'}:right"
    flags = ("--n", "8", "--form", "dpo", "--reward", score, "--temperature", "1")
    result = call(cli.main, *command(tmp_path, f"{server.url}/v1", *flags))
    assert result.returncode == 0, result.stderr
    rows = lines_of(tmp_path / "out.jsonl")
    assert all((row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.0) for row in rows)
    config = DataConfig(path=str(tmp_path / "out.jsonl"), eval_fraction=0)
    assert len(read_examples(config, "reward_model")[0]) == len(rows) > 0


def scripted(path: str, body: Any) -> Reply:
    """An endpoint that answers everything."""
    if path.endswith("/models"):
        return 200, {}, {"data": [{"id": "big"}]}
    prompt = body["messages"][-1]["content"]
    choices = [
        {"index": n, "finish_reason": "stop", "message": {"content": f"{prompt} is {n}"}}
        for n in range(body["n"])
    ]
    return 200, {}, {"choices": choices, "usage": {"completion_tokens": 3}}


def refusing(path: str, body: Any) -> Reply:
    """The same, but for one prompt."""
    if body is not None and body["messages"][-1]["content"] == "Sum: 3+4":
        return 400, {}, {"error": {"message": "I do not like threes"}}
    return scripted(path, body)


def test_a_prompt_that_fails_is_counted_and_asked_again(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    with scripted_http(refusing) as (url, received):
        flags = ("--n", "2", "--system", "Be brief.")
        result = call(cli.main, *command(tmp_path, url, *flags))
        assert result.returncode == 0, result.stderr
        assert "I do not like threes" in " ".join(result.stdout.split())
        rows = lines_of(tmp_path / "out.jsonl")
        assert len(rows) == 10
        assert rows[0]["messages"][0] == {"role": "system", "content": "Be brief."}
        assert {row["teacher"] for row in rows} == {url}
        first = Counter(entry.path for entry in received)
        assert (tmp_path / "out.jsonl.journal").exists()
        received.clear()
        assert call(cli.main, *command(tmp_path, url, *flags)).returncode == 0
        again = [entry.body["messages"][-1]["content"] for entry in received if entry.body]
        assert set(again) == {"Sum: 3+4"}
        assert first["/v1/chat/completions"] >= 6
        other = call(cli.main, *command(tmp_path, url, "--n", "3", "--system", "Be brief."))
        assert other.returncode == 2
        assert "is of other settings: n was 2 and is 3" in other.stderr


def test_an_answer_that_needs_tokens_is_refused_over_http(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    option = ("--reward-option", "length.target=3", "--reward", "builtin:length")
    with scripted_http(scripted) as (url, _):
        result = call(cli.main, *command(tmp_path, url, *option))
    assert result.returncode == 2
    assert "reads completion_ids, and the teacher is an endpoint" in result.stderr


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--threshold", "1"), "--threshold filters by a reward: set --reward"),
        (("--form", "dpo"), "--form dpo makes pairs by a reward: set --reward"),
        (("--n", "0"), "at least 1 each"),
        (("--reward-option", "length=3"), "expected NAME.KEY=VALUE"),
        (("--reward", "builtin:nothing"), "there is no built-in reward of this name"),
        (("--prompt-format", "text", "--system", "x"), "--system is a message"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, flags: tuple[str, ...], problem: str) -> None:
    write_inputs(tmp_path)
    result = call(cli.main, *command(tmp_path, "builtin:tiny", *flags))
    assert result.returncode == 2
    assert problem in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def calling(path: str, body: Any) -> Reply:
    """Of four answers a call, the same one, one without an object of arguments, and a text."""
    if path.endswith("/models"):
        return scripted(path, body)
    assert body["tools"] == [TOOL]

    def called(arguments: str) -> dict[str, Any]:
        call = {"id": "1", "type": "function"}
        function = {"name": "add", "arguments": arguments}
        return {"content": None, "tool_calls": [call | {"function": function}]}

    messages = [called('{"a": 1, "b": 2}'), called('{"b": 2, "a": 1}'), called("[1, 2]")]
    messages.append({"content": "It is 3."})
    choices = [
        {"index": n, "finish_reason": "tool_calls" if n < 3 else "stop", "message": message}
        for n, message in enumerate(messages)
    ]
    return 200, {}, {"choices": choices, "usage": {"completion_tokens": 3}}


def with_tools(directory: Path, count: int = 1) -> None:
    row = {"prompt": "Sum: 1+2", "answer": "3", "tools": [TOOL]}
    (directory / "rows.jsonl").write_text((json.dumps(row) + "\n") * count)


def test_rows_with_tools_are_asked_with_them_and_written_with_them(tmp_path: Path) -> None:
    with_tools(tmp_path)
    with scripted_http(calling) as (url, _):
        result = call(cli.main, *command(tmp_path, url, "--n", "4"))
    assert result.returncode == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert "a tool call that cannot be read" in shown and "the same answer again" in shown
    first, second = lines_of(tmp_path / "out.jsonl")
    assert first["tools"] == second["tools"] == [TOOL]
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert first["messages"][-1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    assert second["messages"][-1] == {"role": "assistant", "content": "It is 3."}
    config = DataConfig(path=str(tmp_path / "out.jsonl"), eval_fraction=0)
    examples = read_examples(config, "sft")[0]
    assert [example.tools for example in examples] == [(TOOL,), (TOOL,)]


def test_calls_in_a_teachers_text_are_taken_out_of_it() -> None:
    text = 'I add. ```json\n{"tool": "add", "arguments": {"a": 1}}\n``` Done.'
    calls = parse_tool_calls(text, [TOOL])
    assert [call.name for call in calls] == ["add"]
    assert CalledAnswer(text, calls, "stop").words == "I add.  Done."


def test_a_teacher_here_sees_the_tools(tmp_path: Path) -> None:
    """Whatever it answers, its rows have them, and a cut-off answer is counted as one."""
    with_tools(tmp_path, count=2)
    result = call(cli.main, *command(tmp_path, "builtin:tiny", "--n", "4", "--temperature", "1"))
    if result.returncode == 0:
        assert all(row["tools"] == [TOOL] for row in lines_of(tmp_path / "out.jsonl"))
    else:
        assert "cut off at --max-tokens = 8" in result.stderr


def test_tools_have_no_place_in_a_text(tmp_path: Path) -> None:
    with_tools(tmp_path)
    result = call(cli.main, *command(tmp_path, "builtin:tiny", "--prompt-format", "text"))
    assert result.returncode == 2
    assert "row 1 has tools, which a text has no place for" in result.stderr


# ---------------------------------------------------------------------- the journal


def test_a_line_that_was_begun_is_cut_off(tmp_path: Path) -> None:
    path, settings = tmp_path / "j", DistillSettings("rows", "T", 9)
    first = Journal(path, settings, 3)
    first.open()
    with first:
        first.add(AnsweredPrompt(1, (Answer("ü", "stop", 0.5),)))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"row": 2, "ans')
    second = Journal(path, settings, 3)
    assert second.open() == {1: AnsweredPrompt(1, (Answer("ü", "stop", 0.5),))}
    with second:
        second.add(AnsweredPrompt(2, error="why"))
    assert path.read_bytes().startswith(whole)
    assert len(lines_of(path)) == 3


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(ConfigError, match="journal"):
        Journal(path, DistillSettings("rows", "T", 9), 3).open()
    assert path.read_text() == '{"mine": 1}\n'


@pytest.mark.slow
def test_a_killed_call_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 while the teacher thinks about the fourth prompt; what it had answered is not asked
    again."""
    write_inputs(tmp_path)
    process: subprocess.Popen[bytes] | None = None
    killed = False

    def answer(path: str, body: Any) -> Reply | None:
        nonlocal killed
        if killed or body is None or body["messages"][-1]["content"] != "Sum: 4+5":
            return scripted(path, body)
        killed = True
        assert process is not None
        process.kill()
        process.wait()
        return None

    with scripted_http(answer) as (url, received):
        words = command(tmp_path, url, "--n", "2", "--concurrency", "1")
        process = subprocess.Popen([sys.executable, "-m", "mlx_parallm", *words])
        assert process.wait(60) == -signal.SIGKILL
        assert not (tmp_path / "out.jsonl").exists()
        received.clear()
        subprocess.run([sys.executable, "-m", "mlx_parallm", *words], check=True, timeout=60)
        asked = [entry.body["messages"][-1]["content"] for entry in received if entry.body]
    assert asked == ["Sum: 4+5", "Sum: 5+6", "Sum: 6+7"]
    assert len(lines_of(tmp_path / "out.jsonl")) == 12

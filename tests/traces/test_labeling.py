"""Labels by a function and by hand: added, never replaced, on the disk before the next question."""

import io
import json
from pathlib import Path

import pytest

from mlx_parallm.cli.table import main
from mlx_parallm.systems.traces.reading import read_traces
from mlx_parallm.systems.traces.session import prompt_hash
from mlx_parallm.systems.traces.trace import Trace, new_trace
from tests.traces.messages import assistant, user

RULES = """
def right(trace):
    if trace.user_query == "unknown":
        return None
    return trace.final_response == "4"

def wrong(trace):
    return "yes"

def fails(trace):
    return trace.nothing
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(RULES)
    path = tmp_path / "traces.jsonl"
    lines = []
    for number, (question, answer) in enumerate((("2+2", "4"), ("2+3", "4!"), ("unknown", "?"))):
        messages = [user(question), assistant(answer)]
        lines.append(
            json.dumps(new_trace(messages, session_id=f"s{number}", source="test").to_json())
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def labels(path: Path) -> list[list[tuple[str, float | None, str]]]:
    traces: list[Trace] = list(read_traces(path))
    return [[(label.name, label.value, label.by) for label in trace.labels] for trace in traces]


def test_a_rule_labels_and_a_second_run_adds(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["traces", "label", str(file), "--rule", "python:rules.py:right"]
    assert main(command) == 0
    assert "2 labelled, 1 left alone" in capsys.readouterr().out
    assert labels(file) == [[("rule", 1.0, "rule:right")], [("rule", 0.0, "rule:right")], []]
    assert main([*command, "--name", "exact"]) == 0
    assert [name for name, _, _ in labels(file)[0]] == ["rule", "exact"]
    first = next(iter(read_traces(file)))
    assert first.labels[0].prompt_hash == prompt_hash([user("2+2")])


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("python:rules.py:wrong", "returned 'yes' for trace s0"),
        ("python:rules.py:fails", "AttributeError"),
        ("python:rules.py:none", "none"),
        ("right", 'expected "python:file.py:name"'),
    ],
)
def test_a_rule_that_cannot_be_used_leaves_the_file(
    file: Path, rule: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_bytes()
    assert main(["traces", "label", str(file), "--rule", rule]) == 2
    assert reason in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_person_labels_and_comes_back(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("g\nwhat\ns\nq\n"))
    assert main(["traces", "label", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "2+2" in shown and "unknown" in shown and "1 labelled" in shown
    assert labels(file) == [[("manual", 1.0, "user")], [], []]
    monkeypatch.setattr("sys.stdin", io.StringIO("b off by one\n"))  # the terminal closes then
    assert main(["traces", "label", str(file)]) == 0
    assert "2+2" not in capsys.readouterr().out  # the first one is judged
    second = list(read_traces(file))[1]
    assert (second.labels[0].value, second.labels[0].explanation) == (0.0, "off by one")
    assert main(["traces", "label", str(file.parent / "rules.py")]) == 2

"""metrics.jsonl: complete lines, cut on resume, never half a line."""

import json
import math
import resource
import signal
from pathlib import Path

import pytest

from mlx_parallm.errors import CheckpointError
from mlx_parallm.run_files.metrics import KEYS, MetricsFile, complete


def test_a_line_has_every_key_and_only_json() -> None:
    line = complete({"step": 1, "loss": math.nan, "kl": math.inf, "reward_mean": 0.5, "extra": 3})
    assert list(line) == [*KEYS, "extra"]
    assert (line["loss"], line["kl"], line["reward_mean"], line["entropy"]) == (
        None,
        None,
        0.5,
        None,
    )
    json.dumps(line, allow_nan=False)


def test_lines_after_the_step_are_cut(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.append({"step": step})
    with file.path.open("a") as raw:
        raw.write('{"step": 4, "lo')  # a kill -9 in the middle of a write
    assert [line["step"] for line in file.read()] == [1, 2, 3]
    file.cut(2)
    assert file.path.read_text() == '{"step": 1}\n{"step": 2}\n'
    file.append({"step": 3})
    assert [line["step"] for line in file.read()] == [1, 2, 3]


def test_damage_before_the_last_line_is_told(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match="line 2"):
        list(file.read())


@pytest.mark.parametrize(
    "line", [b'{"x": "\xff"}', b"[1]", b'{"loss": 1}', b'{"step": "1"}', b'{"step": true}']
)
def test_a_line_that_is_no_step_is_told(line: bytes, tmp_path: Path) -> None:
    """A byte that is not UTF-8 was a traceback."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    for read in (lambda: list(file.read()), lambda: file.last(3)):
        with pytest.raises(CheckpointError, match=r"metrics.jsonl.*: not "):
            read()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
        with pytest.raises(CheckpointError, match="cannot be written"):
            file.append({"step": 2, "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.path.read_text() == '{"step": 1}\n'


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    """A directory of that name was a traceback."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.mkdir()
    for use in (
        lambda: list(file.read()),
        lambda: file.last(3),
        lambda: file.after(0),
        lambda: file.cut(3),
        lambda: file.append({"step": 1}),
    ):
        with pytest.raises(
            CheckpointError, match=r"metrics.jsonl cannot be (read|written): Is a d"
        ):
            use()


@pytest.mark.parametrize("steps", [(1, 2, 2), (1, 3, 2), (-1, 4, -1)])
def test_a_step_that_comes_twice_is_told_before_anything_is_cut(
    steps: tuple[int, ...], tmp_path: Path
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (*steps, 9):
        file.append({"step": step})
    before = file.path.read_bytes()
    with pytest.raises(CheckpointError, match="stands behind one of step"):
        file.cut(5, one_a_step=True)
    assert file.path.read_bytes() == before
    assert file.cut(5) == 3, "marks of people may share a step"

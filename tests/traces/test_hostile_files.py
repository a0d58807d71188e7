"""Folders and lines of logs from somebody else: pipes, devices and endless lines hold nobody up."""

import os
from pathlib import Path

import pytest

from mlx_parallm.errors import TraceError
from mlx_parallm.system.files import regular_files
from mlx_parallm.systems.traces import schema
from mlx_parallm.systems.traces.checkpoints import read_checkpoint
from mlx_parallm.systems.traces.importers import report


def test_pipes_devices_and_circles_in_a_folder_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "circle.json").symlink_to("circle.json")
    (tmp_path / "folder.json").mkdir()
    assert regular_files(tmp_path, "*.json", "*") == [tmp_path / "good.json"]
    with pytest.raises(TraceError, match="not a regular file"):
        report.whole_json(tmp_path / "pipe.json")
    with pytest.raises(TraceError, match="not a regular file"):
        read_checkpoint(tmp_path / "device.json")


def test_a_line_beyond_the_bound_is_counted_and_the_next_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "LONGEST_LINE", 100)
    monkeypatch.setattr(schema, "MOST_CONTAINERS", 20)
    monkeypatch.setattr(report, "LONGEST_LINE", 100)
    file = tmp_path / "log.jsonl"
    lines = [b'{"a": 1}', b'"%s"' % (b"x" * 5000), b"[%s]" % b",".join([b"[]"] * 30), b"[2]"]
    file.write_bytes(b"\n".join(lines))
    read = list(schema.read_jsonl(file))
    assert [number for number, _ in read] == [1, 2, 3, 4]
    assert read[0][1] == {"a": 1} and read[3][1] == [2]
    assert "longer than 100 bytes" in str(read[1][1]) and "more than 20 lists" in str(read[2][1])
    assert report.whole_json(file) is None
    file.write_bytes(b"y" * 5000)  # without an end
    [(number, fault)] = schema.read_jsonl(file)
    assert number == 1 and isinstance(fault, ValueError)

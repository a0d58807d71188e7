"""`traces build --push` with a hub of our own: what is uploaded, and what is refused before anything is sent."""

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from mlx_parallm.cli.table import main
from mlx_parallm.traces.reading import write_lines
from mlx_parallm.traces.schema import new_trace
from tests.scripted_http import Reply, scripted_http

DATASET = "https://huggingface.co/datasets/me/runs"
KEY = "ghp_" + "a1B2c3D4e5F6" * 3


class Hub:
    """The calls of an upload, as huggingface.co answers them."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.commit, self.private = status, "", False

    def answer(self, path: str, body: Any) -> Reply:
        if self.status != 200:
            return self.status, {}, {"error": "no"}
        if path.endswith("/repos/create"):
            self.private = body.get("private") is True or body.get("visibility") == "private"
            return 200, {}, {"url": DATASET, "name": "me/runs"}
        if "/preupload/" in path:
            files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in body["files"]]
            return 200, {}, {"files": files}
        if "/commit/" in path:
            self.commit = body
            return 200, {}, {"success": True, "commitUrl": f"{DATASET}/commit/1", "commitOid": "1" * 40}
        return 200, {}, {"id": "me/runs", "sha": "1" * 40, "siblings": []}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "traces.jsonl"
    messages = [{"role": "user", "content": f"The key is {KEY}"}, {"role": "assistant", "content": "I see"}]
    write_lines([new_trace(messages, session_id="1", source="test")], file)
    return file


def push(traces: Path, url: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    api = partial(huggingface_hub.HfApi, endpoint=url.removesuffix("/v1"), token="hf_x")
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    flags = ["--kind", "sft", "--to", str(traces.parent / "data"), "--test-fraction", "0", "--push", "me/runs"]
    return main(["traces", "build", str(traces), *flags, *more])


def test_a_secret_that_still_stands_stops_the_push(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_http(Hub().answer) as (url, received):
        assert push(traces, url, monkeypatch, "--no-redact") == 2
    assert "not pushed: secrets still stand in" in (text := capsys.readouterr().err) and KEY not in text
    assert received == []


def test_a_clean_data_set_is_pushed_as_a_private_one(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub()
    with scripted_http(hub.answer) as (url, _):
        assert push(traces, url, monkeypatch) == 0, capsys.readouterr().err
    assert hub.private and "pushed: " in capsys.readouterr().out
    lines = [json.loads(line) for line in hub.commit.splitlines()]
    files = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
    }
    assert files.keys() == {"train.jsonl", "dataset.json"}
    assert files["train.jsonl"] == (traces.parent / "data" / "train.jsonl").read_bytes()
    assert KEY.encode() not in files["train.jsonl"] and b"<GITHUB_1>" in files["train.jsonl"]


def test_a_hub_that_refuses_is_one_line(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_http(Hub(403).answer) as (url, _):
        assert push(traces, url, monkeypatch) == 2
    assert "error: the hub does not take me/runs: " in capsys.readouterr().err

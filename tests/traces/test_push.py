"""`traces build --push` with a hub of our own: what is uploaded, and what is refused before
anything is sent."""

from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from mlx_parallm.cli.table import main
from mlx_parallm.systems.traces.reading import write_lines
from mlx_parallm.systems.traces.trace import new_trace
from tests.scripted_http import scripted_http
from tests.scripted_hub import Hub
from tests.traces.messages import assistant, user

DATASET = "https://huggingface.co/datasets/me/runs"
KEY = "ghp_" + "a1B2c3D4e5F6" * 3


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "traces.jsonl"
    messages = [user(f"The key is {KEY}"), assistant("I see")]
    write_lines([new_trace(messages, session_id="1", source="test")], file)
    return file


def push(traces: Path, url: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    api = partial(huggingface_hub.HfApi, endpoint=url.removesuffix("/v1"), token="hf_x")
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    flags = [
        "--kind",
        "sft",
        "--to",
        str(traces.parent / "data"),
        "--test-fraction",
        "0",
        "--push",
        "me/runs",
    ]
    return main(["traces", "build", str(traces), *flags, *more])


def test_a_secret_that_still_stands_stops_the_push(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_http(Hub(DATASET).answer) as (url, received):
        assert push(traces, url, monkeypatch, "--no-redact") == 2
    assert (
        "not pushed: secrets still stand in" in (text := capsys.readouterr().err)
        and KEY not in text
    )
    assert received == []


def test_a_clean_data_set_is_pushed_as_a_private_one(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(DATASET)
    with scripted_http(hub.answer) as (url, _):
        assert push(traces, url, monkeypatch) == 0, capsys.readouterr().err
    assert hub.private and "pushed: " in capsys.readouterr().out
    assert hub.files.keys() == {"train.jsonl", "dataset.json"}
    assert hub.files["train.jsonl"] == (traces.parent / "data" / "train.jsonl").read_bytes()
    assert (
        KEY.encode() not in hub.files["train.jsonl"] and b"<GITHUB_1>" in hub.files["train.jsonl"]
    )


def test_a_hub_that_refuses_is_one_line(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_http(Hub(DATASET, 403).answer) as (url, _):
        assert push(traces, url, monkeypatch) == 2
    assert "error: the hub does not take me/runs: " in capsys.readouterr().err

"""Run log, samples and trackers of a whole run, and of its resume in another place; no secret in
any of their files."""

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Daemon, free_port, metrics, write_config

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data"
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_ThisIsNoRealTokenOfAnybody",
    "MLX_PARALLM_API_KEY": "the-key-of-the-server",
}
URL_KEY = "the-key-in-a-url"
ENVIRONMENT = SECRETS | {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}


def scalars(directory: Path) -> Iterator[tuple[int, str, float]]:
    """(step, name, value) of every scalar in TensorBoard's event files."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(directory.glob("events.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    yield event.step, value.tag, value.simple_value


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after a header of 7 bytes, which is what a .wandb file is."""
    block, header, at, record = 32768, 7, 7, b""
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


def wandb_history(run: Path) -> tuple[set[str], list[dict[str, Any]], dict[str, Any]]:
    """(ids of the runs, lines of their history, configuration) from W&B's offline files."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, lines, config = set(), [], {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        ids.add(file.stem.removeprefix("run-"))
        for data in log_records(file.read_bytes()):
            record = Record.FromString(data)
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if items:
                lines.append({key: json.loads(value) for key, value in items.items()})
            config |= {
                update.key: json.loads(update.value_json) for update in record.run.config.update
            }
    return ids, lines, config


def expected(line: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in line.items():
        inner = (
            {f"{key}/{name}": one for name, one in expected(value).items()}
            if isinstance(value, dict)
            else None
        )
        flat |= inner if inner is not None else {} if value is None else {key: value}
    return flat


def assert_no_secret(directory: Path, output: str) -> None:
    secrets = [*SECRETS.values(), URL_KEY]
    assert not [secret for secret in secrets if secret in output]
    for file in directory.rglob("*"):
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in content], file


@pytest.mark.long
def test_a_run_and_its_resume_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    pytest.importorskip("tensorboardX", reason="the extra `tensorboard` is not installed")
    config = write_config(tmp_path, steps=3, atropos=f'wandb_group = "http://env:{URL_KEY}@host"')
    logging = '[logging]\nlevel = "debug"\nsample_every = 2\ntrackers = ["wandb", "tensorboard"]\n'
    config.write_text(config.read_text() + logging)
    key = ["--set", f"server.api_key={SECRETS['MLX_PARALLM_API_KEY']}"]
    with Daemon(
        "mlx_parallm_train", "--config", str(config), *key, port=0, env=ENVIRONMENT
    ) as daemon:
        assert daemon.wait() == 0, daemon.output
    first = daemon.output

    moved, port = tmp_path / "elsewhere" / "renamed", free_port()
    moved.parent.mkdir()
    shutil.move(tmp_path / "checkpoints" / "run", moved)
    shutil.rmtree(tmp_path / "checkpoints")
    again = [
        "--set",
        f"rl_training.atropos.wandb_group=http://env:{URL_KEY}@host",
        "--set",
        f"server.port={port}",
    ]
    settings = [*key, *again, "--set", "rl_training.total_steps=5"]
    with Daemon(
        "mlx_parallm_train", "--resume", str(moved), *settings, port=port, env=ENVIRONMENT
    ) as daemon:
        assert daemon.wait() == 0, daemon.output
    assert not (tmp_path / "checkpoints").exists(), "nothing goes where the run was before"

    lines = metrics(moved)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    ids, history, saved = wandb_history(moved)
    assert ids == {json.loads((moved / "trackers.json").read_text())["wandb"]}
    sent = [{key: value for key, value in line.items() if key[0] != "_"} for line in history]
    tables = [line for line in sent if "samples/path" in line]
    assert [line for line in sent if line not in tables] == [expected(line) for line in lines]
    assert [line["step"] for line in tables] == [2, 4]
    assert saved["rl_training"]["total_steps"] == 5
    for line in lines:
        numbers = {
            key: float(value)
            for key, value in expected(line).items()
            if isinstance(value, int | float)
        }
        found = {
            name: value
            for step, name, value in scalars(moved / "tensorboard")
            if step == line["step"]
        }
        assert found == pytest.approx(numbers, rel=1e-6)

    samples = [json.loads(line) for line in (moved / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["which"]) for sample in samples[::3]] == [
        (2, "first"),
        (4, "first"),
    ]
    logged = [json.loads(line) for line in (moved / "run.log").read_text().splitlines()]
    assert [line["step"] for line in logged if line["event"] == "step"] == [1, 2, 3, 4, 5]
    assert {line["part"] for line in logged if "part" in line} >= {"display", "trackers"}
    assert_no_secret(tmp_path / "elsewhere", first + daemon.output)


def test_a_key_that_may_not_change_is_one_line_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(DATA / "two_steps", run, symlinks=True)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with Daemon(
        "mlx_parallm_train", "--resume", str(run), "--set", "rl_training.lora.rank=4", port=0
    ) as daemon:
        assert daemon.wait() == 2, daemon.output
    assert "may not change: rl_training.lora.rank (2 → 4)" in daemon.output
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before

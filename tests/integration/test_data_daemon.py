"""The daemon on rows of a file: it learns, serves what it learned, and continues where it was
stopped."""

import json
import math
from pathlib import Path

import pytest

from scripts.bench import study
from tests.integration.in_process import train_here
from tests.integration.processes import Daemon, free_port, metrics, wait_for_step

pytestmark = pytest.mark.slow


def write_run(directory: Path) -> Path:
    """Write rows and a configuration of 12 steps of DPO (a study's, which takes 100)."""
    return Path(study.prepare(study.load("preference"), ["dpo"], 0, directory))


def sets(directory: Path) -> list[str]:
    return [
        *(f"server.port={free_port()}", f"rl_training.checkpoint_dir={directory / 'checkpoints'}"),
        *("data.eval_every=0", "data.eval_rows=100"),  # before, and after the last step
        *("rl_training.algorithm=dpo", "rl_training.total_steps=12", "rl_training.run_name=run"),
    ]


def daemon(config: Path) -> Daemon:
    given = sets(config.parent)
    port = int(given[0].partition("=")[2])
    return Daemon(
        "mlx_parallm_train",
        "--config",
        str(config),
        *(f"--set={entry}" for entry in given),
        port=port,
    )


@pytest.mark.long
def test_dpo_learns_what_depends_on_the_prompt_and_serves_it(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    run = tmp_path / "checkpoints" / "run"
    with daemon(config) as process:
        client = process.wait_until_ready().client()
        wait_for_step(process, run, 2)
        assert client.models.list().data  # it serves while it learns
        assert process.wait() == 0, process.output
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[0]["eval_before/rewards/accuracies"] == 0.5
    assert lines[-1]["heldout_score"] == lines[-1]["eval/rewards/accuracies"] >= 0.95
    assert lines[-1]["policy_version"] == 12
    assert (run / "final" / "adapters.safetensors").is_file()
    train_here(config, *sets(tmp_path), "rl_training.total_steps=13", resume=str(run / "final"))
    assert [line["step"] for line in metrics(run)] == list(range(1, 14))
    spans = [json.loads(line) for line in (run / "spans.jsonl").read_text().splitlines()]
    trained = [span["step"] for span in spans if span["name"] == "rl.train"]
    assert trained == list(range(1, 14)), "final has no step in its name: all were cut"


def test_a_bad_row_ends_it_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "x", "chosen": "y"}) + "\n")
    with daemon(config) as process:
        assert process.wait() == 2
    assert "error: data: " in process.output
    assert "rows.jsonl:1201: column 'rejected' is missing" in process.output
    assert not (tmp_path / "checkpoints").exists()

"""A rollback asked for over HTTP while a real daemon trains."""

from pathlib import Path

import httpx
import pytest

from tests.integration.processes import metrics, train, wait_for_step, write_config


@pytest.mark.slow
@pytest.mark.long
def test_a_running_daemon_goes_back_and_serves_under_a_new_number(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=400, interval=2)
    run = tmp_path / "checkpoints" / "run"
    with train(config) as daemon:
        daemon.wait_until_ready()
        wait_for_step(daemon, run, 3)
        path = daemon.url + "/v1/training/rollback"
        refused = httpx.post(path, json={"checkpoint": "step_999999"}, timeout=60)
        assert refused.status_code == 404
        assert "There are: " in refused.json()["error"]["message"]
        done = httpx.post(path, json={"checkpoint": "latest"}, timeout=60)
        assert done.status_code == 200, done.text
        told = done.json()
        assert told["status"] == "done"
        assert told["policy_version"] > told["to_step"]
        assert httpx.get(daemon.url + "/health").json()["policy_version"] >= told["policy_version"]
        wait_for_step(daemon, run, told["step"] + 2)
        daemon.process.terminate()
        assert daemon.wait() == 0, daemon.output
    [line] = [line for line in metrics(run) if line["rolled_back_to"]]
    assert (line["step"], line["rolled_back_to"]) == (told["step"] + 1, "latest")
    assert line["policy_version"] == told["policy_version"] + 1

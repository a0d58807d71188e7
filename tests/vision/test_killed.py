"""kill -9 of a real daemon while groups with images wait: a resume trains on all of them, with their
images. And hostile images against a real server (tests/soak/hostile_images.py)."""

import json
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from mlx_parallm.rollout_store.store import RolloutStore
from scripts.server_process import free_port
from tests.images.checkpoints import save_smolvlm
from tests.integration.processes import Daemon, metrics, train
from tests.soak.hostile_images import attack
from tests.soak.kill_rollouts import read_ledger
from tests.vision.drawn import data_url, noise

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

CONFIG = """
[model]
base_path = "{directory}/model"

[server]
port = {port}
batch_size = 64

[vision]
enabled = true

[rl_training]
run_name = "run"
checkpoint_dir = "{directory}"
learning_rate = 1e-3
blocks_per_eval = 0
max_staleness = 4
batch_size = 64
total_steps = 4
checkpoint_interval = 100

[rl_training.lora]
rank = 4

[rl_training.atropos]
rollout_batch_size = 64
max_token_length = 128

[[environments]]
kind = "dataset"
data = "{directory}/rows.jsonl"
rewards = ["python:{directory}/reward.py:letters"]
group_size = 8
max_tokens = 16
heldout_fraction = 0.0
"""
REWARD = """
def letters(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""
WAITING = 4
START_S = 120


def waiting_after(daemon: Daemon, run: Path, step: int) -> set[str]:
    """Return the groups that wait, once `step` has its line and some wait."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if daemon.process.poll() is not None:
            daemon.wait()
            raise AssertionError(daemon.output)
        if len(metrics(run)) >= step:
            ledger = read_ledger(run)
            if len(ids := {name for name, state, *_ in ledger if state == "waiting"}) >= WAITING:
                return ids
        time.sleep(0.01)
    raise AssertionError("no groups wait")


def images_of(run: Path) -> dict[str, tuple[str, ...]]:
    with closing(RolloutStore(run / "rollouts.sqlite")) as store:
        groups = store.groups(sorted(store.known_ids()))
    return {group.group_id: group.rollouts[0].images for group in groups}


@pytest.mark.long
@pytest.mark.slow
def test_groups_with_images_that_wait_come_back(tmp_path: Path) -> None:
    save_smolvlm(tmp_path / "model")
    rows = [
        {"prompt": f"What is it? {number}", "images": [data_url(noise(24, 24, number))]}
        for number in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    config, run = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(CONFIG.format(directory=tmp_path, port=free_port()))
    with train(config) as daemon:
        waiting = waiting_after(daemon, run, 1)
        daemon.send(signal.SIGKILL)
        daemon.wait()
    kept = images_of(run)  # nothing is saved yet: what was trained on waits again, too
    assert waiting <= kept.keys() and all(len(images) == 1 for images in kept.values())
    with train(config, "--resume", "auto") as daemon:
        code = daemon.wait(240)
    assert code == 0, daemon.output
    after = {name: (state, reason) for name, state, _, reason in read_ledger(run)}
    fates = {after[name] for name in kept}
    assert fates <= {("taken", None), ("dropped", "no variance")}, fates
    assert {name: images_of(run)[name] for name in kept} == kept
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert sum(line["tokens"] for line in lines) > 0


@pytest.mark.long
@pytest.mark.slow
def test_hostile_images_are_refused_and_the_server_lives() -> None:
    outcome = attack("builtin:tiny-vision", 500, limit_s=60.0)
    assert outcome.wrong == []
    assert sum(outcome.statuses.values()) == 500 and outcome.good == 20
    before, most = outcome.memory_mb
    assert most < before + 300

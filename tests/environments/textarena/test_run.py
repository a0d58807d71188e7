"""A real run of self-play: the opponents are versions of the policy that is trained."""

import json

import pytest

from tests.integration.in_process import train_here

pytest.importorskip("textarena")
pytestmark = pytest.mark.slow

RUN = r"""
[model]
base_path = "builtin:tiny"

[server]
port = 0
keep_versions = 3
batch_size = 4

[rl_training]
total_steps = 2
run_name = "run"
batch_size = 4
blocks_per_eval = 0

[rl_training.atropos]
rollout_batch_size = 4
max_token_length = 512

[[environments]]
kind = "textarena"
group_size = 2
max_tokens = 8

[environments.options]
id = "IteratedTwoThirdsAverage-v0"
make = { num_rounds = 1 }
opponent = ["policy@-1", "base"]
regex = '\[[1-9][0-9]\]'
"""


def test_a_run_plays_against_its_own_versions(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    train_here(tmp_path / "run.toml", f"rl_training.checkpoint_dir={tmp_path}")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert any("player_0/won" in name or "player_1/won" in name for name in json.loads(lines[-1]))

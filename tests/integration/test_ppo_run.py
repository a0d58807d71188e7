"""PPO in the daemon, on the built-in model: the value head learns what rewards are to be expected."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.environments.kinds.tasks import make_problem
from tests.integration.processes import free_port, metrics, train

pytestmark = pytest.mark.slow

REWARD = """
def by_kind(prompts, completions, kind, **columns):
    return [float(name == "reverse") for name in kind]
"""
CONFIG = """
[server]
port = {port}

[rl_training]
algorithm = "ppo"
learning_rate = 1e-3
batch_size = 64
blocks_per_eval = 0
total_steps = 12
checkpoint_dir = "{directory}"
run_name = "run"
max_staleness = 0

[rl_training.ppo]
value_learning_rate = 0.3

[rl_training.atropos]
rollout_batch_size = 128
max_token_length = 64

[[environments]]
kind = "dataset"
data = "{directory}/rows.jsonl"
rewards = ["python:{directory}/score.py:by_kind"]
group_size = 2
max_tokens = 8
"""


@pytest.mark.long
def test_values_are_learnt_from_groups_of_equal_rewards(tmp_path: Path) -> None:
    """The reward is the prompt's: 1 for words to reverse, 0 for words to sort. No group has a variance, and what is to
    be expected can be read off the prompt alone."""
    problems = [(kind, make_problem(kind, n, seed=1, split="train")) for n in range(60) for kind in ("reverse", "sort")]
    rows = {problem.key: {"prompt": problem.messages[0]["content"], "kind": kind} for kind, problem in problems}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows.values())))
    (tmp_path / "score.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(CONFIG.format(port=free_port(), directory=tmp_path))
    with train(tmp_path / "run.toml") as daemon:
        assert daemon.wait() == 0, daemon.output
    lines = metrics(tmp_path / "run")
    assert len(lines) == 12
    losses = [line["value_loss"] for line in lines]
    assert losses[0] > 0.1
    assert np.mean(losses[-3:]) < 0.6 * losses[0]
    assert np.mean([line["explained_variance"] for line in lines[-3:]]) > 0.15
    assert max(line["logprob_diff_max"] for line in lines) < 1e-4
    assert (tmp_path / "run" / "final" / "value_head.safetensors").exists()

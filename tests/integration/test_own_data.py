"""One command on an own model, own rows and own functions; and an environment, advantage and loss of the user's."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mlx_parallm.environments.kinds.tasks import make_problem
from mlx_parallm.models.loading import resolve_model_path
from tests.integration.processes import Daemon, metrics, train, write_config

pytestmark = pytest.mark.slow

SCORE = """
def correct(prompts, completions, answer, **columns):
    return [1.0 if text.strip() == right else 0.0 for text, right in zip(completions, answer)]

async def tidy(completions, log_metric, **columns):
    log_metric("letters", sum(map(len, completions)) / len(completions))
    return [0.0 if text.strip() else -1.0 for text in completions]

def broken(completions, **columns):
    return [0.0]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory as a user has it: model/, rows.jsonl, score.py."""
    shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model")
    problems = {p.key: p for p in (make_problem("reverse", n, seed=1, split="train") for n in range(120))}
    lines = [json.dumps({"prompt": p.messages[0]["content"], "answer": p.answer}) for p in problems.values()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "score.py").write_text(SCORE)
    return tmp_path


def command(own: Path, *rewards: str, steps: int) -> Daemon:
    flags = ["--model", str(own / "model"), "--data", str(own / "rows.jsonl")]
    flags += [part for name in rewards for part in ("--reward", f"{own / 'score.py'}:{name}")]
    sets = (f"rl_training.total_steps={steps}", f"rl_training.checkpoint_dir={own / 'checkpoints'}")
    return Daemon("mlx_parallm_train", *flags, *(f"--set={entry}" for entry in sets), port=0)


@pytest.mark.long
def test_model_data_and_reward_are_all_that_is_needed(own: Path) -> None:
    with command(own, "correct", "tidy", steps=16) as daemon:
        assert daemon.wait() == 0, daemon.output
    [run] = (own / "checkpoints").glob("rows-*")
    assert f"{run / 'config.toml'}" in daemon.output
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert all(0 <= line["rewards/correct/mean"] <= 1 for line in lines)
    assert all(line["reward_mean"] <= line["rewards/correct/mean"] + 1e-9 for line in lines)
    assert all(line["metrics/letters/mean"] > 0 for line in lines)
    assert "parts" not in lines[0]
    correct = [line["rewards/correct/mean"] for line in lines]
    assert sum(correct[-4:]) > sum(correct[:4])
    assert re.search(r"^rows(?: \(mean reward\))?: [-\d.]+ -> [-\d.]+ \(", daemon.output, re.MULTILINE)
    with Daemon("mlx_parallm_train", "--resume", str(run), "--set=rl_training.total_steps=17", port=0) as daemon:
        assert daemon.wait() == 0, daemon.output
    assert metrics(run)[-1]["step"] == 17


@pytest.mark.long
def test_a_function_that_never_scores_ends_the_run_and_is_named(own: Path) -> None:
    with command(own, "broken", steps=5) as daemon:
        assert daemon.wait() == 2, daemon.output
    assert "groups in a row failed, the last one: reward: broken returned 1 scores for 8 completions" in daemon.output


OWN = """
# mine.py
import mlx.core as mx
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.losses.policy_gradient import policy_loss
from mlx_parallm.losses.types import LossOutputs
from mlx_parallm.rewards.base import verifier
from mlx_parallm.rl_training.config import RLTrainingConfig
from mlx_parallm.rl_training.step.algorithms import loss_options

class Letters(EnvironmentSource):
    def task(self, index, split="train"):
        question = f"Sort: {'zyx'[index % 3]}ab"
        messages = self.open_with(({"role": "user", "content": question},))
        return Task(question, messages, verifier(lambda text: text.count("a")))

def best(rewards):
    spread = max(rewards) - min(rewards)
    return None if spread == 0 else [(r - sum(rewards) / len(rewards)) / spread for r in rewards]

def loss(inputs):
    outputs = policy_loss(inputs, loss_options(RLTrainingConfig()))
    return LossOutputs(outputs.loss, {**outputs.metrics, "my_loss": outputs.loss})
"""


@pytest.mark.long
def test_environment_advantage_and_loss_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    config = write_config(
        tmp_path, steps=2, training='advantage = "python:mine.py:best"\nloss = "python:mine.py:loss"\n'
    )
    text = config.read_text()
    config.write_text(text[: text.index("[[environments]]")] + '[[environments]]\nkind = "python:mine.py:Letters"\n')
    with train(config) as daemon:
        assert daemon.wait() == 0, daemon.output
    lines = metrics(tmp_path / "checkpoints" / "run")
    assert [set(line["reward_by_environment"]) for line in lines] == [{"Letters"}] * 2
    assert all(line["my_loss"] == pytest.approx(line["loss"]) for line in lines)
    (tmp_path / "mine.py").write_text(OWN.replace("def best(rewards)", "def best(rewards, more)"))
    with train(config, "--set", "rl_training.run_name=other", "--set", "model.base_path=/no/such/model") as daemon:
        assert daemon.wait() == 2
    assert (
        "best takes (rewards, more), but it is called with (rewards)" in daemon.output
    )  # before the model is looked at
    assert not (tmp_path / "checkpoints" / "other").exists()

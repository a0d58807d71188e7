"""Eight lines with the openai client train the tiny model: examples/rewards_by_id against a real
daemon."""

import subprocess
import sys
from pathlib import Path
from statistics import fmean

import httpx
import openai
import pytest

from mlx_parallm.rollout_store.store import RolloutStore
from tests.integration.processes import metrics, train_example

EXAMPLE = Path(__file__).parents[2] / "examples" / "rewards_by_id"
LETTERS = EXAMPLE / "letters.toml"
pytestmark = pytest.mark.slow


@pytest.mark.long
@pytest.mark.timeout(300)
def test_eight_lines_of_the_openai_client_train_the_model(tmp_path: Path) -> None:
    with train_example(LETTERS, tmp_path, **{"rl_training.total_steps": 18}) as daemon:
        daemon.wait_until_ready()
        script = tmp_path / "train.py"
        script.write_text(
            (EXAMPLE / "train.py").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{daemon.port}")
        )
        subprocess.run([sys.executable, str(script)], check=True, timeout=240)
        assert daemon.wait() == 0, daemon.output
    lines = metrics(tmp_path / "run")
    rewards = [line["reward_mean"] for line in lines]
    assert fmean(rewards[:3]) <= 0.5, rewards
    assert fmean(rewards[-5:]) >= fmean(rewards[:3]) + 0.15, rewards
    assert all(line["reward_by_environment"] == {"rewards": line["reward_mean"]} for line in lines)


def test_who_may_be_rewarded_and_what_a_kill_leaves(tmp_path: Path) -> None:
    """The policy and its other names; not the base. A rewarded group survives kill -9, and its
    id is known after it."""
    ask = [{"role": "user", "content": "Reverse: abcd"}]
    with train_example(LETTERS, tmp_path) as daemon, daemon.wait_until_ready().client() as client:

        def answer(model: str) -> str:
            messages: list = ask
            return client.chat.completions.create(
                model=model, messages=messages, n=2, max_tokens=8
            ).id

        def reward(response_id: str) -> None:
            client.post("/rewards", body={"id": response_id, "rewards": [0, 1]}, cast_to=object)

        rewarded = [answer(model) for model in ("default", "policy", "builtin:tiny")]
        for response_id in rewarded:
            reward(response_id)
        for model in ("builtin:tiny:base", "policy@0"):
            with pytest.raises(openai.ConflictError, match="from another model"):
                reward(answer(model))
        daemon.process.kill()
        daemon.wait()
    store = RolloutStore(tmp_path / "run" / "rollouts.sqlite")
    assert {group.group_id for group in store.waiting()} == {
        f"{response_id}-0" for response_id in rewarded
    }
    store.close()
    with train_example(LETTERS, tmp_path, **{"rl_training.resume": "auto"}) as daemon:
        daemon.wait_until_ready()
        again = httpx.post(f"{daemon.url}/v1/rewards", json={"id": rewarded[0], "rewards": [0, 1]})
        assert again.status_code == 409 and "has its rewards already" in again.text

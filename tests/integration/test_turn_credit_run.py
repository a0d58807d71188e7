"""A whole run in which each turn has its own advantage."""

from contextlib import closing
from pathlib import Path

import pytest

from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.losses.advantages import token_advantages
from mlx_parallm.rl_training.options import configured_shaping, make_algorithm
from mlx_parallm.rl_training.step.algorithms import shaping_of
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.runs.run import Run
from tests.integration.in_process import train_here
from tests.integration.processes import metrics

CONFIG = """
[model]
base_path = "builtin:tiny"

[server]
port = 0
batch_size = 32

[rl_training]
total_steps = 3
learning_rate = 2e-3
batch_size = 16
blocks_per_eval = 0
max_staleness = 0
run_name = "run"
credit = "turn"
turn_gamma = 0.9
seed = 1

[rl_training.lora]
rank = 4

[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 256

[[environments]]
kind = "python:{module}:ThreeSums"
group_size = 8
max_tokens = 4
"""


class ThreeSums(BaseEnvironment):
    """Three sums, one a turn; each right one is worth a third."""

    rewards_turns = True

    def reset(self, seed=0):
        numbers = [((seed >> shift) % 10, (seed >> (shift + 4)) % 10) for shift in (0, 8, 16)]
        first = self.question(numbers, 0)
        return State(prompt=[first], metadata={"numbers": numbers})

    @staticmethod
    def question(numbers, turn):
        a, b = numbers[turn]
        return {"role": "user", "content": f"Sum: {a}+{b}"}

    def update_state(self, state, response):
        a, b = state.metadata["numbers"][state.step_count]
        state = super().update_state(state, response)
        state.turn_reward = float(response.strip() == str(a + b)) / 3
        state.done = state.step_count == 3
        if not state.done:
            asked = self.question(state.metadata["numbers"], state.step_count)
            state.prompt = [*state.prompt, {"role": "assistant", "content": response}, asked]
        return state


def test_three_turns_with_credit_for_each(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.replace("{module}", __name__))
    train_here(config, f'rl_training.checkpoint_dir="{tmp_path}"')
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {line["sequences_with_episode_credit"] for line in lines} == {0}
    assert all(line["tokens"] > 0 and line["grad_norm"] > 0 for line in lines)
    training = Run(tmp_path / "run").load_config().rl_training
    algorithm = make_algorithm(training)
    shaping = shaping_of(algorithm, configured_shaping(training))
    assert shaping.turn_gamma == 0.9
    with closing(RolloutStore(tmp_path / "run" / "rollouts.sqlite")) as store:
        groups = store.groups(sorted(store.known_ids()))
    for group in groups:
        for rollout in group.rollouts:
            assert len(rollout.turn_rewards) == sum(len(part.turns) for part in rollout.segments)
            assert rollout.reward == pytest.approx(sum(rollout.turn_rewards))
    rows = [token_advantages(group, algorithm.advantages, shaping) for group in groups]
    # some episode has turns of different credit
    assert any(len({round(v, 6) for v in row}) > 1 for rows_G in rows for row in rows_G or ())
